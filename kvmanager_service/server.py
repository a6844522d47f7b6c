"""The gRPC server of the manager: services, health, reflection; who may call, and TLS.

Station: built by `process` (and by tests, with another engine) and nothing else. It decides no request's fate.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kvplane.kvmanager.v1 import (
    executor_registry_service_pb2,
    executor_registry_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
    kv_manager_service_pb2,
    kv_manager_service_pb2_grpc,
)

from kvmanager_service.admission import Admission
from kvmanager_service.api_keys import KeyRing, read_api_keys
from kvmanager_service.authentication import Authentication
from kvmanager_service.callers import Role
from kvmanager_service.config import ConfigError, ManagerConfig
from kvmanager_service.engine_api import Engine
from kvmanager_service.malformed_requests import MalformedRequests
from kvmanager_service.registry import ExecutorRegistry
from kvmanager_service.servicers.executor_registry import ExecutorRegistryServicer
from kvmanager_service.servicers.inference import InferenceServicer
from kvmanager_service.servicers.kv_manager import KvManagerServicer
from kvmanager_service.tls import server_credentials

__all__ = ["SERVICE_NAMES", "Health", "ManagerServer"]

_log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two managers on one port would each see half of the requests: fail instead.
    ("grpc.so_reuseport", 0),
    # Of a burst, gRPC cancels without a reason what goes beyond this many calls that wait to be taken up.
    ("grpc.server.max_pending_requests", 1_000_000),
    ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
    # A client whose machine vanished holds blocks until it is found out.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients may ping as often themselves.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)

SERVICE_NAMES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (inference_service_pb2, "InferenceService"),
        (kv_manager_service_pb2, "KvManagerService"),
        (executor_registry_service_pb2, "ExecutorRegistryService"),
    )
)


class Health:
    """The manager's health for every service name and for the server as a whole.

    Attributes:
        servicer: the grpc.health.v1 servicer.
    """

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self._updates: set[asyncio.Task[None]] = set()
        self._serving = False
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Make every name known, as not serving."""
        await self._publish()

    def set_serving(self, serving: bool) -> None:
        """Tell watchers whether requests are admitted; returns at once."""
        self._serving = serving
        update = asyncio.create_task(self._publish(), name="health-update")
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)

    async def _publish(self) -> None:
        async with self._lock:
            status = (
                health_pb2.HealthCheckResponse.SERVING if self._serving else health_pb2.HealthCheckResponse.NOT_SERVING
            )
            for name in ("", *SERVICE_NAMES):
                await self.servicer.set(name, status)


class ManagerServer:
    """The server: started once, stopped once.

    Args:
        settle: see `SequencePools`.

    Attributes:
        manager_id: unique to this run.
        port: the port it listens on, once started.

    Raises:
        ConfigError: a file of keys, or of the certificate, will not do.
    """

    def __init__(
        self,
        config: ManagerConfig,
        engine: Engine,
        registry: ExecutorRegistry,
        health: Health,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.manager_id = f"manager-{secrets.token_hex(6)}"
        self.port = 0
        self._address = f"[{config.host}]" if ":" in config.host else config.host
        self._wanted_port = config.port
        self._health = health
        self._credentials = (
            server_credentials(Path(config.tls_certificate), Path(config.tls_key)) if config.tls_certificate else None
        )
        self._key_file = Path(config.api_keys)
        self._authentication = Authentication(self._read_keys()) if config.api_keys else None
        # Outermost, so that nothing of a call is looked at before its key.
        authentication = () if self._authentication is None else (self._authentication,)
        self._server = grpc.aio.server(interceptors=(*authentication, MalformedRequests()), options=_OPTIONS)
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(engine, Admission(engine, isolate_tenants=config.isolate_tenants)), self._server
        )
        kv_manager_service_pb2_grpc.add_KvManagerServiceServicer_to_server(
            KvManagerServicer(engine, config, settle), self._server
        )
        executor_registry_service_pb2_grpc.add_ExecutorRegistryServiceServicer_to_server(
            ExecutorRegistryServicer(registry, engine, self.manager_id), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(health.servicer, self._server)
        reflection.enable_server_reflection(
            (*SERVICE_NAMES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self._server,
        )

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port cannot be had.
        """
        await self._health.start()
        address = f"{self._address}:{self._wanted_port}"
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"--host/--port: expected an address that can be listened on, got {address}, which is in use or not"
                " this machine's. Stop what uses it, or choose another"
            ) from error
        await self._server.start()

    def reload_keys(self) -> None:
        """Read the key file anew; one that will not do changes nothing and is logged. Nothing without --api-keys."""
        if self._authentication is None:
            return
        try:
            self._authentication.keys = self._read_keys()
        except ConfigError as error:
            _log.error("api_keys_refused", error=str(error), note="the keys read before still count")

    def _read_keys(self) -> KeyRing:
        keys = read_api_keys(self._key_file)
        _log.info("api_keys_read", **{f"{role.value}s": keys.count(role) for role in Role})
        return keys

    async def stop(self, grace_s: float) -> None:
        """Stop listening and end the calls that are left after `grace_s` seconds."""
        await self._server.stop(grace_s)
