"""What each policy is for; that it does exactly what it says is `test_block_pool`'s machine's to prove."""

import random
from collections.abc import Iterable, Sequence

import pytest

from kvmanager_service.core.adoption import TaggedBlock, adopt_block
from kvmanager_service.core.eviction_policies import EVICTION_POLICIES, LFUPolicy
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.replay.options import parse
from tests.unit.core.builders import block_ids, free_ids, make_request
from tests.unit.core.mru_policy import MRUPolicy

BLOCK_SIZE = 2
ALL = sorted(EVICTION_POLICIES)


def make_kv(policy: str, num_blocks: int = 7) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK_SIZE, eviction_policy=policy)


def run(kv: KVCacheManager, blocks: Sequence[int], retention_priority: int = 0) -> list[int]:
    """Compute a prompt of these full blocks, and one token. Returns which blocks of the pool hold the full ones."""
    prompt = [token for block in blocks for token in [block] * BLOCK_SIZE] + [0]
    request = make_request(prompt=prompt, retention_priority=retention_priority)
    assert kv.allocate_sequence(request)
    held = block_ids(request.blocks[: len(blocks)])
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request, 0)
    kv.free(request)
    kv.check_integrity([])
    return held


def cached(kv: KVCacheManager, prompts: Iterable[int]) -> set[int]:
    """Which one-block prompts would be hits."""
    return {prompt for prompt in prompts if kv.get_computed_blocks(make_request(prompt=[prompt] * BLOCK_SIZE + [0]))}


def test_pool_unknown_policy_raises() -> None:
    with pytest.raises(ValueError, match="one of lru, lfu, fifo, priority, got 'mru'"):
        make_kv("mru")


def test_lru_keeps_what_was_used_last() -> None:
    kv = make_kv("lru", num_blocks=4)
    for prompt in (1, 2, 1, 3):
        run(kv, [prompt])
    assert cached(kv, range(1, 4)) == {1, 3}


def test_fifo_hit_does_not_save_a_block() -> None:
    kv = make_kv("fifo", num_blocks=4)
    for prompt in (1, 2, 1, 3):
        run(kv, [prompt])
    assert cached(kv, range(1, 4)) == {2, 3}


def test_lfu_keeps_what_was_used_most_and_forgets_its_uses_with_it() -> None:
    kv = make_kv("lfu", num_blocks=4)
    for prompt in (1, 1, 2, 3, 4):
        run(kv, [prompt])
    assert cached(kv, range(1, 5)) == {1, 4}
    kv.pool.get_new_blocks(2)  # 4 and what is empty
    kv.pool.get_new_blocks(1)  # 1, too
    kv.pool.free_blocks(kv.pool.blocks[1:])
    for prompt in (1, 2, 3):
        run(kv, [prompt])
    assert cached(kv, range(1, 4)) == {2, 3}, "what 1 was used for before it was evicted does not count"


def test_priority_keeps_the_higher_and_is_lru_within_one() -> None:
    kv = make_kv("priority", num_blocks=5)
    run(kv, [1], retention_priority=5)
    run(kv, [2], retention_priority=-5)
    run(kv, [3])
    run(kv, [1], retention_priority=-100)  # it has the highest of those that used it
    run(kv, [4])
    assert cached(kv, range(1, 5)) == {1, 3, 4}
    run(kv, [5])
    assert cached(kv, range(1, 6)) == {1, 4, 5}


@pytest.mark.parametrize("policy", ALL)
def test_every_policy_evicts_the_deepest_part_of_a_prefix_first(policy: str) -> None:
    kv = make_kv(policy)
    held = run(kv, [1, 2, 3, 4])
    assert free_ids(kv)[-4:] == held[::-1]


@pytest.mark.parametrize("policy", ALL)
def test_every_policy_hands_out_emptied_blocks_before_cached_ones(policy: str) -> None:
    kv = make_kv(policy)
    first, second = run(kv, [1])[0], run(kv, [2])[0]
    kv.pool.distrust([kv.pool.blocks[second]])
    assert free_ids(kv)[-1] == first
    assert block_ids(kv.pool.get_new_blocks(5)).count(second) == 1
    assert cached(kv, [1]) == {1}


@pytest.mark.parametrize("policy", ALL)
def test_every_policy_block_in_use_is_not_handed_out(policy: str) -> None:
    kv = make_kv(policy)
    held = run(kv, [1, 2])
    request = make_request(prompt=[1, 1, 2, 2, 0])
    assert kv.allocate_sequence(request)
    taken = kv.pool.get_new_blocks(kv.pool.num_free_blocks)
    assert not set(held) & set(block_ids(taken))
    assert kv.pool.num_free_blocks == 0
    kv.free(request)
    assert set(held) <= set(free_ids(kv))


@pytest.mark.parametrize("policy", ALL)
def test_every_policy_adopted_blocks_are_evicted_deepest_first(policy: str) -> None:
    old, kv = make_kv("lru"), make_kv(policy)
    held = run(old, [1, 2, 3])
    contents = [old.pool.blocks[block_id].content for block_id in held]
    parent = None
    for block_id, content in zip(held, contents, strict=True):
        assert content is not None
        parent = adopt_block(kv.pool, TaggedBlock(block_id, content.block_hash, 0, 0, content.token_bytes, b""), parent)
    kv.pool.free_blocks([kv.pool.blocks[block_id] for block_id in reversed(held)])
    kv.check_integrity([])
    assert free_ids(kv)[-3:] == held[::-1]


def test_lfu_a_block_hit_without_end_leaves_no_levels_behind() -> None:
    kv = make_kv("lfu", num_blocks=4)
    for _ in range(2000):
        run(kv, [1])
    policy = kv.pool.free_block_queue
    assert isinstance(policy, LFUPolicy)
    assert policy.num_levels == 1
    assert policy.num_heap_entries <= 2 + 64 + 1


@pytest.mark.patches_core
def test_policy_of_somebody_else_needs_a_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVICTION_POLICIES, "mru", MRUPolicy)
    kv = make_kv("mru", num_blocks=4)
    for prompt in (1, 2, 3):
        run(kv, [prompt])
    assert cached(kv, range(1, 4)) == {1, 3}
    held = kv.get_computed_blocks(make_request(prompt=[1] * BLOCK_SIZE + [0]))
    kv.pool.touch(held)
    kv.pool.distrust(held)
    kv.pool.free_blocks(held)
    kv.pool.advance(5.0)
    kv.check_integrity([])
    assert cached(kv, range(1, 4)) == {3}
    options = parse(["trace", "--num-blocks", "9", "--eviction-policy", "mru"])
    assert options.eviction_policy == "mru", "the flag's choices come from the same line"


@pytest.mark.parametrize("policy", ALL)
def test_every_policy_takes_and_frees_the_same_blocks_in_the_long_run(policy: str) -> None:
    rng = random.Random(7)
    kv = make_kv(policy, num_blocks=40)
    for _ in range(500):
        run(kv, [rng.randrange(3), *(rng.randrange(9) for _ in range(rng.randrange(12)))], rng.randrange(-100, 101))
    assert sorted(free_ids(kv)) == list(range(1, 40))
