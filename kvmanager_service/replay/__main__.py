"""`python -m kvmanager_service.replay`: read a trace, run it, say what came of it.

Exit status: 0 done, 1 the trace or a file can not be used, 2 wrong usage, 130 interrupted.
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

from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.replay.cost_model import TERMS, CostModel, CostModelError, read_cost_model
from kvmanager_service.replay.one_at_a_time import replay_one_at_a_time
from kvmanager_service.replay.options import parse
from kvmanager_service.replay.plot import PlotLibraryError, draw, require_library
from kvmanager_service.replay.report import Measurements, summarise, table
from kvmanager_service.replay.timed import TimedReplay
from kvmanager_service.replay.trace import MOONCAKE_BLOCK, TraceError, TraceRequest, read_trace

_PROGRESS_STRIDE = 50


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    try:
        return _replay(options)
    except TraceError as error:
        place = {"path": error.path, "line": error.line, "expected": error.expected, "got": error.got}
        return _fail(options, "BAD_TRACE", str(error), place)
    except CostModelError as error:
        place = {"path": error.path, "expected": error.expected, "got": error.got}
        return _fail(options, "BAD_COST_MODEL", str(error), place)
    except PlotLibraryError as error:
        return _fail(options, "NO_PLOT_LIBRARY", str(error), {})
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
        sys.stderr.write(f"kvplane replay: {message}\n")
    return 1


def _replay(options: argparse.Namespace) -> int:
    _settle_cost(options)
    if options.plot is not None:
        require_library()  # before the work, which may take minutes
    trace = read_trace(options.trace, options.format, options.limit)
    if options.whole_blocks:
        trace = [traced.with_whole_runs(MOONCAKE_BLOCK) for traced in trace]
    if options.num_blocks == 0:
        options.num_blocks = _most_blocks(trace, options.block_size)
    kv = KVCacheManager(options.num_blocks, options.block_size, eviction_policy=options.eviction_policy)
    gc.freeze()  # trace and pool stay: no collection needs to walk them
    found = _run(options, trace, kv)
    document = summarise(found, _settings(options))
    if options.plot is not None:
        title = (
            f"{options.trace.name}: {options.num_blocks:,} blocks of {options.block_size}, {options.eviction_policy}"
        )
        num_usable_blocks = kv.pool.num_usable_blocks
        draw(found.samples, options.plot, title=title, num_usable_blocks=num_usable_blocks, has_clock=found.has_clock)
    if options.json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        Console(highlight=False, soft_wrap=True).print(table(document))
    return 0


def _run(options: argparse.Namespace, trace: Sequence[TraceRequest], kv: KVCacheManager) -> Measurements:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=len(trace))

        def on_done(num_done: int) -> None:
            if num_done % _PROGRESS_STRIDE == 0:
                progress.update(task, completed=num_done)

        if options.one_at_a_time:
            return replay_one_at_a_time(trace, kv, on_done)
        config = SchedulerConfig(
            policy=options.policy,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_waiting=len(trace),
            max_outstanding=2 if options.queue_ahead else 1,
            preemption_mode=options.preemption_mode,
        )
        scheduler = Scheduler(config, kv, options.num_host_blocks)
        return TimedReplay(trace, scheduler, _cost(options), options.speedup, on_done).run()


def _settle_cost(options: argparse.Namespace) -> None:
    """Let each term be its flag's value, or else the file's, or else the default."""
    usual = CostModel() if options.cost_model is None else read_cost_model(options.cost_model)
    for name in TERMS:
        if getattr(options, name) is None:
            setattr(options, name, getattr(usual, name))


def _cost(options: argparse.Namespace) -> CostModel:
    return CostModel(**{name: getattr(options, name) for name in (*TERMS, "copy_token_us")})


def _most_blocks(trace: Sequence[TraceRequest], block_size: int) -> int:
    """So many that nothing is ever evicted, the null block included."""
    return 2 + sum(-(-(traced.prompt_length + traced.output_length) // block_size) for traced in trace)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    shown = {name: value for name, value in vars(options).items() if name not in ("json", "plot")}
    cost_model = None if options.cost_model is None else str(options.cost_model)
    return shown | {"trace": str(options.trace), "cost_model": cost_model}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
