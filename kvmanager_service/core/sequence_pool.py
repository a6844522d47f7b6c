"""Block tables for an engine that runs its own loop: the same cache, without a scheduler.

Station: called by `servicers.sequences` for each operation of a batch; the only user of its `KVCacheManager`. The
engine decides what is computed when; the pool decides which blocks that goes to, and who should give way when they run
short.

    open ─▶ (extend ─▶ the engine computes ─▶ commit) … ─▶ close
                        fork at any time between two steps

An operation that is refused, or that finds too few blocks, has changed nothing. (On the wire an extend may commit
first: those are two operations here, and the commit stands.)

What sequences share takes no block, so blocks do not bound it: a pool has at most as many sequences as usable blocks,
and a table entry is made by open and fork only while all tables together have fewer than `MAX_ENTRIES_PER_BLOCK` for
each of them. What extend adds is a block's first entry, so it needs no bound of its own. What stands behind tokens
takes memory, too, and no block: a span of a sequence counts as `ENTRIES_PER_SPAN` entries, whichever operation brings
it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvmanager_service.core.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    PoolExhaustedError,
    TooManySequencesError,
    UnknownRequestError,
    invalid_parameter,
)
from kvmanager_service.core.extra_keys import LoraAdapter, PromptSpan, SpanKeys, check_extra_keys, check_spans
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import TOKEN_BYTES, NewRequest, Request, StopRules
from kvmanager_service.core.victims import choose_victims

_NO_TOKENS_TO_COME = StopRules(max_tokens=0)

MAX_ENTRIES_PER_BLOCK = 16
"""How often the whole pool may be shared: entries of all tables, for each usable block. An entry, with its part of the
known tokens, takes about 100 bytes at 16 tokens a block."""

ENTRIES_PER_SPAN = 3
"""What a span counts for among them: with its digest and where it is found it takes about 300 bytes. A fork counts
those that it has in common, as it counts the blocks."""

MAX_VICTIMS = 4_096
"""Most sequences that are advised to give way for one."""

MAX_SHARED_ENTRIES = 65_536
"""Most entries of their tables that are looked at beside one for each missing block: what many share brings nothing
before all of them go, and an engine's operation should not keep all others waiting for it."""

MAX_SPANS = 4_096
"""Most spans of one sequence: what an extend that brings one costs grows with them."""


@dataclass(frozen=True, slots=True)
class TableChange:
    """What became of a block table.

    Attributes:
        first_block: where in the table block_ids belong; those before are as they were.
        block_ids: the table from there to its end.
        num_computed_tokens: tokens whose K/V these blocks hold.
        copies: pairs of source and target, to copy whole and in order before anything is written.
    """

    first_block: int
    block_ids: bytes
    num_computed_tokens: int
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BlockShortage:
    """Too few blocks are free; nothing has changed.

    Attributes:
        needed_blocks: how many the operation takes.
        free_blocks: how many are free.
        victim_ids: sequences that should give way, first to last; together they free enough, and without any of them
            there would be too few. Empty when none should: the asking one comes last itself, or those behind it do not
            free enough (the last `MAX_VICTIMS` of them, or fewer with `MAX_SHARED_ENTRIES`).
    """

    needed_blocks: int
    free_blocks: int
    victim_ids: tuple[str, ...]


class SequencePool:
    """The sequences of one engine.

    Args:
        kv: its block tables.
        isolate_tenants: whether only sequences of one tenant share blocks.

    Attributes:
        sequences: open ones by id, in the order they were opened.
        prefix_queries: tokens that sequences were opened with, those of resumed ones left out.
        prefix_hits: those of them whose K/V was found.
        num_entries: entries of all tables.
        num_spans: spans of all sequences.
    """

    def __init__(self, kv: KVCacheManager, *, isolate_tenants: bool = False) -> None:
        self.kv = kv
        self.isolate_tenants = isolate_tenants
        self.sequences: dict[str, Request] = {}
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_entries = 0
        self.num_spans = 0
        self._next_seq = 0
        self._by_rank: list[Request] = []

    def open(
        self,
        sequence_id: str,
        token_bytes: bytes,
        num_slots: int = 0,
        *,
        priority: int = 0,
        cache_salt: str = "",
        lora: LoraAdapter | None = None,
        spans: Sequence[PromptSpan] = (),
        tenant: str = "",
        is_resumed: bool = False,
    ) -> TableChange | BlockShortage:
        """Begin a sequence with what the cache holds of it, and blocks for the rest.

        Args:
            sequence_id: names it.
            token_bytes: its tokens, little-endian int32; at least one.
            num_slots: how many tokens its table must hold; 0 for those given.
            priority: a higher one gives way first.
            cache_salt: separates prefix caches.
            lora: the adapter it runs with.
            spans: what stands behind its tokens, in order and without overlap.
            tenant: whose it is, where tenants are isolated.
            is_resumed: whether it was open before and had to give way; its lookup is not counted.

        Raises:
            DuplicateRequestError: the id is open.
            InvalidRequestError: no token, fewer slots than tokens, or more than the pool will ever hold; a bad adapter
                or span.
            TooManySequencesError: there are as many sequences, table entries or spans as there may be.
        """
        self._require_new(sequence_id)
        require_few_spans(len(spans))
        new = NewRequest(
            sequence_id,
            token_bytes,
            _NO_TOKENS_TO_COME,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            is_isolated=self.isolate_tenants,
            lora=lora,
            spans=tuple(spans),
        )
        sequence = Request(new, self._next_seq)
        check_extra_keys(lora, spans, sequence.num_tokens)
        if not sequence.num_tokens:
            raise invalid_parameter("token_ids", "at least one token", "none")
        num_slots = self._slots(sequence, sequence.num_tokens, num_slots)
        self._require_room(num_slots)
        self._require_new_sequence()
        self._require_entries(self.kv.num_blocks_for(num_slots), len(spans))
        hits = self.kv.get_computed_blocks(sequence)
        if not self.kv.allocate_slots(sequence, num_slots, hits):
            num_free_hits = sum(block.ref_cnt == 0 for block in hits)
            return self._shortage(sequence, self.kv.num_blocks_for(num_slots) - len(hits) + num_free_hits)
        self._add(sequence)
        if not is_resumed:
            self.prefix_queries += sequence.num_tokens
            self.prefix_hits += sequence.num_computed_tokens
        return TableChange(0, bytes(sequence.block_id_bytes), sequence.num_computed_tokens)

    def extend(
        self, sequence_id: str, token_bytes: bytes, num_slots: int = 0, spans: Sequence[PromptSpan] = ()
    ) -> TableChange | BlockShortage:
        """Make a table hold more tokens, and make the slots that are not computed yet the sequence's own.

        Args:
            sequence_id: whose.
            token_bytes: tokens that became known since, little-endian int32.
            num_slots: how many tokens the table must hold; 0 for all known ones.
            spans: what stands behind these tokens, in order and without overlap. No block with one of them has been
                hashed yet, so its keys are still open.

        Raises:
            UnknownRequestError: no such sequence.
            InvalidRequestError: fewer slots than known tokens; a bad span, or one of other tokens.
            PoolExhaustedError: more slots than the pool will ever hold.
            TooManySequencesError: there are as many spans as there may be.
        """
        sequence = self._known(sequence_id)
        num_tokens = sequence.num_tokens + len(token_bytes) // TOKEN_BYTES
        num_slots = self._slots(sequence, num_tokens, num_slots)
        if spans:
            require_few_spans(len(spans) + _num_spans(sequence))
            check_spans(spans, sequence.num_tokens, num_tokens)
            self._require_entries(0, len(spans))
        if self.kv.num_blocks_for(num_slots) > self.kv.pool.num_usable_blocks:
            raise PoolExhaustedError(
                "POOL_EXHAUSTED",
                f"expected a sequence that the pool's {self.kv.pool.num_usable_blocks} blocks of {self.kv.block_size} "
                f"tokens can hold, got one of {num_slots} tokens; close it, or open a larger pool",
                num_slots=num_slots,
                num_blocks=self.kv.pool.num_usable_blocks,
            )
        before = len(sequence.blocks)
        if not self.kv.allocate_slots(sequence, num_slots):
            return self._shortage(sequence, self.kv.num_new_blocks(sequence, num_slots))
        copies = tuple((copy.source_id, copy.target_id) for copy in self.kv.take_copies())
        sequence.token_bytes += token_bytes
        sequence.num_tokens = num_tokens
        if spans:
            sequence.spans = SpanKeys(spans) if sequence.spans is None else sequence.spans.and_then(spans)
            self.num_spans += len(spans)
        self.num_entries += len(sequence.blocks) - before
        first = before if not copies else sequence.num_computed_tokens // self.kv.block_size
        return TableChange(
            first, bytes(sequence.block_id_bytes[first * TOKEN_BYTES :]), sequence.num_computed_tokens, copies
        )

    def commit(self, sequence_id: str, num_computed_tokens: int) -> None:
        """Note up to where the engine's memory holds a sequence; blocks that are full of it can be hit from now on.

        Raises:
            UnknownRequestError: no such sequence.
            InvalidRequestError: fewer than before, more than are known, or more than the table holds.
        """
        sequence = self._known(sequence_id)
        most = min(sequence.num_tokens, len(sequence.blocks) * self.kv.block_size)
        if not sequence.num_computed_tokens <= num_computed_tokens <= most:
            raise invalid_parameter(
                "num_computed_tokens",
                f"{sequence.num_computed_tokens} (as before) to {most} (known, and in the table)",
                num_computed_tokens,
            )
        sequence.num_computed_tokens = num_computed_tokens
        self.kv.cache_blocks(sequence, 0)

    def fork(self, sequence_id: str, new_sequence_id: str, num_tokens: int = 0, *, priority: int = 0) -> TableChange:
        """Begin a sequence that shares the blocks of another one's first tokens. Takes no block.

        Args:
            sequence_id: the one that is branched.
            new_sequence_id: names the branch.
            num_tokens: how many they have in common; 0 for all that was committed.
            priority: the branch's.

        Raises:
            UnknownRequestError: no such sequence.
            DuplicateRequestError: the new id is open.
            InvalidRequestError: more tokens than were committed, none, or a part of a span's.
            TooManySequencesError: there are as many sequences, table entries or spans as there may be.
        """
        parent = self._known(sequence_id)
        self._require_new(new_sequence_id)
        num_tokens = num_tokens or parent.num_computed_tokens
        if not 1 <= num_tokens <= parent.num_computed_tokens:
            raise invalid_parameter("num_tokens", f"1 to {parent.num_computed_tokens} (committed)", num_tokens)
        spans = None if parent.spans is None else self._spans_before(parent.spans, num_tokens)
        self._require_new_sequence()
        self._require_entries(self.kv.num_blocks_for(num_tokens), 0 if spans is None else len(spans))
        new = NewRequest(new_sequence_id, parent.tokens(0, num_tokens), _NO_TOKENS_TO_COME, priority=priority)
        child = Request(new, self._next_seq)
        child.extra_keys = parent.extra_keys
        child.spans = spans
        self.kv.fork(parent, child, num_tokens)
        self._add(child)
        return TableChange(0, bytes(child.block_id_bytes), child.num_computed_tokens)

    def close(self, sequence_id: str) -> None:
        """End a sequence; its cached blocks can be hit until they are needed. Raises UnknownRequestError."""
        sequence = self._known(sequence_id)
        self.num_entries -= len(sequence.blocks)
        self.num_spans -= _num_spans(sequence)
        self.kv.free(sequence)
        del self.sequences[sequence_id]
        del self._by_rank[bisect_left(self._by_rank, _rank(sequence), key=_rank)]

    def dismantle(self) -> None:
        """End all of it: what is left refers to nothing in a circle. Nothing may be called any more."""
        self.sequences.clear()
        self._by_rank.clear()
        self.kv.pool.dismantle()

    def check_integrity(self) -> None:
        """Check the pool against all tables. Raises AssertionError."""
        self.kv.check_integrity(self.sequences.values())
        assert self._by_rank == sorted(self.sequences.values(), key=_rank), "sequences are out of order"
        entries = sum(len(sequence.blocks) for sequence in self.sequences.values())
        assert self.num_entries == entries, f"{entries} table entries, counted {self.num_entries}"
        spans = sum(map(_num_spans, self.sequences.values()))
        assert self.num_spans == spans, f"{spans} spans, counted {self.num_spans}"

    def _add(self, sequence: Request) -> None:
        self._next_seq += 1
        self.sequences[sequence.request_id] = sequence
        self.num_entries += len(sequence.blocks)
        self.num_spans += _num_spans(sequence)
        insort(self._by_rank, sequence, key=_rank)

    def _known(self, sequence_id: str) -> Request:
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            raise UnknownRequestError(
                "SEQUENCE_NOT_FOUND",
                f"expected the id of an open sequence, got {sequence_id!r}; open it first",
                sequence_id=sequence_id,
            )
        return sequence

    def _require_new(self, sequence_id: str) -> None:
        if sequence_id in self.sequences:
            raise DuplicateRequestError(
                "SEQUENCE_ID_IN_USE",
                f"expected a sequence_id that is not open, got {sequence_id!r}; choose another, or close that one",
                sequence_id=sequence_id,
            )

    def _require_room(self, num_slots: int) -> None:
        needed, usable = self.kv.num_blocks_for(num_slots), self.kv.pool.num_usable_blocks
        if needed > usable:
            raise InvalidRequestError(
                "SEQUENCE_TOO_LONG",
                f"expected at most {usable * self.kv.block_size} tokens (the pool's {usable} blocks of "
                f"{self.kv.block_size}), got {num_slots}; shorten it, or open a larger pool",
                num_slots=num_slots,
                num_blocks=usable,
            )

    def _require_new_sequence(self) -> None:
        usable = self.kv.pool.num_usable_blocks
        if len(self.sequences) >= usable:
            raise self._too_many(f"fewer than {usable} open sequences (one for each block)", len(self.sequences))

    def _require_entries(self, num_entries: int, num_spans: int) -> None:
        """Require room for so many more entries and spans."""
        most = self.kv.pool.num_usable_blocks * MAX_ENTRIES_PER_BLOCK
        entries = self.num_entries + num_entries + ENTRIES_PER_SPAN * (self.num_spans + num_spans)
        if entries > most:
            counted = f", {ENTRIES_PER_SPAN} counted for each span" if self.num_spans + num_spans else ""
            raise self._too_many(
                f"at most {most} entries in all block tables ({MAX_ENTRIES_PER_BLOCK} for each block{counted})", entries
            )

    def _too_many(self, expected: str, got: int) -> TooManySequencesError:
        return TooManySequencesError(
            "TOO_MANY_SEQUENCES",
            f"expected {expected}, got {got}; close a sequence, or open a larger pool",
            num_sequences=len(self.sequences),
            num_entries=self.num_entries,
            num_spans=self.num_spans,
            num_blocks=self.kv.pool.num_usable_blocks,
        )

    @staticmethod
    def _spans_before(spans: SpanKeys, num_tokens: int) -> SpanKeys | None:
        """What stands behind the first num_tokens tokens. Raises InvalidRequestError when they end within a span."""
        across = spans.across(num_tokens)
        if across is not None:
            raise invalid_parameter(
                "num_tokens",
                f"none from {across.offset + 1} to {across.stop - 1}, within a span",
                num_tokens,
                "fork where it begins or ends",
            )
        return spans.before(num_tokens)

    @staticmethod
    def _slots(sequence: Request, num_tokens: int, num_slots: int) -> int:
        """How many tokens the table must hold when `num_tokens` are known."""
        if num_slots and num_slots < num_tokens:
            raise invalid_parameter(
                "num_slots", f"at least {num_tokens} (the known tokens), or 0 for as many", num_slots
            )
        return num_slots or num_tokens

    def _shortage(self, sequence: Request, needed: int) -> BlockShortage:
        return BlockShortage(needed, self.kv.pool.num_free_blocks, self._victims(sequence, needed))

    def _victims(self, sequence: Request, needed: int) -> tuple[str, ...]:
        """Who should give way: as few of those that rank behind this one as it takes, the last first."""
        missing = needed - self.kv.pool.num_free_blocks
        victims = choose_victims(self._behind(sequence, missing), self.kv, sequence, missing)
        return tuple(victim.request_id for victim in victims)

    def _behind(self, sequence: Request, num_missing: int) -> Iterator[Request]:
        """The last that rank behind this one, the last first: `MAX_VICTIMS`, or fewer whose tables are long enough."""
        rank = _rank(sequence)
        num_entries = num_missing + MAX_SHARED_ENTRIES
        for other in islice(reversed(self._by_rank), MAX_VICTIMS):
            if num_entries <= 0 or _rank(other) <= rank:
                return
            num_entries -= len(other.blocks)
            yield other


def require_few_spans(num_spans: int) -> None:
    """Raise InvalidRequestError for more spans than a sequence may have."""
    if num_spans > MAX_SPANS:
        raise invalid_parameter(
            "spans", f"at most {MAX_SPANS} in a sequence", num_spans, "let one digest stand for those side by side"
        )


def _num_spans(sequence: Request) -> int:
    return 0 if sequence.spans is None else len(sequence.spans)


def _rank(sequence: Request) -> tuple[int, int]:
    """Who comes first: the lowest priority value, then whoever was opened first."""
    return sequence.priority, sequence.arrival_seq


__all__ = [
    "ENTRIES_PER_SPAN",
    "MAX_ENTRIES_PER_BLOCK",
    "MAX_SHARED_ENTRIES",
    "MAX_SPANS",
    "MAX_VICTIMS",
    "BlockShortage",
    "SequencePool",
    "TableChange",
    "require_few_spans",
]
