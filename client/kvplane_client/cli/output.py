"""What the commands print: results on stdout, everything else on stderr, JSON where it was asked for.

Station: below every command. Model output goes to stdout as it is, never through rich, which would interpret it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from kvplane_client.errors import KvPlaneError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["err_console", "error_document", "out_console", "print_json", "ranges", "write_text"]

_REDIRECTED_WIDTH = 400


def out_console() -> Console:
    """Returns a console on stdout as it is now."""
    return _console(sys.stdout)


def err_console() -> Console:
    """Returns a console on stderr as it is now."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    """Fits the terminal; where there is none, lines are as wide as what they say."""
    redirected = not stream.isatty()
    return Console(
        file=stream, highlight=False, emoji=False, soft_wrap=redirected, width=_REDIRECTED_WIDTH if redirected else None
    )


def print_json(document: DataclassInstance | dict[str, Any], *, to_stderr: bool = False) -> None:
    """Prints one JSON document on one line."""
    plain = document if isinstance(document, dict) else dataclasses.asdict(document)
    stream = sys.stderr if to_stderr else sys.stdout
    stream.write(json.dumps(plain, ensure_ascii=False) + "\n")
    stream.flush()


def write_text(text: str) -> None:
    """Writes a piece of model output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def error_document(error: KvPlaneError) -> dict[str, Any]:
    """Returns the JSON form of an error."""
    return {
        "error": {
            "code": error.code.name,
            "reason": error.reason,
            "message": error.message,
            "metadata": error.metadata,
            "retry_delay": error.retry_delay,
        }
    }


def ranges(numbers: tuple[int, ...]) -> str:
    """Writes numbers in their order with runs of successors shortened: 4,5,6,2 becomes "4-6,2"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
