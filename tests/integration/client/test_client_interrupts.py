"""Ctrl-C before a command has begun, and what ends a command that runs the manager's modules: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED_WHILE_IMPORTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()\n"


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("kvplane_client.cli", "grpc"),
        ("kvplane_client.cli", "typer"),
        ("kvmanager_service.replay", "rich"),
        ("kvmanager_service.calibration", "rich"),
    ],
)
def test_ctrl_c_while_a_command_is_imported_ends_it_with_130_and_no_traceback(
    tmp_path: Path, module: str, imported: str
) -> None:
    (tmp_path / f"{imported}.py").write_text(INTERRUPTED_WHILE_IMPORTED)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", module, "stats"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_sigint_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nos._exit(7)\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *sys.path])
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "kvplane_client.cli", "stats"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr


def test_sigterm_to_a_command_of_the_manager_leaves_nothing_behind(tmp_path: Path) -> None:
    """The replay reads a pipe that nobody writes to; all that could hold its other end open is the replay itself."""
    trace = tmp_path / "trace.jsonl"
    os.mkfifo(trace)
    arguments = ["replay", str(trace), "--num-blocks", "9"]
    process = subprocess.Popen([sys.executable, "-m", "kvplane_client.cli", *arguments], stdout=subprocess.PIPE)
    with trace.open("wb", buffering=0) as writer:  # waits for who reads
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        with pytest.raises(BrokenPipeError):
            writer.write(b"\n")
    process.communicate(timeout=60)
