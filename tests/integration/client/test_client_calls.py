"""Unary calls, paging, readiness and the synchronous client."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import grpc
import kvplane_client._loop_thread
import kvplane_client.client
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb
from kvplane_client import (
    AsyncClient,
    BlockFilter,
    Client,
    Completion,
    DeadlineExceededError,
    ExecutorState,
    FailedPreconditionError,
    InvalidArgumentError,
    KvBlockKeys,
    KvCacheIndex,
    KvPlaneError,
    LoraAdapter,
    ManagerState,
    NotFoundError,
    OutOfRangeError,
    PinnedPrefix,
    PoolStats,
    RequestCancelledError,
    RequestStatus,
    RetryPolicy,
    UnavailableError,
)

from tests.integration.client.scripted_manager import (
    MODEL,
    TEXT,
    ScriptedManager,
    ThreadedManager,
    answer,
    break_after,
    fail,
    hang_after,
    succeed_with,
)


async def test_get_stats_returns_plain_values(client: AsyncClient) -> None:
    stats = await client.get_stats()

    assert stats.state is ManagerState.SERVING
    assert stats.pool == PoolStats(16, 10, 6, 5, 9, 20, 7, 2, (16,))
    assert (stats.swapped_out, stats.swapped_in, stats.settings.preemption_mode) == (4, 3, "swap")
    assert stats.requests_finished == {"stop": 3, "length": 1}
    assert (stats.settings.policy, stats.settings.max_waiting) == ("fcfs", 64)


async def test_watch_kv_events_yields_batches_and_raises_what_ends_them(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    index, held = KvCacheIndex(), []
    keys: set[KvBlockKeys | None] = set()

    async def follow() -> None:
        async for batch in client.watch_kv_events(
            log_id="log", from_sequence=4, include_token_ids=True, include_keys=True
        ):
            index.apply(batch)
            keys.update(block.keys for block in index.blocks.values())
            held.append(index.reachable())

    with pytest.raises(OutOfRangeError, match="too slow"):
        await follow()

    assert held == [{"aa"}, set()]
    assert (index.log_id, index.next_sequence) == ("log", 6)
    (asked,) = manager.scripts.of("WatchKvEvents")
    assert (asked.log_id, asked.from_sequence, asked.include_token_ids, asked.include_keys) == ("log", 4, True, True)
    assert keys == {KvBlockKeys("s\x1b", "", "a", "1")}


async def test_get_model_returns_plain_values(client: AsyncClient) -> None:
    model = await client.get_model()

    assert (model.name, model.max_model_len, model.eos_token_ids, model.dtype) == ("tiny", 128, (2,), "float32")


async def test_list_requests_reads_every_page(client: AsyncClient, manager: ScriptedManager) -> None:
    infos = [info async for info in client.list_requests(include_finished=True, page_size=2)]

    assert [info.request_id for info in infos] == ["r0", "r1", "r2", "r3", "r4"]
    assert infos[0].status is RequestStatus.RUNNING
    assert infos[0].block_table == (1, 2, 3, 7)
    pages = manager.scripts.of("ListRequests")
    assert [page.page_token for page in pages] == ["", "2", "4"]
    assert all(page.include_finished and page.page_size == 2 for page in pages)


async def test_list_requests_selects_one(client: AsyncClient) -> None:
    assert [info.request_id async for info in client.list_requests(request_id="r3")] == ["r3"]


@pytest.mark.parametrize(
    ("block_filter", "expected"),
    [
        (BlockFilter.ALL, [1, 2, 3, 4, 70]),
        (BlockFilter.USED, [1, 2, 3]),
        (BlockFilter.CACHED, [1, 3, 4]),
        (BlockFilter.FREE, [4, 70]),
    ],
)
async def test_list_blocks_reads_every_page_of_the_filter(
    client: AsyncClient, block_filter: BlockFilter, expected: list[int]
) -> None:
    infos = [info async for info in client.list_blocks(block_filter)]

    assert [info.block_id for info in infos] == expected
    by_id = {info.block_id: info for info in infos}
    if 3 in by_id:
        assert (by_id[3].block_hash, by_id[3].provisional) == ("02" * 16, True)
    if 2 in by_id:
        assert by_id[2].block_hash is None


async def test_paging_stops_where_a_page_fails(client: AsyncClient, manager: ScriptedManager) -> None:
    manager.scripts.unary["ListBlocks"] = [fail(grpc.StatusCode.INVALID_ARGUMENT, "bad page_size", "BAD_PAGE_SIZE")]

    with pytest.raises(InvalidArgumentError, match="bad page_size"):
        await anext(client.list_blocks(page_size=10**6))


async def test_list_executors_and_reset_prefix_cache(client: AsyncClient, manager: ScriptedManager) -> None:
    (executor,) = await client.list_executors()
    assert (executor.executor_id, executor.state) == ("ex-1", ExecutorState.ACTIVE)
    assert (executor.lease_remaining_seconds, executor.last_error) == (2.5, None)

    assert await client.reset_prefix_cache() == 4
    manager.scripts.unary["ResetPrefixCache"] = [fail(grpc.StatusCode.FAILED_PRECONDITION, "in use", "POOL_IN_USE")]
    with pytest.raises(FailedPreconditionError, match="in use"):
        await client.reset_prefix_cache()


async def test_switch_executor_names_the_one_and_returns_the_other(
    client: AsyncClient, manager: ScriptedManager
) -> None:
    assert await client.switch_executor("ex-2") == "ex-1"
    assert manager.scripts.of("SwitchExecutor") == [registry_pb.SwitchExecutorRequest(executor_id="ex-2")]
    manager.scripts.unary["SwitchExecutor"] = [
        fail(grpc.StatusCode.NOT_FOUND, "no executor", "EXECUTOR_NOT_FOUND"),
        fail(grpc.StatusCode.FAILED_PRECONDITION, "it is active", "EXECUTOR_ALREADY_ACTIVE"),
    ]
    with pytest.raises(NotFoundError, match="no executor"):
        await client.switch_executor("ex-3")
    with pytest.raises(FailedPreconditionError, match="it is active"):
        await client.switch_executor("ex-1")


async def test_adapters_are_loaded_listed_and_unloaded(client: AsyncClient, manager: ScriptedManager) -> None:
    loaded = await client.load_adapter("support", "/lora/support")
    assert loaded == LoraAdapter("support", "r1", "/lora/support", rank=8, size_bytes=2_500_000, requests=3)
    assert manager.scripts.of("LoadAdapter") == [manager_pb.LoadAdapterRequest(name="support", source="/lora/support")]
    assert [one.name for one in await client.list_adapters()] == ["support", "[b]"]
    await client.unload_adapter("support")
    manager.scripts.unary["UnloadAdapter"] = [fail(grpc.StatusCode.NOT_FOUND, "no adapter", "UNKNOWN_ADAPTER")]
    with pytest.raises(NotFoundError, match="no adapter"):
        await client.unload_adapter("support")


async def test_pins_are_made_listed_and_unmade(client: AsyncClient, manager: ScriptedManager) -> None:
    pinned = await client.pin_prefix("system", np.array([1, 2], np.int64), cache_salt="s", tenant="t", adapter="a")
    assert pinned == PinnedPrefix("system", num_tokens=70, num_blocks=4, held_blocks=3)
    assert manager.scripts.of("PinPrefix") == [
        manager_pb.PinPrefixRequest(
            name="system", token_ids=pb.TokenIds(ids=[1, 2]), cache_salt="s", tenant="t", adapter="a"
        )
    ]
    everything = await client.list_pinned_prefixes()
    assert (everything.max_blocks, [one.name for one in everything.pins]) == (25, ["system", "[b]"])
    assert [one.keys for one in everything.pins] == [None, KvBlockKeys("s", "", "[l]", "r1")]
    await client.unpin_prefix("system")
    manager.scripts.unary["UnpinPrefix"] = [fail(grpc.StatusCode.NOT_FOUND, "no pin", "PIN_NOT_FOUND")]
    with pytest.raises(NotFoundError, match="no pin"):
        await client.unpin_prefix("system")
    for bad in (b"ab", 7, {"a": 1}, [1, "x"]):
        with pytest.raises(InvalidArgumentError, match="prefix: expected"):
            await client.pin_prefix("system", bad)  # type: ignore[arg-type]


async def test_unary_call_is_retried_on_unavailable_only(client: AsyncClient, manager: ScriptedManager) -> None:
    unavailable = fail(grpc.StatusCode.UNAVAILABLE, "starting", "STARTING")
    manager.scripts.unary["GetModel"] = [unavailable, unavailable, partial(succeed_with, MODEL)]
    assert (await client.get_model()).name == "tiny"
    assert len(manager.scripts.of("GetModel")) == 3

    manager.scripts.unary["GetStats"] = [fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "FULL", 10)]
    with pytest.raises(Exception, match="full"):
        await client.get_stats()
    assert len(manager.scripts.of("GetStats")) == 1


async def test_timeout_of_the_client_bounds_a_call(manager: ScriptedManager) -> None:
    async def never(_request: object, _context: object) -> None:
        await asyncio.Event().wait()

    manager.scripts.unary["GetModel"] = [never]
    async with AsyncClient(manager.address, timeout=0.1) as client:
        with pytest.raises(DeadlineExceededError) as caught:
            await client.get_model()
    assert isinstance(caught.value, TimeoutError)


async def test_wait_ready_outlasts_a_manager_that_starts(manager: ScriptedManager) -> None:
    await manager.stop()
    async with AsyncClient(manager.address) as client:
        waiting = asyncio.create_task(client.wait_ready(60))
        await asyncio.sleep(0.05)
        manager.scripts.unary["GetModel"] = [
            fail(grpc.StatusCode.UNAVAILABLE, "no executor yet", "NO_EXECUTOR"),
            partial(succeed_with, MODEL),
        ]
        await manager.start()

        assert (await waiting).name == "tiny"


async def test_wait_ready_says_what_is_missing_when_time_is_up(manager: ScriptedManager) -> None:
    manager.scripts.health = health_pb2.HealthCheckResponse.NOT_SERVING
    await manager.stop()
    await manager.start()
    async with AsyncClient(manager.address) as client:
        with pytest.raises(UnavailableError, match="health is NOT_SERVING: it has no executor that is ready"):
            await client.wait_ready(0.3)


def test_sync_client_offers_every_call(threaded_manager: ThreadedManager) -> None:
    threaded_manager.scripts.generate = [break_after(4), answer]
    with Client(threaded_manager.address, retry=RetryPolicy(initial_backoff=0.01)) as client:
        assert client.wait_ready(60).name == "tiny"
        with client.stream("a") as stream:
            assert "".join(chunk.text for chunk in stream) == TEXT
        assert client.generate("a", max_tokens=3).token_ids == tuple(TEXT.encode()[:3])
        assert client.stream("a").completion().text == TEXT
        assert client.get_model().vocab_size == 256
        assert client.get_stats().requests_running == 2
        assert [info.request_id for info in client.list_requests()] == ["r0", "r1", "r2", "r3", "r4"]
        assert len(list(client.list_blocks(BlockFilter.FREE))) == 2
        assert client.reset_prefix_cache() == 4
        assert client.pin_prefix("system", "Be brief.").held_blocks == 3
        assert client.list_pinned_prefixes().max_blocks == 25
        client.unpin_prefix("system")
        assert len(client.list_executors()) == 1
        assert client.switch_executor("ex-2") == "ex-1"
        client.abort("x")
    with pytest.raises(FailedPreconditionError, match="closed"):
        client.get_model()


def test_sync_batch_returns_completions(threaded_manager: ThreadedManager) -> None:
    from tests.integration.client.test_client_many import one_by_one

    threaded_manager.scripts.many = [one_by_one()]
    with Client(threaded_manager.address) as client:
        first, second = client.generate_batch(["a", "bad"])
    assert isinstance(first, Completion)
    assert isinstance(second, InvalidArgumentError)


def test_closing_a_sync_stream_cancels_the_request(threaded_manager: ThreadedManager) -> None:
    cancelled = threading.Event()
    threaded_manager.scripts.generate = [hang_after(1, cancelled.set)]
    with Client(threaded_manager.address) as client:
        with client.stream("a") as stream:
            next(stream)
        assert cancelled.wait(60)


def test_closing_a_sync_client_fails_a_waiting_thread(threaded_manager: ThreadedManager) -> None:
    threaded_manager.scripts.generate = [hang_after(1, lambda: None)]
    client = Client(threaded_manager.address)
    stream = client.stream("a")
    next(stream)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            next(stream)
        except KvPlaneError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client.close()
    thread.join(60)

    assert not thread.is_alive()
    # The second when the thread began to wait only after the client was closed.
    assert [type(error) for error in caught] in ([RequestCancelledError], [FailedPreconditionError])


def test_sync_clients_share_one_thread(threaded_manager: ThreadedManager) -> None:
    with Client(threaded_manager.address) as first, Client(threaded_manager.address) as second:
        first.get_model()
        second.get_model()
        assert [thread.name for thread in threading.enumerate()].count("kvplane-client") == 1
        second.close()
        assert first.get_model().name == "tiny", "the other's end is not its own"


def interrupted_at(moment: int, action: Callable[[], Any]) -> bool:
    """Raises KeyboardInterrupt at one instruction of the synchronous client, counted from 0.

    Returns:
        Whether the action got so far.
    """
    watched = {kvplane_client.client.__file__, kvplane_client._loop_thread.__file__}
    passed = itertools.count()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in watched:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(passed) == moment:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_interrupt_at_any_instruction_leaves_the_client_whole(
    threaded_manager: ThreadedManager, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(threaded_manager.address) as client:
        moments = itertools.takewhile(lambda moment: interrupted_at(moment, client.get_model), itertools.count())
        assert len(list(moments)) > 50
        assert client.get_model().name == "tiny"
        assert not client._calls._tasks
    gc.collect()  # a coroutine that nobody awaited would warn now, and a warning fails the test
    assert not caplog.records


def test_interrupt_at_any_instruction_of_a_stream_ends_the_request(
    threaded_manager: ThreadedManager, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Semaphore(0)
    threaded_manager.scripts.generate = [hang_after(1, ended.release)]
    moments = itertools.count()
    was_interrupted = True
    while was_interrupted:
        with Client(threaded_manager.address) as client:

            def first_chunk(client: Client = client) -> None:
                with client.stream("a") as stream:
                    next(stream)

            was_interrupted = interrupted_at(moment := next(moments), first_chunk)
    for _ in threaded_manager.scripts.of("Generate"):
        assert ended.acquire(timeout=60)
    assert moment > 100
    gc.collect()
    assert not caplog.records
