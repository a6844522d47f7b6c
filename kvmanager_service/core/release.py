"""How a request gives blocks back: in which order, and what it asks for those that stay cached.

Station: called by `KVCacheManager`, or `KVCacheCoordinator` and its `GroupSwaps`, whenever a request ends, is preempted
or leaves for the host; tells `BlockPool`, and through it the eviction policy and the history.

The deepest go first, of all groups: so the deepest part of a prefix is evicted first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.block_history import BlockMoment
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.kv_groups import KVGroup
from kvmanager_service.core.request import Request


def give_back(pool: BlockPool, request: Request, blocks: list[KVCacheBlock], first: int, block_size: int) -> None:
    """Take back blocks that are, or were, a request's one table from entry `first` on."""
    pool.note_use(blocks)
    if request.retention is None:
        pool.retain(blocks, request.retention_priority, 0.0)
    else:
        _retain_ranges(pool, request, blocks, first, block_size)
    pool.free_blocks(reversed(blocks))
    if pool.history is not None:
        pool.history.note_table(request.request_id, 0, blocks, BlockMoment.FREED)


def give_back_tables(
    pool: BlockPool, request: Request, groups: Sequence[KVGroup], kept: Collection[KVCacheBlock] = ()
) -> None:
    """Drop the references of a request's tables, one for each group, but for those of the blocks that are kept."""
    held = [
        (-(index + 1) * group.block_size, block)
        for group, table in zip(groups, request.tables, strict=False)
        for index, block in enumerate(table.blocks)
        if index >= table.first
    ]
    held.sort(key=_depth)
    blocks = [block for _, block in held]
    pool.note_use(blocks)
    if request.retention is None:
        pool.retain(blocks, request.retention_priority, 0.0)
    else:
        for group, table in zip(groups, request.tables, strict=False):
            _retain_ranges(pool, request, table.blocks[table.first :], table.first, group.block_size)
    pool.free_blocks([block for block in blocks if block not in kept] if kept else blocks)
    if pool.history is not None:
        for group_index, table in enumerate(request.tables):
            freed = [block for block in table.blocks[table.first :] if block not in kept]
            pool.history.note_table(request.request_id, group_index, freed, BlockMoment.FREED)


def _retain_ranges(
    pool: BlockPool, request: Request, blocks: Sequence[KVCacheBlock], first: int, block_size: int
) -> None:
    """Ask for each range of tokens what the request asks, of blocks that are its table from entry `first` on."""
    end = first + len(blocks)
    for one in request.retention or ():
        start, stop = one.start // block_size, -(-min(one.stop, end * block_size) // block_size)
        if start < end and stop > first:
            pool.retain(blocks[max(0, start - first) : stop - first], one.priority, one.duration)


def _depth(held: tuple[int, KVCacheBlock]) -> int:
    return held[0]
