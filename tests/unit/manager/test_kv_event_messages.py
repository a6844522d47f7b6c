"""Events of a cache with several KV groups, from the core's own books to what a follower knows."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as pb
from kvplane_client import KvCacheIndex
from kvplane_client._convert import kv_batch_from

from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.extra_keys import LoraAdapter
from kvmanager_service.core.group_key import group_key
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_groups import FullAttention, RecurrentState, SlidingWindow
from kvmanager_service.core.request import Request
from kvmanager_service.kv_event_messages import event_batch, snapshot_batches
from tests.unit.core.builders import make_coordinator, make_kv, make_request

GROUPS = [FullAttention(4), SlidingWindow(4, 8), RecurrentState(8)]


def compute(kv: KVCacheCoordinator, request: Request, step_id: int = 0) -> None:
    assert kv.allocate_sequence(request)
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request, step_id)


def events_of(log: BlockEventLog) -> list[pb.KvEvent]:
    return list(event_batch(log.since(1, 10_000), 1, with_tokens=True).events)


def test_events_of_several_groups_name_group_and_medium_when_stored_and_when_removed() -> None:
    log = BlockEventLog(1000)
    kv = make_coordinator(GROUPS, num_blocks=14, events=log)
    request = make_request("a", range(17))
    compute(kv, request)
    group_of_id = {
        block.block_id: index for index, table in enumerate(request.tables) for block in table.blocks[table.first :]
    }
    stored = {event.stored.block_id: event.stored for event in events_of(log)[1:]}
    assert {block_id: told.group for block_id, told in stored.items()}.items() <= group_of_id.items()
    assert [sum(told.group == index for told in stored.values()) for index in range(3)] == [4, 4, 2]
    sequence = log.next_sequence
    kv.free(request)
    compute(kv, make_request("b", range(100, 117)))  # takes every block of the pool
    later = event_batch(log.since(sequence, 1000), sequence, with_tokens=False).events
    removed = {event.removed.block_id: event.removed for event in later if event.WhichOneof("event") == "removed"}
    assert removed.keys() == stored.keys()
    for block_id, gone in removed.items():
        was = stored[block_id]
        assert (gone.group, gone.block_hash, gone.content_id) == (was.group, was.block_hash, was.content_id)
    assert {told.medium for told in [*stored.values(), *removed.values()]} == {pb.KV_MEDIUM_DEVICE}


def test_events_of_several_groups_name_the_block_before_of_the_same_group() -> None:
    log = BlockEventLog(1000)
    kv = make_coordinator(GROUPS, events=log)
    compute(kv, make_request("a", range(33)))
    stored = [event.stored for event in events_of(log) if event.WhichOneof("event") == "stored"]
    by_group = [[told for told in stored if told.group == index] for index in range(len(GROUPS))]
    assert [len(told) for told in by_group] == [8, 8, 4]
    for chain in by_group:
        assert (chain[0].parent_block_hash, chain[0].parent_content_id) == (b"", 0)
        for before, after in pairwise(chain):
            assert (after.parent_block_hash, after.parent_content_id) == (before.block_hash, before.content_id)
    assert len({told.block_hash for told in stored}) == len(stored)


def test_events_of_several_groups_say_cleared_at_a_reset_and_nothing_of_lost_steps() -> None:
    log = BlockEventLog(1000)
    kv = make_coordinator(GROUPS, events=log)
    request = make_request("a", range(17))
    compute(kv, request, step_id=5)
    assert [event.WhichOneof("event") for event in events_of(log)] == ["cleared"], "nothing is filled yet"
    kv.pool.commit_step(5)
    assert len(events_of(log)) > 1
    kv.free(request)
    kv.pool.reset_prefix_cache()
    assert events_of(log)[-1].WhichOneof("event") == "cleared"


def test_events_of_one_group_are_of_group_0_whatever_their_keys() -> None:
    log = BlockEventLog(100)
    kv = make_kv(events=log)
    request = make_request("a", range(9), salt="s")
    assert kv.allocate_sequence(request)
    request.num_computed_tokens = 9
    kv.cache_blocks(request, 0)
    first, second = (event.stored for event in events_of(log)[1:])
    assert (first.group, second.group, second.parent_block_hash) == (0, 0, first.block_hash)


@pytest.mark.parametrize("with_groups", [False, True])
def test_events_tell_the_keys_of_first_blocks_on_demand(with_groups: bool) -> None:
    log = BlockEventLog(100)
    kv: KVCache = make_coordinator(GROUPS[:1] * 2, events=log) if with_groups else make_kv(30, events=log)
    lora = LoraAdapter("a", "1")
    given: list[dict[str, Any]] = [{}, {"salt": "s"}, {"lora": lora, "salt": "t"}, {"tenant": "", "is_isolated": True}]
    for number, keys in enumerate(given):
        request = make_request(f"r{number}", range(100 * number, 100 * number + 9), arrival_seq=number, **keys)
        assert kv.allocate_sequence(request)
        request.num_computed_tokens = 9
        kv.cache_blocks(request, 0)

    def told(events: Iterable[pb.KvEvent]) -> set[tuple[bool, bytes]]:
        """Whether it is a first block, and its keys; nothing for none."""
        stored = [event.stored for event in events if event.HasField("stored")]
        assert len(stored) == 2 * len(given) * (2 if with_groups else 1)
        keys = [one.keys.SerializeToString(deterministic=True) if one.HasField("keys") else b"" for one in stored]
        return {(not one.parent_block_hash, encoded) for one, encoded in zip(stored, keys, strict=True)}

    expected = {(True, b""), (False, b"")} | {
        (True, pb.KvBlockKeys(**fields).SerializeToString(deterministic=True))
        for fields in ({"cache_salt": "s"}, {"cache_salt": "t", "lora_id": "a", "lora_revision": "1"}, {"tenant": ""})
    }
    assert told(event_batch(log.since(1, 100), 1, with_tokens=False, with_keys=True).events) == expected
    contents = list(kv.pool.committed_contents())
    (snapshot,) = snapshot_batches(contents, 1, with_tokens=False, with_keys=True)
    assert told(snapshot.events) == expected
    assert told(event_batch(log.since(1, 100), 1, with_tokens=False).events) == {(True, b""), (False, b"")}


def test_follower_of_several_groups_knows_what_each_holds_after_any_life() -> None:
    """Groups and contents as the pool has them, from the events alone and from a snapshot."""
    log = BlockEventLog(100_000)
    kv = make_coordinator(GROUPS, num_blocks=60, events=log)
    rng = random.Random(5)
    running: list[Request] = []
    follower = KvCacheIndex()
    sequence = 1
    for number in range(200):
        start = 1000 * rng.randrange(6)
        request = make_request(f"r{number}", range(start, start + rng.randrange(1, 40)), salt=rng.choice(["", "s"]))
        while not kv.allocate_sequence(request):
            kv.free(running.pop(rng.randrange(len(running))))
        request.num_computed_tokens = request.num_tokens
        kv.cache_blocks(request, 0)
        running.append(request)
        kv.check_integrity(running)
        message = event_batch(log.since(sequence, 10_000), sequence, with_tokens=False)
        sequence = message.next_sequence
        follower.apply(kv_batch_from(message))
        held = {
            (kv.hits.group_keys.index(content.extra_keys[: len(group_key(0))]), block_id, content.block_hash.hex())
            for block_id, content in kv.pool.committed_contents()
        }
        known = {(group, block_id, told.block_hash) for (group, _, block_id), told in follower.blocks.items()}
        assert known == held, number
    fresh = KvCacheIndex()
    for batch in snapshot_batches(kv.pool.committed_contents(), sequence, with_tokens=False):
        fresh.apply(kv_batch_from(batch))
    assert {key: (told.block_hash, told.content_id) for key, told in fresh.blocks.items()} == {
        key: (told.block_hash, told.content_id) for key, told in follower.blocks.items()
    }
    assert kv.pool.num_evictions > 50
