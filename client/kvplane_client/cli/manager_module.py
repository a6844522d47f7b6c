"""Becomes a command of the manager package: this process goes on as ``python -m`` of its module.

Station: called by ``replay`` and ``calibrate``. The client imports nothing of the manager; arguments, input, output,
signals and exit code are the module's own, and no process is left behind whatever ends this one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["run_module"]


def run_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by ``python -m module``."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - our own module
