"""Blocks of several KV groups in host memory: which leave, which come back, and when a request computes again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow
from kvmanager_service.core.request import Request
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.step import CopyDirection, Step
from kvmanager_service.core.step_plan import StepPlan
from tests.unit.core.builders import (
    make_coordinator,
    make_new,
    make_request,
    make_result,
    make_scheduler,
    rows_of,
    run_step,
    table_ids,
)

OUT, IN = CopyDirection.DEVICE_TO_HOST, CopyDirection.HOST_TO_DEVICE
FULL_AND_SLIDING = [FullAttention(4), SlidingWindow(4, 6)]
NUM_HOST_BLOCKS = 40


def make_swapping(
    num_blocks: int,
    groups: Sequence[KVGroup] = FULL_AND_SLIDING,
    *,
    num_host_blocks: int = NUM_HOST_BLOCKS,
    enable_caching: bool = True,
    **limits: Any,
) -> Scheduler:
    """Chunks of at most 8 tokens."""
    kv = make_coordinator(groups, num_blocks, longest_chunk=8, enable_caching=enable_caching)
    limits = {"preemption_mode": "swap", "max_num_batched_tokens": 8} | limits
    return make_scheduler(kv, num_host_blocks=num_host_blocks, **limits)


def schedule(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    scheduler.check_integrity()
    return step


def acknowledge(scheduler: Scheduler, step: Step) -> None:
    scheduler.update(make_result(step))
    scheduler.check_integrity()


def until_preempted(scheduler: Scheduler, lengths: dict[str, int]) -> tuple[Request, list[list[int]], Step]:
    """Let requests grow till one gives way. Returns it, the tables it had, and the step that it gave way in."""
    for request_id, length in lengths.items():
        scheduler.add_request(make_new(request_id, length, max_tokens=40))
    while True:
        tables = {request.request_id: table_ids(request) for request in scheduler.running.values()}
        step = schedule(scheduler)
        if scheduler.stats.preemptions:
            (victim,) = scheduler.waiting
            return victim, tables[victim.request_id], step
        acknowledge(scheduler, step)


def host_used(scheduler: Scheduler) -> int:
    assert scheduler.swap_space is not None
    return scheduler.swap_space.num_used_host_blocks


def copies(step: Step, direction: CopyDirection) -> list[tuple[int, int]]:
    return [(copy.source_id, copy.target_id) for copy in step.copies if copy.direction is direction]


def test_victim_of_several_groups_leaves_what_its_next_token_reads_of_each() -> None:
    scheduler = make_swapping(18)
    victim, (full, window), step = until_preempted(scheduler, {"a": 14, "b": 14})
    (copy,) = scheduler.swap_space._copies.values()  # type: ignore[union-attr]
    first = (copy.num_tokens - 6 + 1) // 4
    kept = [block_id for block_id in [*full, *window[first:]] if block_id]
    sources = [source for source, _ in copies(step, OUT)]
    assert sorted(sources) == sorted(kept), "of full attention all, of the window its tail"
    assert 0 not in sources
    assert len(window) > first > 0
    assert (scheduler.stats.swapped_out, host_used(scheduler), victim.tables) == (1, len(kept), [])


def test_blocks_of_no_group_are_handed_out_before_their_copy_is_acknowledged() -> None:
    scheduler = make_swapping(18)
    _, _, step = until_preempted(scheduler, {"a": 14, "b": 14})
    leaving = {source for source, _ in copies(step, OUT)}
    pool = scheduler.kv.pool
    assert all(pool.blocks[block_id].ref_cnt == 1 for block_id in leaving)
    taken = {block.block_id for block in pool.get_new_blocks(pool.num_free_blocks)}
    assert not taken & leaving
    pool.free_blocks([pool.blocks[block_id] for block_id in taken])
    acknowledge(scheduler, step)
    assert all(pool.blocks[block_id].ref_cnt == 0 for block_id in leaving)


@pytest.mark.parametrize(
    "groups",
    [
        FULL_AND_SLIDING,
        [SlidingWindow(4, 6)],
        [FullAttention(2), SlidingWindow(4, 9), ChunkedLocal(4, 12)],
    ],
)
def test_victim_comes_back_with_null_blocks_before_its_windows_and_computes_nothing_twice(
    groups: list[KVGroup],
) -> None:
    """Without a cache, so that the host is all there is."""
    need = make_coordinator(groups, longest_chunk=8).num_blocks_for(43)
    scheduler = make_swapping(1 + need + need // 4, groups, enable_caching=False)
    victim, _, leaving = until_preempted(scheduler, {"a": 3, "b": 3})
    acknowledge(scheduler, leaving)
    num_tokens = victim.num_swapped_tokens
    held = host_used(scheduler)
    assert num_tokens == victim.num_tokens - 1
    assert held == sum(-(-num_tokens // group.block_size) - group.first_needed_block(num_tokens) for group in groups)
    while victim.num_swapped_tokens and not victim.tables:
        step = schedule(scheduler)
        if not victim.tables:
            acknowledge(scheduler, step)
    assert len(copies(step, IN)) == held
    assert rows_of(step)[victim.request_id] == (num_tokens, 1)
    for group, table in zip(groups, victim.tables, strict=True):
        first = group.first_needed_block(num_tokens)
        assert table.first == first
        assert [block.block_id == 0 for block in table.blocks] == [index < first for index in range(len(table.blocks))]
    acknowledge(scheduler, step)
    assert (victim.num_swapped_tokens, scheduler.stats.swapped_in) == (0, 1)


def test_victim_takes_what_the_cache_has_of_each_group_and_copies_the_rest() -> None:
    scheduler = make_swapping(18)
    victim, (full, _), leaving = until_preempted(scheduler, {"a": 14, "b": 14})
    acknowledge(scheduler, leaving)
    scheduler.abort(next(iter(scheduler.running)))
    # All that was given back is cached still, and was full but for each group's last block.
    back = schedule(scheduler)
    assert table_ids(victim)[0][: len(full) - 1] == full[: len(full) - 1]
    assert len(copies(back, IN)) <= len(FULL_AND_SLIDING)
    acknowledge(scheduler, back)
    assert host_used(scheduler) == 0


def test_host_pool_too_small_for_all_groups_victim_computes_again() -> None:
    scheduler = make_swapping(18, num_host_blocks=5)
    victim, _, step = until_preempted(scheduler, {"a": 14, "b": 14})
    assert (copies(step, OUT), scheduler.stats.swapped_out, victim.num_swapped_tokens) == ([], 0, 0)


def test_window_that_has_moved_on_is_followed_back_into_the_cache() -> None:
    """Of a token that is being sampled nothing is kept: the one before it reads a block that its window has left."""
    kv = make_coordinator(FULL_AND_SLIDING, longest_chunk=8)
    request = make_request("a", 13)
    assert kv.allocate_sequence(request)
    request.num_computed_tokens = 13
    kv.cache_blocks(request, 0)
    left = request.tables[1].blocks[1]
    request.append_token(bytes(4))
    assert kv.allocate_slots(request, 14)
    assert request.tables[1].first == 2
    assert left.ref_cnt == 0
    kept = kv.detach(request, 12)
    assert kept is not None
    assert left in kept
    kv.free(request)
    kv.check_integrity([], [kept])
    kv.give_back_detached(request, kv.entries(12), kept)
    kv.check_integrity([])


def test_window_that_has_moved_on_from_what_somebody_took_since_is_not_swapped() -> None:
    kv = make_coordinator(FULL_AND_SLIDING, 12, longest_chunk=8)
    request = make_request("a", 13)
    assert kv.allocate_sequence(request)
    request.num_computed_tokens = 13
    kv.cache_blocks(request, 0)
    request.append_token(bytes(4))
    assert kv.allocate_slots(request, 14)
    taken = kv.pool.get_new_blocks(kv.pool.num_free_blocks)
    assert kv.detach(request, 12) is None
    kv.check_integrity([request], [taken])


@pytest.mark.parametrize(("num_tokens", "is_kept"), [(7, True), (6, False), (4, True)])
def test_state_leaves_where_it_stands_or_at_a_checkpoint_only(num_tokens: int, *, is_kept: bool) -> None:
    kv = make_coordinator([FullAttention(4), RecurrentState(4)], longest_chunk=8)
    request = make_request("a", 8)
    assert kv.allocate_sequence(request)
    request.num_computed_tokens = 7
    kv.cache_blocks(request, 0)
    kept = kv.detach(request, num_tokens)
    assert (kept is not None) == is_kept
    if kept is not None:
        assert len(kept) == -(-num_tokens // 4) + 1, "all of full attention, and one state"


def test_copy_is_forgotten_when_what_its_windows_have_left_turns_out_to_have_failed() -> None:
    """b reads what a's row fills, goes on from it and leaves with a partial block only; then a's row fails."""
    scheduler = make_swapping(14, [SlidingWindow(4, 3)], max_num_batched_tokens=64, max_outstanding=2)
    prompt = list(range(8))
    scheduler.add_request(make_new("a", prompt, max_tokens=20))
    scheduler.add_request(make_new("b", [*prompt, *range(100, 107)], max_tokens=20))
    filling = schedule(scheduler)
    a, b = scheduler.requests["a"], scheduler.requests["b"]
    assert b.tables[0].blocks[1] is a.tables[0].blocks[1]
    plan = StepPlan(filling.step_id + 1, filling, scheduler.kv, scheduler.config)
    scheduler.residency.leave(b, plan)
    scheduler.book.preempt(b)
    step = plan.make_step([])
    scheduler.outstanding.append(step)
    (left,) = {scheduler.kv.pool.blocks[source] for source, _ in copies(step, OUT)}
    assert (b.num_swapped_tokens, left.content) == (14, None)
    scheduler.abort("a")
    scheduler.check_integrity()
    scheduler.update(make_result(filling, failed=[0]))
    scheduler.check_integrity()
    assert (b.num_swapped_tokens, left.ref_cnt) == (0, 0)
    assert host_used(scheduler) == 1, "which the step that is out still writes to"
    acknowledge(scheduler, step)
    assert host_used(scheduler) == 0


def test_replaced_cache_leaves_no_request_with_a_copy() -> None:
    scheduler = make_swapping(18)
    victim, _, step = until_preempted(scheduler, {"a": 14, "b": 14})
    acknowledge(scheduler, step)
    assert victim.num_swapped_tokens
    scheduler.replace_cache(make_coordinator(FULL_AND_SLIDING, 18, longest_chunk=8), NUM_HOST_BLOCKS)
    scheduler.check_integrity()
    assert victim.num_swapped_tokens == 0
    while scheduler.has_work:
        run_step(scheduler)


def test_forked_blocks_on_their_way_are_not_counted_as_shared_any_more() -> None:
    """A request that waits for room takes no copy of a block of which the other reference is about to be dropped."""
    kv = make_coordinator(FULL_AND_SLIDING, longest_chunk=8)
    parent, child = make_request("a", 6), make_request("a", 6, arrival_seq=1)
    assert kv.allocate_sequence(parent)
    parent.num_computed_tokens = 6
    kv.fork(parent, child, 5)
    full, window = (table.blocks[1] for table in child.tables)
    assert kv.num_new_blocks(child, 6) == 2
    assert kv.num_new_blocks(child, 6, {full: 1}) == 1
    assert kv.num_new_blocks(child, 6, {full: 1, window: 1}) == 0
    assert kv.num_new_blocks(child, 10, {full: 1, window: 1}) == 2
