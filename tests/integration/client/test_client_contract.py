"""A manager from before a field that must not be ignored is not sent it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import grpc
import pytest
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane_client import (
    AsyncClient,
    ExtendSequence,
    KvPlaneError,
    ManagerTooOldError,
    OpenSequence,
    SequenceTable,
)

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
    "the same, with keys": fail(grpc.StatusCode.PERMISSION_DENIED, "not for tenants", "METHOD_FORBIDDEN"),
    "of version 0": partial(succeed_with, pb.GetContractResponse()),
}


async def answer_many(orders: AsyncIterator[pb.GenerateManyRequest], _context: Any) -> AsyncIterator[Any]:
    """Answers each order at once."""
    async for order in orders:
        for piece in pieces(order.generate):
            yield pb.GenerateManyResponse(outputs=[piece])


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
