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
from kvmanager_service.core.kv_groups import GroupTable, KVGroup
from kvmanager_service.core.request import Request


class GroupForks:
    """Forks tables, and lets the blocks that a request writes to be its alone.

    Args:
        pool: where the blocks are.
        groups: as in the coordinator.
        prefix_size: tokens per prefix.
        copies: orders the copies.
    """

    __slots__ = ("_copies", "_groups", "_pool", "_prefix_size")

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup], prefix_size: int, copies: CopyOnWrite) -> None:
        self._pool = pool
        self._groups = list(groups)
        self._prefix_size = prefix_size
        self._copies = copies

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Let a request without blocks hold what goes on from another's first num_tokens tokens, in all groups.

        No block is copied or taken: whoever of the two writes next into a block that both hold gets a copy then. Of a
        recurrent state that is the state itself.

        Args:
            parent: a running one, with at least num_tokens tokens computed.
            child: its first num_tokens tokens, and all that decides their K/V, are the parent's.
            num_tokens: at least 1; with windows or states, not so far back that the parent's tables have left it.

        Raises:
            ValueError: that is not so; nothing has changed.
        """
        require_forkable(parent, child, num_tokens, self._prefix_size)
        for index, (group, held) in enumerate(zip(self._groups, parent.tables, strict=True)):
            is_held = held.first <= group.first_needed_block(num_tokens)
            if not is_held or not group.can_fork(num_tokens, parent.num_computed_tokens):
                raise ValueError(f"expected group {index} of {parent!r} to hold what token {num_tokens} reads")
        is_cached = parent.is_cacheable  # else a block that counts as findable may have been kept out of the cache
        for group, held in zip(self._groups, parent.tables, strict=True):
            stop = group.num_blocks_for(num_tokens)
            first = min(group.first_needed_block(num_tokens), stop)
            table = GroupTable(group, self._pool.null_block, first)
            table.extend(held.blocks[first:stop])
            num_full = num_tokens // group.block_size
            table.cached_to(max(first, min(held.num_cached, num_full)))
            is_cached = is_cached and table.num_cached >= num_full
            self._pool.touch(table.blocks[first:])
            if self._pool.history is not None:
                self._pool.history.note_table(
                    child.request_id, len(child.tables), table.blocks[first:], BlockMoment.HIT
                )
            child.tables.append(table)
        num_prefixes = num_tokens // self._prefix_size
        child.block_hashes = parent.block_hashes[:num_prefixes]
        child.contents = parent.contents[:num_prefixes]
        child.is_cacheable = is_cached
        child.num_computed_tokens = num_tokens
        parent.may_share_tail = child.may_share_tail = True

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
