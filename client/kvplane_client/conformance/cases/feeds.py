"""Feeds: a row's last token is a sample of the step before, which the client has not seen yet."""

from __future__ import annotations

import grpc

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import D2D, Row, column

TOPIC = Topic("feeds")

_FED = (
    "ExecuteRequest.feeds_from: an index into that step's sampled_token_ids whose token is the row's last input "
    "token, or -1 for a row that is not fed."
)
_IGNORED = "ExecuteRequest.token_ids: The value at a place that feeds_from fills is ignored."
_BEFORE = (
    "ExecuteRequest.feeds_from_step_id: It must be the step before this one on the stream; FAILED_PRECONDITION "
    "otherwise."
)
_FORKED = (
    "SamplingBatch.rows: A row may sample more than once: its sequence is forked there, and each branch has its own "
    "parameters and seed."
)
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
_INVALID = grpc.StatusCode.INVALID_ARGUMENT


@TOPIC.case(_FED)
async def chain_sent_ahead(bench: Bench) -> None:
    """A sequence decodes with each step sent before the token that it needs is known."""
    track = bench.track(bench.block_size)
    stream = bench.stream()
    await stream.send(track.next())
    for _ in range(8):
        await stream.send(track.fed(0), feeds=True)
        await stream.receive()
    await stream.receive()


@TOPIC.case(_FED)
async def crosswise(bench: Bench) -> None:
    """Rows are fed from samples in another order than theirs, beside rows that are not fed."""
    first, second, third = (bench.track(3 + salt, salt=salt) for salt in range(3))
    stream = bench.stream()
    await stream.send(first.next(), second.next())
    await stream.send(second.fed(1), third.next(), first.fed(0), feeds=True)
    await stream.send(first.fed(2), second.fed(0), third.fed(1), feeds=True)
    for _ in range(3):
        await stream.receive()


@TOPIC.case(_FED)
async def by_the_sample_of_another_row(bench: Bench) -> None:
    """A row may be fed a sample that another row produced."""
    first, second = bench.track(4, salt=1), bench.track(6, salt=2)
    stream = bench.stream()
    await stream.step(first.next(), second.next())
    await stream.step(first.fed(1), second.fed(0), feeds=True)
    await stream.step(first.fed(0), second.fed(0), feeds=True)


@TOPIC.case(_FED)
async def last_token_of_a_chunk(bench: Bench) -> None:
    """A row of several tokens is fed its last one."""
    first, second = bench.track(5, salt=1), bench.track(7, salt=2)
    stream = bench.stream()
    await stream.send(first.next())
    second.computed = 8
    await stream.send(Row(second, 0, 8, feed=0), feeds=True)
    await stream.receive()
    await stream.receive()


@TOPIC.case(_IGNORED)
async def value_there_is_ignored(bench: Bench) -> None:
    """Whatever stands at the place of a fed token is not looked at."""
    for value in (-1, 0, 2**31 - 1, -(2**31)):
        track = bench.track(3)
        stream = bench.stream()
        await stream.step(track.next())
        request = stream.build(track.fed(0), feeds=True)
        request.token_ids.CopyFrom(column([value]))
        await stream.write(request)
        await stream.receive()


@TOPIC.case(_FORKED)
async def forks(bench: Bench) -> None:
    """Two branches of one row go on from its samples, each in its own copy of the last block."""
    size = bench.block_size
    track = bench.track(size + 1, blocks=bench.blocks(4))
    stream = bench.stream()
    await stream.step(track.next(samples=(bench.greedy, bench.greedy)))
    branch = track.fork([track.blocks[0], *bench.blocks(3)])
    copies = [(D2D, track.blocks[1], branch.blocks[1])]
    await stream.step(track.fed(0), branch.fed(1), feeds=True, copies=copies)
    await stream.step(track.fed(0), branch.fed(1), feeds=True)


@TOPIC.case(_BEFORE)
async def not_the_step_before(bench: Bench) -> None:
    """A feed from an older step, or from one that is to come, is refused."""
    for wrong in (1, 4):
        stream = bench.stream()
        await stream.step(bench.track(3, blocks=[0, 1]).next())
        await stream.step(bench.track(3, salt=1, blocks=[2, 3]).next())
        track = bench.track(3, blocks=[0, 1])
        track.computed = 3
        request = stream.build(track.fed(0), feeds=True)
        request.feeds_from_step_id = wrong
        await stream.write(request)
        await stream.error(_PRECONDITION, _BEFORE, step_id=3)


@TOPIC.case(_BEFORE)
async def nothing_kept(bench: Bench) -> None:
    """The first step of a stream is fed by none, not by the last one of another stream."""
    track = bench.track(3)
    older = bench.stream()
    await older.step(track.next())
    for named in (0, 1):
        stream = bench.stream()
        again = bench.track(3, blocks=track.blocks)
        again.computed = 3
        request = stream.build(again.fed(0))
        request.feeds_from_step_id = named
        await stream.write(request)
        await stream.error(_PRECONDITION, _BEFORE, step_id=1)


@TOPIC.case(_FED)
async def sample_that_is_not_there(bench: Bench) -> None:
    """An index beyond the samples of the step before is refused, and so is another number of values than rows."""
    for wrong in ([1], [2**31 - 1], [-2], [0, 0]):
        track = bench.track(3, blocks=[0, 1])
        stream = bench.stream()
        await stream.step(track.next())
        request = stream.build(track.fed(0), feeds=True)
        request.feeds_from.CopyFrom(column(wrong))
        await stream.write(request)
        await stream.error(_INVALID, _FED, step_id=2)
