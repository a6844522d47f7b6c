"""Blocks of preempted requests in the executor's host memory: which copies there are, and which are under way.

Station: owned by `Residency`, one for each cache; calls `KVCacheManager`, or `KVCacheCoordinator`, for device blocks,
`SwapPolicy` for whether to swap at all, and adds its orders to the `StepPlan`. It knows no KV groups: a host block
takes a block of any.

Life of a copy, by what its request does:

    running ─preempted▶ LEAVING ─acknowledged▶ HELD ─admitted▶ RETURNING ─acknowledged▶ gone
                                                ▲                 │
                                                └── preempted, ◀──┘
                                                    or the step was lost

* LEAVING: a step that is out copies the blocks to the host. Nobody else gets them before it is acknowledged, and the
  request is not admitted; but it takes what steps before sample for it. Is the step lost, the copy is void and the
  request computes again.
* HELD: the request waits, and holds host blocks only.
* RETURNING: it runs; a step that is out copies its blocks back, so the host's are kept until it is acknowledged.
* DROPPED: nobody wants the copy any more, but a step that is out may still write or read the host blocks.

What is copied is what the next token reads of what steps before have computed. That token may be being sampled; it is
known when the copy is acknowledged, since steps come back in order. To drop it, as recomputation does, would be to go
on from the token before: of a recurrent state what that reads is gone, and a window may have left it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_groups import TableEntry
from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.step import BlockCopy, CopyDirection, SchedulerStats, Step, StepResult
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.swap_policy import SwapPolicy


class CopyPhase(Enum):
    """Where a copy stands; see the module."""

    LEAVING = "leaving"
    HELD = "held"
    RETURNING = "returning"
    DROPPED = "dropped"


class HostCopy:
    """What the host holds, or is about to, of one request.

    Attributes:
        request: whose.
        entries: of the request's tables, those that were copied; `KVCacheManager.entries` of num_tokens.
        host_ids: the host block of each.
        num_tokens: position from which it can go on by them; at least one known token is not before it.
        root: its first content, None when that is not cached: two requests with the same share a prefix.
        newest_prefix: the longest of its prefixes, where they have objects of their own (`PrefixLedger`).
        phase: where it stands.
        blocks: LEAVING: the device blocks that are copied. They are referenced, as if by a table.
        step_id: the newest step that orders a copy from or to the host blocks and is out; 0 when none is.
    """

    __slots__ = (
        "blocks",
        "entries",
        "host_ids",
        "newest_prefix",
        "num_tokens",
        "phase",
        "request",
        "root",
        "step_id",
    )

    def __init__(
        self,
        request: Request,
        *,
        entries: list[TableEntry],
        host_ids: list[int],
        num_tokens: int,
        blocks: list[KVCacheBlock],
        step_id: int,
        root: BlockContent | None,
        newest_prefix: BlockContent | None,
    ) -> None:
        self.request = request
        self.entries = entries
        self.host_ids = host_ids
        self.num_tokens = num_tokens
        self.root = root
        self.newest_prefix = newest_prefix
        self.phase = CopyPhase.LEAVING
        self.blocks = blocks
        self.step_id = step_id

    @property
    def has_lost_its_prefix(self) -> bool:
        """Whether the ledger has forgotten its prefix: it may have been computed from what a window has left since."""
        return self.newest_prefix is not None and self.newest_prefix.block is None

    def __repr__(self) -> str:
        return (
            f"HostCopy({self.request.request_id!r}, {self.phase.value}, tokens={self.num_tokens}, "
            f"host_ids={self.host_ids}, step_id={self.step_id})"
        )


class _Victim:
    """What a request had computed when it gave way, for what the prefix cache still has when it comes back.

    Args:
        request: whose.
        num_tokens: known tokens that were computed.
        num_shared: those of its prefix that others held, too: that they are found says nothing.
    """

    __slots__ = ("_num_shared", "_num_tokens", "request")

    def __init__(self, request: Request, num_tokens: int, num_shared: int) -> None:
        self.request = request
        self._num_tokens = num_tokens
        self._num_shared = num_shared

    def came_back(self, policy: SwapPolicy) -> None:
        """It was admitted, and nothing was ordered for it yet."""
        num_tokens = self._num_tokens - self._num_shared
        if num_tokens > 0:
            num_found = min(self.request.num_computed_tokens - self._num_shared, num_tokens)
            policy.came_back(num_tokens, max(0, num_found))


class SwapSpace:
    """The host pool of one cache.

    Args:
        kv: whose blocks are swapped.
        num_host_blocks: how many blocks the executor has set aside in host memory.
        policy: whom to swap out.
        stats: where is counted who was swapped out and in.

    Invariants (`check_integrity`):
        A host block is free or belongs to one copy. A request has one copy at most: LEAVING or HELD while it waits,
        RETURNING while it runs. What is known of blocks on their way to the host is what the copies say.
    """

    def __init__(self, kv: KVCache, num_host_blocks: int, policy: SwapPolicy, stats: SchedulerStats) -> None:
        self.num_host_blocks = num_host_blocks
        self._kv = kv
        self._policy = policy
        self._stats = stats
        self._free_host_ids = list(range(num_host_blocks - 1, -1, -1))
        self._copies: dict[int, HostCopy] = {}
        self._under_way: dict[int, list[HostCopy]] = {}
        self._victims: dict[int, _Victim] = {}  # by arrival_seq, until they come back
        self._leaving: dict[KVCacheBlock, int] = {}  # references that are dropped once all under way is acknowledged
        self._num_coming_free = 0  # blocks with no others; as of the pool's num_shared_changes below
        self._counted_at = kv.pool.num_shared_changes

    @property
    def num_used_host_blocks(self) -> int:
        """Host blocks that hold a copy, or are being copied from or to."""
        return self.num_host_blocks - len(self._free_host_ids)

    def requests(self) -> list[Request]:
        """Whose blocks are in host memory, or on their way there or back."""
        return [copy.request for copy in self._copies.values()]

    # --- a request leaves -----------------------------------------------------------------------------------------

    def leave(self, request: Request, plan: StepPlan | None) -> bool:
        """A running request is being preempted: keep its computed blocks, if that can be and is worth it.

        Called before its table is freed; the blocks that are kept are taken out of it.

        Args:
            request: still with its table.
            plan: the step being decided, None when none is: then nothing can be copied, and only a request on its
                return goes back to what the host still holds.

        Returns:
            Whether the request takes what is being sampled for it: so it does as long as the copy is LEAVING.
        """
        copy = self._copies.get(request.arrival_seq)
        if copy is not None:
            assert copy.phase is CopyPhase.RETURNING
            copy.phase = CopyPhase.HELD
            return False
        num_tokens = request.num_computed_tokens
        if plan is None or num_tokens <= 0:
            return False
        num_shared = self._kv.num_shared_tokens(request)
        num_known = min(num_tokens, request.num_tokens - 1)  # without the copy one is always computed again
        self._victims[request.arrival_seq] = _Victim(request, num_known, num_shared)
        entries = self._kv.entries(num_tokens)
        num_blocks = len(entries)
        if not 0 < num_blocks <= len(self._free_host_ids):
            return False
        if not self._policy.prefers_swap(num_tokens - num_shared, num_blocks):
            return False
        root = request.contents[0] if request.contents else None
        newest_prefix = request.contents[-1] if request.tables and request.contents else None
        blocks = self._kv.detach(request)
        for block in blocks:
            count = self._leaving[block] = self._leaving.get(block, 0) + 1
            self._num_coming_free += block.ref_cnt == count  # it was not before: the table's was one more
        host_ids = [self._free_host_ids.pop() for _ in range(num_blocks)]
        for block, host_id in zip(blocks, host_ids, strict=True):
            plan.copies.append(BlockCopy(CopyDirection.DEVICE_TO_HOST, block.block_id, host_id))
        copy = HostCopy(
            request,
            entries=entries,
            host_ids=host_ids,
            num_tokens=num_tokens,
            blocks=blocks,
            step_id=plan.step_id,
            root=root,
            newest_prefix=newest_prefix,
        )
        request.num_swapped_tokens = num_tokens
        self._copies[request.arrival_seq] = copy
        self._under_way.setdefault(plan.step_id, []).append(copy)
        self._stats.swapped_out += 1
        return request.num_pending_tokens > 0

    def will_have_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Whether blocks on their way to the host will make room for a running request's next tokens.

        What a pin or another table holds, too, will not be free. If there will be room, it is noted that the request
        waits for them: whoever comes after it in this plan does not count on the same ones.
        """
        if self.num_missing(request, num_tokens, plan) > 0:
            return False
        plan.wait(request, self._kv.num_new_blocks(request, num_tokens, self._leaving))
        return True

    def num_missing(self, request: Request, num_tokens: int, plan: StepPlan) -> int:
        """Blocks that will still be too few then for a running request's next tokens; below 1 when there are enough."""
        needed = self._kv.num_new_blocks(request, num_tokens, self._leaving)
        return needed + plan.num_awaited - self._num_expected() - self._kv.pool.num_free_blocks

    def _num_expected(self) -> int:
        """Blocks that come free once all that is under way is acknowledged; O(1) while nobody shares or unshares any.

        Others may: a row that takes a copy of a leaving block, or a victim that is computed again, lets go of it.
        """
        if self._counted_at != self._kv.pool.num_shared_changes:
            self._num_coming_free = self._count_coming_free()
            self._counted_at = self._kv.pool.num_shared_changes
        return self._num_coming_free

    def _count_coming_free(self) -> int:
        return sum(block.ref_cnt == count for block, count in self._leaving.items())

    @property
    def leaving(self) -> Mapping[KVCacheBlock, int]:
        """References that are dropped once all that is under way is acknowledged, by block. It goes on changing."""
        return self._leaving

    @property
    def has_leaving(self) -> bool:
        """Whether blocks are on their way to the host; a step that orders that is out, or being decided."""
        return bool(self._leaving)

    # --- and comes back -------------------------------------------------------------------------------------------

    def is_leaving(self, request: Request) -> bool:
        """Whether a waiting request's blocks are still on their way to the host: it can not be admitted yet."""
        copy = self._copies.get(request.arrival_seq)
        return copy is not None and copy.phase is CopyPhase.LEAVING

    def bring_back(self, request: Request, plan: StepPlan) -> None:
        """A request was admitted, with the prefix hits there are: order copies of what else the host holds of it."""
        victim = self._victims.pop(request.arrival_seq, None)
        if victim is not None:
            victim.came_back(self._policy)
        copy = self._copies.get(request.arrival_seq)
        if copy is None:
            return
        if copy.num_tokens <= request.num_computed_tokens:
            self.forget(request)
            return
        assert copy.phase is CopyPhase.HELD
        for place, block in self._kv.resume(request, copy.num_tokens):
            plan.copies.append(BlockCopy(CopyDirection.HOST_TO_DEVICE, copy.host_ids[place], block.block_id))
        copy.phase = CopyPhase.RETURNING
        copy.step_id = plan.step_id
        self._under_way.setdefault(plan.step_id, []).append(copy)
        self._stats.swapped_in += 1

    # --- steps come back, or do not -------------------------------------------------------------------------------

    def acknowledged(self, step: Step, result: StepResult) -> None:
        """A step's copies were done: blocks that left are free, and so are the host's of who has returned."""
        self._policy.acknowledged(step, result)
        for copy in self._under_way.pop(step.step_id, ()):
            if copy.step_id != step.step_id:
                continue  # it was ordered back once more
            copy.step_id = 0
            if copy.phase is CopyPhase.LEAVING:
                copy.phase = CopyPhase.HELD
                copy.request.awaited_incarnation = -1  # it has them
                self._give_back_blocks(copy)
            elif copy.phase is CopyPhase.RETURNING:
                self.forget(copy.request)
            elif copy.phase is CopyPhase.DROPPED:
                self._free_host_ids += copy.host_ids

    def lose(self, lost: Iterable[Step]) -> None:
        """Outstanding steps were lost: what they were to copy out is void, what they were to copy in is held.

        What victims find from now on says nothing of the cache's size.
        """
        self._victims.clear()
        first = next(iter(lost), None)
        if first is not None:
            self._policy.lost(first)
        under_way, self._under_way = self._under_way, {}
        for copies in under_way.values():
            for copy in copies:
                if not copy.step_id:
                    continue
                copy.step_id = 0
                if copy.phase is CopyPhase.LEAVING:
                    self.forget(copy.request)
                elif copy.phase is CopyPhase.DROPPED:
                    self._free_host_ids += copy.host_ids

    def distrust(self, request: Request, root: BlockContent | None, distrusted: Collection[KVCacheBlock]) -> None:
        """A row of a request failed: forget its copy, and whatever else was copied from blocks in doubt.

        Args:
            request: the failed row's.
            root: the first content of the failed row's request, None when that is not cached or not known.
            distrusted: blocks that lost their content; see `KVCacheManager.distrust`.
        """
        for copy in list(self._copies.values()):
            if (
                copy.request is request
                or (request.family_id and copy.request.family_id == request.family_id)
                or (root is not None and copy.root is root)
                or copy.has_lost_its_prefix
                or any(block in distrusted for block in copy.blocks)
            ):
                self.forget(copy.request)

    # --- copies nobody wants --------------------------------------------------------------------------------------

    def forget(self, request: Request) -> None:
        """A request has ended, or can not use its copy, if it has one: give back all that the copy holds.

        Device blocks that are being copied are free at once, for nobody reads the copy. Host blocks are not: a later
        copy to them must not overtake the one that is out. What is being sampled for a request that was leaving is not
        for it any more, as after any preemption: it may be admitted before that is known.
        """
        self._victims.pop(request.arrival_seq, None)
        copy = self._copies.pop(request.arrival_seq, None)
        if copy is None:
            return
        request.num_swapped_tokens = 0
        if request.awaited_incarnation >= 0:
            request.awaited_incarnation = -1
            request.num_pending_tokens = 0
        self._give_back_blocks(copy)
        copy.phase = CopyPhase.DROPPED
        if not copy.step_id:
            self._free_host_ids += copy.host_ids

    def forget_all(self) -> None:
        """Forget every copy; the cache is forgotten, too."""
        self._victims.clear()
        for copy in list(self._copies.values()):
            self.forget(copy.request)

    def _give_back_blocks(self, copy: HostCopy) -> None:
        blocks, copy.blocks = copy.blocks, []
        for block in blocks:
            count = self._leaving.pop(block)
            if count > 1:
                self._leaving[block] = count - 1
            else:
                self._num_coming_free -= block.ref_cnt == 1
        if blocks:
            self._kv.give_back_detached(copy.request, copy.entries, blocks)

    # --- checks ---------------------------------------------------------------------------------------------------

    def tables(self) -> Iterator[list[KVCacheBlock]]:
        """Device blocks on their way to the host: references that no request's table has."""
        for copy in self._copies.values():
            yield copy.blocks

    def check_integrity(self, outstanding: Collection[int]) -> None:
        """Check every invariant. `outstanding` is the ids of the steps that are out. Raises AssertionError."""
        taken = list(self._free_host_ids)
        leaving: dict[KVCacheBlock, int] = {}
        for copy in self._copies.values():
            taken += copy.host_ids
            self._check_copy(copy)
            for block in copy.blocks:
                leaving[block] = leaving.get(block, 0) + 1
        assert self._leaving == leaving, f"{self._leaving} are leaving, the copies say {leaving}"
        is_counted = self._counted_at == self._kv.pool.num_shared_changes
        coming = self._count_coming_free()
        assert not is_counted or self._num_coming_free == coming, f"{self._num_coming_free} come free, not {coming}"
        for step_id, copies in self._under_way.items():
            assert step_id in outstanding, f"copies are under way in step {step_id}, which is not out"
            for copy in copies:
                if copy.step_id == step_id and copy.phase is CopyPhase.DROPPED:
                    taken += copy.host_ids
        assert sorted(taken) == list(range(self.num_host_blocks)), "a host block is lost or in two places"
        for copy in self._copies.values():
            is_out = any(copy in copies for copies in self._under_way.values())
            assert not copy.step_id or is_out, f"{copy!r} waits for a step that is not out"
        for victim in self._victims.values():
            assert victim.request.status is RequestStatus.PREEMPTED, f"{victim.request!r} is thought to come back"

    def _check_copy(self, copy: HostCopy) -> None:
        request = copy.request
        assert self._copies.get(request.arrival_seq) is copy
        assert copy.phase is not CopyPhase.DROPPED, f"{copy!r} is kept"
        assert copy.entries == self._kv.entries(copy.num_tokens), f"{copy!r} is of other entries"
        assert len(copy.host_ids) == len(copy.entries), f"{copy!r} has too many or too few"
        assert request.num_swapped_tokens == copy.num_tokens, f"{request!r} knows of another copy than {copy!r}"
        is_leaving = copy.phase is CopyPhase.LEAVING
        num_known = request.num_tokens + (request.num_pending_tokens if is_leaving else 0)
        assert 0 < copy.num_tokens < num_known, f"{copy!r} leaves {request!r} nothing to compute"
        status = RequestStatus.RUNNING if copy.phase is CopyPhase.RETURNING else RequestStatus.PREEMPTED
        assert request.status is status, f"{copy!r} is of {request!r}"
        assert len(copy.blocks) == (len(copy.host_ids) if is_leaving else 0), f"{copy!r} holds {copy.blocks}"
        assert copy.step_id or copy.phase is CopyPhase.HELD, f"{copy!r} waits for nothing"
