"""The smaller eviction policies, and all of them by name.

Station: `BlockPool` makes one by its name. LRU is `free_block_queue`, `priority` is `priority_policy`; the others are
made of such queues and of what they remember of each block's present content, kept here by block id so that LRU does
not pay for it.

    lru       least recently freed first
    fifo      first freed first, whatever was hit since
    lfu       least often used first; least recently freed among equals
    priority  lowest retention priority first; least recently freed among equals

A request frees its blocks deepest first, so under each of them the deepest part of a prefix is evicted before what it
depends on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.eviction_policy import EvictionPolicy
from kvmanager_service.core.free_block_queue import FreeKVCacheBlockQueue, require_free
from kvmanager_service.core.priority_policy import PriorityPolicy

DEFAULT_EVICTION_POLICY = "lru"


class FIFOPolicy(EvictionPolicy):
    """First freed, first evicted: a hit does not save a block. All operations are O(1), taken over many of them.

    A block that is hit stays where it is in the list and is skipped while it is referenced. If its turn comes
    meanwhile, it is overdue: it goes as soon as it is free, before all others.

    Args:
        blocks: all of the pool's usable blocks, free and without content.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._empty = FreeKVCacheBlockQueue(blocks)
        self._overdue = FreeKVCacheBlockQueue(())
        self._by_age = FreeKVCacheBlockQueue(())
        self._is_overdue = bytearray(1 + max((block.block_id for block in self._empty), default=0))
        self.num_free_blocks = self._empty.num_free_blocks

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """See the base class."""
        require_free(n, self.num_free_blocks)
        taken = self._empty.popleft_n(min(n, self._empty.num_free_blocks))
        taken += self._overdue.popleft_n(min(n - len(taken), self._overdue.num_free_blocks))
        for block in taken:
            self._is_overdue[block.block_id] = False
        while len(taken) < n:
            block = self._by_age.popleft_n(1)[0]
            if block.ref_cnt:
                self._is_overdue[block.block_id] = True
            else:
                taken.append(block)
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """See the base class. The block keeps its place in the list."""
        if block.next_free_block is None:
            raise ValueError(f"expected a free block, got {block!r}")
        if block.content is None:
            self._empty.remove(block)
        elif self._is_overdue[block.block_id]:
            self._overdue.remove(block)
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """See the base class."""
        if self._is_overdue[block.block_id]:
            self._overdue.append(block)
        elif block.next_free_block is None:
            self._by_age.append(block)
        self.num_free_blocks += 1

    def prepend(self, block: KVCacheBlock) -> None:
        """See the base class."""
        self._empty.prepend(block)
        self.num_free_blocks += 1

    def emptied(self, block: KVCacheBlock) -> None:
        """See the base class."""
        if block.next_free_block is not None:
            (self._overdue if self._is_overdue[block.block_id] else self._by_age).remove(block)
        self._is_overdue[block.block_id] = False
        if block.ref_cnt == 0:
            self._empty.prepend(block)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        yield from self._empty
        yield from self._overdue
        for block in self._by_age:
            if block.ref_cnt == 0:
                yield block


class LFUPolicy(EvictionPolicy):
    """Least frequently used first. A use is a request that gives the block back, for as long as it is cached.

    Blocks are in levels by their uses, LRU within each. A block changes its level only while it is referenced, and is
    at level 0 when it gets its content. All operations are O(log levels) or better, taken over many of them.

    Args:
        blocks: all of the pool's usable blocks, free and without content.

    Invariants:
        A level is in `_levels` exactly while it has free blocks; whatever is in `_levels` is in the heap.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._empty = FreeKVCacheBlockQueue(blocks)
        self._levels: dict[int, FreeKVCacheBlockQueue] = {}
        self._heap: list[int] = []
        self._level_of = [0] * (1 + max((block.block_id for block in self._empty), default=0))
        self.num_free_blocks = self._empty.num_free_blocks

    @property
    def num_levels(self) -> int:
        """Levels that have free blocks."""
        return len(self._levels)

    @property
    def num_heap_entries(self) -> int:
        """Entries of the heap, those left behind included."""
        return len(self._heap)

    def note_use(self, blocks: Iterable[KVCacheBlock]) -> None:
        """See the base class."""
        level_of = self._level_of
        for block in blocks:
            if block.content is not None:
                level_of[block.block_id] += 1

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """See the base class."""
        require_free(n, self.num_free_blocks)
        taken = self._empty.popleft_n(min(n, self._empty.num_free_blocks))
        while len(taken) < n:
            level = self._heap[0]
            queue = self._levels.get(level)
            if queue is None:
                heapq.heappop(self._heap)  # left behind when the level's last block was hit
                continue
            evicted = queue.popleft_n(min(n - len(taken), queue.num_free_blocks))
            for block in evicted:
                self._level_of[block.block_id] = 0
            taken += evicted
            if not queue.num_free_blocks:
                del self._levels[level]
                heapq.heappop(self._heap)
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """See the base class."""
        if block.content is None:
            self._empty.remove(block)
        else:
            self._leave_level(block)
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """See the base class."""
        level = self._level_of[block.block_id]
        queue = self._levels.get(level)
        if queue is None:
            queue = self._levels[level] = FreeKVCacheBlockQueue(())
            heapq.heappush(self._heap, level)
        queue.append(block)
        self.num_free_blocks += 1

    def prepend(self, block: KVCacheBlock) -> None:
        """See the base class."""
        self._empty.prepend(block)
        self.num_free_blocks += 1

    def emptied(self, block: KVCacheBlock) -> None:
        """See the base class."""
        if block.ref_cnt == 0:
            self._leave_level(block)
            self._empty.prepend(block)
        self._level_of[block.block_id] = 0

    def _leave_level(self, block: KVCacheBlock) -> None:
        if block.next_free_block is None:
            raise ValueError(f"expected a free block, got {block!r}")
        level = self._level_of[block.block_id]
        queue = self._levels[level]
        queue.remove(block)
        if queue.num_free_blocks:
            return
        del self._levels[level]
        if len(self._heap) > 2 * len(self._levels) + 64:
            self._heap = list(self._levels)
            heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        yield from self._empty
        for level in sorted(self._levels):
            yield from self._levels[level]


EVICTION_POLICIES: dict[str, Callable[[Iterable[KVCacheBlock]], EvictionPolicy]] = {
    "lru": FreeKVCacheBlockQueue,
    "lfu": LFUPolicy,
    "fifo": FIFOPolicy,
    "priority": PriorityPolicy,
}
