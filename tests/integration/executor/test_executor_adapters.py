"""Adapters over real gRPC: loaded, listed, named by rows, unloaded; every refusal has its status and reason."""

import grpc
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.sim_digest import adapter_revision, adapter_salt, expected_tokens
from executor_service.server import running_executor
from tests.unit.executor_shell.executor_builders import (
    VOCAB_SIZE,
    Row,
    column,
    connected,
    error_info,
    make_step,
    sim_config,
    values_of,
)

PROMPT = [11, 12, 13, 14, 15]
TABLES = ([1, 2, 3], [4, 5, 6], [7, 8, 9])


@pytest.fixture
async def client():
    async with running_executor(sim_config(max_loras=2)) as server, connected(server.address) as connection:
        yield connection


async def load(client, name, source, revision=""):
    request = pb.LoadAdapterRequest(name=name, source=source, revision=revision)
    return (await client.stub.LoadAdapter(request)).adapter


async def refused(call, code):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is code, error.value
    return error_info(error.value)


def oracle(source):
    salt = adapter_salt(adapter_revision(source)) if source else 0
    return expected_tokens(PROMPT, 3, vocab_size=VOCAB_SIZE, salt=salt)


async def test_rows_of_one_step_have_an_adapter_each(client):
    epoch = await client.handshake()
    first, second = await load(client, "a", "weights-a"), await load(client, "b", "weights-b")
    assert first.adapter_id != second.adapter_id
    ids = column([second.adapter_id, 0, first.adapter_id])
    stream = client.execute()
    step = make_step(1, epoch, [Row(PROMPT, table) for table in TABLES])
    step.adapter_ids.CopyFrom(ids)
    got = [values_of((await stream.step(step)).sampled_token_ids)]
    while len(got) < 3:
        start = len(PROMPT) + len(got) - 1
        rows = [Row([token], table, start=start) for token, table in zip(got[-1], TABLES, strict=True)]
        step = make_step(len(got) + 1, epoch, rows)
        step.adapter_ids.CopyFrom(ids)
        got.append(values_of((await stream.step(step)).sampled_token_ids))
    assert [list(tokens) for tokens in zip(*got, strict=True)] == [
        oracle("weights-b"), oracle(None), oracle("weights-a"),
    ]  # fmt: skip
    await stream.close()


async def test_adapters_are_listed_in_order_outlive_a_reset_and_their_ids_are_never_used_again(client):
    epoch = await client.handshake()
    first = await load(client, "a", "weights-a")
    second = await load(client, "b", "weights-b")
    assert (first.name, first.source, first.revision) == ("a", "weights-a", adapter_revision("weights-a"))
    assert await load(client, "a", "weights-a", first.revision) == first
    await client.stub.Reset(pb.ResetRequest(kv_epoch=epoch))
    assert list((await client.stub.ListAdapters(pb.ListAdaptersRequest())).adapters) == [first, second]
    await client.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="a"))
    again = await load(client, "a", "weights-a")
    assert again.revision == first.revision
    assert again.adapter_id not in (first.adapter_id, second.adapter_id)
    assert (await client.stub.GetModelInfo(pb.GetModelInfoRequest())).max_adapters == 2


async def test_load_adapter_refusals_say_why(client):
    loaded = await load(client, "a", "weights-a")
    info = await refused(load(client, "a", "other weights"), grpc.StatusCode.ALREADY_EXISTS)
    assert (info.reason, info.metadata["revision"]) == ("ADAPTER_EXISTS", loaded.revision)
    info = await refused(load(client, "c", "weights-c", "another"), grpc.StatusCode.INVALID_ARGUMENT)
    assert (info.reason, info.metadata["expected"]) == ("ADAPTER_REVISION_MISMATCH", "another")
    for name, source, field in (("", "x", "name"), ("x" * 257, "x", "name"), ("x", "", "source")):
        info = await refused(load(client, name, source), grpc.StatusCode.INVALID_ARGUMENT)
        assert (info.reason, info.metadata["field"]) == ("INVALID_FIELD", field)
    await load(client, "b", "weights-b")
    info = await refused(load(client, "c", "weights-c"), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert info.reason == "TOO_MANY_ADAPTERS"
    unload = client.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="c"))
    assert (await refused(unload, grpc.StatusCode.NOT_FOUND)).reason == "UNKNOWN_ADAPTER"


async def test_load_adapter_without_room_for_any_is_failed_precondition():
    async with running_executor(sim_config()) as server, connected(server.address) as client:
        info = await refused(load(client, "a", "weights-a"), grpc.StatusCode.FAILED_PRECONDITION)
        assert info.reason == "NO_ADAPTERS"


async def test_step_with_an_adapter_that_is_not_loaded_ends_its_stream_and_writes_nothing(client):
    epoch = await client.handshake()
    loaded = await load(client, "a", "weights-a")
    await client.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="a"))
    step = make_step(1, epoch, [Row(PROMPT, TABLES[0])])
    step.adapter_ids.CopyFrom(column([loaded.adapter_id]))
    stream = client.execute()
    await stream.send(step)
    error = await stream.error()
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    info = error_info(error)
    assert (info.reason, info.metadata["step_id"]) == ("UNKNOWN_ADAPTER", "1")
    # A stream that goes on is not disturbed by one whose first step names such an adapter.
    good = client.execute()
    await good.step(make_step(1, epoch, [Row(PROMPT, TABLES[0])]))
    bad = client.execute()
    await bad.send(step)
    await bad.error()
    response = await good.step(make_step(2, epoch, [Row([7], TABLES[0], start=5)]))
    assert response.step_id == 2
    await good.close()
