"""Several groups over one pool: worked examples, and whatever hypothesis finds against a naive model."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager_service.core.block_hash import KeyDomain
from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.core.extra_keys import PromptSpan
from kvmanager_service.core.kv_cache import make_kv_cache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow
from kvmanager_service.core.request import FinishReason, Request
from tests.unit.core.builders import (
    chain_of,
    free_ids,
    make_coordinator,
    make_new,
    make_request,
    make_scheduler,
    rows_of,
    run_step,
    state_of,
    table_ids,
    token_bytes,
)

FULL_AND_SLIDING = [FullAttention(4), SlidingWindow(4, 8)]


def compute(kv: KVCacheCoordinator, request: Request, num_tokens: int | None = None, step_id: int = 0) -> int:
    """Admit a request and compute its first tokens; returns how many it found cached."""
    assert kv.allocate_sequence(request)
    hit = request.num_computed_tokens
    request.num_computed_tokens = num_tokens or request.num_tokens
    kv.cache_blocks(request, step_id)
    return hit


def go_on(kv: KVCacheCoordinator, request: Request, tokens: Iterable[int]) -> None:
    """Compute one more token after the other."""
    for token in tokens:
        request.append_token(token_bytes([token]))
        assert kv.allocate_slots(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        kv.cache_blocks(request, 0)
        kv.check_integrity([request])


def test_make_kv_cache_one_full_group_needs_no_coordinator() -> None:
    assert isinstance(make_kv_cache(10, [FullAttention(4)], longest_chunk=8), KVCacheManager)
    assert isinstance(make_kv_cache(10, [SlidingWindow(4, 8)], longest_chunk=8), KVCacheCoordinator)
    assert isinstance(make_kv_cache(10, FULL_AND_SLIDING, longest_chunk=8), KVCacheCoordinator)


def test_coordinator_without_groups_or_chunk_raises() -> None:
    with pytest.raises(ValueError, match="at least one KV group"):
        make_coordinator([])
    with pytest.raises(ValueError, match="longest_chunk of at least 1 token, got 0"):
        make_coordinator(FULL_AND_SLIDING, longest_chunk=0)


def test_tables_window_moves_and_gives_back_what_is_behind_it() -> None:
    """20 tokens, blocks of 4, window 8: token 20 reads 13-20, so entries 0-2 are behind."""
    kv = make_coordinator(FULL_AND_SLIDING)
    request = make_request(prompt=20)
    compute(kv, request)
    assert table_ids(request) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    go_on(kv, request, [100])
    assert table_ids(request) == [[1, 2, 3, 4, 5, 11], [0, 0, 0, 9, 10, 12]]
    assert free_ids(kv)[-3:] == [8, 7, 6], "the deepest of them is evicted first"
    assert all(kv.pool.blocks[block_id].content is not None for block_id in (6, 7, 8)), "they can still be hits"
    assert kv.pool.num_usable_blocks - kv.pool.num_free_blocks == 6 + 3


def test_tables_state_runs_in_place_and_leaves_checkpoints_behind() -> None:
    """A checkpoint each 8 tokens: 20 tokens are two of them and a running block; the row before it needs is freed."""
    kv = make_coordinator([RecurrentState(8)])
    request = make_request(prompt=20)
    compute(kv, request)
    assert table_ids(request) == [[1, 2, 3]]
    go_on(kv, request, range(100, 104))  # up to 24: the running block becomes a checkpoint
    assert table_ids(request) == [[0, 0, 3]]
    go_on(kv, request, [104])
    (table,) = table_ids(request)
    assert table[:3] == [0, 0, 3], "token 24 starts from the checkpoint at 24"
    assert table[3] not in (0, 3), "and is written to another block: nothing is copied"
    go_on(kv, request, [105])
    assert table_ids(request) == [[0, 0, 0, table[3]]]
    assert kv.pool.blocks[3].ref_cnt == 0
    assert kv.pool.blocks[3].content is not None


def test_tables_block_ids_are_unique_across_groups_through_growth_hits_and_eviction() -> None:
    """One pool, three groups: no id is in two of them at any time, though each comes to serve all of them."""
    groups = [FullAttention(4), SlidingWindow(4, 8), RecurrentState(8)]
    kv = make_coordinator(groups, num_blocks=40)
    running: list[Request] = []
    served: dict[int, set[int]] = {}
    for round_number in range(30):
        start = 1000 * (round_number % 5)  # prompts come again, and hit
        request = make_request(f"r{round_number}", range(start, start + 17 + round_number % 7))
        while not kv.allocate_sequence(request):
            kv.free(running.pop(0))
        running.append(request)
        request.num_computed_tokens = request.num_tokens
        kv.cache_blocks(request, 0)
        request.append_token(token_bytes([7]))
        if kv.allocate_slots(request, request.num_tokens):
            request.num_computed_tokens = request.num_tokens
            kv.cache_blocks(request, 0)
        group_of_id: dict[int, int] = {}
        for holder in running:
            for index, table in enumerate(table_ids(holder)):
                for block_id in filter(None, table):
                    assert group_of_id.setdefault(block_id, index) == index, (round_number, block_id)
                    served.setdefault(block_id, set()).add(index)
    assert len(served) == 39
    assert any(len(by) == 3 for by in served.values()), "a block that came back served another group"


def test_hit_of_a_state_is_its_deepest_checkpoint() -> None:
    kv = make_coordinator([RecurrentState(8)])
    first = make_request("first", range(20))
    compute(kv, first)
    kv.free(first)
    second = make_request("second", range(30))
    assert compute(kv, second) == 16
    assert table_ids(second)[0][:2] == [0, 2], "the checkpoint at 8 is not needed"
    other = make_request("other", [*range(9), 77, 78])
    assert kv.longest_hit(other) == 8


def test_hit_of_a_state_waits_until_its_step_is_acknowledged() -> None:
    kv = make_coordinator([FullAttention(4), RecurrentState(4)])
    compute(kv, make_request("first", range(8)), step_id=7)
    second = make_request("second", range(12))
    assert kv.longest_hit(second) == 0
    kv.pool.commit_step(7)
    assert kv.longest_hit(second) == 8


def test_hit_needs_no_block_before_the_window() -> None:
    kv = make_coordinator([SlidingWindow(4, 8)])
    first = make_request("first", range(20))
    compute(kv, first)
    kv.free(first)
    for block in kv.pool.blocks[1:4]:
        kv.pool._uncache(block)  # as if handed out
    second = make_request("second", range(24))
    assert kv.longest_hit(second) == 20
    assert compute(kv, second) == 20
    assert table_ids(second)[0][:5] == [0, 0, 0, 4, 5]


def test_hit_is_what_all_groups_agree_on_and_a_multiple_of_all_blocks() -> None:
    """Full attention finds 24 tokens, the state 20 at most, the window what it has from there: all meet at 12."""
    kv = make_coordinator([FullAttention(4), SlidingWindow(4, 8), RecurrentState(6)])
    assert (kv.block_size, kv.prefix_size) == (12, 2)
    first = make_request("first", range(26))
    compute(kv, first)
    second = make_request("second", range(40))
    assert kv.longest_hit(second) == 24
    state_at_24 = first.tables[2].blocks[3]
    kv.pool._uncache(state_at_24)
    assert kv.longest_hit(second) == 12


def test_hit_never_covers_the_whole_sequence() -> None:
    kv = make_coordinator(FULL_AND_SLIDING)
    compute(kv, make_request("first", range(16)))
    assert kv.longest_hit(make_request("same", range(16))) == 12
    assert kv.longest_hit(make_request("longer", range(17))) == 16


def test_hit_of_the_same_tokens_with_another_salt_is_none() -> None:
    kv = make_coordinator(FULL_AND_SLIDING)
    compute(kv, make_request("first", range(16), salt="a"))
    assert kv.longest_hit(make_request("second", range(20), salt="b")) == 0
    assert kv.longest_hit(make_request("third", range(20), salt="a")) == 16


def test_hit_of_placeholders_with_another_image_ends_before_it() -> None:
    kv = make_coordinator(FULL_AND_SLIDING)
    cat, dog = (PromptSpan(KeyDomain.MULTIMODAL_ITEM, name + bytes(13), 9, 4) for name in (b"cat", b"dog"))
    compute(kv, make_request("cat", [5] * 20, spans=[cat]))
    assert kv.longest_hit(make_request("cat again", [5] * 21, spans=[cat])) == 20
    assert kv.longest_hit(make_request("dog", [5] * 21, spans=[dog])) == 8
    assert kv.longest_hit(make_request("text", [5] * 21)) == 8


def test_contents_of_two_groups_are_two_contents() -> None:
    kv = make_coordinator(FULL_AND_SLIDING)
    request = make_request(prompt=4)
    compute(kv, request)
    full, sliding = (table.blocks[0].content for table in request.tables)
    assert full is not None
    assert sliding is not None
    assert full is not sliding
    assert full.token_bytes == sliding.token_bytes
    assert full.extra_keys != sliding.extra_keys
    assert full.serial == sliding.serial, "of the same prefix"


def test_hash_collision_costs_a_miss_and_keeps_successors_out() -> None:
    kv = make_coordinator(FULL_AND_SLIDING, hash_function=lambda data: bytes(16))
    first = make_request("first", range(16))
    compute(kv, first)
    assert not first.is_cacheable, "its second prefix has the hash of its first"
    second = make_request("second", range(100, 116))
    assert compute(kv, second) == 0
    kv.free(first)
    kv.free(second)
    assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks


def test_allocate_sequence_too_few_blocks_changes_nothing() -> None:
    kv = make_coordinator(FULL_AND_SLIDING, num_blocks=15)  # 14: of 20 tokens 5 + 5
    first = make_request("first", range(20))
    compute(kv, first)
    second = make_request("second", [*range(8), *range(50, 62)])
    assert kv.longest_hit(second) == 8  # shares 2 + 2: needs 3 + 3 of 4
    before = state_of((kv, second))
    assert not kv.allocate_sequence(second)
    assert state_of((kv, second)) == before
    assert not kv.allocate_sequence(make_request("third", 9), reserve=1)


def test_allocate_slots_too_few_blocks_changes_nothing_though_a_window_could_give_some_back() -> None:
    kv = make_coordinator(FULL_AND_SLIDING, num_blocks=12)  # 11
    request = make_request("first", range(20))
    compute(kv, request)
    twin = make_request("twin", range(21))
    request.append_token(token_bytes([20]))
    assert kv.pool.num_free_blocks == 1
    assert not kv.allocate_sequence(twin)
    assert kv.allocate_slots(request, 21), "it takes 2 and gives 3 back"
    assert kv.pool.num_free_blocks == 2
    kv.check_integrity([request])

    kv = make_coordinator(FULL_AND_SLIDING, num_blocks=12)
    request = make_request("first", range(20))
    compute(kv, request)
    shared = request.tables[1].blocks[:3]
    kv.pool.touch(shared)  # as another table would: what the window leaves does not come free
    request.append_token(token_bytes([20]))
    before = state_of((kv, request))
    assert not kv.allocate_slots(request, 21)
    assert state_of((kv, request)) == before


def test_free_deepest_first_over_all_groups() -> None:
    kv = make_coordinator([FullAttention(4), SlidingWindow(8, 16)], num_blocks=8)
    request = make_request(prompt=16)
    compute(kv, request)
    assert table_ids(request) == [[1, 2, 3, 4], [5, 6]]
    kv.free(request)
    assert free_ids(kv) == [7, 4, 6, 3, 2, 5, 1], "ends at 16, 16, 12, 8, 8, 4; 7 holds nothing"


def test_windows_table_takes_what_any_row_can_need_at_once_and_no_more_later() -> None:
    """Window 8, chunks of 8: a row touches 15 tokens, in 5 blocks at most, of 100 tokens' 25; aligned ones in 4."""
    kv = make_coordinator([SlidingWindow(4, 8)], longest_chunk=8)
    request = make_request(prompt=100)
    assert kv.num_blocks_for(100) == 5
    assert kv.allocate_sequence(request)
    held = []
    for stop in range(8, 101, 8):
        assert kv.allocate_slots(request, stop)
        held.append(kv.pool.num_usable_blocks - kv.pool.num_free_blocks)
        request.num_computed_tokens = stop
        kv.cache_blocks(request, 0)
        kv.check_integrity([request])
    assert held == [5, 5] + [4] * 10


def test_distrust_forgets_all_groups_and_whoever_computed_from_it() -> None:
    kv = make_coordinator(FULL_AND_SLIDING)
    failed = make_request("failed", range(20), arrival_seq=1)
    compute(kv, failed, step_id=3)
    twin = make_request("twin", range(24), arrival_seq=2)
    assert compute(kv, twin, step_id=4) == 20
    stranger = make_request("stranger", range(200, 220), arrival_seq=3)
    compute(kv, stranger, step_id=3)
    distrusted = kv.distrust(failed, 3, with_table=True)
    held = {block for table in failed.tables + twin.tables for block in table.blocks} - {kv.pool.null_block}
    assert distrusted == held
    assert kv.relies_on(twin, distrusted)
    assert not kv.relies_on(stranger, distrusted)
    kv.free(failed)
    kv.free(twin)
    assert kv.longest_hit(make_request("again", range(24))) == 0
    assert kv.longest_hit(make_request("like it", range(200, 224))) == 20


def test_distrust_of_an_ended_request_forgets_what_its_lost_steps_filled_only() -> None:
    kv = make_coordinator(FULL_AND_SLIDING)
    request = make_request("a", range(16), arrival_seq=1)
    compute(kv, request, 8, step_id=1)
    kv.pool.commit_step(1)
    request.num_computed_tokens = 16
    kv.cache_blocks(request, 2)
    kv.free(request)
    assert len(kv.distrust(request, 2, with_table=False)) == 4
    assert kv.longest_hit(make_request("again", range(20))) == 8


def test_lost_step_is_never_a_hit_in_any_group() -> None:
    kv = make_coordinator(FULL_AND_SLIDING)
    request = make_request("a", range(16))
    compute(kv, request, 8, step_id=1)
    kv.pool.commit_step(1)
    request.num_computed_tokens = 16
    kv.cache_blocks(request, 2)
    assert kv.pool.forget_provisional() == 4
    kv.free(request)
    assert kv.longest_hit(make_request("again", range(20))) == 8


def test_ledger_forgets_prefixes_that_nothing_needs() -> None:
    """Thousands of sequences go through a small pool; what is known of them stays in proportion to it."""
    kv = make_coordinator(FULL_AND_SLIDING, num_blocks=21)
    for number in range(500):
        request = make_request(f"r{number}", range(number * 100, number * 100 + 20))
        compute(kv, request)
        kv.free(request)
    assert len(kv.prefixes.ledger) <= 2 * 21 + 5
    assert kv.longest_hit(make_request("last", range(49_900, 49_925))) == 20


def test_integrity_block_in_tables_of_two_groups_is_found() -> None:
    kv = make_coordinator(FULL_AND_SLIDING, enable_caching=False)
    request = make_request(prompt=4)
    compute(kv, request)
    stolen = request.tables[0].blocks[0]
    request.tables[1].blocks = [stolen]
    request.tables[1].block_id_bytes = bytearray(stolen.block_id.to_bytes(4, "little"))
    with pytest.raises(AssertionError, match="in tables of groups 0 and 1"):
        kv.check_integrity([request])


def test_integrity_window_that_lacks_what_the_next_token_reads_is_found() -> None:
    kv = make_coordinator(FULL_AND_SLIDING)
    request = make_request(prompt=20)
    compute(kv, request)
    kv.pool.free_blocks(request.tables[1].blocks[3:4])
    request.tables[1].leave(4)
    with pytest.raises(AssertionError, match="group 1 lacks what the next token reads"):
        kv.check_integrity([request])


def test_scheduler_on_groups_refuses_what_can_never_fit_and_ends_what_outgrows_the_pool() -> None:
    """11 blocks: of 24 tokens full attention takes 6 and the window 5 at most, while a prompt is computed.

    One token after the other the window takes 3 only, so what runs may go on to 32 tokens.
    """
    kv = make_coordinator(FULL_AND_SLIDING, num_blocks=12, longest_chunk=8)
    scheduler = make_scheduler(kv, max_num_batched_tokens=8)
    with pytest.raises(InvalidRequestError, match=r"prompt of at most 23 tokens, .* got 24"):
        scheduler.add_request(make_new("too long", 24))
    fits = scheduler.add_request(make_new("fits", 23, max_tokens=10))
    while scheduler.has_work:
        run_step(scheduler)
    assert fits.finish_reason is FinishReason.LENGTH
    outgrows = scheduler.add_request(make_new("outgrows", 23, max_tokens=11))
    while outgrows.num_tokens < 33:
        run_step(scheduler)
    assert rows_of(scheduler.schedule()) == {}, "tags only"
    error = scheduler.take_outputs()[-1].error
    assert "at most 24 tokens (11 blocks), got one that needs more after 10 output tokens" in str(error)
    assert kv.pool.num_free_blocks == 11


# --- whatever hypothesis finds ---------------------------------------------------------------------------------------


def reads_of(group: KVGroup, length: int) -> range:
    """The positions before `length` whose blocks the token there needs: each type's definition, token by token."""
    if isinstance(group, SlidingWindow):
        return range(max(0, length - group.window + 1), length)
    if isinstance(group, ChunkedLocal):
        return range(length // group.chunk * group.chunk, length)
    if isinstance(group, RecurrentState):
        return range(max(0, length - 1), length)
    return range(length)


def cached_prefixes(kv: KVCacheCoordinator) -> set[tuple[bytes, bytes]]:
    """(group and salt, all tokens up to the block's end) of every block that could be a hit."""
    found = set()
    for block in kv.pool.blocks:
        content = block.content
        if content is None:
            continue
        group = kv.groups[int.from_bytes(content.extra_keys[5:7], "little")]
        if block.provisional_step and isinstance(group, RecurrentState):
            continue
        before = b"".join(prefix.token_bytes for prefix in chain_of(content.parent))
        found.add((content.extra_keys[:7], before + content.token_bytes))
    return found


def longest_agreed_hit(kv: KVCacheCoordinator, request: Request) -> int:
    """Try every length, and every position that any group reads there."""
    cached, keys = cached_prefixes(kv), kv.hits.group_keys
    for length in range((request.num_tokens - 1) // kv.block_size * kv.block_size, 0, -kv.block_size):
        if all(
            (keys[index], request.tokens(0, (position // group.block_size + 1) * group.block_size)) in cached
            for index, group in enumerate(kv.groups)
            for position in reads_of(group, length)
        ):
            return length
    return 0


def check_tables_hold_a_row(kv: KVCacheCoordinator, request: Request, stop: int) -> None:
    """Every token of the row finds what it reads, and where it is written."""
    for group, table in zip(kv.groups, request.tables, strict=True):
        start = request.num_computed_tokens
        for position in range(start, stop):
            # A state is read once, where the row starts; K/V by every token.
            read = () if isinstance(group, RecurrentState) and position > start else reads_of(group, position)
            for needed in (*read, position):
                assert table.blocks[needed // group.block_size] is not kv.pool.null_block


@st.composite
def group_mixes(draw: st.DrawFn) -> list[KVGroup]:
    sizes = st.integers(1, 4)
    one = st.one_of(
        st.builds(FullAttention, sizes),
        st.builds(SlidingWindow, sizes, st.integers(1, 9)),
        st.builds(ChunkedLocal, sizes, st.integers(1, 9)),
        st.builds(RecurrentState, sizes),
    )
    return draw(st.lists(one, min_size=1, max_size=3))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "compute", "compute", "compute", "commit", "lose", "free"]), st.integers(0, 999)
    ),
    min_size=5,
    max_size=60,
)


class NaiveComparison:
    """Does to a coordinator what a scheduler does, and compares each answer with what the naive model says."""

    def __init__(self, kv: KVCacheCoordinator, longest_chunk: int) -> None:
        self.kv, self.longest_chunk = kv, longest_chunk
        self.running: list[Request] = []
        self.step_id = 1

    def do(self, operation: str, number: int, choice: int) -> None:
        if operation == "admit":
            self.admit(number, choice)
        elif operation == "commit":
            for step_id in range(1, self.step_id):
                self.kv.pool.commit_step(step_id)
        elif operation == "lose":
            self.kv.pool.forget_provisional()
            self.free_all()
        elif self.running:
            request = self.running[choice % len(self.running)]
            if operation == "free" or not self.compute(request, choice):
                self.kv.free(request)
                self.running.remove(request)

    def admit(self, number: int, choice: int) -> None:
        """Three conversations of two kinds of tokens: prefixes are shared, and end anywhere."""
        tokens = [(position * (choice % 3 + 1)) // 5 % 2 for position in range(1 + choice % 37)]
        request = make_request(f"r{number}", tokens, arrival_seq=number)
        hit = longest_agreed_hit(self.kv, request)
        assert self.kv.longest_hit(request) == hit
        before = state_of((self.kv.pool, request))
        if self.kv.allocate_sequence(request):
            assert request.num_computed_tokens == hit
            self.running.append(request)
        else:
            assert state_of((self.kv.pool, request)) == before
            assert self.running or self.can_never_fit(request)

    def compute(self, request: Request, choice: int) -> bool:
        if request.num_computed_tokens == request.num_tokens:
            request.append_token(token_bytes([choice % 2]))
        stop = min(request.num_tokens, request.num_computed_tokens + 1 + choice % self.longest_chunk)
        before = state_of((self.kv.pool, request))
        if not self.kv.allocate_slots(request, stop):
            assert state_of((self.kv.pool, request)) == before
            assert len(self.running) > 1 or self.can_never_fit(request)
            return False
        check_tables_hold_a_row(self.kv, request, stop)
        request.num_computed_tokens = stop
        self.kv.cache_blocks(request, self.step_id)
        self.step_id += 1
        return True

    def can_never_fit(self, request: Request) -> bool:
        return self.kv.num_blocks_for(request.num_tokens) > self.kv.pool.num_usable_blocks

    def free_all(self) -> None:
        while self.running:
            self.kv.free(self.running.pop())


@settings(max_examples=200)
@given(group_mixes(), st.integers(12, 60), st.integers(1, 9), OPERATIONS)
def test_coordinator_any_groups_and_requests_agree_with_the_naive_model(
    groups: list[KVGroup], num_blocks: int, longest_chunk: int, operations: list[tuple[str, int]]
) -> None:
    kv = make_coordinator(groups, num_blocks, longest_chunk=longest_chunk)
    naive = NaiveComparison(kv, longest_chunk)
    for number, (operation, choice) in enumerate(operations):
        naive.do(operation, number, choice)
        kv.check_integrity(naive.running)
    naive.free_all()
    kv.check_integrity([])
    assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks
