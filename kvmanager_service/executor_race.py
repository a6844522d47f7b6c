"""Which executor is used next: the first that is ready of those that are brought up.

Station: called by `executor_life`, which lends it the bringing up; calls the registry for who there is, and in what
order. It knows no request, and of a connection only how to close it.

The best candidate begins alone. A further one begins when one fails, or when those under way have shown no sign of life
for a grace: a profile run is a real forward pass, and two of them on one machine are in each other's way, but an
executor whose compute hangs, or whose address leads nowhere, must keep no other one waiting. Who loses is a standby, as
it was before.

Source: RFC 8305, "Happy Eyeballs", where the candidates are addresses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from kvmanager_service.engine_api import ModelView
from kvmanager_service.executor_client import (
    PROFILE_TIMEOUT_S,
    ExecutorConnection,
    ExecutorGoneError,
    ExecutorLostError,
    ReadyExecutor,
)
from kvmanager_service.registry import ExecutorRegistry, ExecutorState, RegisteredExecutor

__all__ = ["LEASE_OVER", "BringUp", "ExecutorRace", "PreparedExecutor"]

CONNECT_GRACE_S = 1.0
"""How long a candidate that nobody has reached yet keeps the next one waiting."""
GRACE_S = 5.0
"""The same after each sign of life."""
MAX_AT_ONCE = 4
"""Most candidates that are brought up at once."""
UNREACHED_PATIENCE_S = 3.0
"""How long a candidate that nobody has reached yet keeps its place when all are taken and another wants one."""
PATIENCE_S = 30.0
"""The same for one that was reached, since its last sign of life. Each time it loses its place so, it keeps the next
one twice as long: whatever a profile run takes, one attempt outlasts it."""
MAX_PATIENCE_S = PROFILE_TIMEOUT_S
"""The doubling ends here: the longest call of a bring-up has ended by then."""
BACKOFF_S = (0.1, 0.2, 0.5, 1.0)
"""Waits between attempts to use one executor; the last repeats."""
LEASE_OVER = "its lease ran out: it did not register again in time"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedExecutor:
    """An executor to which steps can be sent.

    Attributes:
        model: what it serves.
    """

    executor: RegisteredExecutor
    connection: ExecutorConnection
    ready: ReadyExecutor
    model: ModelView


BringUp = Callable[[RegisteredExecutor, Callable[[], None]], Coroutine[Any, Any, PreparedExecutor]]
"""Brings an executor up; is given what to call at each sign of life. Raises ExecutorLostError when it fails. Whether it
fails or is cancelled, it leaves nothing open."""


@dataclass(slots=True)
class _Attempt:
    """A candidate under way: its last sign of life, and for how long that is enough.

    Attributes:
        executor: who is brought up.
        seen_at: its last sign of life, or its beginning.
        grace_s: how long nobody else begins after that.
        patience_s: how long it keeps its place after that, once it was reached.
        was_reached: whether there was any sign of life.
    """

    executor: RegisteredExecutor
    seen_at: float
    grace_s: float
    patience_s: float
    was_reached: bool = False

    @property
    def loses_place_at(self) -> float:
        """When it may be given up for another that waits."""
        return self.seen_at + (self.patience_s if self.was_reached else UNREACHED_PATIENCE_S)

    def seen(self) -> None:
        """It shows a sign of life."""
        self.seen_at, self.grace_s, self.was_reached = _now(), GRACE_S, True


class ExecutorRace:
    """Brings executors up until one is ready; remembers who failed, and when.

    Args:
        registry: who there is.
        bring_up: see `BringUp`.
    """

    def __init__(self, registry: ExecutorRegistry, bring_up: BringUp) -> None:
        self._registry = registry
        self._bring_up = bring_up
        self._attempts: dict[asyncio.Task[PreparedExecutor], _Attempt] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._patience_s: dict[str, float] = {}

    async def winner(self) -> PreparedExecutor:
        """Wait for an executor that is ready. When this returns, all others are closed; when it raises, all are."""
        try:
            first = await self._first_ready()
            # It is one of the attempts until it is handed over, so that who cancels this meanwhile closes it, too.
            await self._end(*(task for task in self._attempts if task is not first))
            del self._attempts[first]
            return first.result()
        finally:
            await self._end(*self._attempts)

    async def _first_ready(self) -> asyncio.Task[PreparedExecutor]:
        while True:
            changed = self._registry.next_change
            await self._end_those_gone()
            await self._begin_those_due()
            await self._wait(changed)
            done = [task for task in self._attempts if task.done()]
            for task in done:
                self._note_if_failed(task)
            ready = [task for task in done if task in self._attempts]
            if ready:
                # The first that began; but a cache that is kept is worth more than an empty one.
                return min(ready, key=lambda task: task.result().ready.tagged is not None)

    def note_loss(self, executor: RegisteredExecutor, lost: ExecutorLostError, *, hangs: bool, again: bool) -> None:
        """An executor could not be used, or not any more: it comes after the others, and not at once.

        Args:
            executor: which.
            lost: why.
            hangs: whether a step had no result.
            again: whether nothing good came of it since its last loss; then it waits longer.
        """
        executor_id = executor.executor_id
        _log.warning("executor_lost", executor_id=executor_id, address=executor.address, reason=str(lost))
        self._registry.lose(executor_id, str(lost), hangs=hangs)
        failures = self._failures.get(executor_id, 0) + 1 if again else 1
        self._failures[executor_id] = failures
        self._not_before[executor_id] = _now() + BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]

    # --- whose turn it is -----------------------------------------------------------------------------------------

    def _waiting(self) -> list[tuple[float, RegisteredExecutor]]:
        """The candidates that are not under way, the best first, each with the time of its turn."""
        candidates = self._registry.candidates()
        under_way = [attempt.executor for attempt in self._attempts.values()]
        # It is nobody's turn before this, but of one that is better than all that are under way.
        quiet_at = max((attempt.seen_at + attempt.grace_s for attempt in self._attempts.values()), default=0.0)
        if len(under_way) >= MAX_AT_ONCE:
            quiet_at = max(quiet_at, self._first_to_lose_place().loses_place_at)
        waiting, is_better = [], True
        for candidate in candidates:
            if any(candidate is executor for executor in under_way):
                is_better = False
                continue
            turn = self._not_before.get(candidate.executor_id, 0.0)
            waiting.append((turn if is_better else max(turn, quiet_at), candidate))
        return waiting

    async def _begin_those_due(self) -> None:
        """Begin with those whose turn has come, until one that is under way has ended: that is looked at first."""
        while not any(task.done() for task in self._attempts):
            due = [candidate for turn, candidate in self._waiting() if turn <= _now()]
            if not due:
                return
            if len(self._attempts) < MAX_AT_ONCE:
                self._begin(due[0])
            else:  # and look again: while that one ends, another may end, come or go
                await self._take_place(self._first_to_lose_place())

    def _begin(self, executor: RegisteredExecutor) -> None:
        patience_s = self._patience_s.get(executor.executor_id, PATIENCE_S)
        attempt = _Attempt(executor, _now(), CONNECT_GRACE_S, patience_s)
        self._registry.set_state(executor.executor_id, ExecutorState.CONNECTING)
        task = asyncio.create_task(self._bring_up(executor, attempt.seen), name=f"bring-up-{executor.executor_id}")
        self._attempts[task] = attempt

    async def _wait(self, changed: asyncio.Event) -> None:
        """Wait until one ends, an executor comes or goes, or the next one's turn has come."""
        turn = min((turn for turn, _ in self._waiting()), default=None)
        change = asyncio.create_task(changed.wait())
        try:
            timeout = None if turn is None else max(0.0, turn - _now())
            await asyncio.wait([change, *self._attempts], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()

    # --- who ends -------------------------------------------------------------------------------------------------

    def _first_to_lose_place(self) -> _Attempt:
        return min(self._attempts.values(), key=lambda attempt: attempt.loses_place_at)

    async def _take_place(self, attempt: _Attempt) -> None:
        """Give up one that was not ready in time; next time it has more of it."""
        if attempt.was_reached:
            self._patience_s[attempt.executor.executor_id] = min(2 * attempt.patience_s, MAX_PATIENCE_S)
        await self._give_up(attempt, ExecutorLostError("it was not ready in time, and others wait"))

    def _note_if_failed(self, task: asyncio.Task[PreparedExecutor]) -> None:
        """Take one that has failed off the list. Raises what is nobody's fault but ours."""
        lost = task.exception()
        if lost is None:
            return
        if not isinstance(lost, ExecutorLostError):
            raise lost
        self.note_loss(self._attempts.pop(task).executor, lost, hangs=False, again=True)

    async def _end_those_gone(self) -> None:
        candidates = self._registry.candidates()
        for attempt in list(self._attempts.values()):
            if not any(attempt.executor is candidate for candidate in candidates):
                await self._give_up(attempt, ExecutorGoneError(LEASE_OVER))
        known = {candidate.executor_id for candidate in candidates}
        for notes in (self._failures, self._not_before, self._patience_s):
            for executor_id in notes.keys() - known:
                del notes[executor_id]

    async def _give_up(self, attempt: _Attempt, why: ExecutorLostError) -> None:
        await self._end(*(task for task, other in self._attempts.items() if other is attempt))
        self.note_loss(attempt.executor, why, hangs=False, again=True)

    async def _end(self, *tasks: asyncio.Task[PreparedExecutor]) -> None:
        """Close executors, whether under way or ready, that are not wanted now.

        May be cancelled, and called again for the same ones: each is an attempt until it is closed.
        """
        for task in tasks:
            if not task.cancelling():  # one that closes its connection already is not to be disturbed
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            await self._close(task)

    async def _close(self, task: asyncio.Task[PreparedExecutor]) -> None:
        """Take one that has ended off the list, and close its connection if it was ready."""
        executor = self._attempts[task].executor
        failure = None if task.cancelled() else task.exception()
        if not task.cancelled() and failure is None:
            await task.result().connection.close()
        del self._attempts[task]
        error = str(failure) if isinstance(failure, ExecutorLostError) else ""
        self._registry.set_state(executor.executor_id, ExecutorState.STANDBY, error)
        if failure is not None and not isinstance(failure, ExecutorLostError):
            _log.error("executor_bring_up_failed", executor_id=executor.executor_id, exc_info=failure)


def _now() -> float:
    return asyncio.get_running_loop().time()
