"""What a manager that restarts may take over of several groups' blocks.

Station: made by `KVCacheCoordinator.adopt` for the tags it is given. A block is adopted when the prefix it starts at,
or the one it ends at, is proved by adopted blocks from the first token on, of whichever groups, and it hashes to what
its tag says. A tag calls both by their serials; a prefix is proved once a tag that holds calls it by one.

    full attention, 8 tokens   [0 ───────── 8)   calls 0 and 8; there is a prefix at 4, which it does not call
    a window, 4 tokens               [4 ─── 8)   ends at 8, so what it calls where it starts is the prefix at 4

So full attention proves what windows and states have kept: whatever a hit needs of them ends where a block of full
attention does, or where another block that is needed starts. In a model without it, a chain whose first blocks are gone
is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmanager_service.core.adoption import TaggedBlock, adopt_block
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import BlockHash, HashFunction, hash_block_tokens
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.prefix_ledger import PrefixLedger
from kvmanager_service.core.request import TOKEN_BYTES


class GroupAdoption:
    """Adopts blocks from proved prefixes on: those that start at one, and those that end at one.

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
        # Of blocks of one size, none ends at a proved prefix and does not start at one.
        self._are_sizes_unequal = len(set(block_sizes.values())) > 1
        self._starting: dict[int, list[TaggedBlock]] = {}
        self._ending: dict[int, list[TaggedBlock]] = {}
        self._proved: dict[int, tuple[int, BlockContent | None]] = {0: (0, None)}  # token bytes, prefix; by serial
        self._unfollowed = [0]
        self._adopted: list[tuple[int, KVCacheBlock]] = []

    def adopt(self, tagged: Iterable[TaggedBlock]) -> int:
        """Adopt what is proved. Returns how many blocks that are; they are free, the deepest to be evicted first."""
        pool = self._pool
        for tag in tagged:
            pool.next_serial = max(pool.next_serial, tag.serial + 1, tag.parent_serial + 1)
            self._starting.setdefault(tag.parent_serial, []).append(tag)
            if self._are_sizes_unequal:
                self._ending.setdefault(tag.serial, []).append(tag)
        while self._unfollowed:
            serial = self._unfollowed.pop()
            position, prefix = self._proved[serial]
            for tag in self._starting.pop(serial, ()):
                if self._is_possible(tag):
                    self._adopt_block(tag, self._prefixes_after(prefix, tag), position + len(tag.token_bytes))
            for tag in self._ending.pop(serial, ()):
                if self._is_possible(tag):
                    self._adopt_block(tag, self._prefixes_before(prefix, tag), position)
        self._adopted.sort(key=lambda end_and_block: end_and_block[0])
        pool.free_blocks([block for _, block in reversed(self._adopted)])
        return len(self._adopted)

    def _is_possible(self, tag: TaggedBlock) -> bool:
        """Whether its block could hold anything of its size, and nothing was adopted there."""
        blocks = self._pool.blocks
        return (
            0 < tag.block_id < len(blocks)
            and blocks[tag.block_id].content is None
            and len(tag.token_bytes) == self._block_sizes.get(tag.extra_keys[: self._key_bytes], -1) * TOKEN_BYTES
        )

    def _prefixes_after(self, start: BlockContent | None, tag: TaggedBlock) -> list[BlockContent]:
        """The prefixes that end in a block, given the one it starts at; none when its tag does not hold."""
        extra_keys = tag.extra_keys[self._key_bytes :]
        if start is not None and extra_keys:
            return []
        size, prefix_hash = self._prefix_bytes, None if start is None else start.block_hash
        links: list[tuple[BlockHash, bytes, bytes]] = []
        for place in range(0, len(tag.token_bytes), size):
            tokens, keys = tag.token_bytes[place : place + size], b"" if place else extra_keys
            prefix_hash = hash_block_tokens(self._hash_function, prefix_hash, tokens, keys)
            links.append((prefix_hash, tokens, keys))
        prefixes: list[BlockContent] = []
        if self._has_hash_of(tag, prefix_hash):
            prefix = start
            for link_hash, tokens, keys in links:
                prefix = self._ledger.extend(prefix, link_hash, tokens, keys)
                if prefix is None:
                    return []
                prefixes.append(prefix)
        return prefixes

    def _prefixes_before(self, end: BlockContent | None, tag: TaggedBlock) -> list[BlockContent]:
        """The prefixes that end in a block, given the last of them; none when its tag does not hold."""
        size, prefix, prefixes = self._prefix_bytes, end, list[BlockContent]()
        for stop in range(len(tag.token_bytes), 0, -size):
            keys = tag.extra_keys[self._key_bytes :] if stop == size else b""
            if prefix is None or prefix.token_bytes != tag.token_bytes[stop - size : stop] or prefix.extra_keys != keys:
                return []
            prefixes.append(prefix)
            prefix = prefix.parent
        prefixes.reverse()
        return prefixes if end is not None and self._has_hash_of(tag, end.block_hash) else []

    def _has_hash_of(self, tag: TaggedBlock, prefix_hash: BlockHash | None) -> bool:
        """Whether it is that of a block of its group that ends at a prefix."""
        group_key = tag.extra_keys[: self._key_bytes]
        return hash_block_tokens(self._hash_function, prefix_hash, b"", group_key) == tag.block_hash

    def _adopt_block(self, tag: TaggedBlock, prefixes: list[BlockContent], end: int) -> None:
        """Take over one block, given the prefixes that end in it; nothing for none, or when it calls them otherwise."""
        if not prefixes:
            return
        start, last = prefixes[0].parent, prefixes[-1]
        if not (self._may_be_called(start, tag.parent_serial) and self._may_be_called(last, tag.serial)):
            return
        self._call(start, tag.parent_serial, end - len(tag.token_bytes))
        self._call(last, tag.serial, end)
        content = adopt_block(self._pool, tag, start, last.serial)
        if content is not None:
            self._adopted.append((end, self._pool.blocks[tag.block_id]))

    def _may_be_called(self, prefix: BlockContent | None, serial: int) -> bool:
        """Whether no other prefix is. One can have two names: it was forgotten between them."""
        return self._proved[serial][1] is prefix if serial in self._proved else prefix is not None

    def _call(self, prefix: BlockContent | None, serial: int, position: int) -> None:
        """A tag that holds calls a prefix by this serial, so it is proved; its first name is the one it keeps."""
        if serial in self._proved or prefix is None:
            return
        if prefix.serial not in self._proved:
            prefix.serial = serial
        self._proved[serial] = position, prefix
        self._unfollowed.append(serial)


__all__ = ["GroupAdoption"]
