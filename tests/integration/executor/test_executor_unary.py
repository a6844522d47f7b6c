import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvplane.executor.v1 import executor_service_pb2 as pb
from structlog.testing import capture_logs

from executor_service.backends.base import BackendError
from executor_service.server import SERVICE_NAME, BindError, ExecutorServer, running_executor
from tests.unit.executor_shell.executor_backends import BrokenBackend, HeldBackend
from tests.unit.executor_shell.executor_builders import (
    BLOCK_SIZE,
    MAX_SEQS,
    MAX_TOKENS,
    NUM_BLOCKS,
    Row,
    connected,
    error_info,
    make_step,
    sim_config,
)

SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def executor():
    async with running_executor(sim_config(executor_id="e-1", sim_eos_token_ids=(3, 5))) as server:
        yield server


@pytest.fixture
async def client(executor):
    async with connected(executor.address) as connection:
        yield connection


async def refused(call, code):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is code, error.value
    return error_info(error.value)


async def health_of(address, service):
    async with grpc.aio.insecure_channel(address) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        return response.status


async def test_get_model_info_describes_the_model(client):
    info = await client.stub.GetModelInfo(pb.GetModelInfoRequest(include_tokenizer_files=True))
    assert (info.executor_id, info.backend, info.model_name) == ("e-1", "sim", "sim")
    assert (info.block_size, info.vocab_size, info.max_model_len) == (BLOCK_SIZE, 1000, (NUM_BLOCKS - 1) * BLOCK_SIZE)
    assert list(info.eos_token_ids) == [3, 5]
    assert info.model_fingerprint
    (group,) = info.kv_groups
    assert group.type == pb.KV_GROUP_TYPE_FULL_ATTENTION
    assert group.bytes_per_block == BLOCK_SIZE * 8
    assert not info.HasField("kv_cache")
    assert not info.tokenizer_files


async def test_handshake_profile_initialize_shows_the_cache(client):
    limits = pb.ProfileMemoryRequest(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS)
    profile = await client.stub.ProfileMemory(limits)
    assert profile.num_blocks == NUM_BLOCKS
    assert profile.available_bytes // profile.bytes_per_block == NUM_BLOCKS
    assert await client.stub.ProfileMemory(limits) == profile
    created = await client.stub.InitializeKvCache(pb.InitializeKvCacheRequest(num_blocks=10))
    assert created.kv_cache.kv_epoch != 0
    assert (created.kv_cache.num_blocks, created.kv_cache.block_size) == (10, BLOCK_SIZE)
    info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.kv_cache == created.kv_cache


async def test_profile_memory_at_other_limits_forgets_the_cache(client):
    epoch = await client.handshake()
    await client.stub.ProfileMemory(pb.ProfileMemoryRequest(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS))
    assert (await client.stub.GetModelInfo(pb.GetModelInfoRequest())).kv_cache.kv_epoch == epoch
    await client.stub.ProfileMemory(pb.ProfileMemoryRequest(max_num_batched_tokens=MAX_TOKENS + 1, max_num_seqs=1))
    assert not (await client.stub.GetModelInfo(pb.GetModelInfoRequest())).HasField("kv_cache")
    call = client.stub.Reset(pb.ResetRequest(kv_epoch=epoch))
    assert (await refused(call, grpc.StatusCode.FAILED_PRECONDITION)).reason == "KV_NOT_INITIALIZED"
    assert await client.handshake() != epoch


@pytest.mark.parametrize(("tokens", "seqs", "field"), [(0, 1, "max_num_batched_tokens"), (1, 0, "max_num_seqs")])
async def test_profile_memory_limit_below_1_is_invalid(client, tokens, seqs, field):
    request = pb.ProfileMemoryRequest(max_num_batched_tokens=tokens, max_num_seqs=seqs)
    info = await refused(client.stub.ProfileMemory(request), grpc.StatusCode.INVALID_ARGUMENT)
    assert dict(info.metadata) == {"field": field, "expected": "at least 1", "got": "0"}


async def test_profile_memory_too_few_blocks_is_failed_precondition():
    async with running_executor(sim_config(max_model_len=1000)) as server, connected(server.address) as client:
        request = pb.ProfileMemoryRequest(max_num_batched_tokens=1, max_num_seqs=1)
        info = await refused(client.stub.ProfileMemory(request), grpc.StatusCode.FAILED_PRECONDITION)
        assert info.reason == "NOT_ENOUGH_KV_MEMORY"
        assert info.metadata["needed_blocks"] == "251"


async def test_initialize_before_profile_is_failed_precondition(client):
    call = client.stub.InitializeKvCache(pb.InitializeKvCacheRequest(num_blocks=5))
    assert (await refused(call, grpc.StatusCode.FAILED_PRECONDITION)).reason == "NOT_PROFILED"


@pytest.mark.parametrize("num_blocks", [-1, 0, 1, NUM_BLOCKS + 1])
async def test_initialize_other_than_reported_is_invalid_and_keeps_the_cache(client, num_blocks):
    epoch = await client.handshake()
    call = client.stub.InitializeKvCache(pb.InitializeKvCacheRequest(num_blocks=num_blocks))
    assert (await refused(call, grpc.StatusCode.INVALID_ARGUMENT)).metadata["field"] == "num_blocks"
    assert (await client.stub.GetModelInfo(pb.GetModelInfoRequest())).kv_cache.kv_epoch == epoch


async def test_epochs_are_new_at_every_initialisation_and_reset(client):
    epochs = {await client.handshake() for _ in range(3)}
    (latest,) = {(await client.stub.GetModelInfo(pb.GetModelInfoRequest())).kv_cache.kv_epoch}
    reset = await client.stub.Reset(pb.ResetRequest(kv_epoch=latest))
    assert len(epochs | {reset.kv_cache.kv_epoch}) == 4
    assert 0 not in epochs
    assert reset.kv_cache.num_blocks == NUM_BLOCKS


async def test_initialize_that_fails_leaves_no_cache():
    backend = BrokenBackend()
    async with running_executor(sim_config(), backend) as server, connected(server.address) as client:
        epoch = await client.handshake()
        backend.allocate_error = BackendError("OUT_OF_MEMORY", "no room")
        call = client.stub.InitializeKvCache(pb.InitializeKvCacheRequest(num_blocks=5))
        assert (await refused(call, grpc.StatusCode.INTERNAL)).reason == "OUT_OF_MEMORY"
        assert not (await client.stub.GetModelInfo(pb.GetModelInfoRequest())).HasField("kv_cache")
        call = client.stub.Reset(pb.ResetRequest(kv_epoch=epoch))
        assert (await refused(call, grpc.StatusCode.FAILED_PRECONDITION)).reason == "KV_NOT_INITIALIZED"
        backend.allocate_error = None
        assert await client.handshake() != epoch


async def test_reset_and_list_tags_need_a_cache_and_its_epoch(client):
    calls = [
        lambda epoch: client.stub.Reset(pb.ResetRequest(kv_epoch=epoch)),
        client.tags,
    ]
    for call in calls:
        assert (await refused(call(1), grpc.StatusCode.FAILED_PRECONDITION)).reason == "KV_NOT_INITIALIZED"
    epoch = await client.handshake()
    for call in calls:
        info = await refused(call(epoch ^ 1), grpc.StatusCode.ABORTED)
        assert info.reason == "STALE_EPOCH"
        assert info.metadata["expected"] == str(epoch)


async def test_tags_follow_the_blocks_content(client):
    epoch = await client.handshake()
    stream = client.execute()
    await stream.step(make_step(1, epoch, [Row(range(8), [3, 4])], tags={3: b"three", 4: b"four"}))
    assert await client.tags(epoch) == {3: b"three", 4: b"four"}
    await stream.step(make_step(2, epoch, [Row([1], [4])]))
    assert await client.tags(epoch) == {3: b"three"}
    await stream.step(make_step(3, epoch, [Row([1, 2, 3], [4], start=1)], tags={4: b"new", 3: b""}))
    assert await client.tags(epoch) == {4: b"new"}
    await stream.step(make_step(4, epoch, [], tags={9: b"nine"}))
    assert await client.tags(epoch) == {4: b"new", 9: b"nine"}
    reset = await client.stub.Reset(pb.ResetRequest(kv_epoch=epoch))
    assert await client.tags(reset.kv_cache.kv_epoch) == {}


async def test_tags_of_a_failed_step_are_not_stored_and_overwritten_ones_are_gone():
    backend = BrokenBackend()
    async with running_executor(sim_config(), backend) as server, connected(server.address) as client:
        epoch = await client.handshake()
        stream = client.execute()
        await stream.step(make_step(1, epoch, [Row(range(4), [3])], tags={3: b"three"}))
        backend.step_errors[2] = BackendError("BROKEN", "on purpose")
        await stream.send(make_step(2, epoch, [Row(range(8), [3, 4])], tags={4: b"four"}))
        assert error_info(await stream.error()).reason == "BROKEN"
        assert await client.tags(epoch) == {}


async def test_tags_of_several_megabytes_come_in_portions():
    config = sim_config(sim_num_blocks=3000)
    async with running_executor(config) as server, connected(server.address) as client:
        epoch = await client.handshake(3000)
        tags = {block: block.to_bytes(2, "little") * 1000 for block in range(1, 2500)}
        await client.execute().step(make_step(1, epoch, [], tags=tags))
        assert await client.tags(epoch) == tags
        call = client.stub.ListBlockTags(pb.ListBlockTagsRequest(kv_epoch=epoch))
        sizes = [portion.ByteSize() async for portion in call]
        assert len(sizes) == 5


async def test_everything_before_load_is_unavailable_and_health_says_so():
    backend = HeldBackend()
    server = ExecutorServer(sim_config(), backend)
    await server.start()
    loading = asyncio.create_task(server.load())
    async with connected(server.address) as client:
        assert await health_of(server.address, "") == NOT_SERVING
        assert await health_of(server.address, SERVICE_NAME) == NOT_SERVING
        limits = pb.ProfileMemoryRequest(max_num_batched_tokens=1, max_num_seqs=1)
        calls = [
            client.stub.GetModelInfo(pb.GetModelInfoRequest()),
            client.stub.ProfileMemory(limits),
            client.stub.InitializeKvCache(pb.InitializeKvCacheRequest(num_blocks=5)),
            client.stub.Reset(pb.ResetRequest(kv_epoch=1)),
            client.tags(1),
        ]
        for call in calls:
            assert (await refused(call, grpc.StatusCode.UNAVAILABLE)).reason == "EXECUTOR_LOADING"
        error = await client.execute().error()
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_LOADING")
        backend.open()
        await loading
        assert await health_of(server.address, "") == SERVING
        assert await health_of(server.address, SERVICE_NAME) == SERVING
        assert await client.handshake()
    await server.stop()
    assert backend.closed


async def test_health_watch_sees_not_serving_at_stop():
    server = ExecutorServer(sim_config())
    await server.start()
    await server.load()
    async with grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(server.stop())
        assert (await watch.read()).status == NOT_SERVING
        await stopping


async def test_health_answers_while_a_step_computes():
    backend = HeldBackend()
    backend.load_gate.set()
    async with running_executor(sim_config(), backend) as server, connected(server.address) as client:
        epoch = await client.handshake()
        stream = client.execute()
        await stream.send(make_step(1, epoch, [Row([1], [1])]))
        assert await asyncio.to_thread(backend.started.acquire, timeout=30)
        assert await health_of(server.address, SERVICE_NAME) == SERVING
        assert (await client.stub.GetModelInfo(pb.GetModelInfoRequest())).kv_cache.kv_epoch == epoch
        backend.open()
        assert (await stream.receive()).step_id == 1


async def test_reflection_lists_and_describes_the_service(executor):
    async with grpc.aio.insecure_channel(executor.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = {service.name for service in (await call.read()).list_services_response.service}
        assert services == {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()


@pytest.mark.parametrize("method", [*SERVICE.methods, *HEALTH.methods[:1]], ids=lambda method: method.name)
async def test_bytes_that_are_no_message_are_invalid_argument_and_disturb_nobody(executor, client, method):
    epoch = await client.handshake()
    stream = client.execute()
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with grpc.aio.insecure_channel(executor.address) as channel:
        if method.client_streaming:
            call = channel.stream_stream(path)()
            await call.write(b"\xff\xff\xff")
            answer = call.read()
        elif method.server_streaming:
            answer = channel.unary_stream(path)(b"\xff\xff\xff").read()
        else:
            answer = channel.unary_unary(path)(b"\xff\xff\xff")
        with capture_logs() as logs:
            info = await refused(answer, grpc.StatusCode.INVALID_ARGUMENT)
    assert (info.reason, info.domain, dict(info.metadata)) == ("MALFORMED_MESSAGE", "kvplane", {"got_bytes": "3"})
    assert logs == [], "a caller's mistake is none of ours"
    if not method.client_streaming:  # a further Execute takes the executor over
        await stream.send(make_step(1, epoch, [Row([1], [1])]))
        assert (await stream.receive()).step_id == 1


async def test_second_executor_on_one_port_is_refused_with_the_address(executor):
    port = int(executor.address.rpartition(":")[2])
    with pytest.raises(BindError, match=f"127.0.0.1:{port}"):
        async with running_executor(sim_config(port=port)):
            pytest.fail("two executors share a port")


async def test_load_error_reaches_the_caller():
    backend = BrokenBackend()
    backend.load_error = BackendError("NO_SUCH_MODEL", "not there")
    with pytest.raises(BackendError, match="not there"):
        async with running_executor(sim_config(), backend):
            pytest.fail("an executor without a model")
    assert backend.closed
