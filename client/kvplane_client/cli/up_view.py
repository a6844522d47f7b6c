"""What ``kvplane up`` shows: a moving line while the model loads, then one line for each thing that happens.

Station: the supervisor's view. On a terminal the line moves; in a file there is a line for each new event; with
--json there is one JSON object for each thing that happened, on stdout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from kvplane_client.cli.child_process import ChildProcess
from kvplane_client.cli.output import print_json
from kvplane_client.manager_types import Model

__all__ = ["UpView"]

_EVENT_WIDTH = 100


class UpView:
    """Shows the life of a server.

    Args:
        address: Where users find it.
        console: Where people read.
        as_json: Tell scripts on stdout instead.
        clock: Seconds that never go back.
    """

    def __init__(
        self, address: str, console: Console, *, as_json: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._console = console
        self._as_json = as_json
        self._clock = clock
        self._since = clock()
        self._status: Status | None = None
        self._last_event = ""

    def line(self, child: str, text: str) -> None:
        """Shows a line of a child's log, for --verbose."""
        self._console.print(f"[cyan]{child:>8} |[/cyan] {escape(text)}")

    def error(self, child: str, text: str) -> None:
        """Shows, in whole, the error that a line of a child's log tells of; other lines show nothing."""
        record = _record(text)
        if record.get("level") != "error" or "error" not in record:
            return
        if self._as_json:
            print_json({"event": "error", "child": child, "error": record["error"]})
            return
        self._console.print(f"[red]{child}: {escape(str(record['error']))}[/red]", soft_wrap=True)

    def loading(self, manager: ChildProcess, executor: ChildProcess, missing: str) -> None:
        """Shows how far the start has come."""
        if self._as_json:
            return
        event = f"{executor.latest_event[:_EVENT_WIDTH]} ({missing[:_EVENT_WIDTH]})"
        elapsed = self._clock() - self._since
        if self._console.is_terminal:
            text = f"starting, {elapsed:.0f} s · executor: {escape(event)}"
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            self._status.update(text)
        elif event != self._last_event:
            self._console.print(f"{elapsed:6.1f} s  executor: {escape(event)}")
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
                    "model": model.name,
                    "max_model_len": model.max_model_len,
                    "manager_pid": manager.pid,
                    "executor_pid": executor.pid,
                    "seconds": round(elapsed, 3),
                }
            )
            return
        server = "" if self._address == "localhost:50051" else f" --server {self._address}"
        attempt = "chat" if model.has_chat_template else 'generate "Once upon a time" -n 50'
        if not model.has_tokenizer:
            attempt = 'generate --token-ids "1,2,3" -n 5'
        self._console.print(
            f"[bold green]ready[/bold green] on [bold]{escape(self._address)}[/bold] after {elapsed:.1f} s: "
            f"{escape(model.name)}, {model.max_model_len} tokens, {escape(model.dtype)}\n"
            f"  try    kvplane {escape(attempt + server)}\n"
            f"         kvplane stats{server}\n"
            f"  logs   {escape(str(manager.spec.log_path.parent))}\n"
            "  Ctrl-C stops",
            soft_wrap=True,
        )

    def died(self, child: ChildProcess) -> None:
        """Shows the end of a child's log."""
        self._end_status()
        name, code = child.spec.name, child.exit_code
        if self._as_json:
            print_json({"event": "died", "child": name, "exit_code": code, "last_lines": child.last_lines})
            return
        self._console.print(f"[bold red]the {name} has ended ({_ending(code)})[/bold red]; its last lines:")
        for text in child.last_lines:
            self._console.print(f"  {escape(text)}", soft_wrap=True)
        self._console.print(f"the whole log: {escape(str(child.spec.log_path))}", soft_wrap=True)

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

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _record(line: str) -> dict[str, object]:
    """Reads a log line; one that is no JSON object holds nothing."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _ending(code: int | None) -> str:
    """Says how a process ended."""
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
