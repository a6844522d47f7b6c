"""Each attention type on its own, with the numbers worked out by hand."""

import pytest

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.kv_groups import (
    ChunkedLocal,
    FullAttention,
    GroupTable,
    HitLookup,
    KVGroup,
    RecurrentState,
    SlidingWindow,
)

FULL = FullAttention(4)
SLIDING = SlidingWindow(4, 8)
CHUNKED = ChunkedLocal(4, 16)
STATE = RecurrentState(4)


def cached(*indices: int) -> HitLookup:
    """A cache that has these entries."""
    block = KVCacheBlock(1)
    return lambda index: block if index in indices else None


@pytest.mark.parametrize(
    ("group", "num_computed", "first_token", "first_block"),
    [
        (FULL, 18, 0, 0),
        (SLIDING, 7, 0, 0),  # tokens 0-7 are the window of token 7
        (SLIDING, 8, 1, 0),
        (SLIDING, 10, 3, 0),
        (SLIDING, 11, 4, 1),  # tokens 4-11: the first block is out of reach
        (SLIDING, 18, 11, 2),
        (SlidingWindow(4, 1), 18, 18, 4),
        (CHUNKED, 15, 0, 0),
        (CHUNKED, 16, 16, 4),  # a new chunk: nothing before it
        (CHUNKED, 18, 16, 4),
        (CHUNKED, 31, 16, 4),
        (ChunkedLocal(4, 10), 18, 10, 2),  # chunks need not be whole blocks
        (STATE, 0, 0, 0),
        (STATE, 18, 17, 4),  # in place
        (STATE, 20, 19, 4),  # from the checkpoint at 20, into the block after it
        (STATE, 21, 20, 5),
    ],
)
def test_group_first_needed_is_as_far_as_the_next_token_reads(
    group: KVGroup, num_computed: int, first_token: int, first_block: int
) -> None:
    assert group.first_needed_token(num_computed) == first_token
    assert group.first_needed_block(num_computed) == first_block


@pytest.mark.parametrize(
    ("group", "num_tokens", "longest_chunk", "most"),
    [
        (FULL, 100, 4, 25),
        (SLIDING, 100, 1, 3),  # 8 tokens: 7 before and itself, over 3 blocks where they are not aligned
        (SLIDING, 100, 4, 4),  # 11 tokens
        (SLIDING, 6, 4, 2),  # there are no more
        (CHUNKED, 100, 1, 5),
        (STATE, 100, 1, 2),  # the checkpoint it starts from and the block it runs in
        (STATE, 100, 8, 3),  # 9 tokens: and those at the boundaries it passes
    ],
)
def test_group_most_blocks_is_what_the_longest_row_touches(
    group: KVGroup, num_tokens: int, longest_chunk: int, most: int
) -> None:
    assert group.most_blocks(num_tokens, longest_chunk) == most


@pytest.mark.parametrize("group", [FULL, SLIDING, CHUNKED, STATE, SlidingWindow(3, 5), ChunkedLocal(3, 10)])
@pytest.mark.parametrize("longest_chunk", [1, 2, 5, 9])
def test_group_table_end_holds_every_row_and_never_more_than_most_blocks(group: KVGroup, longest_chunk: int) -> None:
    for num_computed in range(60):
        for num_tokens in range(num_computed + 1, 80):
            end = group.table_end(num_computed, num_tokens, longest_chunk)
            assert end * group.block_size >= min(num_tokens, num_computed + longest_chunk)
            held = end - group.first_needed_block(num_computed)
            assert 0 < held <= group.most_blocks(num_tokens, longest_chunk)


@pytest.mark.parametrize(
    ("group", "entries", "hit"),
    [
        (FULL, {0, 1, 2, 3, 4}, 20),
        (FULL, {0, 1, 3, 4}, 8),
        (FULL, {1, 2, 3, 4}, 0),
        (SLIDING, {3, 4}, 20),  # token 20 reads 13-20; nothing before entry 3 is needed
        (SLIDING, {2, 3}, 16),
        (SLIDING, {0, 2, 4}, 4),  # token 4 reads 0-4; 12 would need 1 and 2
        (SLIDING, {1, 2, 4}, 12),
        (SLIDING, {4}, 0),
        (CHUNKED, {4}, 20),
        (CHUNKED, {0, 1, 2, 3}, 16),
        (CHUNKED, set(), 16),  # a chunk begins there: a layer of this type needs nothing that was before
        (STATE, {4}, 20),
        (STATE, {1, 2}, 12),  # the deepest checkpoint
        (STATE, set(), 0),
    ],
)
def test_group_longest_hit_is_the_deepest_from_which_it_can_go_on(group: KVGroup, entries: set[int], hit: int) -> None:
    assert group.longest_hit(cached(*entries), 20, 4) == hit


@pytest.mark.parametrize(
    ("group", "entries", "hit"),
    [(FULL, {0, 1, 2, 3, 4}, 16), (SLIDING, {0, 1, 2, 3, 4}, 16), (SLIDING, {2, 3}, 16), (SLIDING, {1, 2}, 0)],
)
def test_group_longest_hit_is_aligned(group: KVGroup, entries: set[int], hit: int) -> None:
    assert group.longest_hit(cached(*entries), 16, 8) == hit


def test_group_hit_of_a_state_waits_for_its_step() -> None:
    assert not STATE.can_share_within_step
    assert all(group.can_share_within_step for group in (FULL, SLIDING, CHUNKED))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttention(0), "block_size of at least 1, got 0"),
        (lambda: SlidingWindow(4, 0), "window of at least 1 token, got 0"),
        (lambda: ChunkedLocal(4, 0), "chunk of at least 1 token, got 0"),
    ],
)
def test_group_size_out_of_range_raises(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_group_table_leave_makes_null_what_is_behind() -> None:
    table = GroupTable(SLIDING, KVCacheBlock(0))
    table.extend([KVCacheBlock(5), KVCacheBlock(6), KVCacheBlock(7)])
    table.leave(2)
    assert [block.block_id for block in table.blocks] == [0, 0, 7]
    assert table.block_id_bytes == b"".join(block_id.to_bytes(4, "little") for block_id in (0, 0, 7))
    assert table.first == 2


@pytest.mark.parametrize("group", [SLIDING, CHUNKED, STATE, SlidingWindow(3, 1), ChunkedLocal(3, 10)])
def test_group_needed_until_is_where_the_next_entry_becomes_the_first_needed(group: KVGroup) -> None:
    for index in range(10):
        until = group.needed_until((index + 1) * group.block_size)
        assert group.first_needed_block(until) > index >= group.first_needed_block(until - 1)


def test_group_table_says_when_it_must_change() -> None:
    """Blocks of 4, window 8, entries 0 and 1 null: entry 2 ends at 12 and is read up to token 18."""
    table = GroupTable(SLIDING, KVCacheBlock(0), 2)
    table.extend([KVCacheBlock(1), KVCacheBlock(2)])
    assert (table.room, table.needed_until, table.full_at) == (16, 19, 12)
    assert (SLIDING.first_needed_block(18), SLIDING.first_needed_block(19)) == (2, 3)
    assert GroupTable(FULL, KVCacheBlock(0)).needed_until > 1_000_000_000
