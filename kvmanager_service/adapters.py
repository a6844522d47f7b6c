"""The LoRA adapters that requests may name, and how they come and go.

Station: `AdapterBook` is held by `StepLoop`, which has steps name adapters by it; `Adapters` serves the calls of
operators, with the connection that `ExecutorLife` lends it while an executor is in use. Neither knows a request.

The book is the manager's, for executors keep nothing for it: what is in it is loaded again into each executor that
takes over, at the same revision, before that serves. What an executor cannot load is in it no more. A manager that
starts takes over what its first executor has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from kvmanager_service.core.errors import CoreError, InvalidRequestError
from kvmanager_service.core.extra_keys import LoraAdapter
from kvmanager_service.errors import (
    AdapterInUseError,
    AdapterLimitError,
    DuplicateAdapterError,
    PreconditionError,
    UnavailableError,
    UnknownAdapterError,
)
from kvmanager_service.executor_client import ExecutorConnection, ExecutorLostError, ExecutorRefusedError, LoadedAdapter
from kvmanager_service.field_checks import check_length

__all__ = ["AdapterBook", "AdapterUsers", "Adapters", "adapter_lost", "settle_adapters"]

MAX_NAME_CHARS = 256
MAX_SOURCE_CHARS = 4096

_ERRORS: dict[grpc.StatusCode, type[CoreError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: UnknownAdapterError,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateAdapterError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: AdapterLimitError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
}
"""What an operator is told of an executor's refusal, whichever of `REFUSALS` it is. Its messages speak of the same
fields."""

_IN_THE_WAY = frozenset((grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED))
"""Refusals that come of adapters which the executor has already."""

_Result = TypeVar("_Result")
_log = structlog.get_logger(__name__)


class AdapterBook:
    """Which adapters are loaded, in the order they were.

    Attributes:
        ids: by name, what steps on the executor in use call each. Never replaced.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self._by_name: dict[str, LoadedAdapter] = {}

    def all(self) -> list[LoadedAdapter]:
        """All of them."""
        return list(self._by_name.values())

    def require(self, name: str) -> LoraAdapter:
        """What decides the K/V of a request with that adapter. Raises UnknownAdapterError."""
        known = self._by_name.get(name)
        if known is None:
            raise UnknownAdapterError(
                "UNKNOWN_ADAPTER",
                f"adapter: expected the name of a loaded adapter, or none for the model itself, got {name!r}; an"
                " operator loads it: `kvplane adapter load`",
                adapter=name,
            )
        return LoraAdapter(known.name, known.revision)

    def require_current(self, lora: LoraAdapter | None) -> None:
        """Raise UnknownAdapterError if an adapter was unloaded, or loaded anew, since a request was checked."""
        if lora is not None and self.require(lora.lora_id) != lora:
            raise UnknownAdapterError(
                "UNKNOWN_ADAPTER",
                f"adapter: expected {lora.lora_id!r} as it was when the request came, got one with other weights; send"
                " the request again",
                adapter=lora.lora_id,
            )

    def add(self, adapter: LoadedAdapter) -> None:
        """Requests may name it from now on."""
        self._by_name[adapter.name] = adapter
        self.ids[adapter.name] = adapter.adapter_id

    def remove(self, name: str) -> None:
        """No request may name it any more."""
        del self._by_name[name], self.ids[name]

    def adopt(self, held: list[LoadedAdapter]) -> list[LoadedAdapter]:
        """Another executor is in use, which holds these and no others. Returns those that are lost by that."""
        names = {adapter.name for adapter in held}
        lost = [adapter for adapter in self.all() if adapter.name not in names]
        for adapter in lost:
            self.remove(adapter.name)
        for adapter in held:
            self.add(adapter)
        return lost


class AdapterUsers(Protocol):
    """What `Adapters` asks of `StepLoop`."""

    adapters: AdapterBook

    def num_using(self, adapter: str) -> int:
        """How many requests wait or run with an adapter."""

    async def wait_unused(self, adapter: str) -> None:
        """Wait until no step that is out names an adapter with which no request waits or runs."""


@dataclass(frozen=True, slots=True)
class _Lender:
    """The executor in use, and how many adapters it has room for."""

    connection: ExecutorConnection
    max_adapters: int


class Adapters:
    """Loads and unloads adapters, one at a time.

    Args:
        users: who uses them.
        unavailable: makes the error for when there is no executor in use.
    """

    def __init__(self, users: AdapterUsers, unavailable: Callable[[], UnavailableError]) -> None:
        self._users = users
        self._unavailable = unavailable
        self._lender: _Lender | None = None
        self._one_at_a_time = asyncio.Lock()

    def lend(self, connection: ExecutorConnection, max_adapters: int) -> None:
        """Executor and book agree: load into it from now on."""
        self._lender = _Lender(connection, max_adapters)

    def take_back(self) -> None:
        """The executor can not be used any more."""
        self._lender = None

    async def load(self, name: str, source: str) -> LoadedAdapter:
        """Load an adapter. It is loaded, or not, even if the caller goes away.

        Raises:
            CoreError: as `Engine.load_adapter`.
        """
        _check_name(name)
        check_length("source", source, 1, MAX_SOURCE_CHARS)
        return await _whole(self._load(name, source))

    async def unload(self, name: str) -> None:
        """Unload an adapter that nobody uses. From then on no request may name it, even if the caller goes away.

        Raises:
            CoreError: as `Engine.unload_adapter`.
        """
        _check_name(name)
        await _whole(self._unload(name))

    async def _load(self, name: str, source: str) -> LoadedAdapter:
        async with self._one_at_a_time:
            lender = self._lender
            if lender is None:
                raise self._unavailable()
            if not lender.max_adapters:
                raise PreconditionError(
                    "NO_ADAPTERS",
                    "expected an executor with room for LoRA adapters, got one without; start it with --max-loras 4, or"
                    " as many as are to be loaded at once",
                )
            try:
                adapter = await self._load_beside_no_stranger(lender, name, source)
            except ExecutorRefusedError as refused:
                raise _ERRORS[refused.code](refused.reason, str(refused), **refused.metadata) from refused
            except ExecutorLostError as lost:
                raise _executor_lost(lost) from lost
            if self._lender is not lender:
                raise _executor_lost("another one has taken over")
            self._users.adapters.add(adapter)
            _log.info("adapter_loaded", adapter=name, revision=adapter.revision, rank=adapter.rank)
            return adapter

    async def _load_beside_no_stranger(self, lender: _Lender, name: str, source: str) -> LoadedAdapter:
        """Load an adapter; if others are in the way of which the book knows nothing, once more without them.

        Such a one is left by an unload that failed, or by a load whose answer did not come. No step names it.

        Raises:
            ExecutorRefusedError, ExecutorLostError: as `ExecutorConnection.load_adapter`.
        """
        connection = lender.connection
        try:
            return await connection.load_adapter(name, source)
        except ExecutorRefusedError as refused:
            if refused.code not in _IN_THE_WAY:
                raise
            ids = self._users.adapters.ids
            held = await connection.list_adapters()
            strangers = [one for one in held if ids.get(one.name) != one.adapter_id]
            if not strangers or self._lender is not lender:
                raise
        for stranger in strangers:
            try:
                await _unload_from(connection, stranger.name)
            except ExecutorRefusedError as refused:
                raise refused.because(f"adapter {stranger.name!r} is in the way and cannot be unloaded") from refused
            _log.info("adapter_left_over_unloaded", adapter=stranger.name, revision=stranger.revision)
        return await connection.load_adapter(name, source)

    async def _unload(self, name: str) -> None:
        async with self._one_at_a_time:
            book = self._users.adapters
            book.require(name)
            if num_requests := self._users.num_using(name):
                raise AdapterInUseError(
                    "ADAPTER_IN_USE",
                    f"name: expected an adapter that no request uses, got {name!r}, which {num_requests} wait or run"
                    " with; wait for their end, or abort them",
                    adapter=name,
                    requests=num_requests,
                )
            book.remove(name)
            _log.info("adapter_unloaded", adapter=name)
            await self._users.wait_unused(name)
            if self._lender is None:
                return  # the next executor has what is in the book
            try:
                await self._lender.connection.unload_adapter(name)
            except (ExecutorLostError, ExecutorRefusedError) as error:
                # Whoever takes over has what is in the book; if this one goes on, it is tried again for the next load.
                _log.warning("adapter_not_unloaded", adapter=name, reason=str(error))


async def settle_adapters(
    connection: ExecutorConnection, max_adapters: int, wanted: list[LoadedAdapter] | None
) -> list[LoadedAdapter]:
    """Have an executor hold certain adapters and no others.

    Args:
        connection: to the executor.
        max_adapters: how many it has room for.
        wanted: which; None keeps what it has, for nobody knows of any yet.

    Returns:
        What it holds: all that are wanted but those that it refused, which the log names. What it does not let go of,
        which the log names, too, is in nobody's way but that of a wanted one with the same name or no room.

    Raises:
        ExecutorLostError: a call failed.
    """
    if not max_adapters:
        for adapter in wanted or ():
            _log.warning("adapter_lost", adapter=adapter.name, reason="the executor was started without --max-loras")
        return []
    held = {adapter.name: adapter for adapter in await connection.list_adapters()}
    if wanted is None:
        return list(held.values())
    revisions = {adapter.name: adapter.revision for adapter in wanted}
    for adapter in held.values():
        if revisions.get(adapter.name) != adapter.revision:
            try:
                await _unload_from(connection, adapter.name)
            except ExecutorRefusedError as refused:
                _log.warning("adapter_not_unloaded", adapter=adapter.name, reason=str(refused))
    settled = []
    for adapter in wanted:
        known = held.get(adapter.name)
        if known is not None and known.revision == adapter.revision:
            settled.append(known)
            continue
        try:
            settled.append(await connection.load_adapter(adapter.name, adapter.source, adapter.revision))
        except ExecutorRefusedError as refused:
            _log.warning("adapter_lost", adapter=adapter.name, revision=adapter.revision, reason=str(refused))
    return settled


async def _unload_from(connection: ExecutorConnection, name: str) -> None:
    """Have an executor let go of an adapter that it said it has. That somebody else was faster is no refusal.

    Raises:
        ExecutorRefusedError, ExecutorLostError: as `ExecutorConnection.unload_adapter`.
    """
    try:
        await connection.unload_adapter(name)
    except ExecutorRefusedError as refused:
        if refused.code is not grpc.StatusCode.NOT_FOUND:
            raise


def adapter_lost(adapter: LoadedAdapter) -> CoreError:
    """What a request is told whose adapter the executor in use cannot load."""
    return PreconditionError(
        "ADAPTER_LOST",
        f"adapter: expected an executor that has {adapter.name!r} at revision {adapter.revision}, got one that took"
        " over and could not load it; an operator finds out why in the manager's log, and loads it anew",
        adapter=adapter.name,
        revision=adapter.revision,
    )


def _check_name(name: str) -> None:
    check_length("name", name, 1, MAX_NAME_CHARS)


def _executor_lost(why: object) -> UnavailableError:
    return UnavailableError(
        "EXECUTOR_LOST", f"expected an executor that loads the adapter, got one that was lost: {why}"
    )


async def _whole(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run something to its end, though the caller be cancelled; it then has nobody to tell its error."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)
