"""A follower that sees nothing but events knows the cache as the pool does, after every step and every fault."""

from __future__ import annotations

import os

import pytest

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.group_key import group_of
from tests.simulation.broken import require_notice
from tests.simulation.followed import FollowedChaos
from tests.simulation.life import MODELS, Life

FIRST_SEED = int(os.environ.get("KVPLANE_SIMULATION_SEED", "1"))
NUM_SEEDS = int(os.environ.get("KVPLANE_SIMULATION_SEEDS", "40")) // 2

MODELS_OF_GROUPS = ("full and sliding", "full and states", "full and chunks", "sliding and state")
"""Blocks of each type of group, and of groups whose blocks leave at different times."""


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_simulation_follower_knows_what_the_pool_knows_after_every_step(seed: int) -> None:
    life = FollowedChaos(Life(seed, follower_ring=1_000))
    life.run()
    assert life.snapshots == 1, "a ring that is large enough needs no other"


@pytest.mark.parametrize("model", MODELS_OF_GROUPS)
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS // 4))
def test_simulation_follower_of_several_groups_knows_what_the_pool_knows_after_every_step(
    model: str, seed: int
) -> None:
    life = FollowedChaos(Life(seed, MODELS[model], num_requests=12, follower_ring=1_000))
    life.run()
    assert life.snapshots == 1, "a ring that is large enough needs no other"


@pytest.mark.parametrize("model", MODELS_OF_GROUPS)
def test_simulation_follower_of_several_groups_that_falls_behind_starts_anew(model: str) -> None:
    kinds: set[str] = set()
    snapshots = 0
    for seed in range(FIRST_SEED, FIRST_SEED + 3):
        life = FollowedChaos(Life(seed, MODELS[model], num_requests=12, follower_ring=4))
        life.run()
        kinds |= life.kinds
        snapshots += life.snapshots
    assert snapshots > 4
    assert kinds >= {"stored", "removed"}


@pytest.mark.patches_core
def test_simulation_event_of_another_group_that_nobody_tells_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test."""
    original = BlockEventLog.removed

    def removed(self: BlockEventLog, block_id: int, content: BlockContent) -> None:
        if not group_of(content):
            original(self, block_id, content)

    monkeypatch.setattr(BlockEventLog, "removed", removed)
    require_notice(Life(seed, MODELS["full and sliding"], follower_ring=1_000) for seed in range(1, 10))


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
