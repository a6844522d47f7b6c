"""Lives full of faults: whatever is lost, replaced, aborted or damaged, outputs are the oracle's and no block is lost.

KVPLANE_SIMULATION_SEEDS is how many seeds are run, KVPLANE_SIMULATION_SEED is the first. A failure names the command
that lives the same life again and shrinks it.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import pytest

from executor_service.backends.sim_digest import expected_tokens
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import Request, SamplingParams
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import SchedulerStats
from tests.simulation.chaos import Chaos
from tests.simulation.harness import VOCAB_SIZE, World
from tests.simulation.life import Life
from tests.simulation.met import STATES, Counts
from tests.unit.core.builders import make_new

FIRST_SEED = int(os.environ.get("KVPLANE_SIMULATION_SEED", "1"))
NUM_SEEDS = int(os.environ.get("KVPLANE_SIMULATION_SEEDS", "40"))


@cache
def counts_of(seed: int) -> Counts:
    """What happened in a life; a seed is always the same life, so it is lived once."""
    return Chaos(Life(seed)).run()


@cache
def crowded_counts_of(seed: int, mode: str) -> tuple[Counts, SchedulerStats]:
    """The same of a life in a crowded pool."""
    chaos = Chaos(Life(seed, preemption_mode=mode, crowded=True))
    return chaos.run(), chaos.world.scheduler.stats


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_simulation_random_faults_every_output_is_the_oracles(seed: int) -> None:
    counts_of(seed)


@pytest.mark.parametrize("seed", range(FIRST_SEED + 1000, FIRST_SEED + 1000 + NUM_SEEDS // 2))
def test_simulation_fair_policy_every_request_of_every_tenant_ends(seed: int) -> None:
    """Three tenants, whatever fails: a life that does not come to an end is an error of its own."""
    Chaos(Life(seed, policy="fair")).run()


@pytest.mark.patches_core
@pytest.mark.parametrize("one_byte", [False, True])
def test_simulation_request_is_admitted_whenever_a_lookup_finds_enough(
    one_byte: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that lacks blocks is refused without a lookup; that must never be another answer than with one."""
    allocate_sequence = KVCacheManager.allocate_sequence
    answers: Counter[tuple[bool, bool]] = Counter()

    def checked(self: KVCacheManager, request: Request, reserve: int = 0) -> bool:
        num_held = sum(block.ref_cnt > 0 for block in self.get_computed_blocks(request))
        lacking = self.num_blocks_for(request.num_tokens) + reserve - self.pool.num_free_blocks
        answer = allocate_sequence(self, request, reserve)
        assert answer == (num_held >= lacking)
        answers[answer, lacking > 0] += 1
        return answer

    monkeypatch.setattr(KVCacheManager, "allocate_sequence", checked)
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS // 4):
        Chaos(Life(seed, one_byte=one_byte)).run()
    assert answers[True, True] > 0, "hits made up for blocks that were lacking"
    assert answers[False, True] > 0


def live_through_a_failed_twin() -> None:
    """Two requests fill the same content in one step, and one of them fails with somebody reading it already."""
    world = World(30, 4, SchedulerConfig(max_outstanding=1))
    greedy = SamplingParams(temperature=0.0)
    prompt = [1, 2, 3, 4]
    output = expected_tokens(prompt, 5, vocab_size=VOCAB_SIZE)
    for request_id in ("failed", "twin"):
        world.scheduler.add_request(make_new(request_id, prompt, max_tokens=6, sampling=greedy))
    for _ in range(4):
        world.step()
    longer = [*prompt, *output[:4], 9, 9, 9, 9, 9]
    world.scheduler.add_request(make_new("reader", longer, sampling=greedy))
    world.schedule()
    requests = world.scheduler.requests
    assert requests["reader"].blocks[1] is requests["failed"].blocks[1]
    assert requests["reader"].contents[1] is requests["twin"].contents[1]
    world.executor.backend.rows_to_fail = [0]
    world.scheduler.abort("reader")
    world.complete()
    world.scheduler.add_request(make_new("next", longer, max_tokens=3, sampling=greedy))
    world.run()
    world.scheduler.check_integrity()
    assert world.produced["failed"].error is not None
    assert world.produced["twin"].token_ids == expected_tokens(prompt, 6, vocab_size=VOCAB_SIZE)
    assert world.produced["next"].token_ids == expected_tokens(longer, 3, vocab_size=VOCAB_SIZE)


def test_simulation_failed_twin_leads_nobody_to_what_was_computed_from_it() -> None:
    live_through_a_failed_twin()


def live_through_a_failed_copy() -> None:
    """The first chunk of a prompt is on its way to the host when it turns out that its row has failed."""
    world = World(
        7,
        4,
        SchedulerConfig(long_prefill_token_threshold=4, watermark=0.0, preemption_mode="swap"),
        num_host_blocks=8,
    )
    greedy = SamplingParams(temperature=0.0)
    prompts = {"a": [1] * 4, "b": [2] * 4, "c": list(range(15))}
    for request_id, prompt in prompts.items():
        world.scheduler.add_request(make_new(request_id, prompt, max_tokens=4, sampling=greedy))
    world.schedule()
    assert world.scheduler.stats.swapped_out == 1
    world.executor.backend.rows_to_fail = [2]
    world.complete()
    world.run()
    world.scheduler.check_integrity()
    for request_id, prompt in prompts.items():
        assert world.produced[request_id].token_ids == expected_tokens(prompt, 4, vocab_size=VOCAB_SIZE)


def test_simulation_copy_of_a_failed_row_is_used_by_nobody() -> None:
    live_through_a_failed_copy()


def live_through_a_lost_copy() -> None:
    """There is room for a request again while its blocks are on their way to the host, and they never get there."""
    config = SchedulerConfig(watermark=0.0, preemption_mode="swap", max_outstanding=2)
    world = World(7, 4, config, num_host_blocks=8)
    greedy = SamplingParams(temperature=0.0)
    prompts = {"a": [1] * 8, "b": [2] * 8, "c": list(range(7))}
    for request_id, prompt in prompts.items():
        world.scheduler.add_request(make_new(request_id, prompt, max_tokens=6, sampling=greedy))
    world.schedule()
    assert world.scheduler.stats.swapped_out == 1
    world.complete()
    world.scheduler.abort("a")
    world.scheduler.abort("b")
    world.schedule()
    world.lose_stream()
    world.run()
    expected = expected_tokens(prompts["c"], 6, vocab_size=VOCAB_SIZE)
    assert world.produced["c"].token_ids == expected, "c got other tokens than the oracle's"


def test_simulation_copy_that_was_lost_is_used_by_nobody() -> None:
    live_through_a_lost_copy()


@pytest.mark.parametrize("mode", ["swap", "auto"])
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS // 2))
def test_simulation_swapped_requests_in_a_crowded_pool_every_output_is_the_oracles(seed: int, mode: str) -> None:
    crowded_counts_of(seed, mode)


def test_simulation_crowded_lives_meet_every_end_of_a_copy() -> None:
    """Swapped out, back in, void, out of host blocks, and chosen by cost: the lives above prove nothing otherwise."""
    met: Counter[str] = Counter()
    for seed in range(1, 13):
        for mode in ("swap", "auto"):
            counts, stats = crowded_counts_of(seed, mode)
            met[f"{mode} out"] += stats.swapped_out
            met[f"{mode} in"] += stats.swapped_in
            met[f"{mode} not"] += stats.preemptions > stats.swapped_out
            met["not back"] += stats.swapped_out > stats.swapped_in
            met["aborted"] += counts.faults.get("abort_swapped", 0)
            met["lost"] += counts.faults.get("lose_stream_that_copies", 0)
    assert min(met.values()) > 5, met


def test_simulation_restarted_manager_adopts_the_cache_and_hits_it() -> None:
    world = World(40, 4)
    greedy = SamplingParams(temperature=0.0)
    prompt = list(range(22))
    world.scheduler.add_request(make_new("before", prompt, max_tokens=8, sampling=greedy))
    world.run()
    assert world.adopt_cache() >= 5
    world.scheduler.check_integrity()
    again = world.scheduler.add_request(make_new("after", prompt, max_tokens=8, sampling=greedy))
    world.run()
    assert again.num_cached_tokens == 20
    assert world.produced["after"].token_ids == world.produced["before"].token_ids
    assert world.produced["after"].token_ids == expected_tokens(prompt, 8, vocab_size=VOCAB_SIZE)


def test_simulation_manager_restarted_when_idle_adopts_all_it_had_computed() -> None:
    world = World(40, 4)
    world.scheduler.add_request(make_new("only", range(22), max_tokens=1))
    world.run()
    assert world.step(), "the last tags go without rows"
    assert world.adopt_cache() == 5


def test_simulation_manager_restarted_after_a_reset_adopts_nothing() -> None:
    world = World(40, 4)
    world.scheduler.add_request(make_new("only", range(22), max_tokens=8))
    world.run()
    world.scheduler.reset_prefix_cache()
    world.step()
    assert world.adopt_cache() == 0


def met_in_lives_of_ci() -> Counts:
    """Everything that the first of the lives above have met; they are lived once."""
    met = Counts()
    for counts in (
        *(counts_of(seed) for seed in range(1, 41)),
        *(crowded_counts_of(seed, mode)[0] for seed in range(1, 21) for mode in ("swap", "auto")),
    ):
        met.add_all(counts)
    return met


def test_simulation_many_lives_meet_every_fault_and_every_end() -> None:
    """The lives above prove nothing about faults that they never meet."""
    met = met_in_lives_of_ci()
    assert met.faults.keys() == {
        "abort",
        "abort_in_a_seldom_state",
        "abort_swapped",
        "add_duplicate",
        "adopt_cache",
        "answer_of_the_former",
        "fail",
        "fail_row",
        "fail_row_of_a_parent",
        "finish_by_stop_string",
        "fork",
        "hear_late",
        "jump_ahead",
        "jump_back",
        "lose_stream",
        "lose_stream_that_copies",
        "pin",
        "poison",
        "replace_executor",
        "reset_prefix_cache",
        "send_bad_result",
        "unpin",
        "wait",
    }
    assert met.outcomes.keys() == {
        "fork lets go",
        "fork runs from what it held",
        "fork waits and holds",
        "fork waits with nothing",
        "late answer of another cache",
        "late answer of the same cache",
        "pin refused: PIN_LIMIT",
        "pin refused: PIN_NAME_IN_USE",
        "pin refused: PIN_TOO_SHORT",
        "pinned",
        "reset",
        "reset refused",
    }
    assert met.finished.keys() == {"stop", "length", "abort", "error"}
    assert met.refused.keys() == {"too long", "queue full"}


def test_simulation_many_lives_meet_an_abort_in_every_state_of_a_request() -> None:
    """Whatever a request waits for or has under way, its client may go away in just that moment."""
    missing = STATES.keys() - met_in_lives_of_ci().aborted_in.keys()
    assert not missing, f"no request was aborted {sorted(missing)}"
