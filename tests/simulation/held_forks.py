"""What becomes of forks that wait and hold blocks: whether they run from what they held, or had to let go of it.

Station: asked by `Checks` after every deed, and by `World` after every call of `Scheduler.schedule`. It counts both, so
that a test fails when no life meets one of them any more.
"""

from __future__ import annotations

from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.scheduler import Scheduler
from tests.simulation.met import Counts


class HeldForks:
    """Forks that wait with blocks, and where the first row of each begins.

    Args:
        scheduler: it stays when a cache is replaced.
        counts: where is counted what became of them.
    """

    def __init__(self, scheduler: Scheduler, counts: Counts) -> None:
        self._scheduler = scheduler
        self._counts = counts
        self._held: list[tuple[Request, int]] = []

    def check(self) -> None:
        """Of all that held something the last time. Raises AssertionError."""
        for fork, num_held in self._held:
            if fork.status is RequestStatus.RUNNING:
                self._check_start(fork, num_held)
            elif fork.status is RequestStatus.WAITING and not (fork.blocks or fork.tables):
                Counts.add(self._counts.outcomes, "fork lets go")
        waiting = self._scheduler.waiting
        self._held = [(one, one.num_computed_tokens) for one in waiting if one.blocks or one.tables]

    def _check_start(self, fork: Request, num_held: int) -> None:
        """It was just admitted: with what it held, unless it let go of it, for another, in the same call."""
        (start,) = [row.start for row in self._scheduler.outstanding[-1].rows if row.request is fork]
        assert start <= num_held, f"{fork!r} held {num_held} tokens and skips some that nobody has computed"
        Counts.add(self._counts.outcomes, "fork runs from what it held" if start == num_held else "fork lets go")
