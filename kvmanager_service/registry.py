"""The executors that registered with this manager, and their leases.

Station: written by the registry servicer (register) and by `executor_life` (state, rejection), read by both. It knows
neither executors' content nor how to reach them. Time is a parameter, everything runs on one loop.

Life of an entry: register → STANDBY → CONNECTING → ACTIVE → (lost: STANDBY with last_error) → lease over: gone.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.errors import (
    ExecutorIdReusedError,
    ExecutorRejectedError,
    UnavailableError,
    UnknownExecutorError,
)

__all__ = ["ExecutorRegistry", "ExecutorState", "RegisteredExecutor"]

MAX_EXECUTORS = 1_024
MAX_ID_CHARS = 128
MAX_ADDRESS_CHARS = 261
"""A DNS name has at most 253 characters; brackets, colon and port take eight."""

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_log = structlog.get_logger(__name__)


class ExecutorState(enum.Enum):
    """What the manager does with an executor."""

    STANDBY = "standby"
    CONNECTING = "connecting"
    ACTIVE = "active"


@dataclass(slots=True)
class RegisteredExecutor:
    """One registered executor.

    Attributes:
        expires_at: when its lease ends, in seconds on the registry's clock.
        state: what the manager does with it.
        last_error: why the last attempt to use it failed; empty when it did not.
        loss: its last loss, counted over all executors; 0 when it was never lost.
        hangs: it was lost because a step had no result, and has not been active since.
        rejection: the reason why the manager cannot use it; never a candidate then, and told so when it renews. Empty
            while it is none.
    """

    executor_id: str
    address: str
    expires_at: float
    state: ExecutorState = ExecutorState.STANDBY
    last_error: str = ""
    loss: int = 0
    hangs: bool = False
    rejection: str = ""


class ExecutorRegistry:
    """Keeps the list of executors.

    Attributes:
        lease_ms: how long a registration is valid, in milliseconds.
    """

    def __init__(self, clock: Callable[[], float], lease_ms: int) -> None:
        """Keep leases of `lease_ms` on `clock`, which tells seconds and never goes back."""
        self.lease_ms = lease_ms
        self._changed = asyncio.Event()
        self._clock = clock
        self._records: dict[str, RegisteredExecutor] = {}
        self._left: dict[str, str] = {}
        self._draining = False
        self._losses = 0

    def register(self, executor_id: str, address: str) -> None:
        """Announce an executor or renew its lease.

        An executor that comes with a new id at the address of another is that executor restarted; the old entry goes.

        Raises:
            InvalidRequestError: id or address is malformed.
            ExecutorIdReusedError: the id is registered with another address.
            ExecutorRejectedError: the engine found that it cannot use it.
            UnavailableError: the manager has too many; or is draining, and has never seen it.
        """
        _check_id(executor_id)
        _check_address(address)
        self.expire()
        record = self._records.get(executor_id)
        if record is None:
            self._add(executor_id, address)
            return
        if record.address != address:
            raise ExecutorIdReusedError(
                "EXECUTOR_ID_REUSED",
                f"address: expected {record.address}, where {executor_id} is registered, got {address}; use a new"
                " executor_id for each run",
                executor_id=executor_id,
            )
        record.expires_at = self._expiry()
        if record.rejection:
            raise ExecutorRejectedError(record.rejection, record.last_error, executor_id=executor_id)

    def records(self) -> list[RegisteredExecutor]:
        """Return the executors whose lease is valid, in order of registration."""
        self.expire()
        return list(self._records.values())

    def find(self, executor_id: str) -> RegisteredExecutor:
        """Return an executor that may be used.

        Raises:
            UnknownExecutorError: none of that id is registered.
            ExecutorRejectedError: the engine found that it cannot use it.
        """
        self.expire()
        record = self._records.get(executor_id)
        if record is None:
            shown = executor_id[:MAX_ID_CHARS]
            raise UnknownExecutorError(
                "EXECUTOR_NOT_FOUND",
                f"executor_id: expected one that is registered, got {shown!r}; `kvplane executors` lists them",
                executor_id=shown,
            )
        if record.rejection:
            raise ExecutorRejectedError(record.rejection, record.last_error, executor_id=executor_id)
        return record

    def candidates(self) -> list[RegisteredExecutor]:
        """Return those that may be used, the best first.

        Those that hang come last, before them those that were lost, the last at the end; else as they registered.
        """
        usable = [record for record in self.records() if not record.rejection]
        return sorted(usable, key=lambda record: (record.hangs, record.loss))

    def remaining_ms(self, record: RegisteredExecutor) -> int:
        """Return how long a lease still lasts, in milliseconds."""
        return max(0, round((record.expires_at - self._clock()) * 1_000))

    def set_state(self, executor_id: str, state: ExecutorState, error: str = "") -> None:
        """Note what the engine does with an executor; one that is gone is ignored, for its lease may end any time.

        Args:
            executor_id: the executor.
            state: the new state.
            error: why it failed, when it did. A state other than ACTIVE without an error keeps the last one.
        """
        record = self._records.get(executor_id)
        if record is None:
            return
        record.state = state
        if error or state is ExecutorState.ACTIVE:
            record.last_error = error
        if state is ExecutorState.ACTIVE:
            record.hangs = False

    def lose(self, executor_id: str, error: str, *, hangs: bool) -> None:
        """Note that an executor could not be used, or not any more, and whether because a step had no result."""
        self.set_state(executor_id, ExecutorState.STANDBY, error)
        record = self._records.get(executor_id)
        if record is not None:
            self._losses += 1
            record.loss = self._losses
            record.hangs |= hangs

    def reject(self, executor_id: str, reason: str, error: str) -> None:
        """Note that an executor cannot be used; it is told both when it renews."""
        record = self._records.get(executor_id)
        if record is not None:
            record.state, record.last_error, record.rejection = ExecutorState.STANDBY, error, reason

    def expire(self) -> None:
        """Forget executors whose lease is over."""
        now = self._clock()
        for record in [record for record in self._records.values() if record.expires_at <= now]:
            self._remove(record, "executor_lease_expired")

    def drain(self) -> None:
        """Accept no new executors, so that running requests can finish and no more.

        Known ones keep renewing, and come back after their lease has ended.
        """
        self._draining = True

    @property
    def next_change(self) -> asyncio.Event:
        """Set when the next executor comes or goes."""
        return self._changed

    async def wait_changed(self) -> None:
        """Wait until the next executor comes or goes."""
        await self._changed.wait()

    async def watch(self) -> None:
        """Forget executors as their leases end, until cancelled."""
        while True:
            await asyncio.sleep(self.lease_ms / 4_000)
            self.expire()

    def _add(self, executor_id: str, address: str) -> None:
        # One whose lease ended may be what the last requests wait for.
        if self._draining and self._left.get(executor_id) != address:
            raise UnavailableError("DRAINING", "expected a serving manager, got one that is stopping; try another")
        for record in [record for record in self._records.values() if record.address == address]:
            self._remove(record, "executor_superseded")
        if len(self._records) >= MAX_EXECUTORS:
            raise UnavailableError(
                "TOO_MANY_EXECUTORS",
                f"expected fewer than {MAX_EXECUTORS} registered executors, got as many; try again when some have left",
            )
        self._left.pop(executor_id, None)
        self._records[executor_id] = RegisteredExecutor(executor_id, address, self._expiry())
        self._announce()
        _log.info("executor_registered", executor_id=executor_id, address=address)

    def _remove(self, record: RegisteredExecutor, event: str) -> None:
        del self._records[record.executor_id]
        self._left[record.executor_id] = record.address
        if len(self._left) > MAX_EXECUTORS:
            del self._left[next(iter(self._left))]
        self._announce()
        _log.warning(event, executor_id=record.executor_id, address=record.address, state=record.state.value)

    def _announce(self) -> None:
        """Wake all who wait now; who waits later waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _expiry(self) -> float:
        return self._clock() + self.lease_ms / 1_000


def _check_id(executor_id: str) -> None:
    if not 1 <= len(executor_id) <= MAX_ID_CHARS:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"executor_id: expected 1 to {MAX_ID_CHARS} characters, got {len(executor_id)}; use one unique to this run",
            field="executor_id",
        )


def _check_address(address: str) -> None:
    match = _ADDRESS.fullmatch(address) if len(address) <= MAX_ADDRESS_CHARS else None
    if match is None or not 1 <= int(match[1]) <= 65_535:
        shown = address[:MAX_ADDRESS_CHARS]
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"address: expected host:port such as 10.0.0.7:50061 or [::1]:50061, got {shown!r}; send where the manager"
            " can reach the executor",
            field="address",
        )
