"""A manager from before a field that must not be ignored is not sent it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, cast

import grpc
import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane_client import (
    AsyncClient,
    DeadlineExceededError,
    ExtendSequence,
    FinishReason,
    KvPlaneError,
    ManagerTooOldError,
    OpenSequence,
    PermissionDeniedError,
    RequestCancelledError,
    SequenceTable,
)
from kvplane_client._contract import ManagerContract

from tests.integration.client.scripted_manager import (
    CONTRACT,
    TEXT,
    ScriptedManager,
    fail,
    hang_after,
    pieces,
    succeed_with,
)

OLD = {
    "from before GetContract": fail(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
    "the same, with keys": fail(grpc.StatusCode.PERMISSION_DENIED, "for operators", "METHOD_FORBIDDEN", role="tenant"),
    "of version 0": partial(succeed_with, pb.GetContractResponse()),
}


async def answer_many(orders: AsyncIterator[pb.GenerateManyRequest], _context: Any) -> AsyncIterator[Any]:
    """Answers each order at once."""
    async for order in orders:
        for piece in pieces(order.generate):
            yield pb.GenerateManyResponse(outputs=[piece])


async def hang(_request: Any, _context: Any) -> Any:
    """Answers nothing until the client gives the question up."""
    await asyncio.Event().wait()


async def generate(client: AsyncClient, **options: Any) -> None:
    await client.generate("hi", **options)


async def submit(client: AsyncClient, **options: Any) -> None:
    async with client.many() as many:
        await many.submit("hi", **options).completions()


async def stream(client: AsyncClient, **options: Any) -> None:
    await client.stream("hi", **options).completions()


async def pin(client: AsyncClient, **options: Any) -> None:
    await client.pin_prefix("system", "Be brief.", **options)


async def open_sequence(client: AsyncClient, **options: Any) -> None:
    async with await client.open_pool(num_blocks=8) as pool:
        await pool.update([OpenSequence("a", [1], **options), ExtendSequence("a", [2])])


class Case(NamedTuple):
    """A call with a marked field: the method that it would be sent to, and how the error names the field."""

    call: Callable[..., Awaitable[None]]
    options: dict[str, Any]
    method: str
    fields: str


MARKED = [
    Case(generate, {"tenant": "t"}, "Generate", "tenant"),
    Case(generate, {"adapter": "a"}, "Generate", "adapter"),
    Case(stream, {"n": 2}, "Generate", "n"),
    Case(submit, {"tenant": "t"}, "GenerateMany", "tenant"),
    Case(submit, {"adapter": "a", "tenant": "t"}, "GenerateMany", "tenant, adapter"),
    Case(pin, {"adapter": "a"}, "PinPrefix", "adapter"),
    Case(open_sequence, {"tenant": "t"}, "UpdateSequences", "operations.open.tenant"),
]


@pytest.mark.parametrize("old", OLD.values(), ids=OLD.keys())
@pytest.mark.parametrize("case", MARKED)
async def test_old_manager_is_not_sent_what_it_would_ignore(
    client: AsyncClient, manager: ScriptedManager, case: Case, old: Any
) -> None:
    manager.scripts.unary["GetContract"] = [old]
    manager.scripts.many = [answer_many]
    with pytest.raises(ManagerTooOldError, match="upgrade the manager") as caught:
        await case.call(client, **case.options)
    error = caught.value
    assert (error.reason, error.metadata) == ("MANAGER_TOO_OLD", {"fields": case.fields, "expected": "1", "got": "0"})
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert manager.scripts.of(case.method) == []


@pytest.mark.parametrize("case", MARKED)
async def test_manager_that_knows_the_field_is_asked_once_and_sent_it(
    client: AsyncClient, manager: ScriptedManager, case: Case
) -> None:
    manager.scripts.many = [answer_many, answer_many]
    await case.call(client, **case.options)
    await case.call(client, **case.options)
    assert len(manager.scripts.of("GetContract")) == 1
    assert len(manager.scripts.of(case.method)) == 2


async def test_requests_that_wait_for_the_answer_ask_one_question(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.many = [answer_many]
    calls = [case.call(client, **case.options) for case in MARKED]
    await asyncio.gather(*calls, *(generate(client, tenant="t") for _ in range(20)))
    assert len(manager.scripts.of("GetContract")) == 1


async def test_what_every_manager_knows_is_sent_without_a_question(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.unary["GetContract"] = [OLD["of version 0"]]
    manager.scripts.many = [answer_many]
    await generate(client, cache_salt="s", n=1, retention_priority=3)
    await submit(client, cache_salt="s")
    await pin(client, cache_salt="s", tenant="t")
    await open_sequence(client, cache_salt="s", lora_id="l", is_resumed=True)
    assert manager.scripts.of("GetContract") == []


async def test_one_request_of_many_that_is_refused_disturbs_no_other(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.unary["GetContract"] = [OLD["of version 0"]]
    manager.scripts.many = [answer_many]
    async with client.many() as many:
        refused, served = many.submit("hi", tenant="t"), many.submit("hi")
        assert (await served.completion()).text == TEXT
        with pytest.raises(ManagerTooOldError):
            await refused.completion()
    assert len(manager.scripts.of("GenerateMany")) == 1


async def test_request_of_many_that_waits_for_the_answer_holds_up_no_other(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.unary["GetContract"] = [hang]

    async def answer_aborts(orders: AsyncIterator[pb.GenerateManyRequest], _context: Any) -> AsyncIterator[Any]:
        first = await anext(orders)
        yield pb.GenerateManyResponse(outputs=[pieces(first.generate)[0]])
        async for order in orders:
            assert order.abort_request_id == first.generate.request_id
            last = pieces(first.generate)[-1]
            last.finish_reason = common_pb2.FINISH_REASON_ABORT
            yield pb.GenerateManyResponse(outputs=[last])

    manager.scripts.many = [answer_aborts]
    async with client.many() as many:
        waits, aborted = many.submit("hi", tenant="t", request_id="waits"), many.submit("hi", request_id="aborted")
        await anext(aborted)
        aborted.abort()
        assert (await aborted.completion()).finish_reason is FinishReason.ABORT
        late = many.submit("hi", tenant="t", deadline=0.01)
        with pytest.raises(DeadlineExceededError):
            await late.completion()
    with pytest.raises(RequestCancelledError):
        await waits.completion()
    assert [order.WhichOneof("order") for order in manager.scripts.of("GenerateMany")] == [
        "generate",
        "abort_request_id",
    ]


async def test_forks_of_a_request_that_waits_for_the_answer_are_sent_after_it(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    may_answer = asyncio.Event()

    async def answer_late(_request: Any, _context: Any) -> Any:
        await may_answer.wait()
        return CONTRACT

    manager.scripts.unary["GetContract"] = [answer_late]
    manager.scripts.many = [answer_many]
    async with client.many() as many:
        parent = many.submit("hi", n=2, request_id="parent")
        fork = parent.fork(index=1, request_id="fork")
        fork_of_it = fork.fork(request_id="fork of it")
        await many.submit("hi", request_id="overtakes").completion()
        may_answer.set()
        for request in (parent, fork, fork_of_it):
            await request.completion()
    orders = [(order.generate.request_id, order.generate.fork_of) for order in manager.scripts.of("GenerateMany")]
    assert orders == [("overtakes", ""), ("parent", ""), ("fork", "parent#1"), ("fork of it", "fork")]


async def test_request_of_many_that_ended_while_others_were_written_is_not_sent(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    may_read = asyncio.Event()

    async def answer_later(orders: AsyncIterator[pb.GenerateManyRequest], context: Any) -> AsyncIterator[Any]:
        await may_read.wait()
        async for answer in answer_many(orders, context):
            yield answer

    manager.scripts.many = [answer_later]
    async with client.many() as many:
        # More than any window of HTTP/2 lets through unread: the writer stands still.
        large = [many.submit("x" * 3_000_000) for _ in range(8)]
        late, after = many.submit("late", deadline=0.05), many.submit("after")
        with pytest.raises(DeadlineExceededError):
            await late.completion()
        may_read.set()
        for request in (*large, after):
            await request.completion()
        orders = manager.scripts.of("GenerateMany")
    assert [order.generate.request_id for order in orders] == [request.request_id for request in (*large, after)]


async def test_stream_of_many_that_is_made_anew_asks_the_manager_that_is_there_then(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    manager.scripts.many = [answer_many]
    async with client.many() as many:
        await many.submit("hi", tenant="t").completion()
        await manager.stop()
        manager.scripts.unary["GetContract"] = [OLD["of version 0"]]
        await manager.start()
        await many.submit("hi").completion()  # the stream is back before a request asks for more
        with pytest.raises(ManagerTooOldError):
            await many.submit("hi", tenant="t").completion()
    assert [order.generate.tenant for order in manager.scripts.of("GenerateMany")] == ["t", ""]


@pytest.mark.parametrize("call", [generate, pin])
async def test_question_that_nobody_waits_for_any_more_is_given_up_and_asked_again(
    manager: ScriptedManager, call: Callable[..., Awaitable[None]]
) -> None:
    manager.scripts.unary["GetContract"] = [hang, partial(succeed_with, CONTRACT)]
    async with AsyncClient(manager.address, timeout=0.3) as client:
        with pytest.raises(DeadlineExceededError, match="which contract"):
            await call(client, adapter="a")
        await call(client, adapter="a")
    assert len(manager.scripts.of("GetContract")) == 2


async def test_request_whose_patience_is_longer_gets_the_answer_that_another_did_not_wait_for(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    may_answer = asyncio.Event()

    async def answer_late(_request: Any, _context: Any) -> Any:
        await may_answer.wait()
        return CONTRACT

    manager.scripts.unary["GetContract"] = [answer_late]
    patient = asyncio.create_task(generate(client, tenant="t"))
    with pytest.raises(DeadlineExceededError):
        await generate(client, tenant="t", deadline=0.05)
    may_answer.set()
    await patient
    assert len(manager.scripts.of("GetContract")) == len(manager.scripts.of("Generate")) == 1


async def test_key_that_is_for_other_methods_is_no_sign_of_an_old_manager(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    not_for_executors = fail(grpc.StatusCode.PERMISSION_DENIED, "for tenants", "METHOD_FORBIDDEN", role="executor")
    manager.scripts.unary["GetContract"] = [not_for_executors]
    with pytest.raises(PermissionDeniedError, match="for tenants"):
        await generate(client, tenant="t")


async def test_answer_of_a_connection_that_broke_meanwhile_is_not_believed() -> None:
    class Replaced:
        """A channel that breaks as it delivers the first answer, and reaches an older manager from then on."""

        def __init__(self) -> None:
            self.channel = self.inference = self
            self.answers = [1, 0]
            self.states = [grpc.ChannelConnectivity.IDLE, *[grpc.ChannelConnectivity.READY] * 5]

        def get_state(self) -> grpc.ChannelConnectivity:
            return self.states.pop(0)

        async def GetContract(self, _request: Any) -> Any:  # noqa: N802 - the contract names the method
            return pb.GetContractResponse(contract_version=self.answers.pop(0))

    contract = ManagerContract(cast(Any, Replaced()))
    request = pb.GenerateRequest(tenant="t")
    outcomes = await asyncio.gather(*(contract.require(request, None) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ManagerTooOldError] * 3


async def test_pool_goes_on_after_a_batch_that_was_not_sent(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.unary["GetContract"] = [OLD["of version 0"]]
    async with await client.open_pool(num_blocks=8) as pool:
        with pytest.raises(ManagerTooOldError):
            await pool.update([OpenSequence("a", [1], tenant="t")])
        assert await pool.update([OpenSequence("a", [1])]) == [SequenceTable([], 0)]
        assert pool.recovered == []
    assert [request.batch_id for request in manager.scripts.of("UpdateSequences")] == [1]


@pytest.mark.parametrize("call", [generate, submit, pin])
async def test_question_that_finds_no_manager_is_asked_again(
    client: AsyncClient, manager: ScriptedManager, call: Callable[..., Awaitable[None]]
) -> None:
    gone = fail(grpc.StatusCode.UNAVAILABLE, "connection lost")
    manager.scripts.unary["GetContract"] = [gone, gone, partial(succeed_with, CONTRACT)]
    manager.scripts.many = [answer_many]
    await call(client, adapter="a")
    assert len(manager.scripts.of("GetContract")) == 3


@pytest.mark.parametrize("call", [generate, submit, pin])
async def test_question_that_fails_otherwise_fails_the_request(
    client: AsyncClient, manager: ScriptedManager, call: Callable[..., Awaitable[None]]
) -> None:
    manager.scripts.unary["GetContract"] = [fail(grpc.StatusCode.UNAUTHENTICATED, "no key", "MISSING_KEY")]
    manager.scripts.many = [answer_many]
    with pytest.raises(KvPlaneError, match="no key") as caught:
        await call(client, adapter="a")
    assert caught.value.reason == "MISSING_KEY"
    assert manager.scripts.of("Generate") == manager.scripts.of("GenerateMany") == []


async def test_manager_that_is_replaced_by_an_older_one_is_asked_anew(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    await generate(client, tenant="t")
    await manager.stop()
    manager.scripts.unary["GetContract"] = [OLD["of version 0"]]
    await manager.start()
    await client.get_model()  # the connection is back before a request asks for more
    with pytest.raises(ManagerTooOldError):
        await generate(client, tenant="t")
    assert len(manager.scripts.of("Generate")) == 1


async def test_stream_is_not_resumed_on_an_older_manager(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.generate = [hang_after(1, lambda: None)]
    async with client.stream("hi", tenant="t") as chunks:
        await anext(chunks)
        await manager.stop()
        manager.scripts.unary["GetContract"] = [OLD["of version 0"]]
        await manager.start()
        with pytest.raises(ManagerTooOldError):
            await anext(chunks)
        with pytest.raises(StopAsyncIteration):
            await anext(chunks)
    assert len(manager.scripts.of("Generate")) == 1
