"""Text that others wrote, as a terminal may be shown it: control characters written out.

Station: called by `replay` for what it quotes of a trace. The client has the same for what a server tells it.
"""

from __future__ import annotations

import re

__all__ = ["visible"]

# What a terminal obeys or a reader does not see: controls (C0, DEL, C1), marks that change the direction of text, line
# and paragraph separators; and surrogates, which cannot be written.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Write control characters out as Python does, such as the one of code 27 as a backslash and "x1b"."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
