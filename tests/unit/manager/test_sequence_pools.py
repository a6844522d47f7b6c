"""Pools of engines with their own loop: batches side by side, cut off, and what is left of a pool that is gone."""

from __future__ import annotations

import asyncio
import gc

import pytest
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pb

from kvmanager_service import sequence_pools
from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.errors import UnknownRequestError
from kvmanager_service.heap import settle_heap
from kvmanager_service.sequence_pools import PoolSpec
from kvmanager_service.servicers.sequences import Pools, update_sequences

LENGTH = 50


def opening(batch_id: int) -> pb.UpdateSequencesRequest:
    """A batch that opens `LENGTH` sequences of one block."""
    tokens = common_pb2.Int32Array(data=bytes(4))
    return pb.UpdateSequencesRequest(
        pool_id="p",
        batch_id=batch_id,
        operations=[
            pb.SequenceOperation(open=pb.OpenSequence(sequence_id=f"{batch_id}-{number}", token_ids=tokens))
            for number in range(LENGTH)
        ],
    )


@pytest.fixture
def pools() -> Pools:
    return Pools(4, 1_000, settle=settle_heap)


@pytest.fixture
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch gives way before each operation."""
    monkeypatch.setattr(sequence_pools, "MAX_TURN_S", -1.0)


async def begin(pools: Pools, request: pb.UpdateSequencesRequest) -> asyncio.Task[pb.UpdateSequencesResponse]:
    """Send a batch, and return in the midst of it."""
    task = asyncio.create_task(update_sequences(pools, request))
    sequences = pools.use("p").sequences.sequences
    while not sequences:  # noqa: ASYNC110 - a batch has no event to wait for
        await asyncio.sleep(0)
    assert len(sequences) < LENGTH, "others do not get the loop before all is done"
    return task


@pytest.mark.usefixtures("_short_turns")
async def test_a_batch_whose_call_is_cut_off_is_applied_to_its_end_and_once(pools: Pools) -> None:
    pool = await pools.open(PoolSpec("p", 200))
    call = await begin(pools, opening(1))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    again = await update_sequences(pools, opening(1))
    assert [result.WhichOneof("result") for result in again.results] == ["table"] * LENGTH
    assert len(pool.sequences.sequences) == LENGTH
    pool.sequences.check_integrity()


@pytest.mark.usefixtures("_short_turns")
async def test_batches_of_a_pool_do_not_interleave(pools: Pools) -> None:
    pool = await pools.open(PoolSpec("p", 200))
    first = await begin(pools, opening(1))
    second = await update_sequences(pools, opening(2))
    assert first.done()
    assert second.batch_id == 2
    assert list(pool.sequences.sequences) == [f"{batch}-{number}" for batch in (1, 2) for number in range(LENGTH)]


@pytest.mark.usefixtures("_short_turns")
async def test_a_pool_may_be_closed_in_the_midst_of_a_batch(pools: Pools) -> None:
    await pools.open(PoolSpec("p", 200))
    first = await begin(pools, opening(1))
    second = asyncio.create_task(update_sequences(pools, opening(2)))
    await asyncio.sleep(0)
    pools.close("p")
    for call in (first, second):
        with pytest.raises(UnknownRequestError, match="open pool"):
            await call
    assert pools.list() == []
    await pools.open(PoolSpec("p", 200))
    assert len((await update_sequences(pools, opening(1))).results) == LENGTH


def living_blocks() -> int:
    """Blocks on the heap, those that the garbage collector is kept from included."""
    gc.unfreeze()
    return sum(type(thing) is KVCacheBlock for thing in gc.get_objects())


@pytest.fixture
def _large_pools(monkeypatch: pytest.MonkeyPatch) -> object:
    """Every pool is a large one, and no garbage is collected but by who asks for it."""
    monkeypatch.setattr(sequence_pools, "BLOCKS_MADE_AT_ONCE", 1)
    threshold = gc.get_threshold()
    gc.unfreeze()  # what tests before kept from the collector, and left
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.set_threshold(*threshold)
    gc.freeze()


@pytest.mark.usefixtures("_large_pools")
async def test_a_large_pool_is_kept_from_the_collector_and_freed_when_it_is_dropped(pools: Pools) -> None:
    before = living_blocks()
    await pools.open(PoolSpec("p", 200))
    assert not any(type(thing) is KVCacheBlock for thing in gc.get_objects()), "the collector would walk over it"
    assert living_blocks() >= before + 200
    await update_sequences(pools, opening(1))
    pools.close("p")
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    assert living_blocks() - before < 10


@pytest.mark.usefixtures("_large_pools")
async def test_a_large_pool_that_nobody_waits_for_is_freed(pools: Pools) -> None:
    before = living_blocks()
    call = asyncio.create_task(pools.open(PoolSpec("p", 200)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    del call
    assert living_blocks() - before < 10
    assert pools.list() == []
