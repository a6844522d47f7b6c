"""Steps in order: answers, step ids, and what a step that cannot be run does to those behind it."""

from __future__ import annotations

import grpc

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import Track, column
from kvplane_client.conformance.target import MAX_SEQS, check_error

TOPIC = Topic("steps")

_ORDER = "ExecutorService.Execute: Execute runs steps in the order sent, one response a step."
_QUEUED = "ExecutorService.Execute: The next step may be sent before the last is answered."
_GROWS = "ExecuteRequest.step_id: step_id grows from one step of a stream to the next."
_NAMED = (
    "ExecutorService.Execute: A step that cannot be run ends the stream with its status, "
    'ErrorInfo.metadata["step_id"] names it, and no step queued behind it is run'
)


@TOPIC.case(_QUEUED)
async def sent_ahead(bench: Bench) -> None:
    """Steps that are sent before any is answered are answered in order."""
    stream = bench.stream()
    for salt in range(6):
        await stream.send(bench.track(bench.block_size + salt, salt=salt).next())
    for _ in range(6):
        await stream.receive()
    await stream.close()


@TOPIC.case(_ORDER)
async def blocks_handed_on(bench: Bench) -> None:
    """A queued step writes into the blocks that the step before still reads."""
    blocks = bench.blocks(4)
    stream = bench.stream()
    for salt in range(8):
        await stream.send(bench.track(2 * bench.block_size + 1, salt=salt, blocks=blocks).next())
    for _ in range(8):
        await stream.receive()


@TOPIC.case(_ORDER)
async def chunks_queued(bench: Bench) -> None:
    """The chunks of a prompt are sent at once; each reads what the one before wrote."""
    track = bench.track(3 * bench.block_size + 1)
    stream = bench.stream()
    chunk = max(1, bench.block_size // 2)
    sent = 0
    while track.computed < len(track.tokens):
        left = len(track.tokens) - track.computed
        await stream.send(track.next(min(chunk, left)))
        sent += 1
    for _ in range(sent):
        await stream.receive()


@TOPIC.case(_GROWS)
async def ids_may_skip(bench: Bench) -> None:
    """Step ids have to grow, not to be without gaps."""
    stream = bench.stream()
    track = bench.track(bench.block_size)
    for step_id in (5, 2**40):
        stream.last_step_id = step_id - 1
        await stream.prefill(track)


@TOPIC.case("ExecutorService.Execute: ABORTED for another epoch, a step id that does not grow")
async def id_that_does_not_grow(bench: Bench) -> None:
    """A step id that was there before is ABORTED; the cache stays."""
    track = bench.track(bench.block_size + 1)
    await bench.stream().prefill(track)
    for repeated in (1, 2):
        stream = bench.stream()
        await stream.decode(track, 2)
        late = stream.build(bench.track(1).next())
        late.step_id = repeated
        await stream.write(late)
        contract = "ExecutorService.Execute: ABORTED for another epoch, a step id that does not grow"
        await stream.error(grpc.StatusCode.ABORTED, contract, step_id=repeated)
    await bench.unharmed(track)


@TOPIC.case("ExecuteRequest.step_id: At least 1.")
async def id_of_zero(bench: Bench) -> None:
    """Step id 0 is refused."""
    stream = bench.stream()
    request = stream.build(bench.track(1).next())
    request.step_id = 0
    await stream.write(request)
    await stream.error(grpc.StatusCode.INVALID_ARGUMENT, "ExecuteRequest.step_id: At least 1.")


@TOPIC.case("ExecutorService.Execute: A new stream starts its step ids anew.")
async def ids_start_anew(bench: Bench) -> None:
    """A second stream begins with step 1, and finds what the first one left."""
    track = bench.track(bench.block_size + 1)
    first = bench.stream()
    await first.prefill(track)
    await first.decode(track, 2)
    await first.close()
    second = bench.stream()
    await second.decode(track, 2)
    await second.close()


@TOPIC.case(_NAMED)
async def error_ends_the_queue(bench: Bench) -> None:
    """Of three steps the second cannot be run: the first is answered, the third leaves no trace."""
    track, other, later = (bench.track(2 * bench.block_size, salt=salt) for salt in range(3))
    stream = bench.stream()
    good = stream.build(track.next(), tags={track.blocks[0]: b"first"})
    bad = stream.build(other.next())
    bad.positions.CopyFrom(column([]))
    behind = stream.build(later.next(), tags={later.blocks[0]: b"third"})
    error = await stream.exchange([good, bad, behind])
    check_error(error, grpc.StatusCode.INVALID_ARGUMENT, _NAMED, {"step_id": 2})
    bench.equal(await bench.tags(), bench.tagged({track.blocks[0]: b"first"}), _NAMED)
    await bench.unharmed(Track([*track.tokens, 0], track.blocks, track.computed))


@TOPIC.case("ExecuteRequest.query_indptr: A step without rows ([0]) only does its copies and stores its tags.")
async def no_rows(bench: Bench) -> None:
    """A step without rows is answered, and changes no K/V."""
    contract = "ExecuteRequest.query_indptr: A step without rows ([0]) only does its copies and stores its tags."
    track = bench.track(bench.block_size + 1)
    stream = bench.stream()
    await stream.prefill(track)
    answer = await stream.step(tags={track.blocks[0]: b"noted"})
    bench.equal(answer.tokens, [], contract)
    await stream.decode(track, 2)
    bench.equal(await bench.tags(), bench.tagged({track.blocks[0]: b"noted"}), contract)


@TOPIC.case("ExecuteRequest.query_indptr: At most max_num_seqs rows and max_num_batched_tokens tokens as profiled.")
async def as_large_as_profiled(bench: Bench) -> None:
    """A step has as many rows and tokens as were profiled."""
    length = bench.target.max_batched_tokens // MAX_SEQS
    tracks = [bench.track(length, salt=salt, blocks=bench.blocks(-(-length // bench.block_size))) for salt in range(8)]
    await bench.stream().step(*(track.next() for track in tracks))
