"""What options take: read, checked, and refused in one form that says what was expected, what was got and what to do.

Station: below `options` and `up_options`; typer calls these as parsers, for defaults too. The limits are those that the
contract and the services' settings state. What depends on the model is the server's to refuse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import typer

__all__ = ["MAX_INT32", "address", "integer", "number", "one_of", "parse_size", "refused", "text", "to_float", "to_int"]

MAX_INT32 = 2**31 - 1

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_HOST_AND_PORT = re.compile(r"(?:\[[^\[\]\s]+\]|[^:/\[\]\s]+):([0-9]{1,5})")
_GRPC_SCHEME = re.compile(r"(?:dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):.+")


def refused(expected: str, got: object, advice: str, *, option: str | None = None) -> typer.BadParameter:
    """Returns the error of a wrong value, which ends the command with exit code 2.

    Args:
        expected: What would have been right.
        got: What was given.
        advice: What to do.
        option: Its flag, where no parser of it is at work.
    """
    return typer.BadParameter(f"expected {expected}, got {got!r}; {advice}", param_hint=option and f"'{option}'")


def integer(least: int, most: int, *, advice: str) -> Callable[[str], int]:
    """Returns a parser of whole numbers from least to most."""
    expected = f"a whole number, {_range(least, most)}"

    def parse(given: str) -> int:
        try:
            value = to_int(given)
        except ValueError:
            raise refused(expected, given, advice) from None
        if value > most:  # only now of interest where it is what the wire can carry
            raise refused(f"a whole number, {least} to {most}", value, advice)
        if value < least:
            raise refused(expected, value, advice)
        return value

    return parse


def number(least: float, most: float = math.inf, *, advice: str, above: bool = False) -> Callable[[str], float]:
    """Returns a parser of finite numbers from least to most.

    Args:
        least: The smallest.
        most: The largest.
        advice: What to do about another.
        above: least itself is too small.
    """
    expected = f"a number, {_range(least, most, above=above)}"

    def parse(given: str) -> float:
        try:
            value = to_float(given)
        except ValueError:
            raise refused(expected, given, advice) from None
        # Written so that NaN is refused, too.
        if not least <= value <= most or math.isinf(value) or (above and value == least):
            raise refused(expected, value, advice)
        return value

    return parse


def to_int(given: str) -> int:
    """Reads a whole number in ASCII digits; Python itself takes those of any script. Raises ValueError for all else."""
    return int(_ascii(given))


def to_float(given: str) -> float:
    """The same for any number."""
    return float(_ascii(given))


def one_of(names: Callable[[], Sequence[str]], *, advice: str) -> Callable[[str], str]:
    """Returns a parser of names; which there are is asked when one is given."""

    def parse(given: str) -> str:
        known = names()
        if given not in known:
            raise refused(f"one of {', '.join(known)}", given, advice)
        return given

    return parse


def text(least: int, most: int, *, advice: str) -> Callable[[str], str]:
    """Returns a parser of texts with so many characters."""

    def parse(given: str) -> str:
        if not least <= len(given) <= most:
            raise typer.BadParameter(f"expected {least} to {most} characters, got {len(given)}; {advice}")
        return given

    return parse


def address(given: str) -> str:
    """Reads where a server is: host:port, or a gRPC target with its scheme.

    gRPC takes what has no port for port 443, and a URL for a host's name.

    Raises:
        typer.BadParameter: It is neither.
    """
    match = _HOST_AND_PORT.fullmatch(given)
    if match is None and _GRPC_SCHEME.fullmatch(given):
        return given
    if match is None or not 1 <= int(match[1]) <= 65_535:
        raise refused("host:port such as localhost:50051", given, "`kvplane up` names the address it listens on")
    return given


def parse_size(given: str) -> int:
    """Reads "80GiB", "500MB" or a number of bytes; GB is 1000**3, G and GiB are 1024**3, as for the executor.

    Raises:
        typer.BadParameter: It is no size.
    """
    match = _SIZE.fullmatch(given.strip())
    if match is None or (match[3] and not match[2]):
        raise refused('a size such as "80GiB", "500MB" or a number of bytes', given, "K, M, G and T are known")
    base = 1000 if match[4] and not match[3] else 1024
    return int(float(match[1]) * base ** _POWERS[match[2].upper()])


def _ascii(given: str) -> str:
    if not str(given).isascii():  # a default comes as the number it is
        raise ValueError(f"expected ASCII digits, got {given!r}")
    return given


def _range(least: float, most: float, *, above: bool = False) -> str:
    if above:
        return f"above {least:g}" if math.isinf(most) else f"above {least:g} and at most {most:g}"
    if math.isinf(most) or most >= MAX_INT32:
        return f"at least {least}"
    return f"{least} to {most}"
