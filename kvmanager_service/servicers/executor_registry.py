"""ExecutorRegistryService: how executors make themselves known.

Station: called by grpc, writes the registry, which `executor_life` reads; has the engine move on to another by order.
"""

from __future__ import annotations

from typing import Any

import grpc
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as pb
from kvplane.kvmanager.v1 import executor_registry_service_pb2_grpc as pb_grpc

from kvmanager_service.engine_api import Engine
from kvmanager_service.errors import RpcErrors
from kvmanager_service.registry import ExecutorRegistry, ExecutorState

__all__ = ["ExecutorRegistryServicer"]

_STATES = {
    ExecutorState.STANDBY: pb.EXECUTOR_STATE_STANDBY,
    ExecutorState.CONNECTING: pb.EXECUTOR_STATE_CONNECTING,
    ExecutorState.ACTIVE: pb.EXECUTOR_STATE_ACTIVE,
}
Context = grpc.aio.ServicerContext[Any, Any]


class ExecutorRegistryServicer(pb_grpc.ExecutorRegistryServiceServicer):
    """Serves Register, ListExecutors and SwitchExecutor."""

    def __init__(self, registry: ExecutorRegistry, engine: Engine, manager_id: str) -> None:
        self._registry = registry
        self._engine = engine
        self._manager_id = manager_id

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:  # noqa: N802
        """Serve `Register`; see the proto."""
        async with RpcErrors(context):
            self._registry.register(request.executor_id, request.address)
        return pb.RegisterResponse(lease_ms=self._registry.lease_ms, manager_id=self._manager_id)

    async def ListExecutors(self, request: pb.ListExecutorsRequest, context: Context) -> pb.ListExecutorsResponse:  # noqa: N802
        """Serve `ListExecutors`; see the proto."""
        async with RpcErrors(context):
            executors = [
                pb.ExecutorInfo(
                    executor_id=record.executor_id,
                    address=record.address,
                    state=_STATES[record.state],
                    lease_remaining_ms=self._registry.remaining_ms(record),
                    last_error=record.last_error,
                )
                for record in self._registry.records()
            ]
        return pb.ListExecutorsResponse(executors=executors)

    async def SwitchExecutor(self, request: pb.SwitchExecutorRequest, context: Context) -> pb.SwitchExecutorResponse:  # noqa: N802
        """Serve `SwitchExecutor`; see the proto."""
        async with RpcErrors(context):
            previous = await self._engine.switch_executor(request.executor_id)
        return pb.SwitchExecutorResponse(previous_executor_id=previous)
