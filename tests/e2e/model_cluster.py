"""Clusters that serve a model: slower to start than those of the sim backend, so several tests share one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Event, ServiceProcess

START_NET_S = 900.0
"""Loading and profiling take seconds; on a machine that others use, minutes."""


class ModelCluster(Cluster):
    """A manager and an executor, with the torch backend if not said, on CPU."""

    def start_model(self, model: Path, manager: dict[str, object] | None = None, **executor: object) -> ServiceProcess:
        """Start both and wait until requests are admitted; returns the executor.

        Args:
            model: what the executor loads.
            manager: settings of the manager.
            executor: settings of the executor.
        """
        # A step of a real model on a busy machine may keep the executor from renewing a short lease.
        self.start_manager(lease_ms=60_000, **(manager or {}))
        process = self.start_model_executor(model, **executor)
        wait_patiently(self.manager, "executor_active", process)
        return process

    def start_model_executor(self, model: Path, **settings: object) -> ServiceProcess:
        """Start an executor and do not wait for it."""
        fixed: dict[str, object] = {"backend": "torch", "device": "cpu", "dtype": "float32", "num_threads": 2}
        return self.start_executor(wait=False, model=model, **(fixed | settings))


def wait_patiently(process: ServiceProcess, event: str, *others: ServiceProcess, count: int = 1) -> Event:
    """`wait_event` for what a model's start takes, in vain once this process or one of the others has ended."""
    until = time.monotonic() + START_NET_S
    while True:
        try:
            return process.wait_event(event, count)
        except AssertionError:
            if any(one.has_ended for one in (process, *others)) or time.monotonic() > until:
                raise


@contextmanager
def model_cluster(request: pytest.FixtureRequest, folder: Path) -> Iterator[ModelCluster]:
    """A cluster for a fixture of any scope: logs are shown when a test failed meanwhile, else checked."""
    cluster = ModelCluster(folder)
    failed_before = request.session.testsfailed
    try:
        yield cluster
        if request.session.testsfailed == failed_before:
            cluster.check_logs()
        else:
            cluster.show_logs()
    except BaseException:
        cluster.show_logs()
        raise
    finally:
        cluster.close()
