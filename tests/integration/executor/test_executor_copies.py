"""Copies of blocks that steps order, over the wire: copy on write, swapping, what is refused. Sim and a tiny model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import numpy as np
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.base import BackendError, BlockCopies
from executor_service.backends.sim_digest import expected_tokens
from executor_service.config import ExecutorConfig
from executor_service.server import running_executor
from tests.unit.executor_shell.executor_backends import BrokenBackend
from tests.unit.executor_shell.executor_builders import (
    BLOCK_SIZE,
    D2D,
    D2H,
    H2D,
    MAX_SEQS,
    MAX_TOKENS,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    SIM_SWAP_SPACE,
    VOCAB_SIZE,
    ExecuteCall,
    ExecutorClient,
    Row,
    Sample,
    connected,
    error_info,
    greedy,
    make_step,
    sim_config,
    values_of,
)

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
OTHER = [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41]
COUNT = 9


def sim() -> ExecutorConfig:
    return sim_config(swap_space=SIM_SWAP_SPACE)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    step_builder = pytest.importorskip("tests.unit.executor.step_builder")
    return step_builder.save_tiny_model(tmp_path_factory.mktemp("copies") / "tiny-llama", "llama")


@dataclass
class Talk:
    """An open stream to an executor that has a cache with host blocks."""

    client: ExecutorClient
    stream: ExecuteCall
    epoch: int
    step_id: int = 0

    def build(self, *rows: Row, **values) -> pb.ExecuteRequest:
        self.step_id += 1
        return make_step(self.step_id, self.epoch, rows, **values)

    async def step(self, *rows: Row, **values) -> list[int]:
        response = await self.stream.step(self.build(*rows, **values))
        assert not response.row_errors
        return values_of(response.sampled_token_ids)

    async def decode(self, tokens: list[int], table: list[int], count: int, *, seed: int = 0, **values) -> None:
        """Extend a sequence whose last token is not computed yet; the first step takes the values, such as copies."""
        for _ in range(count):
            row = Row(tokens[-1:], table, start=len(tokens) - 1, params=greedy(temperature=1.0), seed=seed)
            tokens += await self.step(row, **values)
            values = {}

    async def start(self, prompt: list[int], table: list[int], *, seed: int = 0) -> list[int]:
        """Compute a prompt; returns it and the first token."""
        row = Row(prompt, table, params=greedy(temperature=1.0), seed=seed)
        return [*prompt, *(await self.step(row))]


@asynccontextmanager
async def talking(config: ExecutorConfig, backend=None) -> AsyncIterator[Talk]:
    async with running_executor(config, backend) as server, connected(server.address) as client:
        epoch = await client.handshake(num_host_blocks=NUM_HOST_BLOCKS)
        yield Talk(client, client.execute(), epoch)


@pytest.fixture(params=["sim", pytest.param("torch", marks=pytest.mark.filterwarnings("ignore"))])
async def talk(request):
    if request.param == "sim":
        config = sim()
    else:
        folder = request.getfixturevalue("tiny_llama")
        # K and V of 3 layers with 2 heads of 16 float32.
        swap_space = NUM_HOST_BLOCKS * BLOCK_SIZE * 2 * 3 * 2 * 16 * 4
        config = ExecutorConfig(
            backend="torch", model=str(folder), device="cpu", port=0, block_size=BLOCK_SIZE, memory_limit="8GiB",
            num_blocks_override=NUM_BLOCKS, max_model_len=64, swap_space=swap_space,
        )  # fmt: skip
    async with talking(config) as opened:
        yield opened


async def alone(talk: Talk, prompt: list[int], count: int, *, seed: int = 0) -> list[int]:
    """What a prompt gives on blocks that nothing else touches."""
    table = list(range(50, 60))
    tokens = await talk.start(prompt, table, seed=seed)
    await talk.decode(tokens, table, count - 1, seed=seed)
    return tokens


async def test_profile_reports_host_blocks_and_the_cache_has_those_asked_for(talk):
    limits = pb.ProfileMemoryRequest(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS)
    profile = await talk.client.stub.ProfileMemory(limits)
    assert profile.num_host_blocks == NUM_HOST_BLOCKS
    usable = int(profile.total_bytes * profile.utilization)
    assert profile.available_bytes == usable - profile.peak_bytes - NUM_HOST_BLOCKS * profile.bytes_per_block
    info = await talk.client.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.kv_cache.num_host_blocks == NUM_HOST_BLOCKS
    request = pb.InitializeKvCacheRequest(num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS - 1)
    fewer = (await talk.client.stub.InitializeKvCache(request)).kv_cache
    assert fewer.num_host_blocks == NUM_HOST_BLOCKS - 1
    assert (await talk.client.stub.Reset(pb.ResetRequest(kv_epoch=fewer.kv_epoch))).kv_cache.num_host_blocks == 5


@pytest.mark.parametrize("num_host_blocks", [-1, NUM_HOST_BLOCKS + 1])
async def test_initialize_other_host_blocks_than_reported_is_invalid(num_host_blocks):
    async with talking(sim()) as talk:
        request = pb.InitializeKvCacheRequest(num_blocks=NUM_BLOCKS, num_host_blocks=num_host_blocks)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await talk.client.stub.InitializeKvCache(request)
        info = error_info(caught.value)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (info.metadata["field"], info.metadata["expected"][:6]) == ("num_host_blocks", "0 to 6")


async def test_copied_blocks_continue_as_their_source_does_and_the_source_goes_on(talk):
    """A fork in the middle of a block: the copies and the row that writes the copied block are one step."""
    expected = [await alone(talk, PROMPT, COUNT, seed=seed) for seed in (1, 2)]
    table = [5, 2, 9, 7, 30]
    tokens = await talk.start(PROMPT, table, seed=1)
    row = Row(PROMPT[-1:], table, start=len(PROMPT) - 1, params=greedy(temperature=1.0), seed=2)
    branch = [*PROMPT, *(await talk.step(row))]
    branch_table = [5, 2, 40, 41, 42]
    await talk.decode(branch, branch_table, COUNT - 1, seed=2, copies=[(D2D, 9, 40)])
    await talk.decode(tokens, table, COUNT - 1, seed=1)
    assert [tokens, branch] == expected
    assert tokens != branch


async def test_row_sampled_twice_then_forked_continues_as_two_requests_do(talk):
    expected = [await alone(talk, PROMPT, COUNT, seed=seed) for seed in (1, 2, 3)]
    warm = greedy(temperature=1.0)
    table = [5, 2, 9, 7, 30]
    row = Row(PROMPT, table, params=warm, seed=1, forks=[Sample(warm, seed) for seed in (2, 3)])
    branches = [[*PROMPT, token] for token in await talk.step(row)]
    tables = [table, [5, 2, 40, 41, 42], [5, 2, 43, 44, 45]]
    copies = [(D2D, 9, 40), (D2D, 9, 43)]
    for _ in range(COUNT - 1):
        rows = [
            Row(tokens[-1:], own, start=len(tokens) - 1, params=warm, seed=seed)
            for seed, (tokens, own) in enumerate(zip(branches, tables, strict=True), start=1)
        ]
        for tokens, token in zip(branches, await talk.step(*rows, copies=copies), strict=True):
            tokens.append(token)
        copies = []
    assert branches == expected


async def test_swapped_out_overwritten_and_swapped_in_elsewhere_continues_the_same(talk):
    expected, other = await alone(talk, PROMPT, COUNT), await alone(talk, OTHER, COUNT)
    table = [5, 2, 9]
    tokens = await talk.start(PROMPT, table)
    # Out, and the blocks written by another in the same step.
    first = Row(OTHER, [2, 9, 5, 3, 4], params=greedy(temperature=1.0))
    outside = [*OTHER, *(await talk.step(first, copies=[(D2H, 5, 4), (D2H, 2, 0), (D2H, 9, 1)]))]
    # Into other blocks, and a first token in the same step.
    back = [33, 30, 31, 32, 34]
    await talk.decode(tokens, back, COUNT - 1, copies=[(H2D, 0, 30), (H2D, 4, 33), (H2D, 1, 31)])
    await talk.decode(outside, [2, 9, 5, 3, 4], COUNT - 1)
    assert (tokens, outside) == (expected, other)


async def test_two_sequences_change_places_through_one_block_in_one_step(talk):
    """Every copy but the first depends on one before it."""
    expected, other = await alone(talk, PROMPT, COUNT), await alone(talk, OTHER, COUNT)
    tokens, outside = await talk.start(PROMPT, [1, 2, 3]), await talk.start(OTHER, [4, 5, 6])
    exchange = [
        copy
        for one, two in ((1, 4), (2, 5), (3, 6))
        for copy in ((D2D, one, 20), (D2H, two, 0), (H2D, 0, one), (D2D, 20, two))
    ]
    await talk.decode(tokens, [4, 5, 6, 7, 8], COUNT - 1, copies=exchange)
    await talk.decode(outside, [1, 2, 3, 9, 10], COUNT - 1)
    assert (tokens, outside) == (expected, other)


async def test_step_without_rows_does_its_copies(talk):
    expected = await alone(talk, PROMPT, COUNT)
    tokens = await talk.start(PROMPT, [5, 2, 9])
    assert await talk.step(copies=[(D2H, 5, 0), (D2H, 2, 1), (D2D, 9, 40)]) == []
    assert await talk.step(Row(OTHER, [5, 2, 9], samples=False)) == []
    assert await talk.step(copies=[(H2D, 0, 41), (H2D, 1, 42)]) == []
    await talk.decode(tokens, [41, 42, 40, 43, 44], COUNT - 1)
    assert tokens == expected


async def test_reset_forgets_what_host_blocks_held(talk):
    expected = await alone(talk, PROMPT, COUNT)
    tokens = await talk.start(PROMPT, [5, 2, 9])
    await talk.step(copies=[(D2H, 5, 0), (D2H, 2, 1), (D2H, 9, 2)])
    talk.epoch = (await talk.client.stub.Reset(pb.ResetRequest(kv_epoch=talk.epoch))).kv_cache.kv_epoch
    await talk.decode(tokens, [5, 2, 9, 7, 8], COUNT - 1, copies=[(H2D, 0, 5), (H2D, 1, 2), (H2D, 2, 9)])
    assert tokens[: len(PROMPT) + 1] == expected[: len(PROMPT) + 1]
    assert tokens != expected


BAD = {
    "null-block": ([(D2D, 9, 0)], "copies.target_ids[1]"),
    "device-beyond": ([(D2D, NUM_BLOCKS, 9)], "copies.source_ids[1]"),
    "host-beyond": ([(D2H, 9, NUM_HOST_BLOCKS)], "copies.target_ids[1]"),
    "unknown-direction": ([(4, 9, 1)], "copies.directions[1]"),
    "itself": ([(D2D, 9, 9)], "copies.target_ids[1]"),
}


@pytest.mark.parametrize(("copies", "field"), BAD.values(), ids=BAD)
async def test_bad_copy_ends_the_stream_and_none_of_the_step_is_done(talk, copies, field):
    expected = await alone(talk, PROMPT, COUNT)
    tokens = await talk.start(PROMPT, [5, 2, 9])
    row = Row(OTHER, [5, 2, 9], samples=False)
    await talk.stream.send(talk.build(row, copies=[(D2D, 30, 5), *copies]))
    error = await talk.stream.error()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    info = error_info(error)
    assert (info.reason, info.metadata["field"]) == ("INVALID_FIELD", field)
    assert info.metadata["step_id"] == str(talk.step_id)
    talk.stream = talk.client.execute()
    await talk.decode(tokens, [5, 2, 9, 7, 8], COUNT - 1)
    assert tokens == expected


async def test_copies_of_a_step_whose_feeds_are_wrong_are_not_done(talk):
    expected = await alone(talk, PROMPT, COUNT)
    tokens = await talk.start(PROMPT, [5, 2, 9])
    row = Row([0], [20], feed=3)
    await talk.stream.send(talk.build(row, feeds_from_step_id=talk.step_id, copies=[(D2D, 30, 5)]))
    assert (await talk.stream.error()).code() is grpc.StatusCode.INVALID_ARGUMENT
    talk.stream = talk.client.execute()
    await talk.decode(tokens, [5, 2, 9, 7, 8], COUNT - 1)
    assert tokens == expected


async def test_more_samples_than_profiled_are_refused_and_as_many_are_not(talk):
    forks = [Sample(seed=seed) for seed in range(MAX_SEQS)]
    assert len(await talk.step(Row(PROMPT, [5, 2, 9], forks=forks[1:]))) == MAX_SEQS
    await talk.stream.send(talk.build(Row(PROMPT, [5, 2, 9], forks=forks)))
    error = await talk.stream.error()
    info = error_info(error)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (info.metadata["field"], info.metadata["got"]) == ("sampling.rows", f"{MAX_SEQS + 1} values")


async def test_target_of_a_copy_loses_its_tag_and_may_get_another_in_the_same_step():
    async with talking(sim()) as talk:
        await talk.step(Row(PROMPT, [5, 2, 9]), tags={5: b"five", 2: b"two", 9: b"nine"})
        await talk.step(copies=[(D2H, 2, 2), (D2D, 5, 2), (D2H, 9, 5)])
        assert await talk.client.tags(talk.epoch) == {5: b"five", 9: b"nine"}
        await talk.step(copies=[(H2D, 2, 9), (D2D, 2, 5)], tags={9: b"two"})
        assert await talk.client.tags(talk.epoch) == {9: b"two"}


class CopyFails(BrokenBackend):
    """Copies a part and fails, when told to."""

    fails = False

    def copy_blocks(self, copies: list[BlockCopies]) -> None:
        super().copy_blocks(copies[:1])
        if self.fails:
            raise BackendError("COPY_FAILED", "on purpose")


async def test_copy_that_fails_fails_its_step_and_its_targets_keep_no_tag():
    backend = CopyFails()
    async with talking(sim(), backend) as talk:
        tokens = await talk.start(PROMPT, [5, 2, 9])
        await talk.step(tags={5: b"five", 30: b"thirty", 31: b"thirty-one"})
        backend.fails = True
        copies = [(D2D, 5, 30), (D2D, 30, 31)]
        await talk.stream.send(talk.build(Row(OTHER, [20, 21, 22]), copies=copies, tags={20: b"twenty"}))
        error = await talk.stream.error()
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.INTERNAL, "COPY_FAILED")
        assert not backend.slots.reshape(NUM_BLOCKS, -1)[20].any()
        assert await talk.client.tags(talk.epoch) == {5: b"five"}
        talk.stream = talk.client.execute()
        await talk.decode(tokens, [5, 2, 9, 7, 8], COUNT - 1)
        assert tokens[len(PROMPT) :] == expected_tokens(PROMPT, COUNT, vocab_size=VOCAB_SIZE, temperature=1.0)


async def test_time_of_copies_is_part_of_the_steps_time_and_none_without_copies(talk):
    blocks = np.arange(1, 25)
    copies = [(D2D, int(block), int(block) + 24) for block in blocks]
    response = await talk.stream.step(talk.build(Row(PROMPT, [5, 2, 9]), copies=copies))
    assert 0 < response.copy_us < response.compute_us
    response = await talk.stream.step(talk.build(Row(PROMPT, [5, 2, 9])))
    assert response.copy_us == 0 < response.compute_us
