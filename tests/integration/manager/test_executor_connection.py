"""How the manager brings an executor to where it serves, with a real one on the other side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb
from structlog.testing import capture_logs

from executor_service.server import running_executor
from kvmanager_service.engine_api import ManagerState
from kvmanager_service.executor_client import ExecutorConnection, ReadyExecutor
from tests.integration.manager.fake_engine import until
from tests.integration.manager.scripted_executor import running_engine
from tests.unit.executor_shell.executor_builders import NUM_BLOCKS, NUM_HOST_BLOCKS, SIM_SWAP_SPACE, sim_config


@asynccontextmanager
async def connection(swap_space: int) -> AsyncIterator[ExecutorConnection]:
    async with running_executor(sim_config(swap_space=swap_space)) as server:
        opened = ExecutorConnection(server.address)
        yield opened
        await opened.close()


async def prepared(opened: ExecutorConnection, known_epoch: int = 0, *, with_host_blocks: bool = True) -> ReadyExecutor:
    return await opened.prepare(16, 4, known_epoch, with_tokenizer=False, with_host_blocks=with_host_blocks)


async def test_prepare_takes_every_block_that_the_executor_reports_of_either_kind() -> None:
    async with connection(SIM_SWAP_SPACE) as opened:
        ready = await prepared(opened)
        assert (ready.kv_cache.num_blocks, ready.num_host_blocks) == (NUM_BLOCKS, NUM_HOST_BLOCKS)
        assert ready.tagged == []
        assert (await prepared(opened)).kv_cache == ready.kv_cache
        known = await prepared(opened, ready.kv_cache.kv_epoch)
        assert (known.kv_cache, known.tagged, known.num_host_blocks) == (ready.kv_cache, None, NUM_HOST_BLOCKS)


async def test_prepare_without_swap_space_has_no_host_blocks() -> None:
    async with connection(0) as opened:
        assert (await prepared(opened)).num_host_blocks == 0


async def test_prepare_cache_with_fewer_host_blocks_than_there_are_is_made_anew() -> None:
    async with connection(SIM_SWAP_SPACE) as opened:
        await opened._stub.ProfileMemory(pb.ProfileMemoryRequest(max_num_batched_tokens=16, max_num_seqs=4))
        old = await opened._stub.InitializeKvCache(pb.InitializeKvCacheRequest(num_blocks=NUM_BLOCKS))
        assert old.kv_cache.num_host_blocks == 0
        ready = await prepared(opened)
        assert ready.num_host_blocks == NUM_HOST_BLOCKS
        assert ready.kv_cache.kv_epoch != old.kv_cache.kv_epoch


async def test_prepare_host_blocks_nobody_wants_are_not_made_and_counted() -> None:
    async with connection(SIM_SWAP_SPACE) as opened:
        ready = await prepared(opened, with_host_blocks=False)
        assert (ready.kv_cache.num_blocks, ready.num_host_blocks) == (NUM_BLOCKS, 0)
        assert ready.num_unwanted_host_blocks == NUM_HOST_BLOCKS
        again = await prepared(opened, with_host_blocks=False)
        assert (again.kv_cache, again.num_unwanted_host_blocks) == (ready.kv_cache, NUM_HOST_BLOCKS)


async def test_prepare_cache_with_host_blocks_nobody_wants_any_more_is_kept() -> None:
    async with connection(SIM_SWAP_SPACE) as opened:
        old = await prepared(opened)
        kept = await prepared(opened, with_host_blocks=False)
        assert old.num_unwanted_host_blocks == 0
        assert (kept.kv_cache, kept.num_unwanted_host_blocks) == (old.kv_cache, NUM_HOST_BLOCKS)
        assert kept.tagged == []


@pytest.mark.parametrize(("mode", "num_host_blocks"), [("recompute", 0), ("swap", NUM_HOST_BLOCKS)])
async def test_manager_that_never_swaps_takes_no_host_blocks_and_says_so(mode: str, num_host_blocks: int) -> None:
    async with running_executor(sim_config(swap_space=SIM_SWAP_SPACE)) as server:
        with capture_logs() as logs:
            async with running_engine(server.address, preemption_mode=mode) as (engine, _):
                await until(lambda: engine.stats().state is ManagerState.SERVING)
    (line,) = [entry for entry in logs if entry["event"] == "kv_cache_ready"]
    assert line["num_host_blocks"] == num_host_blocks
    unused = [entry["unused_host_blocks"] for entry in logs if entry["event"] == "swap_space_unused"]
    assert unused == ([NUM_HOST_BLOCKS] if mode == "recompute" else [])


@pytest.mark.parametrize(
    ("sizes", "longest", "caching", "told"),
    [
        ({"block_size": 1013}, 1013, True, []),
        ({"block_size": 1014}, 1014, True, [[1014]]),
        ({"block_size": 1014}, 1014, False, []),
        ({"block_size": 16, "sim_windows": (0, 64), "sim_block_sizes": (16, 1024)}, 1024, True, [[1024]]),
    ],
    ids=["with tags", "one group", "no prefix caching", "a window"],
)
async def test_manager_says_which_blocks_are_too_long_for_a_tag(
    sizes: dict[str, Any], longest: int, caching: bool, told: list[list[int]]
) -> None:
    async with running_executor(sim_config(**sizes)) as server:
        with capture_logs() as logs:
            async with running_engine(server.address, enable_prefix_caching=caching) as (engine, _):
                await until(lambda: engine.stats().state is ManagerState.SERVING)
    (line,) = [entry for entry in logs if entry["event"] == "kv_cache_ready"]
    assert max(line["group_block_sizes"]) == longest
    assert [entry["block_sizes"] for entry in logs if entry["event"] == "blocks_without_tags"] == told
