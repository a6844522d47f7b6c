"""Bad requests, too many requests, readers that do not read: each gets a typed error, and nobody else notices."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as executor_pb
from kvplane.executor.v1 import executor_service_pb2_grpc as executor_grpc
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import executor_registry_service_pb2_grpc as registry_grpc
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import inference_service_pb2_grpc as pb_grpc
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2_grpc as manager_grpc
from kvplane_client import NO_RETRY, AsyncClient, InternalError, ResourceExhaustedError
from kvplane_client.errors import KvPlaneError, error_from_rpc, error_from_wire

from executor_service.backends.sim_digest import expected_tokens
from tests.e2e.cluster import Cluster, eventually, executor_address, settled
from tests.e2e.load import VOCAB_SIZE, Job, Running, random_jobs, random_prompt

MAX_MODEL_LEN = 8192
MIB = 1 << 20


@pytest.fixture(scope="module")
def abused(shared_cluster: Cluster) -> Cluster:
    """The cluster all this is done to. Its lease outlasts the time that a test freezes the executor for."""
    shared_cluster.start({"lease_ms": 120_000, "max_num_seqs": 64, "max_waiting": 1_000}, sim_step_ms=2)
    return shared_cluster


@pytest.fixture
async def client(abused: Cluster) -> AsyncIterator[AsyncClient]:
    async with abused.client(retry=NO_RETRY) as connected:
        yield connected


@pytest.fixture
async def bystander(client: AsyncClient, abused: Cluster) -> AsyncIterator[None]:
    """A well-behaved stream that runs all the time, goes on after the abuse, and is right; then nothing is left."""
    job = Job(random_prompt(random.Random(), 40), MAX_MODEL_LEN - 40, {"temperature": 1.0, "seed": 5})
    async with Running(client, [job]) as running:
        await running.progressed(2)
        yield
        await running.progressed(5)
        assert abused.manager.events("executor_active")[1:] == []
    # The oracle's time grows with the output: a beginning of it proves as much.
    job.max_tokens = min(len(job.token_ids), 500)
    assert job.token_ids[:500] == job.expected
    await settled(client)


@asynccontextmanager
async def inference(cluster: Cluster, **options: int) -> AsyncIterator[Any]:
    """A bare stub on a channel of its own."""
    channel_options = [(f"grpc.{name}", value) for name, value in options.items()]
    channel_options.append(("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.insecure_channel(cluster.address, options=channel_options) as channel:
        yield pb_grpc.InferenceServiceStub(channel)


async def refusal(call: Any) -> KvPlaneError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in call:
            pass
    return error_from_rpc(failure.value)


# --- bad requests -----------------------------------------------------------------------------------------------------

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


def request(**fields: Any) -> pb.GenerateRequest:
    """A good request but for the given fields."""
    return pb.GenerateRequest(**({"token_ids": pb.TokenIds(ids=[1, 2, 3])} | fields))


def sampling(**fields: Any) -> pb.GenerateRequest:
    return request(sampling=pb.SamplingParams(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return request(stopping=pb.StoppingParams(**fields))


def prompt(ids: Any) -> pb.GenerateRequest:
    return request(token_ids=pb.TokenIds(ids=ids))


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
OUT_OF_RANGE = {
    "temperature": -0.5,
    "top_p": 1.5,
    "min_p": -0.1,
    "repetition_penalty": 0.0,
    "presence_penalty": 2.5,
    "frequency_penalty": -2.5,
}


def bad_requests() -> Iterator[tuple[str, pb.GenerateRequest, grpc.StatusCode, str, str]]:
    """Name, request, and what it is refused with: code, reason, field."""
    for name in FLOATS:
        for value in (math.nan, math.inf, -math.inf, OUT_OF_RANGE[name]):
            yield f"{name}={value}", sampling(**{name: value}), INVALID, "INVALID_PARAMETER", f"sampling.{name}"
    for value in (math.nan, math.inf, 100.5):
        yield f"bias={value}", sampling(logit_bias={1: value}), INVALID, "INVALID_PARAMETER", "sampling.logit_bias"
    for token_id in (-1, VOCAB_SIZE, 2**31 - 1):
        yield (
            f"bias of {token_id}",
            sampling(logit_bias={token_id: 1}),
            INVALID,
            "INVALID_PARAMETER",
            "sampling.logit_bias",
        )
        yield (
            f"stop at {token_id}",
            stopping(stop_token_ids=[token_id]),
            INVALID,
            "INVALID_PARAMETER",
            "stopping.stop_token_ids",
        )
        yield f"prompt of {token_id}", prompt([1, token_id]), INVALID, "INVALID_PARAMETER", "prompt"
        yield (
            f"resumed with {token_id}",
            request(resume_token_ids=pb.TokenIds(ids=[token_id])),
            INVALID,
            "INVALID_PARAMETER",
            "resume_token_ids",
        )
    parameters = {
        "top_k": sampling(top_k=-1),
        "logprobs": sampling(logprobs=1),
        "logit_bias": sampling(logit_bias=dict.fromkeys(range(1_025), 1.0)),
    }
    for name, bad in parameters.items():
        yield name, bad, INVALID, "INVALID_PARAMETER", f"sampling.{name}"
    rules = {
        "max_tokens": [stopping(max_tokens=0), stopping(max_tokens=-(2**31))],
        "min_tokens": [stopping(min_tokens=-1), stopping(min_tokens=3, max_tokens=2), stopping(min_tokens=2**31 - 1)],
        "stop": [stopping(stop=["x"] * 17), stopping(stop=["", "x"]), stopping(stop=["x" * 257])],
        "stop_token_ids": [stopping(stop_token_ids=range(65))],
    }
    for name, cases in rules.items():
        for index, bad in enumerate(cases):
            yield f"{name} {index}", bad, INVALID, "INVALID_PARAMETER", f"stopping.{name}"
    asked = {
        "ranges": pb.Retention(ranges=[pb.RetentionRange()] * 65),
        "ranges[0].start": pb.Retention(ranges=[pb.RetentionRange(start=-1)]),
        "ranges[1].stop": pb.Retention(ranges=[pb.RetentionRange(), pb.RetentionRange(stop=2**31 - 1)]),
        "ranges[0].priority": pb.Retention(ranges=[pb.RetentionRange(level=pb.RetentionLevel(priority=101))]),
        "decode.duration": pb.Retention(decode=pb.RetentionLevel(duration_ms=-1)),
    }
    for name, retention in asked.items():
        yield name, request(retention=retention), INVALID, "INVALID_PARAMETER", f"retention.{name}"
    yield "no prompt", pb.GenerateRequest(), INVALID, "INVALID_PARAMETER", "prompt"
    yield "no tokens", prompt([]), INVALID, "EMPTY_PROMPT", "prompt"
    yield "no messages", pb.GenerateRequest(chat=pb.ChatPrompt()), INVALID, "INVALID_PARAMETER", "chat.messages"
    yield "no room", prompt([1] * MAX_MODEL_LEN), INVALID, "PROMPT_TOO_LONG", "prompt"
    yield "long id", request(request_id="x" * 257), INVALID, "INVALID_PARAMETER", "request_id"
    yield "long salt", request(cache_salt="x" * 257), INVALID, "INVALID_PARAMETER", "cache_salt"
    yield "long tenant", request(tenant="x" * 257), INVALID, "INVALID_PARAMETER", "tenant"
    complete = request(resume_token_ids=pb.TokenIds(ids=[1, 2]), stopping=pb.StoppingParams(max_tokens=2))
    yield "complete", complete, INVALID, "INVALID_PARAMETER", "resume_token_ids"
    begun, ended = pb.ResumedOutput(token_ids=[1, 2]), pb.ResumedOutput(is_finished=True)
    outputs = {
        "resume_outputs": [
            request(n=3, resume_outputs=[begun, ended]),
            request(n=1, resume_outputs=[begun]),
            request(n=2, resume_outputs=[ended, ended]),
        ],
        "resume_outputs[1].token_ids": [
            request(n=2, resume_outputs=[ended, begun], stopping=pb.StoppingParams(max_tokens=2)),
            request(n=2, resume_outputs=[ended, begun], stopping=pb.StoppingParams(stop_token_ids=[2])),
            request(n=2, resume_outputs=[ended, pb.ResumedOutput(token_ids=[-1])]),
        ],
        "resume_token_ids": [request(n=2, resume_token_ids=pb.TokenIds(ids=[1]))],
    }
    for name, several in outputs.items():
        for index, bad in enumerate(several):
            yield f"{name} {index}", bad, INVALID, "INVALID_PARAMETER", name
    yield "text", pb.GenerateRequest(text="hello"), PRECONDITION, "NO_TOKENIZER", "prompt"
    hello = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hello")])
    yield "chat", pb.GenerateRequest(chat=hello), PRECONDITION, "NO_TOKENIZER", "prompt"
    yield "stop strings", stopping(stop=["x"]), PRECONDITION, "NO_TOKENIZER", "stopping.stop"


BAD_REQUESTS = list(bad_requests())


@pytest.mark.usefixtures("bystander")
async def test_generate_bad_request_gets_a_typed_error(abused: Cluster) -> None:
    async with inference(abused) as stub:
        for name, bad, code, reason, field in BAD_REQUESTS:
            error = await refusal(stub.Generate(bad))
            assert (error.code, error.reason, error.metadata.get("field")) == (code, reason, field), name
            assert "expected" in error.message, name
            assert "got" in error.message, name


@pytest.mark.usefixtures("bystander")
async def test_generate_many_good_requests_among_bad_ones_are_right(client: AsyncClient, abused: Cluster) -> None:
    rng = random.Random(11)
    good = {f"good-{index}": Job(random_prompt(rng, 30), 20) for index in range(60)}
    bad: dict[str, tuple[grpc.StatusCode, str]] = {}
    orders = [pb.GenerateManyRequest(), pb.GenerateManyRequest(generate=prompt([1]))]  # without order, without id
    orders += [pb.GenerateManyRequest(abort_request_id="nobody")]
    for index, (_, message, code, reason, _) in enumerate(BAD_REQUESTS):
        if message.request_id:
            continue  # the id is what is bad
        order = pb.GenerateManyRequest(generate=message)
        order.generate.request_id = f"bad-{index}"
        bad[order.generate.request_id] = (code, reason)
        orders.append(order)
    for request_id, job in good.items():
        message = prompt(job.prompt)
        message.request_id, message.stopping.max_tokens, message.sampling.temperature = request_id, job.max_tokens, 0
        orders.append(pb.GenerateManyRequest(generate=message))
    rng.shuffle(orders)

    failures: list[tuple[str, KvPlaneError]] = []
    async with inference(abused) as stub:
        call = stub.GenerateMany()
        for order in orders:
            await call.write(order)
        await call.done_writing()
        async for response in call:
            failures += [(entry.request_id, error_from_wire(entry.error)) for entry in response.errors]
            for output in response.outputs:
                good[output.request_id].token_ids += output.token_ids
        assert await call.code() is grpc.StatusCode.OK

    assert [(error.code, error.reason) for name, error in failures if not name] == [(INVALID, "INVALID_PARAMETER")] * 2
    assert {name: (error.code, error.reason) for name, error in failures if name} == bad
    assert len(failures) == len(bad) + 2
    for job in good.values():
        assert job.token_ids == job.expected


@pytest.mark.usefixtures("bystander")
async def test_generate_ten_megabytes_of_token_ids_are_refused(abused: Cluster) -> None:
    ids = [VOCAB_SIZE - 1] * (10 * MIB // 3)
    async with inference(abused) as stub:
        error = await refusal(stub.Generate(prompt(ids)))
    assert (error.code, error.reason) == (INVALID, "PROMPT_TOO_LONG")
    assert error.metadata["prompt_tokens"] == str(len(ids))
    assert error.metadata["max_model_len"] == str(MAX_MODEL_LEN)


@pytest.mark.usefixtures("bystander")
async def test_generate_huge_max_tokens_ends_at_the_models_length(client: AsyncClient) -> None:
    job = Job(random_prompt(random.Random(12), MAX_MODEL_LEN - 20), 20)
    job.options["max_tokens"] = 2**31 - 1
    await job.run(client)
    job.check()


@pytest.mark.usefixtures("bystander")
async def test_generate_id_in_use_is_refused_and_its_owner_undisturbed(client: AsyncClient, abused: Cluster) -> None:
    owner = Job([3, 1, 4], 200, {"request_id": "mine"})
    async with Running(client, [owner]) as running, inference(abused) as stub:
        await running.progressed(2)
        error = await refusal(stub.Generate(request(request_id="mine")))
        assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
        assert error.metadata == {"request_id": "mine"}
        await running.finished()


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("request_id", ["nobody", "", "\N{SNOWMAN}" * 256, "x" * 100_000], ids=len)
async def test_abort_unknown_id_is_a_typed_error(abused: Cluster, request_id: str) -> None:
    async with inference(abused) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Abort(pb.AbortRequest(request_id=request_id))
    error = error_from_rpc(failure.value)
    assert (error.code, error.reason) in {
        (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND"),
        (INVALID, "INVALID_PARAMETER"),
    }


@pytest.mark.usefixtures("bystander")
async def test_manager_calls_bad_arguments_get_typed_errors(abused: Cluster) -> None:
    async with grpc.aio.insecure_channel(abused.address) as channel:
        stub: Any = manager_grpc.KvManagerServiceStub(channel)
        for call, code, reason in (
            (stub.ListRequests(manager_pb.ListRequestsRequest(page_size=-1)), INVALID, "INVALID_PARAMETER"),
            (stub.ListRequests(manager_pb.ListRequestsRequest(page_token="x" * 10_000)), INVALID, "INVALID_PARAMETER"),
            (stub.ListBlocks(manager_pb.ListBlocksRequest(page_size=10_001)), INVALID, "INVALID_PARAMETER"),
            (stub.ListBlocks(manager_pb.ListBlocksRequest(page_token="-1")), INVALID, "INVALID_PARAMETER"),
            (stub.ResetPrefixCache(manager_pb.ResetPrefixCacheRequest()), PRECONDITION, "POOL_IN_USE"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call
            error = error_from_rpc(failure.value)
            assert (error.code, error.reason) == (code, reason)


@pytest.mark.usefixtures("bystander")
async def test_register_bad_arguments_get_typed_errors_and_an_unreachable_address_is_shown(
    client: AsyncClient, abused: Cluster
) -> None:
    async with grpc.aio.insecure_channel(abused.address) as channel:
        stub: Any = registry_grpc.ExecutorRegistryServiceStub(channel)

        async def register(executor_id: str, address: str) -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Register(registry_pb.RegisterRequest(executor_id=executor_id, address=address))
            error = error_from_rpc(failure.value)
            return error.code, error.reason

        for address in ("", "host", "host:", "host:0", "host:65536", "http://host:1", "x" * 100_000):
            assert await register("fake", address) == (INVALID, "INVALID_PARAMETER")
        for executor_id in ("", "x" * 129):
            assert await register(executor_id, "127.0.0.1:1") == (INVALID, "INVALID_PARAMETER")
        await stub.Register(registry_pb.RegisterRequest(executor_id="fake", address="127.0.0.1:1"))
        assert await register("fake", "127.0.0.1:2") == (grpc.StatusCode.ALREADY_EXISTS, "EXECUTOR_ID_REUSED")

    async def is_shown() -> bool:
        errors = {info.executor_id: info.last_error for info in await client.list_executors()}
        return "UNAVAILABLE" in (errors["fake"] or "")

    await eventually(is_shown, "why the fake executor cannot be used")


async def test_generate_row_that_cannot_be_sampled_ends_alone(cluster: Cluster) -> None:
    cluster.start(sim_vocab_size=32)
    async with cluster.client(retry=NO_RETRY) as client:
        good = client.stream([1, 2], max_tokens=100, temperature=0.0)
        first = await anext(good)
        with pytest.raises(InternalError) as failure:
            await client.generate([3], max_tokens=4, min_tokens=2, stop_token_ids=list(range(32)))
        rest = await good.completion()
        await settled(client)
    assert failure.value.reason == "ALL_TOKENS_SUPPRESSED"
    assert [*first.token_ids, *rest.token_ids] == expected_tokens([1, 2], 100, vocab_size=32)


async def test_manager_without_executor_answers_unavailable(cluster: Cluster) -> None:
    cluster.start_manager()
    async with inference(cluster) as stub:
        error = await refusal(stub.Generate(prompt([1])))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetModel(pb.GetModelRequest())
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_executor_bad_steps_get_typed_errors(cluster: Cluster) -> None:
    executor = cluster.start_executor(wait=False, manager="")
    executor.wait_event("executor_ready")

    def int32(*values: int) -> common_pb2.Int32Array:
        return common_pb2.Int32Array(data=b"".join(value.to_bytes(4, "little", signed=True) for value in values))

    def step(step_id: int, epoch: int, block_id: int = 1) -> executor_pb.ExecuteRequest:
        tables = executor_pb.BlockTables(block_indptr=int32(0, 1), block_ids=int32(block_id), last_block_len=int32(1))
        return executor_pb.ExecuteRequest(
            step_id=step_id, kv_epoch=epoch, query_indptr=int32(0, 1), token_ids=int32(7), positions=int32(0),
            block_tables=[tables],
        )  # fmt: skip

    async with grpc.aio.insecure_channel(executor_address(executor)) as channel:
        stub: Any = executor_grpc.ExecutorServiceStub(channel)

        async def run(*steps: executor_pb.ExecuteRequest) -> tuple[int, grpc.StatusCode, str]:
            """How many steps were answered, and what the stream ended with."""
            call, answered = stub.Execute(iter(steps)), 0
            try:
                async for _ in call:
                    answered += 1
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
            else:
                pytest.fail(f"expected an error after {answered} steps, got none")
            return answered, error.code, error.reason

        assert (await run(step(1, 1)))[:2] == (0, PRECONDITION)
        profile = await stub.ProfileMemory(executor_pb.ProfileMemoryRequest(max_num_batched_tokens=64, max_num_seqs=8))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.InitializeKvCache(executor_pb.InitializeKvCacheRequest(num_blocks=profile.num_blocks + 1))
        assert failure.value.code() in {INVALID, PRECONDITION}
        ready = await stub.InitializeKvCache(executor_pb.InitializeKvCacheRequest(num_blocks=profile.num_blocks))
        epoch = ready.kv_cache.kv_epoch
        assert (await run(step(1, epoch), step(2, epoch + 1)))[:2] == (1, grpc.StatusCode.ABORTED)
        assert (await run(step(2, epoch), step(2, epoch)))[:2] == (1, grpc.StatusCode.ABORTED)
        assert (await run(step(1, epoch), step(2, epoch, profile.num_blocks)))[:2] == (1, INVALID)
        ragged = step(2, epoch)
        ragged.token_ids.data = b"\0" * 7
        assert (await run(step(1, epoch), ragged))[:2] == (1, INVALID)


# --- too much ---------------------------------------------------------------------------------------------------------


async def flood(client: AsyncClient, cluster: Cluster, jobs: list[Job], *, max_waiting: int) -> None:
    """Send all jobs at once to a manager whose executor stands still, then let it run."""
    executor = cluster.executors[0]
    executor.signal(signal.SIGSTOP)
    try:
        async with Running(client, jobs) as running:

            async def is_full() -> int | None:
                stats = await client.get_stats()
                # The bystander runs as well.
                num_accepted = stats.requests_running - 1 + max_waiting
                is_settled = stats.requests_waiting == max_waiting and len(running.unfinished) == num_accepted
                return num_accepted if is_settled else None

            num_accepted = await eventually(is_full, "a full queue and the surplus refused")
            executor.signal(signal.SIGCONT)
            outcomes = await running.outcomes()
    finally:
        executor.signal(signal.SIGCONT)
    accepted = [job for job, outcome in zip(jobs, outcomes, strict=True) if outcome is None]
    assert len(accepted) == num_accepted
    for job in accepted:
        job.check()
    for error in filter(None, outcomes):
        assert isinstance(error, ResourceExhaustedError)
        assert error.reason == "QUEUE_FULL"
        assert error.metadata == {"max_waiting": str(max_waiting)}
        assert error.retry_delay == 1.0


@pytest.mark.usefixtures("bystander")
async def test_generate_five_times_the_queue_is_refused_with_advice_and_leaves_no_memory(
    client: AsyncClient, abused: Cluster
) -> None:
    resident = []
    for round_number, count in enumerate((2_000, 5_000, 5_000, 5_000)):
        rng = random.Random(round_number)
        await flood(client, abused, [Job(random_prompt(rng, 20), 4) for _ in range(count)], max_waiting=1_000)
        resident.append(abused.manager.resident_bytes() / MIB)
    # What a round takes stays with the allocator, which takes some rounds to settle; 2 KB for each of ten thousand
    # refused requests would be far less than one that is kept.
    assert resident[3] < resident[1] + 20, resident


@pytest.mark.usefixtures("bystander")
async def test_generate_refused_prompts_of_ten_megabytes_leave_nothing_behind(
    client: AsyncClient, abused: Cluster
) -> None:
    huge = "a" * (10 << 20)
    resident = []
    for _ in range(2):
        for _ in range(15):
            with pytest.raises(KvPlaneError):
                await client.generate(huge, max_tokens=1)
        resident.append(abused.manager.resident_bytes() / MIB)
    assert resident[1] < resident[0] + 60, resident


@pytest.mark.usefixtures("bystander")
async def test_generate_reader_that_never_reads_costs_nobody_anything(client: AsyncClient, abused: Cluster) -> None:
    # Every message repeats the id, so that the connection's window is full long before the end.
    jobs = {f"{'unread' * 40}-{index}": Job([index, 9], 800) for index in range(8)}
    async with inference(abused, **{"http2.bdp_probe": 0}) as stub:
        calls = []
        for request_id, job in jobs.items():
            message = prompt(job.prompt)
            message.request_id, message.stopping.max_tokens, message.sampling.temperature = (
                request_id,
                job.max_tokens,
                0,
            )
            calls.append(stub.Generate(message))

        async def have_all_finished() -> bool:
            listed = [info async for info in client.list_requests(include_finished=True)]
            return sum(info.request_id in jobs and info.finish_reason is not None for info in listed) == len(jobs)

        await eventually(have_all_finished, "the end of requests that nobody reads")
        async with Running(client, random_jobs(random.Random(13), 16)) as running:
            await running.finished()
        # Nothing was dropped for them, and what they left unread waited as one message, not as hundreds.
        for job, call in zip(jobs.values(), calls, strict=True):
            messages = [list(response.token_ids) async for response in call]
            assert [token_id for message in messages for token_id in message] == job.expected
            assert len(messages) < job.max_tokens


@pytest.mark.usefixtures("bystander")
async def test_generate_many_orders_of_who_never_reads_are_taken_no_more(abused: Cluster) -> None:
    resident = abused.manager.resident_bytes()
    async with inference(abused, **{"http2.bdp_probe": 0}) as stub:
        call = stub.GenerateMany()
        order = pb.GenerateManyRequest(generate=prompt([1] * 2_000))  # without an id: an error that is never read
        written = 0

        async def write_for_ever() -> None:
            nonlocal written
            while True:
                await call.write(order)
                written += 1

        writer = asyncio.create_task(write_for_ever())
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.5)
            assert written < 100_000, "expected that writes come to wait"
        assert abused.manager.resident_bytes() < resident + 32 * MIB
        # Once it reads, it gets an error for each.
        errors = 0
        while errors < before:
            errors += len((await call.read()).errors)
        writer.cancel()
        await asyncio.wait([writer])
        call.cancel()


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("ending", ["cancel", "deadline", "disconnect"])
async def test_generate_many_that_ends_frees_all_its_requests(
    client: AsyncClient, abused: Cluster, ending: str
) -> None:
    async def are_all_there() -> bool:
        stats = await client.get_stats()
        return stats.requests_running + stats.requests_waiting == 201 and stats.requests_waiting > 0

    async def only_the_bystander_is_left() -> bool:
        stats = await client.get_stats()
        return stats.requests_running + stats.requests_waiting == 1

    async with inference(abused) as stub:
        call = stub.GenerateMany(timeout=3.0 if ending == "deadline" else None)
        for index in range(200):
            message = prompt([index, 1, 2])
            message.request_id = f"many-{index}"
            await call.write(pb.GenerateManyRequest(generate=message))
        await eventually(are_all_there, "200 requests, some of which wait")
        if ending == "cancel":
            call.cancel()
        elif ending == "deadline":
            assert (await refusal(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            await call.read()  # and leave: the channel closes under it
    await eventually(only_the_bystander_is_left, "the end of all 200")


@pytest.mark.usefixtures("bystander")
async def test_connections_that_come_and_go_leave_nothing(client: AsyncClient, abused: Cluster) -> None:
    async def come_and_go(index: int) -> None:
        async with inference(abused) as stub:
            call = stub.Generate(stopping(max_tokens=4_000))
            if index % 3:
                await call.read()
            if index % 2:
                call.cancel()

    async def round_of(count: int) -> None:
        for start in range(0, count, 50):
            await asyncio.gather(*(come_and_go(index) for index in range(start, start + 50)))

        async def only_ours_is_left() -> bool:
            stats = await client.get_stats()
            return stats.requests_running + stats.requests_waiting == 1

        await eventually(only_ours_is_left, "only the bystander's request")

        async def only_known_connections() -> bool:
            return abused.manager.num_connections() <= connections

        await eventually(only_known_connections, f"{connections} connections")

    connections = abused.manager.num_connections()
    await round_of(500)
    resident = abused.manager.resident_bytes()
    await round_of(500)
    assert abused.manager.resident_bytes() < resident + 4 * MIB


# --- not even requests ------------------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GARBAGE = {
    "random": random.Random(14).randbytes(100_000),
    "http/1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("160301020001 0001fc0303") + b"\0" * 512,
    "half a preface": PREFACE[:12],
    "preface and garbage": PREFACE + random.Random(15).randbytes(10_000),
    "frame of 16 MiB": PREFACE
    + bytes.fromhex("000000040000000000")
    + bytes.fromhex("ffffff000000000001")
    + b"\0" * 50_000,
    "headers without end": PREFACE
    + bytes.fromhex("000000040000000000")
    + bytes.fromhex("000001010000000001ff") * 1_000,
}


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
async def test_port_garbage_disturbs_nobody(client: AsyncClient, abused: Cluster, data: bytes) -> None:
    def send() -> None:
        for port in (abused.port, int(executor_address(abused.executors[0]).rpartition(":")[2])):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65_536):
                        pass
                except OSError:
                    continue  # it has hung up on us, as it should

    await asyncio.to_thread(send)
    async with Running(client, random_jobs(random.Random(16), 4)) as running:
        await running.finished()


@pytest.mark.usefixtures("bystander")
async def test_generate_message_that_is_no_message_is_an_error(abused: Cluster) -> None:
    async with grpc.aio.insecure_channel(abused.address) as channel:
        generate = channel.unary_stream("/kvplane.kvmanager.v1.InferenceService/Generate")
        for data in (b"\xff" * 100, b"\x0a\x7f", b"\x0a\x02\xff\xfe"):
            error = await refusal(generate(data))
            assert (error.code, error.reason) == (INVALID, "MALFORMED_MESSAGE")
            assert error.metadata == {"got_bytes": str(len(data))}
        unknown = channel.unary_unary("/kvplane.kvmanager.v1.InferenceService/Guess")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await unknown(b"")
        assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


# --- text, where there is a tokenizer ---------------------------------------------------------------------------------


@pytest.mark.model
async def test_generate_bad_text_gets_a_typed_error(cluster: Cluster) -> None:
    model = os.environ.get("KVPLANE_TEST_MODEL")
    if not model:
        pytest.skip("KVPLANE_TEST_MODEL is not set")
    cluster.start(
        {"max_num_batched_tokens": 256, "max_num_seqs": 4, "lease_ms": 120_000},
        backend="torch", model=model, dtype="float32", max_model_len=512, memory_limit="2GiB", sim_step_ms=0,
    )  # fmt: skip
    async with cluster.client(retry=NO_RETRY) as client:
        alone = await client.generate("Once upon a time", temperature=0.0, max_tokens=40)
        beside = asyncio.create_task(client.generate("Once upon a time", temperature=0.0, max_tokens=40))
        async with inference(cluster) as stub:
            cases = (
                (pb.GenerateRequest(text=""), INVALID, "EMPTY_PROMPT"),
                (pb.GenerateRequest(text="lorem ipsum " * (10 * MIB // 12)), INVALID, "PROMPT_TOO_LONG"),
                (pb.GenerateRequest(text="x" * (10 * MIB)), INVALID, "PROMPT_TOO_LONG"),
                (
                    pb.GenerateRequest(text="x", stopping=pb.StoppingParams(stop=["y"] * 17)),
                    INVALID,
                    "INVALID_PARAMETER",
                ),
                (pb.GenerateRequest(text="x", stopping=pb.StoppingParams(stop=[""])), INVALID, "INVALID_PARAMETER"),
                (pb.GenerateRequest(chat=pb.ChatPrompt()), INVALID, "INVALID_PARAMETER"),
            )
            for bad, code, reason in cases:
                error = await refusal(stub.Generate(bad))
                assert (error.code, error.reason) == (code, reason)
        assert (await beside).token_ids == alone.token_ids
        await settled(client)
