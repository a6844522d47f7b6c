"""Gemma 3 270M, sliding and full layers, through the whole split: its tokens are those of transformers' generate.

KVPLANE_TEST_GEMMA3 is the GGUF file that `kvplane model pull gemma3-270m` prints. Prompts are longer than its window of
512 tokens, and run in chunks, from the prefix cache, and preempted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvplane_client import NO_RETRY

from executor_service.gguf_conversion import converted_folder, default_cache_dir
from tests.e2e.cluster import settled
from tests.e2e.model_cluster import ModelCluster, model_cluster
from tests.e2e.model_reference import Reference, varied_prompts

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

NEW_TOKENS = 24
CHUNK = 160
BLOCK_SIZE = 16
WINDOW = 512
MAX_LEN = 1024
FEW_BLOCKS = 1 + MAX_LEN // BLOCK_SIZE + 5 * ((WINDOW + CHUNK - 2) // BLOCK_SIZE + 2)
"""One sequence of the longest length: a full group and five sliding ones."""


@pytest.fixture(scope="module")
def gguf() -> Path:
    path = os.environ.get("KVPLANE_TEST_GEMMA3")
    if not path:
        pytest.skip("KVPLANE_TEST_GEMMA3 names no model")
    return Path(path)


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelCluster]:
    with model_cluster(request, tmp_path_factory.mktemp("gemma3")) as made:
        made.start_model(
            gguf,
            {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "watermark": 0.0},
            max_model_len=MAX_LEN,
            block_size=BLOCK_SIZE,
            num_blocks_override=FEW_BLOCKS,
            memory_limit="6GiB",
            cache_dir=default_cache_dir(),
        )
        yield made


async def test_generate_gemma_3_equals_transformers(cluster: ModelCluster, gguf: Path) -> None:
    reference = Reference(converted_folder(gguf, default_cache_dir()))
    text = " ".join([*varied_prompts(), *reversed(varied_prompts())])
    whole = reference.tokenizer.encode(text)
    assert len(whole) > 900, "a text longer than the window"
    long, turn = whole[:700], [*whole[:600], *whole[700:720]]
    # Three of 15 blocks in each of six groups are admitted together; with the next block of each, one must give way.
    crowd = [whole[start : start + 230] for start in (40, 350, 620)]
    prompts = [*crowd, long, whole[100:660], whole[:5], turn]
    async with cluster.client(retry=NO_RETRY) as client:
        (ready,) = cluster.manager.events("kv_cache_ready")
        assert ready["num_groups"] == 6
        # One after the other first: the second goes on from what the first has left in the cache.
        alone = [
            await client.generate(prompt, temperature=0, max_tokens=NEW_TOKENS, cache_salt="alone")
            for prompt in (long, turn)
        ]
        assert alone[1].usage.cached_tokens == 600 // BLOCK_SIZE * BLOCK_SIZE
        done = await asyncio.gather(
            *(client.generate(prompt, temperature=0, max_tokens=NEW_TOKENS, cache_salt="all") for prompt in prompts)
        )
        stats = await settled(client)
    ties = 0
    for prompt, completion in [*zip((long, turn), alone, strict=True), *zip(prompts, done, strict=True)]:
        ties += reference.count_ties(prompt, list(completion.token_ids), NEW_TOKENS)
    print(f"{stats.preemptions} preemptions, {ties} ties")
    assert stats.preemptions > 0
    assert stats.steps_failed == 0
    assert ties == 0
