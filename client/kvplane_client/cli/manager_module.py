"""Runs a command of the manager package as a process of its own, as ``kvplane up`` starts its services.

Station: called by ``replay`` and ``calibrate``. The client imports nothing of the manager; arguments, output and exit
code are passed through as they are.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

__all__ = ["run_module"]

_SIGNAL_EXIT = 128


def run_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """Run ``python -m module`` to its end. Raises typer.Exit with its exit code, or 128 and its signal."""
    child = subprocess.Popen([sys.executable, "-m", module, *arguments])  # noqa: S603 - our own module
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            continue  # Ctrl-C reaches the child as well, which says so and ends
        raise typer.Exit(code if code >= 0 else _SIGNAL_EXIT - code)
