"""Pinned prefixes: what they hold, when they take it, and before what they stand back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from kvmanager_service.core.errors import (
    DuplicatePinError,
    InvalidRequestError,
    PinLimitError,
    PoolExhaustedError,
    UnknownPinError,
)
from kvmanager_service.core.extra_keys import LoraAdapter, request_keys
from kvmanager_service.core.group_key import group_of
from kvmanager_service.core.kv_groups import FullAttention, SlidingWindow
from kvmanager_service.core.pinned_prefixes import MAX_PINS, PinnedPrefix
from kvmanager_service.core.request import FinishReason
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.suspects import MAX_FAILED_STEPS
from kvmanager_service.core.swap_space import SwapSpace
from tests.unit.core.builders import (
    block_ids,
    make_coordinator,
    make_kv,
    make_new,
    make_result,
    make_scheduler,
    outputs_of,
    rows_of,
    run_step,
    state_of,
    token_bytes,
)

SIZE = 4


def make(num_blocks: int = 11, fraction: float = 0.5, **limits: Any) -> Scheduler:
    return make_scheduler(make_kv(num_blocks, SIZE), max_pinned_fraction=fraction, **limits)


def make_pin(name: str, prompt: Sequence[int], salt: str = "", lora: LoraAdapter | None = None) -> PinnedPrefix:
    return PinnedPrefix(name, token_bytes(prompt), request_keys(salt, None, lora))


def run_all(scheduler: Scheduler, request_id: str, prompt: Sequence[int], max_tokens: int = 1, **keys: Any) -> int:
    """Run a request alone to its end. Returns how many tokens of its prompt were cached."""
    request = scheduler.add_request(make_new(request_id, prompt, max_tokens=max_tokens, **keys))
    while scheduler.has_work:
        run_step(scheduler)
    scheduler.take_outputs()
    return request.num_cached_tokens


def held(scheduler: Scheduler, name: str) -> int:
    return next(len(pin.blocks) for pin in scheduler.pins if pin.name == name)


SYSTEM = list(range(10))  # two full blocks of 4, and a rest


def test_pin_of_what_is_cached_holds_it_through_all_that_evicts() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    pin = scheduler.pins.pin(make_pin("system", SYSTEM))
    assert (pin.num_tokens, len(pin.block_hashes), len(pin.blocks)) == (10, 2, 2)
    for index in range(20):
        run_all(scheduler, f"r{index}", range(100 * index + 100, 100 * index + 130))
        scheduler.check_integrity()
    assert run_all(scheduler, "again", SYSTEM) == 8


def test_pin_before_its_blocks_are_computed_takes_hold_with_the_step_that_fills_them() -> None:
    scheduler = make(max_num_batched_tokens=4, long_prefill_token_threshold=4)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    scheduler.add_request(make_new("a", SYSTEM, max_tokens=1))
    step = scheduler.schedule()
    assert step is not None
    assert held(scheduler, "system") == 0, "what a step has yet to fill can still be lost"
    scheduler.update(make_result(step))
    assert held(scheduler, "system") == 1
    run_step(scheduler)
    assert held(scheduler, "system") == 2
    run_step(scheduler)
    assert not scheduler.has_work
    assert scheduler.kv.pool.num_free_blocks == 8
    scheduler.check_integrity()


def test_pin_steps_lost_before_they_were_acknowledged_hold_nothing() -> None:
    scheduler = make()
    scheduler.pins.pin(make_pin("system", SYSTEM))
    scheduler.add_request(make_new("a", SYSTEM, max_tokens=1))
    assert scheduler.schedule() is not None
    scheduler.lose_steps()
    assert held(scheduler, "system") == 0
    scheduler.check_integrity()
    run_step(scheduler)
    assert held(scheduler, "system") == 2


def test_pin_content_of_a_failed_row_is_let_go_and_taken_anew() -> None:
    scheduler = make(max_num_batched_tokens=4, long_prefill_token_threshold=4)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    scheduler.add_request(make_new("a", SYSTEM, max_tokens=1))
    run_step(scheduler)
    assert held(scheduler, "system") == 1
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(make_result(step, failed=[0]))
    assert held(scheduler, "system") == 0
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == 10
    run_all(scheduler, "b", SYSTEM)
    assert held(scheduler, "system") == 2


def test_unpin_leaves_blocks_cached_and_free() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    assert scheduler.kv.pool.num_free_blocks == 8
    scheduler.pins.unpin("system")
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == 10
    assert run_all(scheduler, "b", SYSTEM) == 8
    with pytest.raises(UnknownPinError, match="'system'"):
        scheduler.pins.unpin("system")


def test_pins_share_the_blocks_of_a_common_prefix() -> None:
    scheduler = make(fraction=0.4)
    run_all(scheduler, "a", range(17))
    scheduler.pins.pin(make_pin("short", range(8)))
    scheduler.pins.pin(make_pin("long", range(16)))
    assert scheduler.pins.num_held_blocks == 4, "which is the limit: shared ones count once"
    assert scheduler.kv.pool.num_free_blocks == 6
    scheduler.check_integrity()
    scheduler.pins.unpin("long")
    scheduler.check_integrity()
    assert scheduler.pins.num_held_blocks == 2
    assert scheduler.kv.pool.num_free_blocks == 8


def test_pin_under_a_salt_holds_only_what_was_computed_under_it() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    scheduler.pins.pin(make_pin("salted", SYSTEM, salt="mine"))
    assert held(scheduler, "salted") == 0
    run_all(scheduler, "b", SYSTEM, salt="mine")
    assert held(scheduler, "salted") == 2


def test_pin_of_an_adapter_holds_only_what_was_computed_with_its_weights() -> None:
    scheduler, present = make(), LoraAdapter("mine", "1")
    run_all(scheduler, "a", SYSTEM, salt="mine")
    run_all(scheduler, "b", SYSTEM, lora=LoraAdapter("mine", "2"))
    scheduler.pins.pin(make_pin("adapted", SYSTEM, lora=present))
    assert held(scheduler, "adapted") == 0
    run_all(scheduler, "c", SYSTEM, lora=present)
    assert held(scheduler, "adapted") == 2


def test_pin_again_the_same_changes_nothing_and_another_is_refused() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    first = scheduler.pins.pin(make_pin("system", SYSTEM))
    before = state_of(scheduler)
    assert scheduler.pins.pin(make_pin("system", SYSTEM)) is first
    for other in (make_pin("system", range(8)), make_pin("system", SYSTEM, salt="mine")):
        with pytest.raises(DuplicatePinError, match="pins another"):
            scheduler.pins.pin(other)
    assert state_of(scheduler) == before


def test_pin_beyond_the_limit_is_refused_and_changes_nothing() -> None:
    scheduler = make(fraction=0.25)  # two of ten blocks
    scheduler.pins.pin(make_pin("one", range(4)))
    before = state_of(scheduler)
    with pytest.raises(PinLimitError, match="at most 2 blocks in all, got 3 with this one's 2") as refused:
        scheduler.pins.pin(make_pin("two", range(100, 109)))
    assert refused.value.reason == "PIN_LIMIT"
    assert state_of(scheduler) == before
    scheduler.pins.pin(make_pin("longer one", range(8)))
    scheduler.pins.unpin("one")
    with pytest.raises(PinLimitError):
        scheduler.pins.pin(make_pin("two", range(100, 104)))
    scheduler.pins.unpin("longer one")
    scheduler.pins.pin(make_pin("two", range(100, 109)))


def test_pins_too_many_are_refused() -> None:
    scheduler = make(num_blocks=2 * MAX_PINS, fraction=1.0)
    for index in range(MAX_PINS):
        scheduler.pins.pin(make_pin(str(index), [index] * SIZE))
    with pytest.raises(PinLimitError, match=f"fewer than {MAX_PINS}"):
        scheduler.pins.pin(make_pin("one more", range(8)))


def test_pin_that_is_shorter_than_any_hit_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 4 tokens, the shortest that can be hit, got 3"):
        make().pins.pin(make_pin("short", [1, 2, 3]))
    scheduler = make_scheduler(make_coordinator([FullAttention(4), SlidingWindow(6, 6)]), max_pinned_fraction=1.0)
    with pytest.raises(InvalidRequestError, match="at least 12 tokens, the shortest that can be hit, got 11"):
        scheduler.pins.pin(make_pin("two full blocks, and one of the window", range(11)))
    assert len(scheduler.pins.pin(make_pin("enough", range(12))).entries) == 4


def test_pins_stand_back_for_a_lone_request_that_grows_to_the_whole_pool() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    request = scheduler.add_request(make_new("long", range(200, 220), max_tokens=20))
    while scheduler.has_work:
        run_step(scheduler)
    assert request.num_output_tokens == 20, "40 tokens are all of the pool"
    assert held(scheduler, "system") == 0
    assert run_all(scheduler, "b", SYSTEM) == 0
    assert held(scheduler, "system") == 2, "and take hold again"


def test_pins_stand_back_no_further_than_they_must_the_newest_and_deepest_first() -> None:
    scheduler = make()
    run_all(scheduler, "a", range(8))
    run_all(scheduler, "b", range(100, 112))
    scheduler.pins.pin(make_pin("old", range(8)))
    scheduler.pins.pin(make_pin("new", range(100, 112)))
    assert scheduler.kv.pool.num_free_blocks == 5
    run_all(scheduler, "long", range(200, 227))  # seven blocks
    assert (held(scheduler, "old"), held(scheduler, "new")) == (2, 1)
    scheduler.check_integrity()


def held_by_next_step(scheduler: Scheduler, *names: str) -> list[int]:
    """How many blocks pins hold once a step is decided: after it they take back what is still there."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.check_integrity()
    counts = [held(scheduler, name) for name in names]
    scheduler.update(make_result(step))
    scheduler.check_integrity()
    return counts


def test_pins_that_the_request_itself_holds_are_no_help_and_keep_all() -> None:
    """`new` is the prompt of who grows: only `old` has what it lacks."""
    scheduler = make(num_blocks=7, fraction=1.0)
    run_all(scheduler, "a", range(8))
    run_all(scheduler, "b", range(100, 108))
    scheduler.pins.pin(make_pin("old", range(8)))
    scheduler.pins.pin(make_pin("new", range(100, 108)))
    scheduler.add_request(make_new("lone", range(100, 109), max_tokens=12))
    for num_old in (2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1):  # the seventeenth token takes a fifth block
        assert held_by_next_step(scheduler, "old", "new") == [num_old, 2]
    assert not scheduler.has_work


def test_pins_let_go_of_a_shared_block_only_when_none_is_behind_it() -> None:
    """`short` is the newest, but all it holds `long` holds, too: letting go of it would free nothing."""
    scheduler = make(num_blocks=7, fraction=1.0)
    run_all(scheduler, "a", range(16))
    scheduler.pins.pin(make_pin("long", range(16)))
    scheduler.pins.pin(make_pin("short", range(8)))
    assert scheduler.kv.pool.num_free_blocks == 2
    scheduler.add_request(make_new("three", range(200, 211), max_tokens=1))
    assert held_by_next_step(scheduler, "long", "short") == [3, 2]
    scheduler.add_request(make_new("five", range(300, 319), max_tokens=1))
    assert held_by_next_step(scheduler, "long", "short") == [1, 1], "both, for one alone would free nothing"


def test_pins_keep_what_a_waiting_request_hits() -> None:
    """What it hits of `new` it needs, held by a pin or free: `old` stands back."""
    scheduler = make(num_blocks=7, fraction=1.0)
    run_all(scheduler, "a", range(8))
    run_all(scheduler, "b", range(100, 108))
    scheduler.pins.pin(make_pin("old", range(8)))
    scheduler.pins.pin(make_pin("new", range(100, 108)))
    request = scheduler.add_request(make_new("waits", range(100, 119), max_tokens=1))
    assert held_by_next_step(scheduler, "old", "new") == [1, 2]
    assert request.num_cached_tokens == 8


def test_pins_that_have_too_little_for_a_request_keep_it() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    scheduler.kv.pool.get_new_blocks(8)  # as if others held all the rest
    request = scheduler.add_request(make_new("three", range(200, 211)))
    assert not scheduler.pins.make_room(request, request.num_tokens)
    assert held(scheduler, "system") == 2


def test_pins_stand_back_for_a_request_that_hits_what_they_hold() -> None:
    scheduler = make()
    run_all(scheduler, "a", range(16))
    run_all(scheduler, "b", [*range(4), *range(100, 104)])
    scheduler.pins.pin(make_pin("other", [*range(4), *range(100, 104)]))
    scheduler.pins.pin(make_pin("own", range(12)))
    assert scheduler.pins.num_held_blocks == 4
    assert run_all(scheduler, "long", range(39)) == 16
    scheduler.check_integrity()


def test_pins_keep_what_they_hold_when_a_request_can_never_fit() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    with pytest.raises(InvalidRequestError, match="at most 39 tokens"):
        scheduler.add_request(make_new("too long", range(200, 241)))
    scheduler.add_request(make_new("grows", range(200, 237), max_tokens=10))
    outputs = None
    while scheduler.has_work:
        step = scheduler.schedule()
        if step is not None:
            scheduler.update(make_result(step))
        outputs = outputs_of(scheduler)["grows"]
    assert outputs is not None
    assert isinstance(outputs.error, PoolExhaustedError), "as it would without pins"
    assert outputs.num_cached_tokens == 0
    scheduler.check_integrity()


def test_pins_stand_back_for_a_suspect_before_others_are_admitted_in_its_place() -> None:
    scheduler = make(policy="priority")
    scheduler.pins.pin(make_pin("system", SYSTEM))
    scheduler.add_request(make_new("suspect", range(200, 233), priority=1))  # nine blocks
    for _ in range(MAX_FAILED_STEPS - 1):
        scheduler.schedule()
        scheduler.lose_steps()
    restarted = make()
    run_all(restarted, "first", SYSTEM)
    scheduler.replace_cache(restarted.kv)
    assert held(scheduler, "system") == 2
    for request_id in ("b", "c"):
        scheduler.add_request(make_new(request_id, 2))
    assert rows_of(scheduler.schedule()) == {"suspect": (0, 33)}
    assert held(scheduler, "system") == 1
    scheduler.check_integrity()


def test_pins_are_not_touched_while_others_run_who_can_be_preempted() -> None:
    scheduler = make()
    run_all(scheduler, "a", range(20))
    scheduler.pins.pin(make_pin("system", range(20)))
    for request_id in ("b", "c"):
        scheduler.add_request(make_new(request_id, 8, max_tokens=6))
    while len(scheduler.requests) == 2:
        run_step(scheduler)
        assert held(scheduler, "system") == 5
    assert scheduler.stats.preemptions == 1


def test_reset_prefix_cache_lets_go_and_pins_take_hold_again() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    assert scheduler.reset_prefix_cache() > 0
    assert held(scheduler, "system") == 0
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == 10
    run_all(scheduler, "b", SYSTEM)
    assert held(scheduler, "system") == 2


def test_replace_cache_pins_outlive_it_and_take_hold_as_far_as_its_limit() -> None:
    scheduler = make()
    run_all(scheduler, "a", range(17))
    scheduler.pins.pin(make_pin("system", range(16)))
    assert held(scheduler, "system") == 4
    scheduler.replace_cache(make_kv(7, 2))  # eight blocks now, of which the limit is three
    assert held(scheduler, "system") == 0
    run_all(scheduler, "b", range(10))
    assert held(scheduler, "system") == 3
    scheduler.check_integrity()
    scheduler.replace_cache(make_kv(20, 32))
    run_all(scheduler, "c", range(17))
    assert held(scheduler, "system") == 0, "not one block is full of it"
    scheduler.replace_cache(make_kv(40, SIZE))
    run_all(scheduler, "d", range(17))
    assert held(scheduler, "system") == 4


def test_replace_cache_adopted_blocks_are_held_at_once() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    other = make()
    run_all(other, "a", SYSTEM)
    scheduler.replace_cache(other.kv)
    assert held(scheduler, "system") == 2
    scheduler.check_integrity()


GROUPS = [FullAttention(SIZE), SlidingWindow(SIZE, 6), SlidingWindow(SIZE, 10)]
PREFIX = list(range(25))  # six full blocks of 4, and a rest: what follows reads the last 2 and 3 of the windows


def make_grouped(num_blocks: int = 41, fraction: float = 0.5, **limits: Any) -> Scheduler:
    kv = make_coordinator(GROUPS, num_blocks, longest_chunk=8)
    return make_scheduler(kv, max_pinned_fraction=fraction, max_num_batched_tokens=8, **limits)


def test_pin_over_several_groups_holds_of_each_what_a_hit_of_the_prefix_reads() -> None:
    scheduler = make_grouped()
    run_all(scheduler, "a", PREFIX)
    pin = scheduler.pins.pin(make_pin("system", PREFIX))
    entries = [(0, 0), (0, 1), (0, 2), (0, 3), (2, 3), (0, 4), (1, 4), (2, 4), (0, 5), (1, 5), (2, 5)]
    assert pin.entries == entries, "by where they end"
    assert (len(pin.block_hashes), len(pin.blocks), scheduler.pins.num_held_blocks) == (11, 11, 11)
    assert [group_of(content) for content in pin.contents] == [group for group, _ in entries]
    for index in range(20):
        run_all(scheduler, f"r{index}", range(100 * index + 100, 100 * index + 130))
        scheduler.check_integrity()
    assert run_all(scheduler, "again", [*PREFIX, 7]) == 24
    scheduler.pins.unpin("system")
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == 40


def test_pin_over_windows_only_holds_their_tails() -> None:
    scheduler = make_scheduler(make_coordinator(GROUPS[1:2], 12, longest_chunk=8), max_num_batched_tokens=8)
    pin = scheduler.pins.pin(make_pin("system", PREFIX))
    run_all(scheduler, "a", PREFIX)
    assert (pin.entries, len(pin.blocks)) == ([(0, 4), (0, 5)], 2)
    for index in range(9):
        run_all(scheduler, f"r{index}", range(100 * index + 100, 100 * index + 130))
    assert run_all(scheduler, "again", [*PREFIX, 7]) == 24


def test_pin_over_several_groups_takes_hold_of_what_is_filled_and_of_nothing_that_can_be_lost() -> None:
    scheduler = make_grouped()
    scheduler.pins.pin(make_pin("system", PREFIX))
    scheduler.add_request(make_new("a", PREFIX, max_tokens=1))
    run_step(scheduler)
    assert held(scheduler, "system") == 2
    run_step(scheduler)
    assert held(scheduler, "system") == 5, "tokens 12-15 are read from the prefix's end by one window"
    assert scheduler.schedule() is not None
    scheduler.lose_steps()
    assert held(scheduler, "system") == 5
    scheduler.check_integrity()
    while scheduler.has_work:
        run_step(scheduler)
    assert held(scheduler, "system") == 11


def test_pin_over_several_groups_lets_go_of_what_follows_from_a_failed_row_and_takes_it_anew() -> None:
    scheduler = make_grouped()
    scheduler.pins.pin(make_pin("system", PREFIX))
    run_all(scheduler, "a", PREFIX)
    scheduler.add_request(make_new("b", [*PREFIX, 7], max_tokens=1))
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(make_result(step, failed=[0]))
    scheduler.check_integrity()
    assert held(scheduler, "system") == 0
    assert scheduler.kv.pool.num_free_blocks == 40
    run_all(scheduler, "c", PREFIX)
    assert held(scheduler, "system") == 11


def test_pins_over_several_groups_share_what_they_have_in_common_and_count_blocks_of_all_groups() -> None:
    scheduler = make_grouped(fraction=0.45)  # 18 of 40
    run_all(scheduler, "a", PREFIX)
    scheduler.pins.pin(make_pin("long", PREFIX))
    scheduler.pins.pin(make_pin("short", PREFIX[:16]))
    # Of 16 tokens: four full blocks that the long one has, too, and two and three of the windows, of which it has one.
    assert scheduler.pins.num_held_blocks == 11 + 4
    scheduler.check_integrity()
    with pytest.raises(PinLimitError, match="at most 18 blocks in all, got 21 with this one's 6"):
        scheduler.pins.pin(make_pin("other", range(500, 508)))
    scheduler.pins.pin(make_pin("another", range(500, 504)))
    scheduler.pins.unpin("long")
    scheduler.check_integrity()
    assert held(scheduler, "short") == 9


def test_pins_over_several_groups_stand_back_for_a_lone_request_and_for_no_more_than_it_lacks() -> None:
    scheduler = make_grouped(num_blocks=24, fraction=1.0)  # 23, of which a request of 44 tokens takes 11 + 4 + 5
    run_all(scheduler, "a", PREFIX)
    scheduler.pins.pin(make_pin("system", PREFIX))
    assert held(scheduler, "system") == 11
    assert run_all(scheduler, "b", range(100, 140), max_tokens=4) == 0
    assert 0 < held(scheduler, "system") < 11
    scheduler.check_integrity()
    assert run_all(scheduler, "c", PREFIX) == 0, "what is left of the windows' tails leads to no hit"
    assert held(scheduler, "system") == 11
    assert run_all(scheduler, "d", [*PREFIX, 7]) == 24


def test_window_leaves_a_pinned_block_and_pins_let_go_of_it_when_nothing_else_is_free() -> None:
    """What its window is about to leave would be free, and only a pin holds it besides."""
    scheduler = make_scheduler(
        make_coordinator(GROUPS[1:2], 5, longest_chunk=4), max_num_batched_tokens=4, max_pinned_fraction=1.0
    )
    pin = scheduler.pins.pin(make_pin("system", range(12)))
    scheduler.add_request(make_new("a", range(12), max_tokens=12))
    for _ in range(3):
        run_step(scheduler)
    assert len(pin.blocks) == 2
    while scheduler.has_work:
        run_step(scheduler)
    assert [output.finish_reason for output in scheduler.take_outputs()][-1] is FinishReason.LENGTH
    assert len(pin.blocks) < 2


def fork_inside_the_pin(max_tokens: int = 8) -> Scheduler:
    """The pin holds the two full blocks of a sequence that has ended; `child` goes on from inside the second one."""
    scheduler = make()
    scheduler.add_request(make_new("parent", SYSTEM))
    run_step(scheduler)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    child = make_new("child", SYSTEM[:7], max_tokens=max_tokens)
    scheduler.add_request(dataclasses.replace(child, fork_of="parent"))
    scheduler.abort("parent")
    scheduler.check_integrity()
    return scheduler


def test_pinned_block_that_a_fork_writes_to_is_copied_and_stays() -> None:
    scheduler = fork_inside_the_pin()
    pinned = next(iter(scheduler.pins)).blocks[1]
    child = scheduler.requests["child"]
    assert child.num_computed_tokens == 6
    assert child.blocks[1] is pinned
    step = run_step(scheduler)
    assert [copy.source_id for copy in step.copies] == [pinned.block_id]
    assert child.blocks[1] is not pinned
    assert (held(scheduler, "system"), pinned.ref_cnt) == (2, 1)
    assert pinned.content is next(iter(scheduler.pins)).contents[1]


def test_pin_of_a_block_that_a_fork_is_about_to_write_to_is_copied_too() -> None:
    """The child is its only table, and would write in place; then it is pinned."""
    scheduler = fork_inside_the_pin()
    scheduler.pins.unpin("system")
    scheduler.pins.pin(make_pin("system", SYSTEM))
    assert held(scheduler, "system") == 2
    assert len(run_step(scheduler).copies) == 1
    assert held(scheduler, "system") == 2


def test_pins_let_go_of_the_block_that_a_fork_writes_to_when_there_is_none_for_the_copy() -> None:
    scheduler = fork_inside_the_pin(max_tokens=1)
    child = scheduler.requests["child"]
    shared = child.blocks[1]
    scheduler.kv.pool.get_new_blocks(scheduler.kv.pool.num_free_blocks)  # as if others held all the rest
    step = scheduler.schedule()
    assert step is not None
    assert step.copies == []
    assert child.blocks[1] is shared
    assert shared.content is None
    assert held(scheduler, "system") == 1, "the deepest block only: that was enough"


def make_swapping(num_blocks: int, fraction: float, **limits: Any) -> Scheduler:
    kv = make_kv(num_blocks, SIZE)
    return make_scheduler(kv, num_host_blocks=20, max_pinned_fraction=fraction, preemption_mode="swap", **limits)


def test_swap_blocks_on_their_way_that_a_pin_holds_will_not_be_free() -> None:
    """b leaves, whose first two blocks are pinned: a, which needs two, is not to wait for those."""
    scheduler = make_swapping(10, 0.5)
    run_all(scheduler, "x", SYSTEM)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    scheduler.add_request(make_new("a", range(100, 123), max_tokens=20))  # 6 blocks
    scheduler.add_request(make_new("b", SYSTEM, max_tokens=20))  # 1 beside those pinned
    run_step(scheduler)
    assert scheduler.kv.pool.num_free_blocks == 0
    run_step(scheduler)
    step = scheduler.schedule()
    assert step is not None
    assert len(step.copies) == 3
    swap_space = scheduler.swap_space
    assert swap_space is not None
    scheduler.check_integrity()
    waits = swap_space.will_have_room(scheduler.requests["a"], 28, StepPlan(9, None, scheduler.kv, scheduler.config))
    assert waits
    plan = StepPlan(9, None, scheduler.kv, scheduler.config)
    assert not swap_space.will_have_room(scheduler.requests["a"], 29, plan)
    scheduler.update(make_result(step))
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == 1
    assert held(scheduler, "system") == 2


def test_swap_blocks_on_their_way_are_expected_by_who_else_holds_them_now() -> None:
    """All that is on its way is b's, and others take hold of it and let go while it is."""
    scheduler = make_swapping(10, 0.5)
    scheduler.add_request(make_new("a", range(100, 123), max_tokens=20))  # 6 blocks
    scheduler.add_request(make_new("b", SYSTEM, max_tokens=20))  # 3 blocks
    run_step(scheduler)
    run_step(scheduler)
    step = scheduler.schedule()
    assert step is not None
    assert len(step.copies) == 3
    swap_space = scheduler.swap_space
    assert swap_space is not None

    def num_expected() -> int:
        fits = [num for num in range(7) if has_room(swap_space, 24 + SIZE * num)]
        scheduler.check_integrity()
        return max(fits)

    def has_room(swap_space: SwapSpace, num_tokens: int) -> bool:
        plan = StepPlan(9, None, scheduler.kv, scheduler.config)
        return swap_space.will_have_room(scheduler.requests["a"], num_tokens, plan)

    assert num_expected() == 3
    scheduler.pins.pin(make_pin("system", SYSTEM))
    assert num_expected() == 1
    scheduler.pins.pin(make_pin("half", SYSTEM[:4]))
    scheduler.pins.unpin("system")
    assert num_expected() == 2
    scheduler.pins.unpin("half")
    assert num_expected() == 3
    scheduler.abort("b")
    assert (num_expected(), scheduler.kv.pool.num_free_blocks) == (3, 3), "free at once, and expected no more"


def test_swap_request_that_is_alone_waits_for_what_is_on_its_way_before_pins_stand_back() -> None:
    """All of b that is on its way is pinned meanwhile: until it is there, letting go of it would free nothing for a."""
    scheduler = make_swapping(7, 1.0, max_outstanding=2)
    scheduler.add_request(make_new("a", range(100, 108), max_tokens=8))
    scheduler.add_request(make_new("b", range(200, 216), max_tokens=2))
    run_step(scheduler)
    leaving = scheduler.schedule()
    assert leaving is not None
    assert len(leaving.copies) == 4
    scheduler.pins.pin(make_pin("system", range(200, 216)))
    assert held(scheduler, "system") == 4
    scheduler.check_integrity()
    assert scheduler.schedule() is None
    assert list(scheduler.running) == ["a"]
    assert held(scheduler, "system") == 4
    scheduler.update(make_result(leaving))
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == 0, "pins have all that b left"
    assert rows_of(run_step(scheduler)) == {"a": (8, 1)}
    assert held(scheduler, "system") == 3
    while scheduler.has_work:
        run_step(scheduler)
    reasons = [output.finish_reason for output in scheduler.take_outputs() if output.finish_reason]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH]


def test_swap_request_that_comes_when_nobody_runs_waits_for_what_is_on_its_way_too() -> None:
    """a ends while b leaves: c would fit beside the pin once b is gone, and the pin is left alone."""
    scheduler = make_swapping(9, 0.5, max_outstanding=2, policy="priority")
    run_all(scheduler, "x", SYSTEM)
    scheduler.pins.pin(make_pin("system", SYSTEM))
    scheduler.add_request(make_new("a", range(100, 108), max_tokens=8))
    scheduler.add_request(make_new("b", range(200, 216), max_tokens=2))
    run_step(scheduler)
    leaving = scheduler.schedule()
    assert leaving is not None
    assert len(leaving.copies) == 4
    scheduler.abort("a")
    scheduler.add_request(make_new("c", range(300, 316), max_tokens=1, priority=-1))
    assert scheduler.schedule() is None
    assert held(scheduler, "system") == 2
    scheduler.update(make_result(leaving))
    scheduler.check_integrity()
    while scheduler.has_work:
        run_step(scheduler)
        assert held(scheduler, "system") == 2


def test_check_integrity_knows_the_references_of_pins() -> None:
    scheduler = make()
    run_all(scheduler, "a", SYSTEM)
    pin = scheduler.pins.pin(make_pin("system", SYSTEM))
    scheduler.check_integrity()
    lost = pin.blocks.pop()
    with pytest.raises(AssertionError, match="has 0 references"):
        scheduler.check_integrity()
    assert block_ids([lost])
