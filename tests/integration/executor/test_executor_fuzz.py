"""Random damage to a valid step: the executor refuses or runs it, never breaks, and writes no slot but the step's."""

import asyncio

import grpc
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.sim_digest import expected_tokens
from executor_service.server import ExecutorServer
from tests.unit.executor_shell.executor_backends import HeldBackend
from tests.unit.executor_shell.executor_builders import (
    BLOCK_SIZE,
    D2D,
    D2H,
    H2D,
    NUM_HOST_BLOCKS,
    VOCAB_SIZE,
    ExecutorClient,
    Row,
    error_info,
    greedy,
    make_step,
    sim_config,
    values_of,
)

PROMPT = [11, 12, 13, 14, 15]
EXPECTED_CODES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION}

INTERESTING = st.one_of(
    st.integers(-3, 12), st.integers(-(2**31), 2**31 - 1), st.sampled_from([2**31 - 1, -(2**31), 63, 64, 252, 1000])
)
# What to do with a column: where (modulo its size), how, and with which value or bytes.
COLUMN_DAMAGE = st.tuples(
    st.just("column"),
    st.integers(0, 30),
    st.sampled_from(["set", "insert", "delete", "swap", "truncate", "append", "clear"]),
    st.integers(0, 40),
    INTERESTING,
)
PARAM_DAMAGE = st.tuples(
    st.just("param"),
    st.sampled_from(["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]),
    st.floats(width=32),
)
WHOLE_PARAM_DAMAGE = st.tuples(st.just("param"), st.sampled_from(["top_k", "num_logprobs"]), st.integers(-5, 5))
ID_DAMAGE = st.tuples(
    st.just("id"), st.sampled_from(["step_id", "feeds_from_step_id"]), st.sampled_from([0, 1, 2, 3, 2**64 - 1])
)
STRUCTURE_DAMAGE = st.tuples(
    st.just("clear"),
    st.sampled_from(
        "sampling block_tables block_tags feeds_from positions token_ids query_indptr copies".split()  # noqa: SIM905
    ),
)
DAMAGE = st.lists(
    st.one_of(COLUMN_DAMAGE, COLUMN_DAMAGE, PARAM_DAMAGE, WHOLE_PARAM_DAMAGE, ID_DAMAGE, STRUCTURE_DAMAGE),
    min_size=1,
    max_size=4,
)


def valid_step(epoch):
    rows = [
        Row([1, 2, 3, 4, 5, 6], [10, 11], samples=False),
        Row([0], [5, 2], start=5, feed=0),
        Row([7, 8], [12, 13], start=2, params=greedy(presence_penalty=1.0), history=([3, 3, 7, 8], 2), seed=9),
        Row([9], [10, 11, 14], start=8),
    ]
    copies = [(D2H, 5, 0), (D2D, 5, 20), (D2D, 20, 21), (H2D, 0, 22), (D2H, 22, 1)]
    return make_step(2, epoch, rows, feeds_from_step_id=1, tags={10: b"a", 12: b"b"}, copies=copies)


def columns_of(message):
    """Every Int32Array in a message."""
    found = []
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            found += [part] if isinstance(part, common_pb2.Int32Array) else columns_of(part)
    return found


def damage_column(column, how, place, value):
    data = bytearray(column.data)
    start = place % (len(data) // 4 + 1) * 4
    word = np.int32(value).tobytes()
    if how == "set" and start < len(data):
        data[start : start + 4] = word
    elif how == "insert":
        data[start:start] = word
    elif how == "delete":
        del data[start : start + 4]
    elif how == "swap" and len(data) >= 8:
        data[0:4], data[-4:] = data[-4:], data[0:4]
    elif how == "truncate":
        del data[max(0, len(data) - 1 - place % 4) :]
    elif how == "append":
        data += word * (place + 1)
    elif how == "clear":
        data.clear()
    column.data = bytes(data)


def apply_damage(request, damage):
    kind, *what = damage
    if kind == "column":
        columns = columns_of(request)
        if columns:
            damage_column(columns[what[0] % len(columns)], *what[1:])
    elif kind == "param":
        for params in request.sampling.params[:1]:
            setattr(params, *what)
    elif kind == "id":
        setattr(request, *what)
    else:
        request.ClearField(what[0])


def named_slots(request):
    """The slots that a step which was accepted may write, from the contract's formula alone."""
    indptr, positions = values_of(request.query_indptr), values_of(request.positions)
    slots = set()
    for row in range(len(indptr) - 1):
        table = request.block_tables[0]
        first = values_of(table.block_indptr)[row]
        for position in positions[indptr[row] : indptr[row + 1]]:
            block = values_of(table.block_ids)[first + position // BLOCK_SIZE]
            slots.add(block * BLOCK_SIZE + position % BLOCK_SIZE)
    return slots | copied_slots(request)


def copied_slots(request):
    """The slots that a step's copies write."""
    targets = zip(values_of(request.copies.directions), values_of(request.copies.target_ids), strict=True)
    return {
        block * BLOCK_SIZE + offset for direction, block in targets if direction != D2H for offset in range(BLOCK_SIZE)
    }


async def response_or_error(stream):
    try:
        return await stream.receive()
    except grpc.aio.AioRpcError as error:
        return error


async def run_damaged(client, backend, damages):
    epoch = await client.handshake(num_host_blocks=NUM_HOST_BLOCKS)
    stream = client.execute()
    first = await stream.step(make_step(1, epoch, [Row(PROMPT, [5, 2])]))
    request = valid_step(epoch)
    for damage in damages:
        apply_damage(request, damage)
    before = backend.slots.copy()
    await stream.send(request)
    outcome = await response_or_error(stream)
    if isinstance(outcome, grpc.aio.AioRpcError):
        info = error_info(outcome)
        note(f"{outcome.code()} {info.reason}: {outcome.details()}")
        assert outcome.code() in EXPECTED_CODES or info.reason == "CIRCULAR_BLOCK_TABLES"
        assert info.metadata["step_id"] == str(request.step_id)
        # What only the backend can see is found when the copies are done.
        written = copied_slots(request) if info.reason == "CIRCULAR_BLOCK_TABLES" else set()
        assert set(np.flatnonzero(backend.slots != before).tolist()) <= written
        row = Row(values_of(first.sampled_token_ids), [5, 2], start=5)
        second = await client.execute().step(make_step(1, epoch, [row]))
        assert values_of(second.sampled_token_ids) == expected_tokens(PROMPT, 2, vocab_size=VOCAB_SIZE)[1:]
    else:
        changed = set(np.flatnonzero(backend.slots != before).tolist())
        assert changed <= named_slots(request)
        assert len(values_of(outcome.computed_upto)) == len(values_of(request.query_indptr)) - 1
        assert len(values_of(outcome.sampled_token_ids)) == len(values_of(request.sampling.rows))
        assert all(-1 <= token < VOCAB_SIZE for token in values_of(outcome.sampled_token_ids))
    stream.call.cancel()


def test_execute_undamaged_step_of_the_fuzz_is_accepted():
    async def run():
        backend = HeldBackend().open()
        server = ExecutorServer(sim_config(), backend)
        await server.start()
        await server.load()
        async with grpc.aio.insecure_channel(server.address) as channel:
            client = ExecutorClient(channel)
            epoch = await client.handshake(num_host_blocks=NUM_HOST_BLOCKS)
            stream = client.execute()
            await stream.step(make_step(1, epoch, [Row(PROMPT, [5, 2])]))
            before = backend.slots.copy()
            request = valid_step(epoch)
            response = await stream.step(request)
            assert not response.row_errors
            written = set(np.flatnonzero(backend.slots != before).tolist())
            assert written <= named_slots(request)
            assert written >= named_slots(request) - copied_slots(request)
            blocks = backend.slots.reshape(-1, BLOCK_SIZE)
            assert blocks[5, 0] == blocks[20, 0] == blocks[21, 0] == blocks[22, 0] != 0
        await server.stop()

    asyncio.run(run())


@pytest.mark.parametrize("max_examples", [100, pytest.param(2000, marks=pytest.mark.soak)])
def test_execute_damaged_step_never_breaks_the_executor(max_examples):
    backend = HeldBackend().open()
    with asyncio.Runner() as runner:

        async def start():
            server = ExecutorServer(sim_config(), backend)
            await server.start()
            await server.load()
            return server, grpc.aio.insecure_channel(server.address)

        server, channel = runner.run(start())

        @given(DAMAGE)
        @settings(max_examples=max_examples)
        def fuzz(damages):
            runner.run(run_damaged(ExecutorClient(channel), backend, damages))

        try:
            fuzz()
        finally:
            runner.run(channel.close())
            runner.run(server.stop())


def test_execute_bytes_that_are_no_message_leave_the_executor_alive():
    async def run():
        server = ExecutorServer(sim_config())
        await server.start()
        await server.load()
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.stream_stream("/kvplane.executor.v1.ExecutorService/Execute")()
            await call.write(b"\xff" * 10)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await ExecutorClient(channel).stub.GetModelInfo(pb.GetModelInfoRequest())).vocab_size == VOCAB_SIZE
        await server.stop()

    asyncio.run(run())
