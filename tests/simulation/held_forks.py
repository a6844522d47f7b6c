"""What becomes of forks that wait and hold blocks: whether they run from what they held, or had to let go of it.

Station: asked by `Checks` after every deed, and by `World` after every call of `Scheduler.schedule`. It counts both, so
that a test fails when no life meets one of them any more. And nobody waits first for what only forks behind it hold.
"""

from __future__ import annotations

from collections import Counter

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
        self._preemptions = 0

    def check(self) -> None:
        """Of all that held something the last time. Raises AssertionError."""
        for fork, num_held in self._held:
            if fork.status is RequestStatus.RUNNING:
                self._check_start(fork, num_held)
            elif fork.status is RequestStatus.WAITING and not (fork.blocks or fork.tables):
                Counts.add(self._counts.outcomes, "fork lets go")
        waiting = self._scheduler.waiting
        self._held = [(one, one.num_computed_tokens) for one in waiting if one.blocks or one.tables]
        self._preemptions = self._scheduler.stats.preemptions

    def check_next(self) -> None:
        """After a call that made a step, and before `check`. Raises AssertionError.

        Nobody was admitted in a call in which blocks ran short. While some are on their way to the host, or one request
        is tried alone, nobody need let go of any.
        """
        scheduler = self._scheduler
        was_short = self._preemptions != scheduler.stats.preemptions or any(
            fork.status is RequestStatus.WAITING and not (fork.blocks or fork.tables) for fork, _ in self._held
        )
        has_leaving = scheduler.swap_space is not None and scheduler.swap_space.has_leaving
        is_full = scheduler.outstanding[-1].num_tokens >= scheduler.config.max_num_batched_tokens
        if not self._held or was_short or has_leaving or is_full or scheduler._suspects or not scheduler.waiting:
            return
        first = scheduler.waiting.peek()
        if scheduler.book.has_room(first):
            num_lacking, num_behind = self._num_lacking(first)
            assert not 0 < num_lacking <= num_behind, f"{first!r} lacks {num_lacking} blocks, forks behind it hold them"

    def _num_lacking(self, first: Request) -> tuple[int, int]:
        """Blocks that who waits first lacks, and of those that it lacks how many only forks behind it hold."""
        scheduler, kv = self._scheduler, self._scheduler.kv
        behind = Counter(
            block for one in scheduler.waiting if one is not first for table in kv.tables(one) for block in table
        )
        reserve = int(scheduler.config.watermark * kv.pool.num_usable_blocks) + len(first.followers)
        num_lacking = kv.num_lacking(first, first.num_tokens, reserve if scheduler.running else 0)
        freed = {block for block, count in behind.items() if block.ref_cnt == count}
        if not (first.blocks or first.tables):
            return num_lacking, len(freed - kv.hit_blocks(first))
        num_new = kv.num_new_blocks(first, first.num_tokens)
        return num_lacking, len(freed) + num_new - kv.num_new_blocks(first, first.num_tokens, behind)

    def _check_start(self, fork: Request, num_held: int) -> None:
        """It was just admitted: with what it held, unless it let go of it, for another, in the same call."""
        (start,) = [row.start for row in self._scheduler.outstanding[-1].rows if row.request is fork]
        assert start <= num_held, f"{fork!r} held {num_held} tokens and skips some that nobody has computed"
        Counts.add(self._counts.outcomes, "fork runs from what it held" if start == num_held else "fork lets go")
