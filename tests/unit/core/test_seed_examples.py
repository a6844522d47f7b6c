"""The worked examples of the seed document, chapter 3."""

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
