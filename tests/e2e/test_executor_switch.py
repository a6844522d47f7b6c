"""Executors that compute are changed while requests run: killed, terminated, or relieved by order. Real processes.

A tiny random model in float32, greedy: whoever computes, the tokens are those of transformers' own `generate`, none
twice, none lost. `test_faults` has the same faults, and many more, on executors without weights.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvplane_client import NO_RETRY, AsyncClient, ExecutorState

from tests.e2e.cluster import ServiceProcess, eventually, executor_address, settled
from tests.e2e.load import Job, Running
from tests.e2e.model_cluster import ModelCluster, model_cluster, wait_patiently
from tests.unit.executor.step_builder import prompt_of, reference_tokens, save_tiny_model

pytestmark = pytest.mark.timeout(1800)

SHARED = prompt_of(40, 7)
PROMPTS = [[*SHARED, 11], [*SHARED[:33], 12, 13], prompt_of(5, 3), prompt_of(70, 4)]
NUM_TOKENS = 80
MANAGER = {"max_num_batched_tokens": 48, "max_num_seqs": 6}
SIZES: dict[str, object] = {"num_blocks_override": 64, "max_model_len": 160, "memory_limit": "2GiB", "num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("switch") / "tiny-llama", "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def answers(model: Path) -> list[list[int]]:
    """The right tokens after each prompt."""
    return [reference_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture
def cluster(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ModelCluster]:
    """A manager and a torch executor."""
    with model_cluster(request, tmp_path) as made:
        made.start_model(model, dict(MANAGER), **SIZES)
        yield made


def jobs_of(answers: list[list[int]]) -> list[Job]:
    return [
        Job(prompt, NUM_TOKENS, {"ignore_eos": True}, known=known)
        for prompt, known in zip(PROMPTS, answers, strict=True)
    ]


async def standby(cluster: ModelCluster, client: AsyncClient, model: Path, backend: str = "torch") -> ServiceProcess:
    """Another executor, registered."""
    process = cluster.start_model_executor(model, backend=backend, **SIZES)
    await asyncio.to_thread(wait_patiently, process, "executor_registered", cluster.manager)
    assert (await states(client))[executor_address(process)] is ExecutorState.STANDBY
    return process


async def states(client: AsyncClient) -> dict[str, ExecutorState]:
    return {info.address: info.state for info in await client.list_executors()}


async def id_of(client: AsyncClient, process: ServiceProcess) -> str:
    """The executor's id."""
    return next(info.executor_id for info in await client.list_executors() if info.address == executor_address(process))


@pytest.mark.parametrize(
    "case",
    [("torch", signal.SIGKILL, 10), ("torch", signal.SIGTERM, 10), ("triton", signal.SIGKILL, 60)],
    ids=["torch-killed", "torch-terminated", "triton-after-torch-killed"],
)
async def test_executor_that_computes_ends_and_another_one_gives_the_same_tokens(
    cluster: ModelCluster, model: Path, answers: list[list[int]], case: tuple[str, signal.Signals, int]
) -> None:
    """`case`: who stands by, how the first ends, and after how many tokens of each stream."""
    backend, ending, before = case
    (first,) = cluster.executors
    async with cluster.client(retry=NO_RETRY) as client:
        second = await standby(cluster, client, model, backend)
        async with Running(client, jobs_of(answers)) as running:
            await running.progressed(before)
            first.signal(ending)
            assert len(running.unfinished) == len(PROMPTS)
            assert await first.exit_status() == (0 if ending is signal.SIGTERM else -signal.SIGKILL)
            await running.finished()
        stats = await settled(client)
        assert (await states(client))[executor_address(second)] is ExecutorState.ACTIVE
    assert stats.reschedules >= len(PROMPTS)
    assert stats.requests_finished == {"length": len(PROMPTS)}


async def test_executor_that_computes_is_relieved_by_order_and_serves_again(
    cluster: ModelCluster, model: Path, answers: list[list[int]]
) -> None:
    """There and back while requests come all the time; none is refused, none gets a wrong token."""
    (first,) = cluster.executors

    async def keep_asking(job: Job, order: asyncio.Task[str]) -> int:
        asked = 0
        while not order.done():
            once = Job(job.prompt, job.max_tokens, job.options, known=job.known)
            await once.run(client)
            once.check()
            asked += 1
        return asked

    async with cluster.client(retry=NO_RETRY) as client:
        second = await standby(cluster, client, model)
        asked = 0
        for present, other in ((first, second), (second, first)):
            reschedules = (await client.get_stats()).reschedules
            order = asyncio.create_task(client.switch_executor(await id_of(client, other)))
            asked += sum(await asyncio.gather(*(keep_asking(job, order) for job in jobs_of(answers))))
            assert await order == await id_of(client, present)
            assert await states(client) == {
                executor_address(present): ExecutorState.STANDBY,
                executor_address(other): ExecutorState.ACTIVE,
            }
            assert (await client.get_stats()).reschedules > reschedules, "something ran when it was relieved"
        stats = await settled(client)
    assert stats.requests_finished == {"length": asked}
    assert not cluster.manager.events("executor_lost")


async def test_executor_that_stood_in_by_order_is_killed_and_the_relieved_one_goes_on(
    cluster: ModelCluster, model: Path, answers: list[list[int]]
) -> None:
    (first,) = cluster.executors
    async with cluster.client(retry=NO_RETRY) as client:
        second = await standby(cluster, client, model)
        await client.switch_executor(await id_of(client, second))
        async with Running(client, jobs_of(answers)) as running:
            await running.progressed(10)
            second.kill()
            assert len(running.unfinished) == len(PROMPTS)
            await running.finished()

        async def is_active() -> bool:
            return (await states(client))[executor_address(first)] is ExecutorState.ACTIVE

        await eventually(is_active, "the first executor at work")
        await settled(client)
