"""Blocks run short: who gives way, what comes back, who can not go on."""

import dataclasses

import pytest

from kvmanager_service.core.errors import PoolExhaustedError
from kvmanager_service.core.kv_groups import FullAttention
from kvmanager_service.core.request import FinishReason, RequestStatus
from kvmanager_service.core.scheduler import Scheduler
from tests.unit.core.builders import (
    free_ids,
    make_coordinator,
    make_kv,
    make_new,
    make_result,
    make_scheduler,
    outputs_of,
    read_int32,
    rows_of,
    run_step,
)


def waiting_ids(scheduler: Scheduler) -> list[str]:
    return [request.request_id for request in scheduler.waiting]


def fill(scheduler: Scheduler, lengths: dict[str, int], **values: int) -> None:
    """Admit one request after another, each with a prompt of so many tokens."""
    for request_id, length in lengths.items():
        scheduler.add_request(make_new(request_id, length, max_tokens=30, **values))
    run_step(scheduler, {request_id: 5000 + index for index, request_id in enumerate(lengths)})


def test_schedule_no_free_block_fcfs_preempts_the_latest_arrival() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=7, block_size=4))
    fill(scheduler, {"a": 8, "b": 8, "c": 7})
    assert rows_of(run_step(scheduler)) == {"a": (8, 1), "b": (8, 1)}
    assert waiting_ids(scheduler) == ["c"]
    assert scheduler.requests["c"].status is RequestStatus.PREEMPTED
    assert scheduler.stats.preemptions == 1


def test_schedule_no_free_block_priority_preempts_the_highest_value() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=7, block_size=4), policy="priority")
    for request_id, priority in (("a", 5), ("b", 0), ("c", 5), ("d", 1)):
        scheduler.add_request(make_new(request_id, 4, max_tokens=30, priority=priority))
    run_step(scheduler)
    # Six blocks, four in use: b and d grow, then a finds none and c, the later of the two that matter least, goes.
    step = run_step(scheduler)
    assert set(rows_of(step)) == {"a", "b", "d"}
    assert waiting_ids(scheduler) == ["c"]


def test_schedule_several_victims_wait_in_order_of_arrival_before_new_requests() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=9, block_size=4))
    fill(scheduler, {"a": 8, "b": 8, "c": 8, "d": 8})
    scheduler.add_request(make_new("new", 4))
    step = run_step(scheduler)
    assert set(rows_of(step)) == {"a", "b"}
    assert waiting_ids(scheduler) == ["c", "d", "new"]


def test_schedule_victim_already_scheduled_gives_its_budget_back() -> None:
    """The victim has a row when another finds no block for it: its token goes to the request that comes last."""
    scheduler = make_scheduler(make_kv(num_blocks=5, block_size=4), policy="priority")
    scheduler.add_request(make_new("victim", 5, max_tokens=30, priority=9))
    run_step(scheduler)
    scheduler.add_request(make_new("grows", 4, max_tokens=30, priority=0))
    scheduler.add_request(make_new("last", 1, max_tokens=30, priority=1))
    run_step(scheduler)
    assert scheduler.kv.pool.num_free_blocks == 0
    scheduler.config = dataclasses.replace(scheduler.config, max_num_batched_tokens=2)
    assert rows_of(run_step(scheduler)) == {"grows": (4, 1), "last": (1, 1)}
    assert waiting_ids(scheduler) == ["victim"]


def test_schedule_request_that_matters_least_yields_itself() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=4, block_size=4), policy="priority")
    scheduler.add_request(make_new("least", 4, max_tokens=30, priority=9))
    scheduler.add_request(make_new("most", 7, max_tokens=30, priority=0))
    run_step(scheduler)
    assert rows_of(run_step(scheduler)) == {"most": (7, 1)}
    assert waiting_ids(scheduler) == ["least"]


def test_schedule_request_after_a_victim_is_not_skipped() -> None:
    """The victim stands in the middle of the running requests; the one after it still gets its row."""
    scheduler = make_scheduler(make_kv(num_blocks=7, block_size=4), policy="priority")
    for request_id, priority in (("a", 0), ("victim", 9), ("z", 1)):
        scheduler.add_request(make_new(request_id, 8, max_tokens=30, priority=priority))
    run_step(scheduler)
    assert set(rows_of(run_step(scheduler))) == {"a", "z"}
    assert waiting_ids(scheduler) == ["victim"]


def test_schedule_after_a_preemption_admits_nobody_in_the_same_step() -> None:
    """Whoever gave way has free blocks enough to come back, and would have to give way again."""
    scheduler = make_scheduler(make_kv(num_blocks=7, block_size=4))
    fill(scheduler, {"a": 8, "b": 12})
    step = scheduler.schedule()
    scheduler.add_request(make_new("new", 1))
    scheduler.update(make_result(step))
    assert rows_of(step) == {"a": (8, 1)}
    assert waiting_ids(scheduler) == ["b", "new"]
    assert scheduler.kv.pool.num_free_blocks == 3


def test_schedule_resumed_request_gets_all_its_blocks_or_waits() -> None:
    """A resumed request that got its first chunk only would be preempted before it produced anything."""
    scheduler = make_scheduler(make_kv(num_blocks=9, block_size=4), max_num_batched_tokens=4)
    scheduler.add_request(make_new("a", 16, max_tokens=16))
    for _ in range(4):
        run_step(scheduler)
    scheduler.add_request(make_new("b", 12, max_tokens=20))
    for _ in range(200):
        if not scheduler.has_work:
            break
        run_step(scheduler)
    assert not scheduler.has_work
    preemptions = scheduler.stats.preemptions
    assert 1 <= preemptions <= 2, "b gave way when a grew, and came back when it could stay"
    assert {output.finish_reason for output in scheduler.take_outputs()} == {None, FinishReason.LENGTH}


def test_schedule_victim_whose_blocks_are_all_shared_is_passed_over() -> None:
    """Preempting "no gain" would free nothing, for "owner" relies on all it has: so "owner" gives way."""
    scheduler = make_scheduler(
        make_kv(num_blocks=6, block_size=4), policy="priority", long_prefill_token_threshold=4, max_outstanding=2
    )
    prompt = list(range(8))
    scheduler.add_request(make_new("grows", 8, max_tokens=30, priority=0))
    scheduler.add_request(make_new("no gain", prompt, max_tokens=1, priority=9))
    first = scheduler.schedule()
    scheduler.add_request(make_new("owner", [*prompt, 9], max_tokens=30, priority=1))
    second = scheduler.schedule()
    assert rows_of(second) == {"grows": (4, 4), "no gain": (4, 4), "owner": (8, 1)}
    scheduler.update(make_result(first))
    assert rows_of(scheduler.schedule()) == {"grows": (8, 1)}
    assert waiting_ids(scheduler) == ["owner"]
    assert "no gain" in scheduler.running
    scheduler.check_integrity()


def test_schedule_request_behind_which_too_few_blocks_come_free_yields_at_once() -> None:
    """A request "grows" at a block's end in both groups; of "branch", a fork that waits, one block comes free.

    That is the second group's, of which "parent", which writes first, takes a copy. Both hold the first group's.
    """
    kv = make_coordinator([FullAttention(4), FullAttention(8)], num_blocks=8)
    scheduler = make_scheduler(kv)
    parent = scheduler.add_request(make_new("parent", 4, max_tokens=30))
    scheduler.add_request(make_new("grows", 8, max_tokens=30))
    run_step(scheduler)
    new = make_new("branch", read_int32(parent.tokens(0, 5)), max_tokens=30)
    branch = scheduler.add_request(dataclasses.replace(new, fork_of="parent"))
    assert rows_of(run_step(scheduler)) == {"parent": (4, 1)}
    assert waiting_ids(scheduler) == ["grows", "branch"]
    assert scheduler.stats.preemptions == 1
    assert branch in scheduler.residency.forks


def test_schedule_lone_request_that_outgrows_the_pool_ends_with_an_error() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=4, block_size=4))
    scheduler.add_request(make_new("a", 8, max_tokens=30))
    tokens = []
    for token_id in range(50, 55):
        run_step(scheduler, token_id)
        tokens += outputs_of(scheduler)["a"].token_ids
    assert rows_of(scheduler.schedule()) == {}
    output = outputs_of(scheduler)["a"]
    assert output.finish_reason is FinishReason.ERROR
    assert isinstance(output.error, PoolExhaustedError)
    assert output.error.metadata == {"pool_tokens": "12", "num_output_tokens": "5"}
    assert "12 tokens (3 blocks)" in str(output.error)
    assert tokens == [50, 51, 52, 53, 54]
    assert scheduler.kv.pool.num_free_blocks == 3


def test_schedule_request_that_outgrew_the_pool_makes_room_for_the_next_at_once() -> None:
    """Nothing would wake the caller: the request that waits must be in the step that ends the other."""
    scheduler = make_scheduler(make_kv(num_blocks=3, block_size=4))
    scheduler.add_request(make_new("a", 7, max_tokens=30))
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add_request(make_new("b", 7, max_tokens=30))
    assert rows_of(scheduler.schedule()) == {"b": (0, 7)}
    assert scheduler.take_outputs()[-1].error is not None


def test_schedule_lone_request_with_a_token_on_its_way_is_not_ended_before_it() -> None:
    """With a step queued ahead, the token being sampled may be the one that stops it."""
    scheduler = make_scheduler(make_kv(num_blocks=3, block_size=4), max_outstanding=2)
    scheduler.add_request(make_new("a", 7, max_tokens=30, stop=[99]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert rows_of(second) == {"a": (7, 1)}
    scheduler.update(make_result(first, 50))
    assert scheduler.schedule() is None, "the ninth token has no slot, and may not need one"
    assert scheduler.has_work
    scheduler.update(make_result(second, 99))
    outputs = scheduler.take_outputs()
    assert [output.token_ids for output in outputs] == [[50], [99]]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert not scheduler.has_work


def test_schedule_lone_request_whose_last_token_needs_no_slot_ends_by_length() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=3, block_size=4), max_outstanding=2)
    scheduler.add_request(make_new("a", 7, max_tokens=2))
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert scheduler.schedule() is None
    for step in steps:
        scheduler.update(make_result(step))
    assert scheduler.take_outputs()[-1].finish_reason is FinishReason.LENGTH


def test_schedule_preempted_request_that_no_longer_fits_ends_with_an_error() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=3, block_size=4))
    scheduler.add_request(make_new("a", 7, max_tokens=30))
    run_step(scheduler)
    run_step(scheduler)  # nine tokens are known, eight are computed
    scheduler.lose_steps()
    scheduler.add_request(make_new("b", 3, max_tokens=1))
    outputs_of_a = [output for output in scheduler.take_outputs() if output.request_id == "a"]
    assert [output.token_ids for output in outputs_of_a] == [[7], [7]]
    assert set(rows_of(run_step(scheduler))) == {"b"}
    outputs = outputs_of(scheduler)
    assert isinstance(outputs["a"].error, PoolExhaustedError)
    assert outputs["b"].finish_reason is FinishReason.LENGTH


def test_preempt_request_keeps_its_tokens_and_emits_none_twice() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=11, block_size=4))
    request = scheduler.add_request(make_new("a", 6, max_tokens=4))
    for token_id in (50, 51):
        run_step(scheduler, token_id)
    scheduler.lose_steps()
    assert rows_of(run_step(scheduler, 52)) == {"a": (4, 4)}, "one full block is found again"
    run_step(scheduler, 53)
    outputs = scheduler.take_outputs()
    assert [output.token_ids for output in outputs] == [[50], [51], [52], [53]]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert request.num_cached_tokens == 0, "cached tokens are those of the first admission"


@pytest.mark.parametrize("max_outstanding", [1, 2])
def test_schedule_any_state_with_work_returns_a_step_or_waits_for_one(max_outstanding: int) -> None:
    """A tiny pool, every prompt length and limit: nothing ever waits for a call that does not come."""
    for blocks in (2, 3, 4):
        scheduler = make_scheduler(make_kv(num_blocks=blocks, block_size=2), max_outstanding=max_outstanding)
        for index in range(24):
            length = 1 + index % ((blocks - 1) * 2 - 1)
            scheduler.add_request(make_new(f"r{index}", length, max_tokens=1 + index % 7))
        for _ in range(1000):
            while scheduler.schedule() is not None:
                scheduler.check_integrity()
            if not scheduler.has_work:
                break
            assert scheduler.outstanding
            scheduler.update(make_result(scheduler.outstanding[0]))
        assert not scheduler.has_work
        while scheduler.outstanding:
            scheduler.update(make_result(scheduler.outstanding[0]))
        assert len(free_ids(scheduler.kv)) == blocks - 1


def test_preempted_request_looks_up_its_prefix_again_and_it_is_not_counted_again() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=9, block_size=4))
    fill(scheduler, {"a": 8, "b": 8, "c": 11})
    run_step(scheduler)
    assert waiting_ids(scheduler) == ["c"]
    scheduler.abort("a")
    back = scheduler.requests["c"]
    step = run_step(scheduler)
    assert rows_of(step)["c"] == (8, 4), "its first two blocks were found"
    assert back.num_preemptions == 1
    assert back.num_cached_tokens == 0, "what it found when it first came"
    assert (scheduler.stats.prefix_hits, scheduler.stats.prefix_queries) == (0, 27)
