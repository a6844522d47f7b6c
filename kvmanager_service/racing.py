"""Coroutines that run together until the first of them ends.

Station: a small tool of `executor_life` and `process`; it knows nothing of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def first_of(*coroutines: Coroutine[Any, Any, _T]) -> _T:
    """Return or raise what the first to end did; the others are cancelled, and have ended when this returns.

    Of several that end at once, the one named first counts.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = next(task for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return first.result()
