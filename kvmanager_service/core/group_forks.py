"""Tables of several KV groups that are forked, and blocks that are copied before one of their holders writes.

Station: made by `KVCacheCoordinator`, which asks it whenever `Request.may_share_tail`. It is to forks what `group_hits`
is to hits.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.block_history import BlockMoment
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.copy_on_write import CopyOnWrite
from kvmanager_service.core.forks import require_forkable
from kvmanager_service.core.group_hits import GroupHits
from kvmanager_service.core.kv_groups import GroupTable, KVGroup
from kvmanager_service.core.request import Request


class GroupForks:
    """Forks tables, and lets the blocks that a request writes to be its alone.

    Args:
        pool: where the blocks are.
        groups: as in the coordinator.
        hits: what finds blocks that a window, or a state, has left.
        copies: orders the copies.
    """

    __slots__ = ("_copies", "_groups", "_hits", "_pool")

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup], hits: GroupHits, copies: CopyOnWrite) -> None:
        self._pool = pool
        self._groups = list(groups)
        self._hits = hits
        self._copies = copies

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Let a request without blocks hold what goes on from another's first num_tokens tokens, in all groups.

        No block is copied: whoever of the two writes next into a block that both hold gets a copy then. Of a recurrent
        state that is the state itself. None is taken either, but for what the parent's windows have left: that was
        full, so it is in the cache as long as nobody has taken it.

        Args:
            parent: one with blocks, and with at least num_tokens tokens computed.
            child: its first num_tokens tokens, and all that decides their K/V, are the parent's.
            num_tokens: at least 1. Of states, as many as are computed, or a checkpoint.

        Raises:
            ValueError: that is not so, or what the child would read is not there any more; nothing has changed.
        """
        require_forkable(parent, child, num_tokens)
        tables = [self._blocks_read_at(parent, index, num_tokens) for index in range(len(self._groups))]
        is_cached = parent.is_cacheable  # else a block that counts as findable may have been kept out of the cache
        for group, held, blocks in zip(self._groups, parent.tables, tables, strict=True):
            first = min(group.first_needed_block(num_tokens), group.num_blocks_for(num_tokens))
            table = GroupTable(group, self._pool.null_block, first)
            table.extend(blocks)
            num_full = num_tokens // group.block_size
            table.cached_to(max(first, min(held.num_cached, num_full)))
            is_cached = is_cached and table.num_cached >= num_full
            self._pool.touch(blocks)
            if self._pool.history is not None:
                self._pool.history.note_table(child.request_id, len(child.tables), blocks, BlockMoment.HIT)
            child.tables.append(table)
        num_prefixes = num_tokens // self._hits.prefix_size
        child.block_hashes = parent.block_hashes[:num_prefixes]
        child.contents = parent.contents[:num_prefixes]
        child.is_cacheable = is_cached
        child.num_computed_tokens = num_tokens
        parent.may_share_tail = child.may_share_tail = True

    def _blocks_read_at(self, parent: Request, group_index: int, num_tokens: int) -> list[KVCacheBlock]:
        """What the token at num_tokens reads in a group, in order. Raises ValueError when some of it is not there."""
        group, held = self._groups[group_index], parent.tables[group_index]
        stop = group.num_blocks_for(num_tokens)
        first = min(group.first_needed_block(num_tokens), stop)
        left = [self._left_block(parent, group_index, index) for index in range(first, min(held.first, stop))]
        found = [block for block in left if block is not None]
        if len(found) < len(left) or not group.can_fork(num_tokens, parent.num_computed_tokens):
            raise ValueError(f"expected group {group_index} of {parent!r} to hold what token {num_tokens} reads")
        return found + held.blocks[max(first, held.first) : stop]

    def _left_block(self, parent: Request, group_index: int, index: int) -> KVCacheBlock | None:
        """The cached block of an entry that the parent's table had."""
        stop = (index + 1) * self._groups[group_index].block_size
        prefixes = parent.contents
        if stop > len(prefixes) * self._hits.prefix_size or prefixes[-1].block is None:
            return None
        return self._hits.cached_block(parent, group_index, index)

    def shared_tails(self, request: Request) -> list[KVCacheBlock]:
        """The blocks that the request's next token is written to and that another table has, too."""
        num_computed = request.num_computed_tokens
        return [
            table.blocks[index]
            for group, table in zip(self._groups, request.tables, strict=True)
            if (index := num_computed // group.block_size) < len(table.blocks) and table.blocks[index].ref_cnt > 1
        ]

    def own_tails(self, request: Request) -> None:
        """Let the blocks that the request's next token is written to be its alone; free blocks are there if needed."""
        request.may_share_tail = False
        history = self._pool.history
        for group_index, (group, table) in enumerate(zip(self._groups, request.tables, strict=True)):
            index = request.num_computed_tokens // group.block_size
            held = table.blocks[index]
            own = self._copies.own(held)
            if own is held:
                continue
            table.replace(index, own)
            if history is not None:
                history.note_table(request.request_id, group_index, [held], BlockMoment.FREED)
                history.note_table(request.request_id, group_index, [own], BlockMoment.ALLOCATED)
