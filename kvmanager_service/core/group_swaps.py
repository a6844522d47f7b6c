"""Requests of several KV groups whose blocks leave for the host's memory, and come back from there.

Station: made by `KVCacheCoordinator`, which `SwapSpace` asks. It is to swapping what `group_hits` is to hits.

A request goes on where it stood, so it needs what its next token reads: of full attention all blocks, of a window its
tail, of a state the newest. All of that is in its tables. Those blocks are copied, in order of depth over all groups;
what is before a window is null when the request leaves and null when it is back. Host blocks are of no group: a block
is the same bytes for each.
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
        hits: says which entries a token reads.
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

    def detach(self, request: Request) -> list[KVCacheBlock]:
        """Take a request's tables, but hold what its next token reads. Returns the blocks of `GroupHits.entries`."""
        tables = request.tables
        entries = self._hits.entries(request.num_computed_tokens)
        kept = [tables[group_index].blocks[index] for group_index, index in entries]
        give_back_tables(self._pool, request, self._groups, kept=set(kept))
        request.tables = []
        return kept

    def give_back(self, request: Request, entries: Sequence[TableEntry], blocks: list[KVCacheBlock]) -> None:
        """Take back what `detach` returned, given the entries it was of."""
        self._pool.free_blocks(reversed(blocks))
        if self._pool.history is not None:
            for (group_index, _), block in zip(entries, blocks, strict=True):
                self._pool.history.note_table(request.request_id, group_index, (block,), BlockMoment.FREED)

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
