"""The channel to the manager and the stubs on it.

Station: the only place that knows how the connection is made, and what goes with each call. The channel opens with the
first call, inside the event loop that makes it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import warnings
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

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

__all__ = ["PlainTextKeyWarning", "Stubs", "check_api_key", "task_is_cancelled"]

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


class PlainTextKeyWarning(UserWarning):
    """A key is sent to another machine without TLS: who listens on the network can use it."""


class _KeyedChannel:
    """A channel each of whose calls carries the key.

    An interceptor would do the same; grpc.aio puts a queue and a task before each stream then.
    """

    def __init__(self, channel: grpc.aio.Channel, api_key: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {api_key}"),)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return partial(self._channel.unary_unary(*args, **options), metadata=self._metadata)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return partial(self._channel.unary_stream(*args, **options), metadata=self._metadata)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return partial(self._channel.stream_stream(*args, **options), metadata=self._metadata)


class Stubs:
    """One channel and the stubs of the manager's services.

    Args:
        target: The gRPC target.
        credentials: For TLS; None means plain text.
        api_key: Sent with each call; None means none.

    Raises:
        ValueError: The key cannot be sent.
    """

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None = None, api_key: str | None = None
    ) -> None:
        if api_key is not None:
            check_api_key(api_key)
            if credentials is None and _leaves_this_machine(target):
                warnings.warn(
                    f"the key goes to {target} in plain text, and who listens on the network can use it; use TLS"
                    " (credentials of the library, --tls or --tls-ca of kvplane), or a tunnel to localhost",
                    PlainTextKeyWarning,
                    stacklevel=3,
                )
        self._credentials = credentials
        self._api_key = api_key
        self.target = target

    @cached_property
    def channel(self) -> grpc.aio.Channel:
        """The channel."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.target, options=_CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.target, self._credentials, options=_CHANNEL_OPTIONS)

    @cached_property
    def _keyed(self) -> grpc.aio.Channel:
        """The channel as the stubs use it."""
        if self._api_key is None:
            return self.channel
        return cast(grpc.aio.Channel, _KeyedChannel(self.channel, self._api_key))

    @cached_property
    def inference(self) -> InferenceServiceAsyncStub:
        """Generate, Abort, GetModel."""
        return InferenceServiceStub(self._keyed)

    @cached_property
    def manager(self) -> KvManagerServiceAsyncStub:
        """Stats, requests, blocks."""
        return KvManagerServiceStub(self._keyed)

    @cached_property
    def registry(self) -> ExecutorRegistryServiceAsyncStub:
        """Executors."""
        return ExecutorRegistryServiceStub(self._keyed)

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


def check_api_key(api_key: str) -> None:
    """Raises ValueError, which does not quote it, unless a key can be sent: gRPC's own error would quote it."""
    if not api_key or not all("!" <= character <= "~" for character in api_key):
        raise ValueError("api_key: expected visible ASCII characters without blanks, got others or none")


def _leaves_this_machine(target: str) -> bool:
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return False
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        target = rest.rpartition("/")[2]
    host = target.rpartition(":")[0] or target
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"


def task_is_cancelled() -> bool:
    """Tells a cancellation of the current task from that of its call: ``grpc.aio`` raises CancelledError for both.

    The second happens when the channel is closed under a call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
