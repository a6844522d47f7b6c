"""The queue of blocks that no table references, in the order they will be handed out: the LRU policy.

Station: owned by `BlockPool`, or by one of the `eviction_policies` that are made of such queues. The list is intrusive
(the links are the blocks' own), so taking a block out of the middle, as a prefix hit does, is O(1) and allocates
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.eviction_policy import EvictionPolicy


def require_free(n: int, num_free_blocks: int) -> None:
    """Raise IndexError when fewer than n blocks are free."""
    if n > num_free_blocks:
        raise IndexError(f"expected at least {n} free blocks, got {num_free_blocks}")


class FreeKVCacheBlockQueue(EvictionPolicy):
    """A doubly linked list between two sentinels; the head is handed out first. All operations are O(1).

    Invariants:
        `num_free_blocks` is the list's length; a block is in at most once; blocks outside have no links.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        for block in blocks:
            self.append(block)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first n blocks out, in order.

        Raises:
            IndexError: fewer than n blocks are free; nothing is taken.
        """
        require_free(n, self.num_free_blocks)
        taken = []
        block = self._head.next_free_block
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        assert block is not None
        self._head.next_free_block = block
        block.prev_free_block = self._head
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the middle. Raises ValueError when it is not in the queue."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise ValueError(f"expected a block in the free queue, got {block!r}")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the tail: it is handed out last."""
        last = self._tail.prev_free_block
        assert last is not None
        self._link(last, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block at the head: it is handed out next."""
        first = self._head.next_free_block
        assert first is not None
        self._link(self._head, block, first)

    def emptied(self, block: KVCacheBlock) -> None:
        """A block lost its content; a free one goes to the head."""
        if block.ref_cnt == 0:
            self.remove(block)
            self.prepend(block)

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        if block.next_free_block is not None:
            raise ValueError(f"expected a block outside the free queue, got {block!r}")
        before.next_free_block = block
        block.prev_free_block = before
        block.next_free_block = after
        after.prev_free_block = block
        self.num_free_blocks += 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """From head to tail; for tests and checks."""
        block = self._head.next_free_block
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free_block
