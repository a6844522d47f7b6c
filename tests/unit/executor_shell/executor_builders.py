"""Builders of steps and a client that speaks to an executor as a manager does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import strategies as st
from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1 import executor_service_pb2_grpc as pb_grpc

from executor_service.config import ExecutorConfig

BLOCK_SIZE = 4
NUM_BLOCKS = 64
VOCAB_SIZE = 1000
MAX_TOKENS = 64
MAX_SEQS = 8
# For tests that swap: so many host blocks of a sim executor.
NUM_HOST_BLOCKS = 6
SIM_SWAP_SPACE = NUM_HOST_BLOCKS * BLOCK_SIZE * 8
D2D, D2H, H2D = 1, 2, 3


def sim_config(**values: object) -> ExecutorConfig:
    """A small sim executor on a free port."""
    defaults = {
        "backend": "sim",
        "port": 0,
        "block_size": BLOCK_SIZE,
        "sim_num_blocks": NUM_BLOCKS,
        "sim_vocab_size": VOCAB_SIZE,
    }
    return ExecutorConfig(**(defaults | values))


def column(values: Sequence[int]) -> common_pb2.Int32Array:
    return common_pb2.Int32Array(data=np.array(values, dtype="<i4").tobytes())


def values_of(array: common_pb2.Int32Array) -> list[int]:
    return np.frombuffer(array.data, dtype="<i4").tolist()


def greedy(**values: object) -> pb.TokenSampling:
    """Parameters that change nothing, but for those given."""
    defaults = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "num_logprobs": -1}
    return pb.TokenSampling(**(defaults | values))


@dataclass
class Sample:
    """How one more token is drawn from a row."""

    params: pb.TokenSampling = field(default_factory=greedy)
    seed: int = 0
    history: tuple[Sequence[int], int] | None = None


@dataclass
class Row:
    """The next tokens of one sequence; if it samples, `forks` are drawn beside its own."""

    token_ids: Sequence[int]
    table: Sequence[int]
    start: int = 0
    samples: bool = True
    params: pb.TokenSampling = field(default_factory=greedy)
    seed: int = 0
    feed: int = -1
    history: tuple[Sequence[int], int] | None = None
    forks: Sequence[Sample] = ()
    more_tables: Sequence[Sequence[int]] = ()

    def tables(self) -> list[Sequence[int]]:
        """One for each KV group."""
        return [self.table, *self.more_tables]


def _block_tables(tables: Sequence[Sequence[int]], ends: Sequence[int], block_size: int) -> pb.BlockTables:
    used = [list(table[: -(-end // block_size)]) for table, end in zip(tables, ends, strict=True)]
    return pb.BlockTables(
        block_indptr=column([0, *np.cumsum([len(table) for table in used], dtype=int)]),
        block_ids=column([block for table in used for block in table]),
        last_block_len=column([(end - 1) % block_size + 1 for end in ends]),
    )


def make_step(
    step_id: int,
    kv_epoch: int,
    rows: Sequence[Row],
    *,
    block_size: int = BLOCK_SIZE,
    block_sizes: Sequence[int] = (),
    feeds_from_step_id: int = 0,
    tags: dict[int, bytes] | None = None,
    copies: Sequence[tuple[int, int, int]] = (),
) -> pb.ExecuteRequest:
    """A step as the contract wants it; copies are (direction, source, target), block_sizes those of KV groups."""
    lengths = [len(row.token_ids) for row in rows]
    ends = [row.start + length for row, length in zip(rows, lengths, strict=True)]
    num_groups = max([len(row.tables()) for row in rows], default=1)
    request = pb.ExecuteRequest(
        step_id=step_id,
        kv_epoch=kv_epoch,
        query_indptr=column([0, *np.cumsum(lengths, dtype=int)]),
        token_ids=column([token for row in rows for token in row.token_ids]),
        positions=column([pos for row, end in zip(rows, ends, strict=True) for pos in range(row.start, end)]),
        block_tables=[
            _block_tables([row.tables()[group] for row in rows], ends, size)
            for group, size in enumerate(block_sizes or [block_size] * num_groups)
        ],
        feeds_from_step_id=feeds_from_step_id,
    )
    if any(row.feed >= 0 for row in rows):
        request.feeds_from.CopyFrom(column([row.feed for row in rows]))
    if any(row.samples for row in rows):
        request.sampling.CopyFrom(_sampling(rows))
    if tags:
        request.block_tags.CopyFrom(pb.BlockTags(block_ids=column(list(tags)), tags=list(tags.values())))
    if copies:
        request.copies.CopyFrom(make_copies(copies))
    return request


def make_copies(copies: Sequence[tuple[int, int, int]]) -> pb.BlockCopies:
    """Copies of (direction, source, target)."""
    directions, sources, targets = zip(*copies, strict=True)
    return pb.BlockCopies(directions=column(directions), source_ids=column(sources), target_ids=column(targets))


def _sampling(rows: Sequence[Row]) -> pb.SamplingBatch:
    sampling = [(index, one) for index, row in enumerate(rows) if row.samples for one in (row, *row.forks)]
    distinct: list[pb.TokenSampling] = []
    for _, one in sampling:
        if one.params not in distinct:
            distinct.append(one.params)
    batch = pb.SamplingBatch(
        rows=column([index for index, _ in sampling]),
        params=distinct,
        params_index=column([distinct.index(one.params) for _, one in sampling]),
        seeds=[one.seed for _, one in sampling],
    )
    histories = [(place, one.history) for place, (_, one) in enumerate(sampling) if one.history is not None]
    if histories:
        batch.penalties.CopyFrom(
            pb.PenaltyHistories(
                sample_index=column([place for place, _ in histories]),
                indptr=column([0, *np.cumsum([len(history[0]) for _, history in histories], dtype=int)]),
                token_ids=column([token for _, history in histories for token in history[0]]),
                prompt_lens=column([history[1] for _, history in histories]),
            )
        )
    return batch


@st.composite
def copies_of(draw: st.DrawFn, num_blocks: int, num_host_blocks: int) -> tuple[int, int, int]:
    """Any copy that is legal among so many blocks; with few of them, copies of a list meet each other often."""
    direction = draw(st.sampled_from([D2D, D2H, H2D]))
    source = draw(st.integers(0, num_host_blocks - 1) if direction == H2D else st.integers(1, num_blocks - 1))
    target = draw(st.integers(0, num_host_blocks - 1) if direction == D2H else st.integers(1, num_blocks - 1))
    if direction == D2D and source == target:
        target = source % (num_blocks - 1) + 1
    return direction, source, target


class ExecuteCall:
    """An open Execute stream."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call

    async def send(self, request: pb.ExecuteRequest) -> None:
        await self.call.write(request)

    async def receive(self) -> pb.ExecuteResponse:
        """The next response; raises `grpc.aio.AioRpcError` where the stream has ended with an error."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            status = await self.call.code()
            raise AssertionError(f"the stream has ended with {status}")
        return response

    async def step(self, request: pb.ExecuteRequest) -> pb.ExecuteResponse:
        await self.send(request)
        return await self.receive()

    async def error(self) -> grpc.aio.AioRpcError:
        """Read until the stream ends with an error, and return it."""
        try:
            while (await self.call.read()) is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the stream has ended without an error")

    async def close(self) -> None:
        """Half-close, and read the end."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        assert await self.call.code() is grpc.StatusCode.OK


class ExecutorClient:
    """A manager's side of the contract."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = pb_grpc.ExecutorServiceStub(channel)

    async def handshake(self, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0) -> int:
        """Profile and initialise; returns the epoch."""
        await self.stub.ProfileMemory(pb.ProfileMemoryRequest(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS))
        request = pb.InitializeKvCacheRequest(
            num_blocks=num_blocks, num_host_blocks=num_host_blocks, knows_group_block_sizes=True
        )
        response = await self.stub.InitializeKvCache(request)
        return response.kv_cache.kv_epoch

    def execute(self) -> ExecuteCall:
        return ExecuteCall(self.stub.Execute())

    async def tags(self, kv_epoch: int) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        async for portion in self.stub.ListBlockTags(
            pb.ListBlockTagsRequest(kv_epoch=kv_epoch, knows_group_block_sizes=True)
        ):
            blocks = values_of(portion.block_tags.block_ids)
            assert not set(blocks) & set(found), "a block is in two portions"
            found.update(zip(blocks, portion.block_tags.tags, strict=True))
        return found


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[ExecutorClient]:
    options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield ExecutorClient(channel)


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """The ErrorInfo of a failed call; there is exactly one, of our domain."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    (detail,) = status.details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    assert info.domain == "kvplane"
    return info
