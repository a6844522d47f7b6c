"""A manager from its start to its orderly end: engine, server, signals.

Station: called by `__main__`; builds everything else. SIGTERM or SIGINT drains (new requests get UNAVAILABLE, running
ones may finish within drain_timeout_s) and stops; a second signal stops at once. SIGHUP reads the keys anew.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import time

import structlog

from kvmanager_service.config import ManagerConfig
from kvmanager_service.core import is_compiled
from kvmanager_service.engine_loop import EngineLoop
from kvmanager_service.heap import settle_heap
from kvmanager_service.racing import first_of
from kvmanager_service.registry import ExecutorRegistry
from kvmanager_service.server import Health, ManagerServer

_log = structlog.get_logger("kvmanager_service")

LAST_MESSAGES_S = 2.0
"""How long streams may take to deliver their last message once their requests have ended."""


async def serve(config: ManagerConfig) -> None:
    """Run a manager until a signal stops it.

    Raises:
        ConfigError: it cannot listen where it is told to, or a file that it is told of will not do.
    """
    registry = ExecutorRegistry(time.monotonic, config.lease_ms)
    health = Health()
    engine = EngineLoop(config, registry, health.set_serving, settle_heap)
    server = ManagerServer(config, engine, registry, health, settle_heap)
    _warn_of_what_is_open(config)
    if config.api_keys:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload_keys)
    drain, stop_now = asyncio.Event(), asyncio.Event()
    _watch_signals(drain, stop_now)
    await server.start()
    await engine.start()
    leases = asyncio.create_task(registry.watch(), name="registry-leases")
    _log.info(
        "manager_started",
        host=config.host,
        port=server.port,
        manager_id=server.manager_id,
        authenticates=bool(config.api_keys),
        tls=bool(config.tls_certificate),
        core="compiled" if is_compiled() else "python",
    )
    await drain.wait()
    registry.drain()
    await first_of(engine.drain(config.drain_timeout_s), stop_now.wait())
    await engine.stop()
    leases.cancel()
    await first_of(server.stop(LAST_MESSAGES_S), stop_now.wait())
    await server.stop(0)
    _log.info("manager_stopped", manager_id=server.manager_id, forced=stop_now.is_set())


def _warn_of_what_is_open(config: ManagerConfig) -> None:
    """Log settings that protect less than they seem to."""
    if config.isolate_tenants and not config.api_keys:
        _log.warning(
            "tenants_not_authenticated",
            note="--isolate-tenants believes the tenant that a request names; with --api-keys it is that of the key",
        )
    if config.api_keys and not config.tls_certificate and not _is_loopback(config.host):
        _log.warning(
            "keys_in_plain_text",
            host=config.host,
            note="who listens on the network reads callers' keys; give --tls-certificate and --tls-key, or have a proxy"
            " end TLS on this machine",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _watch_signals(drain: asyncio.Event, stop_now: asyncio.Event) -> None:
    def on_signal(name: str) -> None:
        (stop_now if drain.is_set() else drain).set()
        _log.info("signal_received", signal=name, at_once=stop_now.is_set())

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
