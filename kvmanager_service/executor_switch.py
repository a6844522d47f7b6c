"""An operator's order to move on to another executor: one at a time, and who ordered it is told how it ended.

Station: made and asked by `executor_life`, which carries orders out; `engine_loop` gives them. It knows no executor's
contract and no request.

    order ─▶ taken, the executor brought up beside the active one ─▶ prepared ─▶ the active one relieved ─▶ active
               └─ failed: the active one goes on                        └─ lost before it was active: the race decides
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvmanager_service.core.errors import CoreError
from kvmanager_service.errors import ExecutorSwitchError, UnavailableError
from kvmanager_service.executor_race import PreparedExecutor
from kvmanager_service.registry import RegisteredExecutor

__all__ = ["ExecutorSwitch", "SwitchOrder"]


@dataclass(slots=True)
class SwitchOrder:
    """One order.

    Attributes:
        executor: whom to move on to.
        is_begun: whether it is carried out.
        prepared: the executor brought up, until it is used.
        done: ends with the order.
    """

    executor: RegisteredExecutor
    is_begun: bool = False
    prepared: PreparedExecutor | None = None
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ExecutorSwitch:
    """Keeps the order that is carried out, if there is one."""

    def __init__(self) -> None:
        self._order: SwitchOrder | None = None
        self._ordered = asyncio.Event()

    def require_none(self) -> None:
        """Raise ExecutorSwitchError while an order is carried out."""
        if self._order is not None:
            raise ExecutorSwitchError(
                "SWITCH_UNDER_WAY",
                f"expected no order under way, got one for {self._order.executor.executor_id}; wait for its end",
                executor_id=self._order.executor.executor_id,
            )

    async def order(self, executor: RegisteredExecutor) -> None:
        """Give an order and wait until it is carried out. A caller that goes away does not take it back.

        Raises:
            ExecutorSwitchError: another order is carried out; or the executor was not ready.
            UnavailableError: the active executor was lost meanwhile.
        """
        self.require_none()
        order = self._order = SwitchOrder(executor)
        order.done.add_done_callback(_look)
        self._ordered.set()
        await asyncio.shield(order.done)

    async def next_order(self) -> SwitchOrder:
        """Wait for an order and begin with it."""
        while self._order is None or self._order.is_begun:
            self._ordered.clear()
            await self._ordered.wait()
        self._order.is_begun = True
        return self._order

    def take_prepared(self) -> PreparedExecutor | None:
        """Hand over the executor that was brought up by order, if there is one; the order ends when it is active."""
        if self._order is None:
            return None
        prepared, self._order.prepared = self._order.prepared, None
        return prepared

    def succeed(self, executor: RegisteredExecutor) -> None:
        """An executor is active: that ends an order for it."""
        if self._order is not None and self._order.executor is executor:
            self._end(None)

    def fail(self, why: str) -> None:
        """The executor that was ordered was not ready, or is not any more."""
        if self._order is not None:
            executor_id = self._order.executor.executor_id
            message = f"expected an executor that is ready, got {executor_id}, which is not: {why}"
            self._end(ExecutorSwitchError("EXECUTOR_NOT_READY", message, executor_id=executor_id))

    def note_loss(self, executor: RegisteredExecutor, why: str) -> None:
        """An executor that was in use is lost: the one that was ordered, or the one to move on from."""
        if self._order is None:
            return
        if self._order.executor is executor:
            self.fail(why)
        elif self._order.prepared is None:
            self.give_up()

    def give_up(self) -> None:
        """There is no executor to move on from any more."""
        message = "expected an active executor until the other is ready, got its loss; the manager looks for the next"
        self._end(UnavailableError("NO_EXECUTOR", message))

    def _end(self, error: CoreError | None) -> None:
        order, self._order = self._order, None
        if order is None or order.done.done():
            return
        if error is None:
            order.done.set_result(None)
        else:
            order.done.set_exception(error)


def _look(done: asyncio.Future[None]) -> None:
    """An error that nobody waits for any more is no error of asyncio's."""
    if not done.cancelled():
        done.exception()
