"""The eviction policy `priority`: what requests asked for their blocks, and for how long.

Station: one of `eviction_policies`. `retention` says what a request may ask; this is what becomes of it.

A block's priority is the highest that anybody asked for since it got its content, of those whose duration has not run
out; without any it is the default. A duration runs while the block is free, anew each time it comes free: a block in
use does not grow old. Among equal priorities, the block that came free first is evicted first; one whose priority falls
takes the place among its new equals that the moment it came free gives it.

Source: TensorRT-LLM's LRUEvictionPolicy, for durations that end in the default priority.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.eviction_policy import EvictionPolicy
from kvmanager_service.core.free_block_queue import FreeKVCacheBlockQueue, require_free
from kvmanager_service.core.retention import DEFAULT_RETENTION_PRIORITY, MIN_RETENTION_PRIORITY

_UNASKED = MIN_RETENTION_PRIORITY - 1
_MAX_STALE = 64
"""Entries of a heap that may be out of date, beside as many as are not."""


class PriorityPolicy(EvictionPolicy):
    """Lowest retention priority first, least recently freed among equals.

    A block taken out of the middle leaves its entries in the heaps; they are told by the turn they were made for, and
    thrown out when they come up or are the greater part. All operations are O(log n) a block, taken over many of them.
    Nothing is spent on durations where there are none.

    Args:
        blocks: all of the pool's usable blocks, free and without content.

    Invariants:
        A free block with content has a turn above 0, which no other has, and a valid entry in `_ranked` (or several
        alike, when its priority came back to what it was); any other block has turn 0. `_passing` of a block is by
        falling priority and rising duration, all above `_lasting`.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        usable = list(blocks)
        size = 1 + max((block.block_id for block in usable), default=0)
        self._empty = FreeKVCacheBlockQueue(usable)
        self._block_of = {block.block_id: block for block in usable}
        self._lasting = [_UNASKED] * size  # the highest priority without an end
        self._passing: dict[int, list[tuple[int, float]]] = {}  # priorities with a duration
        self._turn = [0] * size
        self._rank = [0] * size  # the priority that a free block is queued by
        self._ranked: list[tuple[int, int, int]] = []  # priority, turn, block id
        self._ends: list[tuple[float, int, int]] = []  # when the highest of `_passing` ends, turn, block id
        self._most_ends = _MAX_STALE
        self._last_turn = 0
        self._num_ranked = 0
        self._now = 0.0
        self.num_free_blocks = self._empty.num_free_blocks

    @property
    def num_heap_entries(self) -> int:
        """Entries of the heaps, those out of date included."""
        return len(self._ranked) + len(self._ends)

    def retain(self, blocks: Iterable[KVCacheBlock], priority: int, duration: float) -> None:
        """See the base class."""
        lasting = self._lasting
        for block in blocks:
            block_id = block.block_id
            if block.content is None or priority <= lasting[block_id]:
                continue
            if duration > 0.0:
                self._add_passing(block_id, priority, duration)
            else:
                lasting[block_id] = priority
                if block_id in self._passing:
                    self._keep_passing(block_id, [one for one in self._passing[block_id] if one[0] > priority])

    def advance(self, now: float) -> None:
        """See the base class. O(1) when no duration has run out."""
        self._now = now
        while self._ends and self._ends[0][0] <= now:
            _, turn, block_id = heapq.heappop(self._ends)
            if self._turn[block_id] == turn:
                self._keep_passing(block_id, self._passing[block_id][1:])
                priority = self._priority_of(block_id)
                if priority != self._rank[block_id]:
                    self._rank_block(block_id, priority)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """See the base class."""
        require_free(n, self.num_free_blocks)
        taken = self._empty.popleft_n(min(n, self._empty.num_free_blocks))
        while len(taken) < n:
            entry = heapq.heappop(self._ranked)
            if self._is_valid(entry):
                self._leave(entry[2])
                self._forget(entry[2])
                taken.append(self._block_of[entry[2]])
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """See the base class."""
        if block.content is None:
            self._empty.remove(block)
        else:
            self._require_free(block)
            self._leave(block.block_id)
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """See the base class."""
        block_id = block.block_id
        self._last_turn += 1
        self._turn[block_id] = self._last_turn
        self._num_ranked += 1
        self.num_free_blocks += 1
        if block_id in self._passing:
            for _, duration in self._passing[block_id]:
                heapq.heappush(self._ends, (self._now + duration, self._last_turn, block_id))
            self._tidy_ends()
        self._rank_block(block_id, self._priority_of(block_id))

    def prepend(self, block: KVCacheBlock) -> None:
        """See the base class."""
        self._empty.prepend(block)
        self.num_free_blocks += 1

    def emptied(self, block: KVCacheBlock) -> None:
        """See the base class."""
        if block.ref_cnt == 0:
            self._require_free(block)
            self._leave(block.block_id)
            self._empty.prepend(block)
        self._forget(block.block_id)

    def _add_passing(self, block_id: int, priority: int, duration: float) -> None:
        asked = self._passing.get(block_id, [])
        if any(other >= priority and lasts >= duration for other, lasts in asked):
            return
        asked = [(other, lasts) for other, lasts in asked if other > priority or lasts > duration]
        asked.append((priority, duration))
        asked.sort(reverse=True)
        self._passing[block_id] = asked

    def _keep_passing(self, block_id: int, asked: list[tuple[int, float]]) -> None:
        if asked:
            self._passing[block_id] = asked
        else:
            del self._passing[block_id]

    def _priority_of(self, block_id: int) -> int:
        if block_id in self._passing:
            return self._passing[block_id][0][0]
        lasting = self._lasting[block_id]
        return DEFAULT_RETENTION_PRIORITY if lasting == _UNASKED else lasting

    def _rank_block(self, block_id: int, priority: int) -> None:
        """Queue a free block by a priority."""
        self._rank[block_id] = priority
        heapq.heappush(self._ranked, (priority, self._turn[block_id], block_id))
        if len(self._ranked) > 2 * self._num_ranked + _MAX_STALE:
            self._ranked = [entry for entry in self._ranked if self._is_valid(entry)]
            heapq.heapify(self._ranked)

    def _tidy_ends(self) -> None:
        """Throw out the ends of earlier turns when they may be the greater part."""
        if len(self._ends) > self._most_ends:
            self._ends = [entry for entry in self._ends if self._turn[entry[2]] == entry[1]]
            heapq.heapify(self._ends)
            self._most_ends = 2 * len(self._ends) + _MAX_STALE

    def _is_valid(self, entry: tuple[int, int, int]) -> bool:
        priority, turn, block_id = entry
        return self._turn[block_id] == turn and self._rank[block_id] == priority

    def _require_free(self, block: KVCacheBlock) -> None:
        if not self._turn[block.block_id]:
            raise ValueError(f"expected a free block, got {block!r}")

    def _leave(self, block_id: int) -> None:
        self._turn[block_id] = 0
        self._num_ranked -= 1

    def _forget(self, block_id: int) -> None:
        """What was asked was asked for a content that is gone."""
        self._lasting[block_id] = _UNASKED
        self._passing.pop(block_id, None)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        yield from self._empty
        for _, _, block_id in sorted({entry for entry in self._ranked if self._is_valid(entry)}):
            yield self._block_of[block_id]
