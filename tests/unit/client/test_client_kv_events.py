"""The index that follows the cache, and events of the wire as plain values."""

from __future__ import annotations

import pytest
from kvplane.common.v1.common_pb2 import Int32Array
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as pb
from kvplane_client import InternalError, KvBlockRemoved, KvBlockStored, KvCacheCleared, KvCacheIndex, KvEventBatch
from kvplane_client._convert import kv_batch_from


def stored(block_id: int, content_id: int, parent: int | None = None) -> KvBlockStored:
    parent_hash = None if parent is None else f"h{parent}"
    return KvBlockStored(1, block_id, f"h{content_id}", parent_hash, content_id, parent)


def removed(block_id: int, content_id: int) -> KvBlockRemoved:
    return KvBlockRemoved(1, block_id, f"h{content_id}", content_id)


def index_of(*events: KvBlockStored | KvBlockRemoved | KvCacheCleared) -> KvCacheIndex:
    index = KvCacheIndex()
    index.apply(KvEventBatch("log", events, 9, is_snapshot=False))
    return index


def test_index_reaches_a_block_only_through_all_before_it() -> None:
    chain = [stored(1, 11), stored(2, 12, 11), stored(3, 13, 12), stored(4, 21)]
    assert index_of(*chain).reachable() == {"h11", "h12", "h13", "h21"}
    assert index_of(*chain, removed(2, 12)).reachable() == {"h11", "h21"}
    assert index_of(*chain, removed(1, 11)).reachable() == {"h21"}
    assert index_of(*reversed(chain)).reachable() == {"h11", "h12", "h13", "h21"}, "in whatever order they are told"


def test_index_content_held_twice_is_gone_with_the_last_block() -> None:
    twins = [stored(1, 11), stored(2, 11), stored(3, 12, 11)]
    assert index_of(*twins, removed(1, 11)).reachable() == {"h11", "h12"}
    assert index_of(*twins, removed(1, 11), removed(2, 11)).reachable() == set()


def test_index_same_hash_computed_anew_does_not_revive_what_hung_on_the_old_content() -> None:
    old = [stored(1, 11), stored(2, 12, 11), removed(1, 11)]
    anew = KvBlockStored(5, 3, "h11", None, 13, None)
    assert index_of(*old, anew).reachable() == {"h11"}


def test_index_of_several_groups_reaches_through_blocks_of_the_same_group_only() -> None:
    """Contents of two groups that end at one prefix have one id."""
    full = [KvBlockStored(1, 1, "f11", None, 11, None), KvBlockStored(2, 2, "f12", "f11", 12, 11)]
    other = [KvBlockStored(3, 3, "o12", "o11", 12, 11, group=1)]
    assert index_of(*full, *other).reachable() == {"f11", "f12"}
    assert index_of(*other, *full).reachable() == {"f11", "f12"}
    first = KvBlockStored(4, 4, "o11", None, 11, None, group=1)
    gone = KvBlockRemoved(5, 1, "f11", 11)
    assert index_of(*full, *other, first, gone).reachable() == {"o11", "o12"}


def test_index_cleared_forgets_and_remembers_where_to_go_on() -> None:
    index = index_of(stored(1, 11), KvCacheCleared(2))
    assert (index.blocks, index.reachable()) == ({}, set())
    assert (index.log_id, index.next_sequence) == ("log", 9)


def test_convert_events_of_each_kind() -> None:
    first = pb.KvBlockStored(block_id=1, block_hash=b"\x01", content_id=5, medium=pb.KV_MEDIUM_DEVICE)
    second = pb.KvBlockStored(
        block_id=2, block_hash=b"\x02", parent_block_hash=b"\x01", content_id=6, parent_content_id=5, group=3,
        medium=pb.KV_MEDIUM_DEVICE, token_ids=Int32Array(data=(7).to_bytes(4, "little") + (8).to_bytes(4, "little")),
    )  # fmt: skip
    gone = pb.KvBlockRemoved(block_id=1, block_hash=b"\x01", content_id=5, medium=pb.KV_MEDIUM_DEVICE)
    response = pb.WatchKvEventsResponse(
        log_id="l", next_sequence=6, is_snapshot=True,
        events=[
            pb.KvEvent(sequence=2, stored=first), pb.KvEvent(sequence=3, stored=second),
            pb.KvEvent(sequence=4, removed=gone), pb.KvEvent(sequence=5, cleared=pb.KvCacheCleared()),
        ],
    )  # fmt: skip
    assert kv_batch_from(response) == KvEventBatch(
        "l",
        (
            KvBlockStored(2, 1, "01", None, 5, None),
            KvBlockStored(3, 2, "02", "01", 6, 5, (7, 8), 3, "device"),
            KvBlockRemoved(4, 1, "01", 5),
            KvCacheCleared(5),
        ),
        6,
        True,
    )


def test_convert_event_of_an_unknown_kind_or_medium_is_an_error() -> None:
    with pytest.raises(InternalError, match="event 3 of a kind"):
        kv_batch_from(pb.WatchKvEventsResponse(events=[pb.KvEvent(sequence=3)]))
    unknown = pb.KvBlockRemoved(medium=77)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="KvMedium of 77"):
        kv_batch_from(pb.WatchKvEventsResponse(events=[pb.KvEvent(sequence=3, removed=unknown)]))
