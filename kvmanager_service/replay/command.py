"""The command: read a trace, run it, say what came of it.

Station: called by `__main__` with its arguments; returns the exit status that this says.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvmanager_service.core.fair_queue import FairWeights
from kvmanager_service.core.kv_cache import KVCache, make_kv_cache
from kvmanager_service.core.kv_groups import KVGroup
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.replay.cost_model import TERMS, CostModel, CostModelError, read_cost_model
from kvmanager_service.replay.group_reads import GroupReads
from kvmanager_service.replay.kv_geometry import (
    DEFAULT_BLOCK_SIZE,
    MAX_BLOCKS,
    GroupShape,
    KvCacheFileError,
    describe_groups,
    make_groups,
    read_kv_cache,
)
from kvmanager_service.replay.one_at_a_time import replay_one_at_a_time
from kvmanager_service.replay.options import parse
from kvmanager_service.replay.plot import PlotLibraryError, draw, require_library
from kvmanager_service.replay.report import Measurements, summarise, table, tenants_table
from kvmanager_service.replay.tenants import has_tenants, isolate, spread
from kvmanager_service.replay.timed import TimedReplay
from kvmanager_service.replay.trace import MOONCAKE_BLOCK, TraceError, TraceRequest, read_trace
from kvmanager_service.visible import visible

__all__ = ["main"]

_PROGRESS_STRIDE = 50
_REASONS: dict[type[Exception], str] = {
    TraceError: "BAD_TRACE",
    CostModelError: "BAD_COST_MODEL",
    KvCacheFileError: "BAD_KV_CACHE",
}
"""What each error of a file is called."""


class _PoolTooLargeError(Exception):
    """As many blocks as a trace could use are more than a replay has.

    Args:
        num_blocks: how many they are.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(
            f"--num-blocks 0: expected a trace that could use at most {MAX_BLOCKS} blocks, got {num_blocks}; give"
            " --num-blocks, a larger --block-size or a --limit"
        )


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    try:
        return _replay(options)
    except (TraceError, CostModelError, KvCacheFileError) as error:
        line = {"line": error.line} if isinstance(error, TraceError) else {}
        place = {"path": error.path, **line, "expected": error.expected, "got": error.got}
        return _fail(options, _REASONS[type(error)], str(error), place)
    except PlotLibraryError as error:
        return _fail(options, "NO_PLOT_LIBRARY", str(error), {})
    except _PoolTooLargeError as error:
        return _fail(options, "POOL_TOO_LARGE", str(error), {})
    except OSError as error:
        place = {"path": str(error.filename)}
        return _fail(options, "BAD_FILE", f"{error.filename}: {error.strerror}; name another file", place)
    except KeyboardInterrupt:
        _fail(options, "INTERRUPTED", "interrupted", {})
        return 130


def _fail(options: argparse.Namespace, reason: str, message: str, metadata: dict[str, Any]) -> int:
    if options.json:
        message = json.dumps({"error": {"reason": reason, "message": message, "metadata": metadata}})
        sys.stderr.write(f"{message}\n")
    else:
        sys.stderr.write(f"kvplane replay: {visible(message)}\n")
    return 1


def _replay(options: argparse.Namespace) -> int:
    _settle_cost(options)
    _settle_pool(options)
    if options.plot is not None:
        require_library()  # before the work, which may take minutes
    trace = _read(options)
    groups = make_groups(options.kv_groups, options.block_size)
    if options.num_blocks == 0:
        options.num_blocks = _most_blocks(trace, groups)
        if options.num_blocks > MAX_BLOCKS:
            raise _PoolTooLargeError(options.num_blocks)
    kv = make_kv_cache(
        options.num_blocks,
        groups,
        longest_chunk=options.long_prefill_token_threshold or options.max_num_batched_tokens,
        eviction_policy=options.eviction_policy,
    )
    gc.freeze()  # trace and pool stay: no collection needs to walk them
    weights = FairWeights(options.fair_input_weight, options.fair_output_weight, options.fair_cached_weight)
    found = _run(options, trace, kv, weights)
    document = summarise(found, _settings(options), weights)
    if options.plot is not None:
        title = (
            f"{options.trace.name}: {options.num_blocks:,} blocks of {options.block_size}, {options.eviction_policy}"
        )
        num_usable_blocks = kv.pool.num_usable_blocks
        draw(found.samples, options.plot, title=title, num_usable_blocks=num_usable_blocks, has_clock=found.has_clock)
    if options.json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(table(document))
        by_tenant = tenants_table(document)
        if by_tenant is not None:
            console.print()
            console.print(by_tenant)
    return 0


def _read(options: argparse.Namespace) -> list[TraceRequest]:
    trace = read_trace(options.trace, options.format, options.limit)
    if options.whole_blocks:
        trace = [traced.with_whole_runs(MOONCAKE_BLOCK) for traced in trace]
    if options.tenants is not None:
        if has_tenants(trace):
            named = next(traced for traced in trace if traced.tenant)
            line = int(named.request_id.removeprefix("line-"))
            expected = "no tenant, since --tenants gives requests theirs"
            raise TraceError(str(options.trace), line, expected, repr(named.tenant))
        trace = spread(trace, options.tenants)
    return isolate(trace) if options.isolate_tenants else trace


def _run(options: argparse.Namespace, trace: Sequence[TraceRequest], kv: KVCache, weights: FairWeights) -> Measurements:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=len(trace))

        def on_done(num_done: int) -> None:
            if num_done % _PROGRESS_STRIDE == 0 or num_done == len(trace):
                progress.update(task, completed=num_done)

        if options.one_at_a_time:
            return replay_one_at_a_time(trace, kv, on_done)
        config = SchedulerConfig(
            policy=options.policy,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_waiting=len(trace),
            long_prefill_token_threshold=options.long_prefill_token_threshold,
            max_outstanding=2 if options.queue_ahead else 1,
            preemption_mode=options.preemption_mode,
            fair_weights=weights,
        )
        scheduler = Scheduler(config, kv, options.num_host_blocks)
        reads = GroupReads.of(kv, [group.num_layers for group in options.kv_groups])
        return TimedReplay(trace, scheduler, _cost(options), options.speedup, on_done, reads=reads).run()


def _settle_pool(options: argparse.Namespace) -> None:
    """Let the pool's sizes be their flags' values, or else the file's, or else the defaults."""
    known = None if options.kv_cache is None else read_kv_cache(options.kv_cache)
    if options.num_blocks is None:
        assert known is not None  # `parse` saw to it
        options.num_blocks = known.num_blocks
    if options.block_size is None:
        options.block_size = DEFAULT_BLOCK_SIZE if known is None else known.block_size
    if options.kv_groups is None:
        options.kv_groups = (GroupShape("full"),) if known is None else known.groups


def _settle_cost(options: argparse.Namespace) -> None:
    """Let each term be its flag's value, or else the file's, or else the default."""
    usual = CostModel() if options.cost_model is None else read_cost_model(options.cost_model)
    for name in TERMS:
        if getattr(options, name) is None:
            setattr(options, name, getattr(usual, name))


def _cost(options: argparse.Namespace) -> CostModel:
    return CostModel(**{name: getattr(options, name) for name in (*TERMS, "copy_token_us")})


def _most_blocks(trace: Sequence[TraceRequest], groups: Sequence[KVGroup]) -> int:
    """So many that nothing is ever evicted, the null block included."""
    return 2 + sum(
        group.num_blocks_for(traced.prompt_length + traced.output_length) for traced in trace for group in groups
    )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    shown = {name: value for name, value in vars(options).items() if name not in ("json", "plot")}
    files = {name: None if shown[name] is None else str(shown[name]) for name in ("trace", "cost_model", "kv_cache")}
    return shown | files | {"kv_groups": describe_groups(options.kv_groups)}
