"""The engine loop against a scripted executor over real gRPC."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from kvplane.common.v1.common_pb2 import Int32Array
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.kvmanager.v1 import inference_service_pb2_grpc, kv_manager_service_pb2_grpc
from kvplane.kvmanager.v1.kv_manager_service_pb2 import GetStatsRequest
from structlog.testing import capture_logs

from kvmanager_service import executor_life
from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.errors import InvalidRequestError, PinLimitError, PoolExhaustedError
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.request import FinishReason
from kvmanager_service.engine_api import ManagerState, PinsView, PinView, StopMatch, TenantView
from kvmanager_service.engine_loop import WHY_UNAVAILABLE, EngineLoop
from kvmanager_service.errors import ExecutorRejectedError, PreconditionError, UnavailableError
from kvmanager_service.executor_client import ExecutorConnection, ExecutorLostError, StepStream
from kvmanager_service.registry import ExecutorRegistry
from kvmanager_service.server import Health, ManagerServer
from tests.integration.manager.fake_engine import until
from tests.integration.manager.scripted_executor import ScriptedExecutor, Sink, Split, model_info, running_split
from tests.unit.core.builders import make_new, token_bytes
from tests.unit.manager.manager_builders import generate_request

TYPE = pb.KV_GROUP_TYPE_FULL_ATTENTION


async def serving(split: Split) -> None:
    await until(lambda: split.engine.stats().state is ManagerState.SERVING)


async def test_engine_request_is_computed_and_published() -> None:
    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        sink = Sink()
        split.engine.submit(make_new("a", 6, max_tokens=3), sink)
        await until(lambda: sink.last is not None)
    assert sink.token_ids == [7, 7, 7]
    assert sink.last is not None
    assert sink.last.finish_reason is FinishReason.LENGTH


async def test_engine_fair_policy_shows_who_was_served_how_much() -> None:
    settings = {"policy": "fair", "max_num_seqs": 1, "fair_input_weight": 3, "fair_output_weight": 5}
    executor = ScriptedExecutor()
    async with running_split(executor, **settings) as split:
        await serving(split)
        executor.compute.clear()
        for name, tenant in (("a", "t"), ("b", "t"), ("c", ""), ("d", "u")):
            split.engine.submit(make_new(name, 6, max_tokens=3, tenant=tenant), Sink())
        await until(lambda: split.engine.stats().requests_running == 1)
        assert split.engine.stats().tenants == [
            TenantView("t", 1, 1, 18.0), TenantView("", 1, 0, 0.0), TenantView("u", 1, 0, 0.0),
        ]  # fmt: skip
        assert [view.tenant for view in split.engine.requests(include_finished=False)] == ["t", "t", "", "u"]
        executor.compute.set()
        await until(lambda: split.engine.stats().requests_running == 0)
        ended = [view.request_id for view in split.engine.requests(include_finished=True)]
        assert ended == ["a", "c", "d", "b"]


@pytest.mark.parametrize(("isolate", "expected"), [(True, [0, 4, 0, 0, 4]), (False, [0, 4, 4, 4, 4])])
async def test_engine_tenants_share_no_blocks_where_they_are_isolated(isolate: bool, expected: list[int]) -> None:
    """Over gRPC: one prompt of two tenants and of nobody, one after another."""
    config = ManagerConfig(port=0, isolate_tenants=isolate)
    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        server = ManagerServer(config, split.engine, split.registry, Health())
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            cached = []
            for tenant in ("a", "a", "b", "", "b"):
                request = generate_request(*range(1, 7), tenant=tenant)
                request.stopping.max_tokens = 1
                responses = [response async for response in stub.Generate(request)]
                cached.append(responses[-1].usage.cached_tokens)
            stats = await kv_manager_service_pb2_grpc.KvManagerServiceStub(channel).GetStats(GetStatsRequest())
            assert stats.settings.isolate_tenants is isolate
        await server.stop(0)
    assert cached == expected


async def test_engine_block_trace_tells_what_is_kept_and_what_to_do_where_nothing_is() -> None:
    async with running_split(ScriptedExecutor(), block_history=100) as split:
        await serving(split)
        sink = Sink()
        split.engine.submit(make_new("a", 6, max_tokens=1), sink)
        await until(lambda: sink.last is not None)
        trace = split.engine.block_trace(1)
        assert [(one.moment.name, one.request_id) for one in trace.records] == [
            ("ALLOCATED", "a"), ("HASHED", ""), ("FILLED", ""), ("FREED", "a"),
        ]  # fmt: skip
        for block_id in (0, 11):
            with pytest.raises(InvalidRequestError, match=f"1 to 10, got {block_id}"):
                split.engine.block_trace(block_id)
    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        with pytest.raises(PreconditionError, match="--block-history"):
            split.engine.block_trace(1)


async def test_engine_pin_outlives_the_executor_and_takes_hold_again() -> None:
    """Pinned before anything is computed, held when it is, lost with the cache, held again when it is computed anew."""
    pin = PinnedPrefix("system", token_bytes(range(9)))

    async def run(split: Split, request_id: str) -> None:
        sink = Sink()
        split.engine.submit(make_new(request_id, range(12), max_tokens=1), sink)
        await until(lambda: sink.last is not None)

    async with running_split(ScriptedExecutor(), max_pinned_fraction=0.2) as split:
        assert split.engine.pinned_prefixes() == PinsView()
        with pytest.raises(UnavailableError):
            split.engine.unpin_prefix("system")
        await serving(split)
        assert split.engine.pin_prefix(pin) == PinView("system", 9, 2, 0)
        await run(split, "a")
        assert split.engine.pinned_prefixes() == PinsView([PinView("system", 9, 2, 2)], 2)
        pool = split.engine.stats().pool
        assert pool is not None
        assert (pool.free_blocks, pool.pinned_blocks) == (8, 2)
        with pytest.raises(PinLimitError):
            split.engine.pin_prefix(PinnedPrefix("more", token_bytes(range(50, 54))))

        split.executor.compute.clear()
        split.executor.streams_to_lose = 1
        split.executor.kv_cache = pb.KvCacheState(kv_epoch=2, num_blocks=31, block_size=4)
        sink = Sink()
        split.engine.submit(make_new("lost", 30, max_tokens=1), sink)
        split.executor.compute.set()
        await until(lambda: sink.last is not None)
        assert split.engine.pinned_prefixes() == PinsView([PinView("system", 9, 2, 0)], 6)
        await run(split, "b")
        assert split.engine.pinned_prefixes().pins == [PinView("system", 9, 2, 2)]
        split.engine.unpin_prefix("system")
        pool = split.engine.stats().pool
        assert pool is not None
        assert (pool.free_blocks, pool.pinned_blocks) == (30, 0)
        assert split.engine.stats().state is ManagerState.SERVING


async def test_engine_pin_where_nothing_is_cached_says_so() -> None:
    async with running_split(ScriptedExecutor(), enable_prefix_caching=False) as split:
        await serving(split)
        with pytest.raises(PreconditionError, match="--no-enable-prefix-caching"):
            split.engine.pin_prefix(PinnedPrefix("system", token_bytes(range(9))))


def test_engine_every_state_but_serving_has_something_to_tell() -> None:
    assert set(WHY_UNAVAILABLE) == set(ManagerState) - {ManagerState.SERVING}


async def test_engine_refuses_by_the_reason_of_its_state() -> None:
    engine = EngineLoop(ManagerConfig(), ExecutorRegistry(time.monotonic, lease_ms=60_000))
    with pytest.raises(UnavailableError, match="without an executor") as caught:
        engine.submit(make_new("a", 6), Sink())
    assert caught.value.reason == "NO_EXECUTOR"
    await engine.stop()
    with pytest.raises(UnavailableError, match="one that is stopping") as caught:
        engine.model()
    assert caught.value.reason == "DRAINING"


async def test_engine_between_two_executors_has_none_to_load_an_adapter_into() -> None:
    """The connection is taken back before the state changes."""
    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        split.engine._adapters.take_back()
        with pytest.raises(UnavailableError, match="without an executor") as caught:
            await split.engine.load_adapter("a", "/a")
        assert caught.value.reason == "NO_EXECUTOR"


@pytest.mark.patches_core
async def test_engine_broken_invariant_ends_every_stream_although_the_books_can_not_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("freed twice")

    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        split.executor.compute.clear()
        sinks = [Sink(), Sink()]
        for name, sink in zip("ab", sinks, strict=True):
            split.engine.submit(make_new(name, 6, max_tokens=1), sink)
        await until(lambda: bool(split.executor.steps))
        assert split.engine._steps.scheduler is not None
        monkeypatch.setattr(split.engine._steps.scheduler.kv.pool, "free_blocks", broken)
        split.executor.compute.set()
        await until(lambda: split.engine.stats().state is ManagerState.BROKEN)
        await split.engine.drain(5.0)
    for sink in sinks:
        assert sink.last is not None
        assert isinstance(sink.last.error, UnavailableError)
        assert sink.last.error.reason == "BROKEN"


@pytest.mark.patches_core
async def test_engine_invariant_broken_in_a_call_ends_every_stream_and_admits_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("a request in two queues")

    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        split.executor.compute.clear()
        sink = Sink()
        split.engine.submit(make_new("a", 6), sink)
        await until(lambda: split.engine._steps.oldest_step is not None)
        assert split.engine._steps.scheduler is not None
        monkeypatch.setattr(split.engine._steps.scheduler, "abort", broken)
        with pytest.raises(AssertionError, match="two queues"):
            split.engine.abort("a")
        assert split.engine.stats().state is ManagerState.BROKEN
        assert sink.last is not None
        assert isinstance(sink.last.error, UnavailableError)
        assert sink.last.error.reason == "BROKEN"
        with pytest.raises(UnavailableError, match="invariant"):
            split.engine.submit(make_new("b", 6), Sink())
        # The step that is out is never answered, and a stop need not wait for it.
        assert split.engine._steps.oldest_step is None
        await split.engine.drain(3_600.0)


@pytest.mark.parametrize(
    ("changes", "kv_cache", "reason"),
    [
        ({"tokenizer_files": [pb.TokenizerFile(name="tokenizer.json", content=b"{")]}, {}, "TOKENIZER_UNREADABLE"),
        ({"kv_groups": []}, {}, "KV_GEOMETRY_UNSUPPORTED"),
        ({"kv_groups": [pb.KvGroup(type=TYPE, window=4)]}, {}, "KV_GEOMETRY_UNSUPPORTED"),
        ({}, {"block_size": 0}, "KV_GEOMETRY_UNSUPPORTED"),
        ({}, {"num_blocks": 1}, "KV_GEOMETRY_UNSUPPORTED"),
    ],
)
async def test_engine_executor_that_can_not_be_used_is_rejected_and_breaks_nothing(
    changes: dict[str, Any], kv_cache: dict[str, int], reason: str
) -> None:
    executor = ScriptedExecutor()
    executor.info = model_info(**changes)
    executor.kv_cache = pb.KvCacheState(**({"kv_epoch": 1, "num_blocks": 11, "block_size": 4} | kv_cache))
    async with running_split(executor) as split:
        await until(lambda: bool(split.record.rejection) or split.engine.stats().state is ManagerState.BROKEN)
        assert split.engine.stats().state is ManagerState.NO_EXECUTOR
        with pytest.raises(ExecutorRejectedError, match="expected") as caught:
            split.registry.register(split.record.executor_id, split.record.address)
        assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("max_model_len", "with_cache", "is_warned"), [(12, True, True), (13, True, False), (12, False, False)]
)
async def test_engine_executor_whose_blocks_leave_no_prefix_to_find_again_is_used_with_a_warning(
    max_model_len: int, with_cache: bool, is_warned: bool
) -> None:
    executor = ScriptedExecutor()
    full = pb.KV_GROUP_TYPE_FULL_ATTENTION
    groups = [pb.KvGroup(type=full), pb.KvGroup(type=full, block_size=6)]
    executor.info = model_info(kv_groups=groups, max_model_len=max_model_len)
    with capture_logs() as logs:
        async with running_split(executor, enable_prefix_caching=with_cache) as split:
            await serving(split)
    said = [(log["shortest_hit"], log["max_model_len"]) for log in logs if log["event"] == "prefix_hits_impossible"]
    assert said == ([(12, max_model_len)] if is_warned else [])


@pytest.mark.parametrize("block_ids", [b"\1\0\0", array("i", [1, 2]).tobytes()])
async def test_engine_malformed_tags_are_an_error_of_that_executor(block_ids: bytes) -> None:
    executor = ScriptedExecutor()
    executor.info.kv_cache.CopyFrom(executor.kv_cache)
    executor.tags = pb.BlockTags(block_ids=Int32Array(data=block_ids), tags=[b"x"])
    async with running_split(executor) as split:
        await until(lambda: split.record.last_error != "" or split.engine.stats().state is ManagerState.BROKEN)
        assert split.engine.stats().state is ManagerState.NO_EXECUTOR
        assert split.record.last_error.startswith("block_tags: expected int32")
        executor.tags.Clear()
        await serving(split)


async def test_engine_step_without_a_result_for_too_long_executor_is_lost_and_the_step_runs_anew() -> None:
    async with running_split(ScriptedExecutor(), step_timeout_s=1) as split:
        await serving(split)
        split.executor.compute.clear()
        sink = Sink()
        split.engine.submit(make_new("a", 6, max_tokens=2), sink)
        await until(lambda: split.record.hangs)
        assert "expected a result within 1 s" in split.record.last_error
        split.executor.compute.set()
        await until(lambda: sink.last is not None)
        assert sink.token_ids == [7, 7]
        assert not split.record.hangs


async def test_engine_step_timeout_of_0_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(executor_life, "watch_steps")
    async with running_split(ScriptedExecutor(), step_timeout_s=0) as split:
        await serving(split)
        sink = Sink()
        split.engine.submit(make_new("a", 6, max_tokens=2), sink)
        await until(lambda: sink.last is not None)
    assert sink.token_ids == [7, 7]


async def test_engine_stop_string_in_the_last_output_is_what_is_shown() -> None:
    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        sink = Sink(match=StopMatch("x", 1))
        split.engine.submit(make_new("a", 6, max_tokens=1), sink)
        await until(lambda: sink.last is not None)
        (view,) = split.engine.requests(include_finished=True)
        assert view.finish_reason is FinishReason.STOP
        assert split.engine.stats().requests_finished["stop"] == 1


@asynccontextmanager
async def babbling_executor() -> AsyncIterator[str]:
    """Something that answers every call of an executor with bytes that are no message. Yields its address."""

    async def babble(_: bytes, __: object) -> bytes:
        return b"\xff\xff\xff"

    async def babble_on(_: object, __: object) -> AsyncIterator[bytes]:
        yield b"\xff\xff\xff"

    methods = {
        method.name: grpc.stream_stream_rpc_method_handler(babble_on)
        if method.client_streaming
        else grpc.unary_unary_rpc_method_handler(babble)
        for method in pb.DESCRIPTOR.services_by_name["ExecutorService"].methods
        if method.client_streaming == method.server_streaming
    }
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("kvplane.executor.v1.ExecutorService", methods)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_engine_standby_that_answers_nonsense_disturbs_nobody() -> None:
    async with running_split(ScriptedExecutor()) as split, babbling_executor() as address:
        await serving(split)
        split.registry.register("babbling", address)
        await until(lambda: split.registry.records()[1].last_error != "")
        assert "bytes that are not one" in split.registry.records()[1].last_error
        sink = Sink()
        split.engine.submit(make_new("a", 6, max_tokens=2), sink)
        await until(lambda: sink.last is not None)
        assert sink.token_ids == [7, 7]
        assert split.engine.stats().state is ManagerState.SERVING


async def test_engine_standby_whose_check_fails_in_any_way_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(_: ExecutorConnection) -> pb.GetModelInfoResponse:
        raise OSError("no descriptor is left")

    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        monkeypatch.setattr(ExecutorConnection, "model_info", failing)
        split.registry.register("other", "127.0.0.1:1")
        await until(lambda: "OSError: no descriptor is left" in split.registry.records()[1].last_error)
        assert split.engine.stats().state is ManagerState.SERVING


async def test_connection_answers_that_are_no_messages_lose_the_executor() -> None:
    async with babbling_executor() as address:
        connection = ExecutorConnection(address)
        for call in (connection.model_info(), connection.prepare(16, 4, 0, with_tokenizer=False)):
            with pytest.raises(ExecutorLostError, match="bytes that are not one"):
                await call
        told = asyncio.Event()
        stream = connection.open_stream(told.set)
        await told.wait()
        with pytest.raises(ExecutorLostError, match="bytes that are not one"):
            stream.take_results()
        await stream.close()
        await connection.close()


async def test_engine_tokenizer_files_are_fetched_once() -> None:
    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        sink = Sink()
        split.executor.streams_to_lose = 1
        split.engine.submit(make_new("a", 6, max_tokens=2), sink)
        await until(lambda: sink.last is not None)
    assert sink.token_ids == [7, 7]
    assert split.executor.asked_for_tokenizer == [True, False]


async def test_engine_id_taken_anew_while_a_step_is_sent_gets_nothing_of_its_predecessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request outgrows the pool in the very step that another is admitted in."""
    first, second = Sink(), Sink()
    async with running_split(ScriptedExecutor()) as split:
        await serving(split)
        engine = split.engine

        send = StepStream.send

        async def submit_and_send(stream: StepStream, message: pb.ExecuteRequest) -> None:
            if first.token_ids and not any(
                view.request_id == "big" for view in engine.requests(include_finished=False)
            ):
                monkeypatch.setattr(StepStream, "send", send)
                engine.submit(make_new("big", 6, max_tokens=1), second)
            await send(stream, message)

        monkeypatch.setattr(StepStream, "send", submit_and_send)
        engine.submit(make_new("big", 30, max_tokens=90), first)
        await until(lambda: len(first.token_ids) > 2)
        engine.submit(make_new("next", 30, max_tokens=2), Sink())
        await until(lambda: first.last is not None and second.last is not None)
    assert first.last is not None
    assert isinstance(first.last.error, PoolExhaustedError)
    assert second.token_ids == [7]
