"""Block tables: which blocks a request holds, which it may share, what becomes findable.

Station: called by `Scheduler`; the only user of `BlockPool`. One KV group (full attention): a request's block i holds
its tokens [i * block_size, (i + 1) * block_size).

Requests with a common prefix hold the same blocks: by `fork`, partial ones too. Nobody writes to a block that another
holds, see `copy_on_write`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from kvmanager_service.core.adoption import Adoption, TaggedBlock
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import NONE_HASH, BlockHash, HashFunction, default_hash, hash_block_tokens
from kvmanager_service.core.block_history import BlockHistory, BlockMoment
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.copy_on_write import CopyOnWrite
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY
from kvmanager_service.core.forks import require_forkable
from kvmanager_service.core.kv_groups import TableEntry
from kvmanager_service.core.release import give_back
from kvmanager_service.core.request import TOKEN_BYTES, Request
from kvmanager_service.core.step import BlockCopy

NONE_LEAVING: Final[dict[KVCacheBlock, int]] = {}
"""No references are about to be dropped."""


class KVCacheManager:
    """Gives blocks to requests and takes them back.

    Args:
        num_blocks: blocks of the executor's cache, the null block included.
        block_size: tokens per block.
        enable_caching: whether full blocks are kept for later requests.
        hash_function: what finds candidates; see `block_hash`.
        eviction_policy: a name in `EVICTION_POLICIES`.
        events: told of every change to what can be hit; None tells nobody.
        history: told of what becomes of each block; None tells nobody.

    Attributes:
        copies: orders them for the next step; `take_copies` takes them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool = True,
        hash_function: HashFunction = default_hash,
        eviction_policy: str = DEFAULT_EVICTION_POLICY,
        events: BlockEventLog | None = None,
        history: BlockHistory | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"expected block_size of at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks, eviction_policy, events=events, history=history)
        self._lookup = self.pool.lookup
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.hash_function = hash_function
        self.copies = CopyOnWrite(self.pool)
        self._block_bytes = block_size * TOKEN_BYTES

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens take: ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest cached prefix of a request that holds no blocks yet.

        Hits end at the first miss, and never cover the whole sequence: at least one token is left to compute, for
        without it nothing could be sampled.

        Returns:
            Cached blocks in table order. Nothing is referenced yet; `allocate_slots` does that.
        """
        if not self.enable_caching:
            return []
        self._update_hashes(request)
        hits: list[KVCacheBlock] = []
        parent: BlockContent | None = None
        hashes, tokens, lookup = request.block_hashes, request.block_tokens, self._lookup
        extra_keys = request.extra_keys
        num_blocks = self._max_hits(request)
        keys = None if request.spans is None else request.keys_of_blocks(0, num_blocks, self.block_size)
        for index in range(num_blocks):
            if keys is not None:
                extra_keys = keys[index]
            parent = lookup.follow(parent, hashes[index], tokens[index], extra_keys)
            if parent is None:
                break
            block = parent.block
            assert block is not None
            hits.append(block)
            extra_keys = b""
        return hits

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: list[KVCacheBlock] | None = None, reserve: int = 0
    ) -> bool:
        """Make the request's table hold its first num_tokens tokens, the block they are written to being its own.

        Args:
            request: whose table grows.
            num_tokens: length the table must hold.
            computed_blocks: what `get_computed_blocks` found; only for a request without blocks.
            reserve: blocks that must stay free if the table grows.

        Returns:
            False when too few blocks are free; then nothing at all has changed.
        """
        hits = computed_blocks or []
        needed = self.num_blocks_for(num_tokens) - len(request.blocks) - len(hits)
        if needed <= 0 and not hits and not request.may_share_tail:
            return True
        needed = max(needed, 0)
        num_copied = int(request.may_share_tail and self.shares_tail(request))
        num_free_hits = sum(block.ref_cnt == 0 for block in hits)
        is_short = needed + num_copied + reserve > self.pool.num_free_blocks - num_free_hits
        if is_short and (needed or num_copied or hits):
            return False
        if request.may_share_tail:
            self._own_tail(request)
        if hits:
            assert not request.blocks
            self.pool.touch(hits)
            self._extend_table(request, hits)
            self._note(request, hits, BlockMoment.HIT)
            request.contents = [content for block in hits if (content := block.content) is not None]
            request.block_tokens[: len(hits)] = [content.token_bytes for content in request.contents]
            request.num_computed_tokens = len(hits) * self.block_size
        if needed > 0:
            blocks = self.pool.get_new_blocks(needed)
            self._extend_table(request, blocks)
            self._note(request, blocks, BlockMoment.ALLOCATED)
        return True

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Let a request without blocks hold those of another's first num_tokens tokens, and count them as computed.

        No block is copied or taken: whoever of the two writes next into a block that both hold gets a copy then.

        Args:
            parent: one with blocks, a fork that waits among them, and with at least num_tokens tokens computed.
            child: its first num_tokens tokens, and all that decides their K/V, are the parent's.
            num_tokens: at least 1.

        Raises:
            ValueError: that is not so; nothing has changed.
        """
        require_forkable(parent, child, num_tokens)
        blocks = parent.blocks[: self.num_blocks_for(num_tokens)]
        self.pool.touch(blocks)
        self._extend_table(child, blocks)
        self._note(child, blocks, BlockMoment.HIT)
        num_full = num_tokens // self.block_size
        child.block_hashes = parent.block_hashes[:num_full]
        child.block_tokens = parent.block_tokens[:num_full]
        child.contents = parent.contents[:num_full]
        child.is_cacheable = len(child.contents) == num_full
        child.num_computed_tokens = num_tokens
        parent.may_share_tail = child.may_share_tail = True

    def num_new_blocks(
        self, request: Request, num_tokens: int, leaving: Mapping[KVCacheBlock, int] = NONE_LEAVING
    ) -> int:
        """Free blocks that it takes to let a running request's table hold its first num_tokens tokens.

        Args:
            request: a running one.
            num_tokens: how many.
            leaving: references that are not counted, by block: they will have been dropped.
        """
        new = max(0, self.num_blocks_for(num_tokens) - len(request.blocks))
        if request.may_share_tail and self.shares_tail(request):
            tail = request.blocks[request.num_computed_tokens // self.block_size]
            new += tail.ref_cnt - leaving.get(tail, 0) > 1
        return new

    def reusable_blocks(self, request: Request) -> list[KVCacheBlock]:
        """Those in a running request's table of which each makes up for a free block once nobody else holds it.

        The one that it is about to write to: then that need not be copied.
        """
        if request.may_share_tail and self.shares_tail(request):
            return [request.blocks[request.num_computed_tokens // self.block_size]]
        return []

    def hit_blocks(self, request: Request) -> set[KVCacheBlock]:
        """What a request without blocks would be given from the cache."""
        return set(self.get_computed_blocks(request))

    def shares_tail(self, request: Request) -> bool:
        """Whether another table has the block that the request's next token is written to."""
        index = request.num_computed_tokens // self.block_size
        return index < len(request.blocks) and request.blocks[index].ref_cnt > 1

    def _own_tail(self, request: Request) -> None:
        """Let the block that the request's next token is written to be its alone; a free block is there if needed."""
        request.may_share_tail = False
        index = request.num_computed_tokens // self.block_size
        if index >= len(request.blocks):
            return
        held = request.blocks[index]
        own = self.copies.own(held)
        if own is held:
            return
        request.blocks[index] = own
        request.block_id_bytes[index * 4 : index * 4 + 4] = own.block_id.to_bytes(4, "little")
        self._note(request, [held], BlockMoment.FREED)
        self._note(request, [own], BlockMoment.ALLOCATED)

    def take_copies(self) -> list[BlockCopy]:
        """The copies that the step being made must order before its rows write."""
        return self.copies.take()

    def allocate_sequence(self, request: Request, reserve: int = 0) -> bool:
        """Give a request without blocks those of its whole known sequence, as many as can be from the cache.

        The whole, although the next step may compute a part of it only: a resumed request that got only the first
        chunk's blocks would be preempted again before it produced anything.

        Args:
            request: a waiting one.
            reserve: blocks that must stay free.

        Returns:
            False when too few blocks are free; then nothing at all has changed.
        """
        if not self.may_fit(request, reserve):
            return False
        return self.allocate_slots(request, request.num_tokens, self.get_computed_blocks(request), reserve)

    def may_fit(self, request: Request, reserve: int) -> bool:
        """Whether `allocate_sequence` may find room. A no is certain, and soon found, however long the prefix is.

        Args:
            request: a waiting one without blocks.
            reserve: blocks that must stay free; below 0, as many more are thought to be free.
        """
        lacking = self.num_blocks_for(request.num_tokens) + reserve - self.pool.num_free_blocks
        return lacking <= 0 or self._may_share(request, lacking)

    def num_lacking(self, request: Request, num_tokens: int, reserve: int = 0) -> int:
        """Free blocks that are too few for the table to hold the first num_tokens tokens; 0 when there are enough.

        Args:
            request: with or without blocks.
            num_tokens: how many.
            reserve: blocks that must stay free if the table takes any.
        """
        if request.blocks:
            new = self.num_new_blocks(request, num_tokens)
            return max(0, new + reserve - self.pool.num_free_blocks) if new else 0
        hits = self.get_computed_blocks(request)
        needed = self.num_blocks_for(num_tokens) - len(hits) + sum(block.ref_cnt == 0 for block in hits)
        return max(0, needed + reserve - self.pool.num_free_blocks)

    def _may_share(self, request: Request, num_blocks: int) -> bool:
        """Whether a waiting request may find this many blocks of its prefix in tables of others. A no is certain.

        Hits in no table are no help to a request that lacks blocks: they are free blocks themselves. And whoever holds
        a block holds all before it, so only the last of them is looked for. So the head of the queue may ask at each
        step, however long its prefix is.
        """
        if not self.enable_caching or num_blocks > self._max_hits(request):
            return False
        self._update_hashes(request)
        return self._lookup.may_be_held(request.block_hashes[num_blocks - 1])

    def _max_hits(self, request: Request) -> int:
        """Blocks that can be hits: the full ones of all known tokens but the last."""
        return (request.num_tokens - 1) // self.block_size

    def cache_blocks(self, request: Request, provisional_step: int) -> None:
        """Make the request's newly full blocks findable.

        A block is full once all its tokens are known and computed, or about to be by a step that is outstanding.

        Args:
            request: whose blocks.
            provisional_step: the outstanding step that fills the newest block, or 0 when none does.
        """
        if not self.enable_caching or not request.is_cacheable:
            return
        num_cached = len(request.contents)
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= num_cached:
            return
        self._update_hashes(request)
        request.is_cacheable = self.pool.cache_full_blocks(
            request.blocks,
            request.contents,
            request.block_hashes,
            request.block_tokens,
            request.keys_of_blocks(num_cached, num_full, self.block_size),
            provisional_step=provisional_step,
            owner=request.arrival_seq,
        )

    def free(self, request: Request) -> None:
        """Take all blocks back, the deepest first, so that the deepest part of a prefix is evicted first."""
        self.give_back(request, request.blocks)
        request.blocks = []
        request.block_id_bytes = bytearray()
        request.contents = []
        request.is_cacheable = True
        request.may_share_tail = False
        request.num_computed_tokens = 0

    # --- blocks leave for the host, and come back -----------------------------------------------------------------

    def entries(self, num_tokens: int) -> list[TableEntry]:
        """The table's entries that the token at num_tokens reads, in order of depth: all before it."""
        return [(0, index) for index in range(self.num_blocks_for(num_tokens))]

    def num_shared_tokens(self, request: Request) -> int:
        """Tokens of its prefix that others reference, too: tables, pins, or what is on its way to the host."""
        shared = 0
        for block in request.blocks:
            if block.ref_cnt == 1:
                break
            shared += self.block_size
        return shared

    def detach(self, request: Request) -> list[KVCacheBlock]:
        """Take the table from a request that is about to be freed; what its next token reads stays held.

        Returns:
            The blocks of `entries` of all that it has computed; `give_back_detached` takes them when they are not
            needed any more.
        """
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        blocks = request.blocks[:num_blocks]
        self.give_back(request, request.blocks[num_blocks:], num_blocks)
        request.blocks = []
        return blocks

    def give_back_detached(self, request: Request, entries: Sequence[TableEntry], blocks: list[KVCacheBlock]) -> None:
        """Take back what `detach` returned, given the entries it was of."""
        self.give_back(request, blocks)

    def resume(self, request: Request, num_tokens: int) -> list[tuple[int, KVCacheBlock]]:
        """Let an admitted request go on at num_tokens, beyond what was hit.

        Returns:
            What must be filled before its next token reads it: a place in `entries`, and the block.
        """
        first = request.num_computed_tokens // self.block_size
        request.num_computed_tokens = num_tokens
        return list(enumerate(request.blocks[: self.num_blocks_for(num_tokens)]))[first:]

    # --- blocks are pinned ----------------------------------------------------------------------------------------

    def name_of(self, request: Request, entry: TableEntry) -> BlockHash:
        """The hash of an entry of a request's table, whether or not it has one; its tokens are known."""
        self._update_hashes(request)
        return request.block_hashes[entry[1]]

    def filled_block(self, request: Request, entry: TableEntry, before: BlockContent | None) -> KVCacheBlock | None:
        """A block that holds an entry of a request's table and is filled; None where there is none.

        Args:
            request: whose hashes are known.
            entry: of `entries`.
            before: what the entry before it holds.
        """
        index = entry[1]
        return self._lookup.get_filled_block(
            request.block_hashes[index],
            before,
            request.block_tokens[index],
            request.keys_of_block(index, self.block_size),
        )

    def forget_request(self, request: Request) -> None:
        """Nobody asks for what this request would hit any more. Nothing is kept of it here."""

    def give_back(self, request: Request, blocks: list[KVCacheBlock], first: int = 0) -> None:
        """Take back blocks that are, or were, a request's table from entry `first` on, the deepest first."""
        give_back(self.pool, request, blocks, first, self.block_size)

    def distrust(self, request: Request, step_id: int, *, with_table: bool) -> set[KVCacheBlock]:
        """Un-hash blocks whose content a failed row put in doubt.

        Args:
            request: the failed row's.
            step_id: the step that failed; what the request fills in it and in later ones is un-hashed.
            with_table: un-hash all blocks of the request's table too; it still is the failed row's table.

        Returns:
            All blocks that lost their content; whoever else holds one must be scheduled anew.
        """
        blocks = self.pool.provisional_blocks_of(request.arrival_seq, step_id)
        if with_table:
            blocks += request.blocks
            request.contents = []
            request.is_cacheable = False
        return self.pool.distrust(blocks)

    def relies_on(self, request: Request, distrusted: set[KVCacheBlock]) -> bool:
        """Whether a request that runs, or a fork that waits, holds what `distrust` returned."""
        return not distrusted.isdisjoint(request.blocks)

    def tables(self, request: Request) -> list[list[KVCacheBlock]]:
        """The blocks that it holds, by table, in order of depth."""
        return [request.blocks]

    def adopt(self, tagged: Iterable[TaggedBlock]) -> int:
        """Take over blocks that an executor still holds; see `adoption`. Returns how many.

        The others stay free and empty.
        """
        if not self.enable_caching:
            return 0
        return Adoption(self.pool, self.block_size, self.hash_function).adopt(tagged)

    def _update_hashes(self, request: Request) -> None:
        hashes, block_tokens = request.block_hashes, request.block_tokens
        size, length = self.block_size, self._block_bytes
        first, count = len(hashes), request.num_tokens // self.block_size
        if first >= count:
            return
        hash_function = self.hash_function
        known = bytes(request.token_bytes[first * length : count * length])
        parent_hash = hashes[-1] if hashes else NONE_HASH
        extra_keys = b"" if first else request.extra_keys
        keys = None if request.spans is None else request.keys_of_blocks(first, count, size)
        for start in range(0, len(known), length):
            if keys is not None:
                extra_keys = keys[len(hashes) - first]
            tokens = known[start : start + length]
            parent_hash = hash_block_tokens(hash_function, parent_hash, tokens, extra_keys)
            hashes.append(parent_hash)
            block_tokens.append(tokens)
            extra_keys = b""

    def _note(self, request: Request, blocks: list[KVCacheBlock], moment: BlockMoment) -> None:
        """Tell the history what a request did with blocks, if there is one."""
        if self.pool.history is not None:
            self.pool.history.note_table(request.request_id, 0, blocks, moment)

    @staticmethod
    def _extend_table(request: Request, blocks: list[KVCacheBlock]) -> None:
        request.blocks += blocks
        if len(blocks) == 1:
            request.block_id_bytes += blocks[0].block_id.to_bytes(4, "little")
        else:
            request.block_id_bytes += struct.pack(f"<{len(blocks)}i", *[block.block_id for block in blocks])

    def check_integrity(self, requests: Iterable[Request], detached: Iterable[list[KVCacheBlock]] = ()) -> None:
        """Check the pool against the tables of all requests that hold blocks, and whatever else holds some.

        Args:
            requests: those with a table.
            detached: what was detached of others, and what pins hold: a reference for each entry.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self.pool.check_integrity(chain(self._checked_tables(requests), detached))

    def _checked_tables(self, requests: Iterable[Request]) -> Iterator[list[KVCacheBlock]]:
        for request in requests:
            assert len(request.blocks) * self.block_size >= request.num_computed_tokens, (
                f"{request!r} has too few blocks"
            )
            ids = b"".join(block.block_id.to_bytes(4, "little") for block in request.blocks)
            assert ids == request.block_id_bytes, f"{request!r} would send another table than it holds"
            for block, content in zip(request.blocks, request.contents, strict=False):
                assert block.content is content, f"{request!r} relies on content that {block!r} does not have"
            yield request.blocks
