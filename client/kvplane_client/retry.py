"""When a failed call is tried again, and when no longer.

Station: below the calls of the client, above nothing but the clock. Only UNAVAILABLE is ever tried again: the contract
says of every other code that a new attempt does not help, and of RESOURCE_EXHAUSTED that the caller should decide
(``error.retry_delay`` says when).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvplane_client.errors import InvalidArgumentError, KvPlaneError, UnavailableError

__all__ = ["NO_RETRY", "Deadline", "RetryListener", "RetryPolicy", "RetryState"]

RetryListener = Callable[[KvPlaneError, float], None]
"""Called before each pause with the error that caused it and the pause in seconds."""

_NO_LIMIT = 1e9
"""Seconds, 31 years. Far beyond it gRPC's arithmetic overflows, and a call with so much time would end at once."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How persistently UNAVAILABLE is answered with a new attempt.

    The limits count from the last progress: a stream that delivered a token since its last break starts afresh, so a
    long answer survives any number of restarts that are each short enough.

    Attributes:
        max_attempts: Attempts in a row without progress, the first included. At least 1, which never retries.
        max_elapsed: Seconds in a row without progress after which no new attempt starts. Above 0.
        initial_backoff: The first pause, in seconds. At least 0.
        multiplier: Each pause is this many times the one before. At least 1.
        max_backoff: The longest pause, in seconds, before jitter. At least initial_backoff.
        jitter: Each pause is lengthened or shortened at random by up to this share of it. In [0, 1].

    Raises:
        ValueError: A value is out of its range.
    """

    max_attempts: int = 10
    max_elapsed: float = 60.0
    initial_backoff: float = 0.1
    multiplier: float = 2.0
    max_backoff: float = 5.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        checks = (
            (self.max_attempts >= 1, "max_attempts", "at least 1"),
            (self.max_elapsed > 0, "max_elapsed", "above 0"),
            (self.initial_backoff >= 0, "initial_backoff", "at least 0"),
            (self.multiplier >= 1, "multiplier", "at least 1"),
            (self.max_backoff >= self.initial_backoff, "max_backoff", f"at least {self.initial_backoff=}"),
            (0 <= self.jitter <= 1, "jitter", "in [0, 1]"),
        )
        for holds, name, expected in checks:
            if not holds:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    def backoff(self, failures: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
        """Returns the pause after this many failures in a row, in seconds.

        Args:
            failures: Failures in a row, at least 1.
            uniform: Draws the jitter from an interval.
        """
        # The exponent is capped so that a policy with very many attempts cannot overflow a float.
        plain = min(self.initial_backoff * self.multiplier ** min(failures - 1, 64), self.max_backoff)
        return plain * (1 + uniform(-self.jitter, self.jitter))


NO_RETRY = RetryPolicy(max_attempts=1)
"""Fails at the first UNAVAILABLE."""


class Deadline:
    """A moment after which a call, all its attempts together, must have ended.

    Args:
        seconds: From now; None means never, and so does what no process lives for.

    Raises:
        InvalidArgumentError: It is not a number.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        if seconds is not None and math.isnan(seconds):
            raise InvalidArgumentError(
                f"deadline or timeout: expected seconds, got {seconds}; None sets no limit",
                metadata={"parameter": "deadline"},
            )
        self._at = None if seconds is None or seconds >= _NO_LIMIT else clock() + seconds

    def remaining(self) -> float | None:
        """Returns the seconds left, never below 0, or None when there is no deadline."""
        return None if self._at is None else max(0.0, self._at - self._clock())


class RetryState:
    """The attempts of one call.

    Args:
        policy: The limits.
        deadline: The call's deadline; a pause that would not end before it is not begun.
        listener: Told of each pause.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        deadline: Deadline,
        listener: RetryListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._deadline = deadline
        self._listener = listener
        self._clock = clock
        self._failures = 0
        self._since = clock()

    def progressed(self) -> None:
        """Notes that the call got somewhere: the limits count from here."""
        self._failures = 0
        self._since = self._clock()

    def next_pause(self, error: KvPlaneError) -> float | None:
        """Counts a failure and decides what follows.

        Args:
            error: Why the attempt failed.

        Returns:
            The pause before the next attempt in seconds, or None when there must not be one.
        """
        self._failures += 1
        if not isinstance(error, UnavailableError) or self._failures >= self._policy.max_attempts:
            return None
        pause = max(self._policy.backoff(self._failures), error.retry_delay or 0.0)
        remaining = self._deadline.remaining()
        if remaining is not None and pause >= remaining:
            return None
        if self._clock() - self._since + pause > self._policy.max_elapsed:
            return None
        if self._listener is not None:
            self._listener(error, pause)
        return pause

    async def pause_or_raise(self, error: KvPlaneError) -> None:
        """Sleeps until the next attempt is due, or raises the error when there must not be one."""
        pause = self.next_pause(error)
        if pause is None:
            raise error
        await asyncio.sleep(pause)
