"""What K/V in eight bits costs and saves: perplexity, blocks, and the time of a decode step, beside `auto`.

    python -m benchmarks.bench_kv_dtype [--model PATH] [--traces DIR] [--tokens N] [--dtype bfloat16]

Perplexity is that of real prompts (`sharegpt_prompts.jsonl` of the folder `KVPLANE_TRACES`) over paged attention, by
the executor's own runner: each window of a prompt is one step whose rows have one token each, the first, the second and
so on, of the same blocks. So every token attends over what the cache holds of those before it, as it does when it is
decoded, and every row has logits. Windows are the same for every type, so that differences are the type's.

Rounding errors are those of the K and V that the model makes of the first window's beginning, with a scale for each of
ever smaller parts, by which its largest value is the type's: what finer scales than those of a layer could bring.

Steps are timed in turn, one of each type after the other, and the medians compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.steps import BLOCK_SIZE, StepRow, make_step
from executor_service.backends.base import ModelInfo
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.kernels.fp8 import FP8_TYPES

KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")
SCALED_PARTS = {"layer": (1, 2, 3), "head": (1, 3), "channel": (1,), "token and head": (3,)}
"""Over which dimensions of (K and V, token, head, element) a scale reaches."""


def open_backend(model: str, kv_cache_dtype: str, dtype: str, num_blocks: int) -> tuple[TorchBackend, ModelInfo]:
    """A backend with its model and an empty cache, and what it says of the model."""
    backend = TorchBackend(
        TorchBackendConfig(
            model=model, device="cpu", dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=BLOCK_SIZE, num_threads=2
        )
    )
    info = backend.load()
    backend.initialize_kv_cache(num_blocks)
    return backend, info


def read_prompts(file: Path) -> Iterator[str]:
    """The prompts of a ShareGPT trace, in order."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield from (request["prompt"] for request in json.loads(line)["requests"])


def read_windows(file: Path, tokenizer: Tokenizer, window: int, num_tokens: int) -> list[list[int]]:
    """Beginnings of prompts, at most `window` tokens of each and at least a quarter of that; `num_tokens` in all."""
    windows: list[list[int]] = []
    left = num_tokens
    for prompt in read_prompts(file):
        ids = tokenizer.encode(prompt).ids[: min(window, left)]
        if len(ids) >= min(window // 4, left):
            windows.append(ids)
            left -= len(ids)
        if left < 2:
            return windows
    return windows


def perplexity(backend: TorchBackend, windows: Sequence[Sequence[int]]) -> float:
    """The exponential of the mean negative log likelihood of every token but the first of each window."""
    total, count = 0.0, 0
    table = list(range(1, -(-max(map(len, windows)) // BLOCK_SIZE) + 1))
    for tokens in windows:
        rows = [StepRow([token], position, table) for position, token in enumerate(tokens)]
        logits = backend.forward(make_step(rows))
        wanted = torch.tensor(tokens[1:], device=logits.device)
        total += float(torch.nn.functional.cross_entropy(logits[:-1].float(), wanted, reduction="sum"))
        count += len(wanted)
    return math.exp(total / count)


def rounding_errors(backend: TorchBackend, tokens: Sequence[int]) -> dict[str, dict[str, float]]:
    """Root mean square of what rounding changes, beside that of K and V; by type and by what has a scale of its own.

    Args:
        backend: of K/V that are not rounded.
        tokens: the beginning of a sequence.
    """
    table = list(range(1, -(-len(tokens) // BLOCK_SIZE) + 1))
    backend.forward(make_step([StepRow([token], position, table) for position, token in enumerate(tokens)]))
    assert backend._memory is not None
    layers = [layer[:, table].flatten(1, 2)[:, : len(tokens)].float() for layer in backend._memory.cache.layers]
    errors: dict[str, dict[str, float]] = {}
    for name, dtype in FP8_TYPES.items():
        limit = torch.finfo(dtype).max
        for part, dims in SCALED_PARTS.items():
            found = []
            for states in layers:
                scales = states.abs().amax(dim=dims, keepdim=True) / limit
                stored = torch.clamp(states / scales, -limit, limit).to(dtype).float() * scales
                found.append(float((stored - states).norm() / states.norm()))
            errors.setdefault(name, {})[part] = statistics.mean(found)
    return errors


def time_decode(backends: Sequence[TorchBackend], rows: int, context: int, rounds: int) -> list[float]:
    """Median seconds of a step of `rows` sequences with this much context, for each backend; measured in turn."""
    blocks = -(-context // BLOCK_SIZE)
    tables = [list(range(1 + row * blocks, 1 + (row + 1) * blocks)) for row in range(rows)]
    step = make_step([StepRow([7], context - 1, table) for table in tables])
    times: list[list[float]] = [[] for _ in backends]
    for turn in range(rounds + 1):
        for own, backend in zip(times, backends, strict=True):
            started = time.perf_counter()
            backend.execute(step)
            if turn:  # the first warms up
                own.append(time.perf_counter() - started)
    return [statistics.median(own) for own in times]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("KVPLANE_TEST_MODEL"))
    parser.add_argument("--traces", type=Path, default=os.environ.get("KVPLANE_TRACES"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not args.model:
        parser.error("expected --model, or KVPLANE_TEST_MODEL to name one, got none")
    most = 16 * -(-1024 // BLOCK_SIZE) + 1
    opened = [open_backend(args.model, kind, args.dtype, most) for kind in KV_CACHE_DTYPES]
    backends = [backend for backend, _ in opened]
    if args.traces is None:
        print("no perplexity: KVPLANE_TRACES names no folder with sharegpt_prompts.jsonl")
    else:
        tokenizer = Tokenizer.from_str(opened[0][1].tokenizer_files["tokenizer.json"].decode())
        windows = read_windows(args.traces / "sharegpt_prompts.jsonl", tokenizer, args.window, args.tokens)
        print(f"perplexity over {sum(map(len, windows))} tokens in {len(windows)} windows, {args.dtype}")
        base = 0.0
        for kind, backend in zip(KV_CACHE_DTYPES, backends, strict=True):
            found = perplexity(backend, windows)
            base = base or found
            print(f"  {kind:9} {found:9.4f} {found / base - 1:+8.3%}", flush=True)
        print(f"rounding error of K and V over {min(128, len(windows[0]))} tokens, by what has a scale")
        for kind, errors in rounding_errors(backends[0], windows[0][:128]).items():
            print(f"  {kind:9}", *(f"{part} {error:.2%}" for part, error in errors.items()), flush=True)
    print("decode step, ms (tokens/s beside auto)")
    for rows, context in ((1, 256), (16, 256), (16, 1024)):
        times = time_decode(backends, rows, context, args.rounds)
        shown = "  ".join(
            f"{kind} {took * 1e3:7.1f} ({times[0] / took:4.2f})"
            for kind, took in zip(KV_CACHE_DTYPES, times, strict=True)
        )
        print(f"  {rows:2} x {context:4}  {shown}", flush=True)


if __name__ == "__main__":
    main()
