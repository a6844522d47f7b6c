"""Where the time until the first step goes: one line in the log, `startup`, with the seconds of each part.

Station: made by `server`, filled by it and by `kv_session`; `kvplane up` shows the line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

__all__ = ["StartupTimes"]

_log = structlog.get_logger(__name__)


class StartupTimes:
    """Seconds of each part of a start.

    Args:
        since: when the process began, on `clock`; what is before the first part is `libraries`. None knows of none.
        clock: seconds that never go back.
    """

    def __init__(self, since: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._is_told = False
        if since is not None:
            self._seconds["libraries"] = clock() - since

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done while this is open is this part of the start; after the line it is counted for nothing."""
        begun = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - begun

    def tell(self) -> None:
        """Log the line, the first time."""
        if not self._is_told:
            self._is_told = True
            _log.info("startup", **{name: round(seconds, 2) for name, seconds in self._seconds.items()})
