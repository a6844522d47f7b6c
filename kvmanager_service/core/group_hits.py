"""What is cached of a request's prefix in several KV groups, and how long a hit all of them agree on.

Station: owned by `KVCacheCoordinator`, which keeps a request's prefixes up to date before it asks; reads `BlockPool`
and changes nothing. It knows what names the content of a table's entry, so whoever caches a block asks for that, too.

A hit is a length that all groups agree on: each in turn shortens it to what it can go on from, until none does. The
length only falls, and a length at which no group shortens it is what they agree on: the longest, since no group passes
over one that it could go on from. Source: vLLM's hybrid KV cache coordinator, for the idea.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm
from typing import Final

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import (
    BlockHash,
    HashFunction,
    KeyDomain,
    default_hash,
    encode_extra_keys,
    hash_block_tokens,
)
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.kv_groups import KVGroup
from kvmanager_service.core.request import Request

_INDEX_BYTES: Final = 2


def group_key(index: int) -> bytes:
    """The extra key that a content of this group begins with."""
    return encode_extra_keys(((KeyDomain.KV_GROUP, index.to_bytes(_INDEX_BYTES, "little")),))


_KEY_BYTES: Final = len(group_key(0))
_KEY_HEAD: Final = group_key(0)[:-_INDEX_BYTES]


def _hash_in_group(hash_function: HashFunction, prefix_hash: BlockHash, key: bytes) -> BlockHash:
    """The hash of what ends at a prefix in the group with this key."""
    return hash_block_tokens(hash_function, prefix_hash, b"", key)


def group_of(content: BlockContent) -> int:
    """The KV group of a content; 0 where there is only one, whose contents have no key that says so."""
    keys = content.extra_keys
    return int.from_bytes(keys[_KEY_BYTES - _INDEX_BYTES : _KEY_BYTES], "little") if keys.startswith(_KEY_HEAD) else 0


def parent_hash_of(
    content: BlockContent, parent: BlockContent, hash_function: HashFunction = default_hash
) -> BlockHash:
    """The hash of what comes before a content in its own group, given the content's parent.

    Where there are several groups that parent is a prefix, which is of no group and has another hash.
    """
    if not content.extra_keys.startswith(_KEY_HEAD):
        return parent.block_hash
    return _hash_in_group(hash_function, parent.block_hash, content.extra_keys[:_KEY_BYTES])


class GroupLookup:
    """The cached blocks of one request's prefix in one group, each looked up once at most."""

    __slots__ = ("_found", "_group_index", "_hits", "_request")

    def __init__(self, hits: GroupHits, request: Request, group_index: int) -> None:
        self._hits = hits
        self._request = request
        self._group_index = group_index
        self._found: dict[int, KVCacheBlock | None] = {}

    def block(self, index: int) -> KVCacheBlock | None:
        """The cached block of a table index, None for a miss."""
        if index not in self._found:
            self._found[index] = self._hits.cached_block(self._request, self._group_index, index)
        return self._found[index]


class GroupHits:
    """Finds hits. Of every request it is asked about, `contents` are the prefixes, as many as are known.

    Args:
        pool: where blocks are cached.
        groups: one object per group.
        hash_function: what finds candidates; see `block_hash`.

    Attributes:
        block_size: tokens that every hit is a multiple of, the least common multiple of the groups' block sizes.
        prefix_size: tokens per prefix, their greatest common divisor.
        group_keys: by group, the extra key that makes the same tokens in two groups two contents.
    """

    __slots__ = ("_groups", "_hash_function", "_pool", "block_size", "group_keys", "prefix_size")

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup], hash_function: HashFunction) -> None:
        self._pool = pool
        self._groups = list(groups)
        self._hash_function = hash_function
        self.block_size = lcm(*(group.block_size for group in groups))
        self.prefix_size = gcd(*(group.block_size for group in groups))
        self.group_keys = [group_key(index) for index in range(len(groups))]

    def lookups(self, request: Request) -> list[GroupLookup]:
        """One per group, for one search and what follows from it; stale once the pool changes."""
        return [GroupLookup(self, request, index) for index in range(len(self._groups))]

    def longest(self, request: Request, lookups: Sequence[GroupLookup]) -> int:
        """The longest cached prefix, in tokens, from which all groups can go on; never the whole sequence."""
        known = min(request.num_tokens - 1, len(request.contents) * self.prefix_size)
        length = known // self.block_size * self.block_size
        while True:
            before = length
            for group, lookup in zip(self._groups, lookups, strict=True):
                length = group.longest_hit(lookup.block, length, self.block_size)
            if length == before:
                return length

    def cached_block(self, request: Request, group_index: int, index: int) -> KVCacheBlock | None:
        """A block that holds entry `index` of the request's table in a group, None for a miss; its prefix is known."""
        block = self._pool.get_cached_block(*self.key_of(request, group_index, index))
        if block is None or self._groups[group_index].can_share_within_step or not block.provisional_step:
            return block
        assert block.content is not None
        return next((other for other in block.content.blocks if not other.provisional_step), None)

    def key_of(
        self, request: Request, group_index: int, index: int
    ) -> tuple[BlockHash, BlockContent | None, bytes, bytes]:
        """What names the content of a table's entry: hash, parent, tokens, extra keys. Its prefix is known."""
        size = self._groups[group_index].block_size
        start, stop = index * size, (index + 1) * size
        return (
            self.hash_of(request, group_index, stop),
            self.prefix_at(request, start) if start else None,
            request.tokens(start, stop),
            self.group_keys[group_index] + request.keys_of_block(index, size),
        )

    def hash_of(self, request: Request, group_index: int, stop: int) -> BlockHash:
        """The hash of a group's content that ends at position `stop`; the prefix that ends there is known."""
        end = self.prefix_at(request, stop).block_hash
        return _hash_in_group(self._hash_function, end, self.group_keys[group_index])

    def prefix_at(self, request: Request, position: int) -> BlockContent:
        """The prefix that ends at a position, not 0; it is known."""
        return request.contents[position // self.prefix_size - 1]


__all__ = ["GroupHits", "GroupLookup", "group_key", "group_of", "parent_hash_of"]
