"""A life can be replayed from its notes, and what a broken core leaves of them is short."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation import simulate
from tests.simulation.broken import Mutation
from tests.simulation.chaos import Chaos, LifeFailedError
from tests.simulation.life import MODELS, Life, add_options, given_life
from tests.simulation.shrink import shrink
from tests.simulation.simulate import chaos_of, failure_of, shortest_schedule
from tests.simulation.test_mutations import (
    freed_blocks_keep_a_reference,
    hit_is_not_taken_out_of_the_free_queue,
    provisional_blocks_survive_lost_steps,
)
from tests.simulation.test_windows import window_one_token_short

ROOT = Path(__file__).resolve().parents[2]

LIVES = [
    Life(2),
    Life(3),
    Life(5),
    Life(3, MODELS["full and sliding"], follower_ring=4),
    Life(5, MODELS["sliding and state"], crowded=True, num_requests=12, preemption_mode="swap"),
]


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


@pytest.mark.parametrize("life", [*LIVES, Life(7), Life(11), Life(13)])
def test_replay_all_operations_of_a_life_is_the_same_life(life: Life) -> None:
    chaos = chaos_of(life)
    chaos.run()
    again = chaos_of(life)
    again.replay(chaos.operations)
    assert repr(again.world.produced) == repr(chaos.world.produced)
    assert again.world.scheduler.stats == chaos.world.scheduler.stats


@pytest.mark.parametrize("life", LIVES)
def test_replay_any_part_of_a_healthy_life_is_healthy(life: Life) -> None:
    """Otherwise shrinking would find failures of its own making."""
    chaos = chaos_of(life)
    chaos.run()
    for step in (2, 3, 5):
        for first in range(step):
            assert failure_of(life, chaos.operations[first::step]) is None


def run_simulate(monkeypatch: pytest.MonkeyPatch, command: str) -> int:
    """Run what a failure names, but for make: `make simulate SECONDS=0 SEED=4 LIFE="..."`."""
    variables = dict(word.split("=", 1) for word in shlex.split(command) if "=" in word)
    arguments = ["--seconds", variables["SECONDS"], "--seed", variables["SEED"], *variables["LIFE"].split()]
    monkeypatch.setattr("sys.argv", ["simulate", *arguments])
    return simulate.main()


@pytest.mark.parametrize(
    "life",
    [
        *LIVES,
        Life(1, (-1, 0), one_byte=True, faults=False, policy="fair", preemption_mode="auto", follower_ring=1_000),
        Life(3, (0, 10, -1), (1, 2, 4), crowded=True),
        Life(2, one_byte=False, num_requests=3, policy="fcfs"),
    ],
)
def test_life_as_options_is_the_same_life(life: Life) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert given_life(life.seed, parser.parse_args(life.options)) == life


def test_life_without_options_is_drawn_and_of_every_kind() -> None:
    lives = [given_life(seed, argparse.Namespace(seed=1, seconds=0)) for seed in range(100)]
    assert {life.windows for life in lives} == {(), *MODELS.values()}
    assert {(bool(life.windows), life.crowded) for life in lives} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    assert {life.follower_ring for life in lives} == {None, 4, 1_000}
    assert {(len(life.windows) > 1, bool(life.factors)) for life in lives} == {
        (False, False),
        (True, False),
        (True, True),
    }


@pytest.mark.patches_core
@pytest.mark.parametrize(
    ("mutation", "life", "longest"),
    [
        (freed_blocks_keep_a_reference, {}, 2),
        (hit_is_not_taken_out_of_the_free_queue, {}, 6),
        (provisional_blocks_survive_lost_steps, {}, 8),
        (window_one_token_short, {"windows": MODELS["full and sliding"]}, 8),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_shortest_schedule_broken_core_is_minimal_and_fails_for_that_reason(
    mutation: Mutation, life: dict[str, Any], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        mutation(patch)
        for seed in range(1, 100):
            chaos = Chaos(Life(seed, **life))
            try:
                chaos.run()
            except AssertionError:
                break
        else:
            pytest.fail("no seed notices")
        schedule = shortest_schedule(chaos.life, chaos.operations)
        assert len(schedule) <= longest
        assert failure_of(chaos.life, schedule) is not None
        for index in range(len(schedule)):
            assert failure_of(chaos.life, schedule[:index] + schedule[index + 1 :]) is None
    assert failure_of(chaos.life, schedule) is None, "the core as it is passes the same schedule"


@pytest.mark.patches_core
@pytest.mark.parametrize(
    ("mutation", "life"),
    [
        (freed_blocks_keep_a_reference, Life(4)),
        (window_one_token_short, Life(4, MODELS["full and sliding"], crowded=True, num_requests=12)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_simulate_command_that_a_failure_names_finds_and_shrinks_it(
    mutation: Mutation, life: Life, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if a test had met it: its message is all that one has."""
    mutation(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        Chaos(life).run()
    told, command = str(caught.value).rsplit("\nagain: ", 1)
    assert run_simulate(monkeypatch, command) == 1
    printed = capsys.readouterr().out
    assert f"{told}\nagain: {command}\n{life}: block_size" in printed
    assert "operations still fail" in printed
    assert "('add', ('r" in printed


BREAK_THE_CORE = """
import pytest
from tests.simulation.test_mutations import freed_blocks_keep_a_reference

def pytest_configure():
    freed_blocks_keep_a_reference(pytest.MonkeyPatch())
"""


@pytest.mark.patches_core
def test_simulation_test_that_fails_prints_its_shortest_schedule(tmp_path: Path) -> None:
    """What CI prints of a life of its own, when the core is broken."""
    (tmp_path / "broken_core.py").write_text(BREAK_THE_CORE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    life = "test_simulation_random_faults_every_output_is_the_oracles[4]"
    options = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "broken_core"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVPLANE_SIMULATION_")}
    done = subprocess.run(
        [*options, f"tests/simulation/test_faults.py::{life}"],
        cwd=ROOT,
        env=env | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    _, section = done.stdout.split(" shortest schedule ")
    assert re.search(r"^again: make simulate SECONDS=0 SEED=4 ", section, re.MULTILINE), section
    told = re.search(r"^(\d+) of (\d+) operations still fail: .*\n((?:    \('.*\),\n)*)", section, re.MULTILINE)
    assert told is not None, section
    assert told[3].count("\n") == int(told[1]) <= 2
    assert "    ('add', ('r" in told[3]


@pytest.mark.patches_core
def test_shortest_schedule_no_time_leaves_all_that_was_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    freed_blocks_keep_a_reference(monkeypatch)
    chaos = Chaos(Life(4))
    with pytest.raises(LifeFailedError) as caught:
        chaos.run()
    assert caught.value.chaos is chaos
    assert shortest_schedule(chaos.life, chaos.operations, 0.0) == chaos.operations
    assert len(shortest_schedule(chaos.life, chaos.operations)) < len(chaos.operations)


def test_simulate_sound_core_says_which_seeds_it_ran() -> None:
    """The program itself, as `make simulate` starts it, for a moment."""
    program = [sys.executable, "-m", "tests.simulation.simulate", "--seconds", "1", "--seed", "4"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = re.fullmatch(r"seeds 4 to (\d+): nothing is wrong\n", done.stdout)
    assert last is not None, done.stdout
    assert int(last[1]) >= 4
