"""Hybrid models over pools that are far too small, with lost steps, failed rows and restarts of the manager.

And a test of the test: the groups are broken on purpose, and the simulation must notice each time.
"""

from collections.abc import Callable

import pytest

from kvmanager_service.core.group_hits import GroupHits
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_groups import (
    ChunkedLocal,
    FullAttention,
    GroupTable,
    KVGroup,
    RecurrentState,
    SlidingWindow,
)
from kvmanager_service.core.prefix_ledger import PrefixLedger
from tests.simulation.group_world import live

MODELS: dict[str, list[KVGroup]] = {
    "full and sliding": [FullAttention(4), SlidingWindow(4, 10)],
    "full and chunked": [FullAttention(4), ChunkedLocal(4, 12)],
    "full and state": [FullAttention(2), RecurrentState(8), RecurrentState(8)],
    "all four, unequal blocks": [FullAttention(2), SlidingWindow(4, 7), ChunkedLocal(3, 10), RecurrentState(6)],
    "sliding only": [SlidingWindow(4, 10)],
    "sliding and state": [SlidingWindow(3, 8), RecurrentState(6)],
    "state only": [RecurrentState(5)],
}


@pytest.mark.parametrize("max_outstanding", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_groups_random_load_gives_the_oracles_tokens(model: str, max_outstanding: int) -> None:
    world = live(MODELS[model], max_outstanding, faults=False, seed=f"{model} {max_outstanding}")
    assert world.scheduler.stats.prefix_hits > 0
    assert world.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("max_outstanding", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_groups_random_load_with_faults_gives_the_oracles_tokens(model: str, max_outstanding: int) -> None:
    world = live(MODELS[model], max_outstanding, faults=True, seed=f"{model} {max_outstanding} faults")
    assert world.scheduler.stats.prefix_hits > 0
    assert world.scheduler.stats.reschedules > 0
    assert world.num_adopted > 0 or not isinstance(MODELS[model][0], FullAttention)


Mutation = Callable[[pytest.MonkeyPatch], None]


def window_one_token_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlidingWindow, "first_needed_token", lambda self, c: max(0, c - self.window + 2))


def chunk_starts_one_token_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkedLocal, "first_needed_token", lambda self, c: min(c, c - c % self.chunk + 1))


def state_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurrentState, "first_needed_token", lambda self, c: c)


def state_shared_within_its_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurrentState, "can_share_within_step", True)


def hit_needs_its_last_block_only(patch: pytest.MonkeyPatch) -> None:
    def longest_hit(self: KVGroup, cached: Callable[[int], object], limit: int, alignment: int) -> int:
        while limit and cached(limit // self.block_size - 1) is None:
            limit -= alignment
        return limit

    patch.setattr(FullAttention, "longest_hit", longest_hit)
    patch.setattr(KVGroup, "longest_hit", longest_hit)


class HasAll:
    """A lookup that finds whatever it is asked for."""

    def block(self, index: int) -> object:
        return self


def groups_do_not_agree(patch: pytest.MonkeyPatch) -> None:
    """The last group's word is taken, and what the others lack is null."""
    original = GroupHits.longest

    def longest(self: GroupHits, request: object, lookups: list[object]) -> int:
        return original(self, request, [HasAll() for _ in lookups[:-1]] + lookups[-1:])  # type: ignore[arg-type]

    patch.setattr(GroupHits, "longest", longest)


def groups_share_contents(patch: pytest.MonkeyPatch) -> None:
    original = GroupHits.__init__

    def init(self: GroupHits, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        self.group_keys = self.group_keys[:1] * len(self.group_keys)

    patch.setattr(GroupHits, "__init__", init)


def table_keeps_what_it_gave_back(patch: pytest.MonkeyPatch) -> None:
    def leave(self: GroupTable, first: int) -> None:
        self.first = first
        self.needed_until = self._group.needed_until((first + 1) * self._block_size)

    patch.setattr(GroupTable, "leave", leave)


def nobody_relies_on_what_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheCoordinator, "relies_on", lambda self, request, distrusted: False)


def what_follows_from_a_failure_is_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixLedger, "forget", lambda self, serials: None)


MUTATIONS: list[tuple[Mutation, str]] = [
    (window_one_token_short, "full and sliding"),
    (chunk_starts_one_token_late, "all four, unequal blocks"),
    (state_not_kept, "full and state"),
    (state_shared_within_its_step, "full and state"),
    (hit_needs_its_last_block_only, "full and sliding"),
    (hit_needs_its_last_block_only, "sliding only"),
    (groups_do_not_agree, "full and sliding"),
    (groups_do_not_agree, "full and state"),
    (groups_share_contents, "full and sliding"),
    (table_keeps_what_it_gave_back, "sliding only"),
    (nobody_relies_on_what_failed, "full and sliding"),
    (what_follows_from_a_failure_is_found, "full and sliding"),
]


@pytest.mark.patches_core
@pytest.mark.parametrize(("mutation", "model"), MUTATIONS)
def test_groups_mutation_is_noticed(mutation: Mutation, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        _live_often(model)


def _live_often(model: str) -> None:
    for seed in range(20):
        live(MODELS[model], 2, faults=True, seed=f"{model} {seed}")
