import dataclasses
from typing import Any

import pytest

from kvmanager_service.core.adoption import TaggedBlock, adopt_block
from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_history import BlockHistory, BlockMoment
from kvmanager_service.core.block_tag import decode_tag, encode_tag
from kvmanager_service.core.group_key import group_of
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import FullAttention, SlidingWindow
from kvmanager_service.core.scheduler import Scheduler
from tests.unit.core.builders import (
    make_coordinator,
    make_kv,
    make_new,
    make_result,
    make_scheduler,
    run_step,
    table_ids,
)


def life(kv: KVCacheManager, block_id: int) -> list[tuple[str, str]]:
    """Moments of a block, each with whose doing it was."""
    assert kv.pool.history is not None
    return [(record.moment.name.lower(), record.request_id) for record in kv.pool.history.of(block_id)]


def make_watched(num_blocks: int = 4) -> Scheduler:
    """A scheduler over a pool with a history; by default 3 blocks of 4 tokens."""
    return make_scheduler(make_kv(num_blocks, history=BlockHistory(1000)))


def test_history_tells_a_blocks_life_from_allocation_to_eviction() -> None:
    scheduler = make_watched()
    scheduler.add_request(make_new("a", 9, max_tokens=1))
    run_step(scheduler)
    scheduler.add_request(make_new("b", list(range(97_000, 97_009)), max_tokens=1))  # the prompt of a
    run_step(scheduler)
    scheduler.add_request(make_new("c", 9, max_tokens=1))
    run_step(scheduler)
    assert life(scheduler.kv, 1) == [
        ("allocated", "a"), ("hashed", ""), ("filled", ""), ("freed", "a"), ("hit", "b"), ("freed", "b"),
        ("evicted", ""), ("allocated", "c"), ("freed", "c"),
    ]  # fmt: skip
    assert life(scheduler.kv, 3)[:3] == [("allocated", "a"), ("freed", "a"), ("allocated", "b")]


def test_history_records_carry_order_step_and_hash() -> None:
    scheduler = make_watched()
    scheduler.add_request(make_new("a", 9, max_tokens=1))
    step = run_step(scheduler)
    history = scheduler.kv.pool.history
    assert history is not None
    allocated, hashed, filled, freed = history.of(1)
    block_hash = scheduler.kv.pool.blocks[1].block_hash
    assert (allocated.block_hash, allocated.step_id) == (b"", 0)
    assert [(one.block_hash, one.step_id) for one in (hashed, filled)] == [(block_hash, step.step_id)] * 2
    assert (freed.block_hash, freed.step_id) == (block_hash, 0)
    assert allocated.order < hashed.order < filled.order < freed.order


def test_history_records_carry_the_keys_of_what_a_first_block_held() -> None:
    scheduler = make_watched()
    request = scheduler.add_request(make_new("a", 9, max_tokens=1, salt="s"))
    run_step(scheduler)
    history = scheduler.kv.pool.history
    assert history is not None
    assert request.extra_keys
    assert [one.extra_keys for one in history.of(1)] == [b"", *[request.extra_keys] * 3]
    assert [one.extra_keys for one in history.of(2)] == [b""] * 4
    scheduler.kv.pool.reset_prefix_cache()
    assert history.of(1)[-1].extra_keys == request.extra_keys, "that is what it lost"


def test_history_block_of_a_lost_or_failed_step_was_forgotten_and_never_filled() -> None:
    scheduler = make_watched()
    scheduler.add_request(make_new("a", 9, max_tokens=1))
    scheduler.schedule()
    scheduler.lose_steps()
    assert life(scheduler.kv, 1) == [("allocated", "a"), ("hashed", ""), ("forgotten", ""), ("freed", "a")]
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(make_result(step, failed=[0]))
    assert ("forgotten", "") in life(scheduler.kv, step.rows[0].request.last_block_id_bytes[0])[-3:]


def test_history_adopted_blocks_say_so() -> None:
    kv = make_kv(history=BlockHistory(10))
    block_hash = kv.hash_function(bytes(16) + bytes(16))
    assert adopt_block(kv.pool, TaggedBlock(3, block_hash, 5, 0, bytes(16), b""), None) is not None
    assert life(kv, 3) == [("adopted", "")]


def test_history_is_bounded_and_says_how_much_is_gone() -> None:
    history = BlockHistory(3)
    for block_id in (1, 2, 1, 2, 1):
        history.note(block_id, BlockMoment.HIT)
    assert [record.order for record in history.of(1)] == [3, 5]
    assert history.num_dropped == 2
    with pytest.raises(ValueError, match="at least 1 record, got 0"):
        BlockHistory(0)


def test_pool_without_a_history_keeps_none() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", 9, max_tokens=1))
    run_step(scheduler)
    assert scheduler.kv.pool.history is None


def grouped_life(scheduler: Scheduler, block_id: int) -> list[tuple[str, str, int]]:
    """Moments of a block, each with whose doing it was and in which KV group."""
    history = scheduler.kv.pool.history
    assert history is not None
    return [(record.moment.name.lower(), record.request_id, record.group) for record in history.of(block_id)]


def make_grouped(num_blocks: int = 14, **limits: Any) -> Scheduler:
    """Full attention and a window of 6 tokens, blocks of 4 and chunks of 8."""
    kv = make_coordinator(
        [FullAttention(4), SlidingWindow(4, 6)], num_blocks, longest_chunk=8, history=BlockHistory(1000)
    )
    return make_scheduler(kv, max_num_batched_tokens=8, **limits)


def test_history_of_several_groups_tells_which_one_a_block_was_in() -> None:
    scheduler = make_grouped(num_blocks=10)  # of 20 tokens five of full attention, at most four of the window
    scheduler.add_request(make_new("a", 18, max_tokens=2))
    run_step(scheduler)
    (full, window) = table_ids(scheduler.requests["a"])
    assert grouped_life(scheduler, full[0]) == [("allocated", "a", 0), ("hashed", "", 0), ("filled", "", 0)]
    left = window[0]
    assert grouped_life(scheduler, left) == [("allocated", "a", 1), ("hashed", "", 1), ("filled", "", 1)]
    while scheduler.has_work:
        run_step(scheduler)
    assert grouped_life(scheduler, left)[3:] == [("freed", "a", 1)], "the window has moved on"
    scheduler.add_request(make_new("b", 18, max_tokens=1))
    while scheduler.has_work:
        run_step(scheduler)
    assert grouped_life(scheduler, left)[4] == ("evicted", "", 1)
    assert grouped_life(scheduler, left)[5][:2] == ("allocated", "b")
    groups_of = [{group for *_, group in grouped_life(scheduler, block_id)} for block_id in range(1, 10)]
    assert {0, 1} in groups_of, "a block that was free may come back in another group"


def test_history_of_several_groups_tells_hits_copies_and_forks() -> None:
    scheduler = make_grouped()
    prompt = list(range(18))
    scheduler.add_request(make_new("a", prompt, max_tokens=1))
    while scheduler.has_work:
        run_step(scheduler)
    again = scheduler.add_request(make_new("b", prompt, max_tokens=5))
    run_step(scheduler)
    assert again.num_computed_tokens == 18
    (full, window) = table_ids(again)
    assert ("hit", "b", 0) in grouped_life(scheduler, full[0])
    assert ("hit", "b", 1) in grouped_life(scheduler, window[3])
    scheduler.add_request(dataclasses.replace(make_new("c", [*prompt, 7], max_tokens=3), fork_of="b"))
    assert ("hit", "c", 1) in grouped_life(scheduler, window[4])
    run_step(scheduler)
    assert {("freed", "b", 1), ("freed", "c", 1)} & set(grouped_life(scheduler, window[4])), "one of them has a copy"
    scheduler.abort("c")
    scheduler.abort("b")
    assert grouped_life(scheduler, full[0])[-1][0] == "freed"
    scheduler.reset_prefix_cache()
    assert grouped_life(scheduler, window[3])[-1] == ("forgotten", "", 1)


def test_history_of_several_groups_block_is_freed_when_its_copy_to_the_host_is_acknowledged() -> None:
    scheduler = make_grouped(num_blocks=13, num_host_blocks=20, preemption_mode="swap")
    for request_id, length in (("a", 14), ("b", 10)):
        scheduler.add_request(make_new(request_id, length, max_tokens=20))
    while not scheduler.stats.preemptions:
        tables = {request_id: table_ids(request) for request_id, request in scheduler.requests.items()}
        step = scheduler.schedule()
        assert step is not None
        if not scheduler.stats.preemptions:
            scheduler.update(make_result(step))
    (victim,) = scheduler.waiting
    kept = [copy.source_id for copy in step.copies]
    assert "freed" not in {grouped_life(scheduler, block_id)[-1][0] for block_id in kept}
    scheduler.update(make_result(step))
    for block_id in kept:
        group = 0 if block_id in tables[victim.request_id][0] else 1
        assert grouped_life(scheduler, block_id)[-1] == ("freed", victim.request_id, group)


def test_history_of_several_groups_adopted_blocks_say_in_which() -> None:
    scheduler = make_grouped()
    tags: dict[int, BlockContent] = {}
    scheduler.add_request(make_new("a", 18, max_tokens=1))
    while scheduler.has_work or scheduler.residency.tags:
        tags.update({block_id: content for block_id, content in run_step(scheduler).tags if content is not None})
    kv = make_coordinator(scheduler.kv.groups, 14, longest_chunk=8, history=BlockHistory(1000))  # type: ignore[union-attr]
    encoded = [decode_tag(block_id, encode_tag(content)) for block_id, content in tags.items()]
    assert kv.adopt([tag for tag in encoded if tag is not None]) == len(tags) > 4
    again = make_scheduler(kv)
    told = {block_id: grouped_life(again, block_id) for block_id in tags}
    assert told == {block_id: [("adopted", "", group_of(content))] for block_id, content in tags.items()}
    assert {group_of(content) for content in tags.values()} == {0, 1}
