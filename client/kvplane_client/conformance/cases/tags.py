"""Tags: the manager's notes on blocks, kept for one that restarts."""

from __future__ import annotations

import grpc
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import column

TOPIC = Topic("tags")

_STORED = "ExecuteRequest.block_tags: block_tags are to be stored once this step is computed."
_DROPPED = "BlockTags.tags: A block's tag is dropped when a step writes into the block; empty drops it too."
_OPAQUE = (
    "BlockTags.tags: tags has one entry for each of block_ids, at most 4,096 bytes. The executor never interprets them."
)
_LISTED = (
    "ExecutorService.ListBlockTags: ListBlockTags streams the tags of all tagged blocks, so that a manager that was "
    "restarted can adopt the cache."
)


@TOPIC.case(_STORED)
async def stored_and_listed(bench: Bench) -> None:
    """Tags are listed as they were stored, those of earlier steps with those of later ones."""
    track = bench.track(3 * bench.block_size)
    stream = bench.stream()
    wanted = {block: f"block {block}".encode() for block in track.blocks[:3]}
    await stream.step(track.next(2 * bench.block_size), tags={b: wanted[b] for b in track.blocks[:2]})
    bench.equal(await bench.tags(), bench.tagged({b: wanted[b] for b in track.blocks[:2]}), _STORED)
    await stream.step(track.next(), tags={track.blocks[2]: wanted[track.blocks[2]]})
    bench.equal(await bench.tags(), bench.tagged(wanted), _STORED)


@TOPIC.case(_LISTED)
async def listed_to_the_next_manager(bench: Bench) -> None:
    """Tags stay when the stream that brought them is gone, and so does what they speak of."""
    track = bench.track(2 * bench.block_size)
    stream = bench.stream()
    await stream.prefill(track, tags={track.blocks[0]: b"one", track.blocks[1]: b"two"})
    stream.cancel()
    bench.equal(await bench.tags(), bench.tagged({track.blocks[0]: b"one", track.blocks[1]: b"two"}), _LISTED)
    await bench.unharmed(track)


@TOPIC.case(_DROPPED)
async def dropped_by_a_write(bench: Bench) -> None:
    """A row that writes into a block takes its tag, and no other's; reading takes none."""
    track = bench.track(2 * bench.block_size)
    stream = bench.stream()
    one, other = track.blocks[:2]
    await stream.prefill(track, tags={one: b"one", other: b"other"})
    await stream.decode(track, 1)
    bench.equal(await bench.tags(), bench.tagged({one: b"one", other: b"other"}), _DROPPED)
    await stream.step(bench.track(bench.block_size, salt=1, blocks=[other]).next())
    bench.equal(await bench.tags(), bench.tagged({one: b"one"}), _DROPPED)


@TOPIC.case(_DROPPED)
async def written_and_tagged_at_once(bench: Bench) -> None:
    """A step that fills a block and tags it leaves the new tag."""
    blocks = bench.blocks(3)
    stream = bench.stream()
    for salt, tag in ((1, b"old"), (2, b"new")):
        track = bench.track(bench.block_size, salt=salt, blocks=blocks)
        await stream.step(track.next(), tags={blocks[0]: tag})
        bench.equal(await bench.tags(), bench.tagged({blocks[0]: tag}), _STORED)


@TOPIC.case(_DROPPED)
async def dropped_by_an_empty_one(bench: Bench) -> None:
    """An empty tag drops the block's; one that has none stays without."""
    one, other = bench.blocks(2)
    stream = bench.stream()
    await stream.step(tags={one: b"noted"})
    await stream.step(tags={one: b"", other: b""})
    bench.equal(await bench.tags(), {}, _DROPPED)


@TOPIC.case(_OPAQUE)
async def any_bytes(bench: Bench) -> None:
    """Tags are bytes of any kind, 4,096 of them at most."""
    values = [bytes(range(256)), b"\0", b"\xff" * 4096]
    wanted = dict(zip(bench.blocks(3), values, strict=True))
    await bench.stream().step(tags=wanted)
    bench.equal(await bench.tags(), bench.tagged(wanted), _OPAQUE)


@TOPIC.case(_OPAQUE)
async def too_long(bench: Bench) -> None:
    """A tag of 4,097 bytes is refused, with all of its step."""
    one, other = bench.blocks(2)
    stream = bench.stream()
    await stream.send(tags={one: b"fine", other: b"x" * 4097})
    await stream.error(grpc.StatusCode.INVALID_ARGUMENT, _OPAQUE, step_id=1)
    bench.equal(await bench.tags(), {}, _OPAQUE)


@TOPIC.case(_STORED)
async def not_of_a_step_that_failed(bench: Bench) -> None:
    """The tags of a step that cannot be run are not stored, those before it stay."""
    one, other = bench.blocks(2)
    stream = bench.stream()
    await stream.step(tags={one: b"before"})
    bad = stream.build(tags={one: b"after", other: b"after"})
    bad.query_indptr.CopyFrom(column([0, 1]))
    await stream.write(bad)
    await stream.error(grpc.StatusCode.INVALID_ARGUMENT, _STORED, step_id=2)
    bench.equal(await bench.tags(), bench.tagged({one: b"before"}), _STORED)


@TOPIC.case("InitializeKvCacheRequest: InitializeKvCacheRequest gives the size of the cache.")
async def gone_with_the_cache(bench: Bench) -> None:
    """A new cache has no tags."""
    contract = "ExecutorService.InitializeKvCache: whatever the cache held is gone."
    await bench.stream().step(tags={bench.blocks(1)[0]: b"old"})
    sizes = await bench.cache()
    assert sizes is not None
    request = pb.InitializeKvCacheRequest(
        num_blocks=sizes.num_blocks, num_host_blocks=sizes.num_host_blocks, knows_group_block_sizes=True
    )
    bench.epoch = (await bench.call(bench.stub.InitializeKvCache(request))).kv_cache.kv_epoch
    bench.equal(await bench.tags(), {}, contract)
