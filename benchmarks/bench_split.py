"""What the split costs: a `sim` executor with steps of a fixed time, many streams, against the ideal number of steps.

    python -m benchmarks.bench_split [--streams 256] [--step-ms 5] [--seconds 10] [--no-queue-ahead] [--json]

Steps per second over the ideal 1000 / step-ms; and the time between two messages of one GenerateMany stream, one
message a step, less the step time: what the control plane, the wire and the client add to a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import grpc
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as kv_pb
from kvplane.kvmanager.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvplane.kvmanager.v1.kv_manager_service_pb2_grpc import KvManagerServiceStub

from benchmarks.cluster import running_cluster
from kvmanager_service.core import is_compiled

WARMUP_MESSAGES = 50


async def measure(address: str, streams: int, seconds: float) -> tuple[float, list[float]]:
    """Run `streams` requests at once for a while.

    Returns:
        Steps per second, and the seconds between messages.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stats = KvManagerServiceStub(channel)
        call = InferenceServiceStub(channel).GenerateMany()
        for index in range(streams):
            await call.write(
                pb.GenerateManyRequest(
                    generate=pb.GenerateRequest(
                        request_id=f"bench-{index}",
                        token_ids=pb.TokenIds(ids=[index + 1] * 64),
                        sampling=pb.SamplingParams(temperature=0),
                    )
                )
            )
        for _ in range(WARMUP_MESSAGES):
            await call.read()
        before = (await stats.GetStats(kv_pb.GetStatsRequest())).steps
        start = last = time.perf_counter()
        gaps = []
        while last - start < seconds:
            message = await call.read()
            if message is grpc.aio.EOF or message.errors:
                raise RuntimeError(f"expected outputs, got {message}")
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        after = (await stats.GetStats(kv_pb.GetStatsRequest())).steps
        elapsed = time.perf_counter() - start
        call.cancel()
    return (after - before) / elapsed, gaps


def main() -> None:
    """Start both services, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="requests at once")
    parser.add_argument("--step-ms", type=float, default=5.0, help="what a step takes in the executor")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure")
    parser.add_argument("--no-queue-ahead", action="store_true", help="send a step only after the last is answered")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    manager = ["--max-num-seqs", str(arguments.streams), "--max-num-batched-tokens", "16384"]
    manager += ["--no-queue-ahead"] if arguments.no_queue_ahead else []
    num_blocks = arguments.streams * 520
    executor = ["--backend", "sim", "--sim-step-ms", str(arguments.step_ms), "--sim-num-blocks", str(num_blocks)]
    with running_cluster(manager, executor) as address:
        rate, gaps = asyncio.run(measure(address, arguments.streams, arguments.seconds))
    ideal = 1e3 / arguments.step_ms
    added = sorted((gap * 1e3 - arguments.step_ms) * 1e3 for gap in gaps)
    figures = {
        "streams": arguments.streams,
        "step_ms": arguments.step_ms,
        "steps_per_second": rate,
        "ideal_steps_per_second": ideal,
        "ratio": rate / ideal,
        "added_us_p50": statistics.median(added),
        "added_us_p99": added[int(len(added) * 0.99)],
    }
    if arguments.json:
        print(json.dumps(figures))
        return
    core = "compiled by mypyc" if is_compiled() else "pure Python"
    print(
        f"{arguments.streams} streams, {arguments.step_ms} ms steps, queue ahead: {not arguments.no_queue_ahead}, "
        f"core: {core}"
    )
    print(f"  steps per second   {rate:.1f} of {ideal:.0f}: {rate / ideal:.3f}")
    print(f"  added to a step    p50 {figures['added_us_p50']:.0f} us, p99 {figures['added_us_p99']:.0f} us")


if __name__ == "__main__":
    main()
