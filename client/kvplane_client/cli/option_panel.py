"""Options as `options`, `up_options` and commands declare them, each kind of value in one place.

Station: between `values`, which reads what is given, and typer, which reads the annotations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from kvplane_client.cli.values import MAX_INT32, integer, number, one_of, text

__all__ = ["Panel"]


@dataclass(frozen=True, slots=True)
class Panel:
    """Options that the help shows together.

    Each method makes what ``Annotated`` takes beside the type. ``usage`` is the option as the help shows it, its flags
    and then what it takes: ``--max-tokens -n N``; short, so that help fits 80 columns. ``about`` says what it does,
    and ``advice`` what to do about a wrong value.

    Attributes:
        name: The panel's; None is that of all options that have no other.
    """

    name: str | None = None

    def option(
        self, usage: str, about: str, *, parser: Callable[[str], Any] | None = None, envvar: str | None = None
    ) -> Any:
        """One of any kind; without something that it takes, one that is given or not."""
        words = usage.split()
        flags = [word for word in words if word.startswith("-")]
        takes = " ".join(words[len(flags) :])
        return typer.Option(*flags, metavar=takes, help=about, parser=parser, envvar=envvar, rich_help_panel=self.name)

    def integer(self, usage: str, about: str, *, least: int, most: int = MAX_INT32, advice: str) -> Any:
        """A whole number from least to most."""
        return self.option(usage, about, parser=integer(least, most, advice=advice))

    def number(
        self, usage: str, about: str, *, least: float = 0, most: float = math.inf, above: bool = False, advice: str
    ) -> Any:
        """A number from least to most; above: least itself is too small."""
        return self.option(usage, about, parser=number(least, most, advice=advice, above=above))

    def text(self, usage: str, about: str, *, least: int = 0, most: int = 256, advice: str) -> Any:
        """A text of least to most characters."""
        return self.option(usage, about, parser=text(least, most, advice=advice))

    def one_of(self, usage: str, about: str, names: Callable[[], Sequence[str]] | Sequence[str], advice: str) -> Any:
        """One of these names; a function is asked for them when one is given."""
        known = names if callable(names) else lambda: names
        return self.option(usage, about, parser=one_of(known, advice=advice))
