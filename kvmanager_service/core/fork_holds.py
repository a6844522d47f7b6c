"""Forks that wait for a place to run, and hold meanwhile what they share: so nothing of it is computed again.

Station: owned by `Residency`. Whoever waits stands in the queue, fork or not; here is only noted which of those who
wait have a table, and how often each block is in those. A table holds what is computed of the parent's tokens when the
fork comes, the parent's end included, and stays as it is.

    fork ─▶ held ─admit: a place is free, and blocks for the rest▶ on the device
              └── let go: its blocks are needed, in doubt or lost ─▶ it waits as any request, for what the cache has

Whoever runs, or is next, comes before whoever waits behind. So a fork lets go before a running request is preempted, or
the next one waits for more blocks; as `victims` says, those that help and no others, the latest arrival first.

Forks of one parent mostly hold the same blocks, and so does the parent while it runs. Then none of them can free any,
however many they are: that is known without a look at their tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.request import Request, RequestStatus


class ForkHolds:
    """Waiting forks that hold blocks.

    Args:
        kv: their tables.

    Attributes:
        references: how many of them hold a block, by block.
    """

    __slots__ = ("_alone", "_counted_at", "_forks", "_kv", "references")

    def __init__(self, kv: KVCache) -> None:
        self.references: dict[KVCacheBlock, int] = {}
        self._kv = kv
        self._forks: dict[int, Request] = {}  # by arrival_seq, which only grows
        self._alone: set[KVCacheBlock] = set()  # as of the pool's num_shared_changes below
        self._counted_at = -1

    def __len__(self) -> int:
        return len(self._forks)

    def __contains__(self, request: Request) -> bool:
        return request.arrival_seq in self._forks

    def add(self, fork: Request) -> None:
        """A fork that waits has got a table."""
        self._forks[fork.arrival_seq] = fork
        references = self.references
        for table in self._kv.tables(fork):
            for block in table:
                references[block] = references.get(block, 0) + 1
        self._counted_at = -1

    def discard(self, request: Request) -> None:
        """It waits no more, or its table is about to be taken; it need not be a fork."""
        if self._forks.pop(request.arrival_seq, None) is None:
            return
        references = self.references
        for table in self._kv.tables(request):
            for block in table:
                count = references[block] - 1
                if count:
                    references[block] = count
                else:
                    del references[block]
        self._counted_at = -1

    def newest_first(self) -> list[Request]:
        """In the order in which they let go."""
        return list(reversed(self._forks.values()))

    def alone(self) -> Collection[KVCacheBlock]:
        """Blocks that nobody else holds; O(1) while nobody shares or unshares any, see `BlockPool`."""
        num_changes = self._kv.pool.num_shared_changes
        if self._counted_at != num_changes:
            self._alone = {block for block, count in self.references.items() if block.ref_cnt == count}
            self._counted_at = num_changes
        return self._alone

    def choose(self, blocks: set[KVCacheBlock], num_blocks: int, request: Request) -> list[Request]:
        """Who lets go: forks of which none can be spared if num_blocks of these blocks are to lose all that hold them.

        Args:
            blocks: each in the table of a fork other than the request.
            num_blocks: at most as many as there are.
            request: for whom; if it is one of the forks, it keeps what it holds.

        Returns:
            The newest first, and as few of those as it takes. Of these, the oldest that the others can do without are
            spared.
        """
        own = self.table_of(request)
        left: dict[KVCacheBlock, int] = {}  # references that keep a block, of those that were looked at
        chosen: list[tuple[Request, set[KVCacheBlock]]] = []
        num_free = 0
        forks = iter(self.newest_first())
        while num_free < num_blocks:
            fork = next(forks)
            if fork is request:
                continue
            held = {block for table in self._kv.tables(fork) for block in blocks.intersection(table)}
            if not held:
                continue
            chosen.append((fork, held))
            for block in held:
                left[block] = left.get(block, self.references[block] - (block in own)) - 1
                num_free += not left[block]
        for place in range(len(chosen) - 2, -1, -1):  # without the last there were too few
            _, held = chosen[place]
            num_kept = sum(not left[block] for block in held)
            if num_free - num_kept >= num_blocks:
                num_free -= num_kept
                for block in held:
                    left[block] += 1
                del chosen[place]
        return [fork for fork, _ in chosen]

    def table_of(self, request: Request) -> set[KVCacheBlock]:
        """What a request holds, if it is one of the forks."""
        return set(self._blocks_of(request)) if request in self else set()

    def _blocks_of(self, fork: Request) -> Iterator[KVCacheBlock]:
        for table in self._kv.tables(fork):
            yield from table

    def check_integrity(self) -> None:
        """Check that all of them wait and hold something, and what is counted. Raises AssertionError."""
        references: dict[KVCacheBlock, int] = {}
        for fork in self._forks.values():
            assert fork.status is RequestStatus.WAITING, f"{fork!r} is thought to wait"
            assert fork.blocks or fork.tables, f"{fork!r} is thought to hold blocks"
            for block in self._blocks_of(fork):
                references[block] = references.get(block, 0) + 1
        assert self.references == references, f"forks hold {references}, counted {self.references}"
        alone = {block for block, count in references.items() if block.ref_cnt == count}
        assert alone == self.alone(), f"forks alone hold {alone}, counted {self._alone}"
