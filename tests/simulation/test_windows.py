"""Models with several KV groups, windows, chunks, states, over the wire: the executor's code reads and writes blocks.

Unlike `test_groups`, whose executor is the test's, steps go through messages, the executor's checks and the `sim`
backend: a null, wrong, stale or half-written block that a window reads changes an output, or is refused, and so does a
state that is older or newer than the row that starts from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.sim_digest import expected_tokens
from kvmanager_service import step_message
from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.group_swaps import GroupSwaps
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_groups import ChunkedLocal, RecurrentState, SlidingWindow
from kvmanager_service.core.request import Request, SamplingParams
from kvmanager_service.core.scheduler_config import PREEMPTION_MODES, SchedulerConfig
from tests.simulation.broken import Mutation, require_notice
from tests.simulation.chaos import Chaos
from tests.simulation.harness import VOCAB_SIZE, World, kv_groups
from tests.simulation.life import MODELS, Life
from tests.simulation.test_faults import FIRST_SEED, NUM_SEEDS
from tests.unit.core.builders import make_new


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS // 4))
@pytest.mark.parametrize("model", MODELS)
def test_windows_random_faults_every_output_is_the_oracles(model: str, seed: int) -> None:
    Chaos(Life(seed, windows=MODELS[model])).run()


@pytest.mark.parametrize("model", MODELS)
def test_windows_crowded_pool_every_output_is_the_oracles_and_faults_are_met(model: str) -> None:
    """Most requests are preempted, by every mode; hits, losses, adoptions and pins are met in every model."""
    met: Counter[str] = Counter()
    for index in range(12):
        mode = PREEMPTION_MODES[index % len(PREEMPTION_MODES)]
        life = Life(FIRST_SEED + index, MODELS[model], crowded=True, num_requests=12, preemption_mode=mode)
        chaos = Chaos(life)
        met.update(chaos.run().faults)
        stats = chaos.world.scheduler.stats
        met.update(preempted=stats.preemptions, hit=stats.prefix_hits, left=stats.swapped_out, back=stats.swapped_in)
    for event in ("preempted", "hit", "left", "back", "pin", "adopt_cache", "lose_stream", "fail_row"):
        assert met[event], f"{event} was never met: {dict(met)}"


def test_windows_a_long_sequence_needs_no_more_blocks_than_its_window() -> None:
    """700 tokens through a pool of 12 blocks of 4: more than the pool holds at once, but not more than the window."""
    config = SchedulerConfig(max_num_batched_tokens=16, watermark=0.0)

    def make_kv(num_blocks: int, block_size: int) -> KVCacheCoordinator:
        return KVCacheCoordinator(num_blocks, kv_groups(block_size, (20,)), longest_chunk=16)

    world = World(12, 4, config, make_kv, windows=(20,))
    prompt = [index % 50 for index in range(300)]
    world.scheduler.add_request(make_new("long", prompt, max_tokens=400, sampling=SamplingParams(temperature=0.0)))
    world.run()
    assert world.produced["long"].token_ids == expected_tokens(prompt, 400, vocab_size=VOCAB_SIZE, windows=(20,))
    assert world.scheduler.stats.preemptions == 0


# --- a test of the test: broken on purpose, and noticed ---------------------------------------------------------------


def window_one_token_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlidingWindow, "first_needed_token", lambda self, c: max(0, c - self.window + 2))


def chunk_one_token_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkedLocal, "first_needed_token", lambda self, c: min(c, c - c % self.chunk + 1))


def hit_needs_its_last_block_only(patch: pytest.MonkeyPatch) -> None:
    def longest_hit(self: SlidingWindow, cached: object, limit: int, alignment: int) -> int:
        while limit and cached(limit // self.block_size - 1) is None:  # type: ignore[operator]
            limit -= alignment
        return limit

    patch.setattr(SlidingWindow, "longest_hit", longest_hit)


def state_goes_on_from_a_null_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurrentState, "first_needed_token", lambda self, c: c)


def state_is_hit_in_the_step_that_leaves_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurrentState, "can_share_within_step", True)


def state_is_resumed_where_it_was_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurrentState, "can_fork", lambda self, num_tokens, num_computed: True)


def windows_come_back_without_their_tails(patch: pytest.MonkeyPatch) -> None:
    original = GroupSwaps.blocks_to_fill

    def blocks_to_fill(self: GroupSwaps, request: Request, num_tokens: int) -> list[tuple[int, KVCacheBlock]]:
        return original(self, request, num_tokens)[:-1]

    patch.setattr(GroupSwaps, "blocks_to_fill", blocks_to_fill)


def what_leaves_is_given_away_at_once(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheCoordinator.detach

    def detach(self: KVCacheCoordinator, request: Request) -> list[KVCacheBlock]:
        kept = original(self, request)
        self.pool.free_blocks(reversed(kept))
        return kept

    patch.setattr(KVCacheCoordinator, "detach", detach)
    patch.setattr(KVCacheCoordinator, "give_back_detached", lambda self, request, entries, blocks: None)


def tables_of_some_steps_sent_in_another_order(patch: pytest.MonkeyPatch) -> None:
    original = step_message.build_execute_request

    def build(*args: object) -> pb.ExecuteRequest:
        message = original(*args)  # type: ignore[arg-type]
        tables = list(message.block_tables)[:: -1 if message.step_id % 2 else 1]
        del message.block_tables[:]
        message.block_tables.extend(tables)
        return message

    patch.setattr("tests.simulation.harness.build_execute_request", build)


@pytest.mark.patches_core
@pytest.mark.parametrize(
    ("mutation", "model"),
    [
        (window_one_token_short, "full and sliding"),
        (window_one_token_short, "short and long windows"),
        (chunk_one_token_short, "full and chunks"),
        (chunk_one_token_short, "chunks, sliding and state"),
        (hit_needs_its_last_block_only, "sliding only"),
        (windows_come_back_without_their_tails, "sliding only"),
        (what_leaves_is_given_away_at_once, "two full"),
        (state_goes_on_from_a_null_block, "state only"),
        (state_is_hit_in_the_step_that_leaves_it, "sliding and state"),
        (state_is_resumed_where_it_was_not_kept, "full and states"),
        (tables_of_some_steps_sent_in_another_order, "two full"),
        (tables_of_some_steps_sent_in_another_order, "full and sliding"),
    ],
)
def test_windows_mutation_is_noticed(mutation: Mutation, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    monkeypatch.setattr("kvmanager_service.core.scheduler.Scheduler.check_integrity", lambda self: None)
    require_notice(_lives(model))


def _lives(model: str) -> Iterator[Life]:
    for seed in range(1, 40):
        yield Life(seed, windows=MODELS[model])
        yield Life(seed, windows=MODELS[model], preemption_mode="swap", crowded=True, num_requests=12)


@pytest.mark.parametrize("model", ["state only", "full and states", "sliding and state"])
def test_windows_victims_with_states_are_swapped_though_a_token_of_them_is_under_way(model: str) -> None:
    """The state has moved on for that token, so they could not go on from the one before."""
    swapped: set[tuple[int, str, int]] = set()
    for seed in range(3, 9):
        chaos = Chaos(
            Life(seed, windows=MODELS[model], crowded=True, faults=False, num_requests=8, preemption_mode="swap")
        )
        _watch_swaps(chaos, swapped)
        chaos.run()
    assert len(swapped) >= 5


def _watch_swaps(chaos: Chaos, swapped: set[tuple[int, str, int]]) -> None:
    """Note who is on its way to the host with a token under way: which life, which request, and which life of that."""
    checks, scheduler = chaos.world.watch, chaos.world.scheduler

    def watch() -> None:
        checks()
        for request in scheduler.waiting:
            if request.num_swapped_tokens and request.num_pending_tokens:
                swapped.add((chaos.life.seed, request.request_id, request.incarnation))

    chaos.world.watch = watch
