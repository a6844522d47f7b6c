"""Block tables for engines with a loop of their own: what a naive engine reads through them is what it wrote."""

from __future__ import annotations

import gc
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeAlias

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmanager_service.core import is_compiled, sequence_pool
from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.block_hash import KeyDomain
from kvmanager_service.core.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    PoolExhaustedError,
    TooManySequencesError,
    UnknownRequestError,
)
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY
from kvmanager_service.core.extra_keys import LoraAdapter, PromptSpan
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import Request
from kvmanager_service.core.sequence_pool import (
    ENTRIES_PER_SPAN,
    MAX_ENTRIES_PER_BLOCK,
    MAX_SPANS,
    MAX_VICTIMS,
    BlockShortage,
    SequencePool,
    TableChange,
)

BLOCK = 4
IMAGE, EMBEDDING = KeyDomain.MULTIMODAL_ITEM, KeyDomain.PROMPT_EMBEDDING
CAT, DOG = b"cat" + bytes(13), b"dog" + bytes(13)


def make_pool(num_blocks: int = 9, eviction_policy: str = DEFAULT_EVICTION_POLICY) -> SequencePool:
    return SequencePool(KVCacheManager(num_blocks, BLOCK, eviction_policy=eviction_policy))


def tokens(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def table(change: TableChange | BlockShortage) -> list[int]:
    assert isinstance(change, TableChange), change
    values = array("i")
    values.frombytes(change.block_ids)
    return values.tolist()


def opened(pool: SequencePool, name: str, length: int, **options: Any) -> list[int]:
    """A sequence of its own tokens, all committed."""
    begin = (len(pool.sequences) + 1) * 1_000
    change = pool.open(name, tokens(range(begin, begin + length)), **options)
    pool.commit(name, length)
    return table(change)


def test_open_takes_blocks_for_the_tokens_and_nothing_is_cached() -> None:
    change = make_pool().open("a", tokens(range(9)))
    assert isinstance(change, TableChange)
    assert (change.first_block, change.num_computed_tokens, change.copies) == (0, 0, ())
    assert len(table(change)) == 3


def test_sequences_ask_for_nothing_to_be_kept_longer() -> None:
    """Under the policy that goes by what is asked, the order is that of LRU; forks and branches included."""
    orders = []
    for policy in ("priority", "lru"):
        pool = make_pool(eviction_policy=policy)
        opened(pool, "a", 8)
        opened(pool, "b", 9)
        pool.fork("a", "a2", 6)
        pool.extend("a2", tokens([1, 2, 3]))
        pool.commit("a2", 8)
        for name in ("a", "b", "a2"):
            pool.close(name)
        pool.check_integrity()
        free = pool.kv.pool.free_block_queue
        orders.append([block.block_id for block in free if block.content is not None])
    assert orders[0] == orders[1]
    assert len(orders[0]) == 5


def test_num_slots_reserves_ahead() -> None:
    assert len(table(make_pool().open("a", tokens(range(3)), 9))) == 3


def test_committed_full_blocks_are_found_by_the_next_sequence() -> None:
    pool = make_pool()
    first = table(pool.open("a", tokens(range(9))))
    pool.commit("a", 9)
    change = pool.open("b", tokens([*range(9), 77]))
    assert isinstance(change, TableChange)
    assert change.num_computed_tokens == 8
    assert table(change)[:2] == first[:2]
    assert table(change)[2] != first[2]
    assert (pool.prefix_queries, pool.prefix_hits) == (19, 8)


def test_a_resumed_sequence_finds_its_blocks_and_its_lookup_is_not_counted() -> None:
    pool = make_pool()
    pool.open("a", tokens(range(9)))
    pool.commit("a", 9)
    pool.close("a")
    resumed = pool.open("a", tokens([*range(9), 77]), is_resumed=True)
    assert isinstance(resumed, TableChange)
    assert resumed.num_computed_tokens == 8
    assert (pool.prefix_queries, pool.prefix_hits) == (9, 0)
    pool.open("b", tokens(range(9)))
    assert (pool.prefix_queries, pool.prefix_hits) == (18, 8)
    pool.check_integrity()


def test_what_was_not_committed_is_no_hit() -> None:
    pool = make_pool()
    pool.open("a", tokens(range(9)))
    pool.commit("a", 7)
    change = pool.open("b", tokens(range(9)))
    assert isinstance(change, TableChange)
    assert change.num_computed_tokens == 4


@pytest.mark.parametrize(
    "other", [{"cache_salt": "s"}, {"lora": LoraAdapter("x")}, {"lora": LoraAdapter("x", "2")}], ids=str
)
def test_another_salt_or_adapter_shares_nothing(other: dict[str, object]) -> None:
    pool = make_pool()
    opened(pool, "x", 1)
    pool.open("a", tokens(range(9)), lora=LoraAdapter("x", "1"))
    pool.commit("a", 9)
    change = pool.open("b", tokens(range(9)), **other)  # type: ignore[arg-type]
    assert isinstance(change, TableChange)
    assert change.num_computed_tokens == 0


def hit(pool: SequencePool, length: int, *spans: PromptSpan, **options: object) -> int:
    """How many of as many placeholders are found; all of them are the same token."""
    change = pool.open("asks", tokens([7] * length), spans=spans, **options)  # type: ignore[arg-type]
    assert isinstance(change, TableChange)
    pool.close("asks")
    return change.num_computed_tokens


def test_open_shares_what_a_span_covers_only_with_the_same_one() -> None:
    pool = make_pool(20)
    cat = PromptSpan(IMAGE, CAT, 5, 6)
    pool.open("a", tokens([7] * 13), spans=[cat])
    pool.commit("a", 13)
    assert hit(pool, 13, cat) == 12
    for other in (replace(cat, digest=DOG), replace(cat, domain=EMBEDDING), replace(cat, offset=6, length=5)):
        assert hit(pool, 13, other) == 4, "the block before it is anybody's"
    assert hit(pool, 13) == 4
    assert hit(pool, 13, replace(cat, offset=1)) == 0
    pool.check_integrity()


def test_extend_brings_spans_of_its_own_tokens_and_they_are_keys_of_their_blocks() -> None:
    pool = make_pool(20)
    cat, dog = PromptSpan(IMAGE, CAT, 1, 3), PromptSpan(IMAGE, DOG, 6, 4)
    pool.open("a", tokens([7] * 6), spans=[cat])
    pool.commit("a", 6)
    pool.extend("a", tokens([7] * 4), spans=[dog])
    pool.commit("a", 10)
    pool.extend("a", tokens([7] * 3), spans=[replace(cat, offset=12, length=1)])
    pool.commit("a", 13)
    assert hit(pool, 13, cat, dog) == 12
    assert hit(pool, 13, cat) == hit(pool, 13, cat, replace(dog, offset=7, length=3)) == 4
    pool.open("b", tokens([7] * 6))
    pool.extend("b", tokens([7] * 4), spans=[dog])
    assert hit(pool, 13, cat, dog) == 12, "what another says changes nothing"


def test_extend_that_finds_too_few_blocks_brings_no_span() -> None:
    pool = make_pool(6)
    pool.open("a", tokens([7] * 6))
    opened(pool, "b", 12)
    cat = PromptSpan(IMAGE, CAT, 6, 3)
    assert isinstance(pool.extend("a", tokens([7] * 3), spans=[cat]), BlockShortage)
    pool.close("b")
    pool.extend("a", tokens([7] * 3))
    pool.commit("a", 9)
    assert hit(pool, 9) == 8


def test_branches_have_the_spans_of_what_they_have_in_common() -> None:
    pool = make_pool(40)
    cat, dog = PromptSpan(IMAGE, CAT, 1, 4), PromptSpan(IMAGE, DOG, 6, 2)
    pool.open("a", tokens([7] * 9), spans=[cat, dog])
    pool.commit("a", 9)
    for name, length, kept in (("all", 9, [cat, dog]), ("some", 6, [cat]), ("none", 1, [])):
        pool.fork("a", name, length)
        pool.extend(name, tokens([7] * (13 - length)), spans=[PromptSpan(EMBEDDING, DOG, 9, 4)])
        pool.commit(name, 13)
        assert hit(pool, 14, *kept, PromptSpan(EMBEDDING, DOG, 9, 4)) == 12, name
    assert hit(pool, 13, cat, dog) == 8, "what branches bring is not their parent's"
    pool.check_integrity()


def test_fork_within_a_span_is_refused_and_changes_nothing() -> None:
    pool = make_pool()
    pool.open("a", tokens([7] * 9), spans=[PromptSpan(IMAGE, CAT, 2, 4)])
    pool.commit("a", 9)
    for length in (3, 4, 5):
        with pytest.raises(InvalidRequestError, match=f"num_tokens: expected none from 3 to 5.*got {length}"):
            pool.fork("a", "b", length)
    assert list(pool.sequences) == ["a"]
    pool.check_integrity()
    for length in (2, 6):
        pool.fork("a", f"b{length}", length)


def test_spans_are_refused_by_name_and_nothing_changes() -> None:
    pool = make_pool(9)
    pool.open("a", tokens([7] * 5), spans=[PromptSpan(IMAGE, CAT, 3, 2)])
    free = pool.kv.pool.num_free_blocks
    for spans, field in (
        ([PromptSpan(IMAGE, CAT, 4, 1)], "spans[0].offset"),
        ([PromptSpan(IMAGE, CAT, 5, 3)], "spans[0].length"),
        ([PromptSpan(IMAGE, b"short", 5, 2)], "spans[0].digest"),
        ([PromptSpan(IMAGE, CAT, 5, 1), PromptSpan(IMAGE, CAT, 5, 1)], "spans[1].offset"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            pool.extend("a", tokens([7] * 2), spans=spans)
        assert caught.value.metadata["field"] == field
    with pytest.raises(InvalidRequestError) as caught:
        pool.open("b", tokens([7] * 2), spans=[PromptSpan(IMAGE, CAT, 1, 2)])
    assert caught.value.metadata["field"] == "spans[0].length"
    assert (pool.kv.pool.num_free_blocks, pool.sequences["a"].num_tokens) == (free, 5)
    assert list(pool.sequences) == ["a"]


def test_a_sequence_has_no_more_spans_than_it_may() -> None:
    pool = make_pool(2 + MAX_SPANS // BLOCK)
    most = [PromptSpan(IMAGE, CAT, offset, 1) for offset in range(MAX_SPANS)]
    pool.open("a", tokens([7] * MAX_SPANS), spans=most)
    one = PromptSpan(IMAGE, CAT, MAX_SPANS, 1)
    for refused in (
        lambda: pool.extend("a", tokens([7]), spans=[one]),
        lambda: pool.open("b", tokens([7] * (MAX_SPANS + 1)), spans=[*most, one]),
    ):
        with pytest.raises(InvalidRequestError, match=f"spans: expected at most {MAX_SPANS} in a sequence"):
            refused()
    assert isinstance(pool.extend("a", tokens([7])), TableChange)


@pytest.mark.parametrize(("isolate", "expected"), [(True, [0, 0, 8]), (False, [8, 8, 8])])
def test_tenants_share_blocks_unless_they_are_isolated(isolate: bool, expected: list[int]) -> None:
    pool = SequencePool(KVCacheManager(20, BLOCK), isolate_tenants=isolate)
    cat = PromptSpan(IMAGE, CAT, 1, 4)
    pool.open("a", tokens([7] * 9), spans=[cat], tenant="a")
    pool.commit("a", 9)
    pool.fork("a", "branch", 6)
    pool.close("a")
    assert [hit(pool, 9, cat, tenant=tenant) for tenant in ("", "b", "a")] == expected
    pool.extend("branch", tokens([7] * 3))
    pool.commit("branch", 9)
    assert [hit(pool, 9, cat, tenant=tenant) for tenant in ("", "b", "a")] == expected


def test_extend_returns_what_is_new_of_the_table() -> None:
    pool = make_pool()
    opened(pool, "a", 4)
    assert table(pool.extend("a", tokens([1]))) != []
    change = pool.extend("a", tokens([2]))
    assert isinstance(change, TableChange)
    assert (change.first_block, table(change)) == (2, [])


def test_fork_shares_all_blocks_and_the_first_to_extend_copies() -> None:
    pool = make_pool()
    blocks = opened(pool, "a", 6)
    free = pool.kv.pool.num_free_blocks
    assert table(pool.fork("a", "b")) == blocks
    assert pool.kv.pool.num_free_blocks == free
    change = pool.extend("a", tokens([50]))
    assert isinstance(change, TableChange)
    assert (change.first_block, change.copies) == (1, ((blocks[1], table(change)[0]),))
    change = pool.extend("b", tokens([60]))
    assert isinstance(change, TableChange)
    assert change.copies == (), "the last holder writes in place"
    pool.check_integrity()


def test_fork_in_the_middle_of_a_cached_block_does_not_write_to_it() -> None:
    pool = make_pool()
    blocks = opened(pool, "a", 8)
    pool.fork("a", "b", 6)
    pool.close("a")
    change = pool.extend("b", tokens([60]))
    assert isinstance(change, TableChange)
    reopened = pool.open("c", tokens([*range(1_000, 1_008), 1]))
    assert isinstance(reopened, TableChange)
    held = table(reopened)[: reopened.num_computed_tokens // BLOCK]
    assert blocks[1] not in held or change.copies, "a block that b writes to would be hit"
    pool.check_integrity()


def test_a_branch_keeps_the_extra_keys() -> None:
    pool = make_pool()
    pool.open("a", tokens(range(6)), cache_salt="s")
    pool.commit("a", 6)
    pool.fork("a", "b")
    pool.extend("b", tokens([6, 7]))
    pool.commit("b", 8)
    assert table(pool.open("c", tokens(range(9)), cache_salt="s"))
    assert pool.prefix_hits == 8
    assert pool.open("d", tokens(range(9))) != pool.open("e", tokens(range(9)), cache_salt="s")
    assert pool.prefix_hits == 16


def test_shortage_names_the_newest_as_victim_and_changes_nothing() -> None:
    pool = make_pool(9)
    opened(pool, "a", 12)
    opened(pool, "b", 8)
    opened(pool, "c", 12)
    before = {name: list(sequence.block_id_bytes) for name, sequence in pool.sequences.items()}
    shortage = pool.extend("a", tokens([1]))
    assert shortage == BlockShortage(1, 0, ("c",))
    assert {name: list(sequence.block_id_bytes) for name, sequence in pool.sequences.items()} == before
    assert pool.sequences["a"].num_tokens == 12
    pool.close("c")
    assert isinstance(pool.extend("a", tokens([1])), TableChange)


def test_the_highest_priority_value_gives_way_first() -> None:
    pool = make_pool(7)
    opened(pool, "a", 8, priority=5)
    opened(pool, "b", 8)
    opened(pool, "c", 8)
    assert pool.extend("b", tokens([1])) == BlockShortage(1, 0, ("a",))


def test_who_comes_last_is_told_to_wait() -> None:
    pool = make_pool(5)
    opened(pool, "a", 8)
    opened(pool, "b", 8)
    assert pool.extend("b", tokens([1])) == BlockShortage(1, 0, ())
    assert pool.open("c", tokens([1, 2])) == BlockShortage(1, 0, ())


def test_nobody_gives_way_for_no_gain() -> None:
    pool = make_pool(5)
    opened(pool, "a", 8)
    opened(pool, "b", 8)
    pool.fork("a", "c")  # holds nothing of its own
    assert pool.extend("a", tokens([1])) == BlockShortage(1, 0, ("b",))


def test_victims_that_share_blocks_give_way_together() -> None:
    pool = make_pool(5)
    opened(pool, "a", 4)
    opened(pool, "b", 12)
    pool.fork("b", "c")
    assert pool.extend("a", tokens([1])) == BlockShortage(1, 0, ("c", "b"))


def test_nobody_is_named_when_those_behind_do_not_free_enough() -> None:
    pool = make_pool(5)
    opened(pool, "a", 4)
    opened(pool, "b", 8)
    opened(pool, "c", 4)
    assert pool.extend("b", tokens(range(8))) == BlockShortage(2, 0, ()), "c alone frees one"
    assert pool.extend("a", tokens(range(8))) == BlockShortage(2, 0, ("b",)), "c frees one, and is not needed then"


def test_whoever_can_be_spared_is_not_named() -> None:
    """By the order e, d and c give way before b. With b two of them need not."""
    pool = make_pool(8)
    for name, length in (("a", 4), ("b", 12), ("c", 4), ("d", 4), ("e", 4)):
        opened(pool, name, length)
    assert pool.extend("a", tokens(range(12))) == BlockShortage(3, 0, ("e", "d", "c"))
    assert pool.extend("a", tokens(range(13))) == BlockShortage(4, 0, ("e", "b")), "the last are spared first"


def test_a_block_shared_with_whoever_asks_needs_no_copy_once_it_is_its_own() -> None:
    """c has nothing of its own: when it goes a need not copy what both have, and that is all it lacks."""
    pool = make_pool(5)
    opened(pool, "a", 6)
    opened(pool, "b", 8)
    pool.fork("a", "c")
    assert pool.extend("a", tokens([1])) == BlockShortage(1, 0, ("c",))
    pool.close("c")
    change = pool.extend("a", tokens([1]))
    assert isinstance(change, TableChange)
    assert change.copies == ()


def test_what_whoever_asks_would_hit_brings_nothing_by_coming_free() -> None:
    """b and c hold a prefix that is asked for. Whether they go or not it is hit, so it takes more than them."""
    pool = make_pool(7)
    opened(pool, "z", 8, priority=2)
    opened(pool, "b", 12, priority=2)
    pool.fork("b", "c", priority=2)
    prefix = range(2_000, 2_012)
    shortage = pool.open("a", tokens([*prefix, *range(5)]))
    assert shortage == BlockShortage(2, 1, ("z",))
    for name in shortage.victim_ids:
        pool.close(name)
    assert isinstance(pool.open("a", tokens([*prefix, *range(5)])), TableChange)


def test_victims_come_in_order_whatever_was_opened_and_closed() -> None:
    drawn = random.Random(1)
    pool = make_pool(41)
    opened(pool, "first", 4, priority=-1)
    for turn in range(300):
        if len(pool.sequences) < 40 and drawn.random() < 0.6:
            opened(pool, f"s{turn}", 4, priority=drawn.randrange(4))
        else:
            name = drawn.choice(list(pool.sequences))
            if name != "first":
                pool.close(name)
        pool.check_integrity()
    behind = sorted(pool.sequences.values(), key=lambda each: (-each.priority, -each.arrival_seq))
    assert len(behind) > 10
    assert behind.pop().request_id == "first"
    shortage = pool.extend("first", tokens(range(39 * 4)))
    assert isinstance(shortage, BlockShortage)
    assert shortage.victim_ids == tuple(sequence.request_id for sequence in behind)


@pytest.mark.skipif(is_compiled(), reason="compiled code looks no global up: nothing to count with")
def test_a_shortage_looks_at_no_more_sequences_than_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in which every sequence finds too few blocks would be quadratic otherwise."""
    pool = make_pool(201)
    for number in range(200):
        opened(pool, f"s{number}", 4)
    looked_at: list[Request] = []
    rank = sequence_pool._rank

    def note(sequence: Request) -> tuple[int, int]:
        looked_at.append(sequence)
        return rank(sequence)

    monkeypatch.setattr(sequence_pool, "_rank", note)
    assert pool.extend("s0", tokens([1])) == BlockShortage(1, 0, ("s199",))
    assert pool.extend("s199", tokens([1])) == BlockShortage(1, 0, ())
    assert len(looked_at) <= 8


def test_no_more_victims_are_named_than_an_answer_should_hold() -> None:
    count = MAX_VICTIMS + 1
    pool = make_pool(2 + count)
    opened(pool, "first", 4)
    for number in range(count):
        opened(pool, f"s{number}", 1)
    shortage = pool.extend("first", tokens(range(MAX_VICTIMS * BLOCK)))
    assert isinstance(shortage, BlockShortage)
    assert len(shortage.victim_ids) == MAX_VICTIMS
    assert pool.extend("first", tokens(range(count * BLOCK))) == BlockShortage(count, 0, ())


class CountedTable(list[KVCacheBlock]):
    """A table that notes how many of its entries were looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for block in super().__iter__():
            CountedTable.looked_at += 1
            yield block

    def __reversed__(self) -> Iterator[KVCacheBlock]:
        for block in super().__reversed__():
            CountedTable.looked_at += 1
            yield block


def shared_by_many(num_branches: int, num_shared: int) -> SequencePool:
    """A pool that is full: `num_shared` blocks that all branches have, the others of "first" and one before it."""
    pool = make_pool(2 + num_shared * (1 + num_branches // 8))
    opened(pool, "before", 2 * BLOCK)
    opened(pool, "first", (pool.kv.pool.num_free_blocks - num_shared) * BLOCK)
    opened(pool, "root", num_shared * BLOCK)
    for number in range(num_branches - 1):
        pool.fork("root", f"f{number}")
    assert not pool.kv.pool.num_free_blocks
    return pool


def shortage_of_first(pool: SequencePool, num_missing: int) -> BlockShortage:
    shortage = pool.extend("first", b"", (len(pool.sequences["first"].blocks) + num_missing) * BLOCK)
    assert isinstance(shortage, BlockShortage)
    assert (shortage.needed_blocks, shortage.free_blocks) == (num_missing, 0)
    return shortage


@pytest.mark.skipif(is_compiled(), reason="compiled code calls what it knows: nothing to count with")
@pytest.mark.parametrize("missing", [1, 60, 101])
def test_a_shortage_looks_at_so_many_entries_however_many_sequences_share_them(
    monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    monkeypatch.setattr(sequence_pool, "MAX_SHARED_ENTRIES", 1_000)
    monkeypatch.setattr(KVCacheManager, "tables", lambda self, request: [CountedTable(request.blocks)])
    for num_branches, victims in ((9, 9), (40, 0), (400, 0)):
        pool = shared_by_many(num_branches, 100)
        CountedTable.looked_at = 0
        shortage = shortage_of_first(pool, missing)
        assert len(shortage.victim_ids) == (victims if missing <= 100 else 0)
        assert CountedTable.looked_at <= 2 * (1_000 + missing + 100)


@pytest.mark.skipif(is_compiled(), reason="compiled functions are not told of")
def test_a_shortage_calls_nothing_for_each_entry() -> None:
    """All go, and then nobody can be spared: twice all entries."""
    pool = shared_by_many(40, 400)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        shortage = shortage_of_first(pool, 400)
    finally:
        sys.setprofile(None)
    assert len(shortage.victim_ids) == 40
    assert calls < 40 * 10


def test_a_pool_has_no_more_sequences_than_blocks() -> None:
    pool = make_pool(9)
    opened(pool, "a", 4)
    for number in range(7):
        pool.fork("a", f"b{number}")
    free = pool.kv.pool.num_free_blocks
    with pytest.raises(TooManySequencesError, match="8 open sequences"):
        pool.fork("a", "c")
    with pytest.raises(TooManySequencesError, match="8 open sequences"):
        pool.open("c", tokens([1]))
    assert pool.kv.pool.num_free_blocks == free
    pool.check_integrity()
    pool.close("b0")
    pool.fork("a", "c")


@pytest.mark.parametrize("way", ["fork", "open"])
def test_what_sequences_share_is_bounded(way: str) -> None:
    """Neither takes a block for what it shares, so blocks do not bound it."""
    pool = make_pool(1 + 64)
    most = 64 * MAX_ENTRIES_PER_BLOCK
    opened(pool, "a", 32 * BLOCK)

    def share(name: str) -> TableChange | BlockShortage:
        return pool.fork("a", name) if way == "fork" else pool.open(name, tokens(range(1_000, 1_000 + 32 * BLOCK)))

    for number in range(most // 32 - 1):
        assert isinstance(share(f"b{number}"), TableChange)
    with pytest.raises(TooManySequencesError, match=f"at most {most} entries"):
        share("c")
    assert pool.num_entries == most
    pool.check_integrity()
    assert isinstance(pool.extend("a", tokens(range(BLOCK))), TableChange), "what takes blocks is bounded by them"
    pool.check_integrity()


@pytest.mark.parametrize("way", ["open", "extend", "fork"])
def test_what_stands_behind_tokens_is_bounded(way: str) -> None:
    """A span takes memory and no block, so blocks do not bound it either; it is counted whichever way it comes."""
    pool = SequencePool(KVCacheManager(1 + 64, 16))
    most, length = 64 * MAX_ENTRIES_PER_BLOCK, 32
    spans = [PromptSpan(IMAGE, CAT, offset, 1) for offset in range(length)]
    opened(pool, "a", length, spans=spans)

    def bring(name: str) -> TableChange | BlockShortage:
        if way == "fork":
            return pool.fork("a", name)
        if way == "open":
            return pool.open(name, tokens(range(length)), spans=spans)
        pool.open(name, tokens([1]))
        return pool.extend(name, tokens(range(length)), spans=[replace(span, offset=span.offset + 1) for span in spans])

    each = (3 if way == "extend" else 2) + ENTRIES_PER_SPAN * length
    num_more = (most - 2 - ENTRIES_PER_SPAN * length) // each
    for number in range(num_more):
        assert isinstance(bring(f"b{number}"), TableChange)
        pool.check_integrity()
    before = (len(pool.sequences), pool.num_entries, pool.num_spans, pool.kv.pool.num_free_blocks)
    with pytest.raises(
        TooManySequencesError, match=f"at most {most} entries .* {ENTRIES_PER_SPAN} counted for each"
    ) as caught:
        bring("c")
    assert caught.value.metadata["num_spans"] == str(pool.num_spans) == str((1 + num_more) * length)
    if way == "extend":
        pool.close("c")
    assert (len(pool.sequences), pool.num_entries, pool.num_spans, pool.kv.pool.num_free_blocks) == before
    pool.check_integrity()
    pool.close("b0")
    assert isinstance(bring("c"), TableChange), "what has ended takes nothing"
    assert isinstance(pool.extend("a", tokens([1])), TableChange), "tokens without spans go on"
    pool.check_integrity()


@pytest.mark.parametrize("eviction_policy", ["lru", "fifo", "lfu", "priority"])
def test_a_pool_that_is_dismantled_is_freed_by_reference_counts(eviction_policy: str) -> None:
    def living() -> int:
        return sum(type(thing) is KVCacheBlock for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = living()
        pool = make_pool(300, eviction_policy)
        opened(pool, "a", 400)
        opened(pool, "b", 400)
        pool.fork("b", "c")
        pool.close("a")
        assert living() >= before + 300
        pool.dismantle()
        del pool
        assert living() - before < 10, "sentinels of empty queues, which hold nothing"
    finally:
        gc.enable()


def test_impossible_work_is_refused_at_once() -> None:
    pool = make_pool(5)
    with pytest.raises(InvalidRequestError, match="16 tokens"):
        pool.open("a", tokens(range(17)))
    opened(pool, "a", 16)
    with pytest.raises(PoolExhaustedError, match="4 blocks"):
        pool.extend("a", tokens([1]))


def test_errors_say_what_is_wrong_and_change_nothing() -> None:
    pool = make_pool()
    opened(pool, "a", 6)
    before = pool.kv.pool.num_free_blocks
    with pytest.raises(DuplicateRequestError):
        pool.open("a", tokens([1]))
    with pytest.raises(DuplicateRequestError):
        pool.fork("a", "a")
    for call in (
        lambda: pool.extend("b", b""),
        lambda: pool.commit("b", 1),
        lambda: pool.fork("b", "c"),
        lambda: pool.close("b"),
    ):
        with pytest.raises(UnknownRequestError, match="'b'"):
            call()
    for call in (
        lambda: pool.open("b", b""),
        lambda: pool.open("b", tokens(range(5)), 4),
        lambda: pool.extend("a", tokens([1]), 6),
        lambda: pool.commit("a", 5),
        lambda: pool.commit("a", 7),
        lambda: pool.fork("a", "b", 7),
    ):
        with pytest.raises(InvalidRequestError):
            call()
    assert pool.kv.pool.num_free_blocks == before
    assert list(pool.sequences) == ["a"]


@dataclass(frozen=True)
class Part:
    """One token of an item: what decides its K/V is the item, and which of its tokens it is."""

    domain: KeyDomain
    digest: bytes
    place: int
    length: int


Symbol: TypeAlias = int | Part
ITEMS = st.builds(
    lambda domain, digest, length: [Part(domain, digest, place, length) for place in range(length)],
    st.sampled_from((IMAGE, EMBEDDING)),
    st.sampled_from((CAT, DOG)),
    st.integers(1, 5),
)
"""All items have the same placeholder, which a text may have, too: nothing but their spans tells them apart."""


def texts(most: int) -> st.SearchStrategy[list[Symbol]]:
    """What a user says: tokens, and items between them."""
    pieces = st.lists(st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=6), ITEMS), min_size=1, max_size=4)
    whole = pieces.map(lambda parts: [symbol for part in parts for symbol in part])
    return whole.filter(lambda text: len(text) <= most)


def said(text: Sequence[Symbol], start: int = 0) -> tuple[bytes, list[PromptSpan]]:
    """Its tokens and spans, as an engine says them of a text that goes on at a position."""
    spans = [
        PromptSpan(symbol.domain, symbol.digest, start + index, symbol.length)
        for index, symbol in enumerate(text)
        if isinstance(symbol, Part) and symbol.place == 0
    ]
    return tokens([symbol if isinstance(symbol, int) else 0 for symbol in text]), spans


class NaiveEngine(RuleBasedStateMachine):
    """An engine whose K/V is the sequence up to the token: what it reads must be what it would have computed."""

    NUM_BLOCKS = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(self.NUM_BLOCKS)
        self.memory: dict[int, tuple[Symbol, ...]] = {}
        self.texts: dict[str, list[Symbol]] = {}
        self.tables: dict[str, list[int]] = {}
        self.next_name = 0

    @property
    def is_full(self) -> bool:
        """Whether there are as many sequences as there may be; tables are too short here for the other bound."""
        return len(self.texts) >= self.NUM_BLOCKS - 1

    def name(self) -> str:
        self.next_name += 1
        return f"s{self.next_name}"

    def take(self, name: str, change: TableChange) -> None:
        """Do the copies, then keep the table."""
        for source, target in change.copies:
            for place in range(BLOCK):
                self.memory[target * BLOCK + place] = self.memory.get(source * BLOCK + place, ())
        kept = self.tables.get(name, [])[: change.first_block]
        self.tables[name] = kept + table(change)

    def compute(self, name: str) -> None:
        """Write what is not computed yet, and commit."""
        text = self.texts[name]
        for position in range(self.pool.sequences[name].num_computed_tokens, len(text)):
            block = self.tables[name][position // BLOCK]
            self.memory[block * BLOCK + position % BLOCK] = tuple(text[: position + 1])
        self.pool.commit(name, len(text))

    @rule(text=texts(14), priority=st.integers(0, 1))
    def open(self, text: list[Symbol], priority: int) -> None:
        name = self.name()
        token_bytes, spans = said(text)
        if self.is_full:
            with pytest.raises(TooManySequencesError):
                self.pool.open(name, token_bytes, spans=spans)
            return
        change = self.pool.open(name, token_bytes, priority=priority, spans=spans)
        if isinstance(change, TableChange):
            self.texts[name] = text
            self.take(name, change)
            self.compute(name)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), text=texts(6))
    def extend(self, data: st.DataObject, text: list[Symbol]) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        if len(self.texts[name]) + len(text) > (self.NUM_BLOCKS - 1) * BLOCK:
            return
        token_bytes, spans = said(text, len(self.texts[name]))
        change = self.pool.extend(name, token_bytes, spans=spans)
        while isinstance(change, BlockShortage):
            if not change.victim_ids:
                return
            for victim in change.victim_ids:
                self.close(victim)
            change = self.pool.extend(name, token_bytes, spans=spans)
            assert isinstance(change, TableChange), "the victims named did not suffice"
        self.texts[name] = self.texts[name] + text
        self.take(name, change)
        self.compute(name)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.texts)))
        length = data.draw(st.integers(1, len(self.texts[parent])))
        name = self.name()
        last = self.texts[parent][length - 1]
        if isinstance(last, Part) and last.place < last.length - 1:
            with pytest.raises(InvalidRequestError, match="within a span"):
                self.pool.fork(parent, name, length)
            return
        if self.is_full:
            with pytest.raises(TooManySequencesError):
                self.pool.fork(parent, name, length)
            return
        self.take(name, self.pool.fork(parent, name, length))
        self.texts[name] = self.texts[parent][:length]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def close_one(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(sorted(self.texts))))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def give_way_and_come_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts[name]
        self.close(name)
        token_bytes, spans = said(text)
        change = self.pool.open(name, token_bytes, spans=spans, is_resumed=True)
        if isinstance(change, TableChange):  # of what others held as well there may not be enough
            self.texts[name] = text
            self.take(name, change)
            self.compute(name)

    def close(self, name: str) -> None:
        self.pool.close(name)
        del self.texts[name], self.tables[name]

    @invariant()
    def every_sequence_reads_what_it_is(self) -> None:
        self.pool.check_integrity()
        for name, text in self.texts.items():
            for position in range(len(text)):
                slot = self.tables[name][position // BLOCK] * BLOCK + position % BLOCK
                assert self.memory[slot] == tuple(text[: position + 1]), (name, position)


TestNaiveEngine = NaiveEngine.TestCase
