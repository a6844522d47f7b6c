"""Sliding windows and chunks: what lies before one is not read, and its blocks may be another's, or none."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench, Stream
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import Track, column, values_of

TOPIC = Topic("windows")

_WINDOW = (
    "KvGroup.window: window is how many tokens a token reads with KV_GROUP_TYPE_SLIDING_WINDOW, itself and those just "
    "before it."
)
_CHUNK = (
    "KvGroup.chunk: chunk is how many tokens a chunk has with KV_GROUP_TYPE_CHUNKED_LOCAL: a token at position p reads "
    "those from p - p % chunk on."
)
_NULL = (
    "BlockTables.block_ids: where all of them lie before the window, or the chunk, of the row's first token, it may be "
    "the null block, 0."
)
_IDS = (
    "BlockTables.block_ids: block_ids are the blocks of row r at block_indptr[r] to block_indptr[r + 1], each in "
    "[1, num_blocks)."
)


@TOPIC.case(_NULL)
async def null_before_the_window(bench: Bench) -> None:
    """A sequence decodes with no block before its windows, over borders of blocks."""
    track = bench.beyond_windows()
    stream = bench.stream()
    await stream.prefill(track)
    await stream.decode(track, bench.block_size + 1)


@TOPIC.case(_NULL)
async def null_before_chunks(bench: Bench) -> None:
    """A prompt in chunks: null is what lies before the window of a chunk's first token, not of its last."""
    size = bench.block_size
    for chunk in sorted({max(1, size - 1), 2 * size + 1}):
        track = bench.beyond_windows(salt=chunk)
        stream = bench.stream()
        length = len(track.tokens)
        while track.computed < length:
            await stream.step(track.next(min(chunk, length - track.computed)))


@TOPIC.case(_NULL)
async def null_beside_rows_without(bench: Bench) -> None:
    """Rows within their windows and rows beyond them, in one step and in both orders."""
    stream = bench.stream()
    beyond = bench.beyond_windows(salt=1)
    short = [bench.track(1 + salt, salt=salt) for salt in (2, 3)]
    for track in (beyond, *short):
        await stream.prefill(track)
    await stream.together(short[0], beyond, short[1])
    await stream.together(beyond, *short)


@TOPIC.case(_WINDOW)
async def others_before_the_window(bench: Bench) -> None:
    """Tables still name the blocks before the windows, and those hold another sequence by now: nothing reads them."""
    track = bench.beyond_windows()
    stream = bench.stream()
    await stream.prefill(track)
    await stream.step(_in_place_of(bench, track).next(samples=()))
    for _ in range(2):
        answer = await stream.step(track.next(keeps=True))
        track.tokens.append(answer.tokens[0])


@TOPIC.case(_NULL)
async def moved_on(bench: Bench) -> None:
    """Blocks that a window has passed go to another sequence while the first goes on, in the same step at first."""
    track = bench.beyond_windows()
    stream = bench.stream()
    await stream.prefill(track)
    other = _in_place_of(bench, track)
    await stream.together(other, track)
    await stream.together(track, other)
    await stream.together(other, track)


@TOPIC.case(_CHUNK)
async def chunk_begins_anew(bench: Bench) -> None:
    """Rows that begin where a chunk does, one token before, and one after: no block before their chunks is named."""
    sizes = sorted({-window for window in bench.geometry.windows if window < 0})
    if not sizes:
        raise CaseSkippedError("needs a KV group with chunks")
    for size in sizes:
        for shift in (-1, 0, 1):
            track = bench.beyond_windows(salt=2 + shift)
            stream = bench.stream()
            await stream.step(track.next((len(track.tokens) - 2) // size * size + shift, samples=()))
            await stream.step(track.next(1))
            if track.computed < len(track.tokens):
                await stream.step(track.next())


@TOPIC.case(_WINDOW)
async def prefix_found_behind_a_window(bench: Bench) -> None:
    """A sequence goes on from another's prefix, of which groups with a window or chunks have only that left."""
    first = bench.beyond_windows()
    stream = bench.stream()
    await stream.prefill(first)
    size, length = bench.block_size, len(first.tokens) - 1
    kept = (length - 1) // size
    await stream.step(_in_place_of(bench, first, before=kept * size).next(samples=()))
    found = Track(first.tokens[:length], first.blocks[:kept] + bench.blocks(1), kept * size)
    await stream.prefill(found)
    await stream.decode(found, 2)


@TOPIC.case(_IDS)
async def null_in_full_attention(bench: Bench) -> None:
    """The null block in a table of full attention is refused, though it lies before another group's window."""
    geometry = bench.geometry
    full = [group for group, size in enumerate(geometry.windows) if not size and group not in geometry.states]
    if not full:
        raise CaseSkippedError("needs a KV group of full attention beside one with a window or chunks")
    await _refused(bench, lambda step: _put(step.block_tables[full[0]], 0), _IDS)


@TOPIC.case(_NULL)
async def null_where_the_window_begins(bench: Bench) -> None:
    """The null block in place of the first block that a row reads is refused."""
    group = _last_windowed(bench)
    await _refused(bench, lambda step: _put(step.block_tables[group], _first_named(step, group)), _NULL)


@TOPIC.case(_NULL)
async def null_where_it_writes(bench: Bench) -> None:
    """The null block in place of the block that a row writes to is refused."""
    group = _last_windowed(bench)
    await _refused(bench, lambda step: _put(step.block_tables[group], -1), _NULL)


async def _refused(bench: Bench, spoil: Callable[[pb.ExecuteRequest], None], contract: str) -> None:
    """Spoils a step of a sequence beyond its windows: it is refused, and the sequence goes on."""
    track = bench.beyond_windows()
    stream = bench.stream()
    await stream.prefill(track)
    request = _built(stream, track)
    spoil(request)
    await stream.write(request)
    await stream.error(grpc.StatusCode.INVALID_ARGUMENT, contract, step_id=2)
    await bench.unharmed(track)


def _built(stream: Stream, track: Track) -> pb.ExecuteRequest:
    """The next step of a sequence, which is not to be computed."""
    request = stream.build(track.next())
    track.computed -= 1
    return request


def _last_windowed(bench: Bench) -> int:
    """The last group with a window or chunks."""
    with_window = [group for group, window in enumerate(bench.geometry.windows) if window]
    if not with_window:
        raise CaseSkippedError("needs a KV group with a window or chunks")
    return with_window[-1]


def _first_named(step: pb.ExecuteRequest, group: int) -> int:
    """Where the first block stands that is not null."""
    return next(place for place, block in enumerate(values_of(step.block_tables[group].block_ids)) if block)


def _put(table: pb.BlockTables, place: int) -> None:
    """Puts the null block into a table."""
    blocks = values_of(table.block_ids)
    blocks[place] = 0
    table.block_ids.CopyFrom(column(blocks))


def _in_place_of(bench: Bench, track: Track, before: int | None = None) -> Track:
    """A sequence in the blocks that another needs no more in its groups with a window or chunks.

    Args:
        bench: The case's.
        track: The other sequence.
        before: The position from which on it reads; by default where it goes on.
    """
    position = len(track.tokens) - 1 if before is None else before
    passed = {
        group: track.blocks_of(group)[: bench.geometry.first_read(group, position)]
        for group, window in enumerate(bench.geometry.windows)
        if window
    }
    count = min(len(blocks) for blocks in passed.values())
    other = bench.track(count * bench.block_size, salt=5)
    other.of_group = {group: blocks[:count] for group, blocks in passed.items()}
    return other
