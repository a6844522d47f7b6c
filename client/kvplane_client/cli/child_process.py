"""One child process of ``kvplane up``: started, read, stopped.

Station: below the supervisor. A child runs in a session of its own, so that Ctrl-C in the terminal reaches the
supervisor alone and it decides the order in which the children stop. Its standard input is a pipe into which nothing is
written: when this process is gone, even by SIGKILL, the pipe ends, and a child started with --exit-with-parent with it.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["ChildProcess", "ChildSpec"]

_KEPT_LINES = 20
_READ_BYTES = 65536
_SHOWN_FIELDS = 3
_HIDDEN_FIELDS = {"event", "level", "timestamp", "logger", "executor_id"}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run.

    Attributes:
        name: What users call it.
        argv: The command line.
        log_path: The file its output is appended to.
    """

    name: str
    argv: Sequence[str]
    log_path: Path


class ChildProcess:
    """A program that can be run any number of times, one run after the other.

    Args:
        spec: What to run.
        on_line: Told of each line of its output.

    Attributes:
        spec: What it runs.
        latest_event: The last thing its log said, in short.
    """

    def __init__(self, spec: ChildSpec, on_line: Callable[[str], None]) -> None:
        self.spec = spec
        self.latest_event = ""
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the current or last run."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs or before it was started."""
        return None if self._process is None else self._process.returncode

    @property
    def last_lines(self) -> list[str]:
        """The end of its output."""
        return list(self._lines)

    async def start(self) -> None:
        """Starts a run.

        Raises:
            OSError: The program cannot be started, or its log cannot be written.
        """
        self._lines.clear()
        self.latest_event = "starting"
        log = self.spec.log_path.open("ab", buffering=0)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                # gRPC's core has log lines of its own, which are no JSON. And threads that spin while they wait cost a
                # machine that does anything else several times the compute.
                env={"GRPC_VERBOSITY": "NONE", "OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:  # a cancellation, too: the other child may have ended already
            log.close()
            raise
        assert self._process.stdout is not None, "stdout is a pipe"
        self._pump = asyncio.create_task(self._read(self._process.stdout, log), name=f"log-{self.spec.name}")

    async def wait(self) -> int:
        """Waits for the end of the run and of its output, and returns the exit code."""
        assert self._process is not None, "wait() follows start()"
        assert self._pump is not None, "wait() follows start()"
        code = await self._process.wait()
        # A grandchild may hold the pipe open; what the child itself wrote is there by now.
        await asyncio.wait({self._pump}, timeout=1.0)
        return code

    async def stop(self, grace: float, force: asyncio.Event) -> bool:
        """Asks the run to end, and kills it when it does not.

        Args:
            grace: Seconds it is given.
            force: Cuts the grace short when set.

        Returns:
            Whether it ended by itself.
        """
        if self._process is None or self._process.returncode is not None:
            return True
        self._process.terminate()
        ended = asyncio.create_task(self._process.wait())
        forced = asyncio.create_task(force.wait())
        await asyncio.wait({ended, forced}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        in_time = ended.done()
        self.kill()
        await ended
        await self.wait()
        return in_time

    def kill(self) -> None:
        """Kills the run and what it started."""
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, stream: asyncio.StreamReader, log: BinaryIO) -> None:
        """Copies the output to the log and hands out its lines."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest = ""
        with log:
            while data := await stream.read(_READ_BYTES):
                log.write(data)
                *lines, rest = (rest + decoder.decode(data)).split("\n")
                for line in lines:
                    self._take(_last_overprint(line))
                if "\r" in rest:
                    # A progress bar, which ends its line only when it is full.
                    rest = _last_overprint(rest)
                    self.latest_event = rest.strip()
        if rest:
            self._take(rest)

    def _take(self, line: str) -> None:
        self._lines.append(line)
        self.latest_event = _brief(line) or self.latest_event
        self._on_line(line)


def _last_overprint(line: str) -> str:
    """Returns what a terminal would show of a line that returns to its beginning."""
    return line.rstrip("\r").rpartition("\r")[2]


def _brief(line: str) -> str:
    """Shortens a log line to its event and a few values; a line that is not JSON speaks for itself."""
    try:
        record = json.loads(line)
    except ValueError:
        return line.strip()
    if not isinstance(record, dict) or "event" not in record:
        return line.strip()
    fields = [
        f"{key}={value}"
        for key, value in record.items()
        if key not in _HIDDEN_FIELDS and isinstance(value, (str, int, float))
    ]
    return " ".join([str(record["event"]), *fields[:_SHOWN_FIELDS]])
