"""The worked examples and self-checks of the seed document, chapter 3, through the scheduler.

What concerns one class alone is tested where that class is: 1 and self-check 5 (blocks of an H100) in
`test_memory_profiler` and `test_client_plan`; 2 and 3 (the queue and its invariants) in `test_free_block_queue` and
`test_block_pool_model`; 5.1 in `test_extra_keys`; the bug that self-check 2 warns of, made on purpose, and 6 in
`test_kv_cache_manager`; 7's choice of a victim in `test_scheduler_preemption`; self-check 4 (swap or recompute) in
`test_swap_policy`; 8 in `test_fp8`; 9 in `test_kv_groups`; of 10 the block that is not full in `test_paged_attention`
and the colliding hash in `test_block_pool`.
"""

import random
from itertools import count

import pytest

from kvmanager_service.core.eviction_policies import EVICTION_POLICIES
from tests.unit.core.builders import (
    block_ids,
    free_ids,
    make_kv,
    make_new,
    make_result,
    make_scheduler,
    rows_of,
    run_step,
)
from tests.unit.core.mru_policy import MRUPolicy


def test_seed_prompt_of_50_and_100_generated_takes_4_blocks_then_6_more_at_65_81_and_on_to_145() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20, block_size=16))
    request = scheduler.add_request(make_new(prompt=50, max_tokens=100))
    grown_at = {}
    num_blocks = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        if len(request.blocks) != num_blocks:
            grown_at[request.num_computed_tokens] = len(request.blocks)
            num_blocks = len(request.blocks)
            assert all(block.ref_cnt == 1 for block in request.blocks)
        scheduler.update(make_result(step, 10_000 + request.num_tokens))
        scheduler.check_integrity()
    # The 150th token is produced and never computed: nothing follows it.
    assert grown_at == {50: 4, 65: 5, 81: 6, 97: 7, 113: 8, 129: 9, 145: 10}
    assert request.num_output_tokens == 100
    assert scheduler.kv.pool.num_free_blocks == 19


def test_seed_end_of_the_request_keeps_hashes_and_frees_the_deepest_first() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=12, block_size=16))
    request = scheduler.add_request(make_new(prompt=50, max_tokens=100))
    while scheduler.has_work:
        run_step(scheduler, 10_000 + request.num_tokens)
    # Of 10 blocks 9 are full; the tenth holds 5 tokens and nothing worth keeping. Block 11 was never used.
    assert free_ids(scheduler.kv) == [10, 11, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert scheduler.kv.pool.num_cached_blocks == 9


def test_seed_shared_prefix_counts_references_up_and_down() -> None:
    """Self-check 1: blocks 0-2 are shared, block 3 and on are the request's own."""
    scheduler = make_scheduler(make_kv(num_blocks=20, block_size=16))
    system = list(range(48))
    first = scheduler.add_request(make_new("a", [*system, 100, 101], max_tokens=50))
    run_step(scheduler, 5)
    second = scheduler.add_request(make_new("b", [*system, 200, 201], max_tokens=50))
    step = run_step(scheduler, 6)
    assert rows_of(step)["b"] == (48, 2), "the shared part is not computed again"
    shared = first.blocks[:3]
    assert second.blocks[:3] == shared
    assert [block.ref_cnt for block in shared] == [2, 2, 2]
    assert first.blocks[3] is not second.blocks[3]
    assert second.num_cached_tokens == 48
    own = block_ids(second.blocks[3:])
    scheduler.abort("b")
    assert [block.ref_cnt for block in shared] == [1, 1, 1]
    assert set(own) <= set(free_ids(scheduler.kv))
    scheduler.abort("a")
    assert [block.ref_cnt for block in shared] == [0, 0, 0]
    scheduler.check_integrity()


def test_seed_request_after_the_end_of_another_takes_its_blocks_out_of_the_free_queue() -> None:
    """5.4: A has ended, its three blocks are free and hashed; B has the same system prompt."""
    scheduler = make_scheduler(make_kv(num_blocks=20, block_size=16))
    system = list(range(48))
    first = scheduler.add_request(make_new("a", system, max_tokens=1))
    run_step(scheduler)
    assert scheduler.kv.pool.num_free_blocks == 19
    second = scheduler.add_request(make_new("b", [*system, 7], max_tokens=5))
    step = scheduler.schedule()
    assert rows_of(step) == {"b": (48, 1)}
    assert block_ids(second.blocks[:3]) == [1, 2, 3]
    assert first.blocks == []
    assert [block.ref_cnt for block in second.blocks] == [1, 1, 1, 1]


def test_seed_block_is_hashed_once_it_is_full_and_not_before() -> None:
    """T=2: block 3 of 4 is full after the prefill of 50, the fourth is not."""
    scheduler = make_scheduler(make_kv(num_blocks=20, block_size=16))
    request = scheduler.add_request(make_new(prompt=50, max_tokens=100))
    run_step(scheduler)
    assert [block.block_hash is not None for block in request.blocks] == [True, True, True, False]


def test_seed_preempted_request_waits_at_the_front_and_finds_its_prefix_again() -> None:
    """7: all references dropped, computed tokens 0, first in the queue; the prefix cache saves most of the work."""
    scheduler = make_scheduler(make_kv(num_blocks=8, block_size=4))
    first = scheduler.add_request(make_new("a", 12, max_tokens=20))
    second = scheduler.add_request(make_new("b", 14, max_tokens=20))
    scheduler.add_request(make_new("c", 4, max_tokens=20))
    run_step(scheduler)
    assert list(scheduler.running) == ["a", "b"]
    step = scheduler.schedule()
    assert rows_of(step) == {"a": (12, 1)}, "a needs a fourth block and the pool has 7"
    assert [request.request_id for request in scheduler.waiting] == ["b", "c"]
    assert second.num_computed_tokens == 0
    assert second.blocks == []
    assert second.num_preemptions == 1
    scheduler.abort("a")
    assert first.blocks == []
    scheduler.update(make_result(step))
    step = scheduler.schedule()
    # The fourth block of b was partial; a took it, and the three full ones are found again.
    assert rows_of(step)["b"] == (12, 3)


def test_seed_hits_are_in_order_and_nothing_after_the_first_miss_is_one() -> None:
    """5.3: the third block has the other's tokens, too, and is computed again: its hash hangs on the second's."""
    scheduler = make_scheduler(make_kv(num_blocks=20, block_size=16))
    prompt = list(range(100, 150))
    scheduler.add_request(make_new("a", prompt, max_tokens=1))
    run_step(scheduler)
    second = scheduler.add_request(make_new("b", [*prompt[:16], *range(16), *prompt[32:]], max_tokens=1))
    assert rows_of(run_step(scheduler)) == {"b": (16, 34)}
    assert second.num_cached_tokens == 16


def test_seed_same_second_block_after_another_first_one_is_no_hit() -> None:
    """Self-check 2: A is [1..16][99..], B is [5..20][99..]; the K/V of their second blocks differ, as the hashes do."""
    scheduler = make_scheduler(make_kv(num_blocks=20, block_size=16))
    same = list(range(99, 115))
    first = scheduler.add_request(make_new("a", [*range(1, 17), *same, 7], max_tokens=50))
    run_step(scheduler)
    second = scheduler.add_request(make_new("b", [*range(5, 21), *same, 7], max_tokens=50))
    assert rows_of(run_step(scheduler))["b"] == (0, 33)
    third = scheduler.add_request(make_new("c", [*range(1, 17), *same, 7], max_tokens=50))
    assert rows_of(run_step(scheduler))["c"] == (32, 1)
    assert first.block_hashes[1] != second.block_hashes[1]
    assert first.block_hashes[:2] == third.block_hashes[:2]
    assert third.blocks[1] is first.blocks[1]
    assert third.blocks[1] is not second.blocks[1]


def cached_tokens_of_chats(policy: str, num_blocks: int, seed: int) -> tuple[int, int]:
    """24 chats of several turns, six of them open at a time; who speaks next is drawn.

    A turn's prompt is all that was said before and something new. Returns how many tokens of all prompts were cached,
    and how many there were.
    """
    rng = random.Random(seed)
    scheduler = make_scheduler(make_kv(1 + num_blocks, 16, eviction_policy=policy), max_num_batched_tokens=4096)
    new_tokens, turns = count(10), count()
    turns_left = [rng.randint(3, 9) for _ in range(24)]
    said: list[list[int]] = [[] for _ in turns_left]
    num_cached = num_prompt = 0
    while still_open := [chat for chat, left in enumerate(turns_left) if left][:6]:
        chat = rng.choice(still_open)
        turns_left[chat] -= 1
        said[chat] += [next(new_tokens) for _ in range(rng.randint(10, 60))]
        request = scheduler.add_request(make_new(str(next(turns)), said[chat], max_tokens=rng.randint(10, 60)))
        while scheduler.has_work:
            said[chat].append(next(new_tokens))
            run_step(scheduler, said[chat][-1])
        num_cached += request.num_cached_tokens
        num_prompt += request.num_prompt_tokens
    return num_cached, num_prompt


@pytest.mark.patches_core
@pytest.mark.parametrize("num_blocks", [80, 120])
def test_seed_lru_hits_at_least_twice_what_lifo_does_on_chats_of_several_turns(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """Self-check 3: "LRU's hit rate is 2-5 times that of LIFO"; also at the end of `test_public_trace`."""
    monkeypatch.setitem(EVICTION_POLICIES, "lifo", MRUPolicy)
    lru, num_prompt = cached_tokens_of_chats("lru", num_blocks, seed=3)
    lifo, asked_of_lifo = cached_tokens_of_chats("lifo", num_blocks, seed=3)
    assert asked_of_lifo == num_prompt, "both were asked the same"
    assert lru > num_prompt / 2
    assert lru >= 2 * lifo > 0
