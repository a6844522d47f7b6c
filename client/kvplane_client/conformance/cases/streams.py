"""Several Execute streams: who takes over from whom, and what a stream that ends leaves behind."""

from __future__ import annotations

import grpc

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import column

TOPIC = Topic("streams")

_ABORTED = grpc.StatusCode.ABORTED
_FIRST_STEP = (
    "ExecutorService.Execute: It takes over from those opened before it with its first step, if that can be run, or at "
    'once when the call\'s metadata "kvplane-kv-epoch" is the current epoch'
)
_NOBODY = "ExecutorService.Execute: Until then it disturbs none of them."
_END = "ExecutorService.Execute: Execute runs steps in the order sent, one response a step."
_COLD = "ExecutorService: any executor whose blocks hold the tables' content can run it."


@TOPIC.case(_FIRST_STEP)
async def taken_over_by_a_step(bench: Bench) -> None:
    """A new stream's first step ends the older one with ABORTED; the cache stays."""
    track = bench.track(bench.block_size + 1)
    older = bench.stream()
    await older.prefill(track)
    newer = bench.stream()
    await newer.decode(track, 1)
    await older.error(_ABORTED, _FIRST_STEP)
    await newer.decode(track, 2)
    await newer.close()


@TOPIC.case(_FIRST_STEP)
async def taken_over_by_the_epoch(bench: Bench) -> None:
    """A stream that is opened with the current epoch takes over before it sends anything."""
    track = bench.track(bench.block_size + 1)
    older = bench.stream()
    await older.prefill(track)
    newer = bench.stream(knows_epoch=bench.epoch)
    await older.error(_ABORTED, _FIRST_STEP)
    await newer.decode(track, 2)


@TOPIC.case(_NOBODY)
async def silent_stream(bench: Bench) -> None:
    """Streams that are opened and say nothing, or know another epoch, disturb nobody."""
    track = bench.track(bench.block_size + 1)
    older = bench.stream()
    await older.prefill(track)
    bench.stream()
    bench.stream(knows_epoch=bench.epoch ^ 1)
    bench.stream(knows_epoch=0)
    # An answer to another call: by now those streams have been seen.
    await bench.cache()
    await older.decode(track, 2)
    await older.close()


@TOPIC.case(_NOBODY)
async def first_step_that_cannot_be_run(bench: Bench) -> None:
    """A stream whose first step is refused ends alone."""
    track = bench.track(bench.block_size + 1)
    older = bench.stream()
    await older.prefill(track)
    newer = bench.stream()
    bad = newer.build(bench.track(3, salt=1).next())
    bad.positions.CopyFrom(column([0]))
    await newer.write(bad)
    await newer.error(grpc.StatusCode.INVALID_ARGUMENT, _NOBODY, step_id=1)
    await older.decode(track, 2)
    await older.close()


@TOPIC.case(_END)
async def closed_with_steps_queued(bench: Bench) -> None:
    """A stream whose client has nothing more to send answers what it has, then ends well."""
    stream = bench.stream()
    for salt in range(3):
        await stream.send(bench.track(bench.block_size, salt=salt).next())
    await stream.finish_sending()
    for _ in range(3):
        await stream.receive()
    await stream.close()


@TOPIC.case(_END)
async def closed_without_a_step(bench: Bench) -> None:
    """A stream without steps ends well."""
    await bench.stream().close()


@TOPIC.case(_COLD)
async def cancelled(bench: Bench) -> None:
    """A client goes away with steps under way: the executor serves the next one, the cache is what it was."""
    track = bench.track(bench.block_size + 1)
    await bench.stream().prefill(track)
    for salt in range(1, 4):
        stream = bench.stream()
        for _ in range(3):
            await stream.send(bench.track(bench.block_size, salt=salt).next())
        stream.cancel()
    await bench.unharmed(track)
