"""What a pool's blocks hold, found by hash and proved by content.

Station: owned by `BlockPool`, which alone changes what is found; asked by `KVCacheManager`, and for several KV groups
by `GroupHits` and `GroupAdmission`. It knows no request and no free queue. What it finds is referenced by nobody yet:
`BlockPool.touch` does that.

A hash names a candidate. A hit is a content with exactly the same tokens and extra keys after exactly the same parent,
which was found so itself: a collision is a miss.
"""

from __future__ import annotations

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import BlockHash


class ContentLookup:
    """Finds contents that blocks hold; changes nothing but which successor a content names.

    Args:
        contents: by hash, those that blocks hold; it changes with them.
    """

    __slots__ = ("_contents",)

    def __init__(self, contents: dict[BlockHash, BlockContent]) -> None:
        self._contents = contents

    def get_cached_block(
        self, block_hash: BlockHash, parent: BlockContent | None, token_bytes: bytes, extra_keys: bytes
    ) -> KVCacheBlock | None:
        """Find a block that holds exactly these tokens after exactly that parent.

        Returns:
            The block, or None for a miss; a hash collision is a miss.
        """
        content = self._contents.get(block_hash)
        if content is None or not content.is_same(parent, token_bytes, extra_keys):
            return None
        return content.block

    def follow(
        self, parent: BlockContent | None, block_hash: BlockHash, token_bytes: bytes, extra_keys: bytes
    ) -> BlockContent | None:
        """The same content that `get_cached_block` finds a block of, by way of the parent's successor if it can.

        For a walk from block to block of a prefix. What is found is the parent's successor from then on.

        Args:
            parent: what the walk has come to: a content that a block holds; None where it begins.
            block_hash: chain hash of these tokens after it.
            token_bytes: the next block's tokens.
            extra_keys: its extra keys.

        Returns:
            The content, or None for a miss.
        """
        if parent is not None:
            successor = parent.successor
            if successor is not None and successor.is_same(parent, token_bytes, extra_keys):
                return successor
        content = self._contents.get(block_hash)
        if content is None or not content.is_same(parent, token_bytes, extra_keys):
            return None
        if parent is not None:
            parent.precede(content)
        return content

    def get_filled_block(
        self, block_hash: BlockHash, parent: BlockContent | None, token_bytes: bytes, extra_keys: bytes
    ) -> KVCacheBlock | None:
        """As `get_cached_block`, but a block whose content no outstanding step has yet to fill."""
        content = self._contents.get(block_hash)
        if content is None or not content.is_same(parent, token_bytes, extra_keys):
            return None
        return next((block for block in content.blocks if not block.provisional_step), None)

    def may_be_held(self, block_hash: BlockHash) -> bool:
        """Whether a table references a block with this hash. It may hold something else: a yes proves nothing."""
        content = self._contents.get(block_hash)
        return content is not None and any(block.ref_cnt for block in content.blocks)
