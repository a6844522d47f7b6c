"""A life can be replayed from its notes, and what a broken core leaves of them is short."""

from __future__ import annotations

import pytest

from tests.simulation import simulate
from tests.simulation.chaos import Chaos
from tests.simulation.shrink import shrink
from tests.simulation.simulate import failure_of, shortest_schedule
from tests.simulation.test_mutations import (
    Mutation,
    freed_blocks_keep_a_reference,
    hit_is_not_taken_out_of_the_free_queue,
    provisional_blocks_survive_lost_steps,
)


def test_shrink_two_items_that_fail_together_are_what_is_left() -> None:
    asked: list[list[int]] = []

    def fails(part: list[int]) -> bool:
        asked.append(part)
        return 17 in part and 60 in part

    assert shrink(range(100), fails) == [17, 60]
    assert len(asked) < 100


def test_shrink_failure_that_needs_nothing_leaves_nothing() -> None:
    assert shrink(range(9), lambda part: True) == []


def test_shrink_failure_that_needs_everything_keeps_the_order() -> None:
    assert shrink([3, 1, 2], lambda part: len(part) == 3) == [3, 1, 2]


@pytest.mark.parametrize("seed", [2, 3, 5, 7, 11, 13])
def test_replay_all_operations_of_a_life_is_the_same_life(seed: int) -> None:
    chaos = Chaos(seed)
    chaos.run()
    again = Chaos(seed)
    again.replay(chaos.operations)
    assert repr(again.world.produced) == repr(chaos.world.produced)
    assert again.world.scheduler.stats == chaos.world.scheduler.stats


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_replay_any_part_of_a_healthy_life_is_healthy(seed: int) -> None:
    """Otherwise shrinking would find failures of its own making."""
    chaos = Chaos(seed)
    chaos.run()
    for step in (2, 3, 5):
        for first in range(step):
            assert failure_of(seed, chaos.operations[first::step]) is None


@pytest.mark.patches_core
@pytest.mark.parametrize(
    ("mutation", "longest"),
    [
        (freed_blocks_keep_a_reference, 2),
        (hit_is_not_taken_out_of_the_free_queue, 6),
        (provisional_blocks_survive_lost_steps, 8),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_shortest_schedule_broken_core_is_minimal_and_fails_for_that_reason(
    mutation: Mutation, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        mutation(patch)
        for seed in range(1, 100):
            chaos = Chaos(seed)
            try:
                chaos.run()
            except AssertionError:
                break
        else:
            pytest.fail("no seed notices")
        schedule = shortest_schedule(seed, chaos.operations)
        assert len(schedule) <= longest
        assert failure_of(seed, schedule) is not None
        for index in range(len(schedule)):
            assert failure_of(seed, schedule[:index] + schedule[index + 1 :]) is None
    assert failure_of(seed, schedule) is None, "the core as it is passes the same schedule"


@pytest.mark.patches_core
def test_simulate_broken_core_prints_seed_and_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    freed_blocks_keep_a_reference(monkeypatch)
    monkeypatch.setattr("sys.argv", ["simulate", "--seconds", "0", "--seed", "4"])
    assert simulate.main() == 1
    printed = capsys.readouterr().out
    assert "seed 4" in printed
    assert "('add', ('r" in printed
    assert "make simulate SEED=4" in printed


def test_simulate_sound_core_says_which_seeds_it_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["simulate", "--seconds", "0", "--seed", "4"])
    assert simulate.main() == 0
    assert "seeds 4 to 4" in capsys.readouterr().out
