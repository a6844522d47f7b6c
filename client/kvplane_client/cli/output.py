"""What the commands print: results on stdout, everything else on stderr, JSON where it was asked for.

Station: below every command. Model output goes to stdout as it is, never through rich, which would interpret it, and
control characters too: it is what was asked for, and a pipe wants it whole. Everything else that others have named or
written goes through `escaped` or `visible`, since a terminal obeys what it is shown.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.markup import escape

from kvplane_client.errors import KvPlaneError
from kvplane_client.kv_events import KvBlockKeys

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "err_console",
    "error_document",
    "escaped",
    "keys_told",
    "out_console",
    "print_json",
    "ranges",
    "visible",
    "write_text",
]

_REDIRECTED_WIDTH = 400
# What a terminal obeys or a reader does not see: controls (C0, DEL, C1), marks that change the direction of text, line
# and paragraph separators; and surrogates, which cannot be written.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


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
    """Prints one JSON document on one line, with control characters in JSON's own escapes."""
    plain = document if isinstance(document, dict) else dataclasses.asdict(document)
    stream = sys.stderr if to_stderr else sys.stdout
    text = json.dumps(plain, ensure_ascii=False)  # escapes C0 alone
    stream.write(_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
    stream.flush()


def write_text(text: str) -> None:
    """Writes a piece of model output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def keys_told(keys: KvBlockKeys) -> str:
    """Tells in a line whom a first block is shared with: its tenant, salt and adapter, as far as it has them."""
    told = {"salt": keys.cache_salt, "adapter": keys.lora_id, "revision": keys.lora_revision}
    tenant = [] if keys.tenant is None else [f"tenant={visible(keys.tenant)}"]
    return " ".join([*tenant, *(f"{name}={visible(value)}" for name, value in told.items() if value)])


def visible(text: str, *, as_lines: bool = False) -> str:
    """Writes control characters out as Python does, such as the one of code 27 as a backslash and "x1b".

    Args:
        text: What somebody else has named or written.
        as_lines: Line feeds and tabs stay as they are, as a message may have them; a name may not.
    """

    def written(match: re.Match[str]) -> str:
        character = match[0]
        return character if as_lines and character in "\n\t" else character.encode("unicode_escape").decode("ascii")

    return _CONTROL.sub(written, text)


def escaped(text: str, *, as_lines: bool = False) -> str:
    """The same for a console: what rich would take for markup is text, too."""
    return escape(visible(text, as_lines=as_lines))


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
