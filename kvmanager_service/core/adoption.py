"""What a manager that restarts takes over of one group's blocks.

Station: called by `KVCacheManager.adopt` with the tags that `block_tag` reads; of several groups, `group_adoption` does
it. A block is adopted when it hashes to what its tag says and its parent is adopted already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import BlockHash, HashFunction, hash_block_tokens
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.request import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TaggedBlock:
    """A block an executor holds, with what an earlier manager noted on it; see `block_tag`.

    `serial` and `parent_serial` are those of `BlockContent`, the latter 0 for a first block.
    """

    block_id: int
    block_hash: BlockHash
    serial: int
    parent_serial: int
    token_bytes: bytes
    extra_keys: bytes


class Adoption:
    """Adopts blocks by their depth, so that none comes before its parent.

    Args:
        pool: where the blocks are free and empty.
        block_size: tokens per block.
        hash_function: the one the tags were made with.
    """

    def __init__(self, pool: BlockPool, block_size: int, hash_function: HashFunction) -> None:
        self._pool = pool
        self._block_bytes = block_size * TOKEN_BYTES
        self._hash_function = hash_function

    def adopt(self, tagged: Iterable[TaggedBlock]) -> int:
        """Adopt what is proved. Returns how many blocks that are; they are free, the deepest to be evicted first.

        A parent is named by its serial: another content with the same hash may have taken its place.
        """
        pool = self._pool
        children: dict[int, list[TaggedBlock]] = {}
        for tag in tagged:
            pool.next_serial = max(pool.next_serial, tag.serial + 1, tag.parent_serial + 1)
            children.setdefault(tag.parent_serial, []).append(tag)
        adopted: list[KVCacheBlock] = []
        level: dict[int, BlockContent | None] = {0: None}
        while level:
            following: dict[int, BlockContent | None] = {}
            for parent_serial, parent in level.items():
                for tag in children.pop(parent_serial, ()):
                    content = self._adopt_block(tag, parent)
                    if content is not None:
                        adopted.append(pool.blocks[tag.block_id])
                        following.setdefault(tag.serial, content)
            level = following
        pool.free_blocks(reversed(adopted))
        return len(adopted)

    def _adopt_block(self, tag: TaggedBlock, parent: BlockContent | None) -> BlockContent | None:
        """Take over one block. Returns its content, None when its tag does not hold."""
        parent_hash = None if parent is None else parent.block_hash
        is_sound = (
            0 < tag.block_id < len(self._pool.blocks)
            and tag.serial > 0
            and len(tag.token_bytes) == self._block_bytes
            and hash_block_tokens(self._hash_function, parent_hash, tag.token_bytes, tag.extra_keys) == tag.block_hash
        )
        if not is_sound:
            return None
        return adopt_block(self._pool, tag, parent)


def adopt_block(pool: BlockPool, tag: TaggedBlock, parent: BlockContent | None, serial: int = 0) -> BlockContent | None:
    """Take over a block that an executor still holds from an earlier manager. Its tag is proved by the caller.

    The block is referenced: `free_blocks` them all, deepest first, afterwards, so that they are evicted in the right
    order.

    Args:
        pool: where the block is.
        tag: the block's.
        parent: what its content follows from, known or adopted before.
        serial: of its content; 0 for what its tag says.

    Returns:
        The content, or None when the block is in use, cached already, or the hash belongs to another content.
    """
    block = pool.blocks[tag.block_id]
    if block is pool.null_block or block.ref_cnt or block.content is not None:
        return None
    pool.touch((block,))
    content = pool.cache_full_block(
        block, tag.block_hash, parent, tag.token_bytes, tag.extra_keys, serial=serial or tag.serial
    )
    if content is None:
        pool.free_blocks((block,))
    return content
