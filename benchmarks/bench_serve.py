"""A real model through the whole split, beside `transformers.generate` on the same weights, threads and prompts.

    python -m benchmarks.bench_serve --model PATH [--dtype float32] [--rounds 3] [--threads 2] [--json]

    W1  one request            128 tokens in, 128 out
    W2  16 requests at once    256 in, 64 out
    W3  32 requests at once    512 shared + 32 own in, 32 out

Both sides take turns, round by round; prompts are new in every round, so that only the shared part of W3 is ever a
prefix hit.
Output tokens per second over the whole workload, time to first token (TTFT) and time between tokens (ITL) as medians.
`transformers` gives no stream for a batch, so it has no TTFT and ITL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1.inference_service_pb2_grpc import InferenceServiceStub

from benchmarks.cluster import running_cluster

VOCABULARY = range(1000, 40_000)


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once. Units: tokens."""

    name: str
    requests: int
    shared: int
    own: int
    output: int

    def prompts(self, rng: random.Random) -> list[list[int]]:
        """New prompts of random tokens."""
        shared = rng.choices(VOCABULARY, k=self.shared)
        return [shared + rng.choices(VOCABULARY, k=self.own) for _ in range(self.requests)]


WORKLOADS = (Workload("W1", 1, 0, 128, 128), Workload("W2", 16, 0, 256, 64), Workload("W3", 32, 512, 32, 32))


@dataclass(frozen=True)
class Round:
    """One workload, once. Units: seconds."""

    tokens_per_second: float
    ttft: list[float]
    itl: list[float]


async def serve_round(address: str, workload: Workload, prompts: list[list[int]]) -> Round:
    """Send all prompts at once over one stream."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = InferenceServiceStub(channel).GenerateMany()
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            await call.write(
                pb.GenerateManyRequest(
                    generate=pb.GenerateRequest(
                        request_id=str(index),
                        token_ids=pb.TokenIds(ids=prompt),
                        sampling=pb.SamplingParams(temperature=0),
                        stopping=pb.StoppingParams(max_tokens=workload.output, ignore_eos=True),
                    )
                )
            )
        await call.done_writing()
        arrivals: dict[str, list[float]] = {str(index): [] for index in range(len(prompts))}
        async for message in call:
            now = time.perf_counter()
            if message.errors:
                raise RuntimeError(f"expected outputs, got {message.errors}")
            for output in message.outputs:
                arrivals[output.request_id] += [now] * len(output.token_ids)
        elapsed = time.perf_counter() - start
    if any(len(times) != workload.output for times in arrivals.values()):
        raise RuntimeError(f"expected {workload.output} tokens each, got {[len(times) for times in arrivals.values()]}")
    return Round(
        tokens_per_second=workload.requests * workload.output / elapsed,
        ttft=[times[0] - start for times in arrivals.values()],
        itl=[later - earlier for times in arrivals.values() for earlier, later in pairwise(times)],
    )


class Transformers:
    """`transformers.generate` in a process of its own, so that its threads and memory are its own."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transformers_worker", model, dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask(None)

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if request is not None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"expected an answer of the transformers worker, it ended with {self._process.wait()}")
        return json.loads(answer)

    def round(self, workload: Workload, prompts: list[list[int]]) -> Round:
        """Generate for all prompts as one batch; they are equally long, so there is no padding."""
        seconds = self._ask({"prompts": prompts, "output": workload.output})["seconds"]
        return Round(workload.requests * workload.output / seconds, [], [])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def summary(rounds: list[Round]) -> dict[str, float]:
    """Medians over the rounds. Units: tokens per second, milliseconds."""
    figures = {"tokens_per_second": statistics.median(one.tokens_per_second for one in rounds)}
    for name in ("ttft", "itl"):
        values = sorted(value * 1e3 for one in rounds for value in getattr(one, name))
        if values:
            figures[f"{name}_ms_p50"] = statistics.median(values)
            figures[f"{name}_ms_p99"] = values[min(len(values) - 1, int(len(values) * 0.99))]
    return figures


def run(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Run every workload on both sides, taking turns."""
    rng = random.Random(arguments.seed)
    results: dict[str, dict[str, dict[str, float]]] = {}
    executor = ["--model", arguments.model, "--dtype", arguments.dtype, "--num-threads", str(arguments.threads)]
    executor += ["--memory-limit", arguments.memory_limit]
    with running_cluster([], executor) as address:
        peer = Transformers(arguments.model, arguments.dtype, arguments.threads)
        try:
            warm = Workload("warm-up", 2, 0, 32, 8)
            asyncio.run(serve_round(address, warm, warm.prompts(rng)))
            peer.round(warm, warm.prompts(rng))
            for workload in WORKLOADS:
                ours, theirs = [], []
                for _ in range(arguments.rounds):
                    ours.append(asyncio.run(serve_round(address, workload, workload.prompts(rng))))
                    theirs.append(peer.round(workload, workload.prompts(rng)))
                results[workload.name] = {"kvplane": summary(ours), "transformers": summary(theirs)}
        finally:
            peer.close()
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("KVPLANE_TEST_MODEL"), help="folder or GGUF file")
    parser.add_argument("--dtype", default="float32", help="what both compute in")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per workload; medians are shown")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    parser.add_argument("--memory-limit", default="4GiB", help="the executor's")
    parser.add_argument("--seed", type=int, default=0, help="for the prompts")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    if not arguments.model:
        parser.error("expected --model or KVPLANE_TEST_MODEL, got neither; `kvplane model pull smollm2` prints a path")
    results = run(arguments)
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"{arguments.dtype}, {arguments.threads} threads, medians of {arguments.rounds} rounds")
    for name, sides in results.items():
        for side, figures in sides.items():
            print(f"  {name}  {side:<13}" + "".join(f"  {key} {value:.1f}" for key, value in figures.items()))
        ratio = sides["kvplane"]["tokens_per_second"] / sides["transformers"]["tokens_per_second"]
        print(f"  {name}  ratio          {ratio:.2f}")


if __name__ == "__main__":
    main()
