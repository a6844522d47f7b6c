"""Requests with branches: one prompt, computed once, sampled as often as there are sequences."""

from __future__ import annotations

import dataclasses

import pytest

from kvmanager_service.core.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    QueueFullError,
    RowFailedError,
    UnknownRequestError,
)
from kvmanager_service.core.extra_keys import KeyDomain, LoraAdapter, PromptSpan
from kvmanager_service.core.fair_queue import FairWeights
from kvmanager_service.core.forks import branch_id
from kvmanager_service.core.kv_groups import FullAttention, RecurrentState, SlidingWindow
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.request import FinishReason, NewBranch, NewRequest, Request, RequestStatus
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.suspects import MAX_FAILED_STEPS
from kvmanager_service.step_message import build_execute_request
from tests.unit.core.builders import (
    block_ids,
    make_coordinator,
    make_kv,
    make_new,
    make_result,
    make_scheduler,
    outputs_of,
    read_int32,
    rows_of,
    run_step,
    state_of,
    token_bytes,
)


def with_branches(new: NewRequest, count: int) -> NewRequest:
    """The same request with so many further sequences, seeds 101, 102, …"""
    branches = tuple(NewBranch(f"{new.request_id}#{index}", 100 + index) for index in range(1, count + 1))
    return dataclasses.replace(new, branches=branches)


def fork(scheduler: Scheduler, parent_id: str, new: NewRequest) -> Request:
    """Add a request that branches off from another."""
    return scheduler.add_request(dataclasses.replace(new, fork_of=parent_id))


def started(count: int = 2, prompt: int = 6, **values: object) -> Scheduler:
    """A scheduler whose one request `a`, with branches, has got its first tokens: 11, 12, …"""
    scheduler = make_scheduler(make_kv(num_blocks=20), **values)  # type: ignore[arg-type]
    scheduler.add_request(with_branches(make_new("a", prompt), count))
    run_step(scheduler, list(range(11, 12 + count)))
    return scheduler


def test_prompt_is_computed_once_and_sampled_for_each_branch() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(with_branches(make_new("a", 6, seed=100), 2))
    step = scheduler.schedule()
    assert rows_of(step) == {"a": (0, 6)}
    assert step is not None
    assert step.num_samples == 3
    sampling = build_execute_request(step, 1, 4).sampling
    assert read_int32(sampling.rows.data) == [0, 0, 0]
    assert list(sampling.seeds) == [100, 101, 102]
    scheduler.update(make_result(step, [11, 12, 13]))
    scheduler.check_integrity()
    assert {request_id: output.token_ids for request_id, output in outputs_of(scheduler).items()} == {
        "a": [11],
        "a#1": [12],
        "a#2": [13],
    }
    assert scheduler.stats.tokens_computed == 6
    assert scheduler.stats.tokens_generated == 3


def test_next_step_copies_the_shared_block_for_all_but_the_last() -> None:
    scheduler = started(2)
    shared = scheduler.requests["a"].blocks[1].block_id
    step = run_step(scheduler)
    assert rows_of(step) == {"a": (6, 1), "a#1": (6, 1), "a#2": (6, 1)}
    assert [copy.source_id for copy in step.copies] == [shared, shared]
    tables = [block_ids(request.blocks) for request in scheduler.running.values()]
    assert len({table[0] for table in tables}) == 1
    assert sorted(table[1] for table in tables) == sorted([shared, *(copy.target_id for copy in step.copies)])
    assert scheduler.stats.tokens_computed == 9


def test_branches_are_fed_their_own_samples_while_these_are_out() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), max_outstanding=2)
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert [(row.request.request_id, row.feeds_from) for row in second.rows] == [("a", 0), ("a#1", 1), ("a#2", 2)]
    scheduler.check_integrity()
    scheduler.update(make_result(first, [11, 12, 13]))
    scheduler.update(make_result(second, [21, 22, 23]))
    scheduler.check_integrity()
    assert [read_int32(request.tokens(6, 8)) for request in scheduler.running.values()] == [
        [11, 21],
        [12, 22],
        [13, 23],
    ]


def resumed(*tokens: list[int], prompt: int = 6, first: int = 0, **values: object) -> NewRequest:
    """Request `a` after a break: the outputs it had, from `first` on, have these tokens already; seeds 100, 101, …"""
    own, *others = [
        NewBranch(branch_id("a", index), 100 + index, token_bytes(ids)) for index, ids in enumerate(tokens, start=first)
    ]
    new = make_new("a", prompt, **values)  # type: ignore[arg-type]
    return dataclasses.replace(
        new,
        request_id=own.request_id,
        seed=own.seed,
        resumed=own.resumed,
        branches=tuple(others),
        family_id="a",
    )


def test_resumed_branches_go_on_each_from_its_tokens_and_share_the_prompt() -> None:
    """Two blocks of prompt are computed by the first; the second finds them, the third one and shares its own."""
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(resumed([11, 21], [12], [], [], prompt=8))
    step = scheduler.schedule()
    assert rows_of(step) == {"a": (0, 10), "a#1": (8, 1), "a#2": (4, 4)}
    assert step is not None
    assert list(build_execute_request(step, 1, 4).sampling.seeds) == [100, 101, 102, 103]
    scheduler.update(make_result(step, [31, 22, 13, 14]))
    scheduler.check_integrity()
    outputs = outputs_of(scheduler)
    assert {name: output.token_ids for name, output in outputs.items()} == {
        "a": [31],
        "a#1": [22],
        "a#2": [13],
        "a#3": [14],
    }
    assert {output.num_cached_tokens for output in outputs.values()} == {0}, "what the request found, in every output"
    assert len({block_ids(request.blocks)[0] for request in scheduler.running.values()}) == 1
    assert [read_int32(request.tokens(8, request.num_tokens)) for request in scheduler.running.values()] == [
        [11, 21, 31],
        [12, 22],
        [13],
        [14],
    ]
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (3 * 8, 8 + 4)


def test_resumed_branches_that_have_not_begun_share_one_leader_whatever_the_first_has() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(resumed([11], [], [12], []))
    assert [request.request_id for request in scheduler.waiting] == ["a", "a#1", "a#2"]
    assert [follower.request_id for follower in scheduler.requests["a#1"].followers] == ["a#3"]
    assert {request.arrival_seq for request in scheduler.requests.values()} == {0, 1, 2, 3}
    scheduler.check_integrity()


def test_resumed_branches_have_their_rules_counted_from_the_resumed_tokens() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(resumed([11, 21], [12], max_tokens=3, min_tokens=2, stop=[99]))
    run_step(scheduler, [99, 99])
    outputs = outputs_of(scheduler)
    assert (outputs["a"].finish_reason, outputs["a"].stop_token_id) == (FinishReason.STOP, 99)
    assert outputs["a#1"].finish_reason is None, "its second token, which min_tokens lets end nothing"
    run_step(scheduler, [5])
    assert outputs_of(scheduler)["a#1"].finish_reason is FinishReason.LENGTH
    assert not scheduler.book.families


def test_resumed_request_whose_first_output_had_ended_is_known_by_its_id() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(resumed([12], [], first=1))
    assert list(scheduler.requests) == ["a#1", "a#2"]
    before = state_of(scheduler)
    for taken in (make_new("a"), resumed([13], first=3), make_new("a#2")):
        with pytest.raises(DuplicateRequestError):
            scheduler.add_request(taken)
    assert state_of(scheduler) == before
    run_step(scheduler, [1, 2])
    scheduler.abort("a")
    scheduler.check_integrity()
    assert not scheduler.requests
    assert scheduler.kv.pool.num_free_blocks == 19
    scheduler.add_request(make_new("a"))


def test_resumed_request_is_accepted_as_a_whole_or_not_at_all() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=4), max_waiting=3, max_num_seqs=3)
    before = state_of(scheduler)
    with pytest.raises(InvalidRequestError, match="expected a prompt of at most 11 tokens"):
        scheduler.add_request(resumed([11], [*range(6)]))
    with pytest.raises(InvalidRequestError, match=r"n: expected at most max_num_seqs \(3\), got 4"):
        scheduler.add_request(resumed([11], [12], [13], [14]))
    assert state_of(scheduler) == before
    scheduler.add_request(make_new("b", 4))
    before = state_of(scheduler)
    with pytest.raises(QueueFullError):
        scheduler.add_request(resumed([11], [12], [13]))
    assert state_of(scheduler) == before


def test_resumed_branches_run_in_turn_where_places_are_few() -> None:
    """What the request found is what its first output found, also when that has ended before another runs."""
    scheduler = make_scheduler(make_kv(num_blocks=20), max_num_seqs=2)
    scheduler.add_request(make_new("b", 4, max_tokens=3))
    run_step(scheduler)
    scheduler.take_outputs()
    scheduler.add_request(resumed([11], [12], prompt=8, max_tokens=2))
    assert list(rows_of(run_step(scheduler))) == ["b", "a"]
    assert outputs_of(scheduler)["a"].finish_reason is FinishReason.LENGTH
    assert rows_of(run_step(scheduler))["a#1"] == (8, 1)
    assert outputs_of(scheduler)["a#1"].num_cached_tokens == 0


def test_chunked_prompt_is_forked_by_its_last_chunk() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), max_num_batched_tokens=4)
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    assert run_step(scheduler).num_samples == 0
    assert list(scheduler.running) == ["a"]
    assert scheduler.book.num_followers == 2
    step = scheduler.schedule()
    assert step is not None
    assert step.num_samples == 3
    assert list(scheduler.running) == ["a", "a#1", "a#2"]


def test_samples_of_other_rows_stay_in_the_order_of_the_rows() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=30))
    scheduler.add_request(with_branches(make_new("a", 6, seed=100), 1))
    scheduler.add_request(with_branches(make_new("b", 5, seed=100), 2))
    step = scheduler.schedule()
    assert step is not None
    assert read_int32(build_execute_request(step, 1, 4).sampling.rows.data) == [0, 0, 1, 1, 1]
    scheduler.update(make_result(step, [1, 2, 3, 4, 5]))
    tokens = {request_id: output.token_ids for request_id, output in outputs_of(scheduler).items()}
    assert tokens == {"a": [1], "a#1": [2], "b": [3], "b#1": [4], "b#2": [5]}


def test_each_branch_has_an_end_of_its_own() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(with_branches(make_new("a", 6, max_tokens=2, stop=[99]), 2))
    run_step(scheduler, [99, 12, 13])
    outputs = outputs_of(scheduler)
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert outputs["a#1"].finish_reason is None
    run_step(scheduler, [99, 23])
    outputs = outputs_of(scheduler)
    assert outputs["a#1"].finish_reason is FinishReason.STOP
    assert outputs["a#2"].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work
    assert scheduler.kv.pool.num_free_blocks == 19


def test_min_tokens_suppresses_the_stop_tokens_of_every_branch() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(with_branches(make_new("a", 6, min_tokens=1, stop=[99]), 2))
    step = scheduler.schedule()
    assert step is not None
    sampling = build_execute_request(step, 1, 4).sampling
    assert [list(params.suppressed_token_ids) for params in sampling.params] == [[99]]
    assert read_int32(sampling.params_index.data) == [0, 0, 0]


# --- places, queue and ids -------------------------------------------------------------------------------------------


def test_places_are_kept_for_branches_that_are_not_forked_yet() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=30), max_num_seqs=4, max_num_batched_tokens=4)
    scheduler.add_request(with_branches(make_new("a", 7), 2))
    scheduler.add_request(make_new("b", 1))
    scheduler.add_request(make_new("c", 1))
    for _ in range(3):
        run_step(scheduler)
    assert set(scheduler.running) == {"a", "b", "a#1", "a#2"}
    assert list(scheduler.waiting) == [scheduler.requests["c"]]


def test_a_request_waits_until_there_is_a_place_for_all_its_branches() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=30), max_num_seqs=3)
    scheduler.add_request(make_new("b", 3, max_tokens=2))
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    assert rows_of(run_step(scheduler)) == {"b": (0, 3)}
    run_step(scheduler)
    assert rows_of(run_step(scheduler, [1, 2, 3])) == {"a": (0, 6)}
    assert len(scheduler.running) == 3


def test_more_sequences_than_may_run_are_refused() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    with pytest.raises(InvalidRequestError, match=r"n: expected at most max_num_seqs \(3\), got 4"):
        scheduler.add_request(with_branches(make_new("a"), 3))
    assert not scheduler.has_work
    scheduler.add_request(with_branches(make_new("a"), 2))


def test_branches_count_as_waiting() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=30), max_waiting=3)
    scheduler.add_request(with_branches(make_new("a"), 2))
    with pytest.raises(QueueFullError, match="at most 3 waiting requests, got 3 and 1 more"):
        scheduler.add_request(make_new("b"))
    run_step(scheduler)
    scheduler.add_request(make_new("b"))


def test_a_request_is_refused_unless_all_its_branches_may_wait_and_changes_nothing() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=30), max_waiting=4)
    scheduler.add_request(make_new("a"))
    scheduler.add_request(make_new("b"))
    before = state_of(scheduler)
    with pytest.raises(QueueFullError, match="at most 4 waiting requests, got 2 and 3 more"):
        scheduler.add_request(with_branches(make_new("c"), 2))
    assert state_of(scheduler) == before
    scheduler.add_request(with_branches(make_new("c"), 1))
    scheduler.check_integrity()


def test_more_sequences_than_may_ever_wait_are_refused_for_good() -> None:
    scheduler = make_scheduler(max_waiting=2)
    with pytest.raises(InvalidRequestError, match=r"n: expected at most max_waiting \(2\), got 3"):
        scheduler.add_request(with_branches(make_new("a"), 2))
    assert not scheduler.has_work
    scheduler.add_request(with_branches(make_new("a"), 1))


def chunked(**limits: int) -> Scheduler:
    """A scheduler that may keep three waiting; its request `a` of three sequences has computed 4 of 6 tokens."""
    scheduler = make_scheduler(make_kv(num_blocks=30), max_num_batched_tokens=4, max_waiting=3, **limits)
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    run_step(scheduler)
    assert list(scheduler.running) == ["a"]
    assert scheduler.book.num_followers == 2
    return scheduler


def fill_queue(scheduler: Scheduler) -> None:
    """Three requests more may wait, and no fourth."""
    scheduler.add_request(make_new("b"))
    scheduler.add_request(with_branches(make_new("c"), 1))
    with pytest.raises(QueueFullError, match="at most 3 waiting requests, got 3 and 1 more"):
        scheduler.add_request(make_new("d"))
    scheduler.check_integrity()


def test_followers_of_a_leader_that_runs_do_not_wait() -> None:
    fill_queue(chunked())


def test_followers_of_a_preempted_leader_do_not_count_as_their_leader_does_not() -> None:
    scheduler = chunked()
    scheduler.lose_steps()
    assert scheduler.requests["a"].status is RequestStatus.PREEMPTED
    fill_queue(scheduler)


@pytest.mark.parametrize("ended", ["a", "a#1"])
def test_ended_followers_leave_the_queue(ended: str) -> None:
    scheduler = make_scheduler(make_kv(num_blocks=30), max_waiting=3)
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    scheduler.abort(ended)
    scheduler.check_integrity()
    scheduler.add_request(make_new("b"))


def test_the_ids_of_a_family_are_in_use_until_its_last_has_ended() -> None:
    scheduler = started(1)
    scheduler.finish("a")
    for taken in ("a", "a#1"):
        with pytest.raises(DuplicateRequestError):
            scheduler.add_request(make_new(taken))
    with pytest.raises(DuplicateRequestError):
        scheduler.add_request(dataclasses.replace(make_new("x"), branches=(NewBranch("y", 1), NewBranch("y", 2))))
    scheduler.finish("a#1")
    scheduler.add_request(make_new("a"))
    scheduler.check_integrity()


def test_branches_whose_prompt_can_never_fit_are_refused_whole() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=3))
    with pytest.raises(InvalidRequestError, match="at most 7 tokens"):
        scheduler.add_request(with_branches(make_new("a", 8), 1))
    assert not scheduler.has_work
    scheduler.check_integrity()


# --- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_ends_every_branch(steps: int) -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    for _ in range(steps):
        run_step(scheduler)
    scheduler.take_outputs()
    scheduler.abort("a")
    scheduler.check_integrity()
    assert {request_id: output.finish_reason for request_id, output in outputs_of(scheduler).items()} == dict.fromkeys(
        ("a", "a#1", "a#2"), FinishReason.ABORT
    )
    assert not scheduler.has_work
    with pytest.raises(UnknownRequestError):
        scheduler.abort("a")


def test_abort_after_the_first_branch_has_ended_ends_the_others() -> None:
    scheduler = started(2)
    scheduler.finish("a")
    scheduler.take_outputs()
    scheduler.abort("a")
    assert set(outputs_of(scheduler)) == {"a#1", "a#2"}
    assert not scheduler.has_work


@pytest.mark.parametrize("steps", [0, 1])
def test_abort_of_one_branch_leaves_the_others(steps: int) -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    for _ in range(steps):
        run_step(scheduler)
    scheduler.abort("a#1")
    scheduler.check_integrity()
    run_step(scheduler)
    assert list(scheduler.running) == ["a", "a#2"]


def test_failed_row_ends_every_branch_it_sampled_for() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), max_outstanding=2)
    scheduler.add_request(with_branches(make_new("a", 6), 1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    result = make_result(first, [-1, -1], failed=[0])
    scheduler.update(result)
    scheduler.check_integrity()
    outputs = outputs_of(scheduler)
    assert {type(output.error) for output in outputs.values()} == {RowFailedError}
    assert set(outputs) == {"a", "a#1"}
    scheduler.update(make_result(second))
    assert scheduler.kv.pool.num_cached_blocks == 0
    assert scheduler.kv.pool.num_free_blocks == 19


def test_each_branch_ends_with_the_error_of_the_row_that_was_to_sample_for_it() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=30))
    for request_id in "abc":
        scheduler.add_request(with_branches(make_new(request_id, 5), 1))
    step = scheduler.schedule()
    assert step is not None
    assert [(branch.request.request_id, branch.row_index) for branch in step.branches] == [
        ("a#1", 0),
        ("b#1", 1),
        ("c#1", 2),
    ]
    scheduler.update(make_result(step, [1, 2, -1, -1, 3, 4], failed=[1]))
    scheduler.check_integrity()
    outputs = outputs_of(scheduler)
    assert {request_id: output.token_ids for request_id, output in outputs.items() if output.error is None} == {
        "a": [1],
        "a#1": [2],
        "c": [3],
        "c#1": [4],
    }
    assert {request_id for request_id, output in outputs.items() if output.error is not None} == {"b", "b#1"}


def test_failed_chunk_reschedules_branches_that_a_later_step_has_forked() -> None:
    """No block is full, so no hash tells that the branch read what the failed row has written."""
    scheduler = make_scheduler(make_kv(num_blocks=20, block_size=16), max_outstanding=2, max_num_batched_tokens=4)
    scheduler.add_request(with_branches(make_new("a", 6), 1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert "a#1" in scheduler.running
    scheduler.update(make_result(first, failed=[0]))
    scheduler.check_integrity()
    assert isinstance(outputs_of(scheduler)["a"].error, RowFailedError)
    assert scheduler.requests["a#1"].status is RequestStatus.PREEMPTED
    scheduler.update(make_result(second, [5, 6]))
    assert scheduler.requests["a#1"].num_output_tokens == 0
    assert rows_of(scheduler.schedule()) == {"a#1": (0, 4)}


def test_lost_step_makes_branches_requests_of_their_own() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    scheduler.schedule()
    scheduler.lose_steps()
    scheduler.check_integrity()
    assert [request.request_id for request in scheduler.waiting] == ["a", "a#1", "a#2"]
    step = scheduler.schedule()
    assert rows_of(step) == {"a": (0, 6), "a#1": (4, 2), "a#2": (4, 2)}


def test_branches_that_break_the_executor_end_together() -> None:
    """Each would break it as often again before it ends."""
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    for _ in range(MAX_FAILED_STEPS):
        assert scheduler.has_work
        scheduler.schedule()
        scheduler.lose_steps()
        scheduler.check_integrity()
    assert not scheduler.has_work
    assert {output.finish_reason for output in outputs_of(scheduler).values()} == {FinishReason.ERROR}


# --- blocks run short ------------------------------------------------------------------------------------------------


def test_branches_without_a_block_to_copy_to_take_turns() -> None:
    """The prompt fills the pool: one branch writes in place, the other waits, and nobody hangs."""
    scheduler = make_scheduler(make_kv(num_blocks=3))
    scheduler.add_request(with_branches(make_new("a", 6, max_tokens=2), 1))
    run_step(scheduler, [11, 12])
    step = run_step(scheduler, [22])
    assert step.copies == []
    assert len(step.rows) == 1
    for _ in range(3):
        if scheduler.has_work:
            run_step(scheduler, [33])
    outputs = [output for output in scheduler.take_outputs() if output.finish_reason is not None]
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 2


def test_preempted_leader_keeps_its_followers() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), max_num_batched_tokens=4)
    scheduler.add_request(with_branches(make_new("a", 6), 2))
    scheduler.schedule()
    scheduler.lose_steps()
    scheduler.check_integrity()
    assert list(scheduler.waiting) == [scheduler.requests["a"]]
    assert scheduler.book.num_followers == 2
    assert [run_step(scheduler).num_samples for _ in range(2)] == [0, 3]


def test_fair_policy_charges_the_prompt_once_and_every_output() -> None:
    weights = FairWeights(input=1.0, output=2.0, cached=0.0)
    scheduler = make_scheduler(make_kv(num_blocks=20), policy="fair", fair_weights=weights)
    scheduler.add_request(with_branches(make_new("a", 6, tenant="t"), 2))
    run_step(scheduler)
    assert scheduler.waiting.served("t") == 6 + 3 * 2.0
    scheduler.abort("a")
    scheduler.add_request(make_new("b", 6, tenant="t"))  # the account was closed and opens again
    scheduler.check_integrity()


# --- fork at any time --------------------------------------------------------------------------------------------


def grown(num_tokens: int = 3) -> Scheduler:
    """A scheduler with one running request `a` of a prompt of 6 and output tokens 7."""
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(make_new("a", range(6)))
    for _ in range(num_tokens):
        run_step(scheduler)
    return scheduler


def test_fork_computes_only_what_the_parent_has_not() -> None:
    scheduler = grown(3)
    computed = scheduler.stats.tokens_computed
    child = fork(scheduler, "a", make_new("b", range(6), resumed=[7, 7, 50]))
    assert child.num_computed_tokens == 8
    assert block_ids(child.blocks) == block_ids(scheduler.requests["a"].blocks)[:2]
    scheduler.check_integrity()
    assert rows_of(run_step(scheduler)) == {"a": (8, 1), "b": (8, 1)}
    assert scheduler.stats.tokens_computed == computed + 2


def test_fork_in_the_middle_of_a_block_copies_it() -> None:
    scheduler = grown(2)
    fork(scheduler, "a", make_new("b", range(6), resumed=[50]))
    step = run_step(scheduler)
    assert rows_of(step) == {"a": (7, 1), "b": (6, 1)}
    assert len(step.copies) == 1


def test_fork_shares_only_what_is_acknowledged() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), max_num_batched_tokens=4)
    scheduler.add_request(make_new("a", range(10)))
    run_step(scheduler)
    scheduler.schedule()
    assert scheduler.requests["a"].num_computed_tokens == 8
    assert fork(scheduler, "a", make_new("b", [*range(9), 50])).num_computed_tokens == 4
    scheduler.check_integrity()


def test_fork_with_other_tokens_or_keys_is_refused_and_changes_nothing() -> None:
    scheduler = grown(3)
    before = state_of(scheduler)
    for new in (make_new("b", [9, 9, 9, 9]), make_new("b", range(7), salt="s")):
        with pytest.raises(InvalidRequestError) as caught:
            fork(scheduler, "a", new)
        assert caught.value.reason == "NOT_A_FORK"
        assert state_of(scheduler) == before
    with pytest.raises(DuplicateRequestError):
        fork(scheduler, "a", make_new("a", range(7)))
    assert state_of(scheduler) == before


def with_waiting_fork(num_blocks: int = 20, **limits: object) -> tuple[Scheduler, Request]:
    """A request `a` of 7 tokens, 6 of them computed, and its fork `b`, which shares those and has no place to run."""
    scheduler = make_scheduler(make_kv(num_blocks), **({"max_num_seqs": 1} | limits))  # type: ignore[arg-type]
    scheduler.add_request(make_new("a", range(6), max_tokens=40))
    run_step(scheduler)
    child = fork(scheduler, "a", make_new("b", range(6), resumed=[50], max_tokens=40))
    scheduler.check_integrity()
    assert (child.status, child.num_computed_tokens) == (RequestStatus.WAITING, 6)
    return scheduler, child


def test_fork_without_a_place_keeps_what_it_shares_till_there_is_one() -> None:
    """Its parent writes on in a copy meanwhile, and ends."""
    scheduler, child = with_waiting_fork()
    shared = block_ids(child.blocks)
    copies = run_step(scheduler).copies
    assert [copy.source_id for copy in copies] == [shared[1]]
    assert (child.status, block_ids(child.blocks)) == (RequestStatus.WAITING, shared)
    scheduler.abort("a")
    step = run_step(scheduler)
    assert (rows_of(step), step.copies) == ({"b": (6, 1)}, [])
    assert block_ids(child.blocks) == shared
    assert not scheduler.residency.forks


@pytest.mark.parametrize("caching", [True, False])
def test_fork_behind_others_computes_nothing_again_whatever_the_cache_has_lost(caching: bool) -> None:
    """All other blocks are handed out while it waits."""
    scheduler = make_scheduler(make_kv(num_blocks=20, enable_caching=caching), max_num_seqs=2)
    scheduler.add_request(make_new("a", range(6)))
    run_step(scheduler)
    scheduler.add_request(make_new("w", 40, max_tokens=1))
    child = fork(scheduler, "a", make_new("b", range(6), resumed=[50]))
    scheduler.abort("a")
    assert child.status is RequestStatus.WAITING
    taken = scheduler.kv.pool.get_new_blocks(7)
    assert rows_of(scheduler.schedule()) == {"w": (0, 40), "b": (6, 1)}
    scheduler.kv.pool.free_blocks(taken)
    scheduler.check_integrity()
    assert scheduler.stats.prefix_queries == (46 if caching else 0)  # what is shared was not looked up


def test_fork_of_a_fork_that_waits_shares_what_that_holds() -> None:
    scheduler, child = with_waiting_fork()
    grandchild = fork(scheduler, "b", make_new("c", range(6), resumed=[60]))
    assert block_ids(grandchild.blocks) == block_ids(child.blocks)
    for request_id in "ab":
        scheduler.abort(request_id)
    assert rows_of(run_step(scheduler)) == {"c": (6, 1)}


def test_fork_of_a_follower_shares_what_its_leader_has_computed() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), max_num_batched_tokens=4, max_num_seqs=3)
    scheduler.add_request(with_branches(make_new("a", range(10)), 1))
    run_step(scheduler)
    child = fork(scheduler, "a#1", make_new("b", range(10)))
    assert child.num_computed_tokens == 4
    assert child.blocks[0] is scheduler.requests["a"].blocks[0]


@pytest.mark.parametrize(("prompt", "helps"), [(6, True), (8, False)])
def test_fork_that_waits_lets_go_before_a_running_request_is_preempted_if_that_helps(prompt: int, helps: bool) -> None:
    """Of 6 tokens it comes to hold the second block alone, since its parent writes to a copy; of 8 it shares all."""
    scheduler = make_scheduler(make_kv(num_blocks=9), max_num_seqs=2)
    for request_id, length in (("a", prompt), ("x", 4)):
        scheduler.add_request(make_new(request_id, range(length), max_tokens=40))
    run_step(scheduler)
    child = fork(scheduler, "a", make_new("b", range(prompt), resumed=[50]))
    assert child in scheduler.residency.forks
    while child in scheduler.residency.forks and not scheduler.stats.preemptions:
        run_step(scheduler)
    assert (child in scheduler.residency.forks, scheduler.stats.preemptions) == ((False, 0) if helps else (True, 1))


@pytest.mark.parametrize("num_held", [1, 2])
def test_lone_request_that_lacks_blocks_gets_those_of_forks_that_wait(num_held: int) -> None:
    """Both hold the same, so it takes both to let go; then each waits as any request, and computes again."""
    scheduler, child = with_waiting_fork(num_blocks=6)
    forks = [child]
    if num_held == 2:
        forks.append(fork(scheduler, "b", make_new("c", range(6), resumed=[60], max_tokens=40)))
    while scheduler.residency.forks:
        run_step(scheduler)
    parent = scheduler.requests["a"]
    assert scheduler.kv.pool.num_free_blocks == 0
    assert len(parent.blocks) == 5
    assert [(one.status, one.num_computed_tokens, one.blocks) for one in forks] == [
        (RequestStatus.WAITING, 0, []) for _ in forks
    ]
    scheduler.abort("a")
    assert rows_of(run_step(scheduler)) == {"b": (4, 3)}


def test_next_request_gets_the_blocks_of_forks_that_wait_behind_it_where_nobody_runs() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=6), max_num_seqs=1)
    scheduler.add_request(make_new("a", range(6)))
    run_step(scheduler)
    scheduler.add_request(make_new("w", 16, max_tokens=3))
    children = [fork(scheduler, "a", make_new(name, range(6), resumed=[50])) for name in ("b", "c")]
    scheduler.abort("a")
    assert scheduler.kv.pool.num_free_blocks == 3
    assert rows_of(run_step(scheduler)) == {"w": (0, 16)}
    assert [child.num_computed_tokens for child in children] == [0, 0]


def test_next_request_gets_the_blocks_of_forks_that_wait_behind_it_while_others_run() -> None:
    """Of three forks, the newest is spared: it holds what another has, too."""
    scheduler = make_scheduler(make_kv(num_blocks=14), max_num_seqs=2)
    for request_id, tokens in (("a", range(8)), ("x", range(50, 54))):
        scheduler.add_request(make_new(request_id, tokens, max_tokens=30))
    run_step(scheduler)
    scheduler.add_request(make_new("w", 28, max_tokens=1))  # 7 blocks, of 13 without the 4 or 5 that others hold
    forks = [fork(scheduler, "a", make_new(name, range(8), resumed=[50])) for name in "bc"]
    forks.append(fork(scheduler, "x", make_new("d", range(50, 54), resumed=[50])))
    run_step(scheduler)
    assert [len(one.blocks) for one in forks] == [2, 2, 1]
    scheduler.abort("a")  # what it held of its prompt, forks alone hold now
    taken = scheduler.kv.pool.get_new_blocks(scheduler.kv.pool.num_free_blocks - 5)
    assert rows_of(scheduler.schedule()) == {"x": (5, 1), "w": (0, 28)}
    assert [one in scheduler.residency.forks for one in forks] == [False, False, True]
    scheduler.kv.pool.free_blocks(taken)
    scheduler.check_integrity()


@pytest.mark.parametrize("held", ["by forks alone", "by others, too"])
def test_next_request_that_forks_cannot_help_lets_them_keep_what_they_hold(held: str) -> None:
    scheduler = make_scheduler(make_kv(num_blocks=14), max_num_seqs=2)
    for request_id, tokens in (("a", range(8)), ("x", range(50, 54))):
        scheduler.add_request(make_new(request_id, tokens, max_tokens=30))
    run_step(scheduler)
    scheduler.add_request(make_new("w", 28, max_tokens=1))
    child = fork(scheduler, "a", make_new("b", range(8), resumed=[50]))
    if held == "by forks alone":
        scheduler.abort("a")
    else:
        scheduler.abort("x")
    taken = scheduler.kv.pool.get_new_blocks(scheduler.kv.pool.num_free_blocks - 4)
    assert len(rows_of(scheduler.schedule())) == 1
    assert child in scheduler.residency.forks
    scheduler.kv.pool.free_blocks(taken)
    scheduler.check_integrity()


def test_fork_with_tokens_of_its_own_waits_until_there_are_blocks_for_all_of_them() -> None:
    """Its first chunk would find some. Then it would be preempted, or others for it."""
    scheduler = make_scheduler(make_kv(num_blocks=8), max_num_batched_tokens=8)
    scheduler.add_request(make_new("a", range(6), max_tokens=20))
    run_step(scheduler)
    child = fork(scheduler, "a", make_new("b", range(6), resumed=range(50, 70), max_tokens=40))
    assert rows_of(run_step(scheduler)) == {"a": (6, 1)}
    assert (child.status, child.num_computed_tokens) == (RequestStatus.WAITING, 6)
    scheduler.abort("a")
    assert rows_of(run_step(scheduler)) == {"b": (6, 8)}
    assert scheduler.stats.preemptions == 0


def test_fork_that_needs_no_block_does_not_wait_for_the_watermark() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=11), max_num_seqs=2, watermark=0.5)
    for request_id, first in (("x", 60), ("a", 0)):
        scheduler.add_request(make_new(request_id, range(first, first + 6), max_tokens=20))
    run_step(scheduler)
    run_step(scheduler)
    child = fork(scheduler, "a", make_new("b", range(6), resumed=[7, 50], max_tokens=4))
    run_step(scheduler)  # "a" writes to a copy
    scheduler.abort("a")
    taken = scheduler.kv.pool.get_new_blocks(scheduler.kv.pool.num_free_blocks - 1)
    assert rows_of(scheduler.schedule()) == {"x": (8, 1), "b": (7, 1)}
    assert child.status is RequestStatus.RUNNING
    scheduler.kv.pool.free_blocks(taken)
    scheduler.check_integrity()


@pytest.mark.parametrize("num_taken", [0, 1])
def test_forks_and_pins_stand_back_together_or_not_at_all(num_taken: int) -> None:
    """9 blocks: a pin has 2, a fork 2 and 5 are free; the next needs all."""
    scheduler = make_scheduler(make_kv(num_blocks=10), max_num_seqs=1, max_pinned_fraction=1.0)
    scheduler.pins.pin(PinnedPrefix("p", token_bytes(range(90, 98))))
    scheduler.add_request(make_new("p", range(90, 98), max_tokens=1))
    run_step(scheduler)
    scheduler.add_request(make_new("a", range(6)))
    run_step(scheduler)
    scheduler.add_request(make_new("w", 35, max_tokens=1))
    child = fork(scheduler, "a", make_new("b", range(6), resumed=[50]))
    scheduler.abort("a")
    assert (scheduler.pins.num_held_blocks, scheduler.kv.pool.num_free_blocks) == (2, 5)
    taken = scheduler.kv.pool.get_new_blocks(num_taken)
    step = scheduler.schedule()
    if num_taken:
        assert step is None
        assert (scheduler.pins.num_held_blocks, child in scheduler.residency.forks) == (2, True)
    else:
        assert rows_of(step) == {"w": (0, 35)}
        assert (scheduler.pins.num_held_blocks, child in scheduler.residency.forks) == (0, False)
    scheduler.kv.pool.free_blocks(taken)
    scheduler.check_integrity()


def test_fork_that_waits_counts_no_block_twice_and_is_admitted_with_those_that_are_left() -> None:
    """4 blocks: it holds 2, and needs a third for its last token and none beyond."""
    scheduler = make_scheduler(make_kv(num_blocks=4), max_num_seqs=1)
    scheduler.add_request(make_new("a", range(8)))
    run_step(scheduler)
    child = fork(scheduler, "a", make_new("b", range(8), resumed=[50]))
    taken = scheduler.kv.pool.get_new_blocks(scheduler.kv.pool.num_free_blocks)
    scheduler.abort("a")
    assert child.num_computed_tokens == 8
    assert len(child.blocks) == 2
    scheduler.kv.pool.free_blocks(taken)
    assert rows_of(run_step(scheduler)) == {"b": (8, 1)}


@pytest.mark.parametrize("what", ["abort", "lost steps", "other cache", "reset", "failed row"])
def test_fork_that_waits_holds_nothing_when_that_is_gone_or_in_doubt(what: str) -> None:
    scheduler, child = with_waiting_fork(max_outstanding=2)
    if what == "failed row":
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(make_result(step, failed=[0]))
    elif what == "lost steps":
        scheduler.schedule()
        scheduler.lose_steps()
    elif what == "other cache":
        scheduler.replace_cache(make_kv(num_blocks=20))
    elif what == "reset":
        scheduler.abort("a")
        scheduler.reset_prefix_cache()
    else:
        scheduler.abort("b")
    scheduler.check_integrity()
    assert not scheduler.residency.forks
    assert (child.blocks, child.num_computed_tokens) == ([], 0)
    assert child.status is (RequestStatus.FINISHED if what == "abort" else RequestStatus.WAITING)


@pytest.mark.parametrize("place", ["none", "parent waits", "parent preempted", "follower"])
def test_fork_that_waits_has_the_parents_tokens_and_keys_or_is_refused(place: str) -> None:
    """Nothing is shared at once, and still the child is what it says it is."""
    scheduler = make_scheduler(make_kv(num_blocks=20), max_num_seqs=2 if place == "follower" else 1)
    scheduler.add_request(with_branches(make_new("a", range(6)), int(place == "follower")))
    parent = "a"
    if place in ("none", "parent preempted"):
        run_step(scheduler)
    if place == "parent preempted":
        scheduler.lose_steps()
    if place == "follower":
        parent = "a#1"
    before = state_of(scheduler)
    for new in (
        make_new("b", [9, 9, 9, 9, 9, 9]),
        make_new("b", [*range(4), 9, 9]),
        make_new("b", range(6), salt="s"),
        make_new("b", range(6), lora=LoraAdapter("l")),
        make_new("b", range(6), spans=[PromptSpan(KeyDomain.MULTIMODAL_ITEM, bytes(16), 1, 2)]),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            fork(scheduler, parent, new)
        assert caught.value.reason == "NOT_A_FORK"
        assert state_of(scheduler) == before
    assert fork(scheduler, parent, make_new("b", range(6))).status is RequestStatus.WAITING
    scheduler.check_integrity()


def test_fork_of_what_the_parent_knows_and_has_not_computed_is_checked_too() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), max_num_batched_tokens=4)
    scheduler.add_request(make_new("a", range(10)))
    run_step(scheduler)
    with pytest.raises(InvalidRequestError, match="begin with the 8 tokens"):
        fork(scheduler, "a", make_new("b", [*range(4), 50, 51, 52, 53, 54]))


@pytest.mark.parametrize("parent", ["ended", "another tenant's", "never there"])
def test_fork_of_a_request_that_is_none_to_it_is_one_like_any_other(parent: str) -> None:
    """Whether such a request is there at all, nobody learns, though the tokens are others."""
    scheduler = grown(3)
    if parent == "ended":
        scheduler.abort("a")
    tenant = "t" if parent == "another tenant's" else ""
    child = fork(scheduler, "x" if parent == "never there" else "a", make_new("b", [8, 8, 8, 8], tenant=tenant))
    assert child.status is RequestStatus.WAITING
    assert rows_of(run_step(scheduler))["b"] == (0, 4)


@pytest.mark.parametrize("is_taken", [False, True])
def test_fork_of_what_the_parents_window_has_left_finds_it_in_the_cache_unless_somebody_took_it(is_taken: bool) -> None:
    """Of the parent's 13 tokens a window of 8 still holds the last; what it has left was full, and is cached."""
    scheduler = make_scheduler(make_coordinator([SlidingWindow(4, 8)]))
    scheduler.add_request(make_new("a", range(6)))
    for _ in range(7):
        run_step(scheduler)
    late = fork(scheduler, "a", make_new("late", range(6), resumed=[7] * 6 + [50]))
    assert late.num_computed_tokens == 12
    pool = scheduler.kv.pool
    taken = pool.get_new_blocks(pool.num_free_blocks) if is_taken else []
    early = fork(scheduler, "a", make_new("early", range(4)))
    pool.free_blocks(taken)
    assert early.num_computed_tokens == (0 if is_taken else 3)
    scheduler.check_integrity()
    step = run_step(scheduler)
    assert rows_of(step) == {"a": (12, 1), "late": (12, 1), "early": (0, 4) if is_taken else (3, 1)}


def test_fork_between_checkpoints_of_a_state_computes_from_the_last_one() -> None:
    """The states between are overwritten: of those there is none to share."""
    scheduler = make_scheduler(make_coordinator([FullAttention(4), RecurrentState(4)]), max_outstanding=2)
    scheduler.add_request(make_new("a", range(6), max_tokens=20))
    for _ in range(5):
        run_step(scheduler)
    scheduler.schedule()
    between = fork(scheduler, "a", make_new("between", [*range(6), 7, 50]))
    assert between.num_computed_tokens == 4
    at_one = fork(scheduler, "a", make_new("at one", [*range(4), 50]))
    assert at_one.num_computed_tokens == 4
    before = fork(scheduler, "a", make_new("before", range(4)))
    assert (before.num_computed_tokens, before.tables) == (0, [])
    scheduler.check_integrity()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_fork_does_not_overtake_those_who_wait(policy: str) -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), policy=policy)
    scheduler.add_request(make_new("a", range(6)))
    run_step(scheduler)
    scheduler.add_request(make_new("w", 6))
    child = fork(scheduler, "a", make_new("b", range(6), resumed=[50]))
    assert child.status is RequestStatus.WAITING
    assert list(rows_of(run_step(scheduler)).items()) == [("a", (6, 1)), ("w", (0, 6)), ("b", (6, 1))]


def test_beam_search_computes_no_token_twice() -> None:
    """Width 2: after each step both beams go on from the better one."""
    scheduler = make_scheduler(make_kv(num_blocks=40))
    scheduler.add_request(with_branches(make_new("a", range(6), max_tokens=100), 1))
    run_step(scheduler, [10, 11])
    best, other = "a", "a#1"
    for turn in range(10):
        scheduler.abort(other)
        tokens = read_int32(scheduler.requests[best].tokens(6, 7 + turn))
        other = f"b{turn}"
        child = fork(scheduler, best, make_new(other, range(6), resumed=[*tokens[:-1], 100 + turn], max_tokens=100))
        assert child.num_computed_tokens == 6 + turn
        run_step(scheduler, {best: 20, other: 30})
        best, other = other, best
    assert scheduler.stats.tokens_computed == 6 + 2 * 10


def test_beam_search_wider_than_there_are_places_computes_no_token_twice() -> None:
    """Width 3 with 2 places: in each turn one beam waits, is forked twice while it does, and its forks wait behind."""
    scheduler = make_scheduler(make_kv(num_blocks=60), max_num_seqs=2)
    scheduler.add_request(make_new("a", range(6), max_tokens=100))
    run_step(scheduler)
    beams, count = ["a"], 0
    for turn in range(12):
        tokens = read_int32(scheduler.requests[beams[0]].token_bytes)
        fresh = [f"b{count + place}" for place in range(3)]
        count += 3
        for place, name in enumerate(fresh):
            resumed = [*tokens[6:-1], 100 + 3 * turn + place]
            child = fork(scheduler, beams[0], make_new(name, range(6), resumed=resumed, max_tokens=100))
            assert child.num_computed_tokens == len(tokens) - 1
        for beam in beams:
            scheduler.abort(beam)
        known = {name: scheduler.requests[name].num_tokens for name in fresh}
        beams = sorted(fresh, reverse=bool(turn % 2))
        while any(scheduler.requests[name].num_tokens == known[name] for name in beams):
            step = run_step(scheduler, 20)
            assert all(row.num_tokens == 1 for row in step.rows)
            for name in beams:  # who has got its token makes a place
                if len(scheduler.running) == 2 and scheduler.requests[name].num_tokens > known[name] + 1:
                    scheduler.abort(name)
                    beams.remove(name)
                    break
    assert scheduler.stats.preemptions == 0
