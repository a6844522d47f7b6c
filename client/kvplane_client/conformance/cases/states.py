"""States (Mamba, linear attention): which one a row starts from, where it leaves some, and who may not be disturbed."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench, Stream
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import D2D, D2H, H2D, Track, column, values_of

TOPIC = Topic("states")

_STARTS = "BlockTables.block_ids: A row of positions [c, n) starts from entry (c - 1) / block_size"
_NOTHING = (
    "BlockTables.block_ids: A row of positions [c, n) starts from entry (c - 1) / block_size, or, if c is 0, from the "
    "state of no tokens, whatever its blocks hold."
)
_LEAVES = (
    "BlockTables.block_ids: It leaves a state in every entry from c / block_size on: those that are full then are "
    "checkpoints, from which other rows may start."
)
_IN_PLACE = (
    "BlockTables.block_ids: If c is no multiple of block_size, it thus overwrites the state that it started from."
)
_HOLDS = (
    "BlockTables.block_ids: With KV_GROUP_TYPE_RECURRENT_STATE entry i holds the state after position (i + 1) * "
    "block_size - 1, or, where the sequence ends before that, after its last position."
)
_NULL = "BlockTables.block_ids: Entries before those may be the null block."
_ONE = (
    "BlockTables.block_ids: INVALID_ARGUMENT for a block in which a row leaves a state and another row of the step "
    "starts from or leaves one."
)
_KEPT = (
    "KvGroupType.KV_GROUP_TYPE_RECURRENT_STATE: KV_GROUP_TYPE_RECURRENT_STATE keeps a state of one size, which stands "
    "for all tokens up to some position (Mamba, linear attention)."
)
_COPIED = "BlockCopies: BlockCopies are C whole blocks to copy, over all layers."
_HOST = "CopyDirection.COPY_DIRECTION_HOST_TO_DEVICE: COPY_DIRECTION_HOST_TO_DEVICE copies from a host block: swap in."
_INVALID = grpc.StatusCode.INVALID_ARGUMENT


@TOPIC.case(_IN_PLACE)
async def in_place(bench: Bench) -> None:
    """A sequence decodes token by token, through a block, over its end and on: one block's state follows it."""
    _require_states(bench)
    track = bench.track(bench.block_size + 1)
    stream = bench.stream()
    await stream.prefill(track)
    await stream.decode(track, min(2 * bench.block_size, 40))


@TOPIC.case(_LEAVES)
async def checkpoints_at_ends_of_blocks(bench: Bench) -> None:
    """A prompt of one row leaves a state at every block's end, from which other sequences go on."""
    _require_states(bench)
    first = bench.track(3 * bench.block_size + 1)
    stream = bench.stream()
    await stream.prefill(first)
    for kept in (3, 1, 2):
        await _go_on(bench, stream, first, kept, salt=kept)


@TOPIC.case(_LEAVES)
async def checkpoints_of_chunks(bench: Bench) -> None:
    """Chunks that end within blocks, or with one, leave the states that a prompt of one row leaves."""
    _require_states(bench)
    size = bench.block_size
    for chunk in sorted({1, max(1, size - 1), size, size + 1}):
        first = bench.track(2 * size + 1)
        stream = bench.stream()
        while first.computed < len(first.tokens):
            await stream.step(first.next(min(chunk, len(first.tokens) - first.computed)))
        for kept in (1, 2):
            await _go_on(bench, stream, first, kept, salt=kept)


@TOPIC.case(_LEAVES)
async def checkpoint_stays(bench: Bench) -> None:
    """A sequence goes on from a checkpoint with a prompt, a token, and a token once more: each finds what was there."""
    _require_states(bench)
    size = bench.block_size
    first = bench.track(size, blocks=bench.blocks(3))
    stream = bench.stream()
    await stream.prefill(first)
    for count in (size + 1, 1, 1):
        await _go_on(bench, stream, first, 1, salt=count, count=count)
    await stream.decode(first, 2)


@TOPIC.case(_LEAVES)
async def two_from_one_checkpoint(bench: Bench) -> None:
    """Two rows of one step start from one checkpoint, as prompts and as decodes, in both orders."""
    _require_states(bench)
    first = bench.track(bench.block_size, blocks=bench.blocks(3))
    stream = bench.stream()
    await stream.prefill(first)
    for counts in ((1, 1), (bench.block_size, 2), (2, bench.block_size)):
        pair = [_from(bench, first, 1, salt=place + sum(counts), count=count) for place, count in enumerate(counts)]
        await stream.together(*pair)
        await stream.together(*reversed(pair))


@TOPIC.case(_NOTHING)
async def first_row_starts_from_nothing(bench: Bench) -> None:
    """A sequence begins in blocks that hold another's states, with one token and with many, alone and beside others."""
    _require_states(bench)
    size = bench.block_size
    stream = bench.stream()
    for length in (1, size + 1):
        blocks = [bench.blocks(3), bench.blocks(3)]
        await stream.step(
            *(bench.track(2 * size + 1, salt=salt, blocks=list(own)).next() for salt, own in enumerate(blocks))
        )
        anew = [bench.track(length, salt=3 + place, blocks=own) for place, own in enumerate(blocks)]
        await stream.prefill(anew[0])
        await stream.together(*anew)


@TOPIC.case(_STARTS)
async def others_before_the_state(bench: Bench) -> None:
    """Tables name blocks before the state that a row starts from, and those hold another sequence by now."""
    _require_states(bench)
    size = bench.block_size
    track = bench.track(2 * size)
    stream = bench.stream()
    await stream.prefill(track)
    over = bench.track(size, salt=1)
    over.of_group = {group: list(track.blocks[:1]) for group in bench.geometry.states}
    await stream.step(over.next(samples=()))
    for _ in range(2):
        answer = await stream.step(track.next(keeps=True))
        track.tokens.append(answer.tokens[0])


@TOPIC.case(_NULL)
async def null_before_the_state(bench: Bench) -> None:
    """A sequence goes on where every entry before the state that it starts from is null, from one block to the next."""
    _require_states(bench)
    size = bench.block_size
    track = bench.track(3 * size)
    stream = bench.stream()
    await stream.prefill(track)
    await stream.step(_over(bench, track, 2).next(samples=()))
    await stream.decode(track, size + 1)


@TOPIC.case(_KEPT)
async def chunked_as_whole(bench: Bench) -> None:
    """A prompt in chunks of unequal sizes, with other sequences' rows beside and between them."""
    _require_states(bench)
    size = bench.block_size
    track, other = bench.track(3 * size + 2), bench.track(size + 1, salt=1)
    stream = bench.stream()
    await stream.prefill(other)
    for count in (1, size, max(1, size // 2), size):
        answer = await stream.step(other.next(), track.next(count, samples=()))
        other.tokens.append(answer.tokens[0])
    await stream.together(other, track)
    await stream.together(track, other)


@TOPIC.case(_HOLDS)
async def resumed_from_a_checkpoint(bench: Bench) -> None:
    """A preempted sequence goes on from its last full block, in other blocks, to what it gives uninterrupted."""
    _require_states(bench)
    size = bench.block_size
    track = bench.track(size + 1)
    stream = bench.stream()
    await stream.prefill(track)
    await stream.decode(track, size + 2)
    kept = (track.computed - 1) // size
    again = Track(list(track.tokens), track.blocks[:kept] + bench.blocks(3), kept * size)
    await stream.step(_over(bench, track, kept, of_rest=True).next(samples=()))
    await stream.prefill(again)
    await stream.decode(again, 2)


@TOPIC.case(_COPIED)
async def forked(bench: Bench) -> None:
    """A block whose state is in use is copied: both sequences go on from it, and neither disturbs the other."""
    _require_states(bench)
    size = bench.block_size
    track = bench.track(size + max(1, size // 2), blocks=bench.blocks(4))
    stream = bench.stream()
    await stream.prefill(track)
    branch = track.fork([track.blocks[0], *bench.blocks(3)])
    branch.tokens[-1] = (branch.tokens[-1] + 1) % bench.info.vocab_size
    last = (track.computed - 1) // size
    await stream.together(track, branch, copies=[(D2D, track.blocks[last], branch.blocks[last])])
    await stream.together(branch, track)


@TOPIC.case(_HOST)
async def swapped(bench: Bench) -> None:
    """States go to host memory, one of a whole block and one in use, and come back elsewhere."""
    _require_states(bench)
    if bench.geometry.num_host_blocks < 2:
        raise CaseSkippedError(f"needs 2 host blocks, got {bench.geometry.num_host_blocks}")
    size = bench.block_size
    track = bench.track(size + max(1, size // 2), blocks=bench.blocks(2))
    stream = bench.stream()
    await stream.prefill(track)
    await stream.step(copies=[(D2H, block, place) for place, block in enumerate(track.blocks)])
    await stream.step(bench.track(2 * size, salt=1, blocks=list(track.blocks)).next())
    back = track.fork(bench.blocks(2))
    await stream.prefill(back, copies=[(H2D, place, block) for place, block in enumerate(back.blocks[:2])])
    await _go_on(bench, stream, back, 1, salt=1)
    await stream.decode(back, 1)


@TOPIC.case(_ONE)
async def started_from_where_another_leaves(bench: Bench) -> None:
    """A row starts from the checkpoint that another row of the step is to leave: refused, in both orders."""
    _require_states(bench)
    size = bench.block_size
    for leaves_first in (True, False):
        track = bench.track(size)
        stream = bench.stream()
        if size > 1:
            await stream.step(track.next(size - 1, samples=()))
        follows = Track([*track.tokens, 0], [*track.blocks, *bench.blocks(1)], size)
        rows = (track.next(), follows.next())
        request = stream.build(*(rows if leaves_first else rows[::-1]))
        track.computed -= 1
        await stream.write(request)
        await stream.error(_INVALID, _ONE, step_id=stream.last_step_id)
        await bench.unharmed(track)


@TOPIC.case(_ONE)
async def left_by_two(bench: Bench) -> None:
    """Two rows would leave their states in one block: refused, and neither sequence is harmed."""
    _require_states(bench)
    tracks = [bench.track(bench.block_size, salt=salt, blocks=bench.blocks(3)) for salt in (1, 2)]
    stream = bench.stream()
    await stream.together(*tracks)
    request = stream.build(*(track.next() for track in tracks))
    for track in tracks:
        track.computed -= 1
    for group in bench.geometry.states:
        table = request.block_tables[group]
        blocks = values_of(table.block_ids)
        blocks[-1] = blocks[1]
        table.block_ids.CopyFrom(column(blocks))
    await stream.write(request)
    await stream.error(_INVALID, _ONE, step_id=2)
    await bench.unharmed(*tracks)


@TOPIC.case(_STARTS)
async def null_where_it_starts(bench: Bench) -> None:
    """The null block in place of the state that a row starts from is refused."""
    await _null_refused(bench, lambda blocks: next(place for place, block in enumerate(blocks) if block), _STARTS)


@TOPIC.case(_LEAVES)
async def null_where_it_leaves(bench: Bench) -> None:
    """The null block where a row is to leave a state is refused."""
    await _null_refused(bench, lambda blocks: len(blocks) - 1, _LEAVES)


def _require_states(bench: Bench) -> None:
    if not bench.geometry.states:
        raise CaseSkippedError("needs a KV group that keeps a state")


def _from(bench: Bench, first: Track, kept: int, salt: int, count: int = 2) -> Track:
    """A sequence that begins with another's first blocks and goes on with tokens of its own."""
    size = bench.block_size
    tail = bench.prompt(count, salt=100 + salt)
    own = bench.blocks(-(-(count + 2) // size))
    return Track(first.tokens[: kept * size] + tail, first.blocks[:kept] + own, kept * size)


async def _go_on(bench: Bench, stream: Stream, first: Track, kept: int, *, salt: int, count: int = 2) -> None:
    """Computes such a sequence and a token more."""
    found = _from(bench, first, kept, salt, count)
    await stream.prefill(found)
    await stream.decode(found, 1)


def _over(bench: Bench, track: Track, kept: int, *, of_rest: bool = False) -> Track:
    """A sequence in blocks in which another's states lie that it needs no more.

    Args:
        bench: The case's.
        track: The other sequence; in its other groups it keeps its blocks.
        kept: How many of its first blocks it needs no more.
        of_rest: Those behind the first `kept` instead.
    """
    passed = track.blocks[kept:] if of_rest else track.blocks[:kept]
    over = bench.track(len(passed) * bench.block_size, salt=5)
    over.of_group = {group: list(passed) for group in bench.geometry.states}
    return over


async def _null_refused(bench: Bench, choose: Callable[[list[int]], int], contract: str) -> None:
    """Puts the null block into a table of states, where it may not be: refused, and the sequence goes on."""
    _require_states(bench)
    track = bench.track(2 * bench.block_size)
    stream = bench.stream()
    await stream.prefill(track)
    request: pb.ExecuteRequest = stream.build(track.next())
    track.computed -= 1
    for group in bench.geometry.states:
        table = request.block_tables[group]
        blocks = values_of(table.block_ids)
        blocks[choose(blocks)] = 0
        table.block_ids.CopyFrom(column(blocks))
    await stream.write(request)
    await stream.error(_INVALID, contract, step_id=2)
    await bench.unharmed(track)
