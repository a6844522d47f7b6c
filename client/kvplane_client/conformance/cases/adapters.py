"""LoRA adapters: loaded, named by rows of steps, unloaded."""

from __future__ import annotations

import grpc
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.adapter_calls import listed, load, named, require_room, unload
from kvplane_client.conformance.bench import Bench, Stream
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import Adapter, column

TOPIC = Topic("adapters")

_LOADS = (
    "ExecutorService.LoadAdapter: LoadAdapter puts a LoRA adapter beside the model's weights, for rows of steps to "
    "name; the cache stays as it is."
)
_AGAIN = "ExecutorService.LoadAdapter: A name that is loaded with the same content gets the same answer again."
_FIELD = "ExecutorService.LoadAdapter: Errors: INVALID_ARGUMENT for a bad field"
_ANOTHER = "ExecutorService.LoadAdapter: content other than the revision asked for"
_EXISTS = "ExecutorService.LoadAdapter: ALREADY_EXISTS for a name that is loaded with other content"
_FULL = "ExecutorService.LoadAdapter: RESOURCE_EXHAUSTED with max_adapters loaded"
_NONE = "ExecutorService.LoadAdapter: FAILED_PRECONDITION where max_adapters is 0."
_AWAY = "ExecutorService.UnloadAdapter: UnloadAdapter takes an adapter away."
_AFTERWARDS = "ExecutorService.UnloadAdapter: A step that names it afterwards gets FAILED_PRECONDITION"
_NOT_FOUND = "ExecutorService.UnloadAdapter: Errors: NOT_FOUND for a name that is not loaded."
_LISTED = (
    "ExecutorService.ListAdapters: ListAdapters returns the adapters that are loaded, in the order they were loaded: "
    "max_adapters at most."
)
_ROWS = (
    "ExecuteRequest.adapter_ids: the LoraAdapter.adapter_id of the adapter that the row's tokens are computed with, or "
    "0 for the model itself."
)
_NOT_LOADED = "ExecuteRequest.adapter_ids: One that is not loaded gets FAILED_PRECONDITION."
_ID = (
    "LoraAdapter.adapter_id: adapter_id names it in steps: at least 1, and no other adapter's in the executor's run, "
    "before or after."
)
_REVISION = (
    "LoraAdapter.revision: revision is a digest of its weights and settings, at most 256 characters, equal wherever "
    "the same adapter is loaded."
)
_NAME = "LoraAdapter.name: name is what it was loaded as."
_RANK = "LoraAdapter.rank: rank is the largest rank of its matrices."
_SIZE = "LoraAdapter.size_bytes: size_bytes is what its weights take."

_MOST_LOADED = 64
_INVALID, _PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


@TOPIC.case(_NONE)
async def none_where_none_fit(bench: Bench) -> None:
    """An executor with max_adapters 0 refuses to load one, or has no such call."""
    if bench.info.max_adapters:
        raise CaseSkippedError("needs an executor that takes no adapters")
    request = pb.LoadAdapterRequest(name="adapter", source="kvplane-conformance/0")
    await bench.target.refused(bench.stub.LoadAdapter(request), _PRECONDITION, _NONE, may_lack=True)


@TOPIC.case(_LISTED)
async def loaded_and_listed(bench: Bench) -> None:
    """What was loaded is listed as it was answered, in order, until it is unloaded."""
    require_room(bench, 2)
    answers = [await load(bench, number, f"name {2 - number} \u00e9") for number in (0, 1)]
    for answer, name in zip(answers, ("name 2 \u00e9", "name 1 \u00e9"), strict=True):
        bench.equal(answer.name, name, _NAME)
        bench.true(answer.adapter_id >= 1, _ID, "at least 1", answer.adapter_id)
        bench.true(1 <= len(answer.revision) <= 256, _REVISION, "1 to 256 characters", answer.revision)
        bench.true(answer.rank >= 1, _RANK, "at least 1", answer.rank)
        bench.true(answer.size_bytes >= 1, _SIZE, "at least 1", answer.size_bytes)
    contract = "LoraAdapter.source: source is where it was loaded from."
    bench.equal([answer.source for answer in answers], [bench.sources.good(number) for number in (0, 1)], contract)
    bench.true(answers[0].adapter_id != answers[1].adapter_id, _ID, "two ids", answers[0].adapter_id)
    bench.true(answers[0].revision != answers[1].revision, _REVISION, "two digests", answers[0].revision)
    bench.equal(await listed(bench), answers, _LISTED)
    await unload(bench, answers[0].name)
    bench.equal(await listed(bench), answers[1:], _AWAY)


@TOPIC.case(_AGAIN)
async def loaded_again(bench: Bench) -> None:
    """A name that is loaded with the same content, at its revision or at any, gets the same answer."""
    require_room(bench, 1)
    first = await load(bench, 0)
    for revision in ("", first.revision):
        bench.equal(await load(bench, 0, revision=revision), first, _AGAIN)
    bench.equal(await listed(bench), [first], _AGAIN)


@TOPIC.case(_REVISION)
async def revision_of_the_content(bench: Bench) -> None:
    """The same content has the same revision under another name, and when it is loaded anew."""
    require_room(bench, 1)
    first = await load(bench, 0, "one")
    await unload(bench, "one")
    again = await load(bench, 0, "another", revision=first.revision)
    bench.equal(again.revision, first.revision, _REVISION)


@TOPIC.case(_ID)
async def ids_are_not_used_again(bench: Bench) -> None:
    """What is loaded anew has an id of its own; steps that name the old one are refused."""
    require_room(bench, 1)
    seen: list[Adapter] = []
    for number in (0, 1, 0):
        adapter = named(await load(bench, number, "adapter"))
        bench.true(adapter.adapter_id not in [one.adapter_id for one in seen], _ID, "an id not seen before",
                   adapter.adapter_id)  # fmt: skip
        seen.append(adapter)
        await bench.stream().step(bench.track(3, adapter=adapter).next())
        if len(seen) < 3:
            await unload(bench, "adapter")
    stream = bench.stream()
    await stream.send(bench.track(3, adapter=seen[0]).next())
    await stream.error(_PRECONDITION, _NOT_LOADED, step_id=1)


@TOPIC.case(_EXISTS)
async def name_of_other_content(bench: Bench) -> None:
    """A name that is loaded does not take other content: what is loaded stays, and computes what it did."""
    require_room(bench, 1)
    first = await load(bench, 0, "adapter")
    track = bench.track(bench.block_size + 1, adapter=named(first))
    stream = bench.stream()
    await stream.prefill(track)
    request = pb.LoadAdapterRequest(name="adapter", source=bench.sources.good(1))
    await bench.refused(bench.stub.LoadAdapter(request), grpc.StatusCode.ALREADY_EXISTS, _EXISTS)
    bench.equal(await listed(bench), [first], _EXISTS)
    await stream.decode(track, 2)


@TOPIC.case(_ANOTHER)
async def another_revision(bench: Bench) -> None:
    """Content that is not of the revision asked for is not loaded, be the name new or loaded."""
    require_room(bench, 1)
    first = await load(bench, 0)
    await unload(bench, first.name)
    wrong = pb.LoadAdapterRequest(name=first.name, source=first.source, revision=f"{first.revision}0"[-256:])
    await bench.refused(bench.stub.LoadAdapter(wrong), _INVALID, _ANOTHER)
    bench.equal(await listed(bench), [], _ANOTHER)
    again = await load(bench, 0)
    await bench.refused(bench.stub.LoadAdapter(wrong), _INVALID, _ANOTHER)
    bench.equal(await listed(bench), [again], _ANOTHER)


@TOPIC.case(_FULL)
async def one_more_than_fit(bench: Bench) -> None:
    """With max_adapters loaded another is refused, and one of those gets its answer again; when one goes, one comes."""
    most = bench.info.max_adapters
    require_room(bench, 1)
    if most > _MOST_LOADED:
        raise CaseSkippedError(f"needs an executor with room for at most {_MOST_LOADED} adapters, got {most}")
    loaded = [await load(bench, 0, f"adapter {number}") for number in range(most)]
    request = pb.LoadAdapterRequest(name="one more", source=bench.sources.good(0))
    await bench.refused(bench.stub.LoadAdapter(request), grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL)
    bench.equal(await load(bench, 0, "adapter 0"), loaded[0], _AGAIN)
    bench.equal(await listed(bench), loaded, _FULL)
    track = bench.track(bench.block_size + 1, adapter=named(loaded[0]))
    await bench.stream().prefill(track)
    await unload(bench, loaded[-1].name)
    await bench.call(bench.stub.LoadAdapter(request))


@TOPIC.case(_NOT_FOUND)
async def unloaded_twice(bench: Bench) -> None:
    """A name that is not loaded, or not any more, is NOT_FOUND."""
    require_room(bench, 1)
    loaded = await load(bench, 0)
    await unload(bench, loaded.name)
    for name in (loaded.name, "never loaded"):
        call = bench.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name))
        await bench.refused(call, grpc.StatusCode.NOT_FOUND, _NOT_FOUND)


@TOPIC.case(_FIELD)
async def fields_out_of_range(bench: Bench) -> None:
    """Names and sources that are empty or too long are refused; the longest name is not."""
    require_room(bench, 1)
    source = bench.sources.good(0)
    for name, where, contract in (
        ("", source, "LoadAdapterRequest.name: name to load it as, 1 to 256 characters."),
        ("n" * 257, source, "LoadAdapterRequest.name: name to load it as, 1 to 256 characters."),
        ("adapter", "", "LoadAdapterRequest.source: source is where the executor finds it, 1 to 4,096 characters"),
        ("adapter", "s" * 4097, "LoadAdapterRequest.source: source is where the executor finds it, 1 to 4,096"),
    ):
        call = bench.stub.LoadAdapter(pb.LoadAdapterRequest(name=name, source=where))
        await bench.refused(call, _INVALID, contract)
    bench.equal(await listed(bench), [], _FIELD)
    await load(bench, 0, "n" * 256)


@TOPIC.case(_NOT_LOADED)
async def unknown_in_a_step(bench: Bench) -> None:
    """A step that names an adapter that was never loaded is refused as a whole; what is in the cache stays."""
    resting = bench.track(bench.block_size + 1)
    await bench.stream().prefill(resting, tags={resting.blocks[0]: b"resting"})
    for first in (True, False):
        stream = bench.stream()
        if not first:
            await stream.decode(resting, 1)
        rows = [bench.track(3, salt=salt).next() for salt in (1, 2)]
        request = stream.build(*rows, tags={resting.blocks[0]: b"another"})
        request.adapter_ids.CopyFrom(column([0, 2**31 - 1]))
        await stream.write(request)
        await stream.error(_PRECONDITION, _NOT_LOADED, step_id=1 if first else 2)
    bench.equal(await bench.tags(), bench.tagged({resting.blocks[0]: b"resting"}), _NOT_LOADED)
    await bench.unharmed(resting)


@TOPIC.case(_ROWS)
async def zero_is_the_model_itself(bench: Bench) -> None:
    """A column of zeros names no adapter."""
    tracks = [bench.track(bench.block_size + salt, salt=salt) for salt in (1, 2)]
    stream = bench.stream()
    request = stream.build(*(track.next() for track in tracks))
    request.adapter_ids.CopyFrom(column([0, 0]))
    await stream.write(request)
    await stream.receive()


@TOPIC.case(_ROWS)
async def changes_the_output(bench: Bench) -> None:
    """Four prompts give other outputs with an adapter than without."""
    require_room(bench, 1)
    stream = bench.stream()
    outputs = []
    for adapter in (None, named(await load(bench, 0))):
        tracks = [bench.track(5, salt=salt, adapter=adapter) for salt in range(4)]
        outputs.append((await stream.step(*(track.next() for track in tracks))).outputs)
    bench.true(outputs[0] != outputs[1], _ROWS, "another output with the adapter", "the same, to the last bit")


@TOPIC.case(_ROWS)
async def rows_with_and_without(bench: Bench) -> None:
    """Rows with an adapter, with another and with none stand side by side, in all orders, as prompts and as decodes."""
    require_room(bench, 1)
    size = bench.block_size
    adapters: list[Adapter | None] = [None, named(await load(bench, 0))]
    if bench.info.max_adapters > 1:
        adapters.append(named(await load(bench, 1)))
    tracks = [
        bench.track(size + 1 + place, salt=place % 2, adapter=adapter)
        for place, adapter in enumerate([*adapters, *reversed(adapters)])
    ]
    stream = bench.stream()
    await stream.together(*tracks)
    for turn in range(1, 4):
        await stream.together(*tracks[turn:], *tracks[:turn])
    await stream.together(*tracks[1:], bench.track(2 * size, salt=9, adapter=adapters[1]))


@TOPIC.case(_ROWS)
async def chunked_and_fed(bench: Bench) -> None:
    """With an adapter, too, chunks give what the whole prompt gives, and samples are fed to the next step."""
    require_room(bench, 1)
    size = bench.block_size
    adapter = named(await load(bench, 0))
    track, plain = bench.track(2 * size + 1, adapter=adapter), bench.track(size, salt=1)
    stream = bench.stream()
    await stream.step(track.next(size, samples=()), plain.next(samples=()))
    await stream.send(track.next())
    for _ in range(3):
        await stream.send(track.fed(0), feeds=True)
        await stream.receive()
    await stream.receive()


@TOPIC.case(_LOADS)
async def cache_stays(bench: Bench) -> None:
    """Sequences go on, with an adapter and without, while another is loaded and unloaded between their steps."""
    require_room(bench, 1)
    adapter = named(await load(bench, 0)) if bench.info.max_adapters > 1 else None
    tracks = [bench.track(bench.block_size + 1), bench.track(bench.block_size + 1, salt=1, adapter=adapter)]
    stream = bench.stream()
    await stream.together(*tracks)
    other = await load(bench, 1 if adapter else 0, "other")
    await stream.together(*tracks)
    await unload(bench, other.name)
    await stream.together(*reversed(tracks))


@TOPIC.case(_AWAY)
async def base_after_unloading(bench: Bench) -> None:
    """When an adapter is gone, rows without one are the model's own again, in blocks that its rows had filled."""
    require_room(bench, 1)
    loaded = await load(bench, 0)
    stream = bench.stream()
    blocks = bench.blocks(4)
    track = bench.track(bench.block_size + 1, blocks=list(blocks), adapter=named(loaded))
    await stream.prefill(track)
    await stream.decode(track, 1)
    await unload(bench, loaded.name)
    base = bench.track(bench.block_size + 1, blocks=list(blocks))
    await stream.prefill(base)
    await stream.decode(base, 2)


@TOPIC.case(_AWAY)
async def stays_with_a_new_cache(bench: Bench) -> None:
    """Nothing but UnloadAdapter takes an adapter away: it is there after a Reset, and after a new cache."""
    require_room(bench, 1)
    loaded = await load(bench, 0)
    bench.epoch = (await bench.call(bench.stub.Reset(pb.ResetRequest(kv_epoch=bench.epoch)))).kv_cache.kv_epoch
    await bench.stream().prefill(bench.track(bench.block_size + 1, adapter=named(loaded)))
    sizes = await bench.cache()
    assert sizes is not None
    request = pb.InitializeKvCacheRequest(
        num_blocks=sizes.num_blocks, num_host_blocks=sizes.num_host_blocks, knows_group_block_sizes=True
    )
    bench.epoch = (await bench.call(bench.stub.InitializeKvCache(request))).kv_cache.kv_epoch
    bench.equal(await listed(bench), [loaded], _AWAY)
    track = bench.track(bench.block_size + 1, salt=1, adapter=named(loaded))
    stream = bench.stream()
    await stream.prefill(track)
    await stream.decode(track, 1)


@TOPIC.case(_AFTERWARDS)
async def unloaded_between_steps(bench: Bench) -> None:
    """A step that names what was unloaded is refused, and harms nothing."""
    require_room(bench, 1)
    loaded = await load(bench, 0)
    resting = bench.track(bench.block_size + 1)
    track = bench.track(bench.block_size + 1, salt=1, adapter=named(loaded))
    stream = bench.stream()
    await stream.together(resting, track)
    await unload(bench, loaded.name)
    await stream.send(track.next(samples=()))
    await stream.error(_PRECONDITION, _AFTERWARDS, step_id=2)
    await bench.unharmed(resting)


@TOPIC.case(_AFTERWARDS)
async def unloaded_with_steps_queued(bench: Bench) -> None:
    """An adapter is unloaded while steps that name it are queued: each is computed with it, or refused."""
    require_room(bench, 1)
    loaded = await load(bench, 0)
    resting = bench.track(bench.block_size + 1)
    stream = bench.stream()
    await stream.prefill(resting)
    for salt in range(1, 4):
        await stream.send(bench.track(2 * bench.block_size, salt=salt, adapter=named(loaded)).next())
    await unload(bench, loaded.name)
    await _answered_or_refused(stream, 3)
    bench.equal(await listed(bench), [], _AWAY)
    await bench.unharmed(resting)
    again = named(await load(bench, 0))
    await bench.stream().prefill(bench.track(bench.block_size, salt=1, adapter=again))


async def _answered_or_refused(stream: Stream, count: int) -> None:
    """Takes the answers of steps that name what is being unloaded."""
    for _ in range(count):
        if await stream.receive_unless(_PRECONDITION, _AFTERWARDS) is None:
            return
