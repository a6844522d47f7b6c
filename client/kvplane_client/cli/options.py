"""The options that several commands share, each declared once.

Station: below the commands. Typer reads the annotations; `values` reads what is given. A metavar is short, so that help
fits 80 columns.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from kvplane_client.cli.values import MAX_INT32, address, integer, number, refused, text, to_float, to_int
from kvplane_client.types import GenerateOptions, Retention, RetentionLevel, RetentionRange

__all__ = [
    "Adapter",
    "CacheSalt",
    "Deadline",
    "FrequencyPenalty",
    "IgnoreEos",
    "IncludeStop",
    "JsonFlag",
    "LogitBias",
    "Logprobs",
    "MaxTokens",
    "MinP",
    "MinTokens",
    "PresencePenalty",
    "Priority",
    "RepetitionPenalty",
    "RetentionParts",
    "RetentionPriority",
    "Seed",
    "Server",
    "Stop",
    "StopTokenId",
    "System",
    "Temperature",
    "Tenant",
    "TopK",
    "TopP",
    "Usage",
    "Wait",
    "chosen",
    "parse_token_ids",
]

_SAMPLING = "Sampling"
_STOPPING = "Stopping"
_REQUEST = "Request"
_CONNECTION = "Connection"
# As the contract states them.
_MAX_STOPS = 16
_MAX_STOP_TOKENS = 64
_MAX_BIASES = 1024
_MAX_RANGES = 64
_MAX_SECONDS = MAX_INT32 / 1000  # as milliseconds

Server = Annotated[
    str,
    typer.Option(
        "--server", "-s", metavar="ADDR", envvar="KVPLANE_SERVER", parser=address,
        help="Manager to talk to, as host:port.", rich_help_panel=_CONNECTION,
    ),
]  # fmt: skip
Wait = Annotated[
    float,
    typer.Option(
        "--wait", metavar="SEC", parser=number(0, advice="0 does not wait"),
        help="Seconds to wait for the server to become ready.", rich_help_panel=_CONNECTION,
    ),
]  # fmt: skip
JsonFlag = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON for scripts; errors, too, on stderr.")]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="System message that opens the conversation.")
]
Usage = Annotated[bool, typer.Option("--usage", metavar="", help="Print token counts and finish reason on stderr.")]

Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", "-t", metavar="X", parser=number(0, advice="0 always takes the likeliest token, 1 is usual"),
        help="At least 0; 0 always takes the likeliest token. The server's default is 1.", rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", metavar="K", parser=integer(0, MAX_INT32, advice="0 keeps all tokens"),
        help="Choose among the K likeliest tokens; 0: all.", rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="P", parser=number(0, 1, above=True, advice="1 keeps all tokens"),
        help="Choose among the likeliest tokens that together have probability P.", rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", metavar="P", parser=number(0, 1, advice="0 drops no token"),
        help="Drop tokens less likely than P times the likeliest.", rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        "--repetition-penalty", metavar="X", parser=number(0.0625, 16, advice="1 is none"),
        help="Above 1 discourages tokens seen before; 0.0625 to 16.", rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        "--presence-penalty", metavar="X", parser=number(-2, 2, advice="0 is none"),
        help="-2 to 2, for tokens in the output.", rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        "--frequency-penalty", metavar="X", parser=number(-2, 2, advice="0 is none"),
        help="-2 to 2, for each time a token is in the output.", rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias", metavar="ID:X", help="Add X, -100 to 100, to a token's logit. Repeat for more.",
        rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", parser=integer(0, 2**64 - 1, advice="any such number does; leave it out for another"),
        help="The same seed gives the same output.", rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs", metavar="N", parser=integer(0, MAX_INT32, advice="0 reports the chosen token's alone"),
        help="Log probabilities of the chosen token and the N likeliest, with --json.", rich_help_panel=_SAMPLING,
    ),
]  # fmt: skip

MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-n", metavar="N",
        parser=integer(1, MAX_INT32, advice="a number beyond the model's length is no limit"),
        help="Most tokens to produce; the model's length ends it in any case.", rich_help_panel=_STOPPING,
    ),
]  # fmt: skip
MinTokens = Annotated[
    int | None,
    typer.Option(
        "--min-tokens", metavar="N", parser=integer(0, MAX_INT32, advice="0 is none"),
        help="Fewest tokens to produce.", rich_help_panel=_STOPPING,
    ),
]  # fmt: skip
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", parser=text(1, 256, advice="shorten it, or leave it out"),
        help="String that ends the output. Repeat for more.", rich_help_panel=_STOPPING,
    ),
]  # fmt: skip
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id", metavar="ID", parser=integer(0, MAX_INT32, advice="use ids of the served model"),
        help="Token id that ends it. Repeat for more.", rich_help_panel=_STOPPING,
    ),
]  # fmt: skip
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", metavar="", help="Go on after end-of-sequence tokens.", rich_help_panel=_STOPPING),
]
IncludeStop = Annotated[
    bool, typer.Option("--include-stop", metavar="", help="Keep the matched stop string.", rich_help_panel=_STOPPING)
]

Priority = Annotated[
    int,
    typer.Option(
        "--priority", metavar="N", parser=integer(-MAX_INT32 - 1, MAX_INT32, advice="0 is usual"),
        help="Lower is served first, under the manager's --policy priority.", rich_help_panel=_REQUEST,
    ),
]  # fmt: skip
RetentionPriority = Annotated[
    int,
    typer.Option(
        "--retention-priority", metavar="N", parser=integer(-100, 100, advice="0 is usual"),
        help="Higher stays in the cache longer, under --eviction-policy priority; -100 to 100.",
        rich_help_panel=_REQUEST,
    ),
]  # fmt: skip
RetentionParts = Annotated[
    list[str] | None,
    typer.Option(
        "--retention", metavar="PART=N",
        help="The same for a part: START:STOP=N of the prompt, or decode=N. N/SEC holds so long. Repeat for more.",
        rich_help_panel=_REQUEST,
    ),
]  # fmt: skip
CacheSalt = Annotated[
    str | None,
    typer.Option(
        "--cache-salt", metavar="TEXT", parser=text(0, 256, advice="a hash of it does, too"),
        help="Share cached blocks only with requests of the same salt.", rich_help_panel=_REQUEST,
    ),
]  # fmt: skip
Tenant = Annotated[
    str | None,
    typer.Option(
        "--tenant", metavar="NAME", parser=text(0, 256, advice="shorten it"),
        help="Whose request it is: each has its share under --policy fair.", rich_help_panel=_REQUEST,
    ),
]  # fmt: skip
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter", metavar="NAME", parser=text(0, 256, advice="`kvplane adapter list` shows the names"),
        help="Run with this LoRA adapter; see `kvplane adapter`.", rich_help_panel=_REQUEST,
    ),
]  # fmt: skip
Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline", metavar="SEC", parser=number(0, above=True, advice="leave it out for no limit"),
        help="Seconds an answer may take in all; then it ends with an error.", rich_help_panel=_REQUEST,
    ),
]  # fmt: skip


def chosen(**values: Any) -> GenerateOptions:
    """Returns the options that were given; flags that are off count as not given.

    Raises:
        typer.BadParameter: Two of them do not go together, or there are too many of one.
    """
    # The callers' names are those of the options; the request builder refuses any other.
    options = {name: value for name, value in values.items() if value is not None and value is not False}
    for name, option, most in (("stop", "--stop", _MAX_STOPS), ("stop_token_ids", "--stop-token-id", _MAX_STOP_TOKENS)):
        if len(options.get(name, ())) > most:
            raise refused(f"at most {most} of them", len(options[name]), "leave some out", option=option)
    if options.get("min_tokens", 0) > options.get("max_tokens", MAX_INT32):
        limit = f"at most --max-tokens ({options['max_tokens']})"
        raise refused(limit, options["min_tokens"], "lower it or raise the other", option="--min-tokens")
    if "logit_bias" in options:
        options["logit_bias"] = _logit_bias(options["logit_bias"])
    if "retention" in options:
        options["retention"] = _retention(options["retention"])
    return cast(GenerateOptions, options)


def parse_token_ids(given: str) -> list[int]:
    """Reads token ids separated by commas or spaces.

    Raises:
        typer.BadParameter: Something is no token id, or there is none.
    """
    expected, advice = 'token ids such as "1,2,3"', "separate them with commas or spaces"
    try:
        ids = [to_int(item) for item in given.replace(",", " ").split()]
    except ValueError:
        raise refused(expected, given, advice, option="--token-ids") from None
    if not ids or min(ids) < 0 or max(ids) > MAX_INT32:
        raise refused(expected, given, advice, option="--token-ids")
    return ids


def _logit_bias(items: list[str]) -> dict[int, float]:
    expected, advice = 'ID:X such as "42:-5", with X in -100 to 100', "-100 all but forbids a token"
    biases: dict[int, float] = {}
    for item in items:
        token_id, _, given = item.partition(":")
        try:
            key, value = to_int(token_id), to_float(given)
        except ValueError:
            raise refused(expected, item, advice, option="--logit-bias") from None
        if not (0 <= key <= MAX_INT32 and -100 <= value <= 100):
            raise refused(expected, item, advice, option="--logit-bias")
        biases[key] = value
    if len(biases) > _MAX_BIASES:
        raise refused(f"at most {_MAX_BIASES} of them", len(biases), "leave some out", option="--logit-bias")
    return biases


def _retention(items: list[str]) -> Retention:
    """Reads START:STOP=PRIORITY[/SECONDS], where either end may be left out, and decode=PRIORITY[/SECONDS]."""
    ranges: list[RetentionRange] = []
    decode: RetentionLevel | None = None
    for item in items:
        part, _, level = item.partition("=")
        start, colon, stop = part.partition(":")
        if colon:
            ranges.append(RetentionRange(_retention_level(level, item), *_retention_bounds(start, stop, item)))
        elif part == "decode":
            if decode is not None:
                raise refused("decode= once", item, "leave one out", option="--retention")
            decode = _retention_level(level, item)
        else:
            raise _bad_retention(item)
    if len(ranges) > _MAX_RANGES:
        raise refused(f"at most {_MAX_RANGES} ranges", len(ranges), "leave some out", option="--retention")
    return Retention(tuple(ranges), decode)


def _retention_bounds(start: str, stop: str, item: str) -> tuple[int, int | None]:
    try:
        first, end = to_int(start or "0"), to_int(stop or str(MAX_INT32))
    except ValueError:
        raise _bad_retention(item) from None
    if not 0 <= first < end <= MAX_INT32:
        raise _bad_retention(item)
    return first, end if stop else None


def _retention_level(level: str, item: str) -> RetentionLevel:
    priority, slash, seconds = level.partition("/")
    try:
        value, duration = to_int(priority), to_float(seconds) if slash else None
    except ValueError:
        raise _bad_retention(item) from None
    # Written so that NaN is refused, too.
    if not -100 <= value <= 100 or not (duration is None or 0 < duration <= _MAX_SECONDS):
        raise _bad_retention(item)
    return RetentionLevel(value, duration)


def _bad_retention(item: str) -> typer.BadParameter:
    return refused(
        "START:STOP=PRIORITY or decode=PRIORITY, with a priority in -100 to 100 and maybe /SECONDS above 0 after it",
        item,
        'such as ":512=80", "512:=-10/60" or "decode=5"',
        option="--retention",
    )
