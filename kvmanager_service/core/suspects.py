"""Which requests may be what breaks the executor.

Station: owned by `Scheduler`, which tells it of every lost step; `StepPlanner` asks it whom to try alone. It knows no
block and no queue.

An executor that is lost does not say whose row it was. So every request of the first lost step is blamed, unless the
executor went for a reason of its own. Whoever gets past the place where it failed is cleared; whoever fails there again
and again becomes a suspect, gets a step of its own, and ends when that fails, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.step import ScheduledRow

MAX_FAILED_STEPS = 3
"""A request that was in the first lost step this many times, and never got over it in between, is ended: it may be what
breaks the executor. Before the last of these times it is a suspect, so that no other request pays for it."""


class Suspects:
    """Requests that must compute alone, the first blamed first."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def first(self) -> Request:
        """The one to try next; there is one."""
        return next(iter(self._requests.values()))

    def blame(self, rows: Iterable[ScheduledRow]) -> list[tuple[Request, RowFailedError]]:
        """The first lost step had these rows. Returns the requests to end, each with its error."""
        failed = []
        for row in rows:
            request = row.request
            if request.status is RequestStatus.FINISHED:
                continue
            request.failed_steps += 1
            request.failed_at = row.stop
            if request.failed_steps == MAX_FAILED_STEPS - 1:
                self._requests[request.request_id] = request
            if request.failed_steps >= MAX_FAILED_STEPS:
                failed.append((request, _error(request)))
        return failed

    def clear(self, row: ScheduledRow) -> None:
        """This row was computed; if that is past the place where its request failed, it is blamed for nothing more."""
        request = row.request
        if row.stop >= request.failed_at:
            request.failed_steps = 0
            self.forget(request)

    def forget(self, request: Request) -> None:
        """A request has ended, or is cleared; it need not have been a suspect."""
        self._requests.pop(request.request_id, None)


def _error(request: Request) -> RowFailedError:
    return RowFailedError(
        "STEP_FAILED",
        f"expected a step with this request to succeed, got {request.failed_steps} failures in a row; the executor's "
        "log says why",
        failed_steps=request.failed_steps,
    )
