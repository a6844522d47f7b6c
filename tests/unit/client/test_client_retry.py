"""When an attempt follows another."""

from __future__ import annotations

import pytest
from kvplane_client import (
    NO_RETRY,
    InternalError,
    InvalidArgumentError,
    KvPlaneError,
    ResourceExhaustedError,
    RetryPolicy,
    UnavailableError,
)
from kvplane_client.retry import Deadline, RetryState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def state(policy: RetryPolicy, clock: Clock, deadline: float | None = None) -> RetryState:
    return RetryState(policy, Deadline(deadline, clock), clock=clock)


PLAIN = RetryPolicy(max_attempts=6, initial_backoff=1, multiplier=2, max_backoff=5, jitter=0, max_elapsed=1000)


def test_pauses_grow_to_the_longest_and_attempts_are_bounded() -> None:
    attempts = state(PLAIN, Clock())

    assert [attempts.next_pause(UnavailableError("x")) for _ in range(6)] == [1, 2, 4, 5, 5, None]


def test_progress_starts_the_count_afresh() -> None:
    attempts = state(PLAIN, Clock())
    for _ in range(5):
        attempts.next_pause(UnavailableError("x"))

    attempts.progressed()

    assert attempts.next_pause(UnavailableError("x")) == 1


def test_jitter_stays_within_its_share() -> None:
    policy = RetryPolicy(initial_backoff=10, max_backoff=10, jitter=0.2)

    assert policy.backoff(1, uniform=lambda low, high: low) == pytest.approx(8)
    assert policy.backoff(1, uniform=lambda low, high: high) == pytest.approx(12)
    assert all(8 <= policy.backoff(1) <= 12 for _ in range(100))


def test_backoff_after_very_many_failures_is_the_longest() -> None:
    assert RetryPolicy(jitter=0).backoff(10**6) == 5.0


def test_servers_advice_lengthens_a_pause_and_never_shortens_it() -> None:
    assert state(PLAIN, Clock()).next_pause(UnavailableError("x", retry_delay=3.0)) == 3.0
    assert state(PLAIN, Clock()).next_pause(UnavailableError("x", retry_delay=0.1)) == 1


@pytest.mark.parametrize("error", [InternalError("x"), ResourceExhaustedError("x", retry_delay=1), KvPlaneError("x")])
def test_other_errors_are_never_tried_again(error: KvPlaneError) -> None:
    assert state(PLAIN, Clock()).next_pause(error) is None


def test_no_retry_fails_at_once() -> None:
    assert state(NO_RETRY, Clock()).next_pause(UnavailableError("x")) is None


def test_no_pause_begins_that_outlasts_the_deadline() -> None:
    clock = Clock()
    attempts = state(PLAIN, clock, deadline=2.5)
    assert attempts.next_pause(UnavailableError("x")) == 1
    clock.now += 1
    assert attempts.next_pause(UnavailableError("x")) is None


def test_no_pause_begins_that_outlasts_the_time_without_progress() -> None:
    clock = Clock()
    attempts = state(RetryPolicy(jitter=0, initial_backoff=1, max_elapsed=10), clock)
    clock.now += 9.5
    assert attempts.next_pause(UnavailableError("x")) is None


def test_listener_hears_of_each_pause() -> None:
    heard: list[tuple[str, float]] = []
    attempts = RetryState(PLAIN, Deadline(None), lambda error, pause: heard.append((str(error), pause)))
    attempts.next_pause(UnavailableError("a"))
    attempts.next_pause(InternalError("b"))
    assert heard == [("a", 1)]


def test_deadline_counts_down_to_zero() -> None:
    clock = Clock()
    deadline = Deadline(2, clock)
    assert deadline.remaining() == 2
    clock.now += 5
    assert deadline.remaining() == 0
    assert Deadline(None, clock).remaining() is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attempts", 0), ("max_elapsed", 0), ("initial_backoff", -1), ("multiplier", 0.5), ("max_backoff", 0.01),
        ("jitter", 1.5),
    ],
)  # fmt: skip
def test_bad_policy_is_refused_with_the_fields_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected .* got {value}"):
        RetryPolicy(**{field: value})


@pytest.mark.parametrize("seconds", [1e9, 1e308, float("inf")])
def test_deadline_that_nobody_lives_to_see_is_none(seconds: float) -> None:
    assert Deadline(seconds, Clock()).remaining() is None


def test_deadline_counts_down_to_nothing() -> None:
    clock = Clock()
    deadline = Deadline(1e6, clock)
    clock.now += 1e6 - 1
    assert deadline.remaining() == 1
    clock.now += 2
    assert deadline.remaining() == 0


def test_deadline_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="expected seconds, got nan") as refused:
        Deadline(float("nan"))
    assert refused.value.metadata == {"parameter": "deadline"}
