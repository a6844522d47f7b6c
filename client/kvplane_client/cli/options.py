"""The options that several commands share, each declared once.

Station: below the commands. Typer reads the annotations.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvplane_client.types import Retention, RetentionLevel, RetentionRange

__all__ = [
    "FrequencyPenalty",
    "JsonFlag",
    "MaxTokens",
    "MinP",
    "PresencePenalty",
    "RepetitionPenalty",
    "Seed",
    "Server",
    "Stop",
    "System",
    "Temperature",
    "TopK",
    "TopP",
    "Wait",
    "parse_logit_bias",
    "parse_retention",
    "parse_token_ids",
]

_SAMPLING = "Sampling"
_STOPPING = "Stopping"
_CONNECTION = "Connection"

Server = Annotated[
    str,
    typer.Option(
        "--server", "-s", envvar="KVPLANE_SERVER", help="Manager to talk to, as host:port.", rich_help_panel=_CONNECTION
    ),
]
Wait = Annotated[
    float,
    typer.Option("--wait", min=0, help="Seconds to wait for the server to become ready.", rich_help_panel=_CONNECTION),
]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print JSON for scripts; errors too, on stderr.", rich_help_panel=_CONNECTION)
]
System = Annotated[str | None, typer.Option("--system", help="System message that opens the conversation.")]

Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", "-t", help="At least 0; 0 always takes the likeliest token. The server's default is 1.",
        rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Choose among the K likeliest tokens.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Choose among the likeliest tokens that together have probability P.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Drop tokens less likely than P times the likeliest.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Above 1 discourages tokens seen before.", rich_help_panel=_SAMPLING),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="-2 to 2, for tokens in the output.", rich_help_panel=_SAMPLING),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty", help="-2 to 2, for each time a token is in the output.", rich_help_panel=_SAMPLING
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="The same seed gives the same output.", rich_help_panel=_SAMPLING)
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", help="Most tokens to produce.", rich_help_panel=_STOPPING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="String that ends the output. May be repeated.", rich_help_panel=_STOPPING),
]


def parse_token_ids(text: str) -> list[int]:
    """Reads token ids separated by commas or spaces.

    Raises:
        typer.BadParameter: Something is not an integer, or there is none.
    """
    try:
        ids = [int(item) for item in text.replace(",", " ").split()]
    except ValueError as error:
        raise typer.BadParameter(f'expected token ids such as "1,2,3": {error}') from error
    if not ids:
        raise typer.BadParameter('expected token ids such as "1,2,3", got none')
    return ids


def parse_logit_bias(items: list[str] | None) -> dict[int, float] | None:
    """Reads ID:VALUE pairs.

    Raises:
        typer.BadParameter: An item is not such a pair.
    """
    biases: dict[int, float] = {}
    for item in items or ():
        token_id, _, value = item.partition(":")
        try:
            biases[int(token_id)] = float(value)
        except ValueError as error:
            raise typer.BadParameter(f'--logit-bias: expected ID:VALUE such as "42:-5", got {item!r}') from error
    return biases or None


def parse_retention(items: list[str] | None) -> Retention | None:
    """Reads START:STOP=PRIORITY[/SECONDS], where either end may be left out, and decode=PRIORITY[/SECONDS].

    Raises:
        typer.BadParameter: An item is neither, or a second one for decode.
    """
    ranges: list[RetentionRange] = []
    decode: RetentionLevel | None = None
    for item in items or ():
        part, _, level_text = item.partition("=")
        priority, slash, seconds = level_text.partition("/")
        start, colon, stop = part.partition(":")
        try:
            level = RetentionLevel(int(priority), float(seconds) if slash else None)
            bounds = (int(start or 0), int(stop) if stop else None) if colon else None
        except ValueError as error:
            raise _bad_retention(item) from error
        if bounds is not None:
            ranges.append(RetentionRange(level, *bounds))
        elif part == "decode" and decode is None:
            decode = level
        else:
            raise _bad_retention(item)
    return Retention(tuple(ranges), decode) if items else None


def _bad_retention(item: str) -> typer.BadParameter:
    return typer.BadParameter(
        '--retention: expected START:STOP=PRIORITY such as ":512=80" or "512:=-10/60", or once "decode=5", got '
        f"{item!r}"
    )
