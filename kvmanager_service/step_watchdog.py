"""Finds out an executor whose compute hangs while it keeps its lease.

Station: run by `executor_life` beside the steps. It knows steps only by sight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from kvmanager_service.core.step import Step
from kvmanager_service.executor_client import ExecutorLostError

__all__ = ["StepOverdueError", "watch_steps"]

LOOKS = 10
"""How often it looks in the time that a step may take."""


class StepOverdueError(ExecutorLostError):
    """A step had no result for too long: whatever else the executor is asked to compute may hang as well."""


async def watch_steps(oldest_step: Callable[[], Step | None], timeout_s: float) -> NoReturn:
    """Raise StepOverdueError when the oldest outstanding step has had no result for `timeout_s` seconds.

    It counts how often it has seen the same step, and notes no times: so steps need not tell it anything, and a manager
    that was stopped itself takes the results that wait for it before it blames the executor.

    Args:
        oldest_step: the step whose result comes next; None when none is out.
        timeout_s: at least how long, and at most a tenth more.
    """
    seen, times = None, 0
    while True:
        step = oldest_step()
        if step is None or step is not seen:
            seen, times = step, 0
        elif (times := times + 1) == LOOKS:
            raise StepOverdueError(
                f"step {step.step_id}: expected a result within {timeout_s:g} s (--step-timeout-s), got none; the"
                " executor's compute hangs or is too slow: restart it, or allow more time"
            )
        await asyncio.sleep(timeout_s / LOOKS)
