"""What follows from a good result: tokens, stop rules, lengths."""

import pytest

from kvmanager_service.core.request import FinishReason, SamplingParams, TokenLogprobs
from kvmanager_service.core.request_book import KEPT_FINISHED
from tests.unit.core.builders import make_kv, make_new, make_result, make_scheduler, outputs_of, run_step


def test_update_sampled_token_is_delivered_exactly_once() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    scheduler.add_request(make_new("a", 4, max_tokens=3))
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert scheduler.take_outputs() == []
    scheduler.update(make_result(steps[0], 50))
    assert outputs_of(scheduler)["a"].token_ids == [50]
    assert scheduler.take_outputs() == []
    scheduler.update(make_result(steps[1], 51))
    assert outputs_of(scheduler)["a"].token_ids == [51]


@pytest.mark.parametrize("max_outstanding", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_update_max_tokens_is_exact_and_no_row_goes_beyond_it(max_outstanding: int, max_tokens: int) -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), max_outstanding=max_outstanding)
    scheduler.add_request(make_new("a", 6, max_tokens=max_tokens))
    num_samples = num_tokens = 0
    while scheduler.has_work:
        while (step := scheduler.schedule()) is not None:
            num_samples += step.num_samples
            num_tokens += step.num_tokens
        scheduler.update(make_result(scheduler.outstanding[0]))
    outputs = scheduler.take_outputs()
    assert [output.finish_reason for output in outputs] == [None] * (max_tokens - 1) + [FinishReason.LENGTH]
    assert num_samples == max_tokens
    assert num_tokens == 6 + max_tokens - 1
    assert not scheduler.outstanding


def test_update_stop_token_ends_the_request_and_is_delivered() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 4, stop=[98, 99]))
    run_step(scheduler, 50)
    run_step(scheduler, 99)
    first, last = scheduler.take_outputs()
    assert (first.token_ids, first.finish_reason, first.stop_token_id) == ([50], None, None)
    assert (last.token_ids, last.finish_reason, last.stop_token_id) == ([99], FinishReason.STOP, 99)
    assert not scheduler.has_work
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_usable_blocks


def test_update_stop_token_in_the_prompt_or_resumed_ends_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", [99, 99], resumed=[1, 99], stop=[99]))
    run_step(scheduler, 50)
    assert outputs_of(scheduler)["a"].finish_reason is None


def test_update_stop_token_as_the_last_token_is_a_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 4, max_tokens=1, stop=[99]))
    run_step(scheduler, 99)
    assert outputs_of(scheduler)["a"].finish_reason is FinishReason.STOP


def test_update_after_a_stop_token_the_row_queued_ahead_is_ignored() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    scheduler.add_request(make_new("a", 4, stop=[99]))
    steps = [scheduler.schedule(), scheduler.schedule()]
    scheduler.update(make_result(steps[0], 99))
    assert outputs_of(scheduler)["a"].finish_reason is FinishReason.STOP
    scheduler.update(make_result(steps[1], 51))
    assert scheduler.take_outputs() == []
    scheduler.check_integrity()


@pytest.mark.parametrize("max_outstanding", [1, 2])
def test_schedule_min_tokens_suppresses_stop_for_exactly_that_many(max_outstanding: int) -> None:
    scheduler = make_scheduler(max_outstanding=max_outstanding)
    scheduler.add_request(make_new("a", 4, max_tokens=6, min_tokens=3, stop=[99]))
    suppressed = []
    while scheduler.has_work:
        while (step := scheduler.schedule()) is not None:
            suppressed += [row.suppress_stop for row in step.rows if row.sample_index >= 0]
        scheduler.update(make_result(scheduler.outstanding[0]))
    assert suppressed == [True, True, True, False, False, False]


def test_update_min_tokens_reached_lets_the_next_stop_token_end_it() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 4, max_tokens=6, min_tokens=2, stop=[99]))
    for _ in range(3):
        run_step(scheduler, 99)
    assert [output.finish_reason for output in scheduler.take_outputs()] == [None, None, FinishReason.STOP]


def test_schedule_resumed_tokens_count_as_output_and_are_not_emitted() -> None:
    scheduler = make_scheduler()
    request = scheduler.add_request(make_new("a", 4, max_tokens=4, min_tokens=3, stop=[99], resumed=[50, 51]))
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (4, 6, 2)
    suppressed = []
    while scheduler.has_work:
        suppressed += [row.suppress_stop for row in run_step(scheduler).rows]
    assert suppressed == [True, False]
    outputs = scheduler.take_outputs()
    assert [output.token_ids for output in outputs] == [[7], [7]]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_update_logprobs_go_with_their_token() -> None:
    scheduler = make_scheduler()
    for request_id in "ab":
        scheduler.add_request(make_new(request_id, 4, sampling=SamplingParams(num_logprobs=1)))
    step = scheduler.schedule()
    entry = TokenLogprobs((7, 8), (-0.5, -1.5))
    scheduler.update(make_result(step, logprobs={1: entry}))
    outputs = outputs_of(scheduler)
    assert outputs["a"].logprobs == []
    assert outputs["b"].logprobs == [entry]


def test_update_token_that_completes_a_block_a_later_step_fills_is_hashed_provisionally() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    request = scheduler.add_request(make_new("a", 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert request.contents == [], "the fourth token is not known yet"
    scheduler.update(make_result(first, 50))
    assert request.blocks[0].provisional_step == second.step_id
    scheduler.update(make_result(second, 51))
    assert request.blocks[0].provisional_step == 0
    assert len(request.contents) == 1
    scheduler.check_integrity()


def test_finish_by_stop_string_ends_without_output_and_ignores_late_results() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    request = scheduler.add_request(make_new("a", 4))
    steps = [scheduler.schedule(), scheduler.schedule()]
    scheduler.update(make_result(steps[0]))
    outputs_of(scheduler)
    scheduler.finish("a")
    scheduler.finish("a")
    scheduler.update(make_result(steps[1]))
    assert scheduler.take_outputs() == []
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_usable_blocks
    assert scheduler.book.num_finished == {"stop": 1}


def test_finish_by_stop_string_in_the_last_token_counts_as_a_stop() -> None:
    scheduler = make_scheduler()
    request = scheduler.add_request(make_new("a", 4, max_tokens=1))
    run_step(scheduler)
    assert outputs_of(scheduler)["a"].finish_reason is FinishReason.LENGTH
    scheduler.finish("a")
    scheduler.finish("unknown")
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.book.num_finished == {"length": 0, "stop": 1}


def test_abort_between_schedule_and_result_frees_blocks_at_once_and_ignores_the_result() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 6))
    step = scheduler.schedule()
    scheduler.abort("a")
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_usable_blocks
    scheduler.update(make_result(step))
    outputs = scheduler.take_outputs()
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([], FinishReason.ABORT)]
    # Its full block was computed all the same, and is found.
    scheduler.add_request(make_new("b", range(97_000, 97_006)))
    assert scheduler.schedule().rows[0].start == 4


def test_finished_requests_keep_their_numbers_but_no_tokens() -> None:
    scheduler = make_scheduler(max_outstanding=2)
    request = scheduler.add_request(make_new("a", 9, max_tokens=2))
    run_step(scheduler)
    run_step(scheduler)
    assert (request.token_bytes, request.block_hashes) == (b"", [])
    assert (request.num_prompt_tokens, request.num_output_tokens) == (9, 2)


def test_finished_requests_keep_their_last_table_for_a_while() -> None:
    scheduler = make_scheduler(max_waiting=KEPT_FINISHED + 10)
    for index in range(KEPT_FINISHED + 1):
        scheduler.add_request(make_new(f"r{index}", 5, max_tokens=1))
        run_step(scheduler)
    assert len(scheduler.book.finished) == KEPT_FINISHED
    assert scheduler.book.finished[0].request_id == "r1"
    assert len(scheduler.book.finished[0].last_block_id_bytes) == 8
