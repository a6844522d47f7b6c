"""Block tables of a model with several KV groups: all of them grow, hit and are freed together.

Station: takes the place of `KVCacheManager` where a model has more than one group, or one that is not full attention;
`make_kv_cache` chooses. The scheduler asks both the same. One `BlockPool` serves all groups, so a block's id says
nothing of its group; what a group needs is for `kv_groups` to know.

    request ─▶ contents: its prefixes, one per `prefix_size` tokens, the same for all groups (`GroupPrefixes`)
            └▶ tables: one `GroupTable` per group; entry i's content is (group, prefix at the entry's start, tokens)

Here tables grow and become findable. How they begin is for `GroupAdmission` to say, how long a hit is for `GroupHits`;
`GroupForks` forks them, `GroupSwaps` takes them to the host, and `release` gives them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import BlockHash, HashFunction, default_hash
from kvmanager_service.core.block_history import BlockHistory, BlockMoment
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.copy_on_write import CopyOnWrite
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY
from kvmanager_service.core.group_admission import GroupAdmission
from kvmanager_service.core.group_adoption import GroupAdoption
from kvmanager_service.core.group_forks import GroupForks
from kvmanager_service.core.group_hits import GroupHits
from kvmanager_service.core.group_prefixes import GroupPrefixes
from kvmanager_service.core.group_swaps import GroupSwaps
from kvmanager_service.core.kv_cache_manager import NONE_LEAVING
from kvmanager_service.core.kv_groups import KVGroup, TableEntry
from kvmanager_service.core.release import give_back_tables
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
        prefixes: those of requests.
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
        self.hits = GroupHits(self.pool.lookup, groups, hash_function)
        self.block_size = self.hits.block_size
        self.prefix_size = self.hits.prefix_size
        self.prefixes = GroupPrefixes(self.pool, self.prefix_size, hash_function)
        self._admission = GroupAdmission(
            self.pool, groups, self.hits, self.prefixes, longest_chunk=longest_chunk, enable_caching=enable_caching
        )
        self._forks = GroupForks(self.pool, self.groups, self.hits, self.copies)
        self._swaps = GroupSwaps(self.pool, self.groups, self.hits)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks of all groups that a request holds on its way to num_tokens tokens."""
        return sum(group.most_blocks(num_tokens, self.longest_chunk) for group in self.groups)

    # --- tables begin ---------------------------------------------------------------------------------------------

    def longest_hit(self, request: Request) -> int:
        """The longest cached prefix, in tokens, from which all groups of a request without blocks can go on."""
        return self._admission.longest_hit(request)

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
        return self._admission.admit(request, reserve)

    def may_fit(self, request: Request, reserve: int) -> bool:
        """Whether `allocate_sequence` may find room; see `GroupAdmission.may_fit`."""
        return self._admission.may_fit(request, reserve)

    def num_lacking(self, request: Request, num_tokens: int, reserve: int = 0) -> int:
        """Free blocks that are too few for its tables to hold what it takes to reach num_tokens; 0 where they do.

        Args:
            request: with or without blocks.
            num_tokens: how many; without blocks, all that are known.
            reserve: blocks that must stay free if the tables take any.
        """
        has_tables = bool(request.tables)
        needed = self.num_new_blocks(request, num_tokens) if has_tables else self._admission.num_needed(request)
        return max(0, needed + reserve - self.pool.num_free_blocks) if needed else 0

    def hit_blocks(self, request: Request) -> set[KVCacheBlock]:
        """What a request without blocks would be given from the cache."""
        return self._admission.hit_blocks(request)

    # --- tables grow, and move ------------------------------------------------------------------------------------

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
            self.prefixes.keep(child)

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
            self.prefixes.update(request)
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
        """Tokens of its prefix that others reference, too; see `GroupSwaps.num_shared_tokens`."""
        return self._swaps.num_shared_tokens(request)

    def detach(self, request: Request) -> list[KVCacheBlock]:
        """Take the tables from a request that is about to be freed; what its next token reads stays held.

        Returns:
            The blocks of `entries` of all that it has computed; `give_back_detached` takes them when they are not
            needed any more.
        """
        return self._swaps.detach(request)

    def give_back_detached(self, request: Request, entries: Sequence[TableEntry], blocks: list[KVCacheBlock]) -> None:
        """Take back what `detach` returned, given the entries it was of."""
        self._swaps.give_back(request, entries, blocks)

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
        self.prefixes.update_hashes(request)
        return self.hits.name_of(request, entry)

    def filled_block(self, request: Request, entry: TableEntry, before: BlockContent | None) -> KVCacheBlock | None:
        """A block that holds an entry of a request's tables and is filled; None where there is none.

        Args:
            request: until `forget_request`, its prefixes are kept as those of one that runs.
            entry: of `entries`.
            before: what the entry before it holds; of no concern here, since the ledger proves what comes before.
        """
        request.is_cacheable = True  # whatever has the hash of a prefix of it may be gone by now
        self.prefixes.update(request)
        return self.hits.filled_block(request, entry)

    def forget_request(self, request: Request) -> None:
        """Nobody asks for what this request would hit any more."""
        self.prefixes.drop(request)

    # --- blocks come back -----------------------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Take all blocks of all groups back, the deepest first, so that the deepest part of a prefix goes first."""
        give_back_tables(self.pool, request, self.groups)
        request.tables = []
        request.contents = []
        request.is_cacheable = True
        request.may_share_tail = False
        request.num_computed_tokens = 0
        self.prefixes.drop(request)

    def tables(self, request: Request) -> list[list[KVCacheBlock]]:
        """The blocks that it holds, by table, in order of depth; what its windows have left is not among them."""
        return [table.blocks[table.first :] for table in request.tables]

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
            blocks += self.hits.cached_blocks(request)
            blocks += [block for table in request.tables for block in table.blocks]
            serials.update(prefix.serial for prefix in request.contents[:1])
            request.contents = []
            request.is_cacheable = False
        self.prefixes.forget(serials)
        return self.pool.distrust(blocks)

    def relies_on(self, request: Request, distrusted: set[KVCacheBlock]) -> bool:
        """Whether what a request holds was computed from what `distrust` returned, though a window may have left that.

        It runs, or is a fork that waits.
        """
        return bool(distrusted and request.contents) and request.contents[-1].block is None

    def adopt(self, tagged: Iterable[TaggedBlock]) -> int:
        """Take over blocks that an executor still holds; see `group_adoption`. Returns how many.

        The others stay free and empty.
        """
        if not self.enable_caching:
            return 0
        sizes = {key: group.block_size for key, group in zip(self.hits.group_keys, self.groups, strict=True)}
        return GroupAdoption(self.pool, self.prefixes.ledger, sizes, self.prefix_size, self.hash_function).adopt(tagged)

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
