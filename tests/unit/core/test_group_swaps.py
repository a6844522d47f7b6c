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
    block_ids,
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
STATES: dict[str, list[KVGroup]] = {
    "full and states": [FullAttention(4), RecurrentState(8), RecurrentState(8)],
    "state only": [RecurrentState(4)],
    "sliding and state": [SlidingWindow(4, 9), RecurrentState(4)],
}
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


@pytest.mark.parametrize("num_computed", [8, 9, 11, 12])
def test_what_leaves_is_what_the_next_token_reads_where_the_request_stands(num_computed: int) -> None:
    kv = make_coordinator([FullAttention(4), SlidingWindow(4, 6), RecurrentState(4)], longest_chunk=8)
    request = make_request("a", 16)
    assert kv.allocate_sequence(request)
    for stop in range(1, num_computed + 1):
        assert kv.allocate_slots(request, stop)
        request.num_computed_tokens = stop
        kv.cache_blocks(request, 0)
    full, window, state = (table.blocks for table in request.tables)
    last = (num_computed - 1) // 4
    expected = [*full[: last + 1], *window[(num_computed - 5) // 4 : last + 1], state[last]]
    kept = kv.detach(request)
    assert sorted(block_ids(kept)) == sorted(block_ids(expected))
    kv.free(request)
    kv.check_integrity([], [kept])
    kv.give_back_detached(request, kv.entries(num_computed), kept)
    kv.check_integrity([])


@pytest.mark.parametrize("model", STATES)
def test_victims_with_states_are_swapped_though_a_token_of_each_is_under_way(model: str) -> None:
    """A step is queued ahead: the state has moved on for a token that nobody knows yet. No cache, so no token is found.

    What is computed is each prompt and each output but the last, once: the token under way is kept, not dropped. Only
    who is preempted while it returns goes back to what the host still holds, and computes the row since then again.
    """
    groups = STATES[model]
    need = make_coordinator(groups, longest_chunk=8).num_blocks_for(40)
    scheduler = make_swapping(1 + need + need // 2, groups, max_outstanding=2, enable_caching=False)
    for index in range(6):
        scheduler.add_request(make_new(f"r{index}", 5 + index, max_tokens=30))
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.check_integrity()
        if step is None or len(scheduler.outstanding) == 2:
            acknowledge(scheduler, scheduler.outstanding[0])
    outputs = [token for output in scheduler.take_outputs() for token in output.token_ids]
    assert len(outputs) == 6 * 30
    stats = scheduler.stats
    assert stats.swapped_out >= 1
    assert stats.swapped_in == stats.preemptions
    again = stats.preemptions - stats.swapped_out
    assert stats.tokens_computed == sum(5 + index + 29 for index in range(6)) + again


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
    scheduler.book.preempt(b, keeps_samples=scheduler.residency.leave(b, plan))
    step = plan.make_step([])
    scheduler.outstanding.append(step)
    (left,) = {scheduler.kv.pool.blocks[source] for source, _ in copies(step, OUT)}
    assert (b.num_swapped_tokens, b.num_pending_tokens, left.content) == (15, 1, None)
    scheduler.abort("a")
    scheduler.check_integrity()
    scheduler.update(make_result(filling, failed=[0]))
    scheduler.check_integrity()
    assert (b.num_swapped_tokens, b.num_pending_tokens, left.ref_cnt) == (0, 0, 0)
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
