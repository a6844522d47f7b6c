"""What the watchdog takes for a step that hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmanager_service.core.step import Step
from kvmanager_service.step_watchdog import LOOKS, StepOverdueError, watch_steps


def step(step_id: int) -> Step:
    return Step(step_id, [], 0, 0, feeds_from_step_id=0, tags=[], copies=[])


async def looks_until_overdue(script: list[Step | None]) -> int:
    """Show the watchdog one entry at each look, the last for ever; return how often it has looked."""

    def show() -> Iterator[Step | None]:
        yield from script
        while True:
            yield script[-1]

    shown, looks = show(), 0

    def look() -> Step | None:
        nonlocal looks
        looks += 1
        return next(shown)

    with pytest.raises(StepOverdueError, match=r"step \d+: expected a result within 0 s"):
        await watch_steps(look, 0.0)
    return looks


async def test_watchdog_step_seen_for_the_whole_time_is_overdue() -> None:
    assert await looks_until_overdue([step(1)]) == 1 + LOOKS


async def test_watchdog_step_that_gives_way_to_the_next_in_time_is_not_overdue() -> None:
    first, second = step(1), step(2)
    assert await looks_until_overdue([first] * LOOKS + [second]) == LOOKS + 1 + LOOKS


async def test_watchdog_idle_executor_is_not_overdue() -> None:
    assert await looks_until_overdue([None] * 5 * LOOKS + [step(1)]) == 5 * LOOKS + 1 + LOOKS


async def test_watchdog_looks_are_spread_over_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("kvmanager_service.step_watchdog.asyncio.sleep", sleep)
    stuck = step(1)
    with pytest.raises(StepOverdueError):
        await watch_steps(lambda: stuck, 300.0)
    assert sum(waits) == pytest.approx(300.0)
