"""Whom to swap out: always, when it is cheaper, or now and then to find out."""

from __future__ import annotations

import pytest

from kvmanager_service.core.step import BlockCopy, CopyDirection, ScheduledRow, Step, StepResult
from kvmanager_service.core.swap_policy import MAX_LOST_COPIES, PROBE_EVERY, SwapPolicy
from tests.unit.core.builders import make_request

OUT, IN, FORK = CopyDirection.DEVICE_TO_HOST, CopyDirection.HOST_TO_DEVICE, CopyDirection.DEVICE_TO_DEVICE


def make_step(num_tokens: int = 0, num_rows: int = 0, copies: list[CopyDirection] | None = None) -> Step:
    request = make_request()
    rows = [ScheduledRow(request, num_tokens // num_rows) for _ in range(num_rows)]
    orders = [BlockCopy(direction, 1 + index, 100 + index) for index, direction in enumerate(copies or [])]
    return Step(1, rows, num_tokens, 0, feeds_from_step_id=0, tags=[], copies=orders)


def learn(policy: SwapPolicy, step: Step, compute_us: int, copy_us: int = 0) -> None:
    stops = [row.stop for row in step.rows]
    policy.acknowledged(step, StepResult(1, [], stops, compute_us=compute_us, copy_us=copy_us))


def spend_probe(policy: SwapPolicy) -> None:
    assert policy.prefers_swap(1, 1_000)
    assert not policy.prefers_swap(1, 1_000)


def test_prefers_swap_mode_swap_always_does() -> None:
    policy = SwapPolicy("swap")
    assert all(policy.prefers_swap(1, 1_000) for _ in range(2 * PROBE_EVERY))


def test_prefers_swap_auto_knows_nothing_tries_the_first_and_one_of_many() -> None:
    policy = SwapPolicy("auto")
    answers = [policy.prefers_swap(1_000, 1) for _ in range(2 * PROBE_EVERY + 1)]
    assert [index for index, answer in enumerate(answers) if answer] == [0, PROBE_EVERY, 2 * PROBE_EVERY]


@pytest.mark.parametrize(("copy_us", "expected"), [(4_700, True), (4_900, False)])
def test_prefers_swap_auto_compares_two_copies_of_a_block_with_its_tokens(copy_us: int, expected: bool) -> None:
    """100 µs a token, 16 tokens a block: as dear as two copies of 800 µs each."""
    policy = SwapPolicy("auto")
    spend_probe(policy)
    learn(policy, make_step(64, 1), compute_us=6_400)
    learn(policy, make_step(copies=[OUT] * 6), compute_us=copy_us, copy_us=copy_us)
    assert policy.prefers_swap(160, 10) is expected


def make_informed(copy_ms: float, prefill_ms: float, num_tokens: int = 2_500, num_blocks: int = 157) -> SwapPolicy:
    """One that has seen so many tokens computed, and their blocks copied one way, in so long."""
    policy = SwapPolicy("auto")
    spend_probe(policy)
    learn(policy, make_step(num_tokens, 1), compute_us=round(1_000 * prefill_ms))
    copy_us = round(1_000 * copy_ms)
    learn(policy, make_step(copies=[OUT] * num_blocks), compute_us=copy_us, copy_us=copy_us)
    return policy


PCIE_GEN5_MS = 40.0
"""2.5 GB at 64 GB/s: 2,500 tokens of a 70-billion-parameter Llama, one way."""

NVLINK_C2C_MS = PCIE_GEN5_MS * 64 / 900
"""The same on Grace Hopper, at 900 GB/s."""


@pytest.mark.parametrize("prefill_ms", [100.0, 150.0])
@pytest.mark.parametrize(
    ("copy_ms", "num_found", "expected"),
    [
        pytest.param(PCIE_GEN5_MS, 0, True, id="no hits: 80 ms of copies against 100 to 150 of prefill"),
        pytest.param(PCIE_GEN5_MS, 2_000, False, id="most is hit: 48 ms of copies against 20 to 30"),
        pytest.param(NVLINK_C2C_MS, 0, True, id="GH200, no hits: 6 ms against 100 to 150"),
        pytest.param(NVLINK_C2C_MS, 2_000, True, id="GH200, most is hit: 3.4 ms against 20 to 30"),
    ],
)
def test_prefers_swap_seed_self_check_4_why_recompute_and_where_swap_pays(
    prefill_ms: float, copy_ms: float, num_found: int, expected: bool
) -> None:
    """The seed document's self-check 4, chapter 3: 2,500 tokens, in 157 blocks of 16.

    Copying out and in takes 40 + 40 ms on an H100's PCIe, computing again 100 to 150 ms: not far apart. What decides
    for recomputation is the prefix cache; what decides for swap is a fast link (GH200), or a cache without hits.
    """
    policy = make_informed(copy_ms, prefill_ms)
    policy.came_back(2_500, num_found)
    assert policy.prefers_swap(2_500, 157) is expected


def test_prefers_swap_auto_cache_returns_nearly_everything_recomputes_though_copies_are_cheap() -> None:
    """Copying is 20 times as fast as computing all of it again; but 98 % need not be computed again."""
    policy = make_informed(copy_ms=5.0, prefill_ms=200.0)
    assert policy.prefers_swap(2_500, 157), "nothing is known of the cache yet"
    policy.came_back(2_500, 2_450)
    assert not policy.prefers_swap(2_500, 157)


def test_prefers_swap_auto_cache_returns_nothing_is_as_if_nothing_were_known() -> None:
    for copy_ms, expected in ((49.0, True), (51.0, False)):
        policy = make_informed(copy_ms, prefill_ms=100.0)
        assert policy.prefers_swap(2_500, 157) is expected
        policy.came_back(2_500, 0)
        assert policy.prefers_swap(2_500, 157) is expected


@pytest.mark.parametrize(("num_found", "expected"), [(830, True), (836, False)])
def test_prefers_swap_auto_hits_save_prefill_and_the_copy_back(num_found: int, expected: bool) -> None:
    """40 ms a copy, 100 ms of prefill: with a share f found, 40 × (2 - f) = 100 × (1 - f) at a third."""
    policy = make_informed(copy_ms=40.0, prefill_ms=100.0)
    policy.came_back(2_500, num_found)
    assert policy.prefers_swap(2_500, 157) is expected


def test_came_back_the_newest_victims_count_most_and_long_ones_more() -> None:
    policy = make_informed(copy_ms=5.0, prefill_ms=200.0)
    policy.came_back(2_500, 2_500)
    policy.came_back(16, 0)
    assert not policy.prefers_swap(2_500, 157), "a short one that found nothing"
    for _ in range(40):
        policy.came_back(2_500, 0)
    assert policy.prefers_swap(2_500, 157), "the cache has become too small"


def test_prefers_swap_auto_only_one_side_measured_is_recomputation() -> None:
    for step, compute_us, copy_us in ((make_step(64, 1), 64, 0), (make_step(copies=[OUT]), 1, 1)):
        policy = SwapPolicy("auto")
        spend_probe(policy)
        learn(policy, step, compute_us, copy_us)
        assert not policy.prefers_swap(1_000_000, 1)


@pytest.mark.parametrize(
    "step",
    [make_step(8, 8, [OUT]), make_step(64, 1, [OUT, FORK])],
    ids=["decode says nothing of prefill", "copies on write say nothing of copies to the host"],
)
def test_acknowledged_step_of_another_kind_teaches_nothing(step: Step) -> None:
    policy = SwapPolicy("auto")
    spend_probe(policy)
    learn(policy, step, compute_us=1_000_000, copy_us=1)
    assert not policy.prefers_swap(1_000_000, 1)


def test_acknowledged_executor_that_measures_nothing_teaches_nothing() -> None:
    policy = SwapPolicy("auto")
    spend_probe(policy)
    learn(policy, make_step(64, 1, [OUT]), compute_us=0)
    assert not policy.prefers_swap(1_000_000, 1)


def test_acknowledged_copies_in_a_prefill_step_are_not_prefill_time() -> None:
    policy = SwapPolicy("auto")
    spend_probe(policy)
    learn(policy, make_step(100, 1, [OUT, IN]), compute_us=2_100, copy_us=2_000)  # 1 µs a token, 1 ms a block
    assert not policy.prefers_swap(1_999, 1)
    assert policy.prefers_swap(2_001, 1)


def test_acknowledged_newer_times_outweigh_older_ones() -> None:
    policy = SwapPolicy("auto")
    spend_probe(policy)
    learn(policy, make_step(100, 1), compute_us=100)
    learn(policy, make_step(copies=[OUT]), compute_us=1_000, copy_us=1_000)
    assert not policy.prefers_swap(100, 1)
    for _ in range(40):
        learn(policy, make_step(copies=[IN]), compute_us=10, copy_us=10)
    assert policy.prefers_swap(100, 1)


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_prefers_swap_copies_that_are_lost_again_and_again_are_not_ordered_any_more(mode: str) -> None:
    policy = SwapPolicy(mode)
    learn(policy, make_step(64, 1), compute_us=64_000)
    learn(policy, make_step(copies=[OUT]), compute_us=1, copy_us=1)
    for _ in range(MAX_LOST_COPIES):
        assert policy.prefers_swap(64, 1)
        policy.lost(make_step(copies=[OUT]))
    answers = [policy.prefers_swap(64, 1) for _ in range(2 * PROBE_EVERY)]
    assert sum(answers) == 2, "a probe now and then"
    learn(policy, make_step(copies=[OUT]), compute_us=1, copy_us=1)
    assert policy.prefers_swap(64, 1), "a probe came back"


def test_lost_steps_without_copies_say_nothing_of_copies() -> None:
    policy = SwapPolicy("swap")
    for _ in range(10):
        policy.lost(make_step(64, 1))
    assert policy.prefers_swap(1, 1)
