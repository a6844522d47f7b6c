"""WatchKvEvents over a real connection: snapshots, replay, what is forgotten, and the end."""

from __future__ import annotations

from array import array

import grpc
import pytest
from kvplane.common.v1.common_pb2 import Int32Array
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2_grpc

from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.extra_keys import LoraAdapter, request_keys
from kvmanager_service.engine_api import ManagerState
from kvmanager_service.errors import UnavailableError
from kvmanager_service.kv_event_messages import MAX_EVENTS
from kvmanager_service.server import Health, ManagerServer
from tests.integration.manager.fake_engine import Manager, details, until
from tests.integration.manager.scripted_executor import ScriptedExecutor, Sink, running_split
from tests.unit.core.builders import make_new, token_bytes

ROOT = BlockContent(5, b"r" * 16, None, token_bytes([1, 2]), b"")
CHILD = BlockContent(6, b"c" * 16, ROOT, token_bytes([3, 4]), b"")


async def read(
    call: grpc.aio.UnaryStreamCall[pb.WatchKvEventsRequest, pb.WatchKvEventsResponse],
) -> pb.WatchKvEventsResponse:
    response = await call.read()
    assert isinstance(response, pb.WatchKvEventsResponse)
    return response


async def test_watch_starts_with_a_snapshot_and_goes_on_with_what_happens(manager: Manager) -> None:
    events = manager.engine.events
    events.log.cleared()
    manager.engine.snapshot = [(7, ROOT)]
    call = manager.kv.WatchKvEvents(pb.WatchKvEventsRequest(include_token_ids=True))
    stored = pb.KvBlockStored(
        block_id=7, block_hash=b"r" * 16, content_id=5, medium=pb.KV_MEDIUM_DEVICE,
        token_ids=Int32Array(data=token_bytes([1, 2])),
    )  # fmt: skip
    assert await read(call) == pb.WatchKvEventsResponse(
        log_id=events.log_id,
        events=[pb.KvEvent(sequence=1, cleared=pb.KvCacheCleared()), pb.KvEvent(sequence=1, stored=stored)],
        next_sequence=2,
        is_snapshot=True,
    )
    events.log.stored(8, CHILD)
    events.log.removed(7, ROOT)
    events.notify()
    child = pb.KvBlockStored(
        block_id=8, block_hash=b"c" * 16, parent_block_hash=b"r" * 16, content_id=6, parent_content_id=5,
        token_ids=Int32Array(data=token_bytes([3, 4])), medium=pb.KV_MEDIUM_DEVICE,
    )  # fmt: skip
    removed = pb.KvBlockRemoved(block_id=7, block_hash=b"r" * 16, content_id=5, medium=pb.KV_MEDIUM_DEVICE)
    assert await read(call) == pb.WatchKvEventsResponse(
        log_id=events.log_id,
        events=[pb.KvEvent(sequence=2, stored=child), pb.KvEvent(sequence=3, removed=removed)],
        next_sequence=4,
    )
    call.cancel()


async def test_watch_tokens_are_shown_on_demand_only(manager: Manager) -> None:
    manager.engine.snapshot = [(7, ROOT)]
    call = manager.kv.WatchKvEvents(pb.WatchKvEventsRequest())
    assert not (await read(call)).events[1].stored.HasField("token_ids")
    call.cancel()


async def test_watch_keys_are_shown_on_demand_only(manager: Manager) -> None:
    """In a snapshot and in what follows; of those that a later version may have had, nothing is told."""
    events = manager.engine.events
    unknown = bytes((99, 1, 0, 0, 0, 7))
    keys = request_keys("s", "t", LoraAdapter("a", "1")) + unknown
    salted = BlockContent(5, b"r" * 16, None, token_bytes([1, 2]), keys)
    manager.engine.snapshot = [(7, salted)]
    told = pb.KvBlockKeys(cache_salt="s", tenant="t", lora_id="a", lora_revision="1")
    for asks in (True, False):
        call = manager.kv.WatchKvEvents(pb.WatchKvEventsRequest(include_keys=asks))
        blocks = [(await read(call)).events[1].stored]
        events.log.stored(8, salted)
        events.notify()
        blocks.append((await read(call)).events[0].stored)
        assert [block.keys if block.HasField("keys") else None for block in blocks] == [told if asks else None] * 2
        call.cancel()


async def test_watch_snapshot_of_many_blocks_comes_in_parts_and_says_when_it_is_complete(manager: Manager) -> None:
    manager.engine.snapshot = [(block_id, ROOT) for block_id in range(1, 2 * MAX_EVENTS + 1)]
    call = manager.kv.WatchKvEvents(pb.WatchKvEventsRequest())
    parts = [await read(call) for _ in range(3)]
    assert [(part.is_snapshot, part.next_sequence, len(part.events)) for part in parts] == [
        (True, 0, MAX_EVENTS), (True, 0, MAX_EVENTS), (True, 1, 1),
    ]  # fmt: skip
    ids = [event.stored.block_id for part in parts for event in part.events if event.HasField("stored")]
    assert ids == list(range(1, 2 * MAX_EVENTS + 1))
    call.cancel()


async def test_watch_goes_on_where_an_earlier_stream_broke(manager: Manager) -> None:
    events = manager.engine.events
    for block_id in range(1, 6):
        events.log.stored(block_id, ROOT)
    call = manager.kv.WatchKvEvents(pb.WatchKvEventsRequest(log_id=events.log_id, from_sequence=3))
    response = await read(call)
    assert [(event.sequence, event.stored.block_id) for event in response.events] == [(3, 3), (4, 4), (5, 5)]
    assert (response.next_sequence, response.is_snapshot) == (6, False)
    call.cancel()


@pytest.mark.parametrize(("log_id", "sequence"), [(None, 2), (None, 99), ("another", 12)])
async def test_watch_events_that_are_not_kept_are_out_of_range(
    manager: Manager, log_id: str | None, sequence: int
) -> None:
    events = manager.engine.events  # of 8
    for block_id in range(1, 12):
        events.log.stored(block_id, ROOT)
    request = pb.WatchKvEventsRequest(log_id=log_id or events.log_id, from_sequence=sequence)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.WatchKvEvents(request).read()
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert details(caught.value)[0] == "EVENTS_FORGOTTEN"


@pytest.mark.parametrize("values", [{"log_id": "x"}, {"from_sequence": 3}])
async def test_watch_sequence_and_log_go_together(manager: Manager, values: dict[str, object]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.kv.WatchKvEvents(pb.WatchKvEventsRequest(**values)).read()  # type: ignore[arg-type]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)[1]["field"] == "log_id"


async def test_watch_ends_unavailable_when_the_manager_stops(manager: Manager) -> None:
    call = manager.kv.WatchKvEvents(pb.WatchKvEventsRequest())
    await read(call)
    manager.engine.events.close(UnavailableError("DRAINING", "expected a manager that serves, got one that stops"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_watch_of_a_real_engine_tells_of_requests_resets_and_its_end() -> None:
    """From before there is a cache to after the manager has stopped."""
    async with running_split(ScriptedExecutor()) as split:
        server = ManagerServer(ManagerConfig(port=0), split.engine, split.registry, Health())
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = kv_manager_service_pb2_grpc.KvManagerServiceStub(channel)
            call = stub.WatchKvEvents(pb.WatchKvEventsRequest(include_token_ids=True))
            assert (await read(call)).is_snapshot
            await until(lambda: split.engine.stats().state is ManagerState.SERVING)
            split.engine.submit(make_new("a", range(1, 10), max_tokens=1), Sink())
            seen: list[pb.KvEvent] = []
            while sum(event.HasField("stored") for event in seen) < 2:
                seen += (await read(call)).events
            stored = [event.stored for event in seen if event.HasField("stored")]
            assert [list(array("i", one.token_ids.data)) for one in stored] == [[1, 2, 3, 4], [5, 6, 7, 8]]
            assert stored[1].parent_content_id == stored[0].content_id
            await until(lambda: split.engine.stats().requests_running == 0)
            await stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
            assert [event.WhichOneof("event") for event in (await read(call)).events] == ["cleared"]
            await split.engine.stop()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await server.stop(0)
