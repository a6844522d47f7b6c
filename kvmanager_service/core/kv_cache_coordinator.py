"""Block tables of a model with several KV groups: all of them grow, hit and are freed together.

Station: takes the place of `KVCacheManager` where a model has more than one group, or one that is not full attention;
`make_kv_cache` chooses. The scheduler asks both the same. One `BlockPool` serves all groups, so a block's id says
nothing of its group; what a group needs is for `kv_groups` to know.

    request ─▶ contents: its prefixes, one per `prefix_size` tokens, the same for all groups (`PrefixLedger`)
            └▶ tables: one `GroupTable` per group; entry i's content is (group, prefix at the entry's start, tokens)

A hit is a length that all groups agree on, see `group_hits`: a multiple of all block sizes, never the whole sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import BlockHash, HashFunction, default_hash, hash_block_tokens
from kvmanager_service.core.block_history import BlockHistory, BlockMoment
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.copy_on_write import CopyOnWrite
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY
from kvmanager_service.core.group_adoption import GroupAdoption
from kvmanager_service.core.group_forks import GroupForks
from kvmanager_service.core.group_hits import GroupHits, GroupLookup
from kvmanager_service.core.group_swaps import GroupSwaps
from kvmanager_service.core.kv_cache_manager import NONE_LEAVING, KVCacheManager
from kvmanager_service.core.kv_groups import FullAttention, GroupTable, KVGroup, TableEntry
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
        history: told of what becomes of each block, and in which group; None tells nobody.

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
        history: BlockHistory | None = None,
    ) -> None:
        if not groups:
            raise ValueError("expected at least one KV group, got none")
        if longest_chunk < 1:
            raise ValueError(f"expected longest_chunk of at least 1 token, got {longest_chunk}")
        self.pool = BlockPool(num_blocks, eviction_policy, events=events, history=history)
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
        self._swaps = GroupSwaps(self.groups, self.hits)
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
                hashes.append(hash_block_tokens(self.hash_function, hashes[-1] if hashes else None, tokens, extra_keys))
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
            request: a waiting one. What the host holds of it beyond what is hit will be copied to its blocks.
            reserve: blocks that must stay free.

        Returns:
            False when too few blocks are free; then nothing at all has changed.
        """
        if not self._may_fit(request, reserve):
            return False
        hit, beginnings = self._lay_out(request)
        if _num_taken(beginnings) + reserve > self.pool.num_free_blocks:
            return False
        for beginning in beginnings:
            self.pool.touch(beginning.found)
        for group_index, beginning in enumerate(beginnings):
            table = GroupTable(self.groups[group_index], self.pool.null_block, beginning.first)
            table.extend(beginning.found)
            table.cached_to(len(table.blocks))
            new = self.pool.get_new_blocks(beginning.num_new)
            table.extend(new)
            request.tables.append(table)
            if self.pool.history is not None:
                self.pool.history.note_table(request.request_id, group_index, beginning.found, BlockMoment.HIT)
                self.pool.history.note_table(request.request_id, group_index, new, BlockMoment.ALLOCATED)
        request.num_computed_tokens = hit
        return True

    def _lay_out(self, request: Request) -> tuple[int, list[_Beginning]]:
        """How the tables of a request without blocks would begin: tokens hit, and what each table takes."""
        lookups = self.hits.lookups(request)
        hit = self._search(request, lookups)
        start = max(hit, request.num_swapped_tokens)
        known = min(start, len(request.contents) * self.prefix_size)
        beginnings = []
        for group, lookup in zip(self.groups, lookups, strict=True):
            first = group.first_needed_block(start)
            found: list[KVCacheBlock] = []
            for index in range(first, known // group.block_size):
                block = lookup.block(index)
                if block is None:
                    break
                found.append(block)
            assert start > hit or len(found) == hit // group.block_size - first
            end = group.table_end(start, request.num_tokens, self.longest_chunk)
            beginnings.append(_Beginning(first, found, end - first - len(found)))
        return hit, beginnings

    def num_lacking(self, request: Request, num_tokens: int) -> int:
        """Free blocks that are too few for its tables to hold what it takes to reach num_tokens; 0 where they do.

        Of a request without blocks num_tokens is all that are known.
        """
        is_running = bool(request.tables)
        needed = self.num_new_blocks(request, num_tokens) if is_running else _num_taken(self._lay_out(request)[1])
        return max(0, needed - self.pool.num_free_blocks)

    def hit_blocks(self, request: Request) -> set[KVCacheBlock]:
        """What a request without blocks would be given from the cache."""
        return {block for beginning in self._lay_out(request)[1] for block in beginning.found}

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
        history = self.pool.history
        for group, table in zip(self.groups, request.tables, strict=True):
            end = group.table_end(num_computed, num_tokens, self.longest_chunk)
            num_new.append(max(0, end - len(table.blocks)))
            first = group.first_needed_block(num_computed)
            firsts.append(first)
            leaving += table.blocks[table.first : first]
        num_copied = len(self._forks.shared_tails(request)) if request.may_share_tail else 0
        needed = sum(num_new) + num_copied
        if needed > self.pool.num_free_blocks + sum(block.ref_cnt == 1 for block in leaving):
            return False
        if leaving:
            self.pool.free_blocks(reversed(leaving))
        for group_index, (table, first, count) in enumerate(zip(request.tables, firsts, num_new, strict=True)):
            if history is not None:
                left = table.blocks[table.first : first]
                history.note_table(request.request_id, group_index, left, BlockMoment.FREED)
            if first > table.first:
                table.leave(first)
            if count:
                new = self.pool.get_new_blocks(count)
                table.extend(new)
                if history is not None:
                    history.note_table(request.request_id, group_index, new, BlockMoment.ALLOCATED)
        if request.may_share_tail:
            self._forks.own_tails(request)
        return True

    def num_new_blocks(
        self, request: Request, num_tokens: int, leaving: Mapping[KVCacheBlock, int] = NONE_LEAVING
    ) -> int:
        """Free blocks that `allocate_slots` takes beyond those that come free by what its windows leave.

        Args:
            request: a running one.
            num_tokens: as there.
            leaving: references that are not counted, by block: they will have been dropped.
        """
        num_computed = request.num_computed_tokens
        needed = 0
        for group, table in zip(self.groups, request.tables, strict=True):
            needed += max(0, group.table_end(num_computed, num_tokens, self.longest_chunk) - len(table.blocks))
            for block in table.blocks[table.first : group.first_needed_block(num_computed)]:
                needed -= block.ref_cnt - leaving.get(block, 0) == 1
        if request.may_share_tail:
            for block in self._forks.shared_tails(request):
                needed += block.ref_cnt - leaving.get(block, 0) > 1
        return max(0, needed)

    def reusable_blocks(self, request: Request) -> list[KVCacheBlock]:
        """Those in a running request's tables of which each makes up for a free block once nobody else holds it.

        What its windows are about to leave, and what it is about to write to: then that need not be copied.
        """
        num_computed = request.num_computed_tokens
        blocks = self._forks.shared_tails(request) if request.may_share_tail else []
        for group, table in zip(self.groups, request.tables, strict=True):
            blocks += table.blocks[table.first : group.first_needed_block(num_computed)]
        return blocks

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

    # --- blocks leave for the host, and come back -----------------------------------------------------------------

    def entries(self, num_tokens: int) -> list[TableEntry]:
        """The entries of all groups that the token at num_tokens reads, in order of depth."""
        return self.hits.entries(num_tokens)

    def num_shared_tokens(self, request: Request) -> int:
        """Tokens of its prefix that others reference, too, in all groups of full attention.

        Where a window begins, nobody else need be: so it is said to be none where all groups have one.
        """
        return min([self._num_shared_tokens(request, index) for index in self._full_groups], default=0)

    def _num_shared_tokens(self, request: Request, group_index: int) -> int:
        shared = 0
        for block in request.tables[group_index].blocks:
            if block.ref_cnt == 1:
                break
            shared += self.groups[group_index].block_size
        return shared

    def detach(self, request: Request, num_tokens: int) -> list[KVCacheBlock] | None:
        """Take the tables from a request that is about to be freed; what its token at num_tokens reads stays held.

        Returns:
            The blocks of `entries`; `give_back_detached` takes them when they are not needed any more. None when one of
            them is not there any more, see `GroupSwaps`; then nothing has changed.
        """
        found = self._swaps.blocks_read_at(request, num_tokens)
        if found is None:
            return None
        from_cache = [block for block, is_held in found if not is_held]
        self.pool.touch(from_cache)
        kept = [block for block, _ in found]
        self._give_back(request, kept=set(kept).difference(from_cache))
        request.tables = []
        return kept

    def give_back_detached(self, request: Request, entries: Sequence[TableEntry], blocks: list[KVCacheBlock]) -> None:
        """Take back what `detach` returned, given the entries it was of."""
        self.pool.free_blocks(reversed(blocks))
        if self.pool.history is not None:
            for (group_index, _), block in zip(entries, blocks, strict=True):
                self.pool.history.note_table(request.request_id, group_index, (block,), BlockMoment.FREED)

    def resume(self, request: Request, num_tokens: int) -> list[tuple[int, KVCacheBlock]]:
        """Let a request that was admitted for it go on at num_tokens, beyond what was hit.

        Returns:
            What must be filled before its next token reads it: a place in `entries`, and the block.
        """
        request.num_computed_tokens = num_tokens
        return self._swaps.blocks_to_fill(request, num_tokens)

    # --- blocks are pinned ----------------------------------------------------------------------------------------

    def name_of(self, request: Request, entry: TableEntry) -> BlockHash:
        """The hash of an entry of a request's tables, whether or not it has any; its tokens are known."""
        hashes, size = request.block_hashes, self.prefix_size
        for index in range(len(hashes), request.num_tokens // size):
            tokens = request.tokens(index * size, (index + 1) * size)
            keys = request.keys_of_block(index, size)
            hashes.append(hash_block_tokens(self.hash_function, hashes[-1] if hashes else None, tokens, keys))
        return self.hits.name_of(request, entry)

    def filled_block(self, request: Request, entry: TableEntry, before: BlockContent | None) -> KVCacheBlock | None:
        """A block that holds an entry of a request's tables and is filled; None where there is none.

        Args:
            request: until `forget_request`, its prefixes are kept as those of one that runs.
            entry: of `entries`.
            before: what the entry before it holds; of no concern here, since the ledger proves what comes before.
        """
        request.is_cacheable = True  # whatever has the hash of a prefix of it may be gone by now
        self._update_prefixes(request)
        return self.hits.filled_block(request, entry)

    def forget_request(self, request: Request) -> None:
        """Nobody asks for what this request would hit any more."""
        self._requests_with_prefixes.pop(request.arrival_seq, None)

    # --- blocks come back -----------------------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Take all blocks of all groups back, the deepest first, so that the deepest part of a prefix goes first."""
        self._give_back(request)
        request.tables = []
        request.contents = []
        request.is_cacheable = True
        request.may_share_tail = False
        request.num_computed_tokens = 0
        self._requests_with_prefixes.pop(request.arrival_seq, None)

    def _give_back(self, request: Request, kept: Collection[KVCacheBlock] = ()) -> None:
        """Drop the tables' references, the deepest first, but for those of the blocks that are kept."""
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
        self.pool.free_blocks([block for block in blocks if block not in kept] if kept else blocks)
        if self.pool.history is not None:
            for group_index, table in enumerate(request.tables):
                freed = [block for block in table.blocks[table.first :] if block not in kept]
                self.pool.history.note_table(request.request_id, group_index, freed, BlockMoment.FREED)

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
        """Check the pool against all tables of all requests that hold blocks, and whatever else holds some.

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
    """The books for a model's groups: a single one of full attention needs no coordinator. See `KVCacheCoordinator`."""
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
        history=history,
    )


def needs_no_coordinator(groups: Sequence[KVGroup]) -> bool:
    """Whether there is one group, of full attention."""
    return len(groups) == 1 and isinstance(groups[0], FullAttention)


def table_sizes(kv: KVCache) -> list[int]:
    """By group, tokens per entry of its tables. None where requests have their one table in `blocks`."""
    return [group.block_size for group in kv.groups] if isinstance(kv, KVCacheCoordinator) else []


def num_groups(kv: KVCache) -> int:
    """How many KV groups there are."""
    return len(kv.groups) if isinstance(kv, KVCacheCoordinator) else 1


class _Beginning:
    """One table of a request that is about to be admitted: null entries, blocks found in the cache, new ones."""

    __slots__ = ("first", "found", "num_new")

    def __init__(self, first: int, found: list[KVCacheBlock], num_new: int) -> None:
        self.first = first
        self.found = found
        self.num_new = num_new


def _num_taken(beginnings: Iterable[_Beginning]) -> int:
    """Free blocks that these take, those among them that are found free."""
    return sum(one.num_new + sum(block.ref_cnt == 0 for block in one.found) for one in beginnings)


def _depth(held: tuple[int, KVCacheBlock]) -> int:
    return held[0]
