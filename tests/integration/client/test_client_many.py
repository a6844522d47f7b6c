"""Many requests on one stream: order, isolation, resumption, aborts, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane_client import (
    AlreadyExistsError,
    AsyncClient,
    Completion,
    DeadlineExceededError,
    FailedPreconditionError,
    FinishReason,
    InternalError,
    InvalidArgumentError,
    RequestCancelledError,
    RetryPolicy,
    UnavailableError,
)

from tests.integration.client.scripted_manager import TEXT, ScriptedManager, pieces, text_of_output

Orders = AsyncIterator[pb.GenerateManyRequest]


def refusal(request_id: str, code: int, message: str, reason: str, retry_ms: int = 0) -> pb.GenerateManyResponse:
    error = common_pb2.Error(code=code, message=message, reason=reason, metadata={"k": "v"}, retry_delay_ms=retry_ms)
    return pb.GenerateManyResponse(errors=[pb.RequestError(request_id=request_id, error=error)])


def one_by_one(*, break_after: int | None = None, until: asyncio.Event | None = None, at_least: int = 1) -> Any:
    """Answers in steps that hold one piece of each running request; prompts "bad" and "busy" are refused.

    The stream breaks after a number of steps, and then only when every awaited request is in. The first step waits for
    so many requests.
    """

    async def script(orders: Orders, context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        running: dict[str, list[pb.GenerateResponse]] = {}
        missing = at_least
        failures: asyncio.Queue[pb.GenerateManyResponse] = asyncio.Queue()

        async def read() -> None:
            nonlocal missing
            async for order in orders:
                if order.WhichOneof("order") == "abort_request_id":
                    if (left := running.get(order.abort_request_id)) is not None:
                        left[:] = [left[-1]]
                        left[0].finish_reason = common_pb2.FINISH_REASON_ABORT
                elif order.generate.text == "bad":
                    failures.put_nowait(refusal(order.generate.request_id, 3, "bad prompt", "BAD", 250))
                else:
                    running[order.generate.request_id] = pieces(order.generate)
                    missing -= 1

        reader = asyncio.create_task(read())
        steps = 0
        try:
            while not (reader.done() and not running):
                while not failures.empty():
                    yield failures.get_nowait()
                if running and missing <= 0:
                    yield pb.GenerateManyResponse(outputs=[left.pop(0) for left in running.values()])
                    running = {key: left for key, left in running.items() if left}
                    steps += 1
                if break_after is not None and steps >= break_after and (until is None or until.is_set()):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")
                await asyncio.sleep(0.001)
        finally:
            reader.cancel()

    return script


async def test_batch_keeps_order_and_isolates_errors(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.many = [one_by_one()]

    results = await client.generate_batch(["a", "bad", [1, 2], ""], request_id="job", max_tokens=4)

    first, second, third, fourth = results
    assert isinstance(first, Completion)
    assert isinstance(third, Completion)
    assert (first.request_id, first.token_ids) == ("job-0", tuple(TEXT.encode()[:4]))
    assert third.request_id == "job-2"
    assert isinstance(second, InvalidArgumentError)
    assert (second.reason, second.metadata, second.retry_delay) == ("BAD", {"k": "v"}, 0.25)
    assert isinstance(fourth, Completion)
    assert manager.scripts.of("Generate") == []


async def test_batch_isolates_a_prompt_that_cannot_be_sent(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.many = [one_by_one()]

    refused, answered = await client.generate_batch([[2**40], "a"])

    assert isinstance(refused, InvalidArgumentError)
    assert isinstance(answered, Completion)


async def test_batch_never_has_more_in_flight_than_it_was_told(client: AsyncClient, manager: ScriptedManager) -> None:
    peak = 0

    async def script(orders: Orders, _context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        nonlocal peak
        open_ids: list[str] = []
        waiting = asyncio.create_task(anext(orders))
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=0.02)
            if done:
                open_ids.append(waiting.result().generate.request_id)
                peak = max(peak, len(open_ids))
                waiting = asyncio.create_task(anext(orders))
            elif open_ids:
                last = pb.GenerateResponse(request_id=open_ids.pop(), finish_reason=common_pb2.FINISH_REASON_STOP)
                last.usage.prompt_tokens = 1
                yield pb.GenerateManyResponse(outputs=[last])

    manager.scripts.many = [script]

    results = await client.generate_batch(["a"] * 7, max_in_flight=3)

    assert [type(result) for result in results] == [Completion] * 7
    assert peak == 3


async def test_broken_stream_is_made_anew_once_and_every_unfinished_request_goes_on(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.many = [one_by_one(break_after=3), one_by_one(break_after=4), one_by_one()]
    async with client.many() as many:
        short = many.submit("a", request_id="short", max_tokens=2)
        requests = [many.submit("a", request_id=f"long-{index}") for index in range(3)]
        short_one = await short.completion()
        completions = [await request.completion() for request in requests]

    assert short_one.token_ids == tuple(TEXT.encode()[:2])
    assert [completion.text for completion in completions] == [TEXT] * 3
    assert [completion.token_ids for completion in completions] == [tuple(TEXT.encode())] * 3
    assert [completion.request_id for completion in completions] == ["long-0", "long-1", "long-2"]
    assert [completion.usage.cached_tokens for completion in completions] == [3] * 3
    orders = [order.generate for order in manager.scripts.of("GenerateMany")]
    assert [order.request_id for order in orders if order.request_id.startswith("short")] == ["short"]
    mine = [order for order in orders if order.request_id.startswith("long-1")]
    assert [order.request_id for order in mine] == ["long-1", "long-1~1", "long-1~2"]
    assert len({order.sampling.seed for order in mine}) == 1
    sizes = [len(order.resume_token_ids.ids) for order in mine]
    assert sizes == sorted(sizes)
    assert sizes[1] > 0


async def test_broken_stream_goes_on_in_each_output_of_its_requests(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    """A step brings one piece of each request: the first break finds some outputs begun, the second some finished."""
    texts = [text_of_output(index) for index in range(3)]
    num_pieces = sum(len(text.encode()) for text in texts)
    manager.scripts.many = [
        one_by_one(break_after=2, at_least=2),
        one_by_one(break_after=num_pieces - 4, at_least=2),
        one_by_one(),
    ]
    async with client.many() as many:
        requests = [many.submit("a", n=3, request_id=f"r{index}") for index in range(2)]
        outputs = [await request.completions() for request in requests]

    assert [[output.text for output in several] for several in outputs] == [texts] * 2
    assert [[output.token_ids for output in several] for several in outputs] == [
        [tuple(text.encode()) for text in texts]
    ] * 2
    resumed = [order.generate.resume_outputs for order in manager.scripts.of("GenerateMany")]
    assert [[len(output.token_ids) for output in several] for several in resumed[2:4]] == [[1, 1, 0]] * 2
    assert [[output.is_finished for output in several] for several in resumed[4:]] == [[False, True, True]] * 2


async def test_stream_survives_a_restarted_manager(manager: ScriptedManager) -> None:
    broken = asyncio.Event()
    manager.scripts.many = [one_by_one()]
    policy = RetryPolicy(max_attempts=100, initial_backoff=0.02, max_backoff=0.1)
    async with (
        AsyncClient(manager.address, retry=policy, on_retry=lambda *_: broken.set()) as client,
        client.many() as many,
    ):
        requests = [many.submit("a") for _ in range(2)]
        firsts = [await anext(request) for request in requests]
        await manager.stop()
        rest = asyncio.gather(*(request.completion() for request in requests))
        await broken.wait()
        await manager.start()
        for first, completion in zip(firsts, await rest, strict=True):
            assert first.text + completion.text == TEXT


async def test_unavailable_request_is_retried_and_disturbs_no_other(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    refused: list[str] = []

    async def script(orders: Orders, _context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        async for order in orders:
            if order.generate.text == "busy" and len(refused) < 2:
                refused.append(order.generate.request_id)
                yield refusal(order.generate.request_id, 14, "draining", "DRAINING")
                continue
            for piece in pieces(order.generate):
                yield pb.GenerateManyResponse(outputs=[piece])

    manager.scripts.many = [script]
    async with client.many() as many:
        busy = many.submit("busy", request_id="busy")
        other = many.submit("a")
        assert (await other.completion()).text == TEXT
        assert (await busy.completion()).text == TEXT

    assert refused == ["busy", "busy"]


async def test_retries_of_one_request_are_bounded(client: AsyncClient, manager: ScriptedManager) -> None:
    async def script(orders: Orders, _context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        async for order in orders:
            yield refusal(order.generate.request_id, 14, "no executor", "NO_EXECUTOR")

    manager.scripts.many = [script]
    async with client.many() as many:
        with pytest.raises(UnavailableError, match="no executor"):
            await many.submit("a").completion()

    assert len(manager.scripts.of("GenerateMany")) == 4


async def test_stream_that_stays_broken_fails_every_request_and_can_be_used_later(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    async def broken(orders: Orders, context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield

    manager.scripts.many = [broken, broken, broken, broken, one_by_one()]
    async with client.many() as many:
        results = await asyncio.gather(*(many.submit("a").completion() for _ in range(2)), return_exceptions=True)
        assert [type(result) for result in results] == [UnavailableError] * 2

        assert (await many.submit("a").completion()).text == TEXT


async def test_other_failure_of_the_stream_is_not_retried(client: AsyncClient, manager: ScriptedManager) -> None:
    async def broken(orders: Orders, context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        await context.abort(grpc.StatusCode.INTERNAL, "invariant")
        yield

    manager.scripts.many = [broken, one_by_one()]
    async with client.many() as many:
        with pytest.raises(InternalError, match="invariant"):
            await many.submit("a").completion()


async def test_abort_ends_one_request_with_a_last_chunk(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.many = [one_by_one()]
    async with client.many() as many:
        aborted, other = many.submit("a", request_id="aborted"), many.submit("a")
        await anext(aborted)
        aborted.abort()
        rest = [chunk async for chunk in aborted]
        assert (await other.completion()).text == TEXT
        # One that is over is left alone.
        aborted.abort()

    assert rest[-1].finish_reason is FinishReason.ABORT
    orders = [order.abort_request_id for order in manager.scripts.of("GenerateMany") if order.abort_request_id]
    assert orders == ["aborted"]


async def test_deadline_of_one_request_aborts_it_alone(client: AsyncClient, manager: ScriptedManager) -> None:
    aborted = asyncio.Event()

    async def script(orders: Orders, _context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        async for order in orders:
            if order.abort_request_id:
                aborted.set()
            elif order.generate.text == "quick":
                yield pb.GenerateManyResponse(outputs=[pieces(order.generate)[-1]])

    manager.scripts.many = [script]
    async with client.many() as many:
        slow = many.submit("slow", deadline=0.05)
        with pytest.raises(DeadlineExceededError):
            await slow.completion()
        await aborted.wait()
        quick = await many.submit("quick").completion()

    assert quick.finish_reason is FinishReason.LENGTH


async def test_leaving_the_context_cancels_the_call_and_fails_what_is_unfinished(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    cancelled, started = asyncio.Event(), asyncio.Event()

    async def script(orders: Orders, context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        context.add_done_callback(lambda _context: cancelled.set())
        await anext(orders)
        started.set()
        await asyncio.Event().wait()
        yield

    manager.scripts.many = [script]
    async with client.many() as many:
        request = many.submit("a")
        await started.wait()

    await cancelled.wait()
    with pytest.raises(RequestCancelledError):
        await request.completion()
    with pytest.raises(FailedPreconditionError):
        many.submit("b")


async def test_id_in_use_on_the_stream_is_refused(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.many = [one_by_one()]
    async with client.many() as many:
        first = many.submit("a", request_id="x")
        with pytest.raises(AlreadyExistsError):
            many.submit("b", request_id="x")
        assert (await first.completion()).text == TEXT
        assert (await many.submit("a", request_id="x").completion()).text == TEXT


async def test_fork_goes_on_from_what_was_taken_with_a_seed_of_its_own(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.many = [one_by_one()]
    async with client.many() as many:
        parent = many.submit("a", request_id="parent", seed=7, top_k=3, max_tokens=20, priority=2)
        taken = [await anext(parent) for _ in range(4)]
        fork = parent.fork(request_id="fork")
        beam = parent.fork(token_ids=list(TEXT.encode()[:2]), seed=9)
        assert (await parent.completion()).token_ids == tuple(TEXT.encode()[4:20])
        for request, start in ((fork, 4), (beam, 2)):
            assert (await request.completion()).token_ids == tuple(TEXT.encode()[start:20])

    assert b"".join(bytes(chunk.token_ids) for chunk in taken) == TEXT.encode()[:4]
    first, *forks = [order.generate for order in manager.scripts.of("GenerateMany")]
    for order, start in zip(forks, (4, 2), strict=True):
        assert order.fork_of == "parent"
        assert bytes(order.resume_token_ids.ids) == TEXT.encode()[:start]
        assert (order.text, order.sampling.top_k, order.stopping.max_tokens, order.priority) == ("a", 3, 20, 2)
    assert forks[0].request_id == "fork"
    assert forks[0].sampling.seed != first.sampling.seed
    assert forks[1].sampling.seed == 9


async def test_fork_of_one_of_several_outputs_names_it_and_is_one_output(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.many = [one_by_one()]
    async with client.many() as many:
        parent = many.submit("a", n=2, request_id="parent")
        with pytest.raises(InvalidArgumentError, match="index: expected 0 to 1, got 2"):
            parent.fork(index=2)
        with pytest.raises(AlreadyExistsError):
            parent.fork(request_id="parent")
        fork = parent.fork(index=1, deadline=60)
        again = fork.fork()
        assert [len(await request.completions()) for request in (parent, fork, again)] == [2, 1, 1]
    with pytest.raises(FailedPreconditionError):
        parent.fork()

    _, *forks = [order.generate for order in manager.scripts.of("GenerateMany")]
    assert [(order.fork_of, order.n, len(order.resume_token_ids.ids)) for order in forks] == [
        ("parent#1", 0, 0),
        (fork.request_id, 0, 0),
    ]


async def test_fork_of_a_fork_has_the_tokens_of_both(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.many = [one_by_one()]
    async with client.many() as many:
        parent = many.submit("a")
        await anext(parent)
        child = parent.fork()
        await anext(child)
        grandchild = child.fork()
        assert (await grandchild.completion()).token_ids == tuple(TEXT.encode()[2:])
    assert bytes(manager.scripts.of("GenerateMany")[-1].generate.resume_token_ids.ids) == TEXT.encode()[:2]


async def test_fork_that_breaks_goes_on_by_itself(client: AsyncClient, manager: ScriptedManager) -> None:
    """Its parent may be gone by then, or have another id: it names none any more."""
    forked = asyncio.Event()
    manager.scripts.many = [one_by_one(break_after=12, until=forked), one_by_one()]
    async with client.many() as many:
        parent = many.submit("a", request_id="parent")
        await anext(parent)
        fork = parent.fork(request_id="fork")
        first = await anext(fork)
        forked.set()
        rest = await fork.completion()
        await parent.completion()

    assert first.token_ids + rest.token_ids == tuple(TEXT.encode()[1:])
    orders = [order.generate for order in manager.scripts.of("GenerateMany")]
    mine = [order for order in orders if order.request_id.startswith("fork")]
    assert [(order.request_id, order.fork_of) for order in mine] == [("fork", "parent"), ("fork~1", "")]
    assert len(mine[1].resume_token_ids.ids) > 1
    assert mine[0].sampling.seed == mine[1].sampling.seed
