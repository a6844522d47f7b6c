"""How long a request wants which of its blocks kept: ranges of its tokens, each with a priority and maybe a duration.

Station: `NewRequest` carries ranges, `RequestBook` has them checked, `Request` keeps them without gaps, and the cache
passes them on by blocks when the request gives its table back. What becomes of them is for an eviction policy to know.

A block takes what each range that reaches into it asks; so where ranges meet inside a block, the highest priority
counts while it lasts. Tokens that no range covers ask for the request's own `retention_priority`, without an end.

Source: TensorRT-LLM's KvCacheRetentionConfig, for the idea of token ranges with priorities and durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager_service.core.errors import InvalidRequestError

MIN_RETENTION_PRIORITY: Final = -100
MAX_RETENTION_PRIORITY: Final = 100
DEFAULT_RETENTION_PRIORITY: Final = 0
"""Of a block that nobody asks anything for, or nobody any more."""

END_OF_SEQUENCE: Final = 2**31 - 1
"""As a range's stop: whatever tokens are still to come."""

MAX_PROMPT_RANGES: Final = 64
MAX_RANGES: Final = MAX_PROMPT_RANGES + 1
"""One more for the tokens to be generated."""

MAX_DURATION: Final = 2_147_483.647
"""Seconds: what an int32 of milliseconds holds, 24 days."""


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """Tokens [start, stop) of a sequence, and how long their blocks are worth keeping.

    Attributes:
        start: position of the first token, at least 0.
        stop: position after the last, above start; END_OF_SEQUENCE for all that are still to come.
        priority: in [MIN_RETENTION_PRIORITY, MAX_RETENTION_PRIORITY]; higher is kept longer.
        duration: seconds for which the priority holds after each use; 0 for as long as the block is cached.
    """

    start: int
    stop: int
    priority: int
    duration: float = 0.0


def check_ranges(ranges: Sequence[RetentionRange], num_prompt_tokens: int) -> None:
    """Check what a request brings. Ranges may overlap, and be in any order.

    Raises:
        InvalidRequestError: there are too many, or a position, priority or duration is out of range.
    """
    if len(ranges) > MAX_RANGES:
        raise _invalid("retention", f"at most {MAX_RANGES} ranges", len(ranges))
    for index, one in enumerate(ranges):
        field = f"retention[{index}]"
        if not 0 <= one.start <= num_prompt_tokens:
            raise _invalid(f"{field}.start", f"a position in the prompt of {num_prompt_tokens} tokens", one.start)
        if one.stop <= one.start:
            raise _invalid(f"{field}.stop", f"more than start ({one.start})", one.stop)
        if one.stop > num_prompt_tokens and one.stop != END_OF_SEQUENCE:
            raise _invalid(f"{field}.stop", f"at most {num_prompt_tokens}, the prompt's tokens", one.stop)
        if not MIN_RETENTION_PRIORITY <= one.priority <= MAX_RETENTION_PRIORITY:
            expected = f"{MIN_RETENTION_PRIORITY} to {MAX_RETENTION_PRIORITY}"
            raise _invalid(f"{field}.priority", expected, one.priority)
        if not 0.0 <= one.duration <= MAX_DURATION:  # NaN is not in the range either
            raise _invalid(f"{field}.duration", f"0 to {MAX_DURATION} seconds", one.duration)


def without_gaps(ranges: Sequence[RetentionRange], priority: int) -> list[RetentionRange]:
    """The ranges, and where none covers a token, ranges of the given priority without an end."""
    filled = list(ranges)
    position = 0
    for one in sorted(ranges, key=_start):
        if one.start > position:
            filled.append(RetentionRange(position, one.start, priority))
        position = max(position, one.stop)
    if position < END_OF_SEQUENCE:
        filled.append(RetentionRange(position, END_OF_SEQUENCE, priority))
    return filled


def _start(one: RetentionRange) -> int:
    return one.start


def _invalid(field: str, expected: str, got: object) -> InvalidRequestError:
    return InvalidRequestError(
        "INVALID_PARAMETER", f"{field}: expected {expected}, got {got}", field=field, expected=expected, got=got
    )
