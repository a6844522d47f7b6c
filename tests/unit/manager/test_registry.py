"""Leases, states and refusals of executors."""

from __future__ import annotations

import asyncio

import pytest

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.errors import ExecutorIdReusedError, ExecutorRejectedError, UnavailableError
from kvmanager_service.registry import MAX_EXECUTORS, ExecutorRegistry, ExecutorState


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> ExecutorRegistry:
    return ExecutorRegistry(clock, lease_ms=10_000)


def ids(registry: ExecutorRegistry) -> list[str]:
    return [record.executor_id for record in registry.candidates()]


def test_registry_lists_in_order_of_registration(registry: ExecutorRegistry) -> None:
    for name, port in (("b", 1), ("a", 2), ("b", 1)):
        registry.register(name, f"host:{port}")
    assert ids(registry) == ["b", "a"]
    assert {record.state for record in registry.records()} == {ExecutorState.STANDBY}


def test_registry_lease_not_renewed_is_forgotten(registry: ExecutorRegistry, clock: Clock) -> None:
    registry.register("a", "host:1")
    registry.register("b", "host:2")
    clock.now += 9.5
    registry.register("b", "host:2")
    assert registry.remaining_ms(registry.records()[0]) == 500
    clock.now += 0.5
    assert ids(registry) == ["b"]


def test_registry_new_id_at_same_address_supersedes_the_old_one(registry: ExecutorRegistry) -> None:
    registry.register("old", "host:1")
    registry.register("new", "host:1")
    assert ids(registry) == ["new"]


def test_registry_same_id_at_other_address_is_refused(registry: ExecutorRegistry) -> None:
    registry.register("a", "host:1")
    with pytest.raises(ExecutorIdReusedError, match="got host:2"):
        registry.register("a", "host:2")
    assert registry.records()[0].address == "host:1"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:x",
        "http://host:1",
        "a b:1",
        "::1:1",
        "[::1]",
        "host:1\n",
    ],
)
def test_registry_malformed_address_is_refused(registry: ExecutorRegistry, address: str) -> None:
    with pytest.raises(InvalidRequestError, match="expected host:port"):
        registry.register("a", address)


@pytest.mark.parametrize("address", ["10.0.0.7:1", "executor-1.example:65535", "[::1]:50061", "[fe80::1%eth0]:5"])
def test_registry_good_address_is_accepted(registry: ExecutorRegistry, address: str) -> None:
    registry.register("a", address)
    assert registry.records()[0].address == address


@pytest.mark.parametrize("executor_id", ["", "x" * 129])
def test_registry_id_of_wrong_length_is_refused(registry: ExecutorRegistry, executor_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="1 to 128"):
        registry.register(executor_id, "host:1")


def test_registry_state_keeps_last_error_until_active(registry: ExecutorRegistry) -> None:
    registry.register("a", "host:1")
    seen = []
    for state, error in (
        (ExecutorState.CONNECTING, ""),
        (ExecutorState.STANDBY, "refused"),
        (ExecutorState.CONNECTING, ""),
        (ExecutorState.ACTIVE, ""),
    ):
        registry.set_state("a", state, error)
        seen.append((registry.records()[0].state, registry.records()[0].last_error))
    assert [error for _, error in seen] == ["", "refused", "refused", ""]
    assert [state for state, _ in seen][-1] is ExecutorState.ACTIVE


def test_registry_state_of_forgotten_executor_is_ignored(registry: ExecutorRegistry) -> None:
    registry.set_state("gone", ExecutorState.ACTIVE)
    assert registry.records() == []


def test_registry_rejected_executor_is_no_candidate_and_is_told_at_renewal(registry: ExecutorRegistry) -> None:
    registry.register("a", "host:1")
    registry.reject("a", "MODEL_MISMATCH", "expected model x, got y")
    assert ids(registry) == []
    assert registry.records()[0].last_error == "expected model x, got y"
    with pytest.raises(ExecutorRejectedError, match="got y") as caught:
        registry.register("a", "host:1")
    assert caught.value.reason == "MODEL_MISMATCH"


def test_registry_draining_refuses_new_and_renews_known(registry: ExecutorRegistry, clock: Clock) -> None:
    registry.register("a", "host:1")
    registry.drain()
    clock.now += 9
    registry.register("a", "host:1")
    clock.now += 9
    assert ids(registry) == ["a"]
    with pytest.raises(UnavailableError, match="stopping"):
        registry.register("b", "host:2")


def test_registry_draining_takes_back_whose_lease_ended_and_no_stranger(
    registry: ExecutorRegistry, clock: Clock
) -> None:
    registry.register("before", "host:1")
    clock.now += 10
    registry.register("a", "host:2")
    registry.drain()
    clock.now += 10
    assert ids(registry) == []
    registry.register("a", "host:2")
    registry.register("before", "host:1")
    assert ids(registry) == ["a", "before"]
    for stranger, address in (("b", "host:3"), ("b", "host:2")):
        with pytest.raises(UnavailableError, match="stopping"):
            registry.register(stranger, address)
    clock.now += 10
    with pytest.raises(UnavailableError, match="stopping"):
        registry.register("a", "host:4")


def test_registry_remembers_no_more_of_those_gone_than_it_takes(registry: ExecutorRegistry, clock: Clock) -> None:
    for index in range(MAX_EXECUTORS + 1):
        registry.register(f"e{index}", "host:1")
    clock.now += 10
    registry.expire()
    registry.drain()
    registry.register("e1", "host:1")
    with pytest.raises(UnavailableError, match="stopping"):
        registry.register("e0", "host:1")


async def test_registry_change_wakes_every_waiter_once(registry: ExecutorRegistry, clock: Clock) -> None:
    waiters = [asyncio.create_task(registry.wait_changed()) for _ in range(2)]
    await asyncio.sleep(0)
    registry.register("a", "host:1")
    await asyncio.gather(*waiters)
    later = asyncio.create_task(registry.wait_changed())
    await asyncio.sleep(0)
    registry.register("a", "host:1")
    await asyncio.sleep(0)
    assert not later.done()
    clock.now += 10
    registry.expire()
    await later


async def test_registry_watch_forgets_without_being_asked(clock: Clock) -> None:
    registry = ExecutorRegistry(clock, lease_ms=4)
    registry.register("a", "host:1")
    changed = asyncio.create_task(registry.wait_changed())
    watch = asyncio.create_task(registry.watch())
    clock.now += 1
    await changed
    watch.cancel()
    assert registry.records() == []


def test_registry_candidates_lost_come_after_others_and_the_last_lost_last(registry: ExecutorRegistry) -> None:
    for name in "abcd":
        registry.register(name, f"host-{name}:1")
    registry.lose("c", "its step failed", hangs=False)
    registry.lose("a", "its step failed", hangs=False)
    assert ids(registry) == ["b", "d", "c", "a"]
    registry.lose("c", "its step failed again", hangs=False)
    assert ids(registry) == ["b", "d", "a", "c"]


def test_registry_candidates_that_hang_come_last_until_they_are_active_again(registry: ExecutorRegistry) -> None:
    for name in "abc":
        registry.register(name, f"host-{name}:1")
    registry.lose("a", "no result", hangs=True)
    registry.lose("b", "its step failed", hangs=False)
    assert ids(registry) == ["c", "b", "a"]
    registry.lose("a", "still none", hangs=False)
    registry.lose("b", "its step failed", hangs=False)
    assert ids(registry) == ["c", "b", "a"]
    registry.set_state("a", ExecutorState.ACTIVE)
    assert ids(registry) == ["c", "a", "b"]
