"""Two ranks behind one executor: the tokens of one process, and an orderly end whoever of them dies.

The tests of the module share a cluster, one executor after another: each takes the one that the last has left alive.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from kvplane_client import AsyncClient, Completion

from tests.e2e.cluster import ServiceProcess, eventually, executor_address, settled
from tests.e2e.model_cluster import ModelCluster, model_cluster, wait_patiently
from tests.unit.executor.lora_builder import peft_tokens, save_adapter
from tests.unit.executor.step_builder import prompt_of, reference_tokens, save_tiny_model

pytestmark = pytest.mark.timeout(1800)

NEW_TOKENS = 60
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((1, 5, 16, 17, 2, 31, 9, 40, 48, 3))]
FEW_BLOCKS = 26
"""Three sequences fit at their full length; many more do when they begin."""
TIMEOUT_S = 15
"""Long enough for ranks on a busy machine to wait for each other; the test of one that hangs takes as long."""


class Ranks:
    """A manager, and one executor of two ranks at a time."""

    def __init__(self, cluster: ModelCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self._expected: dict[tuple[int, ...], list[int]] = {}
        self._active = 0

    def executor(self) -> ServiceProcess:
        """The executor that serves; a new one if the last has ended."""
        if self.cluster.executors and not self.cluster.executors[-1].has_ended:
            return self.cluster.executors[-1]
        return self.start()

    def start(self) -> ServiceProcess:
        """Start one, as what keeps executors running does, and wait until it serves."""
        process = self.cluster.start_model_executor(
            self.folder,
            tensor_parallel_size=2,
            tensor_parallel_timeout_s=TIMEOUT_S,
            num_blocks_override=FEW_BLOCKS,
            memory_limit="4GiB",
            swap_space="16MiB",
            max_loras=1,
        )
        self._active += 1
        wait_patiently(self.cluster.manager, "executor_active", process, count=self._active)
        return process

    @staticmethod
    def worker(executor: ServiceProcess) -> psutil.Process:
        """The process of rank 1."""
        return psutil.Process(int(executor.wait_event("rank_started")["pid"]))

    def expected(self, prompt: list[int]) -> list[int]:
        """What transformers makes of a prompt."""
        if tuple(prompt) not in self._expected:
            self._expected[tuple(prompt)] = reference_tokens(self.folder, prompt, NEW_TOKENS)
        return self._expected[tuple(prompt)]

    def check(self, completions: list[Completion]) -> None:
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert list(completion.token_ids) == self.expected(prompt)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tp-model"), "llama")
    with model_cluster(request, tmp_path_factory.mktemp("tp")) as cluster:
        cluster.expected_errors |= {"rank_group_lost", "step_failed"}
        cluster.start_manager(
            lease_ms=60_000, max_num_batched_tokens=64, max_num_seqs=16, preemption_mode="swap", step_timeout_s=120
        )
        yield Ranks(cluster, folder)


async def generate(client: AsyncClient) -> list[Completion]:
    """All prompts at once, greedy."""
    return list(
        await asyncio.gather(
            *(client.generate(prompt, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS)
        )
    )


@asynccontextmanager
async def streaming(ranks: Ranks) -> AsyncIterator[None]:
    """Requests that run when it is entered; after it they must come to their right ends."""
    async with ranks.cluster.client() as client:
        before = await client.get_stats()
        running = asyncio.create_task(generate(client))

        async def under_way() -> bool:
            return (await client.get_stats()).tokens_generated >= before.tokens_generated + len(PROMPTS)

        await eventually(under_way, "tokens of every stream")
        assert not running.done()
        yield
        ranks.check(await running)
        await settled(client)


async def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_generate_two_ranks_equals_transformers_with_preemptions_by_swap(ranks: Ranks) -> None:
    ranks.executor()
    async with ranks.cluster.client() as client:
        ranks.check(await generate(client))
        stats = await settled(client)
    assert stats.preemptions > 0
    assert stats.swapped_in > 0


async def test_get_model_info_two_ranks_are_one_executor_with_whole_blocks(ranks: Ranks) -> None:
    executor = ranks.executor()
    async with grpc.aio.insecure_channel(executor_address(executor)) as channel:
        info = await ExecutorServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
    assert info.tensor_parallel_size == 2
    (group,) = info.kv_groups
    assert (group.num_layers, group.num_kv_heads, group.head_dim) == (3, 2, 16)
    assert group.bytes_per_block == 2 * 3 * 2 * 16 * 4 * info.block_size
    async with ranks.cluster.client() as client:
        assert len(await client.list_executors()) == 1
    profiles = executor.events("memory_profile")
    assert sorted(profile.get("rank", "0") for profile in profiles) == ["0", "1"]
    assert {profile["bytes_per_block"] for profile in profiles} == {group.bytes_per_block // 2}
    assert {profile["total_bytes"] for profile in profiles} == {2 << 30}


async def test_adapter_on_two_ranks_gives_pefts_tokens_and_is_there_again_after_a_loss(
    ranks: Ranks, tmp_path: Path
) -> None:
    source = save_adapter(tmp_path / "adapter", ranks.folder, 1)
    prompt = PROMPTS[3]
    expected = peft_tokens(ranks.folder, source, prompt, NEW_TOKENS)
    assert expected != ranks.expected(prompt)
    executor = ranks.executor()
    async with ranks.cluster.client() as client:

        async def check() -> None:
            """Beside each other, with the adapter and without."""
            got = await asyncio.gather(
                *(
                    client.generate(prompt, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, adapter=adapter)
                    for adapter in ("a", None)
                )
            )
            assert [list(one.token_ids) for one in got] == [expected, ranks.expected(prompt)]

        await client.load_adapter("a", str(source))
        await check()
        ranks.worker(executor).kill()
        assert await executor.exit_status() == 1
        await asyncio.to_thread(ranks.start)
        await check()
        await client.unload_adapter("a")


async def test_worker_killed_streams_go_on_when_the_executor_is_started_anew(ranks: Ranks) -> None:
    executor = ranks.executor()
    async with streaming(ranks):
        ranks.worker(executor).kill()
        assert await executor.exit_status() == 1
        await asyncio.to_thread(ranks.start)
    (lost,) = executor.events("rank_group_lost")
    assert lost["reason"] == "RANK_LOST"
    assert "rank 1 of 2" in lost["error"]
    assert "signal 9" in lost["error"]


async def test_rank_0_killed_leaves_no_process_and_streams_go_on(ranks: Ranks) -> None:
    executor = ranks.executor()
    worker = ranks.worker(executor)
    async with streaming(ranks):
        executor.kill()
        await eventually(lambda: is_gone(worker), "the end of rank 1")
        await asyncio.to_thread(ranks.start)


async def test_worker_that_hangs_ends_the_executor_and_streams_go_on(ranks: Ranks) -> None:
    executor = ranks.executor()
    worker = ranks.worker(executor)
    async with streaming(ranks):
        worker.suspend()
        assert await executor.exit_status() == 1
        await eventually(lambda: is_gone(worker), "the end of rank 1, which hangs")
        await asyncio.to_thread(ranks.start)
    assert len(executor.events("rank_group_lost")) == 1


async def test_sigterm_to_all_ranks_ends_them_with_status_0(ranks: Ranks) -> None:
    """As service managers send it, and terminals their SIGINT: it is rank 0 that obeys."""
    executor = ranks.executor()
    worker = ranks.worker(executor)
    worker.terminate()
    executor.signal(signal.SIGTERM)
    assert await executor.exit_status() == 0
    assert await is_gone(worker)
    assert not executor.events("rank_group_lost")


async def test_sigterm_while_ranks_load_leaves_no_process(ranks: Ranks) -> None:
    executor = ranks.cluster.start_model_executor(ranks.folder, tensor_parallel_size=2, memory_limit="4GiB")
    worker = ranks.worker(executor)
    worker.terminate()
    executor.signal(signal.SIGTERM)
    assert await executor.exit_status() == 0
    assert not executor.events("rank_group_lost")
    await eventually(lambda: is_gone(worker), "the end of rank 1")
