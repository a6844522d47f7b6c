"""An operator's order to move on to another executor: the engine against two scripted ones, and over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb

from kvmanager_service.core.errors import CoreError
from kvmanager_service.engine_api import ManagerState
from kvmanager_service.engine_loop import EngineLoop
from kvmanager_service.errors import (
    ExecutorRejectedError,
    ExecutorSwitchError,
    UnavailableError,
    UnknownExecutorError,
)
from kvmanager_service.executor_client import ExecutorConnection
from kvmanager_service.registry import ExecutorRegistry, ExecutorState
from tests.integration.manager.fake_engine import running_manager, until
from tests.integration.manager.scripted_executor import ScriptedExecutor, Sink, listening, model_info, running_engine
from tests.unit.core.builders import make_new


@dataclass
class Two:
    """An engine that serves with `first` while `second` stands by."""

    engine: EngineLoop
    registry: ExecutorRegistry
    first: ScriptedExecutor
    second: ScriptedExecutor

    def states(self) -> list[ExecutorState]:
        return [record.state for record in self.registry.records()]

    def is_active(self, index: int) -> bool:
        return self.states()[index] is ExecutorState.ACTIVE


@asynccontextmanager
async def two_executors() -> AsyncIterator[Two]:
    first, second = ScriptedExecutor(), ScriptedExecutor()
    second.kv_cache.kv_epoch = 2
    async with (
        listening(first) as one,
        listening(second) as other,
        running_engine(one) as (engine, registry),
    ):
        two = Two(engine, registry, first, second)
        await until(lambda: two.is_active(0))
        registry.register("executor-1", other)
        await until(lambda: second.called == ["GetModelInfo"])  # it is checked as it comes
        yield two


async def test_switch_while_a_request_runs_goes_on_with_the_other_and_admits_all_the_time() -> None:
    async with two_executors() as two:
        before, after = Sink(), Sink()
        two.first.compute.clear()
        two.engine.submit(make_new("before", 6, max_tokens=5), before)
        await until(lambda: len(two.first.steps) > 0)
        two.second.compute.clear()

        assert await two.engine.switch_executor("executor-1") == "executor-0"
        assert two.states() == [ExecutorState.STANDBY, ExecutorState.ACTIVE]
        assert two.engine.stats().state is ManagerState.SERVING
        assert [record.last_error for record in two.registry.records()] == ["", ""]
        two.engine.submit(make_new("after", 6, max_tokens=2), after)
        two.second.compute.set()
        await until(lambda: before.last is not None and after.last is not None)
        assert (before.token_ids, after.token_ids) == ([7] * 5, [7] * 2)

        # And back, to the one that was relieved.
        two.first.compute.set()
        assert await two.engine.switch_executor("executor-0") == "executor-1"
        again = Sink()
        two.engine.submit(make_new("again", 6, max_tokens=2), again)
        await until(lambda: again.last is not None)
        assert two.states() == [ExecutorState.ACTIVE, ExecutorState.STANDBY]


async def test_switch_until_the_other_is_ready_the_present_one_serves() -> None:
    async with two_executors() as two:
        two.second.hangs_in = "ProfileMemory"
        order = asyncio.create_task(two.engine.switch_executor("executor-1"))
        await until(lambda: "ProfileMemory" in two.second.called)
        sink = Sink()
        two.engine.submit(make_new("a", 6, max_tokens=3), sink)
        await until(lambda: sink.last is not None)
        assert sink.token_ids == [7] * 3
        assert two.states() == [ExecutorState.ACTIVE, ExecutorState.CONNECTING]
        assert not order.done()
        with pytest.raises(ExecutorSwitchError, match="got one for executor-1") as raised:
            await two.engine.switch_executor("executor-1")
        assert raised.value.reason == "SWITCH_UNDER_WAY"
        order.cancel()
        await asyncio.gather(order, return_exceptions=True)
        assert two.states() == [ExecutorState.ACTIVE, ExecutorState.CONNECTING], "the order stands"


async def test_switch_to_one_whose_caller_has_gone_is_carried_out() -> None:
    async with two_executors() as two:
        order = asyncio.create_task(two.engine.switch_executor("executor-1"))
        await asyncio.sleep(0)
        order.cancel()
        await asyncio.gather(order, return_exceptions=True)
        await until(lambda: two.is_active(1))


@pytest.mark.parametrize(
    ("executor_id", "kind", "reason"),
    [
        ("executor-9", UnknownExecutorError, "EXECUTOR_NOT_FOUND"),
        ("executor-0", ExecutorSwitchError, "EXECUTOR_ALREADY_ACTIVE"),
    ],
)
async def test_switch_to_one_that_is_none_is_refused(executor_id: str, kind: type[CoreError], reason: str) -> None:
    async with two_executors() as two:
        with pytest.raises(kind) as raised:
            await two.engine.switch_executor(executor_id)
        assert raised.value.reason == reason
        assert raised.value.metadata == {"executor_id": executor_id}
        assert two.states() == [ExecutorState.ACTIVE, ExecutorState.STANDBY]


async def test_switch_to_one_of_another_model_is_refused_with_the_reason_it_was_told() -> None:
    async with two_executors() as two:
        other = ScriptedExecutor()
        other.info = model_info(model_fingerprint="another")
        async with listening(other) as address:
            two.registry.register("other", address)
            await until(lambda: two.registry.records()[2].rejection != "")
            with pytest.raises(ExecutorRejectedError) as raised:
                await two.engine.switch_executor("other")
        assert raised.value.reason == "MODEL_MISMATCH"


async def test_switch_to_one_that_does_not_come_up_is_an_error_and_the_present_one_goes_on() -> None:
    async with two_executors() as two:
        two.registry.register("nowhere", "127.0.0.1:1")
        await until(lambda: two.registry.records()[2].last_error != "")
        with pytest.raises(ExecutorSwitchError, match="expected an executor that is ready") as raised:
            await two.engine.switch_executor("nowhere")
        assert raised.value.reason == "EXECUTOR_NOT_READY"
        assert two.registry.records()[2].state is ExecutorState.STANDBY
        sink = Sink()
        two.engine.submit(make_new("a", 6, max_tokens=2), sink)
        await until(lambda: sink.last is not None)
        assert await two.engine.switch_executor("executor-1") == "executor-0", "and another order is taken"


async def test_switch_to_one_whose_bring_up_fails_in_any_way_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object, **__: object) -> None:
        raise OSError("no descriptor is left")

    async with two_executors() as two:
        monkeypatch.setattr(ExecutorConnection, "prepare", failing)
        with pytest.raises(ExecutorSwitchError, match="OSError: no descriptor is left"):
            await two.engine.switch_executor("executor-1")
        assert two.engine.stats().state is ManagerState.SERVING
        assert "OSError" in two.registry.records()[1].last_error


async def test_switch_to_one_that_is_lost_before_its_first_stream_goes_back_to_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was ready, and is gone when its stream is opened."""
    async with two_executors() as two:
        opened = ExecutorConnection.open_stream

        def to_nowhere(connection: ExecutorConnection, *arguments: object) -> object:
            monkeypatch.setattr(ExecutorConnection, "open_stream", opened)
            return opened(ExecutorConnection("127.0.0.1:1"), *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(ExecutorConnection, "open_stream", to_nowhere)
        with pytest.raises(ExecutorSwitchError) as raised:
            await two.engine.switch_executor("executor-1")
        assert raised.value.reason == "EXECUTOR_NOT_READY"
        await until(lambda: ExecutorState.ACTIVE in two.states())
        sink = Sink()
        two.engine.submit(make_new("a", 6, max_tokens=2), sink)
        await until(lambda: sink.last is not None)


async def test_switch_while_the_present_one_is_lost_ends_unavailable_and_the_race_decides() -> None:
    async with two_executors() as two:
        two.second.hangs_in = "ProfileMemory"
        two.first.streams_to_lose = 1
        order = asyncio.create_task(two.engine.switch_executor("executor-1"))
        await until(lambda: "ProfileMemory" in two.second.called)
        two.second.hangs_in = ""
        sink = Sink()
        two.engine.submit(make_new("a", 6, max_tokens=2), sink)
        with pytest.raises(UnavailableError) as raised:
            await order
        assert raised.value.reason == "NO_EXECUTOR"
        await until(lambda: sink.last is not None)
        assert sink.token_ids == [7, 7]


async def test_switch_without_an_active_executor_is_unavailable() -> None:
    async with running_engine("127.0.0.1:1") as (engine, _):
        with pytest.raises(UnavailableError) as raised:
            await engine.switch_executor("executor-0")
        assert raised.value.reason == "NO_EXECUTOR"


async def test_switch_when_the_manager_stops_ends_unavailable() -> None:
    async with two_executors() as two:
        two.second.hangs_in = "ProfileMemory"
        order = asyncio.create_task(two.engine.switch_executor("executor-1"))
        await until(lambda: "ProfileMemory" in two.second.called)
        await two.engine.stop()
        with pytest.raises(UnavailableError):
            await order


async def test_switch_over_grpc_says_who_was_active_and_maps_errors() -> None:
    async with running_manager() as manager:
        request = registry_pb.SwitchExecutorRequest(executor_id="executor-1")
        assert (await manager.executors.SwitchExecutor(request)).previous_executor_id == "executor-0"
        assert manager.engine.switched_to == ["executor-1"]
        for refusal, code in (
            (UnknownExecutorError("EXECUTOR_NOT_FOUND", "none"), grpc.StatusCode.NOT_FOUND),
            (ExecutorSwitchError("EXECUTOR_NOT_READY", "not ready"), grpc.StatusCode.FAILED_PRECONDITION),
        ):
            manager.engine.refuse = refusal
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await manager.executors.SwitchExecutor(request)
            assert raised.value.code() is code
