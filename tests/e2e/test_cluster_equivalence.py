"""How a request is scheduled must not show in its output: one load, every way to schedule it, the oracle's tokens."""

from __future__ import annotations

import random

import pytest

from tests.e2e.cluster import Cluster, settled
from tests.e2e.load import Running, random_jobs


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("queue_ahead", [True, False])
@pytest.mark.parametrize("caching", [True, False])
async def test_load_on_a_small_pool_gives_the_oracles_tokens(
    cluster: Cluster, policy: str, queue_ahead: bool, caching: bool
) -> None:
    # Long outputs on short prompts: many are admitted, then they outgrow the pool together.
    jobs = random_jobs(random.Random(21), 40, prompt=(1, 80), output=(20, 160))
    jobs += random_jobs(random.Random(22), 20, prompt=(60, 160), output=(1, 40))
    manager = {
        "policy": policy,
        "queue_ahead": queue_ahead,
        "enable_prefix_caching": caching,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 32,
        "watermark": 0.0,
    }
    cluster.start(manager, sim_step_ms=0, block_size=8, sim_num_blocks=100)
    async with cluster.client() as client:
        async with Running(client, jobs) as running:
            await running.finished()
        stats = await settled(client)

    assert stats.preemptions > 0
    assert stats.requests_finished == {"length": len(jobs)}
    assert stats.tokens_generated == sum(job.max_tokens for job in jobs)
    if not caching:
        # The last token of an output is never computed, and what was preempted was computed again.
        assert stats.tokens_computed > sum(len(job.prompt) + job.max_tokens - 1 for job in jobs)
    assert stats.steps_failed == stats.reschedules == 0
    assert stats.prefix_queries == (sum(len(job.prompt) for job in jobs) if caching else 0)
    assert (stats.prefix_hits > 0) is caching
    assert stats.prefix_hits == sum(job.cached_tokens for job in jobs)
    assert stats.pool is not None
    assert (stats.pool.cached_blocks > 0) is caching


@pytest.mark.parametrize(
    ("mode", "swap_space"), [("swap", "64KiB"), ("swap", "2KiB"), ("auto", "64KiB")], ids=["room", "no room", "auto"]
)
async def test_load_that_is_swapped_gives_the_oracles_tokens(cluster: Cluster, mode: str, swap_space: str) -> None:
    """A block of the sim backend takes 64 bytes: the host has ten times as many as the pool, or a third."""
    jobs = random_jobs(random.Random(21), 40, prompt=(1, 80), output=(20, 160))
    manager = {
        "preemption_mode": mode,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 32,
        "watermark": 0.0,
    }
    cluster.start(manager, sim_step_ms=0, sim_us_per_token=100, block_size=8, sim_num_blocks=100, swap_space=swap_space)
    async with cluster.client() as client:
        async with Running(client, jobs) as running:
            await running.finished()
        stats = await settled(client)

    assert stats.requests_finished == {"length": len(jobs)}
    assert stats.steps_failed == stats.reschedules == 0
    assert stats.pool is not None
    assert stats.pool.num_host_blocks == (32 if swap_space == "2KiB" else 1024)
    assert stats.pool.used_host_blocks == 0
    assert stats.swapped_in >= stats.swapped_out > 0, "who is preempted on its return needs no copying out"
    computed_again = stats.tokens_computed - sum(len(job.prompt) + job.max_tokens - 1 for job in jobs)
    print(f"{stats.preemptions} preemptions, {stats.swapped_out} swapped out, {computed_again} tokens computed again")
    if mode == "swap" and swap_space == "64KiB":
        # The newest token, whose successor was being sampled; and what was computed on a return that was cut short.
        assert computed_again < 5 * stats.preemptions
    elif mode == "swap":
        assert stats.swapped_out < stats.preemptions
        assert computed_again > 5 * stats.preemptions
