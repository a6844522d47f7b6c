"""The rules by which ``kvplane up`` starts, restarts and stops, with tiny real child programs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from kvplane_client import Model
from kvplane_client.cli.child_process import ChildProcess, ChildSpec
from kvplane_client.cli.supervisor import Supervisor, SupervisorSettings

MODEL = Model("tiny", 128, 256, (2,), 5, True, True, "float32")
QUICK = SupervisorSettings(max_restarts=2, initial_pause=0.01, max_pause=0.02, drain_seconds=60, stop_seconds=60)

# Runs until SIGTERM, then notes its end in a file that the test reads the order from.
OBEDIENT = """
import signal, sys, time
def end(*_):
    open(sys.argv[1], "a").write(sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print('{"event": "up", "level": "info", "port": 5}', flush=True)
while True: time.sleep(0.01)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ignoring", flush=True)
while True: time.sleep(0.01)
"""
FAILING = "import sys; print('line one'); print('no such model', file=sys.stderr); sys.exit(3)"


class RecordingView:
    """Notes what the supervisor tells, and lets tests wait for it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.last_lines: list[str] = []
        self.seen: asyncio.Queue[str] = asyncio.Queue()

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.seen.put_nowait(event)

    def loading(self, manager: ChildProcess, executor: ChildProcess, missing: str) -> None:
        return

    def ready(self, model: Model, manager: ChildProcess, executor: ChildProcess) -> None:
        self._note("ready")

    def died(self, child: ChildProcess) -> None:
        self.last_lines = child.last_lines
        self._note(f"died {child.spec.name} {child.exit_code}")

    def restarting(self, child: ChildProcess, pause: float) -> None:
        self._note(f"restarting {child.spec.name} {child.exit_code} {pause}")

    def stopping(self) -> None:
        self._note("stopping")

    def killed(self, child: ChildProcess) -> None:
        self._note(f"killed {child.spec.name}")


class Setup:
    """A supervisor over two programs."""

    def __init__(
        self,
        folder: Path,
        manager: str,
        executor: str,
        *,
        settings: SupervisorSettings = QUICK,
        probe: Callable[[ChildProcess, ChildProcess], Awaitable[Model | str]] | None = None,
    ) -> None:
        self.order = folder / "order"
        self.view = RecordingView()
        self.manager = self._child(folder, "manager", manager)
        self.executor = self._child(folder, "executor", executor)
        chosen = probe or up_when_both_said_so

        async def ask() -> Model | str:
            return await chosen(self.manager, self.executor)

        self.supervisor = Supervisor(self.manager, self.executor, ask, self.view, settings)

    def _child(self, folder: Path, name: str, program: str) -> ChildProcess:
        argv = [sys.executable, "-c", program, str(self.order), name]
        return ChildProcess(ChildSpec(name, argv, folder / f"{name}.log"), lambda line: None)

    async def until(self, event: str) -> None:
        while await self.view.seen.get() != event:
            pass


async def up_when_both_said_so(manager: ChildProcess, executor: ChildProcess) -> Model | str:
    await asyncio.sleep(0.005)
    return MODEL if manager.last_lines and executor.last_lines else "a first line"


async def never_up(manager: ChildProcess, executor: ChildProcess) -> Model | str:
    await asyncio.sleep(0.005)
    return "an executor"


async def test_first_signal_stops_the_manager_before_the_executor(tmp_path: Path) -> None:
    setup = Setup(tmp_path, OBEDIENT, OBEDIENT)
    running = asyncio.create_task(setup.supervisor.run())
    await setup.until("ready")

    setup.supervisor.signal()

    assert await running == 0
    assert setup.order.read_text().split() == ["manager", "executor"]
    assert setup.view.events == ["ready", "stopping"]


async def test_signal_during_the_start_stops_too(tmp_path: Path) -> None:
    both_run = asyncio.Event()

    async def probe(manager: ChildProcess, executor: ChildProcess) -> Model | str:
        if manager.last_lines and executor.last_lines:
            both_run.set()
        return await never_up(manager, executor)

    setup = Setup(tmp_path, OBEDIENT, OBEDIENT, probe=probe)
    running = asyncio.create_task(setup.supervisor.run())
    await both_run.wait()

    setup.supervisor.signal()

    assert await running == 0
    assert setup.order.read_text().split() == ["manager", "executor"]


async def test_second_signal_kills(tmp_path: Path) -> None:
    setup = Setup(tmp_path, STUBBORN, STUBBORN)
    running = asyncio.create_task(setup.supervisor.run())
    await setup.until("ready")

    setup.supervisor.signal()
    await setup.until("stopping")
    setup.supervisor.signal()

    assert await running == 0
    assert setup.view.events == ["ready", "stopping", "killed manager", "killed executor"]
    assert (setup.manager.exit_code, setup.executor.exit_code) == (-signal.SIGKILL, -signal.SIGKILL)


async def test_child_that_outlasts_its_grace_is_killed(tmp_path: Path) -> None:
    settings = SupervisorSettings(drain_seconds=0.05, stop_seconds=60)
    setup = Setup(tmp_path, STUBBORN, OBEDIENT, settings=settings)
    running = asyncio.create_task(setup.supervisor.run())
    await setup.until("ready")

    setup.supervisor.signal()

    assert await running == 0
    assert setup.view.events == ["ready", "stopping", "killed manager"]
    assert setup.order.read_text().split() == ["executor"]


async def test_dead_manager_ends_everything_with_its_last_lines(tmp_path: Path) -> None:
    setup = Setup(tmp_path, FAILING, OBEDIENT, probe=never_up)

    assert await setup.supervisor.run() == 1
    assert setup.view.events == ["died manager 3"]
    assert setup.view.last_lines == ["line one", "no such model"]
    assert setup.executor.exit_code is not None
    assert (tmp_path / "manager.log").read_text() == "line one\nno such model\n"


async def test_settings_that_a_child_refuses_are_wrong_usage(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "import sys; sys.exit(2)", OBEDIENT, probe=never_up)

    assert await setup.supervisor.run() == 2
    assert setup.view.events == ["died manager 2"]


async def test_executor_that_fails_before_it_was_ready_is_not_restarted(tmp_path: Path) -> None:
    setup = Setup(tmp_path, OBEDIENT, FAILING, probe=never_up)

    assert await setup.supervisor.run() == 1
    assert setup.view.events == ["died executor 3"]
    assert setup.view.last_lines == ["line one", "no such model"]
    assert setup.manager.exit_code is not None


async def test_killed_executor_is_restarted_and_the_server_is_ready_again(tmp_path: Path) -> None:
    setup = Setup(tmp_path, OBEDIENT, OBEDIENT)
    running = asyncio.create_task(setup.supervisor.run())
    for _ in range(4):
        # More often than max_restarts: becoming ready starts the count afresh.
        await setup.until("ready")
        assert setup.executor.pid is not None
        os.kill(setup.executor.pid, signal.SIGKILL)
    await setup.until("ready")

    setup.supervisor.signal()

    assert await running == 0
    assert setup.view.events == [*["ready", "restarting executor -9 0.01"] * 4, "ready", "stopping"]


async def test_executor_that_never_becomes_ready_again_ends_everything(tmp_path: Path) -> None:
    program = f"""
import os, sys
if os.path.exists(sys.argv[1] + ".second"):
    sys.exit(7)
open(sys.argv[1] + ".second", "w").close()
{OBEDIENT}
"""
    setup = Setup(tmp_path, OBEDIENT, program)
    running = asyncio.create_task(setup.supervisor.run())
    await setup.until("ready")
    assert setup.executor.pid is not None
    os.kill(setup.executor.pid, signal.SIGKILL)

    assert await running == 1
    assert setup.view.events == [
        "ready",
        "restarting executor -9 0.01",
        "restarting executor 7 0.02",
        "died executor 7",
    ]


async def test_restart_can_be_switched_off(tmp_path: Path) -> None:
    setup = Setup(tmp_path, OBEDIENT, OBEDIENT, settings=SupervisorSettings(restart_executor=False))
    running = asyncio.create_task(setup.supervisor.run())
    await setup.until("ready")
    assert setup.executor.pid is not None
    os.kill(setup.executor.pid, signal.SIGKILL)

    assert await running == 1
    assert setup.view.events == ["ready", "died executor -9"]


async def test_failing_probe_ends_everything_and_is_not_swallowed(tmp_path: Path) -> None:
    async def broken(manager: ChildProcess, executor: ChildProcess) -> Model | str:
        raise RuntimeError("bug")

    setup = Setup(tmp_path, OBEDIENT, OBEDIENT, probe=broken)

    with pytest.raises(RuntimeError, match="bug"):
        await setup.supervisor.run()
    assert setup.manager.exit_code is not None
    assert setup.executor.exit_code is not None


async def test_child_reports_its_latest_event_in_short_and_long_output_whole(tmp_path: Path) -> None:
    record = {"event": "profiled", "level": "info", "timestamp": "now", "blocks": 12, "nested": {"a": 1}}
    program = f"print('x' * 200_000 + 'ä'); print({json.dumps(record)!r}); print('partial', end='')"
    lines: list[str] = []
    spec = ChildSpec("executor", [sys.executable, "-X", "utf8", "-c", program], tmp_path / "log")
    child = ChildProcess(spec, lines.append)
    events: list[str] = []
    child._on_line = lambda line: (lines.append(line), events.append(child.latest_event))

    await child.start()
    assert await child.wait() == 0

    assert lines == ["x" * 200_000 + "ä", json.dumps(record), "partial"]
    assert events[1:] == ["profiled blocks=12", "partial"]


async def test_progress_bar_counts_as_one_line_and_shows_where_it_is(tmp_path: Path) -> None:
    program = """
import sys, time
sys.stderr.write("\\rloading 10%"); sys.stderr.flush()
sys.stderr.write("\\rloading 20%"); sys.stderr.flush()
while True: time.sleep(0.01)
"""
    child = ChildProcess(ChildSpec("executor", [sys.executable, "-c", program], tmp_path / "log"), lambda line: None)
    await child.start()
    async with asyncio.timeout(60):
        while child.latest_event != "loading 20%":  # noqa: ASYNC110 - the event has no other sign
            await asyncio.sleep(0.005)
    child.kill()
    await child.wait()

    assert child.last_lines == ["loading 20%"]
    assert (tmp_path / "log").read_bytes().decode() == "\rloading 10%\rloading 20%"


async def test_program_that_cannot_be_started_is_an_os_error(tmp_path: Path) -> None:
    child = ChildProcess(ChildSpec("manager", ["/no/such/program"], tmp_path / "log"), lambda line: None)

    with pytest.raises(OSError, match="no/such/program"):
        await child.start()
    assert await child.stop(1, asyncio.Event())
