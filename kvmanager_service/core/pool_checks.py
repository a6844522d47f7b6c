"""Whether a pool's books are right: the invariants that `BlockPool` states, checked from the blocks up.

Station: called by `BlockPool.check_integrity`, in tests and simulation, never while requests are served. It counts anew
what the pool keeps count of, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import BlockHash
from kvmanager_service.core.eviction_policy import EvictionPolicy
from kvmanager_service.core.step_fills import StepFills


def check_references(
    blocks: Sequence[KVCacheBlock], free_queue: EvictionPolicy, tables: Iterable[Sequence[KVCacheBlock]]
) -> None:
    """Check that each block is referenced as often as it is in tables, and free if that is never (1, 2 and 6).

    Args:
        blocks: all of the pool, the null block first.
        free_queue: those that can be handed out.
        tables: all that hold blocks.

    Raises:
        AssertionError: an invariant does not hold; the message names the block.
    """
    references = [0] * len(blocks)
    for table in tables:
        for block in table:
            references[block.block_id] += 1
    free = list(free_queue)
    in_queue = {block.block_id for block in free}
    assert len(in_queue) == len(free) == free_queue.num_free_blocks, "a block is in the free queue twice"
    assert blocks[0].block_id not in in_queue, "the null block is in the free queue"
    held = [block.content is not None for block in free]
    assert held == sorted(held), "a block with content would be handed out before one without"
    for block in blocks[1:]:
        assert block.ref_cnt == references[block.block_id], f"{block!r} has {references[block.block_id]} references"
        assert (block.ref_cnt == 0) == (block.block_id in in_queue), f"{block!r} free queue does not match ref_cnt"


def check_contents(
    blocks: Sequence[KVCacheBlock],
    contents: Mapping[BlockHash, BlockContent],
    fills: StepFills,
    num_cached_blocks: int,
) -> None:
    """Check that blocks and contents agree on who holds what (3, 4 and 5).

    Args:
        blocks: all of the pool, the null block first.
        contents: by hash, what can be found.
        fills: what steps that are out are to fill.
        num_cached_blocks: how many blocks with content the pool has counted.

    Raises:
        AssertionError: an invariant does not hold; the message names the block.
    """
    cached = 0
    for block in blocks[1:]:
        if block.content is not None:
            cached += 1
            assert block in block.content.blocks, f"{block!r} is not listed by its content"
            assert contents.get(block.content.block_hash) is block.content, f"{block!r} lost"
        if block.provisional_step:
            assert block.content is not None, f"{block!r} is provisional without content"
            assert block.provisional_step in fills, f"{block!r} is provisional for a step that ended"
    assert cached == num_cached_blocks, f"{cached} cached blocks, counted {num_cached_blocks}"
    for content in contents.values():
        successor = content.successor
        if successor is not None:
            assert successor.parent is content, f"{content.block!r} is followed by what has another parent"
            assert successor.block is not None, f"{content.block!r} is followed by what no block holds"
    listed = sum(len(content.blocks) for content in contents.values())
    assert listed == cached, f"contents list {listed} blocks, {cached} have content"
