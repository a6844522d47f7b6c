"""What a request asks for ranges of its tokens, and what the eviction policy `priority` makes of it."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.core.eviction_policies import EVICTION_POLICIES
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import FullAttention
from kvmanager_service.core.priority_policy import PriorityPolicy
from kvmanager_service.core.request import NewBranch, Request
from kvmanager_service.core.retention import END_OF_SEQUENCE, MAX_DURATION, MAX_RANGES, RetentionRange, without_gaps
from tests.unit.core.builders import (
    block_ids,
    free_ids,
    make_coordinator,
    make_kv,
    make_request,
    make_result,
    make_scheduler,
    run_step,
)
from tests.unit.core.builders import make_new as new

SIZE = 4


def make(num_blocks: int = 11, policy: str = "priority") -> KVCacheManager:
    return make_kv(num_blocks, SIZE, eviction_policy=policy)


def compute(kv: KVCache, request: Request) -> list[int]:
    """Compute all of a request's known tokens and let it go. Returns the ids of its blocks."""
    assert kv.allocate_sequence(request)
    held = block_ids(request.blocks)
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request, 0)
    kv.free(request)
    kv.check_integrity([])
    return held


def evicted_order(kv: KVCache) -> list[int]:
    """Blocks with content, in the order they would go."""
    return [block.block_id for block in kv.pool.free_block_queue if block.content is not None]


# --- ranges -----------------------------------------------------------------------------------------------------------


def test_ranges_give_each_block_its_own_priority() -> None:
    kv = make()
    ranges = (RetentionRange(0, 4, 50), RetentionRange(8, 12, -50))
    held = compute(kv, make_request(prompt=16, retention=ranges))
    # -50, then the two that no range covers, deepest first, then 50.
    assert evicted_order(kv) == [held[2], held[3], held[1], held[0]]


def test_ranges_that_meet_inside_a_block_give_it_the_highest() -> None:
    kv = make()
    straddling = compute(kv, make_request("a", 8, retention=(RetentionRange(0, 5, 10), RetentionRange(5, 8, 30))))
    plain = compute(kv, make_request("b", 4, retention_priority=20))
    assert evicted_order(kv) == [straddling[0], plain[0], straddling[1]]


def test_ranges_lower_than_what_none_covers_do_not_lower_a_block_they_share() -> None:
    kv = make()
    held = compute(kv, make_request(prompt=8, retention_priority=5, retention=(RetentionRange(0, 6, -5),)))
    assert evicted_order(kv) == [held[0], held[1]]


def test_ranges_to_the_end_of_the_sequence_cover_what_is_generated() -> None:
    kv = make()
    first = make_request("a", 8, retention=(RetentionRange(8, END_OF_SEQUENCE, -10),))
    for _ in range(5):
        first.append_token(bytes(4))
    held = compute(kv, first)
    other = compute(kv, make_request("b", 4))
    assert evicted_order(kv) == [held[2], held[1], held[0], *other]


def test_ranges_of_a_preempted_request_hold_as_of_one_that_has_ended() -> None:
    kv = make()
    request = make_request("a", 9, retention=(RetentionRange(0, 4, 9),))
    held = compute(kv, request)
    other = compute(kv, make_request("b", 5))
    assert evicted_order(kv) == [held[1], other[0], held[0]]


def test_ranges_of_a_request_that_was_swapped_out_hold_once_its_blocks_are_free() -> None:
    kv = make(7)
    scheduler = make_scheduler(kv, num_host_blocks=8, preemption_mode="swap")
    scheduler.add_request(new("a", 8, max_tokens=30))
    scheduler.add_request(new("b", 15, max_tokens=30, retention=(RetentionRange(0, 4, -9), RetentionRange(8, 12, 9))))
    run_step(scheduler)
    held = block_ids(scheduler.requests["b"].blocks)
    step = scheduler.schedule()
    assert step is not None
    assert [copy.source_id for copy in step.copies] == held
    assert evicted_order(kv) == [], "they are being copied"
    scheduler.update(make_result(step))
    scheduler.check_integrity()
    assert evicted_order(kv) == [held[0], held[1], held[2]], "the last one was not full"


def test_ranges_of_a_table_that_is_left_in_two_parts_are_counted_from_its_beginning() -> None:
    kv = make()
    request = make_request("a", 16, retention=(RetentionRange(4, 8, -9), RetentionRange(8, 12, 9)))
    assert kv.allocate_sequence(request)
    held = block_ids(request.blocks)
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request, 0)
    request.num_computed_tokens = 8
    first = kv.detach(request)
    assert evicted_order(kv) == [held[3], held[2]]
    kv.free(request)
    kv.give_back(request, first)
    kv.check_integrity([])
    assert evicted_order(kv) == [held[1], held[3], held[0], held[2]]


def test_ranges_of_a_request_with_branches_are_those_of_each() -> None:
    """A branch's output asks for as much as the leader's, and the prompt that all hold for as much as once."""
    kv = make(21)
    scheduler = make_scheduler(kv)
    ranges = (RetentionRange(0, 4, 9), RetentionRange(4, END_OF_SEQUENCE, -9))
    request = dataclasses.replace(
        new("a", 5, max_tokens=4, retention=ranges), branches=(NewBranch("a#1", 1), NewBranch("a#2", 2))
    )
    scheduler.add_request(request)
    run_step(scheduler, [1, 2, 3])
    tables = {}
    while scheduler.has_work:
        tables |= {name: block_ids(member.blocks) for name, member in scheduler.running.items()}
        run_step(scheduler)
    compute(kv, make_request("other", 5))
    (first,) = {table[0] for table in tables.values()}
    own = {table[1] for table in tables.values()}
    assert len(own) == 3
    order = evicted_order(kv)
    assert order[-1] == first
    assert set(order[:3]) == own


def test_ranges_of_two_requests_on_one_block_the_highest_stands() -> None:
    kv = make()
    shared = compute(kv, make_request("a", range(9), retention=(RetentionRange(0, 4, 30),)))
    compute(kv, make_request("b", range(9), retention=(RetentionRange(0, 8, 20),)))
    other = compute(kv, make_request("c", 5, retention_priority=25))
    assert evicted_order(kv) == [shared[1], other[0], shared[0]]


def test_ranges_under_other_policies_change_nothing() -> None:
    for policy in sorted(set(EVICTION_POLICIES) - {"priority"}):
        asked, plain = make(policy=policy), make(policy=policy)
        for kv, ranges in ((asked, (RetentionRange(0, 4, 90, 1.0), RetentionRange(4, 8, -90))), (plain, ())):
            for name in "abac":
                compute(kv, make_request(name, 9, retention=ranges))
            kv.pool.advance(5.0)
        assert free_ids(asked) == free_ids(plain), policy


def test_ranges_in_several_groups_reach_each_groups_blocks() -> None:
    kv = make_coordinator([FullAttention(4), FullAttention(2)], 31, eviction_policy="priority")
    request = make_request(prompt=9, retention=(RetentionRange(4, 6, 70),))
    assert kv.allocate_sequence(request)
    tables = [block_ids(table.blocks) for table in request.tables]
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request, 0)
    kv.free(request)
    kv.check_integrity([])
    assert set(evicted_order(kv)[-2:]) == {tables[0][1], tables[1][2]}


@pytest.mark.parametrize(
    ("retention", "field"),
    [
        ([RetentionRange(-1, 4, 0)], r"retention\.ranges\[0\]\.start"),
        ([RetentionRange(9, 12, 0)], r"retention\.ranges\[0\]\.start"),
        ([RetentionRange(0, 4, 0), RetentionRange(4, 4, 0)], r"retention\.ranges\[1\]\.stop"),
        ([RetentionRange(0, 9, 0)], r"retention\.ranges\[0\]\.stop"),
        ([RetentionRange(0, 4, 101)], r"retention\.ranges\[0\]\.priority"),
        ([RetentionRange(0, 4, -101)], r"retention\.ranges\[0\]\.priority"),
        ([RetentionRange(0, 4, 0, -0.1)], r"retention\.ranges\[0\]\.duration"),
        ([RetentionRange(0, 4, 0, MAX_DURATION + 1)], r"retention\.ranges\[0\]\.duration"),
        ([RetentionRange(0, 4, 0, float("nan"))], r"retention\.ranges\[0\]\.duration"),
        ([RetentionRange(8, END_OF_SEQUENCE, 101)], r"retention\.decode\.priority"),
        ([RetentionRange(8, END_OF_SEQUENCE, 0, -0.1)], r"retention\.decode\.duration"),
        ([RetentionRange(8, END_OF_SEQUENCE, 0)] * (MAX_RANGES + 2), r"retention\.ranges: expected at most 64 ranges"),
        ([RetentionRange(0, 4, 0)] * (MAX_RANGES + 1), r"retention\.ranges: expected at most 64 ranges"),
    ],
)
def test_scheduler_bad_range_refuses_the_request(retention: list[RetentionRange], field: str) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError, match=field):
        scheduler.add_request(new("a", 8, retention=retention))
    assert not scheduler.has_work
    most = [RetentionRange(0, 8, 100, MAX_DURATION)] * MAX_RANGES + [RetentionRange(8, END_OF_SEQUENCE, -100)]
    scheduler.add_request(new("a", 8, retention=most))


@given(
    ranges=st.lists(
        st.builds(
            lambda start, length, priority: RetentionRange(start, start + length, priority),
            st.integers(0, 20),
            st.integers(1, 20),
            st.integers(-100, 100),
        ),
        max_size=6,
    ),
    base=st.integers(-100, 100),
    position=st.integers(0, 60),
)
def test_without_gaps_every_token_is_asked_for_what_the_naive_rule_says(
    ranges: list[RetentionRange], base: int, position: int
) -> None:
    asked = sorted(one.priority for one in ranges if one.start <= position < one.stop)
    filled = without_gaps(ranges, base)
    assert sorted(one.priority for one in filled if one.start <= position < one.stop) == (asked or [base])
    assert all(one.start < one.stop for one in filled)


# --- durations --------------------------------------------------------------------------------------------------------


def test_duration_run_out_falls_to_the_default_in_the_order_blocks_came_free() -> None:
    kv = make()
    kv.pool.advance(100.0)
    first = compute(kv, make_request("a", 5))
    brief = compute(kv, make_request("b", 5, retention=(RetentionRange(0, 5, 90, 10.0),)))
    last = compute(kv, make_request("c", 5))
    assert evicted_order(kv) == [first[0], last[0], brief[0]]
    kv.pool.advance(109.9)
    assert evicted_order(kv) == [first[0], last[0], brief[0]]
    kv.pool.advance(110.0)
    assert evicted_order(kv) == [first[0], brief[0], last[0]]


def test_duration_of_a_low_priority_ends_in_the_default_too() -> None:
    kv = make()
    plain = compute(kv, make_request("a", 5))
    low = compute(kv, make_request("b", 5, retention=(RetentionRange(0, 5, -90, 10.0),)))
    assert evicted_order(kv) == [low[0], plain[0]]
    kv.pool.advance(10.0)
    assert evicted_order(kv) == [plain[0], low[0]]


def test_duration_begins_anew_with_each_use() -> None:
    kv = make()
    brief = compute(kv, make_request("a", range(5), retention=(RetentionRange(0, 5, 90, 10.0),)))
    plain = compute(kv, make_request("b", 5))
    kv.pool.advance(9.0)
    compute(kv, make_request("c", range(5)))  # a hit, by one that asks for nothing
    kv.pool.advance(18.0)
    assert evicted_order(kv) == [plain[0], brief[0]]
    kv.pool.advance(19.0)
    other = compute(kv, make_request("d", 5))
    assert evicted_order(kv) == [plain[0], brief[0], other[0]]


def test_duration_does_not_run_while_a_block_is_in_use() -> None:
    kv = make()
    brief = compute(kv, make_request("a", range(5), retention=(RetentionRange(0, 5, 90, 10.0),)))
    user = make_request("b", range(5))
    assert kv.allocate_sequence(user)
    kv.pool.advance(50.0)
    kv.free(user)
    plain = compute(kv, make_request("c", 5))
    assert evicted_order(kv) == [plain[0], brief[0]]
    kv.pool.advance(60.0)
    assert evicted_order(kv) == [brief[0], plain[0]]


def test_durations_of_several_requests_leave_what_lasts_longer() -> None:
    kv = make()
    asked = [RetentionRange(0, 5, 90, 1.0), RetentionRange(0, 5, 50, 5.0), RetentionRange(0, 5, 60, 3.0)]
    for index, one in enumerate(asked):
        shared = compute(kv, make_request(f"r{index}", range(5), retention=(one,)))
    rivals = {base: compute(kv, make_request(f"x{base}", 5, retention_priority=base))[0] for base in (10, 55, 70)}

    def place() -> list[int]:
        order = evicted_order(kv)
        return [base for base, block_id in rivals.items() if order.index(block_id) < order.index(shared[0])]

    assert place() == [10, 55, 70]
    kv.pool.advance(1.0)
    assert place() == [10, 55]
    kv.pool.advance(3.0)
    assert place() == [10]
    kv.pool.advance(5.0)
    assert place() == []


def test_durations_that_bring_a_priority_back_to_what_it_was_hand_a_block_out_once() -> None:
    kv = make()
    for index, one in enumerate((RetentionRange(0, 5, 0, 1.0), RetentionRange(0, 5, -2, 2.0))):
        request = make_request(f"r{index}", range(5), retention=(one,))
        held = compute(kv, request)
    kv.pool.advance(1.0)
    kv.pool.advance(2.0)
    assert evicted_order(kv) == [held[0]]
    assert sorted(block_ids(kv.pool.get_new_blocks(10))) == list(range(1, 11))


def test_duration_is_forgotten_with_the_content_it_was_asked_for() -> None:
    kv = make(num_blocks=3)
    compute(kv, make_request("a", 5, retention=(RetentionRange(0, 5, 90, 10.0),)))
    taken = kv.pool.get_new_blocks(2)
    kv.pool.free_blocks(taken)
    compute(kv, make_request("b", 5))
    policy = kv.pool.free_block_queue
    assert isinstance(policy, PriorityPolicy)
    kv.pool.advance(10.0)
    assert len(evicted_order(kv)) == 1


def test_policy_blocks_used_without_end_leave_no_entries_behind() -> None:
    kv = make()
    for step in range(2000):
        kv.pool.advance(step * 0.001)
        compute(kv, make_request("a", range(9), retention=(RetentionRange(0, 9, 90, 3600.0),)))
    policy = kv.pool.free_block_queue
    assert isinstance(policy, PriorityPolicy)
    assert policy.num_heap_entries <= 2 * (2 * 10 + 64)


def test_policy_remove_of_a_block_in_use_raises() -> None:
    kv = make()
    request = make_request(prompt=5)
    compute(kv, request)
    assert kv.allocate_sequence(request)
    with pytest.raises(ValueError, match="expected a free block"):
        kv.pool.free_block_queue.remove(request.blocks[0])


# --- against the naive rule -------------------------------------------------------------------------------------------


class NaiveCache:
    """What requests asked of each block, kept as it was said and searched from end to end."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: dict[int, list[tuple[int, float]]] = {}
        self.freed: dict[int, tuple[float, int]] = {}
        self.count = 0

    def used(self, block_ids_held: list[int], request: Request, ranges: list[RetentionRange], base: int) -> None:
        """A request gave its full blocks back, the deepest first."""
        full = request.num_tokens // SIZE
        for index in reversed(range(full)):
            block_id = block_ids_held[index]
            asked = self.asked.setdefault(block_id, [])
            for position in range(index * SIZE, (index + 1) * SIZE):
                covering = [one for one in ranges if one.start <= position < one.stop]
                asked += [(one.priority, one.duration) for one in covering] or [(base, 0.0)]
            self.count += 1
            self.freed[block_id] = (self.now, self.count)

    def advance(self, now: float) -> None:
        """Drop what has run out."""
        self.now = now
        for block_id, asked in self.asked.items():
            age = now - self.freed[block_id][0]
            self.asked[block_id] = [one for one in asked if not one[1] or age < one[1]]

    def order(self, cached: set[int]) -> list[int]:
        """Cached blocks in the order they go."""
        for block_id in set(self.asked) - cached:
            del self.asked[block_id]
        return sorted(
            cached,
            key=lambda block_id: (max((one[0] for one in self.asked[block_id]), default=0), self.freed[block_id][1]),
        )


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_priority_policy_random_requests_ranges_and_waits_is_the_naive_rule(seed: int) -> None:
    rng = random.Random(seed)
    kv, naive = make(num_blocks=rng.randint(6, 20)), NaiveCache()
    for step in range(60):
        naive.advance(naive.now + rng.choice((0.0, 0.0, 1.0, 4.0)))
        kv.pool.advance(naive.now)
        assert evicted_order(kv) == naive.order(set(evicted_order(kv))), f"seed {seed}, step {step}"
        root = rng.randrange(3)
        length = rng.randint(1, min(24, kv.pool.num_usable_blocks * SIZE))
        base = rng.randint(-3, 3)
        ranges = []
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            start = rng.randrange(length)
            stop = rng.choice((rng.randint(start + 1, length), END_OF_SEQUENCE))
            ranges.append(RetentionRange(start, stop, rng.randint(-3, 3), rng.choice((0.0, 1.0, 3.0, 9.0))))
        prompt = [root * 100 + position for position in range(length)]
        request = make_request(f"r{step}", prompt, retention=ranges, retention_priority=base)
        hits = set(block_ids(kv.get_computed_blocks(request)))
        held = compute(kv, request)
        for block_id in set(held) - hits:  # handed out: what was asked before is forgotten
            naive.asked.pop(block_id, None)
        naive.used(held, request, ranges, base)
