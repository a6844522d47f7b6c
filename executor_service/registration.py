"""Keeps an executor known to a manager.

Station: started by `server` once the model is loaded; calls the manager's `ExecutorRegistryService`. The manager then
connects back to the address. Logs changes of state, never each renewal.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as pb
from kvplane.kvmanager.v1 import executor_registry_service_pb2_grpc as pb_grpc

from executor_service.manager_access import ManagerAccess

__all__ = ["Backoff", "Registration"]

_TRANSIENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_CALL_TIMEOUT_S = 5.0
_SHORTEST_RENEWAL_S = 0.05

_log = structlog.get_logger(__name__)


@dataclass
class Backoff:
    """How long to wait after a failed call.

    Units:
        seconds. `first_s` doubles with each failure up to `longest_s`; `refused_s` is the wait after a refusal, which
        does not pass by itself.

    Source: "full jitter" (Brooker 2015), but never below half, so that a manager that restarts is not called at once
    by all its executors.
    """

    first_s: float = 0.1
    longest_s: float = 5.0
    refused_s: float = 30.0
    jitter: Callable[[], float] = random.random

    def after(self, failures: int, code: grpc.StatusCode) -> float:
        """Return the wait after the given number of failures in a row, the last with this code."""
        # The exponent is bounded: after days of failures 2.0**n would overflow.
        ceiling = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))
        if code not in _TRANSIENT:
            ceiling = self.refused_s
        return ceiling * (0.5 + 0.5 * self.jitter())


class Registration:
    """Registers, renews at a third of the lease, and tries for ever when that fails.

    Args:
        manager: the manager's host:port.
        executor_id: unique to this run.
        address: where the manager reaches this executor.
        backoff: waits between failed calls.
        access: how the manager is reached; in plain text and without a key when None.
    """

    def __init__(
        self,
        manager: str,
        executor_id: str,
        address: str,
        backoff: Backoff | None = None,
        access: ManagerAccess | None = None,
    ) -> None:
        self._manager = manager
        self._access = access or ManagerAccess()
        self._request = pb.RegisterRequest(executor_id=executor_id, address=address)
        self._backoff = backoff or Backoff()
        self._failures = 0
        self._last: tuple[str, str] | None = None

    async def run(self) -> None:
        """Keep registered until cancelled."""
        # gRPC's own reconnect backoff grows to two minutes; ours decides when to call, so its must not be longer.
        longest_ms = int(self._backoff.longest_s * 1000)
        options = (("grpc.max_reconnect_backoff_ms", longest_ms), ("grpc.initial_reconnect_backoff_ms", 100))
        async with self._access.channel(self._manager, options) as channel:
            stub = pb_grpc.ExecutorRegistryServiceStub(channel)
            while True:
                delay_s = await self._register_once(stub)
                await asyncio.sleep(delay_s)

    async def _register_once(self, stub: pb_grpc.ExecutorRegistryServiceAsyncStub) -> float:
        """Call once and return how long to wait before the next call, in seconds."""
        try:
            response = await stub.Register(self._request, timeout=_CALL_TIMEOUT_S, metadata=self._access.metadata)
        except grpc.aio.AioRpcError as error:
            self._failures += 1
            self._log_failure(error)
            return self._backoff.after(self._failures, error.code())
        self._failures = 0
        self._log_change(
            "executor_registered", response.manager_id, manager_id=response.manager_id, lease_ms=response.lease_ms
        )
        return max(response.lease_ms / 3000, _SHORTEST_RENEWAL_S)

    def _log_failure(self, error: grpc.aio.AioRpcError) -> None:
        """Say that the manager cannot be reached, or that it refuses: an operator must act on the second."""
        code, details = error.code(), error.details() or ""
        if code in _TRANSIENT:
            self._log_change("manager_unreachable", code.name, level="warning", code=code.name, error=details)
        else:
            self._log_change("registration_refused", code.name + details, level="error", code=code.name, error=details)

    def _log_change(self, event: str, key: str, level: str = "info", **values: object) -> None:
        """Log an event that differs from the last one."""
        if self._last != (event, key):
            self._last = (event, key)
            getattr(_log, level)(event, manager=self._manager, address=self._request.address, **values)
