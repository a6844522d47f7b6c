"""What the cache keeps: as long as its epoch lasts, and nothing writes there, K/V stays."""

from __future__ import annotations

from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import Track

TOPIC = Topic("cache")

_COLD = (
    "ExecutorService: It knows no request: a step carries everything needed to run it, and any executor whose "
    "blocks hold the tables' content can run it."
)
_UPTO = (
    "ExecuteResponse.computed_upto: computed_upto has R values: how many tokens of the row's sequence have K/V in "
    "the cache now."
)
_CHUNK = "ExecuteRequest.query_indptr: row r computes tokens query_indptr[r] to query_indptr[r + 1]."


@TOPIC.case(_COLD)
async def cold_step(bench: Bench) -> None:
    """The first step of a fresh cache is a whole batch, as after the loss of another executor."""
    tracks = [bench.track(bench.block_size + salt, salt=salt) for salt in range(4)]
    stream = bench.stream()
    await stream.together(*tracks)
    await stream.together(*tracks)


@TOPIC.case(_COLD)
async def cold_step_after_reset(bench: Bench) -> None:
    """Sequences are computed anew after a reset, in blocks that held others."""
    blocks = bench.blocks(6)
    stream = bench.stream()
    lost = bench.track(2 * bench.block_size, blocks=blocks)
    await stream.prefill(lost)
    await stream.decode(lost, 1)
    state = (await bench.call(bench.stub.Reset(pb.ResetRequest(kv_epoch=bench.epoch)))).kv_cache
    bench.epoch = state.kv_epoch
    stream = bench.stream()
    again = Track(list(lost.tokens), blocks[::-1])
    await stream.prefill(again)
    await stream.decode(again, 2)


@TOPIC.case(_UPTO)
async def untouched_for_long(bench: Bench) -> None:
    """A sequence that no step names for a while is still there, and so on other streams."""
    resting = [bench.track(2 * bench.block_size + salt, salt=salt) for salt in (1, 2)]
    stream = bench.stream()
    for track in resting:
        await stream.prefill(track)
    for salt in range(3, 9):
        await stream.step(bench.track(2 * bench.block_size, salt=salt, blocks=_other_blocks(bench, resting)).next())
    await stream.close()
    stream = bench.stream()
    await stream.decode(resting[0], 2)
    await stream.step(bench.track(1, salt=9).next())
    await stream.decode(resting[1], 2)


@TOPIC.case(_CHUNK)
async def chunks_of_any_size(bench: Bench) -> None:
    """A prompt computed in chunks, within blocks and across them, gives what it gives whole."""
    size = bench.block_size
    length = 2 * size + max(1, size // 2)
    for chunk in sorted({1, max(1, size - 1), size, size + 1}):
        track = bench.track(length)
        stream = bench.stream()
        while track.computed < length:
            await stream.step(track.next(min(chunk, length - track.computed)))


@TOPIC.case(_COLD)
async def prefix_found(bench: Bench) -> None:
    """A later sequence computes only what an earlier one has not left in the cache, to the last token."""
    size = bench.block_size
    first = bench.track(3 * size)
    stream = bench.stream()
    await stream.prefill(first)
    # Where the whole prompt is there, its last token is computed again, in the block that holds it: unless that takes a
    # state, which is kept at ends of blocks alone.
    for kept in (2, 1) if bench.geometry.states else (3, 2, 1):
        computed = kept * size if kept < 3 else kept * size - 1
        again = Track(first.tokens[: 3 * size], first.blocks[:kept] + bench.blocks(6 - kept), computed)
        await stream.prefill(again)
        await stream.decode(again, 2)


@TOPIC.case(_COLD)
async def recomputed_elsewhere(bench: Bench) -> None:
    """A sequence that was preempted is computed anew, in other blocks, with what it had produced."""
    stream = bench.stream()
    track = bench.track(bench.block_size + 1)
    await stream.prefill(track)
    await stream.decode(track, 5)
    again = Track(list(track.tokens), bench.blocks(4 + 8 // bench.block_size))
    await stream.prefill(again)
    await stream.decode(again, 3)


def _other_blocks(bench: Bench, resting: list[Track]) -> list[int]:
    """Blocks that no sequence rests in."""
    used = {block for track in resting for block in track.blocks}
    return [block for block in range(bench.geometry.num_blocks) if block not in used][:4]
