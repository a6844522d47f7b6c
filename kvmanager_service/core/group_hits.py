"""What is cached of a request's prefix in several KV groups, and how long a hit all of them agree on.

Station: owned by `KVCacheCoordinator`, which keeps a request's prefixes up to date before it asks; looks blocks up by
`ContentLookup` and changes nothing. It knows what names the content of a table's entry, so whoever caches a block asks
for that, too.

A hit is a length that all groups agree on: each in turn shortens it to what it can go on from, until none does. The
length only falls, and a length at which no group shortens it is what they agree on: the longest, since no group passes
over one that it could go on from. Source: vLLM's hybrid KV cache coordinator, for the idea.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import BlockHash, HashFunction, default_hash, hash_block_tokens
from kvmanager_service.core.content_lookup import ContentLookup
from kvmanager_service.core.group_key import KEY_BYTES, group_key, has_group_key
from kvmanager_service.core.kv_groups import KVGroup, TableEntry
from kvmanager_service.core.request import Request


def _hash_in_group(hash_function: HashFunction, prefix_hash: BlockHash, key: bytes) -> BlockHash:
    """The hash of what ends at a prefix in the group with this key."""
    return hash_block_tokens(hash_function, prefix_hash, b"", key)


def parent_hash_of(
    content: BlockContent, parent: BlockContent, hash_function: HashFunction = default_hash
) -> BlockHash:
    """The hash of what comes before a content in its own group, given the content's parent.

    Where there are several groups that parent is a prefix, which is of no group and has another hash.
    """
    if not has_group_key(content):
        return parent.block_hash
    return _hash_in_group(hash_function, parent.block_hash, content.extra_keys[:KEY_BYTES])


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
        lookup: where cached blocks are found.
        groups: one object per group.
        hash_function: what finds candidates; see `block_hash`.

    Attributes:
        block_size: tokens that every hit is a multiple of, the least common multiple of the groups' block sizes.
        prefix_size: tokens per prefix, their greatest common divisor.
        group_keys: by group, the extra key that makes the same tokens in two groups two contents.
    """

    __slots__ = ("_groups", "_hash_function", "_lookup", "block_size", "group_keys", "prefix_size")

    def __init__(self, lookup: ContentLookup, groups: Sequence[KVGroup], hash_function: HashFunction) -> None:
        self._lookup = lookup
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
        block = self._lookup.get_cached_block(*self.key_of(request, group_index, index))
        if block is None or self._groups[group_index].can_share_within_step or not block.provisional_step:
            return block
        assert block.content is not None
        return next((other for other in block.content.blocks if not other.provisional_step), None)

    def cached_blocks(self, request: Request) -> list[KVCacheBlock]:
        """All blocks of the request's prefixes that are cached, in all groups; those its windows have left, too."""
        num_tokens = len(request.contents) * self.prefix_size
        return [
            block
            for group_index, group in enumerate(self._groups)
            for index in range(num_tokens // group.block_size)
            if (block := self._lookup.get_cached_block(*self.key_of(request, group_index, index))) is not None
        ]

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

    def name_of(self, request: Request, entry: TableEntry) -> BlockHash:
        """The hash of a table's entry. Only the request's hashes need be known as far as that, not its prefixes."""
        group_index, index = entry
        stop = (index + 1) * self._groups[group_index].block_size
        end = request.block_hashes[stop // self.prefix_size - 1]
        return _hash_in_group(self._hash_function, end, self.group_keys[group_index])

    def filled_block(self, request: Request, entry: TableEntry) -> KVCacheBlock | None:
        """A block that holds an entry and that no outstanding step has yet to fill; None where there is none."""
        group_index, index = entry
        if (index + 1) * self._groups[group_index].block_size > len(request.contents) * self.prefix_size:
            return None
        return self._lookup.get_filled_block(*self.key_of(request, group_index, index))

    def entries(self, num_tokens: int) -> list[TableEntry]:
        """All entries before position num_tokens that the token there reads, in order of depth.

        That is by where they end; of groups that end at the same place, by group.
        """
        found = [
            ((index + 1) * group.block_size, group_index, index)
            for group_index, group in enumerate(self._groups)
            for index in range(group.first_needed_block(num_tokens), group.num_blocks_for(num_tokens))
        ]
        found.sort()
        return [(group_index, index) for _, group_index, index in found]

    def prefix_at(self, request: Request, position: int) -> BlockContent:
        """The prefix that ends at a position, not 0; it is known."""
        return request.contents[position // self.prefix_size - 1]


__all__ = ["GroupHits", "GroupLookup", "parent_hash_of"]
