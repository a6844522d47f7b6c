"""A manager from its start to its orderly end: engine, server, signals.

Station: called by `__main__`; builds everything else. SIGTERM or SIGINT drains (new requests get UNAVAILABLE, running
ones may finish within drain_timeout_s) and stops; a second signal stops at once.
"""

from __future__ import annotations

import asyncio
import signal
import time

import structlog

from kvmanager_service.config import ManagerConfig
from kvmanager_service.core import is_compiled
from kvmanager_service.engine_loop import EngineLoop
from kvmanager_service.racing import first_of
from kvmanager_service.registry import ExecutorRegistry
from kvmanager_service.server import Health, ManagerServer

_log = structlog.get_logger("kvmanager_service")

LAST_MESSAGES_S = 2.0
"""How long streams may take to deliver their last message once their requests have ended."""


async def serve(config: ManagerConfig) -> None:
    """Run a manager until a signal stops it.

    Raises:
        ConfigError: it cannot listen where it is told to.
    """
    registry = ExecutorRegistry(time.monotonic, config.lease_ms)
    health = Health()
    engine = EngineLoop(config, registry, health.set_serving)
    server = ManagerServer(config, engine, registry, health)
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


def _watch_signals(drain: asyncio.Event, stop_now: asyncio.Event) -> None:
    def on_signal(name: str) -> None:
        (stop_now if drain.is_set() else drain).set()
        _log.info("signal_received", signal=name, at_once=stop_now.is_set())

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
