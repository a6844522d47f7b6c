"""The command line of a replay.

Station: read by `command`. Names and defaults are those of the manager's flags where a replay has the same thing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES
from kvmanager_service.core.fair_queue import DEFAULT_WEIGHTS
from kvmanager_service.core.policies import POLICIES
from kvmanager_service.core.scheduler_config import PREEMPTION_MODES, RECOMPUTE, SchedulerConfig
from kvmanager_service.replay.cost_model import TERMS, CostModel
from kvmanager_service.replay.kv_geometry import DEFAULT_BLOCK_SIZE, MAX_BLOCKS, MAX_GROUPS, GroupShape, read_groups
from kvmanager_service.replay.plot import SUFFIXES
from kvmanager_service.replay.tenants import MAX_TENANTS, read_shares
from kvmanager_service.replay.trace import FORMATS, MOONCAKE_BLOCK

__all__ = ["parse"]

_DESCRIPTION = """\
Replay a trace of requests through KVPlane's own scheduler and block pool, on a
simulated clock: no model, no GPU, and seconds for what took an hour. Shows hit
ratios, queues, preemptions and latencies, so that cache sizes, eviction
policies and limits can be compared before anything is bought or restarted."""

_EPILOG = """\
Examples:
  kvplane replay mooncake.jsonl --num-blocks 30000 --block-size 512
  kvplane replay mooncake.jsonl --num-blocks 10001 --block-size 512 \\
    --one-at-a-time --whole-blocks --eviction-policy lfu
  kvplane replay azure.csv --num-blocks 29696 --speedup 4 --plot replay.svg
  kvplane replay azure.csv --num-blocks 8000 --tenants 3,1 --policy fair
  kvplane calibrate localhost:50061 -o cost.json
  kvplane replay azure.csv --num-blocks 8000 --cost-model cost.json
  kvplane plan config.json --memory 80GiB --json |
    kvplane replay azure.csv --kv-cache -

Exit codes: 0 done, 1 the trace or a file can not be used, 2 wrong usage, 130
interrupted."""

_MAX_INT32 = (1 << 31) - 1
_TERM_HELP = (
    "any step: launches, reading the weights",
    "each token of a row with several",
    "each row with one token",
    "each token of K and V that a row reads",
    "each pair of a token of a row with several and one it attends to",
)


def _number(kind: Callable[[str], float], least: float, what: str, most: float = math.inf) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or math.isinf(value):
            and_most = "" if math.isinf(most) else f" and at most {most:.0f}"
            raise argparse.ArgumentTypeError(f"expected {what} of at least {least:g}{and_most}, got {text!r}")
        return value

    return read


def _count(least: int, most: int = _MAX_INT32) -> Callable[[str], float]:
    return _number(int, least, "an integer", most)


def _microseconds(text: str) -> float:
    return _number(float, 0, "a number")(text)


def _speedup(text: str) -> float:
    return _number(float, 1e-6, "a number")(text)


def _weight(text: str) -> float:
    return _number(float, 0, "a number")(text)


def _groups(text: str) -> tuple[GroupShape, ...]:
    try:
        return read_groups(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected up to {MAX_GROUPS} groups of full, window:N, chunk:N, state or state:N, such as"
            f" full,5xwindow:1024, those that attend with @B for blocks of B tokens, got {text!r}"
        ) from None


def _shares(text: str) -> tuple[int, ...]:
    try:
        return read_shares(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected 2 to {MAX_TENANTS} shares of at least 1, such as 3,1, got {text!r}"
        ) from None


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"expected a file that ends with {' or '.join(SUFFIXES)}, got {text!r}")
    return path


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the arguments after the program's name. Raises SystemExit(2) for wrong ones, SystemExit(0) for --help."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.num_blocks is None and options.kv_cache is None:
        parser.error("expected --num-blocks, or --kv-cache to take them from, got neither")
    if options.num_blocks == 1:
        parser.error("--num-blocks: expected 0, or at least 2 (one of them is the null block), got 1")
    if options.max_num_seqs > options.max_num_batched_tokens:
        parser.error(
            f"--max-num-seqs: expected at most --max-num-batched-tokens ({options.max_num_batched_tokens}), since each"
            f" running request computes at least one token a step; got {options.max_num_seqs}"
        )
    if options.preemption_mode != RECOMPUTE and not options.num_host_blocks:
        parser.error(
            f"--num-host-blocks: expected at least 1 to swap to (--preemption-mode {options.preemption_mode}), got 0"
        )
    for name in ("input", "output"):
        if not getattr(options, f"fair_{name}_weight"):
            parser.error(f"--fair-{name}-weight: expected a number above 0, got 0")
    if options.fair_cached_weight > options.fair_input_weight:
        parser.error(
            f"--fair-cached-weight: expected at most --fair-input-weight ({options.fair_input_weight:g}), since a token"
            f" that is found costs no more than one that is computed; got {options.fair_cached_weight:g}"
        )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvplane replay",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the trace's file")
    parser.add_argument(
        "--format", choices=["auto", *FORMATS], default="auto", help="of the trace; default: %(default)s"
    )
    parser.add_argument("--limit", type=_count(0), default=0, help="most requests read; default: 0, all")
    _add_pool(parser)
    _add_order_and_limits(parser)
    _add_costs(parser)
    _add_output(parser)
    return parser


def _add_pool(parser: argparse.ArgumentParser) -> None:
    pool = parser.add_argument_group("pool")
    pool.add_argument(
        "--num-blocks", type=_count(0, MAX_BLOCKS),
        help=f"blocks, the null block included, {MAX_BLOCKS} at most; 0: as many as could be used; default: those of"
        " --kv-cache",
    )  # fmt: skip
    pool.add_argument(
        "--block-size", type=_count(1),
        help=f"tokens per block; default: those of --kv-cache, or {DEFAULT_BLOCK_SIZE}",
    )  # fmt: skip
    pool.add_argument(
        "--kv-groups", type=_groups, metavar="GROUPS",
        help="the model's KV groups, each with tables of its own: full attention, a sliding window or a local chunk of"
        " N tokens, a state with a checkpoint every N, or every block; such as full,5xwindow:1024,state:512; with @B,"
        " as in window:1024@32, blocks of that group have B tokens; default: those of --kv-cache, or full",
    )  # fmt: skip
    pool.add_argument(
        "--kv-cache", type=Path, metavar="FILE",
        help="blocks, their size and KV groups, as `kvplane plan --json` or `kvplane calibrate -o` wrote them; -: from"
        " standard input; a flag above wins over the file",
    )  # fmt: skip
    pool.add_argument(
        "--eviction-policy", choices=[*EVICTION_POLICIES], default=DEFAULT_EVICTION_POLICY,
        help="which cached block gives way first; default: %(default)s",
    )  # fmt: skip
    pool.add_argument(
        "--num-host-blocks", type=_count(0, MAX_BLOCKS), default=0,
        help="blocks in host memory to swap to; default: %(default)s",
    )  # fmt: skip
    pool.add_argument(
        "--whole-blocks", action="store_true",
        help=f"count every id of a mooncake trace as {MOONCAKE_BLOCK} tokens, the last of a prompt, too",
    )  # fmt: skip


def _add_order_and_limits(parser: argparse.ArgumentParser) -> None:
    limits = SchedulerConfig()
    order = parser.add_argument_group("order and limits")
    order.add_argument(
        "--one-at-a-time", action="store_true",
        help="no clock: prompts alone, one after another in file order; of what follows only tenants matter then, and"
        " with several KV groups the most tokens of a step",
    )  # fmt: skip
    order.add_argument(
        "--speedup", type=_speedup, default=1.0, help="requests arrive this many times faster; default: 1"
    )
    order.add_argument(
        "--policy", choices=[*POLICIES], default=limits.policy, help="order of service; default: %(default)s"
    )
    for name, what in (
        ("input", "a computed prompt token"),
        ("output", "a generated token"),
        ("cached", "a prompt token found in the prefix cache"),
    ):
        order.add_argument(
            f"--fair-{name}-weight", type=_weight, default=getattr(DEFAULT_WEIGHTS, name),
            help=f"what {what} counts for its tenant; default: %(default)s",
        )  # fmt: skip
    _add_tenants(order)
    order.add_argument(
        "--max-num-seqs", type=_count(1), default=limits.max_num_seqs, help="most running; default: %(default)s"
    )
    order.add_argument(
        "--max-num-batched-tokens", type=_count(1), default=limits.max_num_batched_tokens,
        help="most tokens of a step; default: %(default)s",
    )  # fmt: skip
    order.add_argument(
        "--long-prefill-token-threshold", type=_count(0), default=limits.long_prefill_token_threshold,
        help="most prompt tokens of one request in a step; default: 0, no limit",
    )  # fmt: skip
    order.add_argument(
        "--preemption-mode", choices=[*PREEMPTION_MODES], default=limits.preemption_mode,
        help="what becomes of a preempted request's blocks; default: %(default)s",
    )  # fmt: skip
    order.add_argument(
        "--queue-ahead", action=argparse.BooleanOptionalAction, default=True,
        help="schedule a step before the result of the last; default: yes, as the manager does",
    )  # fmt: skip


def _add_tenants(order: argparse._ArgumentGroup) -> None:
    order.add_argument(
        "--tenants", type=_shares, metavar="SHARES",
        help="whose requests of a trace are that names no tenant: tenant-1's and so on, by these shares in turn, such"
        " as 3,1",
    )  # fmt: skip
    order.add_argument(
        "--isolate-tenants", action="store_true", help="share cached blocks only among requests of one tenant"
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    cost = CostModel()
    steps = parser.add_argument_group("what a step costs, in microseconds (the defaults: 8B parameters on one H100)")
    steps.add_argument(
        "--cost-model", type=Path, metavar="FILE",
        help="what `kvplane calibrate` measured; a flag below wins over the file",
    )  # fmt: skip
    for name, text in zip(TERMS, _TERM_HELP, strict=True):
        flag = "--" + name.replace("_", "-")
        # No default here: what is not given comes from the file, if there is one.
        steps.add_argument(flag, type=_microseconds, help=f"{text}; default: {getattr(cost, name)}")
    steps.add_argument(
        "--copy-token-us", type=_microseconds, default=cost.copy_token_us,
        help="each token of a block swapped out or in; default: %(default)s",
    )  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON document; errors, too, on stderr")
    output.add_argument(
        "--plot", type=_picture, metavar="FILE",
        help=f"draw hit ratio, queue and pool over time; its suffix, {' or '.join(SUFFIXES)}, decides the format; needs"
        " kvplane[plot]",
    )  # fmt: skip
