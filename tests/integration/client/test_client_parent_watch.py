"""``--exit-with-parent`` of both services, as ``kvplane up`` relies on it: real processes on pipes and terminals."""

from __future__ import annotations

import array
import fcntl
import importlib
import inspect
import os
import pty
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest

SERVICES = ("kvmanager_service", "executor_service")
WATCH = """
import importlib, sys, threading
importlib.import_module(sys.argv[1] + ".parent_watch").exit_with_parent()
print("watching", flush=True)
threading.Event().wait()
"""
# The leader of a terminal's session, with the watching process in the terminal's background. Says what it reads there,
# then how the other changed: it was stopped, or has ended.
LEADER = """
import fcntl, os, signal, subprocess, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_IGN)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], process_group=0, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
print(sys.stdin.readline().strip(), flush=True)
_, status = os.waitpid(child.pid, os.WUNTRACED)
print(f"stopped {os.WSTOPSIG(status)}" if os.WIFSTOPPED(status) else f"ended {os.WEXITSTATUS(status)}", flush=True)
child.kill()
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program, which ends with the test at the latest."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, stdin: Any, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", *arguments]
        started.append(subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def unread(pipe: int) -> int:
    """Bytes that wait in a pipe, asked at either end."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_both_services_watch_in_the_same_way() -> None:
    first, second = (inspect.getsource(importlib.import_module(f"{name}.parent_watch")) for name in SERVICES)
    assert first == second, "one was changed without the other, which may not import it"


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("blocking", [True, False])
def test_process_outlives_an_idle_pipe_and_ends_with_it(start: Start, service: str, blocking: bool) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, blocking)
    process = start(WATCH, service, stdin=read_end)
    assert line(process.stdout) == "watching"
    for _ in range(5):
        # What was written is read, and then there is nothing to read: the next one is read only by a process that took
        # this for no end.
        os.write(write_end, b"x")
        until(lambda: unread(read_end) == 0, process)
    os.close(write_end)

    assert process.wait(60) == 1
    os.close(read_end)


@pytest.mark.parametrize("service", SERVICES)
def test_process_ends_when_the_other_end_of_a_socket_does(start: Start, service: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        process = start(WATCH, service, stdin=theirs)
        assert line(process.stdout) == "watching"
        ours.shutdown(socket.SHUT_WR)
        assert process.wait(60) == 1


@pytest.mark.parametrize("service", SERVICES)
def test_process_in_the_background_of_a_terminal_is_not_stopped_and_ends_with_the_terminal(
    start: Start, service: str
) -> None:
    master, slave = pty.openpty()
    os.write(master, b"for the foreground\n")
    leader = start(LEADER, WATCH, service, stdin=slave, start_new_session=True)
    os.close(slave)
    assert line(leader.stdout) == "watching"
    assert line(leader.stdout) == "for the foreground"
    os.close(master)

    assert line(leader.stdout) == "ended 1"
    assert leader.wait(60) == 0


@pytest.mark.parametrize("service", SERVICES)
def test_process_on_a_terminal_of_its_own_ends_at_the_end_of_file(start: Start, service: str) -> None:
    master, slave = pty.openpty()
    process = start(WATCH, service, stdin=slave, start_new_session=True)
    os.close(slave)
    assert line(process.stdout) == "watching"
    os.write(master, b"typed\n\x04")

    assert process.wait(60) == 1
    os.close(master)
