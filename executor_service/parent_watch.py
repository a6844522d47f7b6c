"""Ends this process with the one that started it: `--exit-with-parent`.

Station: called by `__main__`; `kvplane up` is who starts services so. The parent holds the other end of standard input
and writes nothing. Whatever ends the parent, SIGKILL included, the system closes that end, and the read here returns.
"""

from __future__ import annotations

import os
import threading

__all__ = ["exit_with_parent"]

_STDIN = 0


def exit_with_parent() -> None:
    """From now on, end at once when standard input ends: with nobody left to stop it, a slow stop may never end."""
    threading.Thread(target=_watch, name="parent-watch", daemon=True).start()


def _watch() -> None:
    try:
        while os.read(_STDIN, 4096):
            pass
    finally:
        # Not by an exception or a signal: the log goes to the parent, so that every line of an orderly stop would fail.
        os._exit(1)
