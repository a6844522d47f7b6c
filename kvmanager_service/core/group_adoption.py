"""What a manager that restarts may take over of several groups' blocks.

Station: made by `KVCacheCoordinator.adopt` for the tags it is given. A block is adopted when the prefix it starts at is
proved by adopted blocks from the first token on, of whichever groups, and it hashes to what its tag says. A prefix is
named by its serial: a block's is that of the prefix at its end, its parent's that of the one at its start. So full
attention proves what windows have kept; in a model without it, a chain whose first blocks are gone is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from kvmanager_service.core.adoption import TaggedBlock, adopt_block
from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_hash import HashFunction, hash_block_tokens
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.prefix_ledger import PrefixLedger
from kvmanager_service.core.request import TOKEN_BYTES


class GroupAdoption:
    """Adopts blocks by the position of their end, so that no prefix is gone through before the block that names it.

    Args:
        pool: where the blocks are free and empty.
        ledger: where their prefixes become known.
        block_sizes: tokens per block, by the extra keys that name a group.
        prefix_size: tokens per prefix.
        hash_function: the one the tags were made with.
    """

    def __init__(
        self,
        pool: BlockPool,
        ledger: PrefixLedger,
        block_sizes: dict[bytes, int],
        prefix_size: int,
        hash_function: HashFunction,
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._block_sizes = block_sizes
        self._key_bytes = len(next(iter(block_sizes)))
        self._prefix_bytes = prefix_size * TOKEN_BYTES
        self._hash_function = hash_function
        self._children: dict[int, list[TaggedBlock]] = {}
        self._pending: list[tuple[int, int, TaggedBlock, BlockContent | None]] = []
        self._num_followed = 0

    def adopt(self, tagged: Iterable[TaggedBlock]) -> int:
        """Adopt what is proved. Returns how many blocks that are; they are free, the deepest to be evicted first."""
        pool = self._pool
        for tag in tagged:
            pool.next_serial = max(pool.next_serial, tag.serial + 1, tag.parent_serial + 1)
            self._children.setdefault(tag.parent_serial, []).append(tag)
        adopted = []
        self._follow(0, 0, None)
        while self._pending:
            end, _, tag, parent = heapq.heappop(self._pending)
            prefix = self._adopt_block(tag, parent)
            if prefix is not None:
                adopted.append(pool.blocks[tag.block_id])
                self._follow(end, tag.serial, prefix)
        pool.free_blocks(reversed(adopted))
        return len(adopted)

    def _follow(self, end: int, serial: int, prefix: BlockContent | None) -> None:
        """A prefix is proved, of `end` token bytes: the blocks that start at it may be adopted."""
        for tag in self._children.pop(serial, ()):
            heapq.heappush(self._pending, (end + len(tag.token_bytes), self._num_followed, tag, prefix))
            self._num_followed += 1

    def _adopt_block(self, tag: TaggedBlock, parent: BlockContent | None) -> BlockContent | None:
        """Take over one block. Returns the prefix at its end, None when its tag does not hold."""
        group_key, extra_keys = tag.extra_keys[: self._key_bytes], tag.extra_keys[self._key_bytes :]
        is_sound = (
            0 < tag.block_id < len(self._pool.blocks)
            and tag.serial > 0
            and len(tag.token_bytes) == self._block_sizes.get(group_key, 0) * TOKEN_BYTES
            and (parent is None or not extra_keys)
        )
        prefix = self._prefix_at_end(tag, parent, extra_keys) if is_sound else None
        if (
            prefix is None
            or prefix.serial != tag.serial
            or hash_block_tokens(self._hash_function, prefix.block_hash, b"", group_key) != tag.block_hash
        ):
            return None
        content = adopt_block(self._pool, tag, parent)
        return None if content is None else prefix

    def _prefix_at_end(self, tag: TaggedBlock, parent: BlockContent | None, extra_keys: bytes) -> BlockContent | None:
        prefix, size, length = parent, self._prefix_bytes, len(tag.token_bytes)
        for start in range(0, length, size):
            tokens = tag.token_bytes[start : start + size]
            keys = b"" if start else extra_keys
            prefix_hash = hash_block_tokens(
                self._hash_function, None if prefix is None else prefix.block_hash, tokens, keys
            )
            serial = tag.serial if start + size == length else 0
            prefix = self._ledger.extend(prefix, prefix_hash, tokens, keys, serial=serial)
            if prefix is None:
                return None
        return prefix
