"""A follower that sees nothing but events knows the cache as the pool does, after every step and every fault."""

from __future__ import annotations

import os

import pytest

from tests.simulation.followed import FollowedChaos
from tests.simulation.life import Life

FIRST_SEED = int(os.environ.get("KVPLANE_SIMULATION_SEED", "1"))
NUM_SEEDS = int(os.environ.get("KVPLANE_SIMULATION_SEEDS", "40")) // 2


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_simulation_follower_knows_what_the_pool_knows_after_every_step(seed: int) -> None:
    life = FollowedChaos(Life(seed, follower_ring=1_000))
    life.run()
    assert life.snapshots == 1, "a ring that is large enough needs no other"


def test_simulation_follower_that_falls_behind_starts_anew() -> None:
    kinds: set[str] = set()
    snapshots = 0
    for seed in range(FIRST_SEED, FIRST_SEED + 10):
        life = FollowedChaos(Life(seed, follower_ring=4))
        life.run()
        kinds |= life.kinds
        snapshots += life.snapshots
    assert snapshots > 10
    assert kinds == {"stored", "removed", "cleared"}
