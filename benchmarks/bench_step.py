"""Steps of a model on a CPU, in this process: all layers in one call, and one by one, in turn.

    python -m benchmarks.bench_step [--model PATH] [--dtype bfloat16] [--threads 2] [--rounds 9] [--cpu-time] [--json]

A workload is rows of so many new tokens at the end of so much context, of which they may share the first tokens. Tables
are in order, as a pool that is new hands blocks out. Medians, in ms; one by one is what a step with adapters takes.
On a machine that does other work too, go by --cpu-time with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.steps import BLOCK_SIZE, StepRow, make_step
from executor_service.backends.base import StepBatch
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.fused_layers import FusedLayer

WORKLOADS = {
    "decode 1 row, 256 tokens of context": (1, 1, 256, 0),
    "decode 16 rows of 288": (16, 1, 288, 0),
    "decode 32 rows of 560": (32, 1, 560, 0),
    "decode 32 rows of 560, 512 shared": (32, 1, 560, 512),
    "prefill 4 x 256": (4, 256, 256, 0),
}
"""Rows, new tokens of each, its context with them, and how many of that all rows share: whole blocks."""

_FIRST_TOKEN = 1000


def workload_step(rows: int, new: int, context: int, shared: int) -> StepBatch:
    """One step of a workload."""
    blocks, common = -(-context // BLOCK_SIZE), shared // BLOCK_SIZE
    tokens = range(_FIRST_TOKEN, _FIRST_TOKEN + new)
    tables = [[*range(1, 1 + common), *range(1 + row * blocks + common, 1 + (row + 1) * blocks)] for row in range(rows)]
    return make_step([StepRow(tokens, context - new, table) for table in tables])


def measure(
    backend: TorchBackend,
    layers: Sequence[FusedLayer],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Median milliseconds of each workload, together and, where layers are stacked, apart. Units: clock in seconds."""
    stack = layers[0].stack if layers else None
    found: dict[str, dict[str, float]] = {}
    for name, shape in WORKLOADS.items():
        step = workload_step(*shape)
        times: dict[str, list[float]] = {"together": [], "apart": []} if stack is not None else {"together": []}
        for turn in range(rounds + 1):
            for side, own in times.items():
                for layer in layers:
                    layer.stack = stack if side == "together" else None
                started = clock()
                backend.execute(step)
                if turn:  # the first warms up
                    own.append((clock() - started) * 1e3)
        for layer in layers:
            layer.stack = stack
        found[name] = {side: statistics.median(own) for side, own in times.items()}
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("KVPLANE_TEST_MODEL"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure the process's CPU time in place of the clock's"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.model:
        parser.error("expected --model, or KVPLANE_TEST_MODEL to name one, got none")
    backend = TorchBackend(
        TorchBackendConfig(
            model=args.model, device="cpu", dtype=args.dtype, block_size=BLOCK_SIZE, num_threads=args.threads
        )
    )
    backend.load()
    backend.initialize_kv_cache(1 + max(rows * -(-context // BLOCK_SIZE) for rows, _, context, _ in WORKLOADS.values()))
    assert backend._model is not None
    layers = [module for module in backend._model.loaded.model.modules() if isinstance(module, FusedLayer)]
    found = measure(backend, layers, args.rounds, time.process_time if args.cpu_time else time.perf_counter)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{args.dtype}, {args.threads} threads, medians of {args.rounds}, ms{' of CPU time' * args.cpu_time}")
    for name, times in found.items():
        ratio = f"  apart / together {times['apart'] / times['together']:4.2f}" if "apart" in times else ""
        print(f"  {name:36}", *(f"{side} {took:8.1f}" for side, took in times.items()), ratio)


if __name__ == "__main__":
    main()
