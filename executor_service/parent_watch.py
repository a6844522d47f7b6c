"""Ends this process with the one that started it: `--exit-with-parent`.

Station: called by `__main__`; `kvplane up` is who starts services so. The parent holds the other end of standard input
and writes nothing. Whatever ends the parent, SIGKILL included, the system closes that end, and the read here returns.

Nothing to read is not the end: standard input may be non-blocking, a property of the pipe that another process can set.
Nor is a terminal that others use: a job in its background that reads is stopped with SIGTTIN, its other threads too.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import threading

__all__ = ["exit_with_parent"]

_STDIN = 0
_PAUSE_MS = 500


def exit_with_parent() -> None:
    """From now on, end at once when standard input ends: with nobody left to stop it, a slow stop may never end."""
    threading.Thread(target=_watch, name="parent-watch", daemon=True).start()


def _watch() -> None:
    # In this thread alone: a read in a terminal's background then fails with EIO and stops nothing.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
    try:
        _wait_for_end()
    finally:
        # Not by an exception or a signal: the log goes to the parent, so that every line of an orderly stop would fail.
        os._exit(1)


def _wait_for_end() -> None:
    """Reads until standard input ends, or can not be read for good.

    Raises:
        OSError: It is closed, or broken; nobody holds its other end then.
    """
    input_or_end, end = select.poll(), select.poll()
    input_or_end.register(_STDIN, select.POLLIN)
    end.register(_STDIN, 0)  # what hangs up is told unasked
    while True:
        input_or_end.poll()
        try:
            if not os.read(_STDIN, 4096):
                return
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno != errno.EIO or not os.isatty(_STDIN) or end.poll(_PAUSE_MS):
                raise
