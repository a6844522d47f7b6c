"""A manager and an executor as real processes, for benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_TIMEOUT_S = 600


class Process:
    """A child that logs JSON lines to a file.

    Args:
        module: what `python -m` runs.
        arguments: its flags.
        folder: where its log goes.
    """

    def __init__(self, module: str, arguments: Sequence[str], folder: Path) -> None:
        self.log = folder / f"{module}.log"
        self._handle = self.log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--log-format", "json", *arguments],
            stdout=self._handle,
            stderr=subprocess.STDOUT,
            env=dict(os.environ),
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_event(self, event: str) -> dict[str, Any]:
        """Wait until the child logs an event; return it."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for line in self.log.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    record = json.loads(line)
                    if isinstance(record, dict) and record.get("event") == event:
                        return record
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"expected {event} from {self._process.args}, got:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        """Terminate the child and wait."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._handle.close()


@contextlib.contextmanager
def running_cluster(manager: Sequence[str], executor: Sequence[str]) -> Iterator[str]:
    """Start both, wait until they serve, yield the manager's address, stop both.

    Args:
        manager: flags of the manager.
        executor: flags of the executor.
    """
    with tempfile.TemporaryDirectory(prefix="kvplane-bench-") as folder:
        manager_process = Process("kvmanager_service", ["--port", "0", *manager], Path(folder))
        executor_process = None
        try:
            address = f"127.0.0.1:{manager_process.wait_event('manager_started')['port']}"
            executor_process = Process(
                "executor_service", ["--port", "0", "--manager", address, *executor], Path(folder)
            )
            _wait_serving(address, executor_process)
            yield address
        finally:
            manager_process.stop()
            if executor_process is not None:
                executor_process.stop()


def _wait_serving(address: str, executor: Process) -> None:
    executor.wait_event("executor_ready")
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            status = health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60).status
            if status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.05)
    raise RuntimeError(f"expected the manager at {address} to serve, got none in {START_TIMEOUT_S} s")
