"""Who is brought up when, and who is used. Graces are none or for ever: no test depends on how long something takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service import executor_race
from kvmanager_service.engine_api import ModelView
from kvmanager_service.executor_client import ExecutorConnection, ExecutorLostError, ReadyExecutor
from kvmanager_service.executor_race import MAX_AT_ONCE, ExecutorRace, PreparedExecutor
from kvmanager_service.registry import ExecutorRegistry, ExecutorState, RegisteredExecutor
from tests.integration.manager.fake_engine import until
from tests.unit.manager.manager_builders import model_view

FOR_EVER = 3_600.0
MODEL: ModelView = model_view(None)


class Connection(ExecutorConnection):
    """A connection to nowhere."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.closed = False

    async def close(self) -> None:
        await asyncio.sleep(0)  # as a real one, it takes a while, and may be cancelled meanwhile
        self.closed = True
        await super().close()


class Track:
    """A race whose candidates do what the test says.

    Attributes:
        begun: who was brought up, in order.
        under_way: who is being brought up.
        connections: of those that became ready.
        on_end: called with the name of each whose bringing up ends, for whatever reason.
        may_end: while it is not set, nobody's bringing up comes to its end.
    """

    def __init__(self, *names: str) -> None:
        self.registry = ExecutorRegistry(time.monotonic, lease_ms=3_600_000)
        self.begun: list[str] = []
        self.under_way: set[str] = set()
        self.connections: dict[str, Connection] = {}
        self.on_end: Callable[[str], None] = lambda name: None
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._shows_life: set[str] = set()
        self._ends: dict[str, asyncio.Future[bool]] = {}
        self._race = ExecutorRace(self.registry, self._bring_up)
        self.enter(*names)

    def enter(self, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.get_running_loop().create_future()
            self.registry.register(name, f"{name}:1")

    def shows_life(self, *names: str) -> None:
        """These show a sign of life as soon as they begin."""
        self._shows_life.update(names)

    def ready(self, name: str, *, keeps_cache: bool = False) -> None:
        self._ends[name].set_result(keeps_cache)

    def fails(self, name: str) -> None:
        self._ends[name].set_exception(ExecutorLostError("as the test wants"))
        self._ends[name].exception()  # it may be that nobody asks

    def state(self, name: str) -> ExecutorState:
        return next(record.state for record in self.registry.records() if record.executor_id == name)

    def error(self, name: str) -> str:
        return next(record.last_error for record in self.registry.records() if record.executor_id == name)

    async def run(self) -> str:
        """Run the race to its end; who has won."""
        prepared = await self._race.winner()
        assert not self.connections[prepared.executor.executor_id].closed
        await prepared.connection.close()
        return prepared.executor.executor_id

    async def _bring_up(self, executor: RegisteredExecutor, on_progress: Callable[[], None]) -> PreparedExecutor:
        name = executor.executor_id
        self.begun.append(name)
        self.under_way.add(name)
        try:
            if name in self._shows_life:
                on_progress()
            keeps_cache = await asyncio.shield(self._ends[name])
        finally:
            self.under_way.remove(name)
            self.on_end(name)
            await self.may_end.wait()
        self.connections[name] = Connection()
        ready = ReadyExecutor(pb.GetModelInfoResponse(), pb.KvCacheState(), None if keeps_cache else [])
        return PreparedExecutor(executor, self.connections[name], ready, MODEL)


@pytest.fixture(autouse=True)
def _graces(monkeypatch: pytest.MonkeyPatch) -> None:
    graces(monkeypatch, connect=FOR_EVER, grace=FOR_EVER, unreached=FOR_EVER, patience=FOR_EVER)


def graces(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    names = {
        "connect": "CONNECT_GRACE_S",
        "grace": "GRACE_S",
        "unreached": "UNREACHED_PATIENCE_S",
        "patience": "PATIENCE_S",
    }
    for name, value in seconds.items():
        monkeypatch.setattr(executor_race, names[name], value)


async def test_race_the_best_candidate_begins_alone_and_wins() -> None:
    track = Track("a", "b")
    race = asyncio.create_task(track.run())
    await until(lambda: track.begun == ["a"])
    assert track.state("a") is ExecutorState.CONNECTING
    track.ready("a")
    assert await race == "a"
    assert track.begun == ["a"]


async def test_race_waits_for_somebody_to_come() -> None:
    track = Track()
    race = asyncio.create_task(track.run())
    await asyncio.sleep(0)
    track.enter("a")
    track.ready("a")
    assert await race == "a"


async def test_race_one_that_is_not_reached_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    graces(monkeypatch, connect=0.0)
    track = Track("unreachable", "b")
    track.ready("b")
    assert await track.run() == "b"
    assert track.begun == ["unreachable", "b"]
    assert track.under_way == set()
    assert (track.state("unreachable"), track.error("unreachable")) == (ExecutorState.STANDBY, "")


async def test_race_one_that_shows_life_keeps_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    graces(monkeypatch, connect=0.05)
    track = Track("a", "b")
    track.shows_life("a")
    race = asyncio.create_task(track.run())
    await asyncio.sleep(0.1)
    track.enter("c")  # a reason to look again
    await asyncio.sleep(0.01)
    assert track.begun == ["a"]
    track.ready("a")
    assert await race == "a"


async def test_race_one_that_shows_life_no_more_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    graces(monkeypatch, connect=0.05, grace=0.1)
    track = Track("hangs", "b")
    track.shows_life("hangs")
    track.ready("b")
    assert await track.run() == "b"


async def test_race_one_that_fails_is_followed_at_once_and_comes_again_after_the_others() -> None:
    track = Track("a", "b")
    track.fails("a")
    race = asyncio.create_task(track.run())
    await until(lambda: track.begun == ["a", "b"])
    assert (track.state("a"), track.error("a")) == (ExecutorState.STANDBY, "as the test wants")
    assert [record.executor_id for record in track.registry.candidates()] == ["b", "a"]
    track.ready("b")
    assert await race == "b"


async def test_race_the_only_one_is_tried_again_after_each_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_race, "BACKOFF_S", (0.001, 0.002))
    track = Track("a")
    track.fails("a")
    race = asyncio.create_task(track.run())
    await until(lambda: len(track.begun) == 4)
    race.cancel()
    await asyncio.gather(race, return_exceptions=True)
    assert track.state("a") is ExecutorState.STANDBY


async def test_race_a_better_one_that_comes_need_not_wait() -> None:
    track = Track("lost")
    track.shows_life("lost")
    track.registry.lose("lost", "its step failed", hangs=False)
    race = asyncio.create_task(track.run())
    await until(lambda: track.begun == ["lost"])
    track.enter("new")
    track.ready("new")
    assert await race == "new"
    assert track.error("lost") == "its step failed"


async def test_race_of_two_that_are_ready_the_kept_cache_wins_and_the_other_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graces(monkeypatch, connect=0.0)
    track = Track("empty", "kept")
    race = asyncio.create_task(track.run())
    await until(lambda: track.begun == ["empty", "kept"])
    track.ready("empty")
    track.ready("kept", keeps_cache=True)
    assert await race == "kept"
    assert track.connections["empty"].closed
    assert track.state("empty") is ExecutorState.STANDBY


async def test_race_one_whose_lease_ends_is_given_up() -> None:
    track = Track("a")
    race = asyncio.create_task(track.run())
    await until(lambda: track.begun == ["a"])
    (record,) = track.registry.records()
    record.expires_at = 0.0
    track.registry.expire()
    await until(lambda: not track.under_way)
    track.enter("b")
    track.ready("b")
    assert await race == "b"


async def test_race_places_are_few_and_nobody_keeps_one_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was not even reached keeps it for a short while only, whatever others are granted."""
    graces(monkeypatch, connect=0.0, unreached=0.001)
    hung = [f"hung-{index}" for index in range(2 * MAX_AT_ONCE)]
    track = Track(*hung, "last")
    most: list[int] = []
    race = asyncio.create_task(track.run())
    while "last" not in track.begun:
        most.append(len(track.under_way))
        await asyncio.sleep(0)
    track.ready("last")
    assert await race == "last"
    assert max(most) == MAX_AT_ONCE
    assert "others wait" in track.error("hung-0")


async def test_race_places_all_taken_the_next_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    graces(monkeypatch, connect=0.0)
    names = [f"e{index}" for index in range(MAX_AT_ONCE + 1)]
    track = Track(*names)
    race = asyncio.create_task(track.run())
    await until(lambda: len(track.begun) == MAX_AT_ONCE)
    await asyncio.sleep(0.01)
    assert track.begun == names[:-1]
    track.fails("e1")
    await until(lambda: track.begun == names)
    track.ready("e0")
    assert await race == "e0"


async def test_race_one_that_gets_ready_while_another_is_given_up_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    graces(monkeypatch, connect=0.0, unreached=0.001)
    names = [f"e{index}" for index in range(MAX_AT_ONCE)]
    track = Track(*names, "f0", "f1", "f2")  # who all want a place, so that it is a matter of one loop

    def ready_too(name: str) -> None:
        track.on_end = lambda name: None
        track.ready("e1")
        track.may_end.clear()
        asyncio.get_running_loop().call_later(0.01, track.may_end.set)

    track.on_end = ready_too
    assert await track.run() == "e1"
    assert "others wait" in track.error("e0")
    assert track.error("e1") == ""


async def test_race_those_that_all_need_long_take_turns_until_one_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    graces(monkeypatch, connect=0.0, grace=0.0, unreached=0.005, patience=0.005)
    monkeypatch.setattr(executor_race, "BACKOFF_S", (0.0,))
    begun: list[str] = []

    async def profile(executor: RegisteredExecutor, on_progress: Callable[[], None]) -> PreparedExecutor:
        begun.append(executor.executor_id)
        on_progress()
        await asyncio.sleep(0.1)
        return PreparedExecutor(
            executor, Connection(), ReadyExecutor(pb.GetModelInfoResponse(), pb.KvCacheState(), []), MODEL
        )

    registry = ExecutorRegistry(time.monotonic, lease_ms=3_600_000)
    names = [f"e{index}" for index in range(MAX_AT_ONCE + 1)]
    for name in names:
        registry.register(name, f"{name}:1")
    prepared = await ExecutorRace(registry, profile).winner()
    await prepared.connection.close()
    assert begun[: len(names)] == names


async def test_race_cancelled_while_it_closes_the_others_closes_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    graces(monkeypatch, connect=0.0)
    track = Track("hung", "first", "second")
    race = asyncio.create_task(track.run())
    await until(lambda: track.under_way == {"hung", "first", "second"})
    ends = asyncio.Event()

    def cancelled(name: str) -> None:
        track.may_end.clear()
        ends.set()

    track.ready("first")
    track.ready("second")
    track.on_end = lambda name: cancelled(name) if name == "hung" else None
    await ends.wait()  # the race is about to close those that have not won
    race.cancel()
    await asyncio.sleep(0)
    track.may_end.set()
    await asyncio.gather(race, return_exceptions=True)
    assert race.cancelled()
    assert [connection.closed for connection in track.connections.values()] == [True, True]
    assert {record.state for record in track.registry.records()} == {ExecutorState.STANDBY}


async def test_race_cancelled_closes_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    graces(monkeypatch, connect=0.0)
    track = Track("a", "b")
    race = asyncio.create_task(track.run())
    await until(lambda: track.under_way == {"a", "b"})
    race.cancel()
    await asyncio.gather(race, return_exceptions=True)
    assert race.cancelled()
    assert track.under_way == set()


async def test_race_a_fault_of_ours_ends_it() -> None:
    async def broken(_: RegisteredExecutor, __: Callable[[], None]) -> PreparedExecutor:
        raise KeyError("ours")

    registry = ExecutorRegistry(time.monotonic, lease_ms=60_000)
    registry.register("a", "a:1")
    with pytest.raises(KeyError, match="ours"):
        await ExecutorRace(registry, broken).winner()
