"""What is pushed comes out once, in order, merged when the reader is slow."""

from __future__ import annotations

import asyncio

import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.request import FinishReason, TokenLogprobs
from kvmanager_service.engine_api import StopMatch
from kvmanager_service.output_stream import ManyStream, OutputStream
from kvmanager_service.pacer import FREE_STREAMS, Pacer
from kvmanager_service.request_stream import RequestStream
from kvmanager_service.text.output_text import OutputText
from kvmanager_service.text.stop_strings import StopStrings
from tests.unit.manager.manager_builders import byte_level_tokenizer, output, text_model

TOKENIZER = text_model().tokenizer


def ids_of(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text, add_special_tokens=False).ids


def stream(*, text: bool = True, stop: tuple[str, ...] = (), include: bool = False, resumed: int = 0) -> RequestStream:
    stops = StopStrings(stop, include=include) if stop else None
    made = OutputText(TOKENIZER.detokenizer(), stops, 0) if text else None
    return RequestStream("r", 3, made, num_resumed=resumed)


async def read_all(source: OutputStream) -> list[pb.GenerateResponse]:
    return [response async for response in source]


async def test_output_stream_reader_that_keeps_up_gets_one_message_a_push() -> None:
    source = OutputStream(stream(), Pacer())
    reader = asyncio.create_task(read_all(source))
    for token_id in ids_of("the")[:1]:
        await asyncio.sleep(0)
        source.push(output(token_id, num_cached_tokens=2))
    await asyncio.sleep(0)
    source.push(output(*ids_of(" dog"), finish=FinishReason.LENGTH, num_cached_tokens=2))
    first, last = await reader
    assert (first.request_id, first.HasField("usage"), last.HasField("usage")) == ("r", True, True)
    assert first.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (3, 2)
    assert last.usage.completion_tokens == len(first.token_ids) + len(last.token_ids)


async def test_output_stream_slow_reader_gets_everything_merged() -> None:
    source = OutputStream(stream(), Pacer())
    ids = ids_of("the quick brown fox")
    for token_id in ids:
        source.push(output(token_id))
    merged = await anext(source)
    assert (list(merged.token_ids), merged.text) == (ids, "the quick brown fox")
    source.push(output(ids[0], finish=FinishReason.ABORT))
    (last,) = await read_all(source)
    assert (list(last.token_ids), last.finish_reason) == ([ids[0]], common_pb2.FINISH_REASON_ABORT)


async def test_output_stream_usage_is_in_first_and_last_message_only() -> None:
    source = OutputStream(stream(), Pacer())
    responses = []
    for finish in (None, None, FinishReason.LENGTH):
        source.push(output(10, finish=finish))
        responses.append(await anext(source))
    assert [response.HasField("usage") for response in responses] == [True, False, True]
    assert [response.usage.completion_tokens for response in responses] == [1, 0, 3]


async def test_output_stream_resumed_tokens_count_and_are_not_delivered() -> None:
    source = OutputStream(stream(resumed=5), Pacer())
    source.push(output(10, finish=FinishReason.LENGTH))
    (only,) = await read_all(source)
    assert (list(only.token_ids), only.usage.completion_tokens) == ([10], 6)


async def test_output_stream_stop_token_has_no_text_but_is_counted() -> None:
    source = OutputStream(stream(), Pacer())
    ids = ids_of("dog.")
    source.push(output(*ids, finish=FinishReason.STOP, stop_token_id=ids[-1]))
    (only,) = await read_all(source)
    assert (only.text, list(only.token_ids), only.usage.completion_tokens) == ("dog", ids, len(ids))
    assert (only.finish_reason, only.stop_token_id) == (common_pb2.FINISH_REASON_STOP, ids[-1])
    assert only.WhichOneof("stop_match") == "stop_token_id"


@pytest.mark.parametrize(("include", "text"), [(False, "the quick"), (True, "the quick brown")])
async def test_output_stream_stop_string_ends_the_request(include: bool, text: str) -> None:
    source = OutputStream(stream(stop=(" brown",), include=include), Pacer())
    ids = ids_of("the quick brown fox")
    position = next(at for at in range(len(ids)) if "brown" in byte_level_tokenizer().decode(ids[: at + 1]))
    assert source.push(output(*ids)) == StopMatch(" brown", position + 1)
    assert source.stream.finished
    (only,) = await read_all(source)
    assert (only.text, only.stop_string) == (text, " brown")
    assert (list(only.token_ids), only.usage.completion_tokens) == (ids[: position + 1], position + 1)
    assert only.finish_reason == common_pb2.FINISH_REASON_STOP


async def test_output_stream_stop_string_in_the_last_token_wins_over_length() -> None:
    source = OutputStream(stream(stop=("dog",)), Pacer())
    match = source.push(output(*ids_of("the dog"), finish=FinishReason.LENGTH))
    assert match is not None
    (only,) = await read_all(source)
    assert (only.text, only.finish_reason) == ("the ", common_pb2.FINISH_REASON_STOP)


async def test_output_stream_held_text_is_released_at_the_end() -> None:
    source = OutputStream(stream(stop=("dogma",)), Pacer())
    assert source.push(output(*ids_of("the dog"))) is None
    assert (await anext(source)).text == "the "
    assert source.push(output(finish=FinishReason.ABORT)) is None
    (last,) = await read_all(source)
    assert (last.text, list(last.token_ids)) == ("dog", [])


async def test_output_stream_error_comes_after_the_last_piece() -> None:
    source = OutputStream(stream(), Pacer())
    error = RowFailedError("NON_FINITE_LOGITS", "row failed")
    source.push(output(*ids_of("the")))
    source.push(output(finish=FinishReason.ERROR, error=error))
    assert (await anext(source)).text == "the"
    with pytest.raises(RowFailedError) as caught:
        await anext(source)
    assert caught.value is error


async def test_output_stream_logprobs_accompany_their_tokens() -> None:
    source = OutputStream(stream(text=False), Pacer())
    for token_id in (7, 8):
        pushed = output(token_id)
        pushed.logprobs = [TokenLogprobs((token_id, 1, 2), (-0.5, -0.25, -4.0))]
        source.push(pushed)
    merged = await anext(source)
    assert (merged.text, list(merged.token_ids)) == ("", [7, 8])
    assert [entry.logprob for entry in merged.logprobs] == [-0.5, -0.5]
    assert [(top.token_id, top.logprob) for top in merged.logprobs[1].top] == [(1, -0.25), (2, -4.0)]


def busy_pacer() -> Pacer:
    """A pacer with so many streams that a rest outlasts the test."""
    pacer = Pacer()
    pacer.rest_s = 3_600.0
    return pacer


async def test_output_stream_resting_stream_merges_until_rested() -> None:
    source = OutputStream(stream(), busy_pacer())
    source.push(output(10))
    assert list((await anext(source)).token_ids) == [10]
    reader = asyncio.create_task(anext(source))
    for token_id in (11, 12):
        source.push(output(token_id))
        await asyncio.sleep(0)
    assert not reader.done()
    source._rested()
    assert list((await reader).token_ids) == [11, 12]


async def test_output_stream_resting_stream_sends_its_end_at_once() -> None:
    source = OutputStream(stream(), busy_pacer())
    source.push(output(10))
    await anext(source)
    reader = asyncio.create_task(read_all(source))
    source.push(output(11))
    await asyncio.sleep(0)
    assert not reader.done()
    source.push(output(12, finish=FinishReason.LENGTH))
    (last,) = await reader
    assert list(last.token_ids) == [11, 12]


async def test_output_stream_resting_stream_fails_at_once() -> None:
    source = OutputStream(stream(), busy_pacer())
    source.push(output(10))
    await anext(source)
    source.push(output(finish=FinishReason.ERROR, error=RowFailedError("NON_FINITE_LOGITS", "m")))
    with pytest.raises(RowFailedError):
        await anext(source)


def test_pacer_few_streams_never_rest_and_many_rest_longer() -> None:
    pacer = Pacer()
    rests = []
    for _ in range(3 * FREE_STREAMS):
        pacer.enter()
        rests.append(pacer.rest_s)
    assert rests[:FREE_STREAMS] == [0.0] * FREE_STREAMS
    assert rests[FREE_STREAMS:] == sorted(set(rests[FREE_STREAMS:]))
    for _ in range(3 * FREE_STREAMS):
        pacer.leave()
    assert pacer.rest_s == 0.0


async def test_many_stream_pushes_of_one_step_are_one_message() -> None:
    many = ManyStream(lambda request_id: None)
    sinks = [many.sink(RequestStream(f"r{index}", 1, None)) for index in range(5)]
    for sink in sinks:
        many.opened(sink.request)
    reader = asyncio.create_task(anext(many))
    await asyncio.sleep(0)
    for index, sink in enumerate(sinks):
        sink.push(output(index))
    message = await reader
    assert [(out.request_id, list(out.token_ids)) for out in message.outputs] == [(f"r{i}", [i]) for i in range(5)]


async def test_many_stream_several_steps_before_a_read_are_one_entry_a_request() -> None:
    many = ManyStream(lambda request_id: None)
    sink = many.sink(RequestStream("r", 1, None))
    many.opened(sink.request)
    sink.push(output(1))
    sink.push(output(2, finish=FinishReason.LENGTH))
    (entry,) = (await anext(many)).outputs
    assert (list(entry.token_ids), entry.finish_reason) == ([1, 2], common_pb2.FINISH_REASON_LENGTH)
    assert not many.is_open("r")


async def test_many_stream_ends_after_half_close_and_last_request() -> None:
    many = ManyStream(lambda request_id: None)
    sink = many.sink(RequestStream("r", 1, None))
    many.opened(sink.request)
    many.close_input()
    reader = asyncio.create_task(anext(many))
    await asyncio.sleep(0)
    assert not reader.done()
    sink.push(output(1, finish=FinishReason.LENGTH))
    await reader
    with pytest.raises(StopAsyncIteration):
        await anext(many)


async def test_many_stream_error_of_one_request_disturbs_no_other() -> None:
    many = ManyStream(lambda request_id: None)
    bad, good = (many.sink(RequestStream(name, 1, None)) for name in ("bad", "good"))
    many.opened(bad.request)
    many.opened(good.request)
    bad.push(output(1))
    bad.push(output(finish=FinishReason.ERROR, error=RowFailedError("NON_FINITE_LOGITS", "m")))
    good.push(output(2))
    message = await anext(many)
    assert [(out.request_id, list(out.token_ids)) for out in message.outputs] == [("bad", [1]), ("good", [2])]
    assert [(entry.request_id, entry.error.reason) for entry in message.errors] == [("bad", "NON_FINITE_LOGITS")]
    assert many.unfinished() == ("good",)


async def test_many_stream_id_used_again_before_a_read_loses_nothing() -> None:
    many = ManyStream(lambda request_id: None)
    first, second = (many.sink(RequestStream("r", 1, None)) for _ in range(2))
    many.opened(first.request)
    first.push(output(1, finish=FinishReason.LENGTH))
    many.opened(second.request)
    second.push(output(2))
    assert [list(out.token_ids) for out in (await anext(many)).outputs] == [[1], [2]]
    assert many.is_open("r")


class WatchedStream(RequestStream):
    """Counts how often somebody looks whether it has finished or failed."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        WatchedStream.looks += name in ("finished", "error")
        return super().__getattribute__(name)


@pytest.mark.parametrize("num_outputs", [2, 128])
async def test_many_stream_push_looks_at_its_own_output_only(num_outputs: int) -> None:
    many = ManyStream(lambda request_id: None)
    streams = [WatchedStream("r", 1, None, index=index) for index in range(num_outputs)]
    first = many.sink(streams[0])
    sinks = [first, *map(first.branch, streams[1:])]
    many.opened(first.request)
    WatchedStream.looks = 0
    for sink in sinks:
        sink.push(output(1))
    assert WatchedStream.looks <= 2 * num_outputs
    assert len((await anext(many)).outputs) == num_outputs


async def test_many_stream_output_that_fails_ends_the_request_and_the_others_once() -> None:
    abandoned: list[str] = []
    many = ManyStream(abandoned.append)
    first = many.sink(RequestStream("r", 1, None))
    second, third = (first.branch(RequestStream("r", 1, None, index=index)) for index in (1, 2))
    many.opened(first.request)
    first.push(output(1, finish=FinishReason.LENGTH))
    for sink in (second, third):
        sink.push(output(finish=FinishReason.ERROR, error=RowFailedError("ROW_FAILED", "m")))
    message = await anext(many)
    assert abandoned == ["r"]
    assert [(out.index, list(out.token_ids)) for out in message.outputs] == [(0, [1])]
    assert [(entry.request_id, entry.error.reason) for entry in message.errors] == [("r", "ROW_FAILED")]
    assert not many.is_open("r")


async def test_many_stream_failure_of_the_call_is_raised() -> None:
    many = ManyStream(lambda request_id: None)
    many.close_input(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        await anext(many)
