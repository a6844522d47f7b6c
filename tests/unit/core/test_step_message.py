"""Steps as messages, column by column, and results read back."""

import pytest
from kvplane.common.v1.common_pb2 import Float32Array, Int32Array
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service.core.block_tag import decode_tag
from kvmanager_service.core.errors import BadResultError
from kvmanager_service.core.extra_keys import LoraAdapter
from kvmanager_service.core.kv_cache import table_sizes
from kvmanager_service.core.kv_groups import FullAttention, SlidingWindow
from kvmanager_service.core.request import SamplingParams, TokenLogprobs
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.step import Step
from kvmanager_service.step_message import (
    MAX_ERROR_CHARS,
    MAX_REASON_CHARS,
    build_execute_request,
    read_execute_response,
)
from tests.unit.core.builders import (
    block_ids,
    make_coordinator,
    make_kv,
    make_new,
    make_result,
    make_scheduler,
    read_int32,
    run_step,
    token_bytes,
)


def build(scheduler: Scheduler, step: Step | None, kv_epoch: int = 77) -> pb.ExecuteRequest:
    """The message, as it arrives on the other side."""
    assert step is not None
    message = build_execute_request(step, kv_epoch, scheduler.kv.block_size)
    return pb.ExecuteRequest.FromString(message.SerializeToString())


def ints(column: Int32Array) -> list[int]:
    return read_int32(column.data)


def column(*values: int) -> Int32Array:
    return Int32Array(data=token_bytes(values))


def test_build_execute_request_prefill_and_decode_rows_lie_end_to_end() -> None:
    scheduler = make_scheduler(make_kv(block_size=4), max_num_batched_tokens=8)
    a = scheduler.add_request(make_new("a", [1, 2, 3, 4, 5]))
    run_step(scheduler, 6)
    b = scheduler.add_request(make_new("b", range(10, 20)))
    message = build(scheduler, scheduler.schedule())
    assert (message.step_id, message.kv_epoch) == (2, 77)
    assert ints(message.query_indptr) == [0, 1, 8]
    assert ints(message.token_ids) == [6, *range(10, 17)]
    assert ints(message.positions) == [5, *range(7)]
    (tables,) = message.block_tables
    assert ints(tables.block_indptr) == [0, 2, 4]
    # b holds blocks for its whole prompt; the row's table ends where the row does.
    assert len(b.blocks) == 3
    assert ints(tables.block_ids) == block_ids(a.blocks) + block_ids(b.blocks[:2])
    assert ints(tables.last_block_len) == [2, 3]
    assert ints(message.sampling.rows) == [0], "b's prompt is not computed to its end"
    assert not message.HasField("feeds_from")
    assert message.feeds_from_step_id == 0


def test_build_execute_request_has_a_table_for_each_kv_group_with_null_blocks_before_its_window() -> None:
    groups = [FullAttention(4), SlidingWindow(2, 5)]
    scheduler = make_scheduler(make_coordinator(groups, longest_chunk=8), max_num_batched_tokens=8)
    request = scheduler.add_request(make_new("a", range(1, 15)))
    run_step(scheduler)
    step = scheduler.schedule()
    assert step is not None
    sizes = table_sizes(scheduler.kv)
    assert sizes == [4, 2]
    full, sliding = build_execute_request(step, 77, scheduler.kv.block_size, sizes).block_tables
    # Tokens 8 to 13: the first of them reads back to 4.
    assert ints(full.block_indptr) == [0, 4]
    assert ints(full.last_block_len) == ints(sliding.last_block_len) == [2]
    assert ints(full.block_ids) == block_ids(request.tables[0].blocks)
    assert ints(sliding.block_indptr) == [0, 7]
    assert ints(sliding.block_ids)[:2] == [0, 0]
    assert ints(sliding.block_ids) == block_ids(request.tables[1].blocks[:7])
    assert 0 not in ints(sliding.block_ids)[2:]


def test_build_execute_request_without_rows_has_an_empty_table_for_each_kv_group() -> None:
    scheduler = make_scheduler(make_coordinator([FullAttention(4), SlidingWindow(4, 5)]))
    scheduler.add_request(make_new("a", range(1, 10), max_tokens=1))
    run_step(scheduler)
    step = scheduler.schedule()
    assert step is not None
    assert not step.rows
    assert step.tags
    message = build_execute_request(step, 77, 4, table_sizes(scheduler.kv))
    assert [(ints(tables.block_indptr), ints(tables.block_ids)) for tables in message.block_tables] == [([0], [])] * 2


@pytest.mark.parametrize(("length", "blocks", "last"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4)])
def test_build_execute_request_last_block_len_is_in_1_to_block_size(length: int, blocks: int, last: int) -> None:
    scheduler = make_scheduler(make_kv(block_size=4))
    scheduler.add_request(make_new("a", length))
    (tables,) = build(scheduler, scheduler.schedule()).block_tables
    assert ints(tables.block_indptr) == [0, blocks]
    assert ints(tables.last_block_len) == [last]


def test_build_execute_request_hit_prefix_is_in_the_table_and_not_in_the_tokens() -> None:
    scheduler = make_scheduler(make_kv(block_size=4))
    scheduler.add_request(make_new("a", range(9), max_tokens=1))
    run_step(scheduler)
    b = scheduler.add_request(make_new("b", [*range(8), 50, 51]))
    message = build(scheduler, scheduler.schedule())
    assert ints(message.token_ids) == [50, 51]
    assert ints(message.positions) == [8, 9]
    assert ints(message.block_tables[0].block_ids) == block_ids(b.blocks)


def test_build_execute_request_token_being_sampled_is_named_by_its_sample() -> None:
    """a's prompt is not done, so b's sample is the first of the step and c's the second."""
    scheduler = make_scheduler(make_kv(num_blocks=20, block_size=4), max_outstanding=2, long_prefill_token_threshold=4)
    for request_id, length in (("a", 6), ("b", 3), ("c", 4)):
        scheduler.add_request(make_new(request_id, length))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert ints(build(scheduler, first).sampling.rows) == [1, 2]
    message = build(scheduler, second)
    assert message.feeds_from_step_id == 1
    assert ints(message.feeds_from) == [-1, 0, 1]
    prompt = read_int32(bytes(scheduler.requests["a"].token_bytes))
    assert ints(message.token_ids) == [*prompt[4:], 0, 0]
    assert ints(message.positions) == [4, 5, 3, 4]
    assert ints(message.sampling.rows) == [0, 1, 2]
    scheduler.update(make_result(first, {"b": 50, "c": 51}))
    message = build(scheduler, scheduler.schedule())
    assert ints(message.feeds_from) == [0, 1, 2]
    assert message.feeds_from_step_id == 2


def test_build_execute_request_row_whose_token_is_known_is_not_fed() -> None:
    scheduler = make_scheduler(max_outstanding=1)
    scheduler.add_request(make_new("a", 3))
    run_step(scheduler, 50)
    message = build(scheduler, scheduler.schedule())
    assert ints(message.token_ids) == [50]
    assert ints(message.feeds_from) == []


def test_build_execute_request_no_row_samples_leaves_sampling_out() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2)
    scheduler.add_request(make_new("a", 5))
    assert not build(scheduler, scheduler.schedule()).HasField("sampling")


def test_build_execute_request_equal_parameters_are_sent_once() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    greedy, warm = SamplingParams(temperature=0.0), SamplingParams(temperature=0.5, logit_bias=((3, 1.5), (4, -1.0)))
    for request_id, sampling, seed in (
        ("a", greedy, 1),
        ("b", warm, 2),
        ("c", SamplingParams(temperature=0.0), 2**64 - 1),
    ):
        scheduler.add_request(make_new(request_id, 3, sampling=sampling, seed=seed))
    sampling = build(scheduler, scheduler.schedule()).sampling
    assert ints(sampling.params_index) == [0, 1, 0]
    assert [params.temperature for params in sampling.params] == [0.0, 0.5]
    assert dict(sampling.params[1].logit_bias) == {3: 1.5, 4: -1.0}
    assert list(sampling.seeds) == [1, 2, 2**64 - 1]
    assert not sampling.HasField("penalties")


def test_build_execute_request_parameters_arrive_as_given() -> None:
    scheduler = make_scheduler()
    given = SamplingParams(0.5, 40, 0.25, 0.125, 1.5, -0.5, 0.75, ((9, 2.0),), 3)
    scheduler.add_request(make_new("a", 3, sampling=given))
    (params,) = build(scheduler, scheduler.schedule()).sampling.params
    arrived = SamplingParams(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        tuple(params.logit_bias.items()),
        params.num_logprobs,
    )
    assert arrived == given


def test_build_execute_request_stop_tokens_are_suppressed_only_below_min_tokens() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20))
    scheduler.add_request(make_new("a", 3, stop=[9, 2], min_tokens=1))
    scheduler.add_request(make_new("b", 3, stop=[9, 2]))
    sampling = build(scheduler, scheduler.schedule()).sampling
    assert [list(params.suppressed_token_ids) for params in sampling.params] == [[2, 9], []]
    assert ints(sampling.params_index) == [0, 1]


def test_build_execute_request_penalised_rows_carry_their_known_tokens() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=20), max_outstanding=2)
    penalised = SamplingParams(repetition_penalty=1.5)
    scheduler.add_request(make_new("plain", [1, 2]))
    scheduler.add_request(make_new("a", [3, 4, 5], sampling=penalised, resumed=[6]))
    scheduler.add_request(make_new("b", [7], sampling=SamplingParams(presence_penalty=0.5)))
    message = build(scheduler, scheduler.schedule())
    penalties = message.sampling.penalties
    assert ints(penalties.sample_index) == [1, 2]
    assert ints(penalties.indptr) == [0, 4, 5]
    assert ints(penalties.token_ids) == [3, 4, 5, 6, 7]
    assert ints(penalties.prompt_lens) == [3, 1]
    # The token that feeds the next step is not known here: the executor adds it.
    assert ints(build(scheduler, scheduler.schedule()).sampling.penalties.token_ids) == [3, 4, 5, 6, 7]


def test_build_execute_request_committed_blocks_are_tagged_in_the_next_step() -> None:
    scheduler = make_scheduler(make_kv(block_size=4))
    request = scheduler.add_request(make_new("a", range(9)))
    assert not build(scheduler, scheduler.schedule()).HasField("block_tags")
    scheduler.update(make_result(scheduler.outstanding[0]))
    message = build(scheduler, scheduler.schedule())
    assert ints(message.block_tags.block_ids) == block_ids(request.blocks[:2])
    tagged = decode_tag(1, message.block_tags.tags[1])
    assert tagged is not None
    assert tagged.token_bytes == token_bytes(range(4, 8))
    scheduler.update(make_result(scheduler.outstanding[0]))
    assert not build(scheduler, scheduler.schedule()).HasField("block_tags"), "once is enough"


def test_build_execute_request_block_that_lost_its_content_is_not_tagged() -> None:
    scheduler = make_scheduler(make_kv(num_blocks=4, block_size=4))
    scheduler.add_request(make_new("a", 8, max_tokens=1))
    run_step(scheduler)
    scheduler.add_request(make_new("b", 6))  # takes the unused block, then evicts the deepest of a's two
    message = build(scheduler, scheduler.schedule())
    assert ints(message.block_tags.block_ids) == [1]


def test_build_execute_request_distrusted_block_loses_its_tag() -> None:
    scheduler = make_scheduler(make_kv(block_size=4))
    scheduler.add_request(make_new("a", 6))
    scheduler.add_request(make_new("b", 2))
    run_step(scheduler)
    scheduler.update(make_result(scheduler.schedule(), failed=[0]))
    message = build(scheduler, scheduler.schedule())
    assert ints(message.block_tags.block_ids) == [1]
    assert list(message.block_tags.tags) == [b""]


def make_response(**columns: object) -> pb.ExecuteResponse:
    """A good response with two samples; columns replace its own."""
    values = {"step_id": 5, "kv_epoch": 77, "sampled_token_ids": column(7, 8), "computed_upto": column(4, 9)} | columns
    return pb.ExecuteResponse(**values)


def make_logprobs(indptr: list[int], num_ids: int, num_values: int | None = None) -> pb.LogprobsBatch:
    values = num_ids if num_values is None else num_values
    return pb.LogprobsBatch(
        indptr=column(*indptr),
        token_ids=column(*range(100, 100 + num_ids)),
        logprobs=Float32Array(data=b"\x00\x00\x00\xbf" * values),
    )


def test_read_execute_response_columns_are_read() -> None:
    response = make_response(logprobs=make_logprobs([0, 0, 2], 2))
    response.row_errors.add(row=1, reason="NON_FINITE_LOGITS", message="nan")
    response.row_errors.add(row=0)
    response.compute_us, response.copy_us = 900, 80
    result = read_execute_response(response, 77)
    assert (result.step_id, list(result.sampled), list(result.computed_upto)) == (5, [7, 8], [4, 9])
    assert (result.compute_us, result.copy_us) == (900, 80)
    assert result.logprobs == {1: TokenLogprobs((100, 101), (-0.5, -0.5))}
    assert [(index, error.reason, str(error)) for index, error in result.errors.items()] == [
        (1, "NON_FINITE_LOGITS", "nan"),
        (0, "ROW_FAILED", "the executor gave no reason"),
    ]


def test_read_execute_response_long_message_of_a_failed_row_is_cut() -> None:
    response = make_response()
    response.row_errors.add(row=0, reason="R" * 64, message="x" * 1_000_000)
    response.row_errors.add(row=1, reason="R" * MAX_REASON_CHARS, message="\U0001f600" * MAX_ERROR_CHARS)
    errors = read_execute_response(response, 77).errors
    assert (errors[0].reason, str(errors[0])) == ("R" * 62 + "…", "x" * (MAX_ERROR_CHARS - 1) + "…")
    assert (errors[1].reason, str(errors[1])) == ("R" * MAX_REASON_CHARS, "\U0001f600" * MAX_ERROR_CHARS)


@pytest.mark.parametrize(
    "response",
    [
        make_response(sampled_token_ids=Int32Array(data=b"\0\0\0")),
        make_response(computed_upto=Int32Array(data=b"\0" * 9)),
        make_response(logprobs=make_logprobs([0, 2, 1], 1)),
        make_response(logprobs=make_logprobs([0, 1], 1)),
        make_response(logprobs=make_logprobs([0, 1, 1, 1], 1)),
        make_response(logprobs=make_logprobs([], 0)),
        make_response(logprobs=make_logprobs([1, 1, 2], 2)),
        make_response(logprobs=make_logprobs([-1, 0, 2], 2)),
        make_response(logprobs=make_logprobs([0, 1, 2], 3)),
        make_response(logprobs=make_logprobs([0, 1, 2], 2, 1)),
        make_response(logprobs=pb.LogprobsBatch(indptr=column(0, 0, 0), logprobs=Float32Array(data=b"\0\0"))),
    ],
)
def test_read_execute_response_malformed_column_raises(response: pb.ExecuteResponse) -> None:
    with pytest.raises(BadResultError, match="well-formed result of step 5"):
        read_execute_response(response, 77)


def test_read_execute_response_of_another_cache_raises() -> None:
    with pytest.raises(BadResultError, match="of kv_epoch 78, got step 5 of 77: it was computed from another cache"):
        read_execute_response(make_response(), 78)


def test_build_execute_request_rows_name_their_adapters_and_a_step_without_any_names_none() -> None:
    scheduler = make_scheduler(make_kv(block_size=4))
    for request_id, lora in (("a", LoraAdapter("x", "1")), ("b", None), ("c", LoraAdapter("y"))):
        scheduler.add_request(make_new(request_id, [1, 2, 3], lora=lora))
    step = scheduler.schedule()
    assert step is not None
    message = build_execute_request(step, 77, 4, adapter_ids={"x": 7, "y": 3, "z": 1})
    assert ints(message.adapter_ids) == [7, 0, 3]
    other = make_scheduler(make_kv(block_size=4))
    other.add_request(make_new("b", [1, 2, 3]))
    step = other.schedule()
    assert step is not None
    assert not build_execute_request(step, 77, 4, adapter_ids={"x": 7}).HasField("adapter_ids")
