"""Keeps a manager and an executor running together.

Station: between ``kvplane up`` and the children. It decides when to start, restart and stop; what the server says
about its readiness comes through a probe, and what users see goes through a view.

Rules:

1. The manager's end is the end: the executor is stopped, exit code 1; 2 where that was the manager's own, which says
   that its settings are wrong.
2. An executor that ends before the server was ever ready is a mistake in its configuration: the same.
3. Later it is started anew, after a pause that grows while it fails to become ready, until it failed too often.
4. On SIGINT or SIGTERM the manager stops first, so that running requests finish on the executor; exit code 0.
   A second signal kills both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from kvplane_client.cli.child_process import ChildProcess
from kvplane_client.cli.session import EXIT_ERROR, EXIT_USAGE
from kvplane_client.manager_types import Model

__all__ = ["Probe", "Supervisor", "SupervisorSettings", "View"]


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """When to restart and how long to wait.

    Attributes:
        restart_executor: Rule 3; otherwise the executor's end is the end.
        max_restarts: Restarts in a row without becoming ready.
        initial_pause: Seconds before the first restart; doubled for each further one in a row.
        max_pause: The longest pause.
        drain_seconds: What the manager is given to finish running requests.
        stop_seconds: What the executor is given to stop.
    """

    restart_executor: bool = True
    max_restarts: int = 5
    initial_pause: float = 1.0
    max_pause: float = 30.0
    drain_seconds: float = 30.0
    stop_seconds: float = 10.0


Probe = Callable[[], Awaitable[Model | str]]
"""Waits for a moment, then returns the model when the executor started last is serving, else what is missing."""


class View(Protocol):
    """What the supervisor has to tell."""

    def loading(self, manager: ChildProcess, executor: ChildProcess, missing: str) -> None:
        """The server is not ready yet."""

    def ready(self, model: Model, manager: ChildProcess, executor: ChildProcess) -> None:
        """The server is ready, for the first time or again."""

    def died(self, child: ChildProcess) -> None:
        """A child has ended, and everything ends with it."""

    def restarting(self, child: ChildProcess, pause: float) -> None:
        """A child has ended and is started anew after a pause."""

    def stopping(self) -> None:
        """The user asked to stop."""

    def killed(self, child: ChildProcess) -> None:
        """A child did not stop in time."""


class Supervisor:
    """Runs both children until one of the rules ends them.

    Args:
        manager: The manager, not started.
        executor: The executor, not started.
        probe: Says whether the server is ready.
        view: Shows what happens.
        settings: Limits.
    """

    def __init__(
        self, manager: ChildProcess, executor: ChildProcess, probe: Probe, view: View, settings: SupervisorSettings
    ) -> None:
        self._manager = manager
        self._executor = executor
        self._probe = probe
        self._view = view
        self._settings = settings
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    def signal(self) -> None:
        """Takes a SIGINT or SIGTERM: the first stops, the second kills."""
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    async def run(self) -> int:
        """Runs until the end and returns the exit code."""
        tasks: list[asyncio.Task[object]] = []
        try:
            await self._manager.start()
            tasks = [
                asyncio.create_task(self._stop.wait(), name="stop"),
                asyncio.create_task(self._manager.wait(), name="manager"),
                asyncio.create_task(self._keep_executor(), name="executor"),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks[1:]:
                if task.done():
                    task.result()
            if self._stop.is_set():
                self._view.stopping()
                return 0
            dead = self._manager if tasks[1].done() else self._executor
            self._view.died(dead)
            return EXIT_USAGE if dead.exit_code == EXIT_USAGE else EXIT_ERROR
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_children()

    async def _keep_executor(self) -> None:
        """Runs the executor, again and again where the rules say so; returns when they end it."""
        failures = 0
        ever_ready = False
        while True:
            await self._executor.start()
            if await self._watch_executor():
                ever_ready, failures = True, 0
            failures += 1
            if not (self._settings.restart_executor and ever_ready) or failures > self._settings.max_restarts:
                return
            pause = min(self._settings.initial_pause * 2 ** (failures - 1), self._settings.max_pause)
            self._view.restarting(self._executor, pause)
            await asyncio.sleep(pause)

    async def _watch_executor(self) -> bool:
        """Waits for the end of one run and returns whether the server became ready in it."""
        announcing = asyncio.create_task(self._announce(), name="probe")
        try:
            run = asyncio.ensure_future(self._executor.wait())
            await asyncio.wait({run, announcing}, return_when=asyncio.FIRST_COMPLETED)
            became_ready = announcing.done()
            if became_ready:
                announcing.result()
            await run
            return became_ready
        finally:
            run.cancel()
            announcing.cancel()
            await asyncio.gather(run, announcing, return_exceptions=True)

    async def _announce(self) -> None:
        """Tells the view how the start goes until the server is ready."""
        while isinstance(answer := await self._probe(), str):
            self._view.loading(self._manager, self._executor, answer)
        self._view.ready(answer, self._manager, self._executor)

    async def _stop_children(self) -> None:
        """Stops the manager, then the executor it drains onto."""
        for child, grace in (
            (self._manager, self._settings.drain_seconds),
            (self._executor, self._settings.stop_seconds),
        ):
            if not await child.stop(grace, self._force):
                self._view.killed(child)
