"""What ``kvplane up`` shows: a moving line while the model loads, then one line for each thing that happens.

Station: the supervisor's view. On a terminal the line moves; in a file there is a line for each new event; with
--json there is one JSON object for each thing that happened, on stdout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.status import Status

from kvplane_client.cli.child_process import ChildProcess
from kvplane_client.cli.output import escaped, print_json
from kvplane_client.manager_types import Model

__all__ = ["UpView"]

_EVENT_WIDTH = 100
_GIB = 1024**3
# Of the executor's start, as its log says it.
_STARTUP_PARTS = ("libraries", "model", "memory_profile", "kv_cache")


class UpView:
    """Shows the life of a server.

    Args:
        address: Where users of this machine find it.
        network_address: Where others do; None where they can not.
        console: Where people read.
        as_json: Tell scripts on stdout instead.
        verbose: Show the children's logs, too.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        address: str,
        network_address: str | None,
        console: Console,
        *,
        as_json: bool,
        verbose: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._network_address = network_address
        self._console = console
        self._as_json = as_json
        self._verbose = verbose
        self._clock = clock
        self._since = clock()
        self._status: Status | None = None
        self._last_event = ""
        # The last error that each child told of: its end need not repeat it.
        self._told: dict[str, str] = {}
        self._memory: dict[str, Any] = {}
        self._startup: dict[str, float] = {}

    def line(self, child: str, text: str) -> None:
        """Takes a line of a child's log.

        An error it tells of is shown, in whole. Of other lines --verbose shows all, and what the executor says of its
        memory and of its start is kept for the ready line.
        """
        record = _record(text)
        if record.get("event") == "memory_profile":
            self._memory = record
        if record.get("event") == "startup":
            self._startup = {name: record[name] for name in _STARTUP_PARTS if isinstance(record.get(name), int | float)}
        is_error = record.get("level") == "error" and "error" in record
        if self._verbose:
            self._console.print(f"[cyan]{child:>8} |[/cyan] {escaped(text, as_lines=True)}")
        elif is_error:
            self._told[child] = text
            # One line: what is in it was written by others, over several.
            message = " ".join(str(record["error"]).split())
            self._end_status()
            if self._as_json:
                print_json({"event": "error", "child": child, "error": message})
            else:
                self._console.print(f"[bold red]error:[/bold red] {child}: {escaped(message)}", soft_wrap=True)

    def loading(self, manager: ChildProcess, executor: ChildProcess, missing: str) -> None:
        """Shows how far the start has come."""
        if self._as_json or self._has_told(executor):
            return
        event = f"{executor.latest_event[:_EVENT_WIDTH]} ({missing[:_EVENT_WIDTH]})"
        elapsed = self._clock() - self._since
        if self._console.is_terminal:
            text = f"starting, {elapsed:.0f} s · executor: {escaped(event)}"
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            self._status.update(text)
        elif event != self._last_event:
            self._console.print(f"{elapsed:6.1f} s  executor: {escaped(event)}")
        self._last_event = event

    def ready(self, model: Model, manager: ChildProcess, executor: ChildProcess) -> None:
        """Shows where the server is and what to try."""
        self._end_status()
        elapsed = self._clock() - self._since
        if self._as_json:
            print_json(
                {
                    "event": "ready",
                    "address": self._address,
                    "network_address": self._network_address,
                    "model": model.name,
                    "max_model_len": model.max_model_len,
                    "kv_bytes": self._kv_bytes,
                    "manager_pid": manager.pid,
                    "executor_pid": executor.pid,
                    "seconds": round(elapsed, 3),
                    "executor_seconds": self._startup,
                }
            )
            return
        server = "" if self._address == "localhost:50051" else f" --server {self._address}"
        attempt = "chat" if model.has_chat_template else 'generate "Once upon a time" -n 50'
        if not model.has_tokenizer:
            attempt = 'generate --token-ids "1,2,3" -n 5'
        self._console.print(
            f"[bold green]ready[/bold green] on [bold]{escaped(self._address)}[/bold] after {elapsed:.1f} s: "
            f"{escaped(model.name)}, {model.max_model_len} tokens, {escaped(model.dtype)}",
            soft_wrap=True,
        )
        for name, value in (
            ("try", f"kvplane {attempt}{server}"),
            ("", f"kvplane stats{server}"),
            ("network", self._network()),
            ("memory", self._taken()),
            ("start", self._start_parts()),
            ("logs", str(manager.spec.log_path.parent)),
        ):
            if value:
                self._console.print(f"  {name:<7} {escaped(value, as_lines=True)}", soft_wrap=True)
        self._console.print("  Ctrl-C stops")

    def _network(self) -> str:
        if self._network_address is None:
            return ""
        return f"kvplane stats --server {self._network_address} on other machines; nobody is asked for a password"

    @property
    def _kv_bytes(self) -> int | None:
        """Bytes of the KV cache; None where the executor's log does not say, as with the sim backend."""
        blocks, size = self._memory.get("num_blocks"), self._memory.get("bytes_per_block")
        return blocks * size if isinstance(blocks, int) and isinstance(size, int) else None

    def _taken(self) -> str:
        """Says what memory the KV cache takes, and which flags change that."""
        if self._kv_bytes is None:
            return ""
        blocks, tokens = self._memory["num_blocks"], self._memory.get("block_size")
        steps = self._memory.get("max_num_batched_tokens")
        return (
            f"{self._kv_bytes / _GIB:.1f} GiB of KV cache, {blocks} blocks of {tokens} tokens; --memory-limit SIZE "
            f"takes less\n          steps of {steps} tokens at most: --max-num-batched-tokens N"
        )

    def _start_parts(self) -> str:
        """Says what the executor's start took its time for."""
        return ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in self._startup.items())

    def died(self, child: ChildProcess) -> None:
        """Shows the end of a child's log."""
        self._end_status()
        name, code = child.spec.name, child.exit_code
        if self._as_json:
            print_json({"event": "died", "child": name, "exit_code": code, "last_lines": child.last_lines})
            return
        ended = f"[bold red]the {name} has ended ({_ending(code)})[/bold red]"
        if self._verbose or self._has_told(child):
            self._console.print(f"{ended}; the whole log: {escaped(str(child.spec.log_path))}", soft_wrap=True)
            return
        self._console.print(f"{ended}; its last lines:")
        for text in child.last_lines:
            self._console.print(f"  {escaped(text, as_lines=True)}", soft_wrap=True)
        self._console.print(f"the whole log: {escaped(str(child.spec.log_path))}", soft_wrap=True)

    def restarting(self, child: ChildProcess, pause: float) -> None:
        """Shows that a child is started anew."""
        self._end_status()
        self._since = self._clock()
        if self._as_json:
            document = {"child": child.spec.name, "exit_code": child.exit_code, "pause": pause}
            print_json({"event": "restarting", **document})
            return
        self._console.print(
            f"[yellow]the {child.spec.name} has ended ({_ending(child.exit_code)})[/yellow]; restart in {pause:.1f} s"
        )

    def stopping(self) -> None:
        """Shows that the server stops."""
        self._end_status()
        if self._as_json:
            print_json({"event": "stopping"})
            return
        self._console.print("stopping; running requests may finish (Ctrl-C again kills)")

    def killed(self, child: ChildProcess) -> None:
        """Shows that a child was killed."""
        if self._as_json:
            print_json({"event": "killed", "child": child.spec.name})
            return
        self._console.print(f"[yellow]the {child.spec.name} did not stop in time and was killed[/yellow]")

    def _has_told(self, child: ChildProcess) -> bool:
        """Whether the end of its log is an error that was shown already."""
        return self._told.get(child.spec.name) in child.last_lines

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _record(line: str) -> dict[str, Any]:
    """Reads a log line; one that is no JSON object holds nothing."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _ending(code: int | None) -> str:
    """Says how a process ended."""
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
