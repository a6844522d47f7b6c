"""Real manager and executor processes for tests: started, waited for by what they log, ended by their process id."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
from kvplane_client import AsyncClient, ManagerState, RetryPolicy, Stats

from kvmanager_service.core import is_compiled

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(str(ROOT / part) for part in (".", "proto", "client"))
SAFETY_NET_S = 60.0
"""No test depends on how long something takes; one that waits this long has failed."""

Event = dict[str, Any]
_T = TypeVar("_T")


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child: our sources, one thread, no settings of ours from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPLANE_")}
    path = os.environ["PYTHONPATH"] if is_compiled() else PYTHONPATH
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | extra


def to_flags(settings: dict[str, object]) -> list[str]:
    """Settings as command-line flags; False becomes --no-name, True --name."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


async def eventually(probe: Callable[[], Awaitable[_T | None]], what: str) -> _T:
    """Ask until the answer is neither None nor False, and return it."""
    until = time.monotonic() + SAFETY_NET_S
    while time.monotonic() < until:
        answer = await probe()
        if answer is not None and answer is not False:
            return answer
        await asyncio.sleep(0.005)
    raise AssertionError(f"expected {what}; it did not come in {SAFETY_NET_S} s")


class ServiceProcess:
    """One process of ours and its log.

    Attributes:
        name: for messages.
        log_path: its standard error and output.
    """

    def __init__(self, name: str, command: list[str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(), cwd=ROOT
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def lines(self) -> list[str]:
        return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def events(self, event: str = "") -> list[Event]:
        """What it has logged, in order; on demand of one kind only."""
        parsed = [json.loads(line) for line in self.lines() if line.startswith("{") and line.endswith("}")]
        return [entry for entry in parsed if not event or entry["event"] == event]

    def wait_event(self, event: str, count: int = 1) -> Event:
        """Block until it has logged an event `count` times; return the last of them."""
        until = time.monotonic() + SAFETY_NET_S
        while time.monotonic() < until:
            # Asked before the log is read: what a process logs right before its end counts.
            ended = self._process.poll()
            found = self.events(event)
            if len(found) >= count:
                return found[count - 1]
            if ended is not None:
                raise AssertionError(f"expected {self.name} to log {event} {count} times, got its end, status {ended}")
            time.sleep(0.02)
        raise AssertionError(f"expected {self.name} to log {event} {count} times, got {len(self.events(event))}")

    async def logged(self, event: str, count: int = 1) -> Event:
        """`wait_event` for tests that have other things running."""
        return await asyncio.to_thread(self.wait_event, event, count)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL and reap; harmless when it has ended."""
        self._process.kill()
        self._process.wait(SAFETY_NET_S)

    async def exit_status(self) -> int:
        """Wait for its end."""
        return await asyncio.to_thread(self._process.wait, SAFETY_NET_S)

    def resident_bytes(self) -> int:
        """VmRSS."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def num_connections(self) -> int:
        """Established TCP connections."""
        return sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process(self.pid).net_connections("tcp"))


class Cluster:
    """A manager and any number of executors; what was started is killed and reaped by `close`.

    Attributes:
        manager: the manager, once started.
        executors: all executors that were ever started.
        expected_errors: how error events begin that a test causes on purpose.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[ServiceProcess] = []
        self._manager_settings: dict[str, object] = {}
        self.manager: ServiceProcess
        self.executors: list[ServiceProcess] = []
        self.expected_errors: set[str] = set()
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_manager(self, **settings: object) -> ServiceProcess:
        """Start a manager and wait until it listens; another call starts it anew, on the same port, as it was."""
        if settings or not self._manager_settings:
            self._manager_settings = {"lease_ms": 3_000, "log_format": "json"} | settings
        flags = to_flags({"port": self.port} | self._manager_settings)
        self.manager = self._start("manager", "kvmanager_service", flags)
        started = self.manager.wait_event("manager_started")
        assert started["core"] == ("compiled" if is_compiled() else "python"), "the manager runs another core"
        self.port = int(started["port"])
        return self.manager

    def start_executor(self, *, wait: bool = True, **settings: object) -> ServiceProcess:
        """Start an executor; waits until it has registered unless told not to."""
        flags = to_flags({"manager": self.address, "port": 0, "backend": "sim", "log_format": "json"} | settings)
        executor = self._start(f"executor-{len(self.executors)}", "executor_service", flags)
        self.executors.append(executor)
        if wait:
            executor.wait_event("executor_registered")
        return executor

    def start(self, manager: dict[str, object] | None = None, **executor: object) -> None:
        """Start a manager and one executor, and wait until requests are admitted."""
        self.start_manager(**(manager or {}))
        self.start_executor(**({"sim_step_ms": 5} | executor))
        self.manager.wait_event("executor_active")

    def client(self, **settings: Any) -> AsyncClient:
        """A client of the manager; it retries for as long as a test may take."""
        return AsyncClient(self.address, **({"retry": RetryPolicy(max_attempts=1000, max_backoff=0.5)} | settings))

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    def show_logs(self) -> None:
        """Print the end of every log, for a test that failed."""
        for process in self._processes:
            print(f"--- {process.name}, pid {process.pid} ---", *process.lines()[-60:], sep="\n")

    def check_logs(self) -> None:
        """Nothing in any log may speak of a mistake of ours: no error event, no stray traceback."""
        for process in self._processes:
            lines = [line for line in process.lines() if "Traceback" in line or '"level": "error"' in line]
            bad = [line for line in lines if not any(f'"event": "{event}' in line for event in self.expected_errors)]
            assert not bad, f"{process.name} logged {bad[0]}"

    def _start(self, name: str, module: str, flags: list[str]) -> ServiceProcess:
        log_path = self._folder / f"{len(self._processes):02d}-{name}.log"
        process = ServiceProcess(name, [sys.executable, "-m", module, *flags], log_path)
        self._processes.append(process)
        return process


class Proxy:
    """A TCP relay before an executor, whose connections can be cut while both ends live; a context manager.

    Attributes:
        port: where it listens.
        target: host:port to relay to, once known.
    """

    def __init__(self) -> None:
        self.port = 0
        self.target: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._relays: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Break every connection."""
        relays = list(self._relays)
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = asyncio.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            host, _, port = (await self.target).rpartition(":")
            other_reader, other_writer = await asyncio.open_connection(host, int(port))
            writers.append(other_writer)
            await asyncio.gather(_pump(reader, other_writer), _pump(other_reader, writer))
        finally:
            for end in writers:
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError


def executor_address(executor: ServiceProcess) -> str:
    """Where an executor listens."""
    return str(executor.wait_event("executor_listening")["address"])


def used_blocks(stats: Stats) -> int:
    """Blocks that requests hold."""
    assert stats.pool is not None
    return stats.pool.num_blocks - stats.pool.free_blocks


async def settled(client: AsyncClient) -> Stats:
    """Wait until no request is left, check that the pool is whole, and return the counters."""

    async def idle() -> Stats | None:
        stats = await client.get_stats()
        return None if stats.requests_running or stats.requests_waiting else stats

    stats = await eventually(idle, "no request left")
    assert used_blocks(stats) == 0
    return stats


async def serving(client: AsyncClient) -> Stats:
    """Wait until the manager admits requests."""

    async def ask() -> Stats | None:
        stats = await client.get_stats()
        return stats if stats.state is ManagerState.SERVING else None

    return await eventually(ask, "a manager that serves")
