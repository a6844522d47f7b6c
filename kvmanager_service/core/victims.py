"""Who gives way in one step: just those whose blocks let another request go on, or nobody.

Station: made by `Scheduler` when a step first finds too few blocks for a running request; asks `KVCacheManager`, or
`KVCacheCoordinator`, for tables, and the `StepPlan` for who waits. The order is the policy's, taken once for the step.
It preempts nobody.

A block comes free when all who hold it let go of it. So victims are counted together: what two of them share, and
nobody else, counts with the second. What the host has not acknowledged yet has been let go of (`leaving`), and a block
that the request itself is about to write to, or to leave, needs no copy once it is the request's alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.step_plan import StepPlan

_RUNNING: Final = RequestStatus.RUNNING


class Victims:
    """Running requests, whoever gives way first being first; those that stopped running meanwhile are passed over.

    Args:
        order: all that run.
        kv: their tables.
        leaving: references that will have been dropped, by block.
        plan: the step being decided.
    """

    __slots__ = ("_first", "_kv", "_leaving", "_order", "_plan")

    def __init__(
        self, order: Iterable[Request], kv: KVCache, leaving: Mapping[KVCacheBlock, int], plan: StepPlan
    ) -> None:
        self._order = list(order)
        self._first = 0  # nobody before it runs any more
        self._kv = kv
        self._leaving = leaving
        self._plan = plan

    def choose(self, request: Request, num_missing: int) -> list[Request]:
        """Who gives way for a request: a set of which none can be spared, in order.

        Args:
            request: one that runs.
            num_missing: blocks that it lacks, at least 1.

        Returns:
            None of those that are behind the request, if all of them together free too few blocks. Otherwise as many as
            it takes, and of those whoever comes last in the order is spared first, if the others suffice.
        """
        order = self._order
        while order[self._first].status is not _RUNNING:
            self._first += 1
        count = _Count(self._kv, self._leaving, set(self._kv.reusable_blocks(request)), num_missing)
        chosen: list[Request] = []
        index = self._first
        while count.num_missing > 0:
            victim = order[index]
            index += 1
            if victim is request:
                return []
            if victim.status is _RUNNING:
                chosen.append(victim)
                count.num_missing -= self._plan.num_awaited_by(victim)
                count.take(victim, is_alone=len(chosen) == 1)
        for place in range(len(chosen) - 2, -1, -1):  # without the last there were too few
            num_awaited = self._plan.num_awaited_by(chosen[place])
            if count.num_missing + num_awaited <= 0 and count.spare(chosen[place], num_awaited):
                del chosen[place]
        return chosen


class _Count:
    """Blocks that are missing while the tables of some requests are thought to be given back.

    Args:
        kv: the tables.
        leaving: references that will have been dropped, by block.
        reusable: blocks of whoever lacks some, each of which makes up for a free one once nobody else holds it.
        num_missing: how many are missing.

    Attributes:
        num_missing: how many still are; below 0 are some to spare.
    """

    __slots__ = ("_dropped", "_kv", "_leaving", "_reusable", "num_missing")

    def __init__(
        self, kv: KVCache, leaving: Mapping[KVCacheBlock, int], reusable: set[KVCacheBlock], num_missing: int
    ) -> None:
        self.num_missing = num_missing
        self._kv = kv
        self._leaving = leaving
        self._reusable = reusable
        self._dropped: dict[KVCacheBlock, int] = {}  # references of blocks that others hold, too

    def take(self, victim: Request, *, is_alone: bool) -> None:
        """It gives its blocks back. If it is alone with that, those that suffice are looked at, the deepest first."""
        dropped = self._dropped
        for table in self._kv.tables(victim):
            for block in reversed(table):
                if is_alone and self.num_missing <= 0:
                    return
                if block.ref_cnt == 1:
                    self.num_missing -= 1
                else:
                    dropped[block] = dropped.get(block, 0) + 1
                    self.num_missing -= self._is_free(block)

    def spare(self, victim: Request, num_awaited: int) -> bool:
        """It keeps its blocks, all of which were taken, and waits for `num_awaited`, unless some were missing then."""
        spare = -self.num_missing - num_awaited
        for table in self._kv.tables(victim):
            for block in reversed(table):
                spare -= block.ref_cnt == 1 or self._is_free(block)
                if spare < 0:
                    return False
        self.num_missing = -spare
        for table in self._kv.tables(victim):
            for block in table:
                if block.ref_cnt > 1:
                    self._dropped[block] -= 1
        return True

    def _is_free(self, block: KVCacheBlock) -> bool:
        """Whether all references to a block that several hold are dropped, but for the one that makes it reusable."""
        kept = block.ref_cnt - self._leaving.get(block, 0) - self._dropped.get(block, 0)
        return kept == int(block in self._reusable)


__all__ = ["Victims"]
