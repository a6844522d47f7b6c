import pytest

from kvmanager_service.core.block_history import BlockHistory, BlockMoment
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.scheduler import Scheduler
from tests.unit.core.builders import make_kv, make_new, make_result, make_scheduler, run_step


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
    assert kv.pool.adopt(3, block_hash, None, bytes(16), b"", serial=5) is not None
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
