"""The channel to the manager and the stubs on it.

Station: the only place that knows how the connection is made. The channel opens with the first call, inside the event
loop that makes it.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from kvplane.kvmanager.v1.executor_registry_service_pb2_grpc import ExecutorRegistryServiceStub
from kvplane.kvmanager.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvplane.kvmanager.v1.kv_manager_service_pb2_grpc import KvManagerServiceStub

if TYPE_CHECKING:
    from kvplane.kvmanager.v1.executor_registry_service_pb2_grpc import ExecutorRegistryServiceAsyncStub
    from kvplane.kvmanager.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub
    from kvplane.kvmanager.v1.kv_manager_service_pb2_grpc import KvManagerServiceAsyncStub

__all__ = ["Stubs", "task_is_cancelled"]

_HealthCheck: TypeAlias = (
    "grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"
)

_CHANNEL_OPTIONS = (
    # A manager that restarts is found again within a second; gRPC's default grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Two clients of one process must not wait for each other's reconnection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)


class Stubs:
    """One channel and the stubs of the manager's services.

    Args:
        target: The gRPC target.
        credentials: For TLS; None means plain text.
    """

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None) -> None:
        self._credentials = credentials
        self.target = target

    @cached_property
    def channel(self) -> grpc.aio.Channel:
        """The channel."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.target, options=_CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.target, self._credentials, options=_CHANNEL_OPTIONS)

    @cached_property
    def inference(self) -> InferenceServiceAsyncStub:
        """Generate, Abort, GetModel."""
        return InferenceServiceStub(self.channel)

    @cached_property
    def manager(self) -> KvManagerServiceAsyncStub:
        """Stats, requests, blocks."""
        return KvManagerServiceStub(self.channel)

    @cached_property
    def registry(self) -> ExecutorRegistryServiceAsyncStub:
        """Executors."""
        return ExecutorRegistryServiceStub(self.channel)

    @cached_property
    def health_check(self) -> _HealthCheck:
        """Health.Check, by its path: the health package's stub has no types."""
        return self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    async def close(self) -> None:
        """Closes the channel if it was opened."""
        if "channel" in self.__dict__:
            await self.channel.close()


def task_is_cancelled() -> bool:
    """Tells a cancellation of the current task from that of its call: ``grpc.aio`` raises CancelledError for both.

    The second happens when the channel is closed under a call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
