"""Nobody writes to a block that another table has: who is about to gets a copy, ordered in the next step.

Station: `KVCacheManager` and `GroupForks` ask it for the block to write to; `StepPlan` takes the orders, and others add
theirs. The last holder writes in place.

Source: vLLM's paper (Kwon et al., SOSP 2023) for copy on write of blocks.
"""

from __future__ import annotations

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.step import BlockCopy, CopyDirection


class CopyOnWrite:
    """Blocks to write to, and the copies that takes.

    Args:
        pool: where the blocks are.

    Attributes:
        orders: copies for the next step, in order; `take` empties it.
    """

    __slots__ = ("_pool", "orders")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.orders: list[BlockCopy] = []

    def own(self, block: KVCacheBlock) -> KVCacheBlock:
        """Let go of a block that is about to be written to, unless no other table has it.

        Returns:
            The block to write to: the same, emptied of content, or a free one that is to become its copy; one is there.
        """
        if block.ref_cnt == 1:
            self._pool.overwrite(block)
            return block
        (own,) = self._pool.get_new_blocks(1)
        self.orders.append(BlockCopy(CopyDirection.DEVICE_TO_DEVICE, block.block_id, own.block_id))
        self._pool.free_blocks((block,))
        return own

    def take(self) -> list[BlockCopy]:
        """The copies that the step being made must order before its rows write."""
        orders, self.orders = self.orders, []
        return orders
