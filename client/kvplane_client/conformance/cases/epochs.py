"""The epoch names the content; a message that names another gets ABORTED."""

from __future__ import annotations

import grpc
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench, Stream
from kvplane_client.conformance.registry import Topic

TOPIC = Topic("epochs")

_ABORTED = grpc.StatusCode.ABORTED
_STEP = "ExecuteRequest.kv_epoch: Another than the executor's gets ABORTED."
_LIST = "ListBlockTagsRequest.kv_epoch: Another than the executor's gets ABORTED."
_FORGETS = "ExecutorService.Reset: Reset forgets the cache's content and tags and starts a new epoch; the memory stays."
_RESET = "ResetRequest.kv_epoch: Another than the executor's gets ABORTED."


@TOPIC.case(_STEP)
async def step_of_another(bench: Bench) -> None:
    """A step that names another epoch is ABORTED, as the first of a stream and later; the cache stays."""
    track = bench.track(bench.block_size + 1)
    await bench.stream().prefill(track)
    for wrong in (bench.epoch ^ 1, 0):
        first = bench.stream()
        await _send_wrong(bench, first, wrong)
        await first.error(_ABORTED, _STEP, step_id=1)
        later = bench.stream()
        await later.decode(track, 1)
        await _send_wrong(bench, later, wrong)
        await later.error(_ABORTED, _STEP, step_id=2)
    await bench.unharmed(track)


@TOPIC.case(_STEP)
async def step_after_a_reset(bench: Bench) -> None:
    """A stream that was there before a Reset cannot go on with the old epoch."""
    track = bench.track(bench.block_size + 1)
    stream = bench.stream()
    await stream.prefill(track)
    old = bench.epoch
    bench.epoch = await _reset(bench)
    request = stream.build(track.next())
    request.kv_epoch = old
    await stream.write(request)
    await stream.error(_ABORTED, _STEP)
    anew = bench.track(bench.block_size + 1)
    await bench.stream().prefill(anew)


@TOPIC.case(
    "ExecutorService.Reset: Reset forgets the cache's content and tags and starts a new epoch; the memory stays."
)
async def reset_starts_another(bench: Bench) -> None:
    """Reset gives a new epoch and forgets the tags; sizes stay."""
    track = bench.track(2 * bench.block_size)
    await bench.stream().prefill(track, tags={track.blocks[0]: b"noted"})
    before = await bench.cache()
    old = bench.epoch
    bench.epoch = await _reset(bench)
    after = await bench.cache()
    assert before is not None
    assert after is not None
    bench.true(bench.epoch not in (0, old), _FORGETS, f"another epoch than 0 and {old}", bench.epoch)
    before.kv_epoch = bench.epoch
    bench.equal(after, before, _FORGETS)
    bench.equal(await bench.tags(), {}, _FORGETS)


@TOPIC.case(_LIST)
async def tags_of_another(bench: Bench) -> None:
    """Tags of another epoch are not listed."""
    for wrong in (bench.epoch ^ 1, 0):
        call = bench.stub.ListBlockTags(pb.ListBlockTagsRequest(kv_epoch=wrong, knows_group_block_sizes=True))
        await bench.refused(call.read(), _ABORTED, _LIST)


@TOPIC.case(_RESET)
async def reset_of_another(bench: Bench) -> None:
    """Another epoch is not reset: what is there stays."""
    track = bench.track(bench.block_size + 1)
    await bench.stream().prefill(track, tags={track.blocks[0]: b"noted"})
    await bench.refused(bench.stub.Reset(pb.ResetRequest(kv_epoch=bench.epoch ^ 1)), _ABORTED, _RESET)
    bench.equal(await bench.tags(), bench.tagged({track.blocks[0]: b"noted"}), _RESET)
    await bench.unharmed(track)


async def _send_wrong(bench: Bench, stream: Stream, kv_epoch: int) -> None:
    request = stream.build(bench.track(bench.block_size, salt=9, blocks=[0, 1]).next())
    request.kv_epoch = kv_epoch
    await stream.write(request)


async def _reset(bench: Bench) -> int:
    state = (await bench.call(bench.stub.Reset(pb.ResetRequest(kv_epoch=bench.epoch)))).kv_cache
    return state.kv_epoch
