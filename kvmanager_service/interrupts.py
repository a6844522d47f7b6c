"""Ctrl-C while a command's modules are imported: the process ends with 130 then, as it does later, without a traceback.

Station: called by `__main__` of `replay` and `calibration`, before they import what they run. Imports next to nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_interrupts"]

_INTERRUPTED = 130


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """Let SIGINT end the process within, where it would raise KeyboardInterrupt; one that is ignored stays so."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
