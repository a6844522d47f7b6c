"""Clients, executors and managers that die, freeze, stop or are the wrong ones: real processes, real signals."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvplane_client import (
    NO_RETRY,
    AsyncClient,
    Chunk,
    DeadlineExceededError,
    ExecutorState,
    FinishReason,
    RequestStatus,
    Stats,
    UnavailableError,
    branch_seed,
)

from tests.e2e.cluster import Cluster, Proxy, environment, eventually, executor_address, serving, settled, used_blocks
from tests.e2e.load import Job, Running, random_jobs, random_prompt

STEP_MS = 250
"""A step of the clusters in which steps are counted: far longer than it takes to notice that a client is gone."""


# --- clients ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_cluster(shared_cluster: Cluster) -> Cluster:
    """Two requests run at a time, four steps a second, blocks so large that only the victim has more than one."""
    shared_cluster.start({"max_num_seqs": 2}, sim_step_ms=STEP_MS, block_size=512, sim_num_blocks=64)
    return shared_cluster


@asynccontextmanager
async def client_that_ends(cluster: Cluster, client: AsyncClient, ending: str, request_id: str) -> AsyncIterator[None]:
    """A request of 1,600 prompt tokens whose client ends, in the given way, when the context is left."""
    if ending == "kill":
        script = Path(__file__).with_name("streaming_client.py")
        command = [sys.executable, str(script), cluster.address, request_id, "1600"]
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL, env=environment())
        try:
            yield
        finally:
            process.kill()
            await process.wait()
        return
    deadline = 2.0 if ending == "deadline" else None
    stream = client.stream([7] * 1600, request_id=request_id, max_tokens=1000, deadline=deadline)
    task = asyncio.create_task(stream.completion())
    try:
        yield
    finally:
        if ending == "cancel":
            task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError if ending == "cancel" else DeadlineExceededError)


@pytest.mark.parametrize("status", [RequestStatus.RUNNING, RequestStatus.WAITING])
@pytest.mark.parametrize("ending", ["kill", "cancel", "deadline"])
async def test_client_that_ends_gives_back_its_blocks_within_a_step(
    slow_cluster: Cluster, ending: str, status: RequestStatus
) -> None:
    request_id = f"{ending}-{status}"

    async def find_victim() -> RequestStatus | None:
        listed = [info async for info in client.list_requests(request_id=request_id)]
        return listed[0].status if listed else None

    async def has_reached_status() -> bool:
        return await find_victim() is status

    async def is_gone() -> Stats | None:
        stats = await client.get_stats()
        return stats if stats.requests_running + stats.requests_waiting == len(others) else None

    others = [Job([index, 1, 2], 400) for index in range(1 if status is RequestStatus.RUNNING else 2)]
    async with slow_cluster.client(retry=NO_RETRY) as client:
        async with Running(client, others) as running:
            await running.progressed(1)
            async with client_that_ends(slow_cluster, client, ending, request_id):
                await eventually(has_reached_status, f"a {status} request")
                before = await client.get_stats()
                assert used_blocks(before) == len(others) + (4 if status is RequestStatus.RUNNING else 0)
            ended = before if ending == "kill" else await client.get_stats()
            after = await eventually(is_gone, "the request's end")

            assert used_blocks(after) == len(others)
            # The step that was out, and one that may have ended between our question and the client's end.
            assert after.steps - ended.steps <= 2
            await running.progressed(1)
        for job in others:
            assert job.token_ids == job.expected[: len(job.token_ids)]
        await settled(client)


# --- executors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("port", ["same", "other"])
async def test_executor_killed_and_restarted_streams_go_on_unharmed(cluster: Cluster, port: str) -> None:
    cluster.start()
    jobs = random_jobs(random.Random(1), 32, output=(60, 250))
    retries: list[Exception] = []
    async with cluster.client(on_retry=lambda error, _: retries.append(error)) as client:
        async with Running(client, jobs) as running:
            for kills in range(1, 3):
                await running.progressed(10)
                victim = cluster.executors[-1]
                address = executor_address(victim)
                victim.kill()
                settings = {"port": address.rpartition(":")[2]} if port == "same" else {}
                replacement = await asyncio.to_thread(cluster.start_executor, sim_step_ms=5, **settings)
                assert (executor_address(replacement) == address) is (port == "same")
                await cluster.manager.logged("executor_active", kills + 1)
                assert running.unfinished
            await running.finished()
        stats = await settled(client)

    assert not retries, "clients notice nothing"
    assert stats.reschedules > 0
    assert stats.requests_finished == {"length": len(jobs)}


@pytest.mark.parametrize(
    ("mode", "num_blocks", "jobs"),
    [
        # Long prompts in small chunks, so that the lost steps fill blocks, two of them at a time.
        ("recompute", 4096, random_jobs(random.Random(23), 48, prompt=(500, 2_000), output=(20, 60))),
        # Answers that the pool does not hold, so that blocks are swapped all the time.
        ("swap", 60, random_jobs(random.Random(23), 20, prompt=(20, 60), output=(100, 200))),
    ],
    ids=["recompute", "swap"],
)
async def test_connection_cut_executor_alive_streams_go_on_from_its_cache(
    cluster: Cluster, mode: str, num_blocks: int, jobs: list[Job]
) -> None:
    """Steps are lost on the way, the cache is not: what they would have filled must not be taken for filled.

    Nor is what they would have copied taken for copied, and what lies in host memory is not lost either.
    """
    async with Proxy() as proxy:
        cluster.start_manager(max_num_batched_tokens=256, preemption_mode=mode)
        executor = cluster.start_executor(
            wait=False,
            sim_step_ms=10,
            sim_num_blocks=num_blocks,
            swap_space="1MiB",
            advertise_address=f"127.0.0.1:{proxy.port}",
        )
        proxy.target.set_result(executor_address(executor))
        await cluster.manager.logged("executor_active")
        async with cluster.client() as client:
            async with Running(client, jobs) as running:
                for cuts in range(1, 16):
                    steps = (await client.get_stats()).steps
                    await eventually(partial(has_run, client, steps + 8), "steps that succeed")
                    await proxy.cut()
                    await cluster.manager.logged("executor_active", cuts + 1)
                assert running.unfinished
                await running.finished()
            stats = await settled(client)
    assert stats.steps_failed >= 15
    assert (stats.swapped_in > 0) is (mode == "swap")
    assert len(cluster.manager.events("kv_cache_ready")) == 1, "the cache was kept all the time"


async def has_run(client: AsyncClient, steps: int) -> bool:
    return (await client.get_stats()).steps >= steps


async def test_executor_killed_standby_takes_over(cluster: Cluster) -> None:
    cluster.start()
    cluster.start_executor(sim_step_ms=5)
    jobs = random_jobs(random.Random(2), 16, output=(60, 150))
    async with cluster.client() as client, Running(client, jobs) as running:
        assert [info.state for info in await client.list_executors()] == [ExecutorState.ACTIVE, ExecutorState.STANDBY]
        await running.progressed(10)
        cluster.executors[0].kill()
        await cluster.manager.logged("executor_active", 2)
        assert running.unfinished
        await running.finished()
        assert (await client.list_executors())[-1].state is ExecutorState.ACTIVE
        await settled(client)


async def test_executor_killed_while_requests_lie_in_host_memory_streams_go_on_unharmed(cluster: Cluster) -> None:
    """What the host held went with the executor: those requests compute again, and are swapped by the next one."""
    executor = {"sim_step_ms": 5, "block_size": 8, "sim_num_blocks": 60, "swap_space": "64KiB"}
    cluster.start({"preemption_mode": "swap", "enable_prefix_caching": False, "watermark": 0.0}, **executor)
    jobs = random_jobs(random.Random(5), 24, prompt=(1, 40), output=(60, 200))

    async with cluster.client() as client:

        async def swapped() -> Stats | None:
            stats = await client.get_stats()
            return stats if stats.pool is not None and stats.pool.used_host_blocks else None

        async with Running(client, jobs) as running:
            before = await eventually(swapped, "a request in host memory")
            cluster.executors[-1].kill()
            await asyncio.to_thread(cluster.start_executor, **executor)
            await cluster.manager.logged("executor_active", 2)
            await eventually(swapped, "a request in the next one's host memory")
            await running.finished()
        stats = await settled(client)

    assert stats.reschedules > 0
    assert stats.swapped_out > before.swapped_out
    assert stats.pool is not None
    assert stats.pool.used_host_blocks == 0
    assert stats.requests_finished == {"length": len(jobs)}


async def test_executor_frozen_until_its_lease_is_over_standby_takes_over_and_the_thawed_one_does_no_harm(
    cluster: Cluster,
) -> None:
    cluster.start({"lease_ms": 1_000})
    cluster.start_executor(sim_step_ms=5)
    first, second = cluster.executors
    # Long histories make long messages, of which some are on their way when the reader freezes.
    jobs = [
        Job(random_prompt(random.Random(index), 3_000), 150, {"repetition_penalty": 1.5}) for index in range(6)
    ] + random_jobs(random.Random(3), 10, output=(100, 200))
    async with cluster.client() as client, Running(client, jobs) as running:
        await running.progressed(10)
        first.signal(signal.SIGSTOP)
        await cluster.manager.logged("executor_active", 2)
        assert "lease ran out" in cluster.manager.events("executor_lost")[0]["reason"]
        await running.progressed(10)
        assert running.unfinished
        first.signal(signal.SIGCONT)
        # Twice with the first: it registers anew as a standby.
        await cluster.manager.logged("executor_registered", 3)
        await running.finished()
        assert {info.address: info.state for info in await client.list_executors()} == {
            executor_address(first): ExecutorState.STANDBY,
            executor_address(second): ExecutorState.ACTIVE,
        }

        # Its cache still holds blocks of the time before, and maybe half of a step: none may be taken for good.
        second.kill()
        await cluster.manager.logged("executor_active", 3)
        again = [Job(job.prompt, job.max_tokens, job.options) for job in jobs]
        async with Running(client, again) as rerun:
            await rerun.finished()
        await settled(client)


HUNG_STEP_MS = 60_000
"""The longest step there is: to a manager that waits for a second or two it does not end."""


async def test_executor_whose_compute_hangs_standby_takes_over_and_stays(cluster: Cluster) -> None:
    cluster.start({"step_timeout_s": 2}, sim_step_ms=HUNG_STEP_MS)
    cluster.start_executor(sim_step_ms=5)
    hung, healthy = cluster.executors
    jobs = random_jobs(random.Random(21), 16, output=(60, 150))
    async with cluster.client() as client, Running(client, jobs) as running:
        await running.progressed(10)
        (lost,) = cluster.manager.events("executor_lost")
        assert "expected a result within 2 s (--step-timeout-s), got none" in lost["reason"]
        infos = {info.address: info for info in await client.list_executors()}
        assert infos[executor_address(hung)].state is ExecutorState.STANDBY
        assert infos[executor_address(hung)].last_error == lost["reason"]

        # Nor is the hung one used when the other has failed since, but comes back.
        healthy.kill()
        assert running.unfinished
        replacement = cluster.start_executor(sim_step_ms=5)
        await running.finished()
        infos = {info.address: info for info in await client.list_executors()}
        assert infos[executor_address(replacement)].state is ExecutorState.ACTIVE
        assert infos[executor_address(hung)].state is ExecutorState.STANDBY
        await settled(client)


async def test_executor_whose_compute_hangs_alone_requests_end_unavailable_and_the_next_one_serves(
    cluster: Cluster,
) -> None:
    cluster.start({"step_timeout_s": 1, "executor_timeout_s": 0.5}, sim_step_ms=HUNG_STEP_MS)
    jobs = [Job([index, 1], 50) for index in range(8)]
    async with cluster.client(retry=NO_RETRY) as client:
        async with Running(client, jobs) as running:
            outcomes = await running.outcomes()
        for outcome in outcomes:
            assert isinstance(outcome, UnavailableError)
            assert outcome.reason == "NO_EXECUTOR"
        assert (await settled(client)).requests_finished == {"error": len(jobs)}
        (info,) = await client.list_executors()
        assert "expected a result" in (info.last_error or "")

        # Its compute still hangs, so it is still being brought up: nobody need wait for that.
        following = cluster.start_executor()
        await serving(client)
        assert cluster.manager.events("executor_active")[-1]["address"] == executor_address(following)
        async with Running(client, random_jobs(random.Random(22), 8)) as running:
            await running.finished()


async def test_executor_terminated_ends_in_order_and_streams_go_on_with_the_next(cluster: Cluster) -> None:
    cluster.start()
    jobs = random_jobs(random.Random(9), 16, output=(60, 200))
    async with cluster.client() as client, Running(client, jobs) as running:
        await running.progressed(10)
        cluster.executors[0].signal(signal.SIGTERM)
        assert await cluster.executors[0].exit_status() == 0
        cluster.start_executor(sim_step_ms=5)
        assert running.unfinished
        await running.finished()
        await settled(client)


async def test_executor_with_another_pool_and_block_size_streams_go_on_with_it(cluster: Cluster) -> None:
    cluster.start()
    jobs = random_jobs(random.Random(10), 24, output=(100, 200))
    async with cluster.client() as client, Running(client, jobs) as running:
        await running.progressed(10)
        cluster.executors[0].kill()
        cluster.start_executor(sim_step_ms=5, sim_num_blocks=120, block_size=8)
        assert running.unfinished
        await running.finished()
        stats = await settled(client)
        assert stats.pool is not None
        assert (stats.pool.num_blocks, stats.pool.block_size) == (119, 8)
        assert stats.preemptions > 0


async def test_executor_of_a_shorter_model_length_is_refused(cluster: Cluster) -> None:
    cluster.start({"lease_ms": 1_000})
    cluster.expected_errors.add("registration_refused")
    jobs = [Job(random_prompt(random.Random(17), 400), 300)]
    async with cluster.client() as client, Running(client, jobs) as running:
        await running.progressed(10)
        cluster.executors[0].kill()
        short = cluster.start_executor(max_model_len=500)
        assert "max_model_len" in (await short.logged("registration_refused"))["error"]
        cluster.start_executor()
        await running.finished()
        await settled(client)


async def test_executor_frozen_while_it_is_brought_up_is_given_up_with_its_lease(cluster: Cluster) -> None:
    cluster.start({"lease_ms": 1_000})
    frozen = cluster.start_executor()
    jobs = random_jobs(random.Random(18), 8)
    async with cluster.client() as client, Running(client, jobs) as running:
        await running.progressed(5)
        frozen.signal(signal.SIGSTOP)
        cluster.executors[0].kill()
        cluster.start_executor()
        await running.finished()
    reasons = {event["address"]: event["reason"] for event in cluster.manager.events("executor_lost")}
    assert "lease ran out" in reasons[executor_address(frozen)]


async def test_executor_frozen_while_it_is_brought_up_a_healthy_one_need_not_wait_for_its_lease(
    cluster: Cluster,
) -> None:
    cluster.start({"lease_ms": 3_600_000, "executor_timeout_s": 15})
    frozen, healthy = cluster.start_executor(), cluster.start_executor(sim_step_ms=5)
    jobs = random_jobs(random.Random(24), 8)
    async with cluster.client(retry=NO_RETRY) as client, Running(client, jobs) as running:
        await running.progressed(5)
        frozen.signal(signal.SIGSTOP)
        cluster.executors[0].kill()
        await running.finished()
        states = {info.address: info.state for info in await client.list_executors()}
        assert states[executor_address(healthy)] is ExecutorState.ACTIVE
        assert states[executor_address(frozen)] is ExecutorState.STANDBY
        await settled(client)


async def test_executors_terminated_one_after_another_a_long_prompt_is_not_blamed(cluster: Cluster) -> None:
    """Each next one, which begins anew, ends before it has come as far as the one before."""
    cluster.start({"max_num_batched_tokens": 256}, sim_step_ms=50)
    for _ in range(3):
        cluster.start_executor(sim_step_ms=50)
    jobs = [Job(random_prompt(random.Random(25), 6_000), 6)]
    async with cluster.client(retry=NO_RETRY) as client, Running(client, jobs) as running:
        for losses, reached in enumerate((3_072, 2_048, 1_024), start=1):
            await eventually(partial(has_computed, client, reached), "part of the prompt")
            cluster.executors[losses - 1].signal(signal.SIGTERM)
            await cluster.manager.logged("executor_active", losses + 1)
        assert running.unfinished
        await running.finished()
        await settled(client)
    reasons = [event["reason"] for event in cluster.manager.events("executor_lost")]
    assert len(reasons) == 3
    # The second is all that grpc.aio tells if the stream ends while a step is being written to it.
    orderly = ("the executor is stopping", "ended the stream while a step was being sent")
    assert all(any(told in reason for told in orderly) for reason in reasons)


async def has_computed(client: AsyncClient, tokens: int) -> bool:
    return any([info.num_computed_tokens >= tokens async for info in client.list_requests()])


async def test_executor_that_does_not_return_requests_end_unavailable(cluster: Cluster) -> None:
    cluster.start({"executor_timeout_s": 0.5})
    jobs = [Job([index, 1], 2_000) for index in range(8)]
    async with cluster.client(retry=NO_RETRY) as client:
        async with Running(client, jobs) as running:
            await running.progressed(5)
            cluster.executors[0].kill()
            outcomes = await running.outcomes()
        for job, outcome in zip(jobs, outcomes, strict=True):
            assert isinstance(outcome, UnavailableError)
            assert outcome.reason == "NO_EXECUTOR"
            assert job.token_ids == job.expected[: len(job.token_ids)]
        with pytest.raises(UnavailableError) as refused:
            await client.generate([1, 2], max_tokens=1)
        assert refused.value.reason == "NO_EXECUTOR"
        assert (await settled(client)).requests_finished == {"error": len(jobs)}

        cluster.start_executor()
        await serving(client)
        async with Running(client, random_jobs(random.Random(4), 8)) as running:
            await running.finished()


async def test_executor_of_another_model_is_refused_and_disturbs_nobody(cluster: Cluster) -> None:
    cluster.start({"lease_ms": 1_000})
    cluster.expected_errors.add("registration_refused")
    jobs = random_jobs(random.Random(5), 8, output=(400, 600))
    async with cluster.client() as client, Running(client, jobs) as running:
        await running.progressed(5)
        wrong = cluster.start_executor(sim_vocab_size=31_000)
        refusal = await wrong.logged("registration_refused")
        assert refusal["code"] == "FAILED_PRECONDITION"
        infos = {info.address: info for info in await client.list_executors()}
        assert "other weights" in (infos[executor_address(wrong)].last_error or "")
        assert infos[executor_address(cluster.executors[0])].state is ExecutorState.ACTIVE
        assert running.unfinished

        # Not even when there is no other.
        cluster.executors[0].kill()
        await cluster.manager.logged("executor_lost")
        cluster.start_executor()
        await cluster.manager.logged("executor_active", 2)
        await running.finished()
        assert cluster.manager.events("executor_active")[-1]["address"] == executor_address(cluster.executors[-1])
        await settled(client)


@pytest.mark.soak
async def test_executor_idle_for_a_minute_is_not_lost(cluster: Cluster) -> None:
    """Three pings without data are enough for a gRPC server to end a connection."""
    cluster.start()
    await asyncio.sleep(60)
    assert not cluster.manager.events("executor_lost")
    async with cluster.client() as client, Running(client, [Job([1, 2, 3], 20)]) as running:
        await running.finished()


# --- the manager ------------------------------------------------------------------------------------------------------


async def health_of(cluster: Cluster, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        response: health_pb2.HealthCheckResponse = await health_pb2_grpc.HealthStub(channel).Check(request)
        return response.status


async def test_manager_terminated_under_load_finishes_what_runs_and_takes_nothing_new(cluster: Cluster) -> None:
    cluster.start(sim_step_ms=20)
    jobs = random_jobs(random.Random(6), 12, output=(60, 100))
    async with cluster.client(retry=NO_RETRY) as client, Running(client, jobs) as running:
        await running.progressed(5)
        cluster.manager.signal(signal.SIGTERM)
        await cluster.manager.logged("engine_draining")
        for service in ("", "kvplane.kvmanager.v1.InferenceService"):
            assert await health_of(cluster, service) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(UnavailableError) as refused:
            await client.generate([1, 2], max_tokens=1)
        assert refused.value.reason == "DRAINING"
        assert running.unfinished
        await running.finished()
        assert await cluster.manager.exit_status() == 0
    assert not cluster.manager.events("manager_stopped")[0]["forced"]


async def test_manager_that_drains_takes_back_the_executor_whose_lease_ended(cluster: Cluster) -> None:
    cluster.start({"lease_ms": 1_000, "drain_timeout_s": 50})
    jobs = random_jobs(random.Random(31), 8, output=(100, 150))
    async with cluster.client(retry=NO_RETRY) as client, Running(client, jobs) as running:
        await running.progressed(5)
        cluster.manager.signal(signal.SIGTERM)
        await cluster.manager.logged("engine_draining")
        assert running.unfinished
        cluster.executors[0].signal(signal.SIGSTOP)
        await cluster.manager.logged("executor_lease_expired")
        cluster.executors[0].signal(signal.SIGCONT)
        await running.finished()
        assert await cluster.manager.exit_status() == 0
    assert len(cluster.manager.events("executor_registered")) == 2


async def test_manager_drained_the_next_one_adopts_every_block_down_to_the_last(cluster: Cluster) -> None:
    """The tag of a block that the very last step filled travels in a step of its own."""
    cluster.start({"lease_ms": 1_000}, sim_step_ms=20)
    jobs = [Job(random_prompt(random.Random(30 + index), 33), 48) for index in range(3)]
    async with cluster.client() as client:
        async with Running(client, jobs) as running:
            await running.progressed(5)
            cluster.manager.signal(signal.SIGTERM)
            await running.finished()
        assert await cluster.manager.exit_status() == 0

        cluster.start_manager()
        await cluster.manager.logged("executor_active")
        # The last token of an output has been sampled, and never computed.
        sequels = [Job(job.prompt + job.token_ids, 1) for job in jobs]
        async with Running(client, sequels) as again:
            await again.finished()
    assert [job.cached_tokens for job in sequels] == [33 + 48 - 1] * len(jobs)


async def test_manager_whose_drain_times_out_ends_what_is_left_unavailable(cluster: Cluster) -> None:
    cluster.start({"drain_timeout_s": 0.2, "max_num_seqs": 6})
    jobs = [Job([index, 1], 4_000) for index in range(8)]  # two of them wait
    async with cluster.client(retry=NO_RETRY) as client, Running(client, jobs) as running:

        async def are_six_running() -> bool:
            return sum(bool(job.token_ids) for job in jobs) == 6

        await eventually(are_six_running, "six running requests")
        cluster.manager.signal(signal.SIGTERM)
        outcomes = await running.outcomes()
        assert await cluster.manager.exit_status() == 0
    for job, outcome in zip(jobs, outcomes, strict=True):
        assert isinstance(outcome, UnavailableError)
        assert outcome.reason == "DRAINING"
        assert job.token_ids == job.expected[: len(job.token_ids)]
    assert cluster.manager.events("engine_drain_timed_out")[0]["requests"] == len(jobs)


async def test_manager_signalled_twice_stops_at_once(cluster: Cluster) -> None:
    cluster.start({"drain_timeout_s": 3_600})
    jobs = [Job([index, 1], 8_000) for index in range(4)]
    async with cluster.client(retry=NO_RETRY) as client, Running(client, jobs) as running:
        await running.progressed(5)
        cluster.manager.signal(signal.SIGTERM)
        await cluster.manager.logged("engine_draining")
        await running.progressed(5)
        cluster.manager.signal(signal.SIGINT)
        outcomes = await running.outcomes()
        assert await cluster.manager.exit_status() == 0
    assert all(isinstance(outcome, UnavailableError) for outcome in outcomes)
    assert cluster.manager.events("manager_stopped")[0]["forced"]


@pytest.mark.parametrize(("number", "has_executor"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
async def test_idle_manager_signalled_exits_with_status_0(
    cluster: Cluster, number: signal.Signals, has_executor: bool
) -> None:
    if has_executor:
        cluster.start()
    else:
        cluster.start_manager()
    cluster.manager.signal(number)
    assert await cluster.manager.exit_status() == 0


async def test_manager_killed_and_restarted_streams_resume(cluster: Cluster) -> None:
    cluster.start({"lease_ms": 1_000})
    jobs = random_jobs(random.Random(7), 16, prompt=(40, 200), output=(100, 200))
    async with cluster.client() as client:
        async with Running(client, jobs) as running:
            for restarts in range(2):
                await running.progressed(15)
                cluster.manager.kill()
                await asyncio.to_thread(cluster.start_manager)
                ready = await cluster.manager.logged("kv_cache_ready")
                assert ready["adopted_blocks"] > 0, f"restart {restarts}"
                assert running.unfinished
            await running.finished()
        stats = await settled(client)
    assert stats.prefix_hits > 0


async def test_manager_killed_and_restarted_a_multiplexed_stream_resumes(cluster: Cluster) -> None:
    cluster.start({"lease_ms": 1_000})
    jobs = random_jobs(random.Random(19), 40, output=(100, 200))
    async with cluster.client() as client, client.many() as many:

        async def run(job: Job) -> None:
            options = {"temperature": 0.0, "max_tokens": job.max_tokens} | job.options
            async for chunk in many.submit(job.prompt, **options):
                job.token_ids += chunk.token_ids
                job.finish_reason = chunk.finish_reason

        async def have_all_begun() -> bool:
            return all(len(job.token_ids) > 10 for job in jobs)

        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(run(job))
            await eventually(have_all_begun, "output of every request")
            cluster.manager.kill()
            await asyncio.to_thread(cluster.start_manager)
        for job in jobs:
            job.check()
        assert (await settled(client)).prefix_hits > 0


@pytest.mark.parametrize("many", [False, True])
async def test_manager_killed_and_restarted_several_outputs_resume(cluster: Cluster, many: bool) -> None:
    """Twice: then the third output has ended, and of another request no output had begun."""
    cluster.start({"lease_ms": 1_000, "max_num_seqs": 16})
    prompt = random_prompt(random.Random(23), 53)
    seed, options = 2**64 - 7, {"temperature": 1.0, "frequency_penalty": 0.5}
    jobs = [Job(prompt, 150, options | {"seed": branch_seed(seed, index)}) for index in range(3)]
    last = jobs[2].expected[29]
    assert last not in {*jobs[0].expected, *jobs[1].expected, *jobs[2].expected[:29]}, "it ends the third output alone"
    pieces: list[list[Chunk]] = [[], [], []]

    async def read(stream: AsyncIterator[Chunk]) -> None:
        async for chunk in stream:
            pieces[chunk.index].append(chunk)
            jobs[chunk.index].token_ids += chunk.token_ids

    async def has_progressed(index: int, tokens: int) -> bool:
        return len(jobs[index].token_ids) >= tokens

    async with cluster.client() as client, client.many() as stream, asyncio.TaskGroup() as group:
        asked = options | {"n": 3, "seed": seed, "max_tokens": 150, "stop_token_ids": [last]}
        start = stream.submit if many else client.stream
        group.create_task(read(start(prompt, **asked)))
        for index, tokens in ((1, 10), (2, 30)):
            await eventually(partial(has_progressed, index, tokens), f"{tokens} tokens of output {index}")
            cluster.manager.kill()
            late = asyncio.create_task(start(prompt[:40], **asked).completions())  # finds nobody
            await asyncio.to_thread(cluster.start_manager)
            assert (await cluster.manager.logged("kv_cache_ready"))["adopted_blocks"] > 0
            alone = [Job(prompt[:40], 150, job.options).expected for job in jobs]
            # Its outputs end by the token, too, where they meet it.
            alone = [ids[: ids.index(last) + 1] if last in ids else ids for ids in alone]
            assert [list(output.token_ids) for output in await late] == alone
    for index, job in enumerate(jobs):
        assert job.token_ids == (job.expected if index < 2 else job.expected[:30])
        usages = [chunk.usage for chunk in pieces[index] if chunk.usage is not None]
        assert (len(usages), usages[-1].completion_tokens) == (2, len(job.token_ids))
        assert {(usage.prompt_tokens, usage.cached_tokens) for usage in usages} == {(53, 0)}
        reasons = [chunk.finish_reason for chunk in pieces[index]]
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert (reasons[-1], pieces[index][-1].stop_match) == (
            (FinishReason.STOP, last) if index == 2 else (FinishReason.LENGTH, None)
        )
    async with cluster.client() as client:
        await settled(client)


async def test_manager_paused_for_longer_than_a_lease_goes_on(cluster: Cluster) -> None:
    # Steps so long that the requests outlast what a busy machine makes of the time until the manager stops.
    cluster.start({"lease_ms": 1_000}, sim_step_ms=20)
    jobs = random_jobs(random.Random(20), 16, output=(200, 300))
    retries: list[Exception] = []
    async with cluster.client(on_retry=lambda error, _: retries.append(error)) as client:
        async with Running(client, jobs) as running:
            await running.progressed(10)
            cluster.manager.signal(signal.SIGSTOP)
            await asyncio.sleep(2)
            cluster.manager.signal(signal.SIGCONT)
            # A lease is over however busy the machine is, and that as often as it likes: no request is to blame.
            await cluster.manager.logged("executor_active", 2)
            assert running.unfinished
            await running.finished()
        assert not retries
        await settled(client)


async def test_manager_killed_and_restarted_adopts_the_executors_cache(cluster: Cluster) -> None:
    cluster.start({"lease_ms": 1_000})
    jobs = random_jobs(random.Random(8), 8, prompt=(64, 200))
    async with cluster.client() as client:
        async with Running(client, jobs) as running:
            await running.finished()
        epoch = (await settled(client)).pool.kv_epoch  # type: ignore[union-attr]
        cluster.manager.kill()
        cluster.start_manager()
        await cluster.manager.logged("executor_active")
        stats = await serving(client)
        assert stats.pool is not None
        assert stats.pool.kv_epoch == epoch
        assert stats.pool.cached_blocks > 0
        assert used_blocks(stats) == 0
        assert stats.steps == 0

        again = [Job(job.prompt, job.max_tokens, job.options) for job in jobs]
        async with Running(client, again) as rerun:
            await rerun.finished()
        for job in again:
            assert job.cached_tokens == (len(job.prompt) - 1) // 16 * 16
        await settled(client)
