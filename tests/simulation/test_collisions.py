"""A hash of one byte collides all the time: that costs misses, and never a wrong block."""

from __future__ import annotations

import random
from array import array

import pytest

from executor_service.backends.sim_digest import expected_tokens
from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import NewRequest, StopRules
from kvmanager_service.core.scheduler_config import SchedulerConfig
from tests.simulation.conditions import one_byte_hash
from tests.simulation.harness import VOCAB_SIZE, World


class CountingKVCacheManager(KVCacheManager):
    """Counts how often a hash found a content that the proof refused."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, hash_function=one_byte_hash)
        self.collisions = 0
        found = self.pool.cached_block_hash_to_block.get

        def follow(
            parent: BlockContent | None, block_hash: bytes, token_bytes: bytes, extra_keys: bytes
        ) -> BlockContent | None:
            content = found(block_hash)
            self.collisions += content is not None and not content.is_same(parent, token_bytes, extra_keys)
            return type(self.pool).follow(self.pool, parent, block_hash, token_bytes, extra_keys)

        self.pool.follow = follow  # type: ignore[method-assign]


@pytest.mark.patches_core
def test_simulation_one_byte_hash_thousands_of_collisions_and_no_wrong_output() -> None:
    rng = random.Random(5)
    config = SchedulerConfig(max_waiting=4000, max_num_seqs=64, max_num_batched_tokens=512, watermark=0.0)
    world = World(300, 2, config, CountingKVCacheManager)
    expected = {}
    roots = [[rng.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(40)]
    for index in range(4000):
        prompt = rng.choice(roots)[: rng.randint(1, 12)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        max_tokens = rng.randint(1, 8)
        world.scheduler.add_request(
            NewRequest(f"r{index}", array("i", prompt).tobytes(), StopRules(max_tokens=max_tokens), seed=index)
        )
        expected[f"r{index}"] = expected_tokens(prompt, max_tokens, vocab_size=VOCAB_SIZE, seed=index, temperature=1.0)
    while world.scheduler.has_work:
        world.step()
        world.scheduler.check_integrity()
    assert {request_id: produced.token_ids for request_id, produced in world.produced.items()} == expected
    kv = world.scheduler.kv
    assert isinstance(kv, CountingKVCacheManager)
    assert kv.collisions > 1000
    assert world.scheduler.stats.prefix_hits > 1000
