"""One request on its own stream: output, resumption, errors, cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane_client import (
    AbortedError,
    AlreadyExistsError,
    AsyncClient,
    ChatMessage,
    DeadlineExceededError,
    FailedPreconditionError,
    FinishReason,
    InternalError,
    InvalidArgumentError,
    KvPlaneError,
    NotFoundError,
    RequestCancelledError,
    ResourceExhaustedError,
    Retention,
    RetentionLevel,
    RetentionRange,
    RetryPolicy,
    UnavailableError,
    Usage,
)

from tests.integration.client.scripted_manager import (
    TEXT,
    ScriptedManager,
    answer,
    break_after,
    fail,
    failing_stream,
    hang_after,
    text_of_output,
    usage,
)

DATA = TEXT.encode()


async def test_stream_yields_pieces_whose_parts_make_up_the_output(client: AsyncClient) -> None:
    chunks = [chunk async for chunk in client.stream("hello", request_id="mine", logprobs=1)]

    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert bytes(token for chunk in chunks for token in chunk.token_ids) == DATA
    assert {chunk.request_id for chunk in chunks} == {"mine"}
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(DATA) - 1)
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert [index for index, chunk in enumerate(chunks) if chunk.usage] == [0, len(DATA) - 1]
    assert chunks[0].logprobs[0].top[0].token_id == DATA[0]


async def test_generate_sends_every_parameter(client: AsyncClient, manager: ScriptedManager) -> None:
    completion = await client.generate(
        [ChatMessage("user", "hi")],
        temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={3: -1.5}, seed=2**63, logprobs=2, max_tokens=5, min_tokens=1,
        stop=["x", "y"], stop_token_ids=[9], ignore_eos=True, include_stop=True,
        priority=-2, retention_priority=9, cache_salt="salt", tenant="t", request_id="r",
        retention=Retention((RetentionRange(RetentionLevel(7, 0.0001), 3),), RetentionLevel(-7)),
    )  # fmt: skip

    expected = pb.GenerateRequest(
        request_id="r", chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")]),
        sampling=pb.SamplingParams(
            temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias={3: -1.5}, seed=2**63, logprobs=2,
        ),
        stopping=pb.StoppingParams(
            max_tokens=5, min_tokens=1, stop=["x", "y"], stop_token_ids=[9], ignore_eos=True, include_stop=True
        ),
        priority=-2, retention_priority=9, cache_salt="salt", tenant="t",
        retention=pb.Retention(
            ranges=[pb.RetentionRange(start=3, level=pb.RetentionLevel(priority=7, duration_ms=1))],
            decode=pb.RetentionLevel(priority=-7),
        ),
    )  # fmt: skip
    assert manager.scripts.of("Generate") == [expected]
    assert completion.token_ids == tuple(DATA[:5])
    assert completion.usage == Usage(7, 5, 3)
    assert len(completion.logprobs) == 5


async def test_generate_reports_what_stopped_it(client: AsyncClient, manager: ScriptedManager) -> None:
    def stopped_by(**match: Any) -> Any:
        async def script(request: pb.GenerateRequest, _context: Any) -> Any:
            yield pb.GenerateResponse(
                request_id=request.request_id, finish_reason=common_pb2.FINISH_REASON_STOP, usage=usage(0), **match
            )

        return script

    manager.scripts.generate = [stopped_by(stop_token_id=0), stopped_by(stop_string="###")]

    assert (await client.generate("a")).stop_match == 0
    assert (await client.generate("a")).stop_match == "###"


@pytest.mark.parametrize("count", range(len(DATA)))
async def test_broken_stream_is_resumed_without_gap_or_repeat(
    client: AsyncClient, manager: ScriptedManager, count: int
) -> None:
    manager.scripts.generate = [break_after(count), answer]

    chunks = [chunk async for chunk in client.stream("hello", request_id="mine")]

    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert bytes(token for chunk in chunks for token in chunk.token_ids) == DATA
    assert {chunk.request_id for chunk in chunks} == {"mine"}
    # The first admission's hits, or those of the resumed one when the first never told.
    assert chunks[-1].usage == Usage(7, len(DATA), 3)
    first, second = manager.scripts.of("Generate")
    assert list(second.resume_token_ids.ids) == list(DATA[:count])
    assert (first.request_id, second.request_id) == ("mine", "mine~1")
    assert first.sampling.seed == second.sampling.seed
    assert first.sampling.HasField("seed")


async def test_stream_survives_more_breaks_than_attempts_when_each_made_progress(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.generate = [*[break_after(2)] * 10, answer]

    completion = await client.generate("hello")

    assert completion.text == TEXT
    assert len(manager.scripts.of("Generate")) == 11


async def test_stream_survives_a_restarted_manager(manager: ScriptedManager) -> None:
    reached = asyncio.Event()
    manager.scripts.generate = [hang_after(5, lambda: None), answer]
    policy = RetryPolicy(max_attempts=100, initial_backoff=0.02, max_backoff=0.1)
    async with AsyncClient(manager.address, retry=policy, on_retry=lambda *_: reached.set()) as client:
        stream = client.stream("hello")
        text = "".join([(await anext(stream)).text for _ in range(5)])
        await manager.stop()
        rest = asyncio.create_task(stream.completion())
        await reached.wait()
        await manager.start()

        assert text + (await rest).text == TEXT


async def test_break_after_the_last_piece_is_no_error(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.generate = [break_after(len(DATA))]

    assert (await client.generate("hello")).text == TEXT
    assert len(manager.scripts.of("Generate")) == 1


async def test_greedy_request_gets_no_seed_and_a_given_seed_is_kept(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    await client.generate("a", temperature=0)
    await client.generate("a", seed=5)

    greedy, seeded = manager.scripts.of("Generate")
    assert not greedy.sampling.HasField("seed")
    assert seeded.sampling.seed == 5


async def test_unavailable_refusal_is_retried_under_the_same_id_and_bounded(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.generate = [failing_stream(grpc.StatusCode.UNAVAILABLE, "no executor", "NO_EXECUTOR")]

    with pytest.raises(UnavailableError, match="no executor") as caught:
        await client.generate("a", request_id="mine")

    assert caught.value.reason == "NO_EXECUTOR"
    assert [request.request_id for request in manager.scripts.of("Generate")] == ["mine"] * 4


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
        (grpc.StatusCode.NOT_FOUND, NotFoundError),
        (grpc.StatusCode.ALREADY_EXISTS, AlreadyExistsError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
        (grpc.StatusCode.FAILED_PRECONDITION, FailedPreconditionError),
        (grpc.StatusCode.ABORTED, AbortedError),
        (grpc.StatusCode.CANCELLED, RequestCancelledError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
        (grpc.StatusCode.INTERNAL, InternalError),
        (grpc.StatusCode.DATA_LOSS, KvPlaneError),
    ],
)
async def test_failure_raises_the_class_of_its_code_with_details_and_is_not_retried(
    client: AsyncClient, manager: ScriptedManager, code: grpc.StatusCode, expected: type[KvPlaneError]
) -> None:
    manager.scripts.generate = [failing_stream(code, "what to do", "WHY", retry_ms=1500, limit="8")]

    with pytest.raises(expected, match="what to do") as caught:
        await client.generate("a")

    assert type(caught.value) is expected
    assert (caught.value.code, caught.value.reason) == (code, "WHY")
    assert (caught.value.metadata, caught.value.retry_delay) == ({"limit": "8"}, 1.5)
    assert len(manager.scripts.of("Generate")) == 1


async def test_deadline_ends_the_request_and_cancels_it_on_the_server(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    cancelled = asyncio.Event()
    manager.scripts.generate = [hang_after(2, cancelled.set)]

    with pytest.raises(DeadlineExceededError):
        await client.generate("a", deadline=0.2)

    await cancelled.wait()


async def test_no_retry_begins_that_the_deadline_would_cut_off(manager: ScriptedManager) -> None:
    manager.scripts.generate = [failing_stream(grpc.StatusCode.UNAVAILABLE, "starting", "STARTING", retry_ms=60_000)]
    async with AsyncClient(manager.address) as client:
        with pytest.raises(UnavailableError, match="starting"):
            await client.generate("a", deadline=30)
    assert len(manager.scripts.of("Generate")) == 1


async def test_cancelling_the_task_cancels_the_request_on_the_server(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    cancelled, started = asyncio.Event(), asyncio.Event()
    manager.scripts.generate = [hang_after(1, cancelled.set)]
    stream = client.stream("a")

    async def consume() -> None:
        async for _ in stream:
            started.set()

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    await cancelled.wait()
    with pytest.raises(RequestCancelledError):
        await anext(stream)


async def test_leaving_the_context_cancels_the_request_on_the_server(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    cancelled = asyncio.Event()
    manager.scripts.generate = [hang_after(3, cancelled.set)]

    async with client.stream("a") as stream:
        await anext(stream)

    await cancelled.wait()
    assert [chunk async for chunk in stream] == []


async def test_closing_the_client_fails_its_streams_with_a_typed_error(manager: ScriptedManager) -> None:
    manager.scripts.generate = [hang_after(1, lambda: None)]
    client = AsyncClient(manager.address)
    stream = client.stream("a")
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)

    await client.close()

    with pytest.raises(RequestCancelledError, match="closed"):
        await waiting


async def test_stream_without_finish_reason_is_an_internal_error(client: AsyncClient, manager: ScriptedManager) -> None:
    async def script(request: pb.GenerateRequest, _context: Any) -> Any:
        yield pb.GenerateResponse(request_id=request.request_id, token_ids=[1])

    manager.scripts.generate = [script]

    with pytest.raises(InternalError, match="finish reason"):
        await client.generate("a")


async def test_abort_reaches_the_current_attempt_of_a_resumed_stream(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.generate = [break_after(1), hang_after(1, lambda: None)]
    stream = client.stream("a", request_id="mine")
    await anext(stream)
    await anext(stream)

    await client.abort("mine")
    await stream.abort()

    assert [request.request_id for request in manager.scripts.of("Abort")] == ["mine~1", "mine~1"]
    await stream.aclose()


async def test_abort_of_an_unknown_request_is_not_found(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.unary["Abort"] = [fail(grpc.StatusCode.NOT_FOUND, "no request 'x'", "REQUEST_NOT_FOUND")]

    with pytest.raises(NotFoundError, match="no request 'x'"):
        await client.abort("x")
    # A stream that is over has nothing to abort, which is not an error.
    await client.stream("a", request_id="x").abort()


async def test_resumed_id_stays_within_the_limit(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.generate = [break_after(1), answer]

    await client.generate("a", request_id="i" * 256)

    assert manager.scripts.of("Generate")[1].request_id == "i" * 254 + "~1"


async def _two_outputs(request: pb.GenerateRequest, _context: Any) -> Any:
    """Output 1 is shorter than output 0 and ends first."""
    assert request.n == 2
    for index, token in ((0, 65), (1, 66), (0, 67)):
        yield pb.GenerateResponse(
            request_id=request.request_id,
            token_ids=[token],
            text=chr(token),
            index=index,
            usage=usage(2 - index),
            finish_reason=common_pb2.FINISH_REASON_UNSPECIFIED if token == 65 else common_pb2.FINISH_REASON_LENGTH,
        )


async def test_stream_of_several_outputs_gives_each_its_completion(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.generate = [_two_outputs, _two_outputs]
    first, second = await client.stream("hello", n=2).completions()
    assert (first.text, first.index, first.usage.completion_tokens) == ("AC", 0, 2)
    assert (second.text, second.index, second.usage.completion_tokens) == ("B", 1, 1)
    indices = [chunk.index async for chunk in client.stream("hello", n=2)]
    assert indices == [0, 1, 0]


OUTPUTS = [text_of_output(index).encode() for index in range(3)]
NUM_PIECES = sum(map(len, OUTPUTS))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20, *range(NUM_PIECES - 9, NUM_PIECES)])
async def test_stream_of_several_outputs_that_breaks_goes_on_in_each_without_gap_or_repeat(
    client: AsyncClient, manager: ScriptedManager, count: int
) -> None:
    manager.scripts.generate = [break_after(count), answer]

    chunks = [chunk async for chunk in client.stream("hello", n=3, request_id="mine", logprobs=1)]

    for index, data in enumerate(OUTPUTS):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert bytes(token for chunk in mine for token in chunk.token_ids) == data
        assert "".join(chunk.text for chunk in mine) == data.decode()
        assert [chunk.logprobs[0].top[0].token_id for chunk in mine] == list(data)
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(data) - 1) + [FinishReason.LENGTH]
        assert [place for place, chunk in enumerate(mine) if chunk.usage] == [0, len(data) - 1]
        assert mine[-1].usage == Usage(7, len(data), 3)
    first, second = manager.scripts.of("Generate")
    assert list(first.resume_outputs) == []
    got = [[chunk for chunk in chunks[:count] if chunk.index == index] for index in range(3)]
    assert [output.is_finished for output in second.resume_outputs] == [
        len(mine) == len(data) for mine, data in zip(got, OUTPUTS, strict=True)
    ]
    assert [len(output.token_ids) for output in second.resume_outputs] == [
        len(mine) % len(data) for mine, data in zip(got, OUTPUTS, strict=True)
    ]
    assert (first.request_id, second.request_id) == ("mine", "mine~1")
    assert first.sampling.seed == second.sampling.seed


async def test_stream_of_several_outputs_survives_breaks_at_every_piece(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.generate = [*(break_after(1) for _ in range(NUM_PIECES - 1)), answer]
    outputs = await client.stream("hello", n=3).completions()
    assert [bytes(output.token_ids) for output in outputs] == OUTPUTS
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH] * 3
    assert len(manager.scripts.of("Generate")) == NUM_PIECES


async def test_stream_of_several_outputs_that_breaks_after_the_last_of_them_is_over(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.generate = [break_after(NUM_PIECES), answer]
    outputs = await client.stream("hello", n=3).completions()
    assert [bytes(output.token_ids) for output in outputs] == OUTPUTS
    assert len(manager.scripts.of("Generate")) == 1


async def test_resumed_id_of_several_outputs_leaves_room_for_their_own(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.generate = [break_after(2), answer]
    await client.stream("hello", n=3, request_id="i" * 252).completions()
    assert manager.scripts.of("Generate")[1].request_id == "i" * 250 + "~1"


async def test_stream_of_several_outputs_that_has_not_begun_is_tried_again(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.generate = [break_after(0), _two_outputs]
    assert [output.text for output in await client.stream("hello", n=2).completions()] == ["AC", "B"]
    seeds = {request.sampling.seed for request in manager.scripts.of("Generate")}
    assert len(seeds) == 1


async def test_generate_refuses_several_outputs(client: AsyncClient, manager: ScriptedManager) -> None:
    with pytest.raises(InvalidArgumentError, match=r"n: expected 1 .* got 2; use stream"):
        await client.generate("hello", n=2)
    with pytest.raises(InvalidArgumentError, match="n: expected 1"):
        await client.generate_batch(["hello"], n=2)
    assert manager.scripts.of("Generate") == []
