"""How the tables of a request begin, in several KV groups: what it hits, and which free blocks that takes.

Station: made by `KVCacheCoordinator`, which asks it for every request without blocks. It is to admission what
`group_hits` is to hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.block_history import BlockMoment
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.group_hits import GroupHits, GroupLookup
from kvmanager_service.core.group_prefixes import GroupPrefixes
from kvmanager_service.core.kv_groups import GroupTable, KVGroup
from kvmanager_service.core.request import Request


class _Beginning:
    """One table of a request that is about to be admitted: null entries, blocks found in the cache, new ones."""

    __slots__ = ("first", "found", "num_new")

    def __init__(self, first: int, found: list[KVCacheBlock], num_new: int) -> None:
        self.first = first
        self.found = found
        self.num_new = num_new


class GroupAdmission:
    """Gives requests their first blocks.

    Args:
        pool: where the blocks are.
        groups: as in the coordinator.
        hits: finds what is cached.
        prefixes: lets requests know their prefixes.
        longest_chunk: most tokens of one request in a step.
        enable_caching: whether there are hits at all.
    """

    __slots__ = ("_enable_caching", "_full_groups", "_groups", "_hits", "_longest_chunk", "_pool", "_prefixes")

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[KVGroup],
        hits: GroupHits,
        prefixes: GroupPrefixes,
        *,
        longest_chunk: int,
        enable_caching: bool,
    ) -> None:
        self._pool = pool
        self._groups = list(groups)
        self._hits = hits
        self._prefixes = prefixes
        self._longest_chunk = longest_chunk
        self._enable_caching = enable_caching
        self._full_groups = [index for index, group in enumerate(groups) if group.reach is None]

    def longest_hit(self, request: Request) -> int:
        """The longest cached prefix, in tokens, from which all groups can go on."""
        return self._search(request, self._hits.lookups(request))

    def _search(self, request: Request, lookups: list[GroupLookup]) -> int:
        if not self._enable_caching:
            return 0
        self._prefixes.update(request)
        return self._hits.longest(request, lookups)

    def admit(self, request: Request, reserve: int) -> bool:
        """Give a request its tables, if that leaves `reserve` blocks free; see `KVCacheCoordinator.allocate_sequence`.

        Returns:
            False when too few blocks are free; then nothing at all has changed.
        """
        if not self.may_fit(request, reserve):
            return False
        pool = self._pool
        hit, beginnings = self._lay_out(request)
        if _num_taken(beginnings) + reserve > pool.num_free_blocks:
            return False
        for beginning in beginnings:
            pool.touch(beginning.found)
        for group_index, beginning in enumerate(beginnings):
            table = GroupTable(self._groups[group_index], pool.null_block, beginning.first)
            table.extend(beginning.found)
            table.cached_to(len(table.blocks))
            new = pool.get_new_blocks(beginning.num_new)
            table.extend(new)
            request.tables.append(table)
            if pool.history is not None:
                pool.history.note_table(request.request_id, group_index, beginning.found, BlockMoment.HIT)
                pool.history.note_table(request.request_id, group_index, new, BlockMoment.ALLOCATED)
        request.num_computed_tokens = hit
        return True

    def may_fit(self, request: Request, reserve: int) -> bool:
        """Whether a waiting request may find room. A no is certain, and soon found, however long its prefix is.

        Of full attention it needs a block for each block_size tokens. Those that lack must be in tables of others, and
        whoever holds one holds all before it, in all groups of full attention. A reserve below 0 is blocks that are
        thought to be free beside those that are.
        """
        groups, full = self._groups, self._full_groups
        lacking = sum(groups[index].num_blocks_for(request.num_tokens) for index in full) + reserve
        lacking -= self._pool.num_free_blocks
        if lacking <= 0:
            return True
        if not self._enable_caching:
            return False
        self._prefixes.update(request)
        at_least = -(-lacking // len(full)) if full else 0
        for index in full:
            stop = at_least * groups[index].block_size
            is_known = stop < request.num_tokens and stop <= len(request.contents) * self._hits.prefix_size
            if is_known and self._pool.lookup.may_be_held(self._hits.hash_of(request, index, stop)):
                return True
        return not full

    def num_needed(self, request: Request) -> int:
        """Free blocks that a request takes, those among its hits that are free."""
        return _num_taken(self._lay_out(request)[1])

    def hit_blocks(self, request: Request) -> set[KVCacheBlock]:
        """What a request would be given from the cache."""
        return {block for beginning in self._lay_out(request)[1] for block in beginning.found}

    def _lay_out(self, request: Request) -> tuple[int, list[_Beginning]]:
        """How the tables would begin: tokens hit, and what each table takes."""
        lookups = self._hits.lookups(request)
        hit = self._search(request, lookups)
        start = max(hit, request.num_swapped_tokens)
        known = min(start, len(request.contents) * self._hits.prefix_size)
        beginnings = []
        for group, lookup in zip(self._groups, lookups, strict=True):
            first = group.first_needed_block(start)
            found: list[KVCacheBlock] = []
            for index in range(first, known // group.block_size):
                block = lookup.block(index)
                if block is None:
                    break
                found.append(block)
            assert start > hit or len(found) == hit // group.block_size - first
            end = group.table_end(start, request.num_tokens, self._longest_chunk)
            beginnings.append(_Beginning(first, found, end - first - len(found)))
        return hit, beginnings


def _num_taken(beginnings: Iterable[_Beginning]) -> int:
    """Free blocks that these take, those among them that are found free."""
    return sum(one.num_new + sum(block.ref_cnt == 0 for block in one.found) for one in beginnings)
