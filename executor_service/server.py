"""Puts an executor together and runs it: the gRPC server, its health, the compute thread, the registration.

Station: called by `__main__`, and by tests that want an executor in their own process (`running_executor`).

Life: `start` binds and answers health with NOT_SERVING; `load` loads the model, turns health to SERVING and registers;
`stop` turns health to NOT_SERVING, lets the running step finish, ends the streams and closes the backend.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1 import executor_service_pb2_grpc as pb_grpc

from executor_service.backends.base import Backend, BackendError, SettingError
from executor_service.backends.registry import create_backend
from executor_service.compute_thread import ComputeThread
from executor_service.config import ExecutorConfig
from executor_service.heap import settle_heap
from executor_service.kv_session import KvSession
from executor_service.malformed_requests import MalformedRequests
from executor_service.manager_access import AccessError, ManagerAccess
from executor_service.registration import Registration
from executor_service.servicer import ExecutorServicer
from executor_service.startup_times import StartupTimes
from executor_service.step_runner import StepRunner

__all__ = ["MAX_MESSAGE_BYTES", "SERVICE_NAME", "BindError", "ExecutorServer", "running_executor", "serve_until_signal"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
MAX_MESSAGE_BYTES = 256 << 20

_WILDCARD_HOSTS = {"0.0.0.0", "[::]"}  # noqa: S104 - compared with, not bound to
_STOP_GRACE_S = 30.0
_LOAD_GRACE_S = 1.0
_RPC_GRACE_S = 2.0
_FAILED, _BAD_SETTING = 1, 2

_log = structlog.get_logger(__name__)


class BindError(Exception):
    """The address cannot be listened on."""


class ExecutorServer:
    """One executor. Must be created in a running event loop.

    Args:
        config: the configuration.
        backend: what computes; from the configuration when None.
        started: when the process began, of the monotonic clock; None leaves out what was before.
        settle: see `KvSession`.

    Raises:
        BackendError: the configured backend cannot be built.
        AccessError: the key or the certificates for the manager cannot be used.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        backend: Backend | None = None,
        started: float | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._access = ManagerAccess.from_config(config)
        backend = backend or create_backend(config)
        backend.on_lost(self._tell_unusable)
        self.session = KvSession(backend, StartupTimes(started), settle)
        self._thread = ComputeThread()
        self._runner = StepRunner(self.session, self._thread)
        self._health = health.aio.HealthServicer()
        self._registration: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            interceptors=(MalformedRequests(),),
            options=(
                # Two executors on one port would share its connections, and each see some of the steps.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ),
        )
        self.address = ""
        self.unusable = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Listen, and answer health with NOT_SERVING.

        Raises:
            BindError: the address is taken or not ours.
        """
        await self._set_serving(False)
        servicer = ExecutorServicer(
            self.session,
            self._thread,
            self._runner,
            self._config.executor_id,
            self._config.backend,
            on_memory_refused=self.unusable.set,
        )
        pb_grpc.add_ExecutorServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        host = self._config.host
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"  # IPv6
        wanted = f"{host}:{self._config.port}"
        try:
            port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            message = (
                f"expected an address that can be listened on, got {wanted}, which is in use or not this machine's;"
                " choose another --host or --port"
            )
            raise BindError(message) from error
        self.address = f"{host}:{port}"
        await self._server.start()
        _log.info("executor_listening", address=self.address)

    async def load(self) -> None:
        """Load the model, say SERVING, and register with the manager. Raises what the backend raises."""
        await self._thread.call(self.session.load)
        await self._set_serving(True)
        if self._config.manager:
            registration = Registration(
                self._config.manager, self._config.executor_id, self._advertised(), access=self._access
            )
            self._registration = asyncio.create_task(registration.run())
        _log.info("executor_ready", address=self.address, backend=self._config.backend)

    async def stop(self) -> None:
        """Finish the running step, end all calls, give back what the backend holds."""
        _log.info("executor_stopping")
        await self._health.enter_graceful_shutdown()
        if self._registration is not None:
            self._registration.cancel()
            with suppress(asyncio.CancelledError):
                await self._registration
        self._runner.stop()
        # A running step is finished, since its answer is worth something; a load or a profile is worth nothing.
        # Nor is it when the backend is lost: its step may hang.
        grace_s = _STOP_GRACE_S if self.session.cache and not self.unusable.is_set() else _LOAD_GRACE_S
        closed = asyncio.ensure_future(self._thread.call(self.session.close))
        done, _ = await asyncio.wait([closed], timeout=grace_s)
        await self._server.stop(_RPC_GRACE_S)
        if done and await self._thread.stop(grace_s):
            closed.result()
        else:
            closed.cancel()
            _log.warning("compute_abandoned", why=f"the backend's call took longer than {grace_s} s")
        _log.info("executor_stopped")

    def _tell_unusable(self, error: BackendError) -> None:
        """The backend is lost, which it has logged; called from any thread."""
        del error
        with suppress(RuntimeError):  # the loop is closed: the process is at its end already
            self._loop.call_soon_threadsafe(self.unusable.set)

    def _advertised(self) -> str:
        """Return the address that the manager is told."""
        if self._config.advertise_address:
            return self._config.advertise_address
        host, _, port = self.address.rpartition(":")
        return f"{socket.gethostname() if host in _WILDCARD_HOSTS else host}:{port}"

    async def _set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)


@asynccontextmanager
async def running_executor(config: ExecutorConfig, backend: Backend | None = None) -> AsyncIterator[ExecutorServer]:
    """Run an executor in this process: loaded on entry, stopped on exit; `address` is where it listens.

    Args:
        config: as for `ExecutorServer`; port 0 is the choice for tests.
        backend: as for `ExecutorServer`.
    """
    server = ExecutorServer(config, backend)
    try:
        await server.start()
        await server.load()
        yield server
    finally:
        await server.stop()


async def serve_until_signal(config: ExecutorConfig, started: float | None = None) -> int:
    """Run one executor until SIGTERM or SIGINT, or until it is unusable: its memory is too small, its backend is lost.

    Args:
        config: as for `ExecutorServer`.
        started: as for `ExecutorServer`.

    Returns:
        The exit status: 0 after a signal, 1 when it is unusable, the address is taken, or the model cannot be loaded, 2
        when a setting has a value that the backend, the machine or the connection to the manager does not take.
    """
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    try:
        server = ExecutorServer(config, started=started, settle=settle_heap)
    except BackendError as error:
        _log.error("backend_unavailable", reason=error.reason, error=str(error))
        return _status_of(error)
    except AccessError as error:
        _log.error("manager_access_refused", error=str(error))
        return _BAD_SETTING
    stopped = asyncio.create_task(stop.wait())
    unusable = asyncio.create_task(server.unusable.wait())
    loading = None
    try:
        await server.start()
        loading = asyncio.create_task(server.load())
        await asyncio.wait([loading, stopped, unusable], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading
            await asyncio.wait([stopped, unusable], return_when=asyncio.FIRST_COMPLETED)
    except BindError as error:
        _log.error("executor_bind_failed", error=str(error))
        return 1
    except BackendError as error:
        _log.error("executor_load_failed", reason=error.reason, error=str(error), metadata=error.metadata)
        return _status_of(error)
    except Exception:  # noqa: BLE001 - ends the process, with its traceback in the log
        _log.exception("executor_load_failed")
        return 1
    finally:
        for task in (loading, stopped, unusable):
            if task is not None:
                task.cancel()
        await server.stop()
    return 1 if server.unusable.is_set() else 0


def _status_of(error: BackendError) -> int:
    """Whether another setting would help, or the model, the machine or the process is at fault."""
    return _BAD_SETTING if isinstance(error, SettingError) else _FAILED
