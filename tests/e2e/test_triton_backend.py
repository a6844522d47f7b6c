"""The triton backend, interpreted, through the whole split: its tokens are the torch backend's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kvplane_client import NO_RETRY

from tests.e2e.cluster import settled
from tests.e2e.model_cluster import model_cluster
from tests.unit.executor.step_builder import prompt_of, save_tiny_model

pytestmark = pytest.mark.timeout(1800)

SHARED = prompt_of(40, 7)
"""Two blocks of 16 and a half: prompts that begin so hit the prefix cache."""
MANAGER = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "watermark": 0.0, "preemption_mode": "swap"}
FEW_BLOCKS = 11


async def run(backend: str, folder: Path, logs: Path, request: pytest.FixtureRequest) -> list[tuple[int, ...]]:
    """All tokens of a load with chunked prefill, prefix hits, forks and preemption."""
    with model_cluster(request, logs) as cluster:
        cluster.start_model(
            folder,
            dict(MANAGER),
            backend=backend,
            num_threads=1,
            num_blocks_override=FEW_BLOCKS,
            max_model_len=96,
            memory_limit="2GiB",
            swap_space="1MiB",
        )
        async with cluster.client(retry=NO_RETRY) as client:
            first = await client.generate(prompt_of(60, 1), temperature=0, max_tokens=3, ignore_eos=True)
            alone = await client.generate(SHARED, temperature=0, max_tokens=3, ignore_eos=True)
            prompts = [[*SHARED, 11], [*SHARED[:33], 12, 13], prompt_of(5, 3), prompt_of(30, 4)]
            many = await asyncio.gather(
                *(client.generate(prompt, temperature=0, max_tokens=30, ignore_eos=True) for prompt in prompts)
            )
            forks = await client.stream(
                prompt_of(21, 5), n=3, temperature=1.0, seed=9, max_tokens=6, ignore_eos=True
            ).completions()
            stats = await settled(client)
        assert stats.prefix_hits > 0
        assert stats.preemptions > 0
        return [done.token_ids for done in (first, alone, *many, *forks)]


async def test_triton_backend_gives_the_torch_backends_tokens(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = save_tiny_model(tmp_path / "tiny-llama", "llama", num_hidden_layers=2)
    got = {}
    for backend in ("torch", "triton"):
        logs = tmp_path / backend
        logs.mkdir()
        got[backend] = await run(backend, folder, logs, request)
    assert got["triton"] == got["torch"]
    assert [len(tokens) for tokens in got["torch"]] == [3, 3, 30, 30, 30, 30, 6, 6, 6]
