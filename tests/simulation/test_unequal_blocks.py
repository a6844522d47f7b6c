"""Models whose KV groups have block sizes of their own, over the wire, with hits, preemptions, lost steps and restarts.

What `test_groups` shows of the core alone: here steps go through messages, the executor's checks and the `sim` backend,
so that a table, a slot or a length that was reckoned with another group's block size is refused or changes an output.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest

from executor_service.backends.sim_digest import expected_tokens
from executor_service.errors import InvalidFieldError
from kvmanager_service.core.kv_cache import KVCache, make_kv_cache
from kvmanager_service.core.request import NewRequest, StopRules
from kvmanager_service.core.scheduler_config import PREEMPTION_MODES, SchedulerConfig
from kvmanager_service.engine_views import group_block_sizes
from tests.simulation.chaos import Chaos
from tests.simulation.harness import VOCAB_SIZE, World, kv_groups
from tests.simulation.life import Life
from tests.simulation.test_faults import FIRST_SEED

MODELS = {
    "full 3, sliding 6": ((0, 10, 10), (1, 2, 2)),
    "full 6, sliding 3": ((0, 10), (2, 1)),
    "full 6, chunks 9": ((0, -10), (2, 3)),
    "two full, 3 and 12": ((0, 0), (1, 4)),
    "full 3, sliding 6, states 12": ((0, 9, -1, -1), (1, 2, 4, 4)),
}
WITHIN_LONGER = {"full 6, sliding 3", "full 6, chunks 9"}
"""Those where a block that is left of a window can start where none of full attention does."""

BLOCK_SIZE, NUM_REQUESTS = 3, 60


def live(windows: tuple[int, ...], factors: tuple[int, ...], mode: str = "recompute", *, faults: bool = False) -> World:
    """Requests with common prefixes on a pool that is too small: each must get the oracle's tokens."""
    rng = random.Random(f"{windows} {factors} {mode} {faults}")
    config = SchedulerConfig(
        max_num_batched_tokens=rng.choice((7, 32)),
        max_num_seqs=8,
        watermark=0.0,
        max_outstanding=2,
        preemption_mode=mode,
        max_waiting=NUM_REQUESTS,
    )

    def make_kv(num_blocks: int, block_size: int) -> KVCache:
        groups = kv_groups(block_size, windows, factors)
        return make_kv_cache(num_blocks, groups, longest_chunk=config.max_num_batched_tokens)

    longest = config.max_num_batched_tokens
    of_two = 2 * sum(group.most_blocks(71, longest) for group in kv_groups(BLOCK_SIZE, windows, factors))
    num_blocks = 1 + of_two
    world = World(
        num_blocks, BLOCK_SIZE, config, make_kv, num_host_blocks=3 * num_blocks, windows=windows, factors=factors
    )
    assert group_block_sizes(world.scheduler.kv) == tuple(BLOCK_SIZE * factor for factor in factors)
    roots = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
    expected = {}
    for index in range(NUM_REQUESTS):
        prompt = rng.choice(roots)[: rng.randint(1, 40)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        stop = StopRules(max_tokens=rng.randint(1, 25))
        world.scheduler.add_request(NewRequest(f"r{index}", array("i", prompt).tobytes(), stop, seed=index))
        expected[f"r{index}"] = expected_tokens(
            prompt, stop.max_tokens, vocab_size=VOCAB_SIZE, seed=index, temperature=1.0, windows=windows
        )
    deeds = [world.lose_stream, world.replace_executor, world.adopt_cache]
    while world.scheduler.has_work:
        if faults and rng.random() < 0.03:
            rng.choice(deeds)()
        world.step()
        world.scheduler.check_integrity()
    got = {request_id: produced.token_ids for request_id, produced in world.produced.items()}
    wrong = [request_id for request_id, tokens in expected.items() if got[request_id] != tokens]
    assert not wrong, f"other tokens than the oracle's: {wrong}"
    return world


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
@pytest.mark.parametrize("model", MODELS)
def test_unequal_blocks_small_pool_every_output_is_the_oracles(model: str, mode: str) -> None:
    stats = live(*MODELS[model], mode).scheduler.stats
    assert stats.prefix_hits > 0
    assert stats.preemptions > 0
    assert (stats.swapped_in > 0) == (mode == "swap") or mode == "auto"


@pytest.mark.parametrize("model", MODELS)
def test_unequal_blocks_lost_steps_and_restarts_change_no_output(model: str) -> None:
    stats = live(*MODELS[model], "swap", faults=True).scheduler.stats
    assert stats.prefix_hits > 0
    assert stats.reschedules > 0


@pytest.mark.parametrize("model", MODELS)
def test_unequal_blocks_lives_full_of_faults_every_output_is_the_oracles_and_all_is_met(model: str) -> None:
    """Pins, forks, preemptions by every mode, and adoptions of what starts within a longer block."""
    windows, factors = MODELS[model]
    met: Counter[str] = Counter()
    for index in range(8):
        mode = PREEMPTION_MODES[index % len(PREEMPTION_MODES)]
        is_crowded = index % 2 == 0
        chaos = Chaos(
            Life(
                FIRST_SEED + index,
                windows,
                factors,
                crowded=is_crowded,
                num_requests=12 if is_crowded else None,
                preemption_mode=mode,
            )
        )
        counts = chaos.run()
        met.update(counts.faults)
        met.update(counts.outcomes)
        stats = chaos.world.scheduler.stats
        met.update(preempted=stats.preemptions, hit=stats.prefix_hits, left=stats.swapped_out, back=stats.swapped_in)
    expected = ["preempted", "hit", "left", "back", "pinned", "adopt_cache", "lose_stream", "fail_row"]
    if model in WITHIN_LONGER:
        expected.append("adopted within a longer block")
    for event in expected:
        assert met[event], f"{event} was never met: {dict(met)}"


def test_unequal_blocks_tables_in_the_size_of_the_first_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: whoever writes all tables in one size is noticed."""
    monkeypatch.setattr("tests.simulation.harness.table_sizes", lambda kv: [kv.groups[0].block_size] * len(kv.groups))
    with pytest.raises(InvalidFieldError, match=r"block_tables\[1\].block_indptr"):
        live(*MODELS["full 3, sliding 6"])
