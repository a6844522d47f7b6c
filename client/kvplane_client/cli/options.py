"""The options that several commands share, each declared once.

Station: below the commands. Typer reads the annotations; `values` reads what is given. A metavar is short, so that help
fits 80 columns.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer

from kvplane_client.cli.option_panel import Panel
from kvplane_client.cli.values import MAX_INT32, address, refused, to_float, to_int
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

_GENERAL = Panel()
_SAMPLING = Panel("Sampling")
_STOPPING = Panel("Stopping")
_REQUEST = Panel("Request")
_CONNECTION = Panel("Connection")
# As the contract states them.
_MAX_STOPS = 16
_MAX_STOP_TOKENS = 64
_MAX_BIASES = 1024
_MAX_RANGES = 64
_MAX_SECONDS = MAX_INT32 / 1000  # as milliseconds

Server = Annotated[
    str,
    _CONNECTION.option(
        "--server -s ADDR", "Manager to talk to, as host:port.", parser=address, envvar="KVPLANE_SERVER"
    ),
]
Wait = Annotated[
    float, _CONNECTION.number("--wait SEC", "Seconds to wait for the server to become ready.", advice="0 does not wait")
]
JsonFlag = Annotated[bool, _GENERAL.option("--json", "Print JSON for scripts; errors, too, on stderr.")]
System = Annotated[str | None, _GENERAL.option("--system TEXT", "System message that opens the conversation.")]
Usage = Annotated[bool, _GENERAL.option("--usage", "Print token counts and finish reason on stderr.")]

Temperature = Annotated[
    float | None,
    _SAMPLING.number(
        "--temperature -t X",
        "At least 0; 0 always takes the likeliest token. The server's default is 1.",
        advice="0 always takes the likeliest token, 1 is usual",
    ),
]
TopK = Annotated[
    int | None,
    _SAMPLING.integer(
        "--top-k K", "Choose among the K likeliest tokens; 0: all.", least=0, advice="0 keeps all tokens"
    ),
]
TopP = Annotated[
    float | None,
    _SAMPLING.number(
        "--top-p P",
        "Choose among the likeliest tokens that together have probability P.",
        most=1,
        above=True,
        advice="1 keeps all tokens",
    ),
]
MinP = Annotated[
    float | None,
    _SAMPLING.number(
        "--min-p P", "Drop tokens less likely than P times the likeliest.", most=1, advice="0 drops no token"
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    _SAMPLING.number(
        "--repetition-penalty X",
        "Above 1 discourages tokens seen before; 0.0625 to 16.",
        least=0.0625,
        most=16,
        advice="1 is none",
    ),
]
PresencePenalty = Annotated[
    float | None,
    _SAMPLING.number(
        "--presence-penalty X", "-2 to 2, for tokens in the output.", least=-2, most=2, advice="0 is none"
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    _SAMPLING.number(
        "--frequency-penalty X",
        "-2 to 2, for each time a token is in the output.",
        least=-2,
        most=2,
        advice="0 is none",
    ),
]
LogitBias = Annotated[
    list[str] | None, _SAMPLING.option("--logit-bias ID:X", "Add X, -100 to 100, to a token's logit. Repeat for more.")
]
Seed = Annotated[
    int | None,
    _SAMPLING.integer(
        "--seed N",
        "The same seed gives the same output.",
        least=0,
        most=2**64 - 1,
        advice="any such number does; leave it out for another",
    ),
]
Logprobs = Annotated[
    int | None,
    _SAMPLING.integer(
        "--logprobs N",
        "Log probabilities of the chosen token and the N likeliest, with --json.",
        least=0,
        advice="0 reports the chosen token's alone",
    ),
]

MaxTokens = Annotated[
    int | None,
    _STOPPING.integer(
        "--max-tokens -n N",
        "Most tokens to produce; the model's length ends it in any case.",
        least=1,
        advice="a number beyond the model's length is no limit",
    ),
]
MinTokens = Annotated[
    int | None, _STOPPING.integer("--min-tokens N", "Fewest tokens to produce.", least=0, advice="0 is none")
]
Stop = Annotated[
    list[str] | None,
    _STOPPING.text(
        "--stop TEXT", "String that ends the output. Repeat for more.", least=1, advice="shorten it, or leave it out"
    ),
]
StopTokenId = Annotated[
    list[int] | None,
    _STOPPING.integer(
        "--stop-token-id ID", "Token id that ends it. Repeat for more.", least=0, advice="use ids of the served model"
    ),
]
IgnoreEos = Annotated[bool, _STOPPING.option("--ignore-eos", "Go on after end-of-sequence tokens.")]
IncludeStop = Annotated[bool, _STOPPING.option("--include-stop", "Keep the matched stop string.")]

Priority = Annotated[
    int,
    _REQUEST.integer(
        "--priority N",
        "Lower is served first, under the manager's --policy priority.",
        least=-MAX_INT32 - 1,
        advice="0 is usual",
    ),
]
RetentionPriority = Annotated[
    int,
    _REQUEST.integer(
        "--retention-priority N",
        "Higher stays in the cache longer, under --eviction-policy priority; -100 to 100.",
        least=-100,
        most=100,
        advice="0 is usual",
    ),
]
RetentionParts = Annotated[
    list[str] | None,
    _REQUEST.option(
        "--retention PART=N",
        "The same for a part: START:STOP=N of the prompt, or decode=N. N/SEC holds so long. Repeat for more.",
    ),
]
CacheSalt = Annotated[
    str | None,
    _REQUEST.text(
        "--cache-salt TEXT", "Share cached blocks only with requests of the same salt.", advice="a hash of it does, too"
    ),
]
Tenant = Annotated[
    str | None,
    _REQUEST.text(
        "--tenant NAME",
        "Whose request it is: its share under --policy fair, its own cache with --isolate-tenants.",
        advice="shorten it",
    ),
]
Adapter = Annotated[
    str | None,
    _REQUEST.text(
        "--adapter NAME",
        "Run with this LoRA adapter; see `kvplane adapter`.",
        advice="`kvplane adapter list` shows the names",
    ),
]
Deadline = Annotated[
    float | None,
    _REQUEST.number(
        "--deadline SEC",
        "Seconds an answer may take in all; then it ends with an error.",
        above=True,
        advice="leave it out for no limit",
    ),
]


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
    if not ids:
        raise refused(expected, given, advice, option="--token-ids")
    for token_id in ids:
        if not 0 <= token_id <= MAX_INT32:
            advice = "the model's are below its vocab_size: `kvplane model info`"
            raise refused(f"token ids in 0 to {MAX_INT32}", token_id, advice, option="--token-ids")
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
        expected = f"START below STOP, both in 0 to {MAX_INT32}, in START:STOP=PRIORITY"
        raise refused(expected, item, 'such as ":512=80" or "512:=-10/60"', option="--retention")
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
