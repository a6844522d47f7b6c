"""Request traces: three formats, one kind of request.

Station: called by `command`; the runners take what it returns. A trace has lengths and says which prompts begin alike;
the tokens themselves are made up here, the same ones each time. Requests are in the order they arrive in.

    mooncake  jsonl: timestamp (ms), input_length, output_length, hash_ids: one id per 512 tokens of the prompt,
              equal ids = equal tokens. Source: kvcache-ai/Mooncake, the FAST'25 traces.
    azure     csv: TIMESTAMP, ContextTokens, GeneratedTokens, in any order; no two prompts begin alike.
              Source: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.
    kvplane   jsonl: see docs/replay.md.
"""

from __future__ import annotations

import csv
import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvmanager_service.core.request import TOKEN_BYTES, NewRequest, StopRules
from kvmanager_service.core.retention import (
    END_OF_SEQUENCE,
    MAX_DURATION,
    MAX_RANGES,
    MAX_RETENTION_PRIORITY,
    MIN_RETENTION_PRIORITY,
    RetentionRange,
)

__all__ = ["FORMATS", "MOONCAKE_BLOCK", "TraceError", "TraceRequest", "read_trace"]

MOONCAKE_BLOCK = 512
"""Tokens per hash id."""
FIRST_UNIQUE_TOKEN = 1 << 29
"""Token ids below are those of a trace, or stand for what prompts share; from here on each belongs to one request."""
FIRST_SAMPLED_TOKEN = 1 << 30
"""From here on token ids are output."""
_MAX_LENGTH = 1 << 24
_LONGEST_QUOTE = 120
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MAX_INT32 = (1 << 31) - 1
_MAX_SECONDS = 1e12


class TraceError(Exception):
    """A trace can not be used as it is.

    Attributes:
        path, line: where; lines count from 1.
        expected, got: what.
    """

    def __init__(self, path: str, line: int, expected: str, got: str) -> None:
        super().__init__(f"{path}, line {line}: expected {expected}, got {got}")
        self.path = path
        self.line = line
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        request_id: unique in the trace.
        arrival: seconds since the trace began.
        parts: the prompt as runs of one token: pairs of token id and length.
        output_length: tokens to produce, at least 1.
        priority, retention_priority, cache_salt, tenant: as in a `GenerateRequest`.
        retention, is_isolated: as in a `NewRequest`.
    """

    request_id: str
    arrival: float
    parts: tuple[tuple[int, int], ...]
    output_length: int
    priority: int = 0
    retention_priority: int = 0
    cache_salt: str = ""
    retention: tuple[RetentionRange, ...] = ()
    tenant: str = ""
    is_isolated: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return sum(length for _, length in self.parts)

    def to_new_request(self, arrival_time: float) -> NewRequest:
        """What the core is given."""
        prompt = b"".join(token.to_bytes(TOKEN_BYTES, "little") * length for token, length in self.parts)
        return NewRequest(
            self.request_id,
            prompt,
            StopRules(max_tokens=self.output_length),
            priority=self.priority,
            cache_salt=self.cache_salt,
            arrival_time=arrival_time,
            retention_priority=self.retention_priority,
            retention=self.retention,
            tenant=self.tenant,
            is_isolated=self.is_isolated,
        )

    def with_whole_runs(self, length: int) -> TraceRequest:
        """The same with every run that many tokens long, the last one, too."""
        return replace(self, parts=tuple((token, length) for token, _ in self.parts))


class _Lines:
    """The lines of a file that are not blank, with their numbers; and the errors that name them. Read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self._source = self._read()
        self._first: str | None = None

    def _read(self) -> Iterator[str]:
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            try:
                for self.number, line in enumerate(file, start=1):
                    if line.strip():
                        yield line
            except UnicodeDecodeError as error:
                raise TraceError(str(self.path), self.number + 1, "UTF-8 text", str(error)) from None

    def first(self) -> str:
        """The first line, which is read again; empty where there is none."""
        self._first = next(self._source, None)
        return self._first or ""

    def __iter__(self) -> Iterator[str]:
        if self._first is not None:
            yield self._first
        yield from self._source

    def error(self, expected: str, got: str) -> TraceError:
        """An error of the present line."""
        if len(got) > _LONGEST_QUOTE:
            got = got[:_LONGEST_QUOTE] + "..."
        return TraceError(str(self.path), max(self.number, 1), expected, got or "nothing")


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)


class _Record:
    """One JSON object of the trace, read field by field."""

    def __init__(self, lines: _Lines, line: str) -> None:
        self._lines = lines
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise lines.error("a JSON object", f"{line.strip()!r}: {error}") from None
        if not isinstance(values, dict):
            raise lines.error("a JSON object", _shown(values))
        self.values: dict[str, Any] = values

    def only(self, names: Iterable[str]) -> None:
        """Refuse fields of other names."""
        unknown = self.values.keys() - set(names)
        if unknown:
            raise self._lines.error(f"no fields but {', '.join(names)}", ", ".join(sorted(unknown)))

    def seconds(self, name: str) -> float:
        """A number of at least 0, and at most of 30,000 years."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_SECONDS:
            raise self._lines.error(f"{name}: a number in 0 to {_MAX_SECONDS:g}", _shown(value))
        return float(value)

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """An integer in range; absent is the default, if there is one."""
        return self.checked(name, self.values.get(name, default), least, most)

    def checked(self, name: str, value: object, least: int, most: int) -> int:
        """The value, if it is an integer in range."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._lines.error(f"{name}: an integer in {least} to {most}", _shown(value))
        return value

    def items(self, name: str) -> list[Any]:
        """A list."""
        value = self.values.get(name)
        if not isinstance(value, list):
            raise self._lines.error(f"{name}: a list", _shown(value))
        return value

    def text(self, name: str) -> str:
        """A string; absent is empty."""
        value = self.values.get(name, "")
        if not isinstance(value, str):
            raise self._lines.error(f"{name}: a string", _shown(value))
        return self.unicode(name, value)

    def unicode(self, name: str, value: str) -> str:
        """The string, if it can be written as UTF-8, which half a surrogate pair can not."""
        if not _SURROGATE.search(value):
            return value
        raise self._lines.error(f"{name}: a string of whole characters, without half a surrogate pair", _shown(value))


def _read_mooncake(lines: _Lines) -> Iterator[TraceRequest]:
    for line in lines:
        record = _Record(lines, line)
        ids = [record.checked("hash_ids", item, 0, FIRST_UNIQUE_TOKEN - 1) for item in record.items("hash_ids")]
        length = record.integer("input_length", 1, _MAX_LENGTH)
        if len(ids) != -(-length // MOONCAKE_BLOCK):
            expected = f"{-(-length // MOONCAKE_BLOCK)} hash_ids for an input_length of {length}, one per 512 tokens"
            raise lines.error(expected, f"{len(ids)}")
        parts = [(item, MOONCAKE_BLOCK) for item in ids]
        parts[-1] = (ids[-1], length - (len(ids) - 1) * MOONCAKE_BLOCK)
        yield TraceRequest(
            request_id=f"line-{lines.number}",
            arrival=record.seconds("timestamp") / 1000,
            parts=tuple(parts),
            output_length=max(1, record.integer("output_length", 0, _MAX_LENGTH)),
        )


_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def _read_azure(lines: _Lines) -> Iterator[TraceRequest]:
    rows = _csv_rows(lines)
    header = next(rows, [])
    if sorted(header) != sorted(_AZURE_COLUMNS):
        raise lines.error(f"the columns {','.join(_AZURE_COLUMNS)}, in any order", ",".join(header))
    for row in rows:
        if len(row) != len(_AZURE_COLUMNS):
            raise lines.error(f"{len(_AZURE_COLUMNS)} columns", f"{len(row)}")
        cells = dict(zip(header, row, strict=True))
        try:
            moment = datetime.datetime.fromisoformat(cells["TIMESTAMP"])
        except ValueError:
            raise lines.error("TIMESTAMP: a time such as 2023-11-16 18:15:46.6805900", cells["TIMESTAMP"]) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        prompt, output = (_azure_count(lines, name, cells[name]) for name in _AZURE_COLUMNS[1:])
        yield TraceRequest(
            request_id=f"line-{lines.number}",
            arrival=moment.timestamp(),
            parts=((FIRST_UNIQUE_TOKEN + lines.number, max(1, prompt)),),
            output_length=max(1, output),
        )


def _csv_rows(lines: _Lines) -> Iterator[list[str]]:
    rows = csv.reader(lines, strict=True)
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise lines.error("comma-separated values", str(error)) from None
        if row is None:
            return
        yield row


def _azure_count(lines: _Lines, name: str, text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_LENGTH:
        raise lines.error(f"{name}: an integer in 0 to {_MAX_LENGTH}", text)
    return int(text)


_KVPLANE_FIELDS = (
    "arrival", "prompt_token_ids", "prompt_length", "prefix", "output_length", "priority", "retention_priority",
    "retention", "cache_salt", "tenant",
)  # fmt: skip


def _read_kvplane(lines: _Lines) -> Iterator[TraceRequest]:
    names: dict[str, int] = {}
    for line in lines:
        record = _Record(lines, line)
        record.only(_KVPLANE_FIELDS)
        if ("prompt_token_ids" in record.values) == ("prompt_length" in record.values):
            raise lines.error("either prompt_token_ids or prompt_length", line.strip())
        parts = _explicit(record) if "prompt_token_ids" in record.values else _made_up(lines, record, names)
        yield TraceRequest(
            request_id=f"line-{lines.number}",
            arrival=record.seconds("arrival"),
            parts=parts,
            output_length=record.integer("output_length", 1, _MAX_LENGTH),
            priority=record.integer("priority", -_MAX_INT32 - 1, _MAX_INT32, 0),
            retention_priority=record.integer("retention_priority", MIN_RETENTION_PRIORITY, MAX_RETENTION_PRIORITY, 0),
            cache_salt=record.text("cache_salt"),
            tenant=record.text("tenant"),
            retention=_retention(lines, record, sum(length for _, length in parts)),
        )


def _retention(lines: _Lines, record: _Record, prompt_length: int) -> tuple[RetentionRange, ...]:
    """Ranges as lists of start, stop (null is the end of the output), priority and, optional, seconds."""
    ranges = []
    for item in record.items("retention") if "retention" in record.values else ():
        if not isinstance(item, list) or len(item) not in (3, 4):
            raise lines.error("retention: lists of start, stop, priority and maybe seconds", _shown(item))
        start = record.checked("retention start", item[0], 0, prompt_length)
        last = END_OF_SEQUENCE if item[1] is None else prompt_length
        stop = last if item[1] is None else record.checked("retention stop", item[1], start + 1, last)
        level = record.checked("retention priority", item[2], MIN_RETENTION_PRIORITY, MAX_RETENTION_PRIORITY)
        seconds = item[3] if len(item) == 4 else 0.0
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= MAX_DURATION:
            raise lines.error(f"retention seconds: a number in 0 to {MAX_DURATION}", _shown(seconds))
        ranges.append(RetentionRange(start, stop, level, float(seconds)))
    record.checked("number of retention ranges", len(ranges), 0, MAX_RANGES)
    return tuple(ranges)


def _explicit(record: _Record) -> tuple[tuple[int, int], ...]:
    ids = record.items("prompt_token_ids")
    record.checked("number of prompt_token_ids", len(ids), 1, _MAX_LENGTH)
    return tuple((record.checked("prompt_token_ids", item, 0, FIRST_UNIQUE_TOKEN - 1), 1) for item in ids)


def _made_up(lines: _Lines, record: _Record, names: dict[str, int]) -> tuple[tuple[int, int], ...]:
    """What is named in `prefix`, each name a token of its own, then tokens that no other request has."""
    rest = record.integer("prompt_length", 1, _MAX_LENGTH)
    parts = []
    for item in record.items("prefix") if "prefix" in record.values else ():
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str):
            raise lines.error('prefix: pairs of name and length such as ["system", 512]', _shown(item))
        length = record.checked(f"length of prefix {item[0]!r}", item[1], 1, _MAX_LENGTH)
        if length > rest:
            raise lines.error("a prefix that is no longer than prompt_length", f"{length - rest} tokens more")
        parts.append((names.setdefault(record.unicode("name of a prefix", item[0]), len(names)), length))
        rest -= length
    if rest:
        parts.append((FIRST_UNIQUE_TOKEN + lines.number, rest))
    return tuple(parts)


FORMATS: dict[str, Callable[[_Lines], Iterator[TraceRequest]]] = {
    "mooncake": _read_mooncake,
    "azure": _read_azure,
    "kvplane": _read_kvplane,
}


def read_trace(path: Path, trace_format: str = "auto", limit: int = 0) -> list[TraceRequest]:
    """Read a trace.

    Args:
        path: the file.
        trace_format: a name in `FORMATS`, or "auto" to tell it by the first line.
        limit: most requests read; 0 is all.

    Returns:
        Requests in file order, the first arriving at 0 and none before another.

    Raises:
        TraceError: a line is not what the format says, or earlier than the one before it; or there is none.
        OSError: the file can not be read.
    """
    lines = _Lines(path)
    first = lines.first()
    reader = FORMATS[_guess(lines, first) if trace_format == "auto" else trace_format]
    requests: list[TraceRequest] = []
    for request in reader(lines):
        if requests and request.arrival < requests[-1].arrival:
            early = f"one {requests[-1].arrival - request.arrival:g} s earlier"
            raise lines.error("a request that arrives no earlier than the one before it; sort the trace by time", early)
        requests.append(request)
        if len(requests) == limit:
            break
    if not requests:
        raise lines.error("at least one request", "none")
    start = requests[0].arrival
    return [replace(request, arrival=request.arrival - start) for request in requests]


def _guess(lines: _Lines, first: str) -> str:
    if first.startswith(_AZURE_COLUMNS[0]) or all(name in first for name in _AZURE_COLUMNS):
        return "azure"
    if '"hash_ids"' in first:
        return "mooncake"
    if '"arrival"' in first:
        return "kvplane"
    raise lines.error(f"a first line of one of the formats {', '.join(FORMATS)}", first.strip() or "none")
