"""Every range of the proto is checked, and what passes arrives unchanged."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.convert import check_request, check_request_id, to_new_request, to_sampling, token_array
from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.core.forks import branch_seed
from kvmanager_service.core.request import NewBranch, NewRequest, SamplingParams
from kvmanager_service.core.retention import END_OF_SEQUENCE, RetentionRange, check_ranges
from kvmanager_service.errors import PreconditionError
from tests.unit.manager.manager_builders import generate_request, int32s, model_view, text_model

MODEL = model_view(text_model())


def convert(request: pb.GenerateRequest, **changes: Any) -> NewRequest:
    model = model_view(text_model(), **changes)
    sampling = check_request(request, model)
    prompt = token_array(request.token_ids.ids)
    return to_new_request(request, prompt, sampling, model, request_id="r", seed=99, arrival_time=1.5)


def with_sampling(**values: Any) -> pb.GenerateRequest:
    return generate_request(sampling=pb.SamplingParams(**values))


def with_stopping(**values: Any) -> pb.GenerateRequest:
    return generate_request(stopping=pb.StoppingParams(**values))


def with_range(**values: Any) -> pb.GenerateRequest:
    """A prompt of one token, and what is asked for a range of it."""
    return generate_request(1, retention=pb.Retention(ranges=[pb.RetentionRange(**values)]))


def test_convert_all_absent_is_every_default() -> None:
    new = convert(generate_request(5, 6, 7))
    assert int32s(new.prompt) == [5, 6, 7]
    assert new.sampling == SamplingParams()
    assert (new.stop.max_tokens, new.stop.min_tokens, new.stop.stop_token_ids) == (125, 0, frozenset({0}))
    assert (new.seed, new.priority, new.cache_salt, new.resumed, new.arrival_time) == (99, 0, "", b"", 1.5)


def test_convert_all_set_arrives() -> None:
    request = generate_request(
        5,
        sampling=pb.SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2,
            logit_bias={9: 1.5, 4: -100},
            seed=2**64 - 1,
            logprobs=0,
        ),
        stopping=pb.StoppingParams(max_tokens=8, min_tokens=2, stop_token_ids=[4], ignore_eos=True),
        priority=-3,
        retention_priority=100,
        retention=pb.Retention(
            ranges=[
                pb.RetentionRange(stop=1, level=pb.RetentionLevel(priority=90, duration_ms=1_500)),
                pb.RetentionRange(level=pb.RetentionLevel(priority=-4)),
            ],
            decode=pb.RetentionLevel(duration_ms=1),
        ),
        cache_salt="s",
        tenant="t",
        resume_token_ids=pb.TokenIds(ids=[7, 8]),
        fork_of="parent",
    )
    new = convert(request)
    assert new.sampling == SamplingParams(0.5, 3, 0.5, 0.25, 1.5, -2.0, 2.0, ((4, -100.0), (9, 1.5)), 0)
    assert (new.stop.max_tokens, new.stop.min_tokens, new.stop.stop_token_ids) == (8, 2, frozenset({4}))
    assert new.retention_priority == 100
    assert new.retention == (
        RetentionRange(0, 1, 90, 1.5), RetentionRange(0, 1, -4), RetentionRange(1, END_OF_SEQUENCE, 0, 0.001),
    )  # fmt: skip
    assert (new.seed, new.priority, new.cache_salt, int32s(new.resumed)) == (2**64 - 1, -3, "s", [7, 8])
    assert new.fork_of == "parent"
    assert new.tenant == "t"
    assert new.sampling is convert(request).sampling  # equal parameters are one object, found by identity


def test_convert_max_tokens_beyond_model_is_cut_to_its_length() -> None:
    assert convert(with_stopping(max_tokens=1_000)).stop.max_tokens == 125


BAD = [
    (with_sampling(temperature=-0.1), "sampling.temperature"),
    (with_sampling(temperature=math.nan), "sampling.temperature"),
    (with_sampling(temperature=math.inf), "sampling.temperature"),
    (with_sampling(top_k=-1), "sampling.top_k"),
    (with_sampling(top_p=0), "sampling.top_p"),
    (with_sampling(top_p=1.5), "sampling.top_p"),
    (with_sampling(top_p=math.nan), "sampling.top_p"),
    (with_sampling(min_p=-0.5), "sampling.min_p"),
    (with_sampling(min_p=1.5), "sampling.min_p"),
    (with_sampling(min_p=math.nan), "sampling.min_p"),
    (with_sampling(repetition_penalty=0.06), "sampling.repetition_penalty"),
    (with_sampling(repetition_penalty=1e-40), "sampling.repetition_penalty"),
    (with_sampling(repetition_penalty=16.5), "sampling.repetition_penalty"),
    (with_sampling(repetition_penalty=math.inf), "sampling.repetition_penalty"),
    (with_sampling(repetition_penalty=math.nan), "sampling.repetition_penalty"),
    (with_sampling(presence_penalty=2.5), "sampling.presence_penalty"),
    (with_sampling(frequency_penalty=-2.5), "sampling.frequency_penalty"),
    (with_sampling(frequency_penalty=math.nan), "sampling.frequency_penalty"),
    (with_sampling(logit_bias={610: 1}), "sampling.logit_bias"),
    (with_sampling(logit_bias={-1: 1}), "sampling.logit_bias"),
    (with_sampling(logit_bias={1: 101}), "sampling.logit_bias"),
    (with_sampling(logit_bias={1: math.nan}), "sampling.logit_bias"),
    (with_sampling(logit_bias=dict.fromkeys(range(1_025), 1.0)), "sampling.logit_bias"),
    (with_sampling(logprobs=6), "sampling.logprobs"),
    (with_sampling(logprobs=-1), "sampling.logprobs"),
    (with_stopping(max_tokens=0), "stopping.max_tokens"),
    (with_stopping(min_tokens=-1), "stopping.min_tokens"),
    (with_stopping(min_tokens=5, max_tokens=4), "stopping.min_tokens"),
    (with_stopping(min_tokens=126), "stopping.min_tokens"),
    (with_stopping(stop=[""]), "stopping.stop"),
    (with_stopping(stop=["x" * 257]), "stopping.stop"),
    (with_stopping(stop=["x"] * 17), "stopping.stop"),
    (with_stopping(stop_token_ids=[610]), "stopping.stop_token_ids"),
    (with_stopping(stop_token_ids=[-1]), "stopping.stop_token_ids"),
    (with_stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids"),
    (generate_request(610), "prompt"),
    (generate_request(1, -1), "prompt"),
    (generate_request(*[1] * 128), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(chat=pb.ChatPrompt()), "chat.messages"),
    (pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user")] * 129)), "chat.messages"),
    (generate_request(request_id="x" * 257), "request_id"),
    (generate_request(request_id="x" * 253, n=2), "request_id"),
    (generate_request(cache_salt="x" * 257), "cache_salt"),
    (generate_request(tenant="x" * 257), "tenant"),
    (generate_request(fork_of="x" * 257), "fork_of"),
    (generate_request(fork_of="x", n=2), "fork_of"),
    (generate_request(1, retention=pb.Retention(ranges=[pb.RetentionRange()] * 65)), "retention.ranges"),
    (generate_request(retention_priority=101), "retention_priority"),
    (generate_request(retention_priority=-101), "retention_priority"),
    (generate_request(resume_token_ids=pb.TokenIds(ids=[610])), "resume_token_ids"),
    (generate_request(resume_token_ids=pb.TokenIds(ids=[1] * 125)), "resume_token_ids"),
    (generate_request(resume_token_ids=pb.TokenIds(ids=[1, 0])), "resume_token_ids"),
    (
        generate_request(resume_token_ids=pb.TokenIds(ids=[1] * 4), stopping=pb.StoppingParams(max_tokens=4)),
        "resume_token_ids",
    ),
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[f"{field}-{index}" for index, (_, field) in enumerate(BAD)])
def test_convert_out_of_range_is_refused_with_field_expected_and_got(request_: pb.GenerateRequest, field: str) -> None:
    # 1,025 biases need a vocabulary that has them.
    changes = {"vocab_size": 2_000} if len(request_.sampling.logit_bias) > 1_000 else {}
    with pytest.raises(InvalidRequestError, match=r"expected .*, got ") as caught:
        convert(request_, **changes)
    assert caught.value.metadata["field"] == field
    assert str(caught.value).startswith(f"{field}: ")


BAD_RETENTION = [
    (with_range(start=-1), "retention.ranges[0].start"),
    (with_range(start=2), "retention.ranges[0].start"),
    (with_range(start=1), "retention.ranges[0].stop"),
    (with_range(start=1, stop=END_OF_SEQUENCE), "retention.ranges[0].stop"),
    (with_range(stop=0), "retention.ranges[0].stop"),
    (with_range(stop=2), "retention.ranges[0].stop"),
    (with_range(stop=END_OF_SEQUENCE), "retention.ranges[0].stop"),
    (with_range(level=pb.RetentionLevel(priority=101)), "retention.ranges[0].priority"),
    (with_range(level=pb.RetentionLevel(duration_ms=-1)), "retention.ranges[0].duration"),
    (generate_request(1, retention=pb.Retention(decode=pb.RetentionLevel(priority=-101))), "retention.decode.priority"),
]


@pytest.mark.parametrize(("request_", "field"), BAD_RETENTION, ids=range(len(BAD_RETENTION)))
def test_convert_retention_out_of_range_is_what_the_core_refuses(request_: pb.GenerateRequest, field: str) -> None:
    new = convert(request_)
    with pytest.raises(InvalidRequestError, match=r"expected .*, got ") as caught:
        check_ranges(new.retention, 1)
    assert caught.value.metadata["field"] == field


EDGES = [
    with_sampling(temperature=0),
    with_sampling(top_p=1),
    with_sampling(min_p=1),
    with_sampling(presence_penalty=-2, frequency_penalty=2),
    with_sampling(logprobs=5),
    with_sampling(logit_bias={0: -100, 609: 100}),
    with_stopping(max_tokens=1, min_tokens=1),
    with_stopping(min_tokens=125),
    with_stopping(min_tokens=500, max_tokens=500),
    with_stopping(stop=["x" * 256] * 16, stop_token_ids=[609] * 64),
    generate_request(*[1] * 127),
    generate_request(request_id="ä" * 256, cache_salt="ä" * 256, tenant="ä" * 256),
    generate_request(resume_token_ids=pb.TokenIds(ids=[1] * 124)),
    generate_request(
        resume_token_ids=pb.TokenIds(ids=[0, 0, 1]), stopping=pb.StoppingParams(ignore_eos=True, max_tokens=4)
    ),
]


@pytest.mark.parametrize("request_", EDGES, ids=range(len(EDGES)))
def test_convert_edge_of_range_passes(request_: pb.GenerateRequest) -> None:
    assert convert(request_).stop.max_tokens >= 1


def test_convert_too_many_resumed_tokens_are_refused_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmanager_service.convert.token_array", lambda _: pytest.fail("copied"))
    request_ = generate_request(resume_token_ids=pb.TokenIds(ids=[1] * 125))
    with pytest.raises(InvalidRequestError, match="fewer than the 125 tokens"):
        to_new_request(request_, array("i", [1, 2, 3]), SamplingParams(), MODEL, request_id="r", seed=0, arrival_time=0)


def test_convert_too_many_biases_are_refused_before_they_are_looked_at() -> None:
    params = pb.SamplingParams(temperature=-1, logit_bias=dict.fromkeys(range(1_025), 0.0))
    with pytest.raises(InvalidRequestError, match="at most 1024 entries"):
        to_sampling(params, MODEL)


def test_convert_stop_strings_without_tokenizer_are_refused() -> None:
    with pytest.raises(PreconditionError, match="stop_token_ids"):
        check_request(with_stopping(stop=["x"]), model_view(None))


@given(ids=st.lists(st.integers(0, 609), min_size=1, max_size=127))
def test_convert_prompt_bytes_are_little_endian_int32(ids: list[int]) -> None:
    new = to_new_request(
        generate_request(), token_array(ids), SamplingParams(), MODEL, request_id="r", seed=0, arrival_time=0
    )
    assert new.prompt == b"".join(token_id.to_bytes(4, "little") for token_id in ids)


def test_convert_outputs_become_branches_with_seeds_of_their_own() -> None:
    new = convert(generate_request(5, n=3, sampling=pb.SamplingParams(seed=2**64 - 1)))
    stride = 0x9E3779B97F4A7C15
    assert (new.request_id, new.seed) == ("r", 2**64 - 1)
    assert new.branches == (NewBranch("r#1", stride - 1), NewBranch("r#2", (2 * stride - 1) % 2**64))
    assert new.family_id == "r"
    assert convert(generate_request(5, n=2)).branches == (NewBranch("r#1", 99 + stride),)


@pytest.mark.parametrize("n", [0, 1])
def test_convert_one_output_has_no_branches(n: int) -> None:
    assert convert(generate_request(5, n=n, resume_token_ids=pb.TokenIds(ids=[4]))).branches == ()


@pytest.mark.parametrize("n", [-1, 129])
def test_convert_outputs_out_of_range_are_refused(n: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"n: expected 1 to 128, or 0 for 1, got {n}"):
        convert(generate_request(5, n=n))


def output(*ids: int, is_finished: bool = False) -> pb.ResumedOutput:
    return pb.ResumedOutput(token_ids=ids, is_finished=is_finished)


def test_convert_resumed_outputs_keep_their_ids_seeds_and_tokens() -> None:
    new = convert(
        generate_request(5, n=4, resume_outputs=[output(1, 2), output(), output(is_finished=True), output(3)])
    )
    assert (new.request_id, new.seed, int32s(new.resumed), new.family_id) == ("r", 99, [1, 2], "r")
    assert new.branches == (
        NewBranch("r#1", branch_seed(99, 1)),
        NewBranch("r#3", branch_seed(99, 3), b"\x03\0\0\0"),
    )


def test_convert_resumed_outputs_whose_first_had_finished_begin_with_the_next() -> None:
    entries = [output(1, 0, is_finished=True), output(4), output(2, is_finished=True)]
    new = convert(generate_request(5, n=3, resume_outputs=entries))
    assert (new.request_id, new.seed, int32s(new.resumed)) == ("r#1", branch_seed(99, 1), [4])
    assert (new.branches, new.family_id) == ((), "r")


BAD_OUTPUTS = [
    ({"resume_token_ids": pb.TokenIds(ids=[4])}, "resume_token_ids", "none with n above 1, got 1 tokens"),
    ({"resume_outputs": [output(4)]}, "resume_outputs", r"n \(2\) entries, got 1"),
    ({"resume_outputs": [output()] * 3}, "resume_outputs", r"n \(2\) entries, got 3"),
    ({"n": 1, "resume_outputs": [output(4)]}, "resume_outputs", "none without n above 1, got 1 entries"),
    ({"n": 0, "resume_outputs": [output(4)]}, "resume_outputs", "none without n above 1"),
    ({"resume_outputs": [output(4, is_finished=True)] * 2}, "resume_outputs", "unfinished output, got finished ones"),
    ({"resume_outputs": [output(), output(610)]}, "resume_outputs[1].token_ids", "0 to 609, got 610"),
    ({"resume_outputs": [output(-1), output()]}, "resume_outputs[0].token_ids", "0 to 609, got -1"),
    (
        {"resume_outputs": [output(5), output(1, 0)]},
        "resume_outputs[1].token_ids",
        "a stop token; .* its is_finished",
    ),
    ({"resume_outputs": [output(5), output(*[1] * 125)]}, "resume_outputs[1].token_ids", "125 tokens .*, got 125"),
    (
        {"resume_outputs": [output(1, 2), output()], "stopping": pb.StoppingParams(max_tokens=2)},
        "resume_outputs[0].token_ids",
        "fewer than the 2 tokens .*, got 2; .* set its is_finished",
    ),
]


@pytest.mark.parametrize(("fields", "field", "message"), BAD_OUTPUTS, ids=range(len(BAD_OUTPUTS)))
def test_convert_malformed_resumed_outputs_are_refused(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        convert(generate_request(5, 6, 7, **({"n": 2} | fields)))
    assert (caught.value.reason, caught.value.metadata["field"]) == ("INVALID_PARAMETER", field)


def test_convert_longest_id_of_several_outputs_lets_abort_name_each() -> None:
    request_ = generate_request(request_id="ä" * 252, n=128)
    check_request(request_, MODEL)
    new = to_new_request(
        request_,
        array("i", [1, 2, 3]),
        SamplingParams(),
        MODEL,
        request_id=request_.request_id,
        seed=0,
        arrival_time=0,
    )
    assert len(new.branches) == 127
    for branch in new.branches:
        check_request_id(branch.request_id)
