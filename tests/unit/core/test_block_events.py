import pytest

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.errors import EventsForgottenError
from tests.unit.core.builders import make_kv, make_new, make_scheduler, run_step, token_bytes

TOKENS = token_bytes([1, 2])
CLEARED = (0, None, False)


def kinds(log: BlockEventLog, sequence: int = 1) -> list[tuple[int, str]]:
    return [
        (block_id, "cleared" if content is None else "stored" if is_stored else "removed")
        for block_id, content, is_stored in log.since(sequence, 1000)
    ]


def test_event_log_numbers_run_from_1_and_the_oldest_are_forgotten() -> None:
    log = BlockEventLog(3)
    assert (log.first_sequence, log.next_sequence, log.since(1, 10)) == (1, 1, [])
    content = BlockContent(1, b"h", None, TOKENS, b"")
    for block_id in range(1, 6):
        log.stored(block_id, content)
    assert (log.first_sequence, log.next_sequence) == (3, 6)
    assert log.since(3, 10) == [(block_id, content, True) for block_id in (3, 4, 5)]
    assert log.since(4, 1) == [(4, content, True)]
    assert log.since(6, 10) == []


@pytest.mark.parametrize("sequence", [-1, 0, 2, 7])
def test_event_log_what_is_not_kept_is_an_error_that_says_what_is(sequence: int) -> None:
    log = BlockEventLog(3)
    for _ in range(5):
        log.cleared()
    with pytest.raises(EventsForgottenError, match="from 3 to 6") as caught:
        log.since(sequence, 10)
    assert caught.value.metadata == {"first_sequence": "3", "next_sequence": "6"}


def test_event_log_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 event, got 0"):
        BlockEventLog(0)


def test_pool_events_tell_of_blocks_once_they_are_filled_and_until_they_are_handed_out() -> None:
    log = BlockEventLog(100)
    pool = BlockPool(4, events=log)
    first, second = pool.get_new_blocks(2)
    root = pool.cache_full_block(first, b"a" * 16, None, TOKENS, b"", provisional_step=1)
    pool.cache_full_block(second, b"b" * 16, root, TOKENS, b"", provisional_step=2)
    assert kinds(log) == [(0, "cleared")], "a pool begins empty, and nothing is filled yet"
    pool.commit_step(1)
    assert kinds(log, 2) == [(1, "stored")]
    pool.forget_provisional()
    assert log.next_sequence == 3, "what was never stored is not removed"
    pool.free_blocks([first, second])
    pool.get_new_blocks(3)
    assert kinds(log, 3) == [(1, "removed")]
    assert log.since(3, 1) == [(1, root, False)]


def test_pool_events_reset_is_one_event_however_many_blocks() -> None:
    log = BlockEventLog(100)
    pool = BlockPool(9, events=log)
    blocks = pool.get_new_blocks(8)
    for block in blocks:
        pool.cache_full_block(block, bytes([block.block_id]) * 16, None, TOKENS, b"")
    assert len(pool.committed_contents()) == 8
    pool.free_blocks(blocks)
    pool.reset_prefix_cache()
    assert kinds(log, 10) == [(0, "cleared")]
    assert pool.committed_contents() == []
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_block(block, b"x" * 16, None, TOKENS, b"")
    assert kinds(log, 11) == [(block.block_id, "stored")], "it tells again after the reset"


def test_scheduler_events_follow_a_request_from_prompt_to_eviction() -> None:
    log = BlockEventLog(100)
    scheduler = make_scheduler(make_kv(4, events=log))
    scheduler.add_request(make_new("a", 8, max_tokens=1))
    step = scheduler.schedule()
    assert step is not None
    assert kinds(log) == [(0, "cleared")]
    scheduler.lose_steps()
    run_step(scheduler)
    assert [kind for _, kind in kinds(log, 2)] == ["stored", "stored"]
    (_, parent, _), (_, child, _) = log.since(2, 2)
    assert child is not None
    assert child.parent is parent
    scheduler.add_request(make_new("b", 11, max_tokens=1))
    run_step(scheduler)
    assert [kind for _, kind in kinds(log, 4)] == ["removed", "removed", "stored", "stored"]
