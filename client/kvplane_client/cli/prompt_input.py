"""A prompt, or a prefix of prompts, as commands are given it: an argument, ids, or standard input.

Station: below `generate` and `pins`.
"""

from __future__ import annotations

import sys

import typer

from kvplane_client.cli import options as opt

__all__ = ["ids_or_text"]


def ids_or_text(given: str | None, token_ids: str | None, *, name: str, beside: str, example: str) -> str | list[int]:
    """Returns what --token-ids says, or else the argument, or standard input for "-" and for no argument.

    Args:
        given: The argument.
        token_ids: What --token-ids says; None for no such option.
        name: What the command calls its argument.
        beside: What goes with text alone, and was given; empty for nothing.
        example: A command line that is right.

    Raises:
        typer.BadParameter: Both are given, or neither, or the text is empty.
    """
    if token_ids is not None:
        if given is not None or beside:
            what = " and ".join(part for part in (name if given is not None else "", beside) if part)
            raise typer.BadParameter(
                f"expected either --token-ids or text, got both; leave out {what}, or --token-ids",
                param_hint="'--token-ids'",
            )
        return opt.parse_token_ids(token_ids)
    if given is None and sys.stdin.isatty():
        raise typer.BadParameter(f"expected a {name}, or text on stdin, got neither; try: {example}")
    text = sys.stdin.read() if given in (None, "-") else given
    if not text:
        raise typer.BadParameter(f"expected a {name} of at least one character, got an empty one; try: {example}")
    return text
