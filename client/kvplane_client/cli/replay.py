"""``kvplane replay``: starts the manager package's replay, as ``kvplane up`` starts its services.

The client imports nothing of the manager; arguments, output and exit code are passed through as they are.
"""

from __future__ import annotations

import subprocess
import sys

import typer

__all__ = ["replay"]

_MODULE = "kvmanager_service.replay"
_SIGNAL_EXIT = 128


def replay(context: typer.Context) -> None:
    """Replay a request trace through the manager's own core, on a simulated clock.

    Shows what a cache size, an eviction policy or a limit would have done. No server, no model. See --help for all.

    Example:
      kvplane replay mooncake.jsonl --num-blocks 30000 --block-size 512
    """
    child = subprocess.Popen([sys.executable, "-m", _MODULE, *context.args])  # noqa: S603 - our own module
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            continue  # Ctrl-C reaches the child as well, which says so and ends
        raise typer.Exit(code if code >= 0 else _SIGNAL_EXIT - code)
