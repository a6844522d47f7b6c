"""The first to end decides."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from kvmanager_service.racing import first_of


class Sleeper:
    ended = False

    async def run(self) -> NoReturn:
        try:
            await asyncio.Event().wait()
            raise AssertionError
        finally:
            await asyncio.sleep(0)
            self.ended = True


async def answer() -> int:
    return 7


async def fail() -> int:
    raise ValueError("expected nothing")


async def test_first_of_returns_the_first_result_and_ends_the_others() -> None:
    sleeper = Sleeper()
    assert await first_of(sleeper.run(), answer()) == 7
    assert sleeper.ended


async def test_first_of_raises_what_the_first_raised_and_ends_the_others() -> None:
    sleeper = Sleeper()
    with pytest.raises(ValueError, match="expected nothing"):
        await first_of(sleeper.run(), fail())
    assert sleeper.ended


async def test_first_of_several_that_end_at_once_the_one_named_first_counts() -> None:
    assert await first_of(answer(), fail()) == 7


async def test_first_of_cancelled_ends_all() -> None:
    sleepers = [Sleeper(), Sleeper()]
    race = asyncio.create_task(first_of(*(sleeper.run() for sleeper in sleepers)))
    await asyncio.sleep(0.01)
    race.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race
    assert all(sleeper.ended for sleeper in sleepers)
