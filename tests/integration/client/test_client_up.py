"""``kvplane up`` as a process, over stand-ins for the two services that follow their contract in small."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvplane_client.cli.local_server import LocalServer
from kvplane_client.cli.main import app
from typer.testing import CliRunner

from tests.certificates import make_certificate

# Serves the scripted manager; its one executor is whatever process last wrote its id beside the argument file.
MANAGER = """
import asyncio, json, os, pathlib, signal, sys
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from tests.integration.client.scripted_manager import ScriptedManager

here = pathlib.Path(os.environ["KVPLANE_TEST_FOLDER"])
(here / "manager.json").write_text(json.dumps(sys.argv[1:]))
print(json.dumps({"event": "manager_started", "level": "info"}), flush=True)

async def executors(request, context):
    file = here / "executor.id"
    found = [file.read_text()] if file.exists() else []
    return registry_pb.ListExecutorsResponse(executors=[
        registry_pb.ExecutorInfo(executor_id=name, state=registry_pb.EXECUTOR_STATE_ACTIVE) for name in found])

async def main():
    manager = ScriptedManager()
    manager.port = int(sys.argv[sys.argv.index("--port") + 1])
    manager.scripts.unary["ListExecutors"] = [executors]
    await manager.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    assert (here / "executor.id").exists() and not (here / "executor.stopped").exists(), "drains before the executor"
    (here / "manager.stopped").touch()
    await manager.stop()

asyncio.run(main())
"""
EXECUTOR = """
import json, os, pathlib, signal, sys, time

here = pathlib.Path(os.environ["KVPLANE_TEST_FOLDER"])
(here / "executor.json").write_text(json.dumps(sys.argv[1:]))
if "--broken" in sys.argv:
    print("ValueError: no such model", file=sys.stderr)
    sys.exit(1)
if "--told" in sys.argv:
    print(json.dumps({"event": "executor_load_failed", "level": "error", "error": "no such\\nmodel"}), flush=True)
    print(json.dumps({"event": "executor_stopped", "level": "info"}), flush=True)
    sys.exit(1)
def stop(*_):
    (here / "executor.stopped").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print(json.dumps({"event": "model_loaded", "level": "info", "blocks": 7}), flush=True)
(here / "executor.id.new").write_text(str(os.getpid()))
(here / "executor.id.new").rename(here / "executor.id")
while True: time.sleep(0.01)
"""


class Up:
    """A running ``kvplane up`` that tells what happens as JSON lines."""

    def __init__(self, folder: Path, *arguments: str, stand_ins: bool = True) -> None:
        self.folder = folder
        for name, program in (("kvmanager_service", MANAGER), ("executor_service", EXECUTOR)) if stand_ins else ():
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text("")
            (folder / name / "__main__.py").write_text(program)
        paths = [str(folder), str(Path(__file__).parent), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "KVPLANE_TEST_FOLDER": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvplane_client.cli", "up", "--state-dir", str(folder / "state"), *arguments],
            cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def event(self) -> dict[str, Any]:
        """The next thing that happened."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        event: dict[str, Any] = json.loads(line)
        return event

    def interrupt(self) -> tuple[int, str, str]:
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stdout, stderr

    def arguments_of(self, service: str) -> list[str]:
        arguments: list[str] = json.loads((self.folder / f"{service}.json").read_text())
        return arguments


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[Up]]:
    """What a test has started; ended after it."""
    started: list[Up] = []
    yield started
    for up in started:
        if up.process.poll() is None:
            up.process.terminate()
        up.process.communicate(timeout=60)


def alive(pid: int) -> bool:
    try:
        # One that nobody waits for, since its parent was killed, has ended too.
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"expected {what}; it did not come in 60 s"
        time.sleep(0.01)


def test_up_is_ready_then_stops_in_order_on_interrupt(tmp_path: Path, running: list[Up]) -> None:
    up = Up(
        tmp_path, "--backend", "sim", "--port", "0", "--json", "--block-size", "8", "--max-model-len", "64",
        "--num-blocks-override", "9", "--memory-limit", "1GiB", "--swap-space", "64KiB", "--max-num-seqs", "3",
        "--max-loras", "0", "--max-lora-rank", "8", "--tensor-parallel-size", "1",
        "--policy", "priority", "--preemption-mode", "swap", "--drain-seconds", "20",
        "--manager-arg=--queue-ahead=false",
        "--executor-arg=--num-threads", "--executor-arg=1",
    )  # fmt: skip
    running.append(up)

    ready = up.event()
    code, stdout, stderr = up.interrupt()

    assert ready["event"] == "ready"
    assert (ready["model"], ready["max_model_len"]) == ("tiny", 128)
    port = ready["address"].removeprefix("localhost:")
    assert (code, [json.loads(line) for line in stdout.splitlines()]) == (0, [{"event": "stopping"}]), stderr
    assert (tmp_path / "manager.stopped").exists()
    assert (tmp_path / "executor.stopped").exists()
    assert not alive(ready["manager_pid"])
    assert not alive(ready["executor_pid"])
    assert up.arguments_of("manager") == [
        "--host", "127.0.0.1", "--port", port, "--log-format", "json", "--exit-with-parent", "--max-num-seqs", "3",
        "--policy", "priority", "--preemption-mode", "swap", "--drain-timeout-s", "20.0", "--queue-ahead=false",
    ]  # fmt: skip
    assert up.arguments_of("executor") == [
        "--manager", f"localhost:{port}", "--port", "0", "--log-format", "json", "--exit-with-parent", "--backend",
        "sim", "--memory-limit", "1073741824", "--swap-space", "65536", "--num-blocks-override", "9", "--block-size",
        "8", "--max-model-len", "64", "--max-loras", "0", "--max-lora-rank", "8", "--tensor-parallel-size", "1",
        "--num-threads", "1",
    ]  # fmt: skip
    assert '"model_loaded"' in (tmp_path / "state" / "executor.log").read_text()


def test_up_restarts_a_killed_executor_and_says_when_it_serves_again(tmp_path: Path, running: list[Up]) -> None:
    up = Up(tmp_path, "--backend", "sim", "--port", "0", "--json")
    running.append(up)
    first = up.event()

    os.kill(first["executor_pid"], signal.SIGKILL)

    assert up.event() == {"event": "restarting", "child": "executor", "exit_code": -9, "pause": 1.0}
    second = up.event()
    assert (second["event"], second["manager_pid"]) == ("ready", first["manager_pid"])
    assert second["executor_pid"] != first["executor_pid"]
    assert up.interrupt()[0] == 0


@pytest.mark.parametrize("when", ["loading", "ready"])
def test_up_killed_takes_the_real_services_with_it(tmp_path: Path, running: list[Up], when: str) -> None:
    up = Up(tmp_path, "--backend", "sim", "--port", "0", "--json", stand_ins=False)
    running.append(up)
    children = psutil.Process(up.process.pid).children
    if when == "loading":
        until(lambda: len(children()) == 2, "both services to be started")
    else:
        assert up.event()["event"] == "ready"
    services = [child.pid for child in children()]

    up.process.kill()
    up.process.wait()

    assert len(services) == 2
    until(lambda: not any(map(alive, services)), "both services to end with it")


def test_up_interrupted_lets_the_real_services_stop_in_order(tmp_path: Path, running: list[Up]) -> None:
    up = Up(tmp_path, "--backend", "sim", "--port", "0", "--json", stand_ins=False)
    running.append(up)
    up.event()

    code, stdout, stderr = up.interrupt()

    assert (code, stdout, stderr) == (0, '{"event": "stopping"}\n', "")
    for service in ("manager", "executor"):
        log = (tmp_path / "state" / f"{service}.log").read_text().splitlines()
        assert json.loads(log[-1])["event"] == f"{service}_stopped"


def test_up_runs_real_services_with_keys_and_tls(
    tmp_path: Path, running: list[Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command's own key is an operator's, from the environment; the executor has one of its own."""
    made = make_certificate(tmp_path)
    root, worker = "root-key-0123456789", "worker-key-0123456789"
    key_file = tmp_path / "keys.toml"
    key_file.write_text(f'[operators]\nroot = "{root}"\n[executors]\nworker = "{worker}"')
    key_file.chmod(0o600)
    (tmp_path / "worker.key").write_text(worker)
    monkeypatch.setenv("KVPLANE_API_KEY", root)
    up = Up(
        tmp_path, "--backend", "sim", "--port", "0", "--json", "--tls-ca", str(made.certificate),
        f"--manager-arg=--api-keys={key_file}", f"--manager-arg=--tls-certificate={made.certificate}",
        f"--manager-arg=--tls-key={made.key}", f"--executor-arg=--manager-tls-ca={made.certificate}",
        f"--executor-arg=--manager-api-key-file={tmp_path / 'worker.key'}", stand_ins=False,
    )  # fmt: skip
    running.append(up)

    assert up.event()["event"] == "ready"

    code, _, stderr = up.interrupt()
    assert (code, stderr) == (0, "")
    logs = "".join(path.read_text() for path in (tmp_path / "state").glob("*.log"))
    assert root not in logs
    assert worker not in logs


def test_up_shows_why_an_executor_could_not_start(tmp_path: Path, running: list[Up]) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"GGUF" + bytes([4, 0, 0, 0]))
    up = Up(tmp_path, "--model", "./weights.gguf", "--port", "0", "--executor-arg=--broken")
    running.append(up)

    code, stdout, stderr = up.end()

    assert (code, stdout) == (1, "")
    assert "the executor has ended (exit code 1)" in stderr
    assert "ValueError: no such model" in stderr
    assert str(tmp_path / "state" / "executor.log") in stderr
    assert "Traceback" not in stderr
    arguments = up.arguments_of("executor")
    assert arguments[arguments.index("--model") + 1] == "./weights.gguf"


def test_up_tells_an_error_of_a_child_once(tmp_path: Path, running: list[Up]) -> None:
    up = Up(tmp_path, "--backend", "sim", "--port", "0", "--executor-arg=--told")
    running.append(up)

    code, _, stderr = up.end()

    assert code == 1
    told = [line for line in stderr.splitlines() if " s  executor: " not in line]
    log = tmp_path / "state" / "executor.log"
    assert told == [
        "error: executor: no such model", f"the executor has ended (exit code 1); the whole log: {log}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "/no/such/folder"], "'/no/such/folder'"),
        (["--model", "./weights"], "'./weights'"),
        (["--model", "kvmanager_service"], "*.safetensors or one .gguf file"),
        (["--policy", "nonsense"], "one of fcfs, priority, fair"),
        (["--block-size", "0"], "a whole number, 1 to 1024"),
        (["--gpu-memory-utilization", "2"], "a number, above 0 and at most 1"),
        (["--memory-limit", "much"], "a size such as"),
        (["--backend", "nonsense"], "one of "),
        (["--dtype", "int3"], "one of auto, float32"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "at most --max-num-batched-tokens (8)"),
        (["--port", "65536"], "a whole number, 0 to 65535"),
        (["--drain-seconds", "-1"], "a number, at least 0"),
    ],
)
def test_up_refuses_what_it_can_know_before_it_starts_anything(
    tmp_path: Path, running: list[Up], arguments: list[str], told: str
) -> None:
    up = Up(tmp_path, *arguments)
    running.append(up)

    code, stdout, stderr = up.end()

    assert (code, stdout) == (2, "")
    message = " ".join(stderr.replace("│", " ").split())
    assert f"expected {told}" in message or told in message, message
    assert ", got " in message
    assert arguments[0] in message
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "manager.json").exists()


def test_up_of_settings_that_a_service_refuses_exits_with_2_and_its_words(tmp_path: Path, running: list[Up]) -> None:
    up = Up(tmp_path, "--backend", "sim", "--port", "0", "--manager-arg=--watermark=2", stand_ins=False)
    running.append(up)

    code, stdout, stderr = up.end()

    assert (code, stdout) == (2, "")
    assert "the manager has ended (exit code 2)" in stderr
    assert stderr.count("--watermark: expected less than 1; got '2'") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kv-cache-dtype", "fp8"], "expected --kv-cache-dtype auto, got 'fp8'"),
        (["--tensor-parallel-size", "2"], "expected --tensor-parallel-size 1, got 2"),
        (["--executor-arg=--sim-windows=0,1"], "--sim-windows: expected 0 for full attention"),
        (["--executor-arg=--sim-eos-token-ids=32000"], "--sim-eos-token-ids: expected ids in [0, 32000), got 32000"),
        (["--executor-arg=--manager-api-key-file=/nowhere/key"], "--manager-api-key-file: expected a file with a key"),
    ],
)
def test_up_of_settings_that_the_executor_refuses_exits_with_2_and_its_words(
    tmp_path: Path, running: list[Up], arguments: list[str], told: str
) -> None:
    up = Up(tmp_path, "--backend", "sim", "--port", "0", *arguments, stand_ins=False)
    running.append(up)

    code, stdout, stderr = up.end()

    assert (code, stdout) == (2, "")
    assert "the executor has ended (exit code 2)" in stderr
    assert stderr.count(told) == 1


@pytest.mark.parametrize(
    ("backend", "missing", "advice"),
    [
        ("torch", ["transformers"], "pip install 'kvplane[executor]', or try --backend sim"),
        ("torch", ["torch", "transformers"], "pip install 'kvplane[executor]', or try --backend sim"),
        ("sim", ["numpy"], "pip install 'kvplane[sim]'"),
    ],
)
def test_up_without_the_libraries_of_its_backend_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, missing: list[str], advice: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else find_spec(name))

    result = CliRunner().invoke(
        app, ["up", "--backend", backend, "--state-dir", str(tmp_path / "state"), "--port", "0"]
    )

    assert result.exit_code == 1
    assert f"got no {' and no '.join(missing)}; {advice}" in result.stderr
    assert not (tmp_path / "state").exists()


def test_up_for_people_tells_progress_and_what_to_try(tmp_path: Path, running: list[Up]) -> None:
    up = Up(tmp_path, "--backend", "sim", "--port", "0", "--verbose")
    running.append(up)
    assert up.process.stderr is not None
    shown = ""
    while "Ctrl-C stops" not in shown:
        line = up.process.stderr.readline()
        assert line, shown
        shown += line

    up.process.send_signal(signal.SIGTERM)
    code, stdout, rest = up.end()

    assert (code, stdout) == (0, "")
    assert "executor | " in shown
    assert "model_loaded" in shown
    assert "ready on localhost:" in shown
    assert "kvplane chat --server localhost:" in shown
    assert "stopping" in rest


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "localhost:9"),
        ("0.0.0.0", "localhost:9"),
        ("::", "localhost:9"),
        ("::1", "[::1]:9"),
        ("10.0.0.7", "10.0.0.7:9"),
    ],
)
def test_address_is_one_that_can_be_reached(host: str, address: str) -> None:
    assert LocalServer(host, 9, Path()).address == address


def test_other_machines_are_told_an_address_of_this_one_where_they_may_use_it() -> None:
    assert LocalServer("127.0.0.1", 9, Path()).network_address is None
    assert LocalServer("10.0.0.7", 9, Path()).network_address is None
    for host in ("0.0.0.0", "::"):
        address = LocalServer(host, 9, Path()).network_address
        assert address is not None
        name, _, port = address.rpartition(":")
        assert (name not in ("", "0.0.0.0", "::", "localhost"), port) == (True, "9")


@pytest.mark.parametrize("host", ["192.0.2.1", "nobody.invalid"])
def test_up_refuses_a_host_that_is_not_this_machine_by_its_option(tmp_path: Path, host: str) -> None:
    """An address of RFC 5737, and a name of RFC 6761."""
    arguments = ["up", "--backend", "sim", "--port", "0", "--host", host, "--state-dir", str(tmp_path / "state")]
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 1
    told = " ".join(result.stderr.split())
    assert f"cannot listen on {host}:0" in told
    assert "as --host" in told
    assert "--port" not in told


def test_up_refuses_a_port_in_use(tmp_path: Path, running: list[Up]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = Up(tmp_path, "--backend", "sim", "--port", str(port))
        running.append(up)
        code, _, stderr = up.end()

    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in stderr
    assert not (tmp_path / "manager.json").exists()
