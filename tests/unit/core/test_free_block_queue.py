import pytest

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.free_block_queue import FreeKVCacheBlockQueue
from tests.unit.core.builders import block_ids


def make_queue(count: int) -> tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(block_id) for block_id in range(count)]
    return FreeKVCacheBlockQueue(blocks), blocks


def test_queue_new_holds_blocks_in_the_order_given() -> None:
    queue, _ = make_queue(4)
    assert block_ids(queue) == [0, 1, 2, 3]
    assert queue.num_free_blocks == 4


def test_popleft_n_some_takes_them_from_the_head_and_unlinks_them() -> None:
    queue, blocks = make_queue(4)
    assert block_ids(queue.popleft_n(3)) == [0, 1, 2]
    assert block_ids(queue) == [3]
    assert queue.num_free_blocks == 1
    for block in blocks[:3]:
        assert block.prev_free_block is None
        assert block.next_free_block is None


def test_popleft_n_all_leaves_a_queue_that_can_be_filled_again() -> None:
    queue, blocks = make_queue(3)
    queue.popleft_n(3)
    assert block_ids(queue) == []
    queue.append(blocks[2])
    queue.prepend(blocks[0])
    queue.append(blocks[1])
    assert block_ids(queue) == [0, 2, 1]
    assert queue.num_free_blocks == 3


def test_popleft_n_none_takes_nothing() -> None:
    queue, _ = make_queue(2)
    assert queue.popleft_n(0) == []
    assert block_ids(queue) == [0, 1]


def test_popleft_n_too_many_raises_and_takes_nothing() -> None:
    queue, _ = make_queue(2)
    with pytest.raises(IndexError, match="at least 3 free blocks, got 2"):
        queue.popleft_n(3)
    assert block_ids(queue) == [0, 1]
    assert queue.num_free_blocks == 2


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_remove_from_anywhere_keeps_the_order_of_the_others(removed: int) -> None:
    queue, blocks = make_queue(3)
    queue.remove(blocks[removed])
    assert block_ids(queue) == [block_id for block_id in range(3) if block_id != removed]
    assert queue.num_free_blocks == 2


def test_remove_block_outside_raises() -> None:
    queue, blocks = make_queue(2)
    queue.remove(blocks[0])
    with pytest.raises(ValueError, match="expected a block in the free queue"):
        queue.remove(blocks[0])
    assert queue.num_free_blocks == 1


@pytest.mark.parametrize("put", ["append", "prepend"])
def test_put_block_that_is_in_raises(put: str) -> None:
    queue, blocks = make_queue(2)
    with pytest.raises(ValueError, match="outside the free queue"):
        getattr(queue, put)(blocks[1])
    assert block_ids(queue) == [0, 1]
