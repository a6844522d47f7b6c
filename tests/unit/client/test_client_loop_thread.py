"""The loop of the synchronous clients: what a fork leaves of it, and that it ends with the interpreter.

Each case is a process of its own: a fork, or the end, of the one that runs the tests would be another's business.
"""

from __future__ import annotations

import subprocess
import sys

FORKED = """
import os, signal, sys
from kvplane_client._loop_thread import Calls
from kvplane_client.errors import FailedPreconditionError

async def answer():
    return 42

calls = Calls()
assert calls.wait(answer) == 42
pid = os.fork()
if pid == 0:
    signal.alarm(10)  # what waits for ever is killed
    try:
        calls.wait(answer)
    except FailedPreconditionError as error:
        print(error, flush=True)
    calls.close()
    print(Calls().wait(answer), flush=True)
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert calls.wait(answer) == 42, "the parent's goes on"
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""

BLOCKED = """
import threading, time
from kvplane_client import _loop_thread

async def block():
    blocks.set()
    time.sleep(3_600)

_loop_thread.END_TIMEOUT_S = 0.01
blocks = threading.Event()
threading.Thread(target=_loop_thread.Calls().wait, args=(block,), daemon=True).start()
blocks.wait()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "default::ResourceWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_calls_made_before_a_fork_are_refused_in_the_child_and_closed_there() -> None:
    done = run(FORKED)
    assert done.returncode == 0, done.stderr
    refusal, answer = done.stdout.splitlines()
    assert "from before os.fork: make another in the child" in refusal
    assert answer == "42"


def test_end_of_the_interpreter_waits_for_no_call_for_ever() -> None:
    done = run(BLOCKED)
    assert done.returncode == 0, done.stderr
    assert "calls did not end within" in done.stderr
