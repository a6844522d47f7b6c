"""Preemption by swap: where blocks are while they leave, while the host holds them, and while they come back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.request import FinishReason, NewBranch, Request, RequestStatus
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.step import CopyDirection, Step
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.swap_policy import MAX_LOST_COPIES, PROBE_EVERY
from kvmanager_service.core.swap_space import SwapSpace
from tests.unit.core.builders import (
    block_ids,
    free_ids,
    make_kv,
    make_new,
    make_result,
    make_scheduler,
    outputs_of,
    read_int32,
    rows_of,
    run_step,
)

OUT, IN = CopyDirection.DEVICE_TO_HOST, CopyDirection.HOST_TO_DEVICE


def make_swapping(num_blocks: int = 7, num_host_blocks: int = 20, **limits: Any) -> Scheduler:
    """Six blocks of 4 tokens by default, and host blocks enough."""
    kv = make_kv(num_blocks=num_blocks, block_size=4, enable_caching=limits.pop("enable_caching", True))
    return make_scheduler(kv, num_host_blocks=num_host_blocks, **({"preemption_mode": "swap"} | limits))


def fill(scheduler: Scheduler, lengths: dict[str, int], max_tokens: int = 30) -> None:
    """Admit requests, each with a prompt of so many tokens, and let each sample its first token."""
    for request_id, length in lengths.items():
        scheduler.add_request(make_new(request_id, length, max_tokens=max_tokens))
    run_step(scheduler)


def schedule(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    scheduler.check_integrity()
    return step


def acknowledge(scheduler: Scheduler, step: Step, **values: Any) -> None:
    scheduler.update(make_result(step, **values))
    scheduler.check_integrity()


def orders_of(step: Step) -> list[tuple[CopyDirection, int, int]]:
    return [tuple(copy) for copy in step.copies]


def host_used(scheduler: Scheduler) -> int:
    assert scheduler.swap_space is not None
    return scheduler.swap_space.num_used_host_blocks


def leave_c(scheduler: Scheduler) -> tuple[Request, Step]:
    """a, b and c fill the pool of six; a grows, and c's blocks are on their way to the host."""
    fill(scheduler, {"a": 8, "b": 8, "c": 7})
    return scheduler.requests["c"], schedule(scheduler)


def hold_c(scheduler: Scheduler) -> Request:
    """c is in the host's memory, and a has grown."""
    request, step = leave_c(scheduler)
    acknowledge(scheduler, step)
    return request


def return_c(scheduler: Scheduler) -> tuple[Request, Step]:
    """c's blocks are on their way back: a and b have ended, and nothing of c is found in the cache."""
    request = hold_c(scheduler)
    scheduler.abort("a")
    scheduler.abort("b")
    step = schedule(scheduler)
    return request, step


def leave_c_with_a_sample_out(max_tokens: int = 30) -> tuple[Scheduler, Request, Step, Step]:
    """A step samples for a, b and c; behind it c gives way for a block that a needs. Returns both steps."""
    scheduler = make_swapping(max_outstanding=2)
    for request_id in "abc":
        scheduler.add_request(make_new(request_id, 8, max_tokens=30 if request_id != "c" else max_tokens))
    sampling, leaving = schedule(scheduler), schedule(scheduler)
    request = scheduler.requests["c"]
    assert request.status is RequestStatus.PREEMPTED
    assert (request.num_swapped_tokens, request.num_tokens, request.num_pending_tokens) == (8, 8, 1)
    return scheduler, request, sampling, leaving


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_schedule_no_free_block_copies_the_victim_out_and_keeps_its_blocks() -> None:
    scheduler = make_swapping()
    fill(scheduler, {"a": 8, "b": 8, "c": 7})
    victim = block_ids(scheduler.requests["c"].blocks)
    step = schedule(scheduler)
    assert orders_of(step) == [(OUT, victim[0], 0), (OUT, victim[1], 1)]
    assert rows_of(step) == {}, "whoever needs a block waits for it"
    assert free_ids(scheduler.kv) == []
    assert [request.request_id for request in scheduler.waiting] == ["c"]
    assert (scheduler.stats.preemptions, scheduler.stats.swapped_out, host_used(scheduler)) == (1, 1, 2)
    acknowledge(scheduler, step)
    assert scheduler.kv.pool.num_free_blocks == 2
    assert rows_of(schedule(scheduler)) == {"a": (8, 1), "b": (8, 1)}


def test_schedule_blocks_on_their_way_suffice_nobody_else_is_preempted() -> None:
    """Two steps may be out: the second finds as few free blocks as the first, and must not take another victim."""
    scheduler = make_swapping(max_outstanding=2)
    fill(scheduler, {"a": 8, "b": 8, "c": 7})
    leaving = schedule(scheduler)
    assert leaving.copies
    for _ in range(3):
        assert scheduler.schedule() is None
    assert list(scheduler.running) == ["a", "b"]
    assert scheduler.stats.preemptions == 1


def test_schedule_more_wait_than_blocks_are_on_their_way_another_is_preempted() -> None:
    """The latest leaves one block, and two wait for one each."""
    scheduler = make_swapping()
    fill(scheduler, {"a": 8, "b": 8, "c": 3, "d": 3})
    step = schedule(scheduler)
    assert (rows_of(step), len(step.copies)) == ({}, 2)
    assert [request.request_id for request in scheduler.waiting] == ["c", "d"]
    acknowledge(scheduler, step)
    assert rows_of(schedule(scheduler)) == {"a": (8, 1), "b": (8, 1)}


def test_plan_blocks_waited_for_are_those_of_who_still_waits() -> None:
    scheduler = make_swapping()
    fill(scheduler, {"a": 3, "b": 3})
    a, b = scheduler.requests.values()
    plan = StepPlan(9, None, scheduler.kv, scheduler.config)
    plan.wait(a, 2)
    plan.wait(b, 1)
    assert plan.num_awaited == 3
    plan.drop(a)
    assert plan.num_awaited == 1
    plan.drop(a)
    plan.wait(b, 4)
    assert plan.num_awaited == 4


@pytest.mark.patches_core
def test_schedule_many_wait_what_is_on_its_way_is_not_counted_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows want a block, none is free, and all that leave share a prefix."""
    num_hashed = num_counts = 0
    count_coming_free = SwapSpace._count_coming_free

    def counted(self: SwapSpace) -> int:
        nonlocal num_counts
        num_counts += 1
        return count_coming_free(self)

    def hashed(self: KVCacheBlock) -> int:
        nonlocal num_hashed
        num_hashed += 1
        return object.__hash__(self)

    scheduler = make_swapping(num_blocks=1 + 5 + 64 * 3, num_host_blocks=1000)
    prompt = list(range(20))
    scheduler.add_request(make_new("first", [*prompt, *range(100, 112)], max_tokens=30))
    run_step(scheduler)
    for index in range(1, 64):
        scheduler.add_request(make_new(f"r{index}", [*prompt, *range(200 * index, 200 * index + 11)], max_tokens=30))
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.kv.pool.num_free_blocks < 5
    monkeypatch.setattr(SwapSpace, "_count_coming_free", counted)
    monkeypatch.setattr(KVCacheBlock, "__hash__", hashed)
    step = scheduler.schedule()
    monkeypatch.undo()
    assert step is not None
    scheduler.check_integrity()
    assert scheduler.stats.preemptions > 10
    assert len(step.copies) == 8 * scheduler.stats.preemptions
    assert num_counts <= 1
    assert num_hashed <= 4 * len(step.copies)


def test_schedule_row_that_needs_no_block_goes_with_the_copies() -> None:
    scheduler = make_swapping()
    fill(scheduler, {"a": 8, "b": 6, "c": 7})
    step = schedule(scheduler)
    assert rows_of(step) == {"b": (6, 1)}
    assert len(step.copies) == 2


def test_schedule_victim_copies_computed_blocks_only_the_others_are_free_at_once() -> None:
    """c got the blocks of its whole prompt, and had computed the first of them."""
    scheduler = make_swapping(max_num_batched_tokens=12, long_prefill_token_threshold=4)
    fill(scheduler, {"a": 4, "b": 4, "c": 15})
    first = scheduler.requests["c"].blocks[0]
    step = schedule(scheduler)
    assert orders_of(step) == [(OUT, first.block_id, 0)]
    assert rows_of(step) == {"a": (4, 1), "b": (4, 1)}
    assert scheduler.kv.pool.num_free_blocks == 1
    assert first.ref_cnt == 1


def test_schedule_victim_that_computed_nothing_is_not_swapped() -> None:
    scheduler = make_swapping(num_blocks=4)
    fill(scheduler, {"a": 8})
    scheduler.add_request(make_new("c", 1, max_tokens=30))
    step = schedule(scheduler)
    assert rows_of(step) == {"a": (8, 1)}
    acknowledge(scheduler, step)
    assert scheduler.stats.swapped_out == 0


def test_schedule_host_pool_is_full_the_victim_computes_again() -> None:
    scheduler = make_swapping(num_host_blocks=1)
    request, step = leave_c(scheduler)
    assert step.copies == []
    assert rows_of(step) == {"a": (8, 1), "b": (8, 1)}
    acknowledge(scheduler, step)
    assert (request.num_preemptions, scheduler.stats.swapped_out) == (1, 0)


def test_schedule_victim_with_shared_blocks_copies_them_and_drops_its_references() -> None:
    """Its first two blocks are another's, too, and stay that one's."""
    scheduler = make_swapping(num_blocks=5)
    prompt = list(range(8))
    scheduler.add_request(make_new("a", [*prompt, 100], max_tokens=30))
    run_step(scheduler)
    scheduler.add_request(make_new("c", [*prompt, 200, 201, 202], max_tokens=30))
    run_step(scheduler)
    run_step(scheduler)
    a, table = scheduler.requests["a"], list(scheduler.requests["c"].blocks)
    step = schedule(scheduler)
    assert rows_of(step) == {"a": (11, 1)}
    assert [source for _, source, _ in orders_of(step)] == block_ids(table)
    assert table[:2] == a.blocks[:2]
    assert [block.ref_cnt for block in table] == [2, 2, 1]
    acknowledge(scheduler, step)
    assert [block.ref_cnt for block in table] == [1, 1, 0]


# --- held, and back ---------------------------------------------------------------------------------------------------


def test_schedule_held_request_comes_back_with_what_it_had_computed() -> None:
    scheduler = make_swapping(enable_caching=False)
    request, step = return_c(scheduler)
    assert rows_of(step) == {"c": (7, 1)}, "nothing is computed again"
    assert orders_of(step) == [(IN, 0, request.blocks[0].block_id), (IN, 1, request.blocks[1].block_id)]
    assert host_used(scheduler) == 2, "until the copies are acknowledged"
    acknowledge(scheduler, step)
    assert (host_used(scheduler), scheduler.stats.swapped_in) == (0, 1)


def test_schedule_held_request_finds_all_in_the_cache_and_copies_nothing() -> None:
    scheduler = make_swapping()
    scheduler.add_request(make_new("a", 8, max_tokens=30))
    scheduler.add_request(make_new("b", 8, max_tokens=30))
    scheduler.add_request(make_new("c", 8, max_tokens=30))
    run_step(scheduler)
    acknowledge(scheduler, schedule(scheduler))
    assert host_used(scheduler) == 2
    scheduler.abort("a")
    scheduler.abort("b")
    step = schedule(scheduler)
    assert (rows_of(step), step.copies) == ({"c": (8, 1)}, [])
    assert (host_used(scheduler), scheduler.stats.swapped_in) == (0, 0)


def test_schedule_held_request_finds_part_in_the_cache_and_copies_the_rest() -> None:
    scheduler = make_swapping()
    request, step = return_c(scheduler)  # one full block is still cached, three tokens of another are not
    assert orders_of(step) == [(IN, 1, request.blocks[1].block_id)]
    assert rows_of(step) == {"c": (7, 1)}
    assert len(request.contents) == 2, "its eighth token fills the second block"


def test_bring_back_blocks_are_found_by_others_once_they_are_back() -> None:
    scheduler = make_swapping()
    request, step = return_c(scheduler)
    assert request.blocks[1].provisional_step == step.step_id
    acknowledge(scheduler, step)
    assert request.blocks[1].provisional_step == 0
    scheduler.add_request(make_new("reader", [*read_int32(request.tokens(0, 8)), 1]))
    assert rows_of(schedule(scheduler))["reader"] == (8, 1)


def test_schedule_request_on_its_way_out_holds_up_those_behind_it() -> None:
    scheduler = make_swapping(num_blocks=8, max_outstanding=2)
    fill(scheduler, {"a": 8, "b": 8, "c": 11})
    scheduler.add_request(make_new("new", 1, max_tokens=3))
    step = schedule(scheduler)
    scheduler.abort("a")
    scheduler.abort("b")
    assert scheduler.schedule() is None, "the order of admission stays"
    acknowledge(scheduler, step)
    assert set(rows_of(schedule(scheduler))) == {"c", "new"}


def test_schedule_preempted_on_its_return_goes_back_to_what_the_host_holds() -> None:
    """It is not copied out once more: the host still has it."""
    scheduler = make_swapping(enable_caching=False, max_outstanding=2)
    hold_c(scheduler)
    a = scheduler.requests["a"]
    while a.num_computed_tokens < 11:
        run_step(scheduler)
    scheduler.abort("b")
    returning, following = schedule(scheduler), schedule(scheduler)
    assert rows_of(returning) == {"a": (11, 1), "c": (7, 1)}
    assert len(returning.copies) == 2
    assert (rows_of(following), following.copies) == ({"a": (12, 1)}, [])
    assert [request.request_id for request in scheduler.waiting] == ["c"]
    acknowledge(scheduler, returning)
    acknowledge(scheduler, following)
    assert host_used(scheduler) == 2, "the copy is held, whatever became of the step that read it"
    assert (scheduler.stats.swapped_out, scheduler.stats.swapped_in) == (1, 1)
    scheduler.abort("a")
    assert rows_of(schedule(scheduler)) == {"c": (7, 1)}


# --- what is lost -----------------------------------------------------------------------------------------------------


def test_lose_steps_copy_that_was_not_acknowledged_is_void() -> None:
    scheduler = make_swapping(enable_caching=False)
    leave_c(scheduler)
    scheduler.lose_steps()
    scheduler.check_integrity()
    assert (host_used(scheduler), scheduler.kv.pool.num_free_blocks) == (0, 6)
    scheduler.abort("a")
    scheduler.abort("b")
    assert rows_of(schedule(scheduler)) == {"c": (0, 8)}


def test_lose_steps_on_the_way_back_the_host_still_has_it() -> None:
    scheduler = make_swapping(enable_caching=False)
    request, _ = return_c(scheduler)
    scheduler.lose_steps()
    scheduler.check_integrity()
    assert host_used(scheduler) == 2
    step = schedule(scheduler)
    assert rows_of(step) == {"c": (7, 1)}
    assert [source for _, source, _ in orders_of(step)] == [0, 1]
    acknowledge(scheduler, step)
    assert request.num_preemptions == 2


def test_lose_steps_held_copy_outlives_it() -> None:
    scheduler = make_swapping(enable_caching=False)
    hold_c(scheduler)
    schedule(scheduler)
    scheduler.lose_steps()
    scheduler.check_integrity()
    assert host_used(scheduler) == 2


@pytest.mark.parametrize("stand", [leave_c, hold_c, return_c])
def test_replace_cache_what_the_host_held_is_gone(stand: Any) -> None:
    scheduler = make_swapping(enable_caching=False)
    stand(scheduler)
    scheduler.replace_cache(make_kv(num_blocks=7, block_size=4, enable_caching=False), 5)
    scheduler.check_integrity()
    assert host_used(scheduler) == 0
    for request_id in {"a", "b"} & scheduler.requests.keys():
        scheduler.abort(request_id)
    step = schedule(scheduler)
    assert (rows_of(step)["c"][0], step.copies) == (0, [])


def test_replace_cache_executor_without_host_memory_recomputes() -> None:
    scheduler = make_swapping()
    hold_c(scheduler)
    scheduler.replace_cache(make_kv(num_blocks=7, block_size=4))
    assert scheduler.swap_space is None
    for _ in range(200):
        if not scheduler.has_work:
            break
        assert not run_step(scheduler).copies
    assert not scheduler.has_work


def test_lose_steps_copies_lost_again_and_again_the_victims_compute_again() -> None:
    """An executor that dies of copying must not keep everybody from ever finishing."""
    scheduler = make_swapping(enable_caching=False)
    fill(scheduler, {"a": 8, "b": 8, "c": 7}, max_tokens=12)
    losses = 0
    for _ in range(PROBE_EVERY):
        if not scheduler.has_work:
            break
        step = schedule(scheduler)
        if step.copies:
            losses += 1
            scheduler.lose_steps()
            scheduler.check_integrity()
        else:
            acknowledge(scheduler, step)
    assert losses == MAX_LOST_COPIES
    assert not scheduler.has_work


# --- a row fails ------------------------------------------------------------------------------------------------------


def test_distrust_victims_row_in_the_step_before_failed_its_copy_is_void() -> None:
    scheduler = make_swapping(max_outstanding=2, enable_caching=False)
    for request_id, length in (("a", 8), ("b", 8), ("c", 7)):
        scheduler.add_request(make_new(request_id, length, max_tokens=30))
    first, second = schedule(scheduler), schedule(scheduler)
    assert second.copies
    acknowledge(scheduler, first, failed=[2])
    assert "c" in scheduler.requests, "what failed was a former life of it"
    assert scheduler.kv.pool.num_free_blocks == 2, "its blocks need not be read any more"
    assert host_used(scheduler) == 2, "but may still be written"
    acknowledge(scheduler, second)
    assert host_used(scheduler) == 0
    scheduler.abort("a")
    scheduler.abort("b")
    assert rows_of(schedule(scheduler))["c"] == (0, 7)


def test_distrust_copy_of_a_prefix_in_doubt_is_void_others_are_not() -> None:
    """x fails; y, which shares a prefix with it, and z, which does not, are in host memory."""
    scheduler = make_swapping(num_blocks=12)
    prompt = list(range(8))
    for request_id, tokens in (("x", [*prompt, 1]), ("big", range(90, 106)), ("y", [*prompt, 2]), ("z", range(50, 59))):
        scheduler.add_request(make_new(request_id, list(tokens), max_tokens=30))
    run_step(scheduler)
    assert scheduler.requests["y"].contents[0] is scheduler.requests["x"].contents[0]
    for _ in range(20):
        if list(scheduler.running) == ["x", "big"]:
            break
        run_step(scheduler)
    assert [request.request_id for request in scheduler.waiting] == ["y", "z"]
    assert host_used(scheduler) > 3
    step = schedule(scheduler)
    assert [row.request.request_id for row in step.rows] == ["x", "big"]
    acknowledge(scheduler, step, failed=[0])
    assert host_used(scheduler) == 3, "z's"


# --- whoever ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["abort", "finish"])
@pytest.mark.parametrize("stand", [leave_c, hold_c, return_c])
def test_end_wherever_its_blocks_are_they_come_back_once(stand: Any, end: str) -> None:
    scheduler = make_swapping(enable_caching=False)
    stand(scheduler)
    held = sum(len(request.blocks) for request in scheduler.running.values() if request.request_id != "c")
    getattr(scheduler, end)("c")
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == 6 - held, "device blocks at once"
    assert host_used(scheduler) == (2 if scheduler.outstanding else 0), "host blocks when nothing reads or writes them"
    while scheduler.outstanding:
        acknowledge(scheduler, scheduler.outstanding[0])
    assert host_used(scheduler) == 0
    for request_id in {"a", "b"} & scheduler.requests.keys():
        scheduler.abort(request_id)
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == 6


@pytest.mark.parametrize("stand", [leave_c, return_c])
def test_end_while_copies_are_out_and_they_are_lost_host_blocks_come_back_once(stand: Any) -> None:
    scheduler = make_swapping(enable_caching=False)
    stand(scheduler)
    scheduler.abort("c")
    scheduler.lose_steps()
    scheduler.check_integrity()
    assert host_used(scheduler) == 0


def test_reset_prefix_cache_forgets_what_was_swapped_out() -> None:
    scheduler = make_swapping()
    hold_c(scheduler)
    scheduler.abort("a")
    scheduler.abort("b")
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    step = schedule(scheduler)
    assert (rows_of(step), step.copies) == ({"c": (0, 8)}, [])


# --- nobody waits for ever --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_outstanding", [1, 2])
@pytest.mark.parametrize("num_host_blocks", [1, 2, 5, 100])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_schedule_any_state_with_work_returns_a_step_or_waits_for_one(
    max_outstanding: int, num_host_blocks: int, policy: str
) -> None:
    swapped = 0
    for blocks in (3, 4, 6):
        for size in (1, 2):
            scheduler = make_scheduler(
                make_kv(num_blocks=blocks, block_size=size),
                num_host_blocks=num_host_blocks,
                max_outstanding=max_outstanding,
                preemption_mode="swap",
                policy=policy,
            )
            for index in range(24):
                length = 1 + index % max(1, (blocks - 1) * size - 1)
                new = make_new(f"r{index}", length, max_tokens=1 + index % 7, priority=index % 3)
                scheduler.add_request(new)
            for _ in range(2000):
                while scheduler.schedule() is not None:
                    scheduler.check_integrity()
                if not scheduler.has_work:
                    break
                assert scheduler.outstanding
                acknowledge(scheduler, scheduler.outstanding[0])
            assert not scheduler.has_work
            while scheduler.outstanding:
                acknowledge(scheduler, scheduler.outstanding[0])
            assert len(free_ids(scheduler.kv)) == blocks - 1
            assert host_used(scheduler) == 0
            swapped += scheduler.stats.swapped_in
    assert swapped > 0


def test_schedule_lone_request_that_outgrows_the_pool_ends_though_others_are_swapped_out() -> None:
    scheduler = make_swapping(num_blocks=4)
    fill(scheduler, {"a": 8, "c": 3})
    ends: dict[str, FinishReason | None] = {}
    for _ in range(100):
        step = scheduler.schedule()
        if step is not None:
            acknowledge(scheduler, step)
        ends |= {output.request_id: output.finish_reason for output in scheduler.take_outputs()}
        if not scheduler.has_work:
            break
    assert ends == {"a": FinishReason.ERROR, "c": FinishReason.ERROR}, "both want 30 tokens more, and 12 fit"
    assert scheduler.stats.swapped_in == 1


def run_timed(scheduler: Scheduler) -> None:
    """A step that takes 100 µs for a token and 50 µs for a copied block."""
    step = schedule(scheduler)
    copy_us = 50 * len(step.copies)
    acknowledge(scheduler, step, compute_us=100 * step.num_tokens + copy_us, copy_us=copy_us)


@pytest.mark.parametrize("is_evicted", [False, True], ids=["found again", "evicted meanwhile"])
def test_leave_auto_learns_from_what_victims_found_again(is_evicted: bool) -> None:
    """Computing the victim's 30 tokens again takes 3 ms, copying its 8 blocks out and in 0.8 ms: without hits."""
    scheduler = make_swapping(num_blocks=13, preemption_mode="auto", policy="priority")
    scheduler.add_request(make_new("grows", 16, max_tokens=3))
    victim = scheduler.add_request(make_new("victim", 30, max_tokens=60, priority=9))
    run_timed(scheduler)
    if is_evicted:
        scheduler.add_request(make_new("evicts all", 47, max_tokens=1, priority=1))
    while victim.num_preemptions == 0 or victim.request_id not in scheduler.running:
        run_timed(scheduler)
    assert scheduler.stats.swapped_out == 1, "a probe"
    assert bool(scheduler.kv.pool.num_evictions) is is_evicted
    scheduler.add_request(make_new("grows, too", 16, max_tokens=3))
    while victim.num_preemptions == 1:
        run_timed(scheduler)
    assert scheduler.stats.swapped_out == (2 if is_evicted else 1)


# --- what is being sampled for whoever leaves -------------------------------------------------------------------------


def test_token_under_way_of_a_request_that_leaves_is_its_own_and_it_goes_on_where_it_stood() -> None:
    scheduler, request, sampling, leaving = leave_c_with_a_sample_out()
    acknowledge(scheduler, sampling, tokens={"a": 1, "b": 2, "c": 3})
    assert (read_int32(request.tokens(8, 9)), request.num_pending_tokens) == ([3], 0)
    assert outputs_of(scheduler)["c"].token_ids == [3]
    acknowledge(scheduler, leaving)
    for request_id in "ab":
        scheduler.abort(request_id)
    scheduler.kv.pool.reset_prefix_cache()
    assert rows_of(schedule(scheduler)) == {"c": (8, 1)}


def test_token_under_way_that_is_the_last_ends_a_request_that_leaves() -> None:
    scheduler, request, sampling, leaving = leave_c_with_a_sample_out(max_tokens=1)
    acknowledge(scheduler, sampling)
    assert outputs_of(scheduler)["c"].finish_reason is FinishReason.LENGTH
    assert request.status is RequestStatus.FINISHED
    assert scheduler.kv.pool.num_free_blocks == 2
    acknowledge(scheduler, leaving)
    assert host_used(scheduler) == 0


@pytest.mark.parametrize("what", ["its row", "the step", "the cache", "the copy"])
def test_token_under_way_is_dropped_with_the_copy(what: str) -> None:
    """The request may be admitted before the token is known, and then computes it again itself."""
    scheduler, request, sampling, leaving = leave_c_with_a_sample_out()
    if what == "its row":
        acknowledge(scheduler, sampling, failed=[2])
    elif what == "the step":
        scheduler.lose_steps()
    elif what == "the cache":
        scheduler.replace_cache(make_kv(num_blocks=7, block_size=4), 20)
    else:
        acknowledge(scheduler, sampling)
        scheduler.lose_steps()
    scheduler.check_integrity()
    num_known = 9 if what == "the copy" else 8
    assert (request.num_tokens, request.num_pending_tokens) == (num_known, 0)
    assert (request.status, request.num_swapped_tokens) == (RequestStatus.PREEMPTED, 0)
    if what == "its row":
        acknowledge(scheduler, leaving)
    for request_id in "ab":
        scheduler.abort(request_id)
    scheduler.kv.pool.reset_prefix_cache()
    assert rows_of(schedule(scheduler)) == {"c": (0, num_known)}


def test_token_that_a_leader_samples_for_a_branch_that_leaves_is_the_branchs() -> None:
    scheduler = make_swapping(num_blocks=6, max_outstanding=2)
    new = make_new("a", 8, max_tokens=30)
    scheduler.add_request(dataclasses.replace(new, branches=(NewBranch("a#1", 1), NewBranch("a#2", 2))))
    taken = scheduler.kv.pool.get_new_blocks(2)
    sampling, leaving = scheduler.schedule(), scheduler.schedule()
    assert sampling is not None
    assert leaving is not None
    branch = scheduler.requests["a#2"]
    assert (branch.status, branch.num_pending_tokens) == (RequestStatus.PREEMPTED, 1)
    scheduler.update(make_result(sampling, [1, 2, 3]))
    assert outputs_of(scheduler)["a#2"].token_ids == [3]
    scheduler.update(make_result(leaving))
    assert (branch.num_tokens, branch.num_swapped_tokens) == (9, 8)
    scheduler.kv.pool.free_blocks(taken)
    scheduler.check_integrity()
