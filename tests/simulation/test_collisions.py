"""A hash of one byte collides all the time: that costs misses, and never a wrong block."""

from __future__ import annotations

import random
from array import array

import pytest

from executor_service.backends.sim_digest import expected_tokens
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.content_lookup import ContentLookup
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.prefix_ledger import PrefixLedger
from kvmanager_service.core.request import NewRequest, StopRules
from kvmanager_service.core.scheduler_config import SchedulerConfig
from tests.simulation.conditions import one_byte_hash
from tests.simulation.harness import VOCAB_SIZE, World, kv_groups
from tests.simulation.life import MODELS

NUM_BLOCKS, BLOCK_SIZE = 300, 2
CONFIG = SchedulerConfig(max_waiting=5000, max_num_seqs=64, max_num_batched_tokens=512, watermark=0.0)


class Collisions:
    """Counts how often a hash led to a content that the proof refused, when somebody looked for hits.

    Of one group that is a block's; of several it is a prefix's, before any group is asked, or still a block's.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        follow, get_cached_block, extend = ContentLookup.follow, ContentLookup.get_cached_block, PrefixLedger.extend

        def see(found: BlockContent | None, parent: BlockContent | None, token_bytes: bytes, extra_keys: bytes) -> None:
            self.count += found is not None and not found.is_same(parent, token_bytes, extra_keys)

        def seen_follow(
            self: ContentLookup, parent: BlockContent | None, block_hash: bytes, token_bytes: bytes, extra_keys: bytes
        ) -> BlockContent | None:
            see(self._contents.get(block_hash), parent, token_bytes, extra_keys)
            return follow(self, parent, block_hash, token_bytes, extra_keys)

        def seen_get_cached_block(
            self: ContentLookup, block_hash: bytes, parent: BlockContent | None, token_bytes: bytes, extra_keys: bytes
        ) -> KVCacheBlock | None:
            see(self._contents.get(block_hash), parent, token_bytes, extra_keys)
            return get_cached_block(self, block_hash, parent, token_bytes, extra_keys)

        def seen_extend(
            self: PrefixLedger,
            parent: BlockContent | None,
            block_hash: bytes,
            token_bytes: bytes,
            extra_keys: bytes,
        ) -> BlockContent | None:
            see(self._prefixes.get(block_hash), parent, token_bytes, extra_keys)
            return extend(self, parent, block_hash, token_bytes, extra_keys)

        patch.setattr(ContentLookup, "follow", seen_follow)
        patch.setattr(ContentLookup, "get_cached_block", seen_get_cached_block)
        patch.setattr(PrefixLedger, "extend", seen_extend)


def live_through_collisions(windows: tuple[int, ...], num_requests: int) -> int:
    """Requests that share prefixes: each must get the oracle's tokens. Returns how many tokens were hit."""

    def make_kv(num_blocks: int, block_size: int) -> KVCache:
        kv: KVCache
        if windows:
            groups, longest = kv_groups(block_size, windows), CONFIG.max_num_batched_tokens
            kv = KVCacheCoordinator(num_blocks, groups, longest_chunk=longest, hash_function=one_byte_hash)
        else:
            kv = KVCacheManager(num_blocks, block_size, hash_function=one_byte_hash)
        return kv

    rng = random.Random(5)
    world = World(NUM_BLOCKS, BLOCK_SIZE, CONFIG, make_kv, windows=windows)
    expected = {}
    roots = [[rng.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(40)]
    for index in range(num_requests):
        prompt = rng.choice(roots)[: rng.randint(1, 12)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        max_tokens = rng.randint(1, 8)
        world.scheduler.add_request(
            NewRequest(f"r{index}", array("i", prompt).tobytes(), StopRules(max_tokens=max_tokens), seed=index)
        )
        expected[f"r{index}"] = expected_tokens(
            prompt, max_tokens, vocab_size=VOCAB_SIZE, seed=index, temperature=1.0, windows=windows or (0,)
        )
    while world.scheduler.has_work:
        world.step()
        world.scheduler.check_integrity()
    got = {request_id: produced.token_ids for request_id, produced in world.produced.items()}
    wrong = [request_id for request_id, tokens in expected.items() if got[request_id] != tokens]
    assert not wrong, f"other tokens than the oracle's: {wrong}"
    return world.scheduler.stats.prefix_hits


@pytest.mark.patches_core
def test_simulation_one_byte_hash_thousands_of_collisions_and_no_wrong_output(monkeypatch: pytest.MonkeyPatch) -> None:
    collisions = Collisions(monkeypatch)
    num_hits = live_through_collisions((), 4500)
    assert collisions.count > 2000
    assert num_hits > 1000


@pytest.mark.patches_core
@pytest.mark.parametrize("model", ["full and sliding", "chunks, sliding and state"])
def test_simulation_one_byte_hash_over_several_groups_no_wrong_output(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    collisions = Collisions(monkeypatch)
    num_hits = live_through_collisions(MODELS[model], 2200)
    assert collisions.count > 2000
    assert num_hits > 50


@pytest.mark.patches_core
@pytest.mark.parametrize("windows", [(), MODELS["full and sliding"]], ids=["one group", "full and sliding"])
def test_simulation_one_byte_hash_that_is_believed_gives_wrong_outputs(
    windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the test: whoever compares no tokens is given blocks of others."""
    monkeypatch.setattr(BlockContent, "is_same", lambda self, parent, tokens, keys: self.parent is parent)
    monkeypatch.setattr("kvmanager_service.core.scheduler.Scheduler.check_integrity", lambda self: None)
    with pytest.raises(AssertionError, match="other tokens than the oracle's"):
        live_through_collisions(windows, 200)
