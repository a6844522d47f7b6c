"""Calls about adapters that end because their executor is not used any more."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1 import executor_service_pb2_grpc as pb_grpc

from kvmanager_service.executor_client import ExecutorConnection, ExecutorLostError


class SlowExecutor(pb_grpc.ExecutorServiceServicer):
    """Reads an adapter until the test ends."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def LoadAdapter(  # noqa: N802
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_load_adapter_whose_connection_is_closed_says_so_and_a_cancelled_caller_is_cancelled() -> None:
    executor, server = SlowExecutor(), grpc.aio.server()
    pb_grpc.add_ExecutorServiceServicer_to_server(executor, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        connection = ExecutorConnection(f"127.0.0.1:{port}")
        cancelled = asyncio.create_task(connection.load_adapter("a", "/a"))
        await executor.asked.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        executor.asked.clear()
        load = asyncio.create_task(connection.load_adapter("b", "/b"))
        await executor.asked.wait()
        await connection.close()
        with pytest.raises(ExecutorLostError, match=r"not in use any more|Channel"):
            await load
    finally:
        await server.stop(0)
