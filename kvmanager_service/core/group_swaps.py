"""Requests of several KV groups whose blocks leave for the host's memory, and come back from there.

Station: made by `KVCacheCoordinator`, which `SwapSpace` asks. It is to swapping what `group_hits` is to hits.

A request that is to go on at position n needs what the token at n reads: of full attention all blocks, of a window its
tail, of a state the newest. Those are copied, in order of depth over all groups; what is before a window is null when
the request leaves and null when it is back. Host blocks are of no group: a block is the same bytes for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.block_history import BlockMoment
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.group_hits import GroupHits
from kvmanager_service.core.kv_groups import KVGroup, TableEntry
from kvmanager_service.core.release import give_back_tables
from kvmanager_service.core.request import Request


class GroupSwaps:
    """Finds what is to be copied, and holds it meanwhile.

    Args:
        pool: where the blocks are.
        groups: as in the coordinator.
        hits: what finds blocks that a window has left.
    """

    __slots__ = ("_groups", "_hits", "_pool")

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup], hits: GroupHits) -> None:
        self._pool = pool
        self._groups = list(groups)
        self._hits = hits

    def num_shared_tokens(self, request: Request) -> int:
        """Tokens of its prefix that others reference, too, in all groups of full attention.

        Where a window begins, nobody else need be: so it is said to be none where all groups have one.
        """
        shared = [
            self._num_shared_tokens(request, index) for index, group in enumerate(self._groups) if group.reach is None
        ]
        return min(shared, default=0)

    def _num_shared_tokens(self, request: Request, group_index: int) -> int:
        shared = 0
        for block in request.tables[group_index].blocks:
            if block.ref_cnt == 1:
                break
            shared += self._groups[group_index].block_size
        return shared

    def detach(self, request: Request, num_tokens: int) -> list[KVCacheBlock] | None:
        """Take a request's tables, but hold what its token at num_tokens reads.

        Returns:
            The blocks of `GroupHits.entries`, None when one of them is not there any more; then nothing has changed.
        """
        found = self.blocks_read_at(request, num_tokens)
        if found is None:
            return None
        from_cache = [block for block, is_held in found if not is_held]
        self._pool.touch(from_cache)
        kept = [block for block, _ in found]
        give_back_tables(self._pool, request, self._groups, kept=set(kept).difference(from_cache))
        request.tables = []
        return kept

    def give_back(self, request: Request, entries: Sequence[TableEntry], blocks: list[KVCacheBlock]) -> None:
        """Take back what `detach` returned, given the entries it was of."""
        self._pool.free_blocks(reversed(blocks))
        if self._pool.history is not None:
            for (group_index, _), block in zip(entries, blocks, strict=True):
                self._pool.history.note_table(request.request_id, group_index, (block,), BlockMoment.FREED)

    def blocks_read_at(self, request: Request, num_tokens: int) -> list[tuple[KVCacheBlock, bool]] | None:
        """What a running request needs to go on at position num_tokens, which may be before what it has computed.

        Its windows may have moved beyond that, for tokens that are not known yet. What they have left was full, so it
        is in the cache as long as nobody has taken it.

        Returns:
            For each of `GroupHits.entries` its block and whether the request's table has it; None when one of them is
            gone, or is a state that has moved on. Nothing is referenced yet.
        """
        num_computed = request.num_computed_tokens
        if not all(group.can_fork(num_tokens, num_computed) for group in self._groups):
            return None
        found: list[tuple[KVCacheBlock, bool]] = []
        for group_index, index in self._hits.entries(num_tokens):
            table = request.tables[group_index]
            if index >= table.first:
                found.append((table.blocks[index], True))
                continue
            left = self._left_block(request, group_index, index)
            if left is None:
                return None
            found.append((left, False))
        return found

    def _left_block(self, request: Request, group_index: int, index: int) -> KVCacheBlock | None:
        """The cached block of an entry that the request's table had."""
        stop = (index + 1) * self._groups[group_index].block_size
        prefixes = request.contents
        if stop > len(prefixes) * self._hits.prefix_size or prefixes[-1].block is None:
            return None
        return self._hits.cached_block(request, group_index, index)

    def blocks_to_fill(self, request: Request, num_tokens: int) -> list[tuple[int, KVCacheBlock]]:
        """What a request admitted to go on at num_tokens lacks: places in `GroupHits.entries`, and its blocks there.

        The others were found in the cache.
        """
        tables = request.tables
        return [
            (place, tables[group_index].blocks[index])
            for place, (group_index, index) in enumerate(self._hits.entries(num_tokens))
            if index >= tables[group_index].num_cached
        ]
