"""The start is told of once, with the seconds of each part."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from executor_service.startup_times import StartupTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_tell_names_each_part_once() -> None:
    clock = Clock()
    times = StartupTimes(since=97.5, clock=clock)
    for name, seconds in (("model", 2.0), ("memory_profile", 3.0), ("memory_profile", 0.25)):
        with times.part(name):
            clock.now += seconds
        clock.now += 50.0
    with capture_logs() as logs:
        times.tell()
        times.tell()
    assert logs == [
        {"event": "startup", "log_level": "info", "libraries": 2.5, "model": 2.0, "memory_profile": 3.25},
    ]


def test_part_that_fails_is_counted_and_still_fails() -> None:
    clock = Clock()
    times = StartupTimes(clock=clock)

    def fail() -> None:
        with times.part("model"):
            clock.now += 2.0
            raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        fail()
    with capture_logs() as logs:
        times.tell()
    assert logs == [{"event": "startup", "log_level": "info", "model": 2.0}]
