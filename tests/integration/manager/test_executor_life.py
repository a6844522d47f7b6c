"""Executors that hang, stop or cannot be reached, over real gRPC: others take over, and no request pays for it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service import executor_race
from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.suspects import MAX_FAILED_STEPS
from kvmanager_service.engine_api import ManagerState
from kvmanager_service.engine_loop import EngineLoop
from kvmanager_service.executor_client import (
    REASONS_OF_ITS_OWN,
    ExecutorConnection,
    ExecutorGoneError,
    ExecutorLostError,
    StepStream,
)
from kvmanager_service.registry import ExecutorState
from tests.integration.manager.fake_engine import until
from tests.integration.manager.scripted_executor import (
    ScriptedExecutor,
    Sink,
    listening,
    running_engine,
    running_split,
)
from tests.unit.core.builders import make_new

FOR_EVER = 3_600.0
BRING_UP = ["ProfileMemory", "GetModelInfo", "InitializeKvCache", "ListBlockTags"]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_race, "BACKOFF_S", (0.001,))


async def serving(engine: EngineLoop) -> None:
    await until(lambda: engine.stats().state is ManagerState.SERVING)


async def compute(engine: EngineLoop, request_id: str) -> list[int]:
    """What a request for two tokens brings."""
    sink = Sink()
    engine.submit(make_new(request_id, 6, max_tokens=2), sink)
    await until(lambda: sink.last is not None)
    return sink.token_ids


# --- bringing up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BRING_UP)
async def test_executor_that_hangs_while_it_is_brought_up_the_next_one_serves(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(executor_race, "GRACE_S", 0.05)
    active, hung, healthy = (ScriptedExecutor() for _ in range(3))
    hung.hangs_in = method
    if method == "ListBlockTags":
        hung.kv_cache.kv_epoch = 2  # not the one that the manager knows
        hung.info.kv_cache.CopyFrom(hung.kv_cache)
    async with (
        listening(active) as first,
        listening(hung) as second,
        listening(healthy) as third,
        running_engine(first) as (engine, registry),
    ):
        await serving(engine)
        executor_ids = {"executor-1": second, "executor-2": third}
        active.compute.clear()
        active.streams_to_lose = 1_000_000
        sink = Sink()
        engine.submit(make_new("a", 6, max_tokens=2), sink)
        for executor_id, address in executor_ids.items():
            registry.register(executor_id, address)
        await until(lambda: "GetModelInfo" in hung.called)  # both are looked at as they come
        active.compute.set()
        await until(lambda: sink.last is not None)
        assert sink.token_ids == [7, 7]
        assert healthy.steps
        assert method in hung.called
        records = {record.executor_id: record for record in registry.records()}
        assert records["executor-2"].state is ExecutorState.ACTIVE
        assert records["executor-1"].state is ExecutorState.STANDBY


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that never answers who connects: its queue of connections is full. Yields it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        for caller in callers:
            caller.close()


async def test_address_that_never_answers_keeps_no_healthy_executor_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_race, "CONNECT_GRACE_S", 0.05)
    monkeypatch.setattr(executor_race, "GRACE_S", FOR_EVER)
    healthy = ScriptedExecutor()
    with black_hole() as nowhere:
        async with listening(healthy) as address, running_engine(nowhere, address) as (engine, registry):
            await serving(engine)
            # Nobody waited until gRPC gave the address up, which would be its error.
            assert [(one.state, one.last_error) for one in registry.records()] == [
                (ExecutorState.STANDBY, ""), (ExecutorState.ACTIVE, ""),
            ]  # fmt: skip
            assert await compute(engine, "a") == [7, 7]


async def test_executor_slow_to_be_ready_keeps_the_next_waiting_until_that_is_the_better_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor_race, "GRACE_S", FOR_EVER)
    slow, other = ScriptedExecutor(), ScriptedExecutor()
    other.info.kv_cache.CopyFrom(other.kv_cache)
    slow.hangs_in = "InitializeKvCache"
    async with (
        listening(slow) as first,
        listening(other) as second,
        running_engine(first, second) as (engine, registry),
    ):
        await until(lambda: slow.called == ["ProfileMemory", "GetModelInfo", "InitializeKvCache"])
        await asyncio.sleep(0.01)
        assert other.called == []
        registry.lose("executor-0", "it is not the best any more", hangs=False)
        registry.register("executor-2", "127.0.0.1:1")  # somebody comes: look again
        await serving(engine)
        assert other.called[:3] == ["ProfileMemory", "GetModelInfo", "ListBlockTags"]
        assert await compute(engine, "a") == [7, 7]


async def test_connection_tags_that_do_not_come_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmanager_service.executor_client.TAGS_TIMEOUT_S", 0.05)
    executor = ScriptedExecutor()
    executor.info.kv_cache.CopyFrom(executor.kv_cache)
    executor.hangs_in = "ListBlockTags"
    async with listening(executor) as address:
        connection = ExecutorConnection(address)
        with pytest.raises(ExecutorLostError, match="DEADLINE_EXCEEDED"):
            await connection.prepare(16, 4, 0, with_tokenizer=False)
        await connection.close()


async def test_connection_refused_is_an_error_that_says_so() -> None:
    connection = ExecutorConnection("127.0.0.1:1")
    with pytest.raises(ExecutorLostError, match="Connection refused"):
        await connection.prepare(16, 4, 0, with_tokenizer=False)
    stream = connection.open_stream(lambda: None)
    with pytest.raises(ExecutorLostError, match="Connection refused"):
        await stream.connected()
    await stream.close()
    await connection.close()


# --- losses that say nothing against a request ------------------------------------------------------------------------


@pytest.mark.parametrize("reason", sorted(REASONS_OF_ITS_OWN))
async def test_executor_that_goes_for_a_reason_of_its_own_blames_no_request(reason: str) -> None:
    async with running_split(ScriptedExecutor(), queue_ahead=False) as split:
        await serving(split.engine)
        split.executor.stops_with = reason
        split.executor.streams_to_lose = MAX_FAILED_STEPS + 2
        assert await compute(split.engine, "a") == [7, 7]
        assert split.engine.stats().steps_failed == MAX_FAILED_STEPS + 2


@pytest.mark.parametrize("reason", ["", "INTERNAL_ERROR"])
async def test_executor_that_goes_in_a_step_blames_its_requests(reason: str) -> None:
    async with running_split(ScriptedExecutor(), queue_ahead=False) as split:
        await serving(split.engine)
        split.executor.stops_with = reason
        split.executor.streams_to_lose = MAX_FAILED_STEPS
        sink = Sink()
        split.engine.submit(make_new("a", 6, max_tokens=2), sink)
        await until(lambda: sink.last is not None)
        assert sink.last is not None
        assert isinstance(sink.last.error, RowFailedError)
        assert sink.last.error.reason == "STEP_FAILED"


class Clock:
    """Real time, and what the test adds to it."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


async def test_executor_whose_lease_ends_in_a_step_blames_no_request() -> None:
    clock, executor, sink = Clock(), ScriptedExecutor(), Sink()
    async with (
        listening(executor) as address,
        running_engine(address, clock=clock, queue_ahead=False) as (engine, registry),
    ):
        await serving(engine)
        executor.compute.clear()
        engine.submit(make_new("a", 6, max_tokens=2), sink)
        for losses in range(1, MAX_FAILED_STEPS + 2):
            await until(lambda losses=losses: len(executor.steps) == losses)  # type: ignore[misc]
            clock.ahead += 61
            registry.expire()
            await until(lambda losses=losses: engine.stats().steps_failed == losses)  # type: ignore[misc]
            registry.register("executor-0", address)
        executor.compute.set()
        await until(lambda: sink.last is not None)
    assert sink.token_ids == [7, 7]


async def test_executor_that_can_not_be_reached_when_its_stream_is_opened_blames_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when its process ends between the last call that brings it up and the stream."""
    open_stream = ExecutorConnection.open_stream
    refusals = iter(range(MAX_FAILED_STEPS + 1))
    nowhere = ExecutorConnection("127.0.0.1:1")

    def refused(connection: ExecutorConnection, on_event: object, kv_epoch: int) -> StepStream:
        reached = connection if next(refusals, None) is None else nowhere
        return open_stream(reached, on_event, kv_epoch)  # type: ignore[arg-type]

    async with running_split(ScriptedExecutor(), queue_ahead=False) as split:
        await serving(split.engine)
        split.executor.compute.clear()
        sink = Sink()
        split.engine.submit(make_new("a", 6, max_tokens=2), sink)
        await until(lambda: bool(split.executor.steps))
        monkeypatch.setattr(ExecutorConnection, "open_stream", refused)
        split.executor.streams_to_lose = 1
        split.executor.compute.set()
        await until(lambda: sink.last is not None)
        assert next(refusals, None) is None, "all were used"
        assert sink.token_ids == [7, 7]
        assert split.engine.stats().steps_failed == 1
    await nowhere.close()


async def test_step_stream_tells_an_orderly_end_from_another() -> None:
    executor = ScriptedExecutor()
    executor.streams_to_lose = 2
    ends = []
    async with listening(executor) as address:
        for reason in ("EXECUTOR_STOPPING", "SOMETHING_ELSE"):
            executor.stops_with = reason
            connection, told = ExecutorConnection(address), asyncio.Event()
            stream = connection.open_stream(told.set)
            await stream.send(pb.ExecuteRequest(step_id=1))
            await told.wait()
            with pytest.raises(ExecutorLostError, match="UNAVAILABLE: it went") as caught:
                stream.take_results()
            ends.append(type(caught.value))
            await stream.close()
            await connection.close()
    assert ends == [ExecutorGoneError, ExecutorLostError]


# --- an answer from another cache -------------------------------------------------------------------------------------


async def test_executor_that_answers_a_step_from_another_cache_is_not_believed_and_the_step_runs_anew() -> None:
    """All else of the answer is as it should be: nothing but its epoch tells."""
    async with running_split(ScriptedExecutor()) as split:
        await serving(split.engine)
        split.executor.steps_of_another_cache = (2,)
        assert await compute(split.engine, "a") == [7, 7]
        # Two tokens take two steps; what is refused is computed again in a third, or in a fourth if one was out.
        assert {step.step_id for step in split.executor.steps} >= {1, 2, 3}
        assert split.engine.stats().steps_failed == 1
        assert split.engine.stats().state is ManagerState.SERVING


async def test_executor_whose_cache_becomes_another_amid_a_request_the_next_one_goes_on_with_it() -> None:
    stale, sound = ScriptedExecutor(), ScriptedExecutor()
    stale.steps_of_another_cache = range(5, 1_000_000)
    sound.kv_cache.kv_epoch = 3
    async with listening(stale) as first, listening(sound) as second, running_engine(first) as (engine, registry):
        await serving(engine)
        registry.register("executor-1", second)
        sink = Sink()
        engine.submit(make_new("a", 6, max_tokens=20), sink)
        await until(lambda: sink.last is not None)
        assert sink.token_ids == [7] * 20
        lost, active = registry.records()
        assert active.state is ExecutorState.ACTIVE
        assert lost.last_error == "expected a result of kv_epoch 1, got step 5 of 2: it was computed from another cache"
