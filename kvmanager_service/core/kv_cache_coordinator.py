"""Block tables of a model with several KV groups: all of them grow, hit and are freed together.

Station: takes the place of `KVCacheManager` where a model has more than one group, or one that is not full attention;
`make_kv_cache` chooses. The scheduler asks both the same. One `BlockPool` serves all groups, so a block's id says
nothing of its group; what a group needs is for `kv_groups` to know.

    request ─▶ contents: its prefixes, one per `prefix_size` tokens, the same for all groups (`PrefixLedger`)
            └▶ tables: one `GroupTable` per group; entry i's content is (group, prefix at the entry's start, tokens)

A hit is a length that all groups agree on, see `group_hits`: a multiple of all block sizes, never the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import HashFunction, default_hash, hash_block_tokens
from kvmanager_service.core.block_history import BlockHistory
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.copy_on_write import CopyOnWrite
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY
from kvmanager_service.core.group_adoption import GroupAdoption
from kvmanager_service.core.group_forks import GroupForks
from kvmanager_service.core.group_hits import GroupHits, GroupLookup
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import FullAttention, GroupTable, KVGroup
from kvmanager_service.core.prefix_ledger import PrefixLedger
from kvmanager_service.core.request import Request
from kvmanager_service.core.step import BlockCopy


class KVCacheCoordinator:
    """Gives blocks of all groups to requests and takes them back.

    Args:
        num_blocks: blocks of the executor's cache, the null block included.
        groups: one object per group, those of full attention first: they find out soonest how short a hit must be.
        longest_chunk: most tokens of one request in a step; a window's table holds as many beyond the window.
        enable_caching: whether full blocks are kept for later requests.
        hash_function: what finds candidates; see `block_hash`.
        eviction_policy: a name in `EVICTION_POLICIES`.
        events: told of every change to what can be hit, in all groups; None tells nobody.

    Attributes:
        hits: finds what is cached, and says what names a content.
        block_size: tokens that every hit is a multiple of.
        prefix_size: tokens per prefix.
        copies: orders them for the next step; `take_copies` takes them.

    Invariants (`check_integrity`):
        No block is in tables of two groups. A table's entries are null before its `first`, and only there; `first` is
        not after the first entry that the next token needs. A request holds `num_blocks_for` its tokens at most.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVGroup],
        *,
        longest_chunk: int,
        enable_caching: bool = True,
        hash_function: HashFunction = default_hash,
        eviction_policy: str = DEFAULT_EVICTION_POLICY,
        events: BlockEventLog | None = None,
    ) -> None:
        if not groups:
            raise ValueError("expected at least one KV group, got none")
        if longest_chunk < 1:
            raise ValueError(f"expected longest_chunk of at least 1 token, got {longest_chunk}")
        self.pool = BlockPool(num_blocks, eviction_policy, events=events)
        self.groups = list(groups)
        self.longest_chunk = longest_chunk
        self.enable_caching = enable_caching
        self.hash_function = hash_function
        self.copies = CopyOnWrite(self.pool)
        self.hits = GroupHits(self.pool, groups, hash_function)
        self.block_size = self.hits.block_size
        self.prefix_size = self.hits.prefix_size
        self.ledger = PrefixLedger(self.pool)
        self._forks = GroupForks(self.pool, self.groups, self.prefix_size, self.copies)
        self._full_groups = [index for index, group in enumerate(groups) if group.reach is None]
        self._requests_with_prefixes: dict[int, Request] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks of all groups that a request holds on its way to num_tokens tokens."""
        return sum(group.most_blocks(num_tokens, self.longest_chunk) for group in self.groups)

    # --- hits -----------------------------------------------------------------------------------------------------

    def longest_hit(self, request: Request) -> int:
        """The longest cached prefix, in tokens, from which all groups of a request without blocks can go on."""
        return self._search(request, self.hits.lookups(request))

    def _search(self, request: Request, lookups: list[GroupLookup]) -> int:
        if not self.enable_caching:
            return 0
        self._update_prefixes(request)
        return self.hits.longest(request, lookups)

    def _update_prefixes(self, request: Request) -> None:
        """Let `contents` be the request's prefixes, as long as its tokens are known."""
        prefixes, hashes, size = request.contents, request.block_hashes, self.prefix_size
        if prefixes and prefixes[-1].block is None:
            prefixes.clear()  # they were forgotten
        count = request.num_tokens // size
        if len(prefixes) == count or not request.is_cacheable:
            return
        if self.ledger.needs_sweep:
            self._sweep()
        self._requests_with_prefixes[request.arrival_seq] = request
        for index in range(len(prefixes), count):
            parent = prefixes[-1] if prefixes else None
            tokens = request.tokens(index * size, (index + 1) * size)
            extra_keys = request.keys_of_block(index, size)
            if index == len(hashes):
                parent_hash = None if parent is None else parent.block_hash
                hashes.append(hash_block_tokens(self.hash_function, parent_hash, tokens, extra_keys))
            prefix = self.ledger.extend(parent, hashes[index], tokens, extra_keys)
            if prefix is None:
                request.is_cacheable = False
                return
            prefixes.append(prefix)

    def _sweep(self) -> None:
        needed = {block.content.serial for block in self.pool.blocks if block.content is not None}
        for request in self._requests_with_prefixes.values():
            if request.contents:
                needed.add(request.contents[-1].serial)
        self.ledger.sweep(needed)

    # --- tables grow, and move ------------------------------------------------------------------------------------

    def allocate_sequence(self, request: Request, reserve: int = 0) -> bool:
        """Give a request without blocks those of its whole known sequence, as many as can be from the cache.

        The whole, although the next step may compute a part of it only, so that a resumed request is not preempted
        again before it produced anything. Of a table with a window, that is as many blocks as it ever holds at a time.

        Args:
            request: a waiting one.
            reserve: blocks that must stay free.

        Returns:
            False when too few blocks are free; then nothing at all has changed.
        """
        if not self._may_fit(request, reserve):
            return False
        lookups = self.hits.lookups(request)
        hit = self._search(request, lookups)
        firsts, hits, num_new = [], [], []
        for group, lookup in zip(self.groups, lookups, strict=True):
            first, stop = group.first_needed_block(hit), hit // group.block_size
            firsts.append(first)
            found = [block for index in range(first, stop) if (block := lookup.block(index)) is not None]
            assert len(found) == stop - first
            hits.append(found)
            num_new.append(group.table_end(hit, request.num_tokens, self.longest_chunk) - stop)
        num_free_hits = sum(block.ref_cnt == 0 for blocks in hits for block in blocks)
        if sum(num_new) + reserve > self.pool.num_free_blocks - num_free_hits:
            return False
        for blocks in hits:
            self.pool.touch(blocks)
        for group, first, blocks, count in zip(self.groups, firsts, hits, num_new, strict=True):
            table = GroupTable(group, self.pool.null_block, first)
            table.extend(blocks)
            table.cached_to(len(table.blocks))
            table.extend(self.pool.get_new_blocks(count))
            request.tables.append(table)
        request.num_computed_tokens = hit
        return True

    def _may_fit(self, request: Request, reserve: int) -> bool:
        """Whether a waiting request may find room. A no is certain, and soon found, however long its prefix is.

        Of full attention it needs a block for each block_size tokens. Those that lack must be in tables of others, and
        whoever holds one holds all before it, in all groups of full attention.
        """
        groups, full = self.groups, self._full_groups
        lacking = sum(groups[index].num_blocks_for(request.num_tokens) for index in full) + reserve
        lacking -= self.pool.num_free_blocks
        if lacking <= 0:
            return True
        if not self.enable_caching:
            return False
        self._update_prefixes(request)
        at_least = -(-lacking // len(full)) if full else 0
        for index in full:
            stop = at_least * groups[index].block_size
            is_known = stop < request.num_tokens and stop <= len(request.contents) * self.prefix_size
            if is_known and self.pool.may_be_held(self.hits.hash_of(request, index, stop)):
                return True
        return not full

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Let a running request's tables hold what its next tokens, up to num_tokens, read, and have what they write.

        What no later token reads goes back to the pool, cached. The next step may overwrite it although an outstanding
        one still reads it: steps run in the order sent.

        Returns:
            False when too few blocks are free; then nothing at all has changed.
        """
        num_computed = request.num_computed_tokens
        if request.may_share_tail:
            return self._move_tables(request, num_tokens)
        for table in request.tables:
            if num_tokens > table.room or num_computed >= table.needed_until:
                return self._move_tables(request, num_tokens)
        return True

    def _move_tables(self, request: Request, num_tokens: int) -> bool:
        num_computed = request.num_computed_tokens
        num_new, firsts, leaving = [], [], []
        for group, table in zip(self.groups, request.tables, strict=True):
            end = group.table_end(num_computed, num_tokens, self.longest_chunk)
            num_new.append(max(0, end - len(table.blocks)))
            first = group.first_needed_block(num_computed)
            firsts.append(first)
            leaving += table.blocks[table.first : first]
        num_copied = self._forks.num_shared_tails(request) if request.may_share_tail else 0
        needed = sum(num_new) + num_copied
        if needed > self.pool.num_free_blocks + sum(block.ref_cnt == 1 for block in leaving):
            return False
        if leaving:
            self.pool.free_blocks(reversed(leaving))
        for table, first, count in zip(request.tables, firsts, num_new, strict=True):
            if first > table.first:
                table.leave(first)
            if count:
                table.extend(self.pool.get_new_blocks(count))
        if request.may_share_tail:
            self._forks.own_tails(request)
        return True

    # --- tables are forked ----------------------------------------------------------------------------------------

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Let a request without blocks hold what goes on from another's first num_tokens tokens, in all groups.

        See `GroupForks.fork`.

        Raises:
            ValueError: that cannot be; nothing has changed.
        """
        self._forks.fork(parent, child, num_tokens)
        if child.contents:
            self._requests_with_prefixes[child.arrival_seq] = child

    def take_copies(self) -> list[BlockCopy]:
        """The copies that the step being made must order before its rows write."""
        return self.copies.take()

    # --- tables and the cache -------------------------------------------------------------------------------------

    def cache_blocks(self, request: Request, provisional_step: int) -> None:
        """Make the newly full blocks of all the request's tables findable.

        A block is full once all its tokens are known and computed, or about to be by a step that is outstanding.

        Args:
            request: whose blocks.
            provisional_step: the outstanding step that fills the newest block, or 0 when none does.
        """
        if not self.enable_caching or not request.is_cacheable:
            return
        num_filled = min(request.num_computed_tokens, request.num_tokens)
        for group_index, table in enumerate(request.tables):
            if num_filled < table.full_at:
                continue
            self._update_prefixes(request)
            for index in range(table.num_cached, num_filled // self.groups[group_index].block_size):
                table.cached_to(index + 1)
                if index < table.first:
                    continue
                if not self._cache_block(request, group_index, index, provisional_step):
                    request.is_cacheable = False
                    return

    def _cache_block(self, request: Request, group_index: int, index: int, provisional_step: int) -> bool:
        """Make one full block findable. Returns False when a hash collision keeps it out of the cache."""
        stop = (index + 1) * self.groups[group_index].block_size
        if stop > len(request.contents) * self.prefix_size:
            return False
        block_hash, parent, tokens, extra_keys = self.hits.key_of(request, group_index, index)
        content = self.pool.cache_full_block(
            request.tables[group_index].blocks[index],
            block_hash,
            parent,
            tokens,
            extra_keys,
            provisional_step=provisional_step,
            owner=request.arrival_seq,
            serial=self.hits.prefix_at(request, stop).serial,
        )
        return content is not None

    # --- blocks come back -----------------------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Take all blocks of all groups back, the deepest first, so that the deepest part of a prefix goes first."""
        held = [
            (-(index + 1) * group.block_size, block)
            for group, table in zip(self.groups, request.tables, strict=False)
            for index, block in enumerate(table.blocks)
            if index >= table.first
        ]
        held.sort(key=_depth)
        blocks = [block for _, block in held]
        self.pool.note_use(blocks)
        self._retain(request, blocks)
        self.pool.free_blocks(blocks)
        request.tables = []
        request.contents = []
        request.is_cacheable = True
        request.may_share_tail = False
        request.num_computed_tokens = 0
        self._requests_with_prefixes.pop(request.arrival_seq, None)

    def _retain(self, request: Request, blocks: list[KVCacheBlock]) -> None:
        if request.retention is None:
            self.pool.retain(blocks, request.retention_priority, 0.0)
            return
        for group, table in zip(self.groups, request.tables, strict=False):
            held = table.blocks[table.first :]
            self.pool.retain_ranges(held, table.first, group.block_size, request.retention)

    def frees_a_block(self, request: Request) -> bool:
        """Whether `free` would put at least one block back into the free queue."""
        return any(block.ref_cnt == 1 for table in request.tables for block in reversed(table.blocks))

    def distrust(self, request: Request, step_id: int, *, with_table: bool) -> set[KVCacheBlock]:
        """Un-hash blocks whose content a failed row put in doubt, in all groups.

        Args:
            request: the failed row's.
            step_id: the step that failed; what the request fills in it and in later ones is un-hashed.
            with_table: un-hash all of the request's prefix too, those blocks included that its windows have left since
                the row was scheduled; its tables still are the failed row's.

        Returns:
            All blocks that lost their content.
        """
        blocks = self.pool.provisional_blocks_of(request.arrival_seq, step_id)
        serials = {block.content.serial for block in blocks if block.content is not None}
        if with_table:
            blocks += self._cached_blocks_of_prefix(request)
            blocks += [block for table in request.tables for block in table.blocks]
            serials.update(prefix.serial for prefix in request.contents[:1])
            request.contents = []
            request.is_cacheable = False
        self.ledger.forget(serials)
        return self.pool.distrust(blocks)

    def _cached_blocks_of_prefix(self, request: Request) -> list[KVCacheBlock]:
        num_tokens = len(request.contents) * self.prefix_size
        return [
            block
            for group_index, group in enumerate(self.groups)
            for index in range(num_tokens // group.block_size)
            if (block := self.pool.get_cached_block(*self.hits.key_of(request, group_index, index))) is not None
        ]

    def relies_on(self, request: Request, distrusted: set[KVCacheBlock]) -> bool:
        """Whether a running request computed from what `distrust` returned, though a window may have left it since."""
        return bool(distrusted and request.contents) and request.contents[-1].block is None

    def adopt(self, tagged: Iterable[TaggedBlock]) -> int:
        """Take over blocks that an executor still holds; see `group_adoption`. Returns how many.

        The others stay free and empty.
        """
        if not self.enable_caching:
            return 0
        sizes = {key: group.block_size for key, group in zip(self.hits.group_keys, self.groups, strict=True)}
        return GroupAdoption(self.pool, self.ledger, sizes, self.prefix_size, self.hash_function).adopt(tagged)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_integrity(self, requests: Iterable[Request], detached: Iterable[list[KVCacheBlock]] = ()) -> None:
        """Check the pool against all tables of all requests that hold blocks, and detached ones: there are none.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self.pool.check_integrity(chain(self._checked_tables(requests), detached))

    def _checked_tables(self, requests: Iterable[Request]) -> Iterator[list[KVCacheBlock]]:
        group_of: dict[int, int] = {}
        null_block = self.pool.null_block
        for request in requests:
            held = 0
            assert len(request.tables) == len(self.groups), f"{request!r} has no table in some group"
            for group_index, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
                name = f"{request!r}, group {group_index}"
                computed = request.num_computed_tokens
                assert len(table.blocks) * group.block_size >= computed, f"{name} has too few blocks"
                assert table.first <= group.first_needed_block(computed), f"{name} lacks what the next token reads"
                ids = b"".join(block.block_id.to_bytes(4, "little") for block in table.blocks)
                assert ids == table.block_id_bytes, f"{name} would send another table than it holds"
                for index, block in enumerate(table.blocks):
                    assert (block is null_block) == (index < table.first), f"{name}, entry {index} is {block!r}"
                    if block is null_block:
                        continue
                    held += 1
                    owner = group_of.setdefault(block.block_id, group_index)
                    assert owner == group_index, f"{block!r} is in tables of groups {owner} and {group_index}"
                    if request.is_cacheable and self.enable_caching and index < table.num_cached:
                        parent = self.hits.prefix_at(request, index * group.block_size) if index else None
                        is_its = block.content is not None and block.content.parent is parent
                        assert is_its, f"{name} relies on content that {block!r} does not have"
                yield table.blocks
            longest = max(request.num_tokens, request.num_computed_tokens)
            assert held <= self.num_blocks_for(longest), f"{request!r} holds {held} blocks"


KVCache = KVCacheManager | KVCacheCoordinator
"""What a scheduler works on."""


def make_kv_cache(
    num_blocks: int,
    groups: Sequence[KVGroup],
    *,
    longest_chunk: int,
    enable_caching: bool = True,
    hash_function: HashFunction = default_hash,
    eviction_policy: str = DEFAULT_EVICTION_POLICY,
    events: BlockEventLog | None = None,
    history: BlockHistory | None = None,
) -> KVCache:
    """The books for a model's groups: a single one of full attention needs no coordinator. See `KVCacheCoordinator`.

    Only a cache that needs none tells `history`.
    """
    if needs_no_coordinator(groups):
        return KVCacheManager(
            num_blocks,
            groups[0].block_size,
            enable_caching=enable_caching,
            hash_function=hash_function,
            eviction_policy=eviction_policy,
            events=events,
            history=history,
        )
    return KVCacheCoordinator(
        num_blocks,
        groups,
        longest_chunk=longest_chunk,
        enable_caching=enable_caching,
        hash_function=hash_function,
        eviction_policy=eviction_policy,
        events=events,
    )


def needs_no_coordinator(groups: Sequence[KVGroup]) -> bool:
    """Whether there is one group, of full attention."""
    return len(groups) == 1 and isinstance(groups[0], FullAttention)


def table_sizes(kv: KVCache) -> list[int]:
    """By group, tokens per entry of its tables. None where requests have their one table in `blocks`."""
    return [group.block_size for group in kv.groups] if isinstance(kv, KVCacheCoordinator) else []


def _depth(held: tuple[int, KVCacheBlock]) -> int:
    return held[0]
