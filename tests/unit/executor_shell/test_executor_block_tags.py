import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from executor_service.block_tags import MAX_PORTION_BYTES, MAX_PORTION_TAGS, BlockTagStore, portions


def test_store_then_drop_forgets_only_the_written_blocks():
    tags = BlockTagStore(10)
    tags.store([1, 2, 3], [b"a", b"b", b"c"])
    tags.drop(np.array([2, 2, 7]))
    assert tags.snapshot() == {1: b"a", 3: b"c"}
    tags.store([2], [b"again"])
    assert tags.snapshot() == {1: b"a", 2: b"again", 3: b"c"}


def test_store_empty_tag_drops():
    tags = BlockTagStore(10)
    tags.store([1], [b"a"])
    tags.store([1, 2], [b"", b""])
    assert len(tags) == 0
    tags.drop(np.array([1, 2]))
    assert tags.snapshot() == {}


def test_snapshot_is_not_changed_by_later_steps():
    tags = BlockTagStore(10)
    tags.store([1], [b"a"])
    before = tags.snapshot()
    tags.drop(np.array([1]))
    assert before == {1: b"a"}


@given(sizes=st.lists(st.integers(1, 4096), max_size=400), repeat=st.integers(1, 30))
def test_portions_hold_everything_once_within_both_limits(sizes, repeat):
    tags = {block: bytes(size) for block, size in enumerate(sizes * repeat)}
    cut = list(portions(tags))
    assert {block: tag for ids, values in cut for block, tag in zip(ids, values, strict=True)} == tags
    assert sum(len(ids) for ids, _ in cut) == len(tags)
    for ids, values in cut:
        assert 0 < len(ids) <= MAX_PORTION_TAGS
        assert sum(map(len, values)) <= MAX_PORTION_BYTES


def test_portions_of_small_tags_are_cut_by_count():
    cut = list(portions(dict.fromkeys(range(MAX_PORTION_TAGS + 1), b"x")))
    assert [len(ids) for ids, _ in cut] == [MAX_PORTION_TAGS, 1]
