"""Preemption by recomputation, by swap, and by measured cost, on a pool that is too small for its load.

    python -m benchmarks.bench_swap [--seed N]

The scheduler is the manager's own; the clock is simulated (`kvmanager_service.replay`), with the cost model of 8
billion parameters on one H100. So the numbers are the same on every machine, and speak of scheduling, not of it.
"""

from __future__ import annotations

import argparse
import random

from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import PREEMPTION_MODES, SchedulerConfig
from kvmanager_service.replay.cost_model import CostModel
from kvmanager_service.replay.report import Measurements, percentiles
from kvmanager_service.replay.timed import TimedReplay
from kvmanager_service.replay.trace import TraceRequest

BLOCK_SIZE = 16
NUM_BLOCKS = 2_501
NUM_HOST_BLOCKS = 20_000
COPY_SPEEDS = {"50 GB/s, pinned": 2.6, "6 GB/s, pageable": 22.0, "1 GB/s": 130.0}
"""Microseconds to copy a token of 128 KiB."""


def make_trace(seed: int) -> list[TraceRequest]:
    """96 at once, whose prompts fit the pool and whose answers do not: 40,000 tokens of room for 190,000."""
    rng = random.Random(seed)
    return [
        TraceRequest(f"r{index}", 0.0, ((index, rng.randint(200, 1_800)),), rng.randint(500, 1_500))
        for index in range(96)
    ]


def measure(trace: list[TraceRequest], mode: str, copy_token_us: float) -> Measurements:
    """Run the trace once."""
    config = SchedulerConfig(max_waiting=len(trace), preemption_mode=mode)
    scheduler = Scheduler(config, KVCacheManager(NUM_BLOCKS, BLOCK_SIZE), NUM_HOST_BLOCKS)
    return TimedReplay(trace, scheduler, CostModel(copy_token_us=copy_token_us)).run()


def main() -> None:
    """Print one table for each speed of copying."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    trace = make_trace(parser.parse_args().seed)
    for name, copy_token_us in COPY_SPEEDS.items():
        print(f"copies at {name}")
        print("  mode       makespan s  ratio preempted swapped  computed  ITL p99")
        base = 0.0
        for mode in PREEMPTION_MODES:
            found = measure(trace, mode, copy_token_us)
            base = base or found.makespan
            gaps = percentiles(found.token_gaps)
            assert gaps is not None
            print(
                f"  {mode:10} {found.makespan:10.1f} {base / found.makespan:6.2f} {found.preemptions:9} "
                f"{found.swapped_out:7} {found.tokens_computed:9} {gaps['p99'] * 1000:8.1f}"
            )


if __name__ == "__main__":
    main()
