"""One block's bookkeeping, and what a cached block was proved to hold."""

from __future__ import annotations

from kvmanager_service.core.block_hash import BlockHash


class BlockContent:
    """What a full block holds: tokens in the context of a verified parent.

    Two physical blocks with the same tokens, extra keys and parent share one `BlockContent`, so the object's identity
    *is* the identity of the content, and a chain of contents is a verified prefix.

    Nearly always one block holds it. So there is no list until a second one does: for each cached block this is the one
    object that the cyclic garbage collector has to walk over.

    Attributes:
        block_hash: finds the content; never proves it.
        parent: the content of the block before, None for a first block.
        token_bytes: the block's token ids, little-endian int32.
        extra_keys: what else decides the K/V; see `block_hash.encode_extra_keys`.
        block: of the physical blocks that hold it now, the one that has for longest; None once all were evicted.
        successor: of the contents whose parent this is, one to try first; only between two that blocks hold. A walk
            along a prefix follows it, through memory as the prefix was laid down, and asks the index where it ends.
        serial: names the content on a block's tag, where its identity can not go: unlike a hash, never two of them.
    """

    __slots__ = ("_twins", "block", "block_hash", "extra_keys", "parent", "serial", "successor", "token_bytes")

    def __init__(
        self,
        serial: int,
        block_hash: BlockHash,
        parent: BlockContent | None,
        token_bytes: bytes,
        extra_keys: bytes,
        *,
        block: KVCacheBlock | None = None,
    ) -> None:
        # In this order, what a walk reads lies side by side in the compiled object.
        self.parent = parent
        self.successor: BlockContent | None = None
        self.token_bytes = token_bytes
        self.extra_keys = extra_keys
        self.block = block
        self.block_hash = block_hash
        self.serial = serial
        self._twins: list[KVCacheBlock] | None = None

    @property
    def blocks(self) -> list[KVCacheBlock]:
        """All physical blocks that hold it now, in the order in which they came to."""
        if self.block is None:
            return []
        return [self.block] if self._twins is None else [self.block, *self._twins]

    def held_by(self, block: KVCacheBlock) -> None:
        """One more block holds it."""
        if self.block is None:
            self.block = block
        elif self._twins is None:
            self._twins = [block]
        else:
            self._twins.append(block)

    def left_by(self, block: KVCacheBlock) -> None:
        """A block that holds it does not any more."""
        twins = self._twins
        if twins is None:
            assert self.block is block
            self.block = None
            self._leave_chain()
            return
        if self.block is block:
            self.block = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            self._twins = None

    def precede(self, content: BlockContent) -> None:
        """A content that blocks hold has this as its parent: it comes first, while blocks hold this, too."""
        if self.block is not None:
            self.successor = content

    def _leave_chain(self) -> None:
        """No block holds it any more: nobody is led to it or on from it, and no circle of references keeps it alive."""
        self.successor = None
        parent = self.parent
        if parent is not None and parent.successor is self:
            parent.successor = None

    @property
    def is_orphan(self) -> bool:
        """Whether no block holds its parent's content any more: then nothing can reach it, now or later."""
        return self.parent is not None and self.parent.block is None

    def is_same(self, parent: BlockContent | None, token_bytes: bytes, extra_keys: bytes) -> bool:
        """Whether this content is exactly these tokens and keys after exactly that parent."""
        return self.parent is parent and self.token_bytes == token_bytes and self.extra_keys == extra_keys


class KVCacheBlock:
    """One physical block.

    Attributes:
        block_id: index into the executor's cache.
        ref_cnt: how many block tables reference it.
        content: what it was proved or is about to hold; None for a block that is partial or not cached.
        provisional_step: the step that fills it and is not acknowledged yet; 0 once committed.
        prev_free_block, next_free_block: neighbours in the free queue; None outside it.
    """

    __slots__ = ("block_id", "content", "next_free_block", "prev_free_block", "provisional_step", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.content: BlockContent | None = None
        self.provisional_step = 0
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None

    @property
    def block_hash(self) -> BlockHash | None:
        """The chain hash of a full, cached block; None otherwise."""
        return None if self.content is None else self.content.block_hash

    def __repr__(self) -> str:
        state = f"ref_cnt={self.ref_cnt}"
        if self.content is not None:
            state += f", block_hash={self.content.block_hash.hex()[:8]}"
        return f"KVCacheBlock({self.block_id}, {state})"
