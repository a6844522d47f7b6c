"""Signals: the first drains, the second stops at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import executor_registry_service_pb2_grpc, inference_service_pb2_grpc

from kvmanager_service import process
from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.request import FinishReason
from kvmanager_service.errors import UnavailableError
from kvmanager_service.heap import settle_heap
from kvmanager_service.registry import ExecutorRegistry
from kvmanager_service.server import ManagerServer
from tests.integration.manager.fake_engine import FakeEngine, details, until
from tests.unit.manager.manager_builders import generate_request


class DrainingEngine(FakeEngine):
    """A scripted engine with a life: draining lasts until its requests have ended."""

    def __init__(
        self,
        config: ManagerConfig,
        registry: ExecutorRegistry,
        on_serving: Callable[[bool], None],
        settle: Callable[[], None],
    ) -> None:
        super().__init__()
        self.on_serving = on_serving
        self.settle = settle
        self.drain_timeout_s = -1.0
        self.stopped = False

    async def start(self) -> None:
        self.on_serving(True)

    async def drain(self, timeout_s: float) -> None:
        self.drain_timeout_s = timeout_s
        self.refuse = UnavailableError("DRAINING", "expected a serving manager, got one that is stopping")
        self.on_serving(False)
        await until(lambda: not self.open)

    async def stop(self) -> None:
        self.stopped = True
        for request_id in list(self.open):
            self.step(request_id, finish=FinishReason.ERROR, error=UnavailableError("DRAINING", "the manager stopped"))


class Running:
    """A manager in this process, with its parts in reach."""

    engine: DrainingEngine
    server: ManagerServer
    serving: asyncio.Task[None]

    async def signal(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)


@pytest.fixture
async def running(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    made = Running()

    def make_engine(*args: object) -> DrainingEngine:
        made.engine = DrainingEngine(*args)  # type: ignore[arg-type]
        return made.engine

    def make_server(*args: object) -> ManagerServer:
        made.server = ManagerServer(*args)  # type: ignore[arg-type]
        return made.server

    monkeypatch.setattr(process, "EngineLoop", make_engine)
    monkeypatch.setattr(process, "ManagerServer", make_server)
    made.serving = asyncio.create_task(process.serve(ManagerConfig(port=0, drain_timeout_s=12.5)))
    await until(lambda: hasattr(made, "server") and made.server.port != 0)
    yield made
    await made.serving
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_process_of_our_own_settles_its_heap(running: Running) -> None:
    assert running.engine.settle is settle_heap
    await running.signal()
    await running.serving


async def test_first_signal_lets_running_requests_finish_and_refuses_new_ones(running: Running) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.server.port}") as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(generate_request(request_id="r"))
        await running.engine.submitted("r")
        await running.signal()
        await until(lambda: running.engine.drain_timeout_s == 12.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(generate_request()).read()
        assert (caught.value.code(), details(caught.value)[0]) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        executors = executor_registry_service_pb2_grpc.ExecutorRegistryServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await executors.Register(registry_pb.RegisterRequest(executor_id="e", address="host:1"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not running.engine.stopped
        running.engine.step("r", 5, finish=FinishReason.LENGTH)
        assert [list(piece.token_ids) async for piece in call] == [[5]]
    await running.serving
    assert running.engine.stopped


async def test_second_signal_stops_at_once_and_fails_what_runs(running: Running) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.server.port}") as channel:
        call = inference_service_pb2_grpc.InferenceServiceStub(channel).Generate(generate_request(request_id="r"))
        await running.engine.submitted("r")
        await running.signal()
        await until(lambda: running.engine.drain_timeout_s == 12.5)
        await running.signal()
        await running.serving
        assert running.engine.stopped
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
