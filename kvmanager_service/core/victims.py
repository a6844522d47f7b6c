"""Who gives way: just those whose blocks let another request go on, or nobody.

Station: `StepPlanner` makes a `Victims` when a step first finds too few blocks for a running request; `Residency` and
`SequencePool` ask `choose_victims`, which is the rule. It asks `KVCacheManager`, or `KVCacheCoordinator`, for tables,
the `StepPlan` for who waits, and `ForkHolds` for what forks hold that do not run. The order is the policy's, taken once
for the step. It preempts nobody.

A block comes free when all who hold it let go of it. So victims are counted together: what two of them share, and
nobody else, counts with the second. What the host has not acknowledged yet has been let go of (`leaving`), and a block
that the request itself is about to write to, or to leave, needs no copy once it is the request's alone.

Forks that wait give way before all others. They are first thought to have let go, all of them: what that brings is
known without their tables, see `ForkHolds.alone`. Only if it brings anything is it asked of whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.fork_holds import ForkHolds
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_manager import NONE_LEAVING
from kvmanager_service.core.request import Request
from kvmanager_service.core.step_plan import StepPlan


def choose_victims(
    candidates: Iterable[Request],
    kv: KVCache,
    request: Request,
    num_missing: int,
    *,
    leaving: Mapping[KVCacheBlock, int] = NONE_LEAVING,
    holds: ForkHolds | None = None,
    plan: StepPlan | None = None,
) -> list[Request]:
    """Who gives way for a request: a set of which none can be spared, in order.

    Args:
        candidates: requests with blocks, whoever gives way first being first; the request is none of them.
        kv: their tables.
        request: one that lacks blocks. What it would hit brings it nothing, whoever lets go of that.
        num_missing: how many it lacks.
        leaving: references that will have been dropped, by block.
        holds: forks that wait; they give way before the candidates, but for the request itself.
        plan: the step being decided, where candidates may wait for blocks in it.

    Returns:
        Nobody, if all of them together free too few blocks. Otherwise as many as it takes, and of those whoever comes
        last in the order is spared first, if the others suffice.
    """
    count = _Count(kv, leaving, request, num_missing, holds)
    chosen: list[Request] = []
    for victim in candidates:
        if count.num_missing <= 0:
            break
        chosen.append(victim)
        if plan is not None:
            count.num_missing -= plan.num_awaited_by(victim)
        count.take(victim, is_alone=len(chosen) == 1)
    if count.num_missing > 0:
        return []
    for place in range(len(chosen) - 2, -1, -1):  # without the last there were too few
        num_awaited = 0 if plan is None else plan.num_awaited_by(chosen[place])
        if count.num_missing + num_awaited <= 0 and count.spare(chosen[place], num_awaited):
            del chosen[place]
    num_by_forks = len(count.freed_by_forks) + count.num_missing
    if holds is None or num_by_forks <= 0:
        return chosen
    return holds.choose(count.freed_by_forks, num_by_forks, request) + chosen


def forks_beside_pins(
    holds: ForkHolds, kv: KVCache, request: Request, num_missing: int, pinned: Mapping[KVCacheBlock, int]
) -> list[Request]:
    """Forks that wait and let go for a request before pins do, which then have to as well.

    Args:
        holds: the forks.
        kv: the tables.
        request: one that lacks blocks.
        num_missing: how many it lacks once the pins have let go; below 1 if they could do without forks.
        pinned: how many pins hold a block, by block.

    Returns:
        All that free a block, so that pins keep what they can; nobody, if that and all that pins hold is too little.
    """
    count = _Count(kv, pinned, request, num_missing, holds)
    if count.num_missing > 0:
        return []
    return holds.choose(count.freed_by_forks, len(count.freed_by_forks), request)


class Victims:
    """Requests with blocks, whoever gives way first being first; those that have none any more are passed over.

    Args:
        order: all that run.
        kv: their tables.
        leaving: references that will have been dropped, by block.
        holds: forks that wait.
        plan: the step being decided.
    """

    __slots__ = ("_first", "_holds", "_kv", "_leaving", "_order", "_plan")

    def __init__(
        self,
        order: Sequence[Request],
        kv: KVCache,
        leaving: Mapping[KVCacheBlock, int],
        holds: ForkHolds,
        plan: StepPlan,
    ) -> None:
        self._order = order
        self._first = 0  # nobody before it has blocks any more
        self._kv = kv
        self._leaving = leaving
        self._holds = holds
        self._plan = plan

    def choose(self, request: Request, num_missing: int) -> list[Request]:
        """Who gives way for a request, see `choose_victims`; none of those that run and are behind it.

        Args:
            request: one that runs.
            num_missing: blocks that it lacks, at least 1.
        """
        order, first = self._order, self._first
        while not _holds_blocks(order[first]):
            first += 1
        self._first = first
        return choose_victims(
            self._before(request),
            self._kv,
            request,
            num_missing,
            leaving=self._leaving,
            holds=self._holds,
            plan=self._plan,
        )

    def _before(self, request: Request) -> Iterator[Request]:
        order = self._order
        for index in range(self._first, len(order)):
            victim = order[index]
            if victim is request:
                return
            if _holds_blocks(victim):
                yield victim


def _holds_blocks(request: Request) -> bool:
    return bool(request.blocks or request.tables)


class _Count:
    """Blocks that are missing while the tables of some requests are thought to be given back.

    Args:
        kv: the tables.
        leaving: references that will have been dropped, by block.
        request: whoever lacks some.
        num_missing: how many are missing.
        holds: forks that wait, all of which are thought to let go, but for the request.

    Attributes:
        num_missing: how many still are; below 0 are some to spare.
        freed_by_forks: blocks that would not be free if no fork let go.
    """

    __slots__ = ("_dropped", "_held", "_hits", "_kv", "_leaving", "_own", "_reusable", "freed_by_forks", "num_missing")

    def __init__(
        self,
        kv: KVCache,
        leaving: Mapping[KVCacheBlock, int],
        request: Request,
        num_missing: int,
        holds: ForkHolds | None,
    ) -> None:
        self.num_missing = num_missing
        self.freed_by_forks: set[KVCacheBlock] = set()
        self._kv = kv
        self._leaving = leaving
        # Each of its own that it could do without makes up for a free one once nobody else holds it.
        is_running = _holds_blocks(request)
        self._reusable = set(kv.reusable_blocks(request)) if is_running else set()
        self._hits = set() if is_running else kv.hit_blocks(request)
        self._dropped: dict[KVCacheBlock, int] = {}  # references of blocks that others hold, too
        self._held: Mapping[KVCacheBlock, int] = NONE_LEAVING
        self._own: set[KVCacheBlock] = set()
        if holds is not None and len(holds):
            self._held = holds.references
            self._own = holds.table_of(request)
            for block in chain(holds.alone(), self._reusable, leaving):
                self._note_if_free(block)
            self.num_missing -= len(self.freed_by_forks)

    def take(self, victim: Request, *, is_alone: bool) -> None:
        """It gives its blocks back. If it is alone with that, those that suffice are looked at, the deepest first."""
        # A shortage may look at all entries of a pool: so no call for each, and no look into what is empty.
        dropped, leaving, hits, reusable = self._dropped, self._leaving, self._hits, self._reusable
        held, freed_by_forks = self._held, self.freed_by_forks
        missing = self.num_missing
        for table in self._kv.tables(victim):
            for block in reversed(table):
                if is_alone and missing <= 0 and not freed_by_forks:
                    break
                if block.ref_cnt == 1:
                    missing -= not hits or block not in hits
                    continue
                num_dropped = dropped.get(block, 0) + 1
                dropped[block] = num_dropped
                kept = block.ref_cnt - num_dropped
                if leaving:
                    kept -= leaving.get(block, 0)
                if held:
                    kept -= self._num_held(block)
                # As in `_is_free`.
                if kept <= 1 and kept == int(block in reusable) and block not in hits:
                    missing -= 1
                    if held and self._num_held(block):
                        freed_by_forks.add(block)
        self.num_missing = missing

    def spare(self, victim: Request, num_awaited: int) -> bool:
        """It keeps its blocks, all of which were taken, and waits for `num_awaited`, unless some were missing then."""
        dropped, leaving, hits, reusable = self._dropped, self._leaving, self._hits, self._reusable
        held = self._held
        spare = -self.num_missing - num_awaited
        for table in self._kv.tables(victim):
            for block in reversed(table):
                if block.ref_cnt == 1:
                    spare -= not hits or block not in hits
                else:
                    kept = block.ref_cnt - dropped[block]
                    if leaving:
                        kept -= leaving.get(block, 0)
                    if held:
                        kept -= self._num_held(block)
                    if kept <= 1 and kept == int(block in reusable) and block not in hits:
                        spare -= 1
                if spare < 0:
                    return False
        self.num_missing = -spare
        for table in self._kv.tables(victim):
            for block in table:
                if block.ref_cnt > 1:
                    dropped[block] -= 1
                    self.freed_by_forks.discard(block)
        return True

    def _note_if_free(self, block: KVCacheBlock) -> None:
        """It is free, perhaps; if so, note whether it is because forks let go."""
        if self._num_held(block) and self._is_free(block):
            self.freed_by_forks.add(block)

    def _num_held(self, block: KVCacheBlock) -> int:
        """References that forks are thought to let go of."""
        return self._held.get(block, 0) - (block in self._own)

    def _is_free(self, block: KVCacheBlock) -> bool:
        """Whether all references to a block that several hold are dropped, but for the one that makes it reusable."""
        kept = block.ref_cnt - self._leaving.get(block, 0) - self._dropped.get(block, 0) - self._num_held(block)
        return kept == int(block in self._reusable) and block not in self._hits


__all__ = ["Victims", "choose_victims", "forks_beside_pins"]
