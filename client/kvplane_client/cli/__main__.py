"""The ``kvplane`` command's process: ``python -m kvplane_client.cli``, or the console script.

Importing a command line takes most of a second, in which Ctrl-C has nobody to tell: it ends the process with 130 then,
as it does later, and without a traceback of imports. What is imported here before that is small.
"""

from __future__ import annotations

import os
import signal

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and end the process with its code."""
    # Whoever started this may have SIGINT ignored, as a shell has for what runs in the background: so it stays.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from kvplane_client.cli.main import app  # noqa: PLC0415 - under the handler

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app(prog_name="kvplane")


if __name__ == "__main__":
    main()
