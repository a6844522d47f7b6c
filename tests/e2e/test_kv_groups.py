"""Models with several KV groups, with windows only, and with states, served by real processes."""

from __future__ import annotations

import random

import pytest
from kvplane_client import AsyncClient, BlockFilter

from tests.e2e.cluster import Cluster, serving, settled
from tests.e2e.load import Job, Running, random_jobs

MANAGER = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "watermark": 0.0, "lease_ms": 1_000}


def jobs_of(seed: int, count: int, windows: tuple[int, ...], **lengths: tuple[int, int]) -> list[Job]:
    """Requests with common prefixes whose right output is that of a model with these windows."""
    jobs = random_jobs(random.Random(seed), count, **lengths)
    for job in jobs:
        job.windows = windows
    return jobs


def start(cluster: Cluster, windows: tuple[int, ...], mode: str = "recompute", **executor: object) -> None:
    settings = {"sim_windows": ",".join(map(str, windows)), "sim_step_ms": 0, "block_size": 8, "max_model_len": 400}
    cluster.start(MANAGER | {"preemption_mode": mode, "block_history": 1_000_000}, **(settings | executor))


async def found_again(client: AsyncClient, windows: tuple[int, ...]) -> int:
    """Run two requests of one prompt of 100 tokens, one after the other. Returns what the second finds cached."""
    twins = [Job(list(range(100)), 5, windows=windows) for _ in range(2)]
    for twin in twins:
        async with Running(client, [twin]) as running:
            await running.finished()
    return twins[1].cached_tokens


@pytest.mark.parametrize(
    ("windows", "num_blocks", "mode"),
    [
        ((0, 24), 90, "recompute"),
        ((24,), 40, "recompute"),
        ((0, 24, 24, 5), 90, "recompute"),
        ((0, 24), 90, "swap"),
        ((24,), 40, "auto"),
        ((0, 24, 24, 5), 90, "swap"),
        ((-1,), 16, "recompute"),
        ((0, -1, -1), 90, "recompute"),
        ((0, -1, -1), 90, "auto"),
    ],
)
async def test_groups_on_a_small_pool_give_the_oracles_tokens(
    cluster: Cluster, windows: tuple[int, ...], num_blocks: int, mode: str
) -> None:
    """Preempted, chunked and from the prefix cache; swapped where the manager does that."""
    jobs = jobs_of(31, 30, windows, prompt=(1, 80), output=(20, 160))
    jobs += jobs_of(32, 20, windows, prompt=(60, 160), output=(1, 40))
    start(cluster, windows, mode, sim_num_blocks=num_blocks, swap_space="64KiB")
    async with cluster.client() as client:
        async with Running(client, jobs) as running:
            await running.finished()
        # What the crowd finds in the cache is chance; whoever comes after the same prompt finds all of its blocks.
        cached_tokens = await found_again(client, windows)
        stats = await settled(client)
    assert stats.requests_finished == {"length": len(jobs) + 2}
    assert stats.preemptions > 0
    assert cached_tokens == 96
    assert stats.steps_failed == 0
    assert (stats.swapped_out > 0) == (mode != "recompute")
    assert stats.swapped_in > 0 or mode != "swap"
    assert stats.pool is not None
    assert stats.pool.used_host_blocks == 0


async def test_groups_with_block_sizes_of_their_own_give_the_oracles_tokens_and_are_shown(cluster: Cluster) -> None:
    windows = (0, 24, 24)
    jobs = jobs_of(35, 30, windows, prompt=(1, 120), output=(20, 120))
    start(cluster, windows, "swap", sim_block_sizes="8,16,16", sim_num_blocks=70, swap_space="64KiB")
    async with cluster.client() as client:
        async with Running(client, jobs) as running:
            await running.finished()
        cached_tokens = await found_again(client, windows)
        stats = await settled(client)
    assert stats.preemptions > 0
    assert stats.swapped_in > 0
    assert stats.steps_failed == 0
    assert cached_tokens == 96
    assert stats.pool is not None
    assert (stats.pool.block_size, stats.pool.group_block_sizes) == (16, (8, 16, 16))


async def test_groups_a_killed_executor_and_a_killed_manager_change_no_token(cluster: Cluster) -> None:
    windows = (0, 40)
    start(cluster, windows, sim_step_ms=2)
    jobs = jobs_of(33, 8, windows, prompt=(64, 200), output=(60, 120))
    async with cluster.client() as client:
        async with Running(client, jobs) as running:
            await running.progressed(5)
            cluster.executors[0].kill()
            await cluster.manager.logged("executor_lost")
            cluster.start_executor(sim_windows="0,40", block_size=8, max_model_len=400, sim_step_ms=2)
            await running.finished()
        await settled(client)
        cluster.manager.kill()
        cluster.start_manager()
        ready = await cluster.manager.logged("kv_cache_ready")
        assert ready["num_groups"] == 2
        assert ready["adopted_blocks"] > 0
        await serving(client)
        # The prompt's tail is in the window's table still: what goes on from there need not compute the prompt.
        again = [Job(job.prompt, job.max_tokens, job.options, windows=windows) for job in jobs]
        async with Running(client, again) as rerun:
            await rerun.finished()
        assert any(job.cached_tokens >= 40 for job in again)
        await settled(client)


async def test_groups_are_shown_pinned_and_traced(cluster: Cluster) -> None:
    windows = (0, 10)
    start(cluster, windows, sim_step_ms=5)
    job = jobs_of(34, 1, windows, prompt=(60, 60), output=(300, 300))[0]
    async with cluster.client() as client, Running(client, [job]) as running:
        await running.progressed(20)
        full, sliding = await check_shown(client)
        pin = await client.pin_prefix("p", job.prompt)
        # Seven full blocks of 8; what follows on 56 tokens reads the last two of the window's.
        assert (pin.num_tokens, pin.num_blocks, pin.held_blocks) == (60, 9, 9)
        await running.finished()
        await check_traced(client, full[0], sliding[-2])
        again = Job([*job.prompt, 7], 5, job.options, windows=windows)
        async with Running(client, [again]) as rerun:
            await rerun.finished()
        assert again.cached_tokens == 56
        assert [one async for one in client.list_blocks(BlockFilter.USED)]
        await client.unpin_prefix("p")
        await settled(client)


async def check_traced(client: AsyncClient, full: int, sliding: int) -> None:
    for group, block_id in enumerate((full, sliding)):
        told = await client.trace_block(block_id)
        assert (told.num_groups, told.is_whole) == (2, True)
        moments = [(str(record.moment), record.group) for record in told.records[:4]]
        assert moments == [(name, group) for name in ("allocated", "hashed", "filled", "freed")]


async def check_shown(client: AsyncClient) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns its tables."""
    (info,) = [info async for info in client.list_requests()]
    full, sliding = info.block_tables
    assert info.block_table == full
    assert 0 not in full
    assert len(full) == len(sliding)
    # 80 tokens at least, 8 in a block: only the last few are within a window of 10.
    assert set(sliding[:7]) == {0}
    assert 0 not in sliding[-2:]
    assert not set(full) & {block_id for block_id in sliding if block_id}
    groups = {block.block_id: block.group async for block in client.list_blocks(BlockFilter.CACHED)}
    assert groups[full[0]] == 0
    assert 1 in groups.values()
    return full, sliding
