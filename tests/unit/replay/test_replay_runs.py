"""Runs small enough to reckon by hand, and the two runners against each other."""

import random
from dataclasses import replace

import pytest

from kvmanager_service.core.eviction_policies import EVICTION_POLICIES
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import FullAttention
from kvmanager_service.core.retention import RetentionRange
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.replay.cost_model import CostModel
from kvmanager_service.replay.group_reads import GroupReads
from kvmanager_service.replay.one_at_a_time import replay_one_at_a_time
from kvmanager_service.replay.report import Measurements, percentiles, summarise, table
from kvmanager_service.replay.timed import TimedReplay
from kvmanager_service.replay.trace import TraceRequest

ONE_SECOND = CostModel(step_us=1e6, prefill_token_us=0, decode_row_us=0, context_token_us=0, attention_pair_us=0)
BLOCK_SIZE = 4


def traced(name: str, arrival: float, *parts: tuple[int, int], output: int = 1, priority: int = 0) -> TraceRequest:
    return TraceRequest(name, arrival, parts, output, priority=priority)


def run(
    trace: list[TraceRequest],
    num_blocks: int = 40,
    cost: CostModel = ONE_SECOND,
    speedup: float = 1.0,
    *,
    eviction_policy: str = "lru",
    num_host_blocks: int = 0,
    **limits: object,
) -> Measurements:
    kv = KVCacheManager(num_blocks, BLOCK_SIZE, eviction_policy=eviction_policy)
    values = {"max_waiting": len(trace), "max_outstanding": 1, "watermark": 0.0} | limits
    scheduler = Scheduler(SchedulerConfig(**values), kv, num_host_blocks)  # type: ignore[arg-type]
    found = TimedReplay(trace, scheduler, cost, speedup).run()
    scheduler.check_integrity()
    assert kv.pool.num_free_blocks == num_blocks - 1
    return found


def test_timed_lone_request_has_a_token_a_step() -> None:
    found = run([traced("a", 0.0, (1, 8), output=3)])
    assert list(found.first_token_times) == [1.0]
    assert list(found.token_gaps) == [1.0, 1.0]
    assert list(found.queue_times) == [0.0]
    assert (found.makespan, found.steps, found.output_tokens) == (3.0, 3, 3)


@pytest.mark.parametrize(("late", "num_found"), [(50.0, 8), (80.0, 0)])
def test_timed_durations_run_on_the_replays_clock(late: float, num_found: int) -> None:
    """What is asked to be kept for a minute is found again before the minute is over."""
    kept = replace(traced("a", 0.0, (1, 9), output=1), retention=(RetentionRange(0, 9, 90, 60.0),))
    trace = [kept, traced("b", 10.0, (2, 9), output=1), traced("c", late, (3, 17), output=1)]
    found = run([*trace, traced("d", late + 5.0, (1, 9), output=1)], num_blocks=8, eviction_policy="priority")
    assert found.hit_tokens == num_found


def test_timed_step_queued_ahead_takes_the_same_time() -> None:
    found = run([traced("a", 0.0, (1, 8), output=3)], max_outstanding=2)
    assert list(found.token_gaps) == [1.0, 1.0]
    assert found.output_tokens == 3
    assert found.makespan == 3.0


def test_timed_second_request_waits_for_its_turn() -> None:
    trace = [traced("a", 0.0, (1, 8), output=3), traced("b", 0.5, (2, 8), output=1)]
    found = run(trace, max_num_seqs=1)
    assert list(found.queue_times) == [0.0, 2.5]
    assert list(found.first_token_times) == [1.0, 3.5]
    assert (found.makespan, found.max_queue, found.queue_seconds) == (4.0, 1, 2.5)


def test_timed_arrival_between_steps_joins_the_next_one() -> None:
    found = run([traced("a", 0.0, (1, 8), output=3), traced("b", 0.5, (2, 8), output=1)])
    assert list(found.queue_times) == [0.0, 0.5]
    assert found.makespan == 3.0


def test_timed_speedup_brings_arrivals_closer() -> None:
    trace = [traced("a", 0.0, (1, 8)), traced("b", 100.0, (2, 8))]
    assert run(trace).makespan == 101.0
    assert run(trace, speedup=10.0).makespan == 11.0


def test_timed_priority_policy_serves_the_lower_value_first() -> None:
    trace = [traced("a", 0.0, (1, 8)), traced("b", 0.5, (2, 8)), traced("c", 0.6, (3, 8), priority=-1)]
    waits = {"fcfs": [0.0, 0.5, 1.4], "priority": [0.0, 0.4, 1.5]}
    for policy, expected in waits.items():
        assert list(run(trace, policy=policy, max_num_seqs=1).queue_times) == pytest.approx(expected)


def test_timed_shared_prefix_is_counted_in_blocks_and_tokens() -> None:
    trace = [traced("a", 0.0, (1, 8), (2, 2)), traced("b", 10.0, (1, 8), (3, 3))]
    found = run(trace)
    assert (found.hit_tokens, found.prompt_tokens) == (8, 21)
    assert (found.hit_blocks, found.prompt_blocks) == (2, 6)
    cache = summarise(found, {})["prefix_cache"]
    assert (cache["block_hit_ratio"], cache["token_hit_ratio"]) == (2 / 6, 8 / 21)


def test_timed_preemption_shows_as_one_and_its_look_up_is_not_counted_again() -> None:
    trace = [traced("a", 0.0, (1, 12), output=8), traced("b", 0.0, (2, 12), output=8)]
    found = run(trace, num_blocks=9)
    assert found.preemptions >= 1
    assert (found.hit_tokens, found.prompt_tokens) == (0, 24)
    assert found.output_tokens == 16
    assert max(found.token_gaps) > 1.0


def test_timed_swap_costs_its_copies_and_computes_nothing_twice() -> None:
    trace = [traced("a", 0.0, (1, 12), output=8), traced("b", 0.0, (2, 12), output=8)]
    cost = CostModel(step_us=1e6, prefill_token_us=0, decode_row_us=0, context_token_us=0, copy_token_us=250_000)
    limits = {"cost": cost, "num_host_blocks": 20, "num_blocks": 9}
    found = run(trace, preemption_mode="swap", **limits)  # type: ignore[arg-type]
    again = run(trace, **limits)  # type: ignore[arg-type]
    assert (found.preemptions, found.swapped_out, found.output_tokens) == (1, 1, 16)
    assert found.tokens_computed == 2 * (12 + 8 - 1) < again.tokens_computed


def test_timed_auto_learns_from_what_steps_cost() -> None:
    trace = [traced(f"r{index}", 0.0, (index, 12), output=20) for index in range(30)]
    ways = {"num_blocks": 20, "num_host_blocks": 100, "preemption_mode": "auto", "max_num_batched_tokens": 64}
    cheap = run(trace, cost=CostModel(copy_token_us=1), **ways)  # type: ignore[arg-type]
    dear = run(trace, cost=CostModel(copy_token_us=100_000), **ways)  # type: ignore[arg-type]
    assert cheap.swapped_out > cheap.preemptions // 2
    assert 1 <= dear.swapped_out <= 1 + dear.preemptions // 64


def test_timed_request_that_can_never_fit_is_refused_and_one_that_outgrows_the_pool_fails() -> None:
    trace = [traced("a", 0.0, (1, 100)), traced("b", 0.0, (2, 8), output=100), traced("c", 0.0, (3, 4))]
    found = run(trace, num_blocks=6)
    assert (found.refused, found.failed, found.num_requests) == (1, 1, 2)


def test_cost_model_sums_its_terms() -> None:
    kv = KVCacheManager(40, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(max_outstanding=1), kv)
    cost = CostModel(step_us=1e6, prefill_token_us=1e4, decode_row_us=1e2, context_token_us=1, attention_pair_us=0.1)
    run_times = []
    scheduler.add_request(traced("a", 0.0, (1, 8), output=3).to_new_request(0.0))
    step = scheduler.schedule()
    assert step is not None
    run_times.append(cost.seconds(step, GroupReads([FullAttention(4)])))
    found = run([traced("a", 0.0, (1, 8), output=3), traced("b", 1.0, (2, 5), output=1)], cost=cost)
    # 8 prompt tokens, 8 read, 36 pairs; then a row at length 9 beside 5 prompt tokens, 15 pairs; then one at length 10.
    first, second, third = 1.080008 + 0.0000036, 1.0 + 0.05 + 0.0001 + 0.000014 + 0.0000015, 1.0 + 0.0001 + 0.00001
    assert run_times == [pytest.approx(first)]
    assert list(found.token_gaps) == pytest.approx([second, third])
    assert found.makespan == pytest.approx(first + second + third)


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_requests_far_apart_hit_what_they_hit_one_at_a_time(policy: str) -> None:
    rng = random.Random(11)
    trace = [
        TraceRequest(
            f"r{index}",
            1000.0 * index,
            tuple((rng.randrange(3) if depth == 0 else rng.randrange(6), BLOCK_SIZE) for depth in range(1 + index % 9)),
            1,
            retention_priority=rng.randrange(-100, 101),
        )
        for index in range(400)
    ]
    alone = replay_one_at_a_time(trace, KVCacheManager(30, BLOCK_SIZE, eviction_policy=policy))
    timed = run(trace, num_blocks=30, eviction_policy=policy)
    assert alone.evictions > 100
    assert 0 < alone.hit_blocks < alone.prompt_blocks
    names = ("hit_blocks", "prompt_blocks", "hit_tokens", "prompt_tokens", "evictions")
    assert [getattr(alone, name) for name in names] == [getattr(timed, name) for name in names]


def test_one_at_a_time_prompt_larger_than_the_pool_is_refused() -> None:
    kv = KVCacheManager(4, BLOCK_SIZE)
    found = replay_one_at_a_time([traced("a", 0.0, (1, 13)), traced("b", 0.0, (2, 12))], kv)
    assert (found.refused, found.num_requests) == (1, 1)
    kv.check_integrity([])


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([]) is None
    assert percentiles([5.0]) == {"mean": 5.0, "p50": 5.0, "p90": 5.0, "p99": 5.0, "max": 5.0}
    spread = percentiles([float(value) for value in range(200, 0, -1)])
    assert spread == {"mean": 100.5, "p50": 100.0, "p90": 180.0, "p99": 198.0, "max": 200.0}


def test_table_shows_times_only_of_what_has_a_clock() -> None:
    settings = {"num_blocks": 40, "block_size": BLOCK_SIZE, "kv_groups": "full", "eviction_policy": "lru"}
    trace = [traced("a", 0.0, (1, 8))]
    timed = table(summarise(run(trace), settings))
    alone = table(summarise(replay_one_at_a_time(trace, KVCacheManager(40, BLOCK_SIZE)), settings))
    assert timed.row_count == alone.row_count + 7
