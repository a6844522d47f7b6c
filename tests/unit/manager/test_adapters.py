"""Adapters of the manager against an executor whose answers the test decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from kvmanager_service.adapters import AdapterBook, Adapters, settle_adapters
from kvmanager_service.core.errors import CoreError, InvalidRequestError
from kvmanager_service.core.extra_keys import LoraAdapter
from kvmanager_service.errors import (
    AdapterInUseError,
    AdapterLimitError,
    DuplicateAdapterError,
    PreconditionError,
    UnavailableError,
    UnknownAdapterError,
    to_status,
)
from kvmanager_service.executor_client import (
    REFUSALS,
    ExecutorConnection,
    ExecutorLostError,
    ExecutorRefusedError,
    LoadedAdapter,
)


def adapter(name: str, revision: str = "r1", adapter_id: int = 1) -> LoadedAdapter:
    return LoadedAdapter(name, revision, f"/{name}", adapter_id, rank=4, size_bytes=100)


class FakeConnection:
    """An executor; `fail` makes a call by name raise, `gate` holds loads until it is set."""

    def __init__(self, *held: LoadedAdapter) -> None:
        self.held = {one.name: one for one in held}
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def load_adapter(self, name: str, source: str, revision: str = "") -> LoadedAdapter:
        self._note("load", name)
        await self.gate.wait()
        if name in self.held and self.held[name].source != source:
            raise refusal(grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_EXISTS")
        if len(self.held) >= 4:
            raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_ADAPTERS")
        self.held[name] = LoadedAdapter(name, revision or "r1", source, len(self.calls) + 10, 4, 100)
        return self.held[name]

    async def unload_adapter(self, name: str) -> None:
        self._note("unload", name)
        del self.held[name]

    async def list_adapters(self) -> list[LoadedAdapter]:
        return list(self.held.values())

    def _note(self, call: str, name: str) -> None:
        self.calls.append(f"{call} {name}")
        if f"{call} {name}" in self.fail:
            raise self.fail[f"{call} {name}"]


class FakeUsers:
    """Requests that use adapters, and steps that are out."""

    def __init__(self) -> None:
        self.adapters = AdapterBook()
        self.using: dict[str, int] = {}
        self.unused = asyncio.Event()
        self.unused.set()

    def num_using(self, adapter: str) -> int:
        return self.using.get(adapter, 0)

    async def wait_unused(self, adapter: str) -> None:
        del adapter
        await self.unused.wait()


def unavailable() -> UnavailableError:
    return UnavailableError("NO_EXECUTOR", "expected an executor")


def refusal(code: grpc.StatusCode, reason: str) -> ExecutorRefusedError:
    return ExecutorRefusedError(code, ErrorInfo(reason=reason, metadata={"source": "/a"}), "source: expected another")


def lent(connection: FakeConnection) -> tuple[Adapters, FakeUsers]:
    users = FakeUsers()
    adapters = Adapters(users, unavailable)
    adapters.lend(cast("ExecutorConnection", connection), 4)
    return adapters, users


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def test_load_puts_name_and_revision_into_the_book() -> None:
    adapters, users = lent(FakeConnection())
    loaded = await adapters.load("a", "/a")
    assert users.adapters.require("a") == LoraAdapter("a", "r1")
    assert users.adapters.ids == {"a": loaded.adapter_id}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (refusal(grpc.StatusCode.INVALID_ARGUMENT, "ADAPTER_NOT_READABLE"), InvalidRequestError),
        (refusal(grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_EXISTS"), DuplicateAdapterError),
        (ExecutorLostError("it went"), UnavailableError),
    ],
)
async def test_load_that_fails_says_why_and_leaves_no_adapter(error: Exception, expected: type[Exception]) -> None:
    connection = FakeConnection()
    connection.fail["load a"] = error
    adapters, users = lent(connection)
    with pytest.raises(expected) as caught:
        await adapters.load("a", "/a")
    if isinstance(error, ExecutorRefusedError):
        assert (caught.value.reason, str(caught.value)) == (error.reason, str(error))  # type: ignore[attr-defined]
    assert users.adapters.all() == []


async def test_load_without_an_executor_is_unavailable() -> None:
    adapters, _ = lent(FakeConnection())
    adapters.take_back()
    with pytest.raises(UnavailableError):
        await adapters.load("a", "/a")


async def test_load_whose_executor_is_replaced_meanwhile_is_not_believed() -> None:
    connection = FakeConnection()
    connection.gate.clear()
    adapters, users = lent(connection)
    load = asyncio.create_task(adapters.load("a", "/a"))
    await until(lambda: bool(connection.calls))
    adapters.lend(cast("ExecutorConnection", FakeConnection()), 4)
    connection.gate.set()
    with pytest.raises(UnavailableError, match="taken over"):
        await load
    assert users.adapters.all() == []


async def test_load_whose_caller_goes_away_is_finished_all_the_same() -> None:
    connection = FakeConnection()
    connection.gate.clear()
    adapters, users = lent(connection)
    load = asyncio.create_task(adapters.load("a", "/a"))
    await until(lambda: bool(connection.calls))
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    connection.gate.set()
    await until(lambda: bool(users.adapters.all()))
    assert users.adapters.require("a").lora_id == "a"


async def test_unload_waits_for_steps_that_name_the_adapter_and_no_request_may_name_it_meanwhile() -> None:
    connection = FakeConnection()
    adapters, users = lent(connection)
    await adapters.load("a", "/a")
    users.unused.clear()
    unload = asyncio.create_task(adapters.unload("a"))
    await until(lambda: not users.adapters.all())
    with pytest.raises(UnknownAdapterError):
        users.adapters.require("a")
    assert connection.calls == ["load a"]
    users.unused.set()
    await unload
    assert connection.calls == ["load a", "unload a"]


async def test_unload_of_an_adapter_in_use_is_refused() -> None:
    connection = FakeConnection()
    adapters, users = lent(connection)
    await adapters.load("a", "/a")
    users.using["a"] = 2
    with pytest.raises(AdapterInUseError, match="2 wait or run"):
        await adapters.unload("a")
    assert users.adapters.require("a") == LoraAdapter("a", "r1")
    assert connection.calls == ["load a"]


async def test_unload_without_an_executor_takes_it_out_of_the_book() -> None:
    adapters, users = lent(FakeConnection())
    await adapters.load("a", "/a")
    adapters.take_back()
    await adapters.unload("a")
    assert users.adapters.all() == []


async def test_unload_that_fails_leaves_the_name_and_the_room_free() -> None:
    """The executor goes on, with an adapter of which the book knows nothing: it goes when it is in the way."""
    connection = FakeConnection()
    adapters, users = lent(connection)
    for name in "abcd":
        await adapters.load(name, f"/{name}")
    failures = [ExecutorLostError("no answer in time"), refusal(grpc.StatusCode.FAILED_PRECONDITION, "SOMETHING")]
    for failure, (name, source) in zip(failures, [("a", "/other"), ("e", "/e")], strict=True):
        connection.fail["unload a"] = failure
        await adapters.unload("a")
        del connection.fail["unload a"]
        assert "a" in connection.held
        connection.calls.clear()
        loaded = await adapters.load(name, source)
        assert connection.calls == [f"load {name}", "unload a", f"load {name}"]
        assert (loaded.source, users.adapters.ids[name]) == (source, connection.held[name].adapter_id)
    assert list(connection.held) == list(users.adapters.ids) == ["b", "c", "d", "e"]


async def test_load_whose_answer_did_not_come_is_in_nobodys_way() -> None:
    connection = FakeConnection(adapter("a", "r9", adapter_id=7))
    adapters, users = lent(connection)
    loaded = await adapters.load("a", "/another")
    assert connection.calls == ["load a", "unload a", "load a"]
    assert users.adapters.all() == [loaded]


async def test_load_that_finds_the_executor_full_of_the_books_adapters_is_refused() -> None:
    connection = FakeConnection()
    adapters, users = lent(connection)
    for name in "abcd":
        await adapters.load(name, f"/{name}")
    with pytest.raises(AdapterLimitError):
        await adapters.load("e", "/e")
    with pytest.raises(DuplicateAdapterError):
        await adapters.load("a", "/other")
    assert [one.source for one in users.adapters.all()] == ["/a", "/b", "/c", "/d"]
    assert not [call for call in connection.calls if call.startswith("unload")]


async def test_load_says_so_when_the_executor_does_not_let_go_of_what_is_in_the_way() -> None:
    connection = FakeConnection(adapter("a", "r9"))
    connection.fail["unload a"] = refusal(grpc.StatusCode.FAILED_PRECONDITION, "SOMETHING")
    adapters, users = lent(connection)
    with pytest.raises(PreconditionError, match="adapter 'a' is in the way and cannot be unloaded: ") as caught:
        await adapters.load("a", "/another")
    assert caught.value.reason == "SOMETHING", "what the executor said, and not that it was lost"
    assert users.adapters.all() == []


def test_book_request_checked_before_its_adapter_was_loaded_anew_is_refused() -> None:
    book = AdapterBook()
    book.add(adapter("a", "r1"))
    checked = book.require("a")
    book.require_current(checked)
    book.require_current(None)
    book.remove("a")
    with pytest.raises(UnknownAdapterError):
        book.require_current(checked)
    book.add(adapter("a", "r2", 2))
    with pytest.raises(UnknownAdapterError, match="other weights"):
        book.require_current(checked)


def test_book_adopts_what_the_next_executor_has_and_tells_what_is_lost() -> None:
    book = AdapterBook()
    book.add(adapter("a", adapter_id=3))
    book.add(adapter("b", adapter_id=4))
    assert book.adopt([adapter("b", adapter_id=1)]) == [adapter("a", adapter_id=3)]
    assert book.ids == {"b": 1}


async def test_settle_loads_what_lacks_and_unloads_what_is_not_wanted_first() -> None:
    connection = FakeConnection(adapter("kept"), adapter("stale", "old"), adapter("extra"))
    wanted = [adapter("kept", adapter_id=9), adapter("stale"), adapter("new")]
    held = await settle_adapters(cast("ExecutorConnection", connection), 4, wanted)
    assert connection.calls == ["unload stale", "unload extra", "load stale", "load new"]
    assert [(one.name, one.revision) for one in held] == [("kept", "r1"), ("stale", "r1"), ("new", "r1")]
    assert held[0].adapter_id == 1, "the executor's own id"


async def test_settle_leaves_out_what_the_executor_refuses() -> None:
    connection = FakeConnection()
    connection.fail["load a"] = refusal(grpc.StatusCode.INVALID_ARGUMENT, "ADAPTER_REVISION_MISMATCH")
    held = await settle_adapters(cast("ExecutorConnection", connection), 4, [adapter("a"), adapter("b")])
    assert [one.name for one in held] == ["b"]
    connection.fail["load a"] = ExecutorLostError("it went")
    with pytest.raises(ExecutorLostError):
        await settle_adapters(cast("ExecutorConnection", connection), 4, [adapter("a")])


async def test_settle_what_is_not_unloaded_is_no_fault_of_the_executor() -> None:
    """Somebody else was faster, or it refuses: no request names it, so it is in nobody's way."""
    for code, reason in (
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER"),
        (grpc.StatusCode.FAILED_PRECONDITION, "SOMETHING"),
    ):
        connection = FakeConnection(adapter("gone"), adapter("a"))
        connection.fail["unload gone"] = refusal(code, reason)
        assert await settle_adapters(cast("ExecutorConnection", connection), 4, [adapter("a")]) == [adapter("a")]
    connection.fail["unload gone"] = ExecutorLostError("it went")
    with pytest.raises(ExecutorLostError):
        await settle_adapters(cast("ExecutorConnection", connection), 4, [adapter("a")])


async def test_settle_leaves_out_an_adapter_whose_name_the_executor_does_not_let_go_of() -> None:
    connection = FakeConnection(adapter("a", "old"))
    connection.fail["unload a"] = refusal(grpc.StatusCode.FAILED_PRECONDITION, "SOMETHING")
    connection.fail["load a"] = refusal(grpc.StatusCode.ALREADY_EXISTS, "ADAPTER_EXISTS")
    held = await settle_adapters(cast("ExecutorConnection", connection), 4, [adapter("a", "new"), adapter("b")])
    assert [one.name for one in held] == ["b"]


@pytest.mark.parametrize("code", sorted(REFUSALS, key=lambda code: code.name))
async def test_load_a_refusal_is_told_as_what_it_is(code: grpc.StatusCode) -> None:
    connection = FakeConnection()
    connection.fail["load a"] = refusal(code, "SOMETHING")
    adapters, _ = lent(connection)
    with pytest.raises(CoreError) as caught:
        await adapters.load("a", "/a")
    assert to_status(caught.value).code is code


async def test_settle_keeps_what_the_first_executor_has_and_asks_none_without_room() -> None:
    connection = FakeConnection(adapter("a"))
    assert await settle_adapters(cast("ExecutorConnection", connection), 4, None) == [adapter("a")]
    assert await settle_adapters(cast("ExecutorConnection", connection), 0, [adapter("a")]) == []
    assert connection.calls == []
