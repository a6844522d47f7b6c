"""What a replay found: numbers, as a document and as a table.

Station: the runners fill a `Measurements`; `summarise` makes the document of it that `command` prints.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvmanager_service.core.fair_queue import DEFAULT_WEIGHTS, FairWeights
from kvmanager_service.visible import visible

__all__ = ["Measurements", "Sample", "TenantMeasurements", "percentiles", "summarise", "table", "tenants_table"]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Sample:
    """How things stood when a request ended; `plot` draws them.

    Attributes:
        time: seconds since the trace began; in a replay without a clock, requests done.
        hit_tokens, prompt_tokens: so far.
        waiting, running: requests.
        blocks_in_use: blocks that tables reference.
    """

    time: float
    hit_tokens: int
    prompt_tokens: int
    waiting: int
    running: int
    blocks_in_use: int


def _floats() -> array[float]:
    return array("d")


@dataclass(slots=True)
class TenantMeasurements:
    """What of it was one tenant's; names as in `Measurements`."""

    num_requests: int = 0
    refused: int = 0
    failed: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    queue_times: array[float] = field(default_factory=_floats)
    first_token_times: array[float] = field(default_factory=_floats)
    token_gaps: array[float] = field(default_factory=_floats)


@dataclass(slots=True)
class Measurements:
    """Everything counted on the way. Times in seconds.

    Attributes:
        by_tenant: whether tenants are told apart.
        hit_blocks, prompt_blocks: pieces of prompts that a hit is a whole number of, whatever the number of KV groups.
        refused: requests that could never fit the pool.
        failed: those that outgrew it while they ran.
        queue_seconds: Σ over time of the queue's length, requests × seconds.
        queue_times: from arrival to first admission.
        first_token_times: from arrival to the first output token (TTFT).
        token_gaps: between output tokens of one request (ITL), preemptions included.
    """

    has_clock: bool
    by_tenant: bool = False
    num_requests: int = 0
    refused: int = 0
    failed: int = 0
    hit_blocks: int = 0
    prompt_blocks: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    tokens_computed: int = 0
    steps: int = 0
    output_tokens: int = 0
    makespan: float = 0.0
    max_queue: int = 0
    queue_seconds: float = 0.0
    queue_times: array[float] = field(default_factory=_floats)
    first_token_times: array[float] = field(default_factory=_floats)
    token_gaps: array[float] = field(default_factory=_floats)
    samples: list[Sample] = field(default_factory=list)
    tenants: dict[str, TenantMeasurements] = field(default_factory=dict)

    def tenant(self, name: str) -> TenantMeasurements | None:
        """One tenant's, made where there are none yet; None where tenants are not told apart."""
        return self.tenants.setdefault(name, TenantMeasurements()) if self.by_tenant else None

    def note_refusal(self, tenant: str) -> None:
        """A request can never fit the pool."""
        self.refused += 1
        mine = self.tenant(tenant)
        if mine is not None:
            mine.refused += 1

    def note_prompt(self, tenant: str, num_hit: int, num_tokens: int, block_size: int) -> None:
        """A request that was admitted has ended: its prompt's tokens, and how many of them were found."""
        self.num_requests += 1
        self.hit_blocks += num_hit // block_size
        self.prompt_blocks += -(-num_tokens // block_size)
        mine = self.tenant(tenant)
        if mine is not None:
            mine.num_requests += 1
            mine.hit_tokens += num_hit
            mine.prompt_tokens += num_tokens


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, nearest-rank percentiles and maximum; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{share}": ordered[math.ceil(share / 100 * len(ordered)) - 1] for share in PERCENTILES}
    return {"mean": math.fsum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def summarise(found: Measurements, settings: dict[str, Any], weights: FairWeights = DEFAULT_WEIGHTS) -> dict[str, Any]:
    """The document `--json` prints. What has no clock has no times; tenants are in it where any request names one.

    Args:
        found: what was measured.
        settings: of the replay.
        weights: what a token counts as service to its tenant.
    """
    document: dict[str, Any] = {
        "settings": settings,
        "requests": {"replayed": found.num_requests, "refused": found.refused, "failed": found.failed},
        "prefix_cache": {
            "block_hit_ratio": _share(found.hit_blocks, found.prompt_blocks),
            "token_hit_ratio": _share(found.hit_tokens, found.prompt_tokens),
            "hit_blocks": found.hit_blocks,
            "prompt_blocks": found.prompt_blocks,
            "hit_tokens": found.hit_tokens,
            "prompt_tokens": found.prompt_tokens,
            "evicted_blocks": found.evictions,
        },
    }
    if found.has_clock:
        document |= {
            "makespan_s": found.makespan,
            "steps": found.steps,
            "preemptions": found.preemptions,
            "swapped_out": found.swapped_out,
            "swapped_in": found.swapped_in,
            "tokens_computed": found.tokens_computed,
            "output_tokens": found.output_tokens,
            "output_tokens_per_s": _share(found.output_tokens, found.makespan),
            "queue_length": {"mean": _share(found.queue_seconds, found.makespan), "max": found.max_queue},
            "queue_time_s": percentiles(found.queue_times),
            "ttft_s": percentiles(found.first_token_times),
            "itl_s": percentiles(found.token_gaps),
        }
    if found.by_tenant:
        document["tenants"] = {
            name: _tenant(mine, weights, has_clock=found.has_clock) for name, mine in sorted(found.tenants.items())
        }
    return document


def _tenant(mine: TenantMeasurements, weights: FairWeights, *, has_clock: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "requests": {"replayed": mine.num_requests, "refused": mine.refused, "failed": mine.failed},
        "token_hit_ratio": _share(mine.hit_tokens, mine.prompt_tokens),
        "hit_tokens": mine.hit_tokens,
        "prompt_tokens": mine.prompt_tokens,
    }
    if has_clock:
        computed = mine.prompt_tokens - mine.hit_tokens
        service = weights.input * computed + weights.cached * mine.hit_tokens + weights.output * mine.output_tokens
        document |= {
            "output_tokens": mine.output_tokens,
            "service": service,
            "queue_time_s": percentiles(mine.queue_times),
            "ttft_s": percentiles(mine.first_token_times),
            "itl_s": percentiles(mine.token_gaps),
        }
    return document


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def table(document: dict[str, Any]) -> Table:
    """The document for people."""
    shown = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _rows(document):
        shown.add_row(f"[dim]{name}[/dim]", value)
    return shown


def _rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    settings, requests, cache = document["settings"], document["requests"], document["prefix_cache"]
    pool = f"{settings['num_blocks']:,} blocks of {settings['block_size']} tokens, {settings['eviction_policy']}"
    groups = settings["kv_groups"]
    rows = [
        ("pool", pool),
        *([("groups", groups)] if groups != "full" else []),
        ("requests", ", ".join(f"{count:,} {what}" for what, count in requests.items() if count or what == "replayed")),
        *((f"hit ratio, {unit}s", _ratio(cache, unit)) for unit in ("block", "token")),
        ("evicted", f"{cache['evicted_blocks']:,} blocks"),
    ]
    if "makespan_s" in document:
        queue = document["queue_length"]
        rows += [
            ("makespan", f"{document['makespan_s']:,.1f} s, {document['steps']:,} steps"),
            ("output", f"{document['output_tokens']:,} tokens, {document['output_tokens_per_s']:,.1f} a second"),
            ("preemptions", f"{document['preemptions']:,}, {document['swapped_out']:,} of them swapped out"),
            ("queue length", f"mean {queue['mean']:,.1f}, max {queue['max']:,}"),
            *((label, _spread(document[name])) for label, name in _TIMES),
        ]
    return rows


def _ratio(cache: dict[str, Any], unit: str) -> str:
    return f"{cache[f'{unit}_hit_ratio']:.4f}  ({cache[f'hit_{unit}s']:,} of {cache[f'prompt_{unit}s']:,})"


_TIMES = (("queue time", "queue_time_s"), ("time to first token", "ttft_s"), ("time between tokens", "itl_s"))


def _spread(values: dict[str, float] | None) -> str:
    if values is None:
        return "none"
    return ", ".join(f"{name} {value * 1000:,.1f}" for name, value in values.items()) + " ms"


_TENANT_COLUMNS = ("tenant", "requests", "hits", "prompt", "output", "ttft p50", "ttft p99", "itl p99")
_WITHOUT_CLOCK = 4


def tenants_table(document: dict[str, Any]) -> Table | None:
    """A line for each tenant, times in milliseconds; None where there are not several."""
    tenants = document.get("tenants", {})
    if len(tenants) < 2:
        return None
    has_clock = "makespan_s" in document
    shown = Table(box=None, padding=(0, 1, 0, 0))
    for index, name in enumerate(_TENANT_COLUMNS[: None if has_clock else _WITHOUT_CLOCK]):
        shown.add_column(f"[dim]{name}[/dim]", justify="right" if index else "left", no_wrap=index > 0)
    for name, mine in tenants.items():
        shown.add_row(*_tenant_cells(name, mine, has_clock=has_clock))
    return shown


def _tenant_cells(name: str, mine: dict[str, Any], *, has_clock: bool) -> Iterable[str]:
    yield escape(visible(name)) or "(none)"
    yield f"{mine['requests']['replayed']:,}"
    yield f"{mine['token_hit_ratio']:.4f}"
    yield f"{mine['prompt_tokens']:,}"
    if has_clock:
        yield f"{mine['output_tokens']:,}"
        for values, percentile in ((mine["ttft_s"], "p50"), (mine["ttft_s"], "p99"), (mine["itl_s"], "p99")):
            yield "none" if values is None else f"{values[percentile] * 1000:,.1f}"
