"""Verified prefixes: what the blocks of several groups have in common.

Station: owned by `KVCacheCoordinator`. A full block of any group holds what follows from a prefix: the tokens [0, p)
and what else decides their K/V. The ledger has one object for each prefix, so that the object's identity *is* the
prefix, whether or not any block of it is still cached: of a sliding window, the first blocks are not. A prefix is a
`BlockContent` without blocks of its own; the contents of groups have it as their parent.

It is kept while a cached block ends at it or at a longer one, or a request goes on from it. That is not counted but
swept: when there are twice as many as the last sweep left, all that nobody needs are forgotten.
"""

from __future__ import annotations

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import BlockHash
from kvmanager_service.core.block_pool import BlockPool

_KNOWN = KVCacheBlock(-1)
"""Holds every prefix that is known: a content whose parent no block holds is an orphan."""


class PrefixLedger:
    """All known prefixes, by chain hash.

    Args:
        pool: whose contents have them as parents; serials of both are drawn from it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._prefixes: dict[BlockHash, BlockContent] = {}
        self._sweep_above = 2 * len(pool.blocks)

    def __len__(self) -> int:
        return len(self._prefixes)

    def extend(
        self,
        parent: BlockContent | None,
        block_hash: BlockHash,
        token_bytes: bytes,
        extra_keys: bytes,
    ) -> BlockContent | None:
        """The prefix that adds exactly these tokens to exactly that one, made if it is not known.

        Args:
            parent: the shorter prefix, None for none; it is known.
            block_hash: chain hash of the longer one.
            token_bytes: the tokens added.
            extra_keys: what else decides their K/V.

        Returns:
            The prefix, or None when another one has this hash.
        """
        prefix = self._prefixes.get(block_hash)
        if prefix is not None:
            if prefix.is_same(parent, token_bytes, extra_keys):
                return prefix
            if not prefix.is_orphan:
                return None
            self._forget(prefix)
        prefix = BlockContent(self._pool.next_serial, block_hash, parent, token_bytes, extra_keys)
        self._pool.next_serial += 1
        prefix.held_by(_KNOWN)
        self._prefixes[block_hash] = prefix
        return prefix

    def forget(self, serials: set[int]) -> None:
        """Forget the prefixes of these serials and all that are longer: what has them as parents is found no more."""
        for prefix in list(self._prefixes.values()):  # parents come before their children
            if prefix.serial in serials or prefix.is_orphan:
                self._forget(prefix)

    @property
    def needs_sweep(self) -> bool:
        """Whether there are many more than the last sweep left."""
        return len(self._prefixes) > self._sweep_above

    def sweep(self, needed: set[int]) -> None:
        """Forget all prefixes but those of these serials and what they begin with."""
        for prefix in reversed(list(self._prefixes.values())):
            if prefix.serial not in needed:
                self._forget(prefix)
            elif prefix.parent is not None:
                needed.add(prefix.parent.serial)
        self._sweep_above = 2 * max(len(self._prefixes), len(self._pool.blocks))

    def _forget(self, prefix: BlockContent) -> None:
        prefix.left_by(_KNOWN)
        del self._prefixes[prefix.block_hash]
