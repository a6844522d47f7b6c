"""An eviction policy of somebody else: last in, first out, which is what LRU is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.eviction_policy import EvictionPolicy
from kvmanager_service.core.free_block_queue import require_free


class MRUPolicy(EvictionPolicy):
    """Most recently freed first; the hooks it has no use for are left out. All operations are O(1).

    Interpreted, so the compiled core does not take it: tests that use it are marked `patches_core`.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._empty = dict.fromkeys(blocks)
        self._cached: dict[KVCacheBlock, None] = {}
        self.num_free_blocks = len(self._empty)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        require_free(n, self.num_free_blocks)
        self.num_free_blocks -= n
        return [(self._empty or self._cached).popitem()[0] for _ in range(n)]

    def remove(self, block: KVCacheBlock) -> None:
        del (self._empty if block in self._empty else self._cached)[block]
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        self._cached[block] = None
        self.num_free_blocks += 1

    def prepend(self, block: KVCacheBlock) -> None:
        self._empty[block] = None
        self.num_free_blocks += 1

    def emptied(self, block: KVCacheBlock) -> None:
        if block in self._cached:
            self.remove(block)
            self.prepend(block)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        yield from reversed(self._empty)
        yield from reversed(self._cached)
