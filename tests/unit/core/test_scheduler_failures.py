"""Steps, rows, results and executors that fail."""

from collections.abc import Callable

import pytest

from kvmanager_service.core.errors import (
    BadResultError,
    CoreError,
    PoolExhaustedError,
    PoolInUseError,
    RowFailedError,
    UnknownRequestError,
)
from kvmanager_service.core.request import FinishReason, RequestStatus
from kvmanager_service.core.step import StepResult
from kvmanager_service.core.suspects import MAX_FAILED_STEPS
from tests.unit.core.builders import (
    make_kv,
    make_new,
    make_result,
    make_scheduler,
    outputs_of,
    rows_of,
    run_step,
    state_of,
)


def change(**columns: object) -> Callable[[StepResult], None]:
    def apply(result: StepResult) -> None:
        for name, value in columns.items():
            setattr(result, name, value)

    return apply


ROW_FAILED = RowFailedError("NON_FINITE_LOGITS", "as the test wants")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(step_id=2), "expected step 1, got the result of step 2"),
        (change(step_id=0), "expected step 1, got the result of step 0"),
        (change(sampled=[1]), "expected 2 samples and 2 rows"),
        (change(sampled=[1, 2, 3]), "expected 2 samples and 2 rows"),
        (change(computed_upto=[4]), "expected 2 samples and 2 rows"),
        (change(computed_upto=[4, 4]), "row 1 of step 1 to be computed up to 5, got 4"),
        (change(computed_upto=[5, 5]), "row 0 of step 1 to be computed up to 4, got 5"),
        (change(sampled=[1, -1]), "row 1 of step 1 to sample a token, got -1"),
        (change(sampled=[-1, -1], errors={1: ROW_FAILED}), "row 0 of step 1 to sample a token, got -1"),
        (change(errors={2: ROW_FAILED}), "row errors of 2 rows, got one of row 2"),
        (change(errors={-1: ROW_FAILED}), "row errors of 2 rows, got one of row -1"),
    ],
)
def test_update_malformed_result_raises_and_changes_nothing(damage: Callable, message: str) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 4))
    scheduler.add_request(make_new("b", 5))
    step = scheduler.schedule()
    result = make_result(step)
    damage(result)
    before = state_of(scheduler)
    with pytest.raises(BadResultError, match=message):
        scheduler.update(result)
    assert state_of(scheduler) == before
    scheduler.update(make_result(step))


def test_update_without_an_outstanding_step_raises() -> None:
    with pytest.raises(BadResultError, match="expected no result at all, got the result of step 1"):
        make_scheduler().update(StepResult(1, [], []))


def test_update_result_of_the_second_step_first_raises() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    scheduler.add_request(make_new("a", 4))
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(BadResultError, match="expected step 1, got the result of step 2"):
        scheduler.update(make_result(second))


def test_update_row_error_ends_that_request_and_leaves_others_undisturbed() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    for request_id in "abc":
        scheduler.add_request(make_new(request_id, 6))
    steps = [scheduler.schedule(), scheduler.schedule()]
    scheduler.update(make_result(steps[0], failed=[1]))
    outputs = outputs_of(scheduler)
    assert isinstance(outputs["b"].error, RowFailedError)
    assert (outputs["b"].finish_reason, outputs["b"].token_ids) == (FinishReason.ERROR, [])
    assert outputs["a"].token_ids == outputs["c"].token_ids == [7]
    assert list(scheduler.running) == ["a", "c"]
    assert scheduler.stats.reschedules == 0
    scheduler.update(make_result(steps[1], failed=[1]))  # the row that was fed by the failed one
    assert outputs_of(scheduler).keys() == {"a", "c"}
    scheduler.check_integrity()


def test_update_row_error_unhashes_its_blocks_and_schedules_sharers_anew() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    prompt = list(range(9))
    scheduler.add_request(make_new("failed", prompt))
    scheduler.add_request(make_new("sharer", [*prompt, 5]))
    scheduler.add_request(make_new("other", 6))
    step = scheduler.schedule()
    assert rows_of(step)["sharer"] == (8, 2)
    scheduler.update(make_result(step, failed=[0]))
    outputs = outputs_of(scheduler)
    assert outputs.keys() == {"failed", "other"}, "what the sharer sampled is not to be trusted"
    assert scheduler.requests["sharer"].status is RequestStatus.PREEMPTED
    assert scheduler.stats.reschedules == 1
    assert rows_of(scheduler.schedule())["sharer"] == (0, 10), "nothing of the prefix is found any more"
    scheduler.check_integrity()


def test_update_row_error_content_held_twice_leads_nobody_to_what_was_built_on_it() -> None:
    """Two requests hold the same content; what was computed on the failed one must not be found under the other."""
    scheduler = make_scheduler(make_kv(num_blocks=20))
    prompt = [1, 2, 3, 4]
    scheduler.add_request(make_new("failed", prompt, max_tokens=20))
    scheduler.add_request(make_new("twin", prompt, max_tokens=20))
    for token_id in (5, 6, 7, 8):
        run_step(scheduler, token_id)
    run_step(scheduler, 9)  # computes the 8; each has filled a second block of its own
    failed, twin = scheduler.requests["failed"], scheduler.requests["twin"]
    assert failed.contents[1] is twin.contents[1]
    assert failed.blocks[1] is not twin.blocks[1]
    scheduler.add_request(make_new("sharer", [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23, 24]))
    step = scheduler.schedule()
    assert rows_of(step)["sharer"] == (8, 5)
    sharer_block = scheduler.requests["sharer"].blocks[2]
    scheduler.abort("sharer")  # nobody holds its third block when the failure is heard of
    scheduler.update(make_result(step, failed=[0]))
    assert sharer_block.content is None, "it was computed from a block that can not be trusted"
    scheduler.add_request(make_new("next", [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23, 24]))
    # What it does find is what the twin, itself scheduled anew, computes in this step; not the sharer's third block.
    assert rows_of(scheduler.schedule()) == {"twin": (0, 9), "next": (8, 5)}
    scheduler.check_integrity()


def test_update_row_error_of_an_earlier_life_schedules_the_request_anew() -> None:
    """The failed row is of before a preemption; since, the request was admitted again on what that row wrote."""
    kv = make_kv(num_blocks=5, block_size=2)
    scheduler = make_scheduler(kv, policy="priority", max_outstanding=2)
    scheduler.add_request(make_new("last", 3, max_tokens=1, priority=0))
    scheduler.add_request(make_new("yields", 4, max_tokens=9, priority=9))
    step = scheduler.schedule()
    assert rows_of(step) == {"last": (0, 3), "yields": (0, 4)}
    assert scheduler.schedule() is None, "it found no block for its next token, and nobody else has any work"
    assert scheduler.requests["yields"].status is RequestStatus.PREEMPTED
    again = scheduler.schedule()
    assert rows_of(again) == {"yields": (2, 2)}, "its first block, which the outstanding step fills, is a hit"
    scheduler.update(make_result(step, failed=[1]))
    assert scheduler.requests["yields"].contents == []
    scheduler.check_integrity()
    scheduler.update(make_result(again))
    assert outputs_of(scheduler).keys() == {"last"}
    assert rows_of(scheduler.schedule()) == {"yields": (0, 4)}


def test_update_distrusted_blocks_lose_their_tags_at_the_executor() -> None:
    scheduler = make_scheduler()
    request = scheduler.add_request(make_new("a", 6))
    scheduler.add_request(make_new("b", 3))
    run_step(scheduler)
    block_id = request.blocks[0].block_id
    step = scheduler.schedule()
    assert [tagged for tagged, content in step.tags if content is not None] == [block_id]
    scheduler.update(make_result(step, failed=[0]))
    assert (block_id, None) in scheduler.schedule().tags


def test_lose_steps_tags_of_a_lost_step_go_with_the_next() -> None:
    scheduler = make_scheduler()
    request = scheduler.add_request(make_new("a", 6))
    scheduler.add_request(make_new("b", 3))
    run_step(scheduler)
    block_id, content = request.blocks[0].block_id, request.contents[0]
    assert scheduler.schedule().tags == [(block_id, content)]
    scheduler.lose_steps()
    step = scheduler.schedule()
    assert step.tags == [(block_id, content)]
    scheduler.update(make_result(step, failed=[0]))
    assert (block_id, None) in scheduler.schedule().tags
    scheduler.lose_steps()
    assert (block_id, None) in scheduler.schedule().tags, "the executor still holds a tag of what is not trusted"


def test_schedule_block_filled_anew_is_not_tagged_before_that_is_acknowledged() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=4, block_size=4), max_outstanding=2)
    prompt = list(range(5))
    first = scheduler.add_request(make_new("first", prompt, max_tokens=2))
    second = scheduler.add_request(make_new("second", prompt, max_tokens=2))
    run_step(scheduler)
    assert first.blocks[0] is second.blocks[0]
    block = first.blocks[0]
    block.provisional_step = 99
    assert scheduler.schedule().tags == []


def test_schedule_nothing_left_sends_the_last_tags_in_a_step_without_rows() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 9, max_tokens=1))
    run_step(scheduler)
    step = run_step(scheduler)
    assert (step.rows, len(step.tags)) == ([], 2)
    assert scheduler.schedule() is None


def test_lose_steps_unhashes_provisional_blocks_and_schedules_anew() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    scheduler.add_request(make_new("a", 9))
    run_step(scheduler, 50)
    scheduler.add_request(make_new("b", 9))
    scheduler.schedule()
    scheduler.schedule()
    scheduler.lose_steps()
    scheduler.check_integrity()
    assert not scheduler.outstanding
    assert scheduler.kv.pool.num_cached_blocks == 2, "those of a that were committed"
    assert scheduler.stats.steps_failed == 2
    assert [request.request_id for request in scheduler.waiting] == ["a", "b"]
    assert rows_of(scheduler.schedule()) == {"a": (8, 2), "b": (0, 9)}


def test_lose_steps_nothing_outstanding_blames_nobody() -> None:
    scheduler = make_scheduler()
    request = scheduler.add_request(make_new("a", 4))
    for _ in range(MAX_FAILED_STEPS + 1):
        run_step(scheduler)
        scheduler.lose_steps()
    assert request.failed_steps == 0
    assert scheduler.has_work


def test_lose_steps_same_request_in_a_row_ends_with_an_error() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_new("poison", 4))
    scheduler.add_request(make_new("innocent", 4))
    for _ in range(MAX_FAILED_STEPS - 1):
        scheduler.schedule()
        scheduler.lose_steps()
        assert scheduler.take_outputs() == []
    scheduler.schedule()
    scheduler.lose_steps()
    output = outputs_of(scheduler)["poison"]
    assert isinstance(output.error, RowFailedError)
    assert output.error.reason == "STEP_FAILED"
    assert set(rows_of(run_step(scheduler))) == {"innocent"}


def test_lose_steps_nobody_to_blame_ends_nobody_and_forgives_nothing() -> None:
    scheduler = make_scheduler()
    request = scheduler.add_request(make_new("a", 4))
    for _ in range(MAX_FAILED_STEPS + 1):
        scheduler.schedule()
        scheduler.lose_steps(blame=False)
        scheduler.check_integrity()
    assert (request.failed_steps, scheduler.stats.steps_failed) == (0, MAX_FAILED_STEPS + 1)
    for blame in (True, False, True, False, True):
        assert scheduler.take_outputs() == []
        scheduler.schedule()
        scheduler.lose_steps(blame=blame)
    assert isinstance(outputs_of(scheduler)["a"].error, RowFailedError)


@pytest.mark.parametrize("max_outstanding", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_lose_steps_poison_among_others_ends_alone(policy: str, max_outstanding: int) -> None:
    """Whatever steps the poison is in, and only those, fail; the other requests finish."""
    scheduler = make_scheduler(make_kv(num_blocks=60), policy=policy, max_outstanding=max_outstanding)
    for name in ("a", "b", "poison", "c"):
        scheduler.add_request(make_new(name, 6, max_tokens=5, priority=len(name)))
    ends: dict[str, FinishReason] = {}
    for _ in range(60):
        while scheduler.schedule() is not None:
            pass
        scheduler.check_integrity()
        if "poison" in rows_of(scheduler.outstanding[0]):
            scheduler.lose_steps()
        else:
            scheduler.update(make_result(scheduler.outstanding[0]))
        ends |= {name: output.finish_reason for name, output in outputs_of(scheduler).items() if output.finish_reason}
        if not scheduler.has_work:
            break
    assert ends == dict.fromkeys("abc", FinishReason.LENGTH) | {"poison": FinishReason.ERROR}


def test_lose_steps_success_in_between_starts_the_count_anew() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=30))
    scheduler.add_request(make_new("a", 4, max_tokens=50))
    for _ in range(MAX_FAILED_STEPS + 2):
        for _ in range(MAX_FAILED_STEPS - 1):
            scheduler.schedule()
            scheduler.lose_steps()
        run_step(scheduler)
    assert scheduler.has_work


def test_lose_steps_success_before_the_place_that_fails_does_not_start_the_count_anew() -> None:
    """Without a cache the first chunk is computed again each time; that proves nothing of the second."""
    scheduler = make_scheduler(make_kv(enable_caching=False), max_num_batched_tokens=8)
    scheduler.add_request(make_new("poison", 16))
    for _ in range(MAX_FAILED_STEPS):
        assert rows_of(run_step(scheduler)) == {"poison": (0, 8)}
        assert rows_of(scheduler.schedule()) == {"poison": (8, 8)}
        scheduler.lose_steps()
    output = outputs_of(scheduler)["poison"]
    assert isinstance(output.error, RowFailedError)
    assert not scheduler.has_work


def test_update_late_result_of_an_old_incarnation_is_ignored() -> None:
    """Preempted while a step was out, admitted again before its result: the token of the first life is not its."""
    kv = make_kv(num_blocks=5, block_size=2)
    scheduler = make_scheduler(kv, policy="priority", max_outstanding=2)
    scheduler.add_request(make_new("last", 3, max_tokens=1, priority=0))
    request = scheduler.add_request(make_new("yields", 4, max_tokens=9, priority=9))
    step = scheduler.schedule()
    assert scheduler.schedule() is None
    again = scheduler.schedule()
    assert rows_of(again) == {"yields": (2, 2)}
    scheduler.update(make_result(step, {"last": 40, "yields": 41}))
    assert outputs_of(scheduler).keys() == {"last"}
    assert request.num_output_tokens == 0
    scheduler.update(make_result(again, 42))
    assert outputs_of(scheduler)["yields"].token_ids == [42]
    scheduler.check_integrity()


def test_replace_cache_schedules_everything_anew() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    for request_id in "ab":
        scheduler.add_request(make_new(request_id, 6))
    run_step(scheduler, 50)
    scheduler.schedule()
    scheduler.replace_cache(make_kv(num_blocks=30, block_size=3))
    scheduler.check_integrity()
    assert rows_of(scheduler.schedule()) == {"a": (0, 7), "b": (0, 7)}
    assert scheduler.schedule().tags == []


def test_replace_cache_smaller_pool_ends_what_can_not_fit() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=11, block_size=4), max_num_seqs=2)
    for request_id, length in (("runs long", 9), ("runs short", 3), ("waits long", 12), ("waits short", 8)):
        scheduler.add_request(make_new(request_id, length))
    run_step(scheduler)
    outputs_of(scheduler)
    scheduler.replace_cache(make_kv(num_blocks=3, block_size=4))
    outputs = outputs_of(scheduler)
    assert outputs.keys() == {"runs long", "waits long"}
    assert all(isinstance(output.error, PoolExhaustedError) for output in outputs.values())
    assert set(scheduler.requests) == {"runs short", "waits short"}


def test_replace_cache_same_size_ends_nobody_who_could_have_finished() -> None:
    """Eight tokens known, pool of eight: the ninth can be produced, for it needs no slot."""
    scheduler = make_scheduler(make_kv(num_blocks=3, block_size=4))
    scheduler.add_request(make_new("a", 7, max_tokens=2))
    run_step(scheduler)
    scheduler.replace_cache(make_kv(num_blocks=3, block_size=4))
    run_step(scheduler)
    assert scheduler.take_outputs()[-1].finish_reason is FinishReason.LENGTH


def test_reset_prefix_cache_in_use_refuses_and_changes_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 6))
    run_step(scheduler)
    before = state_of(scheduler)
    with pytest.raises(PoolInUseError, match="no running request, got 1"):
        scheduler.reset_prefix_cache()
    assert state_of(scheduler) == before


def test_reset_prefix_cache_idle_forgets_all_here_and_at_the_executor() -> None:
    scheduler = make_scheduler()
    prompt = list(range(9))
    scheduler.add_request(make_new("a", prompt, max_tokens=1))
    run_step(scheduler)
    assert scheduler.reset_prefix_cache() == 2
    step = run_step(scheduler)
    assert step.rows == []
    assert [content for _, content in step.tags] == [None, None]
    scheduler.add_request(make_new("b", prompt, max_tokens=1))
    step = scheduler.schedule()
    assert rows_of(step) == {"b": (0, 9)}
    # Blocks that this very step fills again are provisional; their old tags go when they are written.
    assert all(content is None for _, content in step.tags)


def test_reset_prefix_cache_with_a_step_of_ended_requests_out_keeps_nothing_of_it() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 9))
    step = scheduler.schedule()
    scheduler.abort("a")
    scheduler.reset_prefix_cache()
    scheduler.update(make_result(step))
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_cached_blocks == 0


def test_fail_ends_a_request_with_the_error_given() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 4))
    error = CoreError("UNAVAILABLE", "no executor")
    scheduler.fail("a", error)
    assert outputs_of(scheduler)["a"].error is error


@pytest.mark.parametrize("call", ["abort", "fail"])
def test_end_request_unknown_raises(call: str) -> None:
    scheduler = make_scheduler()
    arguments = ("a",) if call == "abort" else ("a", CoreError("X", "x"))
    with pytest.raises(UnknownRequestError, match="'a'"):
        getattr(scheduler, call)(*arguments)
