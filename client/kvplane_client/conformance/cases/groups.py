"""KV groups: each has a table of its own, and only its own layers read it."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import Track, column, values_of

TOPIC = Topic("groups")

_TABLES = (
    "ExecuteRequest.block_tables: block_tables has one entry for each KV group, in the order of "
    "GetModelInfoResponse.kv_groups."
)
_SHARED = "KvGroup: KvGroup is a set of layers that share one block table."
_ONE = "KvGroup: All groups take their blocks from one cache: a block is in tables of one group at a time"
_SIZE = (
    "BlockTables: block_size is the group's: KvGroup.block_size, or GetModelInfoResponse.block_size where that is 0."
)
_INVALID = "ExecutorService.Execute: INVALID_ARGUMENT for a malformed step"


@TOPIC.case(_TABLES)
async def tables_in_orders_of_their_own(bench: Bench) -> None:
    """The groups of a sequence have blocks in other orders than each other."""
    last = _last_group(bench)
    size = bench.block_size
    track = bench.track(2 * size + 1, blocks=bench.blocks(4))
    track.of_group[last] = track.blocks[::-1]
    stream = bench.stream()
    await stream.prefill(track)
    await stream.decode(track, size + 1)


@TOPIC.case(_SHARED)
async def prefix_of_each_group_elsewhere(bench: Bench) -> None:
    """Two sequences leave the same prefix, each for other groups: a third finds it group by group."""
    last = _last_group(bench)
    size = bench.block_size
    stream = bench.stream()
    of_others, of_last = (bench.track(2 * size + 1, blocks=bench.blocks(3)) for _ in range(2))
    for track in (of_others, of_last):
        await stream.prefill(track)
    await stream.step(_over(bench, of_others, kept=range(last)).next())
    await stream.step(_over(bench, of_last, kept=[last]).next())
    found = Track(of_others.tokens[: 2 * size + 1], of_others.blocks[:2], 2 * size)
    found.of_group[last] = of_last.blocks[:2]
    await stream.prefill(found)
    await stream.decode(found, size)


@TOPIC.case(_SIZE)
async def chunks_to_the_ends_of_each_groups_blocks(bench: Bench) -> None:
    """A prompt in chunks that end where blocks of one group do, and one token before and after, then decodes."""
    _last_group(bench)
    for size in sorted(set(bench.geometry.block_sizes)):
        for shift in (-1, 0, 1):
            track = bench.track(2 * bench.block_size + 1, salt=2 + shift)
            stream = bench.stream()
            ends = [end + shift for end in range(size, 2 * bench.block_size, size) if end + shift > 0]
            for end in ends:
                await stream.step(track.next(end - track.computed))
            await stream.prefill(track)
            await stream.decode(track, size + 1)


@TOPIC.case(_ONE)
async def block_handed_to_another_group(bench: Bench) -> None:
    """What was a block of one group comes to a sequence in the table of another, which reads what that wrote alone."""
    _last_group(bench)
    geometry, stream = bench.geometry, bench.stream()
    beyond = geometry.num_blocks * geometry.blocks_each + 1
    low, high = list(range(4)), [geometry.num_blocks - 1 - block for block in range(4)]
    await stream.prefill(bench.track(4 * bench.block_size, salt=1, blocks=low))
    track = bench.track(3 * bench.block_size, salt=2, blocks=high)
    chunk = max(1, bench.block_size - 1)
    while track.computed < 4 * bench.block_size:
        request = stream.build(track.next(min(chunk, len(track.tokens) - track.computed)))
        for table in request.block_tables:
            # Counted from the cache's other end: the last group's blocks of `low` are the first one's here.
            mirrored = [block and beyond - block for block in values_of(table.block_ids)]
            table.block_ids.CopyFrom(column(mirrored))
        await stream.write(request)
        answer = await stream.receive()
        if track.computed == len(track.tokens):
            track.tokens.append(answer.tokens[0])


@TOPIC.case(_ONE)
async def block_written_in_two(bench: Bench) -> None:
    """A row's tables in two groups name one block to write to: that is refused and harms nothing."""
    last = _last_group(bench)
    resting = bench.track(bench.block_size + 1)
    await bench.stream().prefill(resting)
    stream = bench.stream()
    request = stream.build(bench.track(1, salt=1).next())
    request.block_tables[last].block_ids.CopyFrom(column(values_of(request.block_tables[0].block_ids)))
    await stream.write(request)
    await stream.error(grpc.StatusCode.INVALID_ARGUMENT, _INVALID, step_id=1)
    await bench.unharmed(resting)


def _last_group(bench: Bench) -> int:
    """The last of several groups."""
    if bench.geometry.num_groups < 2:
        raise CaseSkippedError("needs a model with several KV groups")
    return bench.geometry.num_groups - 1


def _over(bench: Bench, track: Track, kept: Sequence[int]) -> Track:
    """A sequence that overwrites another's first two blocks, but for those of the groups that are kept."""
    over = bench.track(2 * bench.block_size, salt=9, blocks=list(track.blocks[:2]))
    own = bench.blocks(2)
    over.of_group = {group: list(own) for group in kept}
    return over
