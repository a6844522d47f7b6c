"""Copies of blocks: within the cache, to host memory and back."""

from __future__ import annotations

import grpc

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import D2D, D2H, H2D, column

TOPIC = Topic("copies")

_WHOLE = "BlockCopies: BlockCopies are C whole blocks to copy, over all layers."
_ORDER = "BlockCopies: They are done as if one after the other, in the order given."
_BEFORE = "ExecuteRequest.copies: copies are done before any row of this step writes."
_TAG = "BlockCopies: A device block that is copied to loses its tag."
_STORED = "ExecuteRequest.block_tags: block_tags are to be stored once this step is computed."
_REFUSED = (
    "BlockCopies: Errors: INVALID_ARGUMENT for columns of other lengths than each other, an unknown direction, an "
    "id out of range, or a block copied to itself; then nothing is copied."
)
_HOST = "CopyDirection.COPY_DIRECTION_HOST_TO_DEVICE: COPY_DIRECTION_HOST_TO_DEVICE copies from a host block: swap in."
_INVALID = grpc.StatusCode.INVALID_ARGUMENT


@TOPIC.case(_WHOLE)
async def copy_on_write(bench: Bench) -> None:
    """A sequence is forked: its last block is copied, both go on, neither disturbs the other."""
    size = bench.block_size
    track = bench.track(size + max(1, size // 2), blocks=bench.blocks(4))
    stream = bench.stream()
    await stream.prefill(track)
    branch = track.fork([track.blocks[0], *bench.blocks(3)])
    branch.tokens[-1] = (branch.tokens[-1] + 1) % bench.info.vocab_size
    await stream.together(track, branch, copies=[(D2D, track.blocks[1], branch.blocks[1])])
    await stream.together(branch, track)
    await stream.together(track, branch)


@TOPIC.case(_WHOLE)
async def whole_table(bench: Bench) -> None:
    """All of a sequence's blocks are copied and the old ones overwritten."""
    size = bench.block_size
    track = bench.track(2 * size + 1, blocks=bench.blocks(4))
    stream = bench.stream()
    await stream.prefill(track)
    moved = track.fork(bench.blocks(4))
    await stream.step(copies=[(D2D, old, new) for old, new in zip(track.blocks[:3], moved.blocks[:3], strict=True)])
    await stream.step(bench.track(3 * size, salt=1, blocks=track.blocks).next())
    await stream.decode(moved, size + 1)


@TOPIC.case(_BEFORE)
async def before_rows_write(bench: Bench) -> None:
    """A row overwrites a block in the step that copies it away: the copy has what was there before."""
    size = bench.block_size
    track = bench.track(size, blocks=bench.blocks(3))
    stream = bench.stream()
    await stream.prefill(track)
    moved = track.fork(bench.blocks(3))
    other = bench.track(size, salt=1, blocks=track.blocks)
    await stream.step(other.next(), moved.next(), copies=[(D2D, track.blocks[0], moved.blocks[0])])


@TOPIC.case(_ORDER)
async def chained(bench: Bench) -> None:
    """A block that was just copied to is copied on, one that was just read is overwritten: two blocks change places."""
    size = bench.block_size
    first, second = (bench.track(size, salt=salt, blocks=bench.blocks(3)) for salt in (1, 2))
    stream = bench.stream()
    await stream.prefill(first)
    await stream.prefill(second)
    (spare,) = bench.blocks(1)
    one, other = first.blocks[0], second.blocks[0]
    await stream.step(copies=[(D2D, one, spare), (D2D, other, one), (D2D, spare, other)])
    first.blocks[0], second.blocks[0] = other, one
    await stream.decode(first, 2)
    await stream.decode(second, 2)


@TOPIC.case(_ORDER)
async def same_target_twice(bench: Bench) -> None:
    """Of two copies to one block the later one holds."""
    size = bench.block_size
    first, second = (bench.track(size, salt=salt, blocks=bench.blocks(3)) for salt in (1, 2))
    stream = bench.stream()
    await stream.prefill(first)
    await stream.prefill(second)
    (target,) = bench.blocks(1)
    await stream.step(copies=[(D2D, first.blocks[0], target), (D2D, second.blocks[0], target)])
    second.blocks[0] = target
    await stream.decode(second, 2)


@TOPIC.case(_TAG)
async def target_loses_its_tag(bench: Bench) -> None:
    """A block that is copied to has no tag any more; the source keeps its own."""
    track = bench.track(2 * bench.block_size)
    stream = bench.stream()
    one, other = track.blocks[:2]
    await stream.step(track.next(), tags={one: b"source", other: b"target"})
    await stream.step(copies=[(D2D, one, other)])
    bench.equal(await bench.tags(), bench.tagged({one: b"source"}), _TAG)


@TOPIC.case(_STORED)
async def target_tagged_at_once(bench: Bench) -> None:
    """A step that copies to a block and tags it leaves the new tag; the source keeps its own."""
    track = bench.track(2 * bench.block_size)
    stream = bench.stream()
    one, other = track.blocks[:2]
    await stream.step(track.next(), tags={one: b"source", other: b"old"})
    await stream.step(copies=[(D2D, one, other)], tags={other: b"new"})
    bench.equal(await bench.tags(), bench.tagged({one: b"source", other: b"new"}), _STORED)


@TOPIC.case(_HOST)
async def out_and_in(bench: Bench) -> None:
    """Blocks go to host memory, their places are overwritten, and they come back elsewhere."""
    _require_host_blocks(bench)
    size = bench.block_size
    track = bench.track(2 * size + 1, blocks=bench.blocks(4))
    stream = bench.stream()
    await stream.prefill(track)
    await stream.step(copies=[(D2H, block, 5 - place) for place, block in enumerate(track.blocks[:3])])
    await stream.step(bench.track(3 * size, salt=1, blocks=track.blocks).next())
    back = track.fork(bench.blocks(4))
    await stream.prefill(back, copies=[(H2D, 5 - place, block) for place, block in enumerate(back.blocks[:3])])
    await stream.decode(back, 2)


@TOPIC.case(_ORDER)
async def out_and_in_within_a_step(bench: Bench) -> None:
    """One block is swapped out and another into its place by the copies of one step."""
    _require_host_blocks(bench)
    size = bench.block_size
    first, second = (bench.track(size, salt=salt, blocks=bench.blocks(3)) for salt in (1, 2))
    stream = bench.stream()
    await stream.prefill(first)
    await stream.prefill(second)
    await stream.step(copies=[(D2H, first.blocks[0], 0)])
    place = second.blocks[0]
    await stream.step(copies=[(D2H, place, 1), (H2D, 0, place)])
    first.blocks[0] = place
    await stream.decode(first, 2)
    second.blocks[0] = bench.blocks(1)[0]
    await stream.step(copies=[(H2D, 1, second.blocks[0])])
    await stream.decode(second, 2)


@TOPIC.case(_HOST)
async def host_blocks_stay(bench: Bench) -> None:
    """Host blocks are read twice, and on another stream."""
    _require_host_blocks(bench)
    track = bench.track(bench.block_size, blocks=bench.blocks(3))
    stream = bench.stream()
    await stream.prefill(track)
    last = bench.geometry.num_host_blocks - 1
    await stream.step(copies=[(D2H, track.blocks[0], last)])
    await stream.close()
    for _ in range(2):
        stream = bench.stream()
        back = track.fork(bench.blocks(3))
        await stream.step(copies=[(H2D, last, back.blocks[0])])
        await stream.decode(back, 2)


@TOPIC.case(_REFUSED)
async def refused_as_a_whole(bench: Bench) -> None:
    """Where one of several copies is wrong, none is done, and no tag is lost."""
    size = bench.block_size
    track, other = (bench.track(size, salt=salt, blocks=bench.blocks(3)) for salt in (1, 2))
    stream = bench.stream()
    await stream.prefill(track, tags={track.blocks[0]: b"noted"})
    await stream.prefill(other)
    bad = stream.build(copies=[(D2D, other.blocks[0], track.blocks[0]), (D2D, track.blocks[0], other.blocks[0])])
    sources = bench.ints(bad.copies.source_ids, "source_ids")
    sources[-1] = bench.geometry.num_blocks * bench.geometry.blocks_each + 1
    bad.copies.source_ids.CopyFrom(column(sources))
    await stream.write(bad)
    await stream.error(_INVALID, _REFUSED, step_id=3)
    bench.equal(await bench.tags(), bench.tagged({track.blocks[0]: b"noted"}), _REFUSED)
    await bench.unharmed(track, other)


def _require_host_blocks(bench: Bench) -> None:
    if bench.geometry.num_host_blocks < 6:
        raise CaseSkippedError(f"needs 6 host blocks, got {bench.geometry.num_host_blocks}")
