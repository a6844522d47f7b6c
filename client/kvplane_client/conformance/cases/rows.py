"""Rows of a step are independent: neighbours, their number and their order change nothing."""

from __future__ import annotations

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import Sample, greedy
from kvplane_client.conformance.target import MAX_SEQS

TOPIC = Topic("rows")

_SAMPLES = "ExecuteResponse.sampled_token_ids: sampled_token_ids has S values, in the order of SamplingBatch.rows"
_LEN = "SamplingBatch.rows: rows has S values: the rows that sample after their last token, never falling."
_STEP = "ExecuteRequest: ExecuteRequest is one step: R rows, each the next tokens of one sequence."
_ALONE = (
    "ExecuteResponse.row_errors: row_errors are rows that failed alone, such as non-finite logits; the others are good."
)
_FOR_ALL = "SamplingBatch.rows: A row that fails fails for all of them."
_FED = 'RowError.reason: "FED_BY_FAILED_ROW"'


@TOPIC.case(_STEP)
async def batch_of_prompts(bench: Bench) -> None:
    """Prompts of different lengths in one step give what each gives alone."""
    tracks = [bench.track(1 + salt * bench.block_size // 3, salt=salt) for salt in range(6)]
    await bench.stream().step(*(track.next() for track in tracks))


@TOPIC.case(_STEP)
async def batch_decodes(bench: Bench) -> None:
    """Sequences of different lengths decode together, and change places between steps."""
    stream = bench.stream()
    tracks = [bench.track(1 + salt * bench.block_size // 4, salt=salt) for salt in range(MAX_SEQS)]
    for track in tracks:
        await stream.prefill(track)
    for turn in range(4):
        await stream.together(*tracks[turn:], *tracks[:turn])


@TOPIC.case(_LEN)
async def few_rows_sample(bench: Bench) -> None:
    """Samples come from the rows that they name, and no others."""
    stream = bench.stream()
    tracks = [bench.track(2 + salt, salt=salt) for salt in range(5)]
    rows = [track.next() if index in (1, 4) else track.next(samples=()) for index, track in enumerate(tracks)]
    await stream.step(*rows)
    await stream.step(*(bench.track(3, salt=salt, blocks=[salt]).next(samples=()) for salt in range(3)))


@TOPIC.case(_SAMPLES)
async def row_sampled_often(bench: Bench) -> None:
    """A row that samples more than once gives the same greedy token each time."""
    tracks = [bench.track(bench.block_size + 1, salt=salt) for salt in range(3)]
    samples = [(bench.greedy,), (bench.greedy,) * 3, (bench.greedy,) * 2]
    rows = [track.next(samples=some) for track, some in zip(tracks, samples, strict=True)]
    await bench.stream().step(*rows)


@TOPIC.case(_ALONE)
async def row_that_fails_alone(bench: Bench) -> None:
    """A row of which every token is suppressed fails; those beside it do not, and go on."""
    tracks = [bench.track(bench.block_size + salt, salt=salt) for salt in range(3)]
    stream = bench.stream()
    rows = [track.next(samples=[_impossible(bench)] if place == 1 else None) for place, track in enumerate(tracks)]
    answer = await stream.step(*rows, fails=[1])
    good = [tracks[0], tracks[2]]
    for track, token in zip(good, (answer.tokens[0], answer.tokens[2]), strict=True):
        track.tokens.append(token)
    await stream.together(*good)


@TOPIC.case(_FOR_ALL)
async def row_fails_for_all_its_samples(bench: Bench) -> None:
    """A row samples three times, once of no token: it fails as a whole, and the row behind it does not."""
    first, second = (bench.track(bench.block_size + salt, salt=salt) for salt in (1, 2))
    samples = [Sample(greedy()), _impossible(bench), Sample(greedy())]
    stream = bench.stream()
    await stream.step(first.next(samples=samples), second.next(), fails=[0])


@TOPIC.case(_FED)
async def fed_by_a_failed_row(bench: Bench) -> None:
    """A row whose token failed to come fails, too, with the reason that says so; one that is fed well does not."""
    first, second = (bench.track(bench.block_size + salt, salt=salt) for salt in (1, 2))
    stream = bench.stream()
    await stream.send(first.next(), second.next(samples=[_impossible(bench)]), fails=[1])
    await stream.send(first.fed(0), second.fed(1), feeds=True, fails=[1])
    await stream.receive()
    answer = await stream.receive()
    bench.equal([error.reason for error in answer.response.row_errors], ["FED_BY_FAILED_ROW"], _FED)
    await stream.step(first.fed(0), feeds=True)


def _impossible(bench: Bench) -> Sample:
    """A sample of no token."""
    params = greedy()
    params.suppressed_token_ids.extend(range(bench.info.vocab_size))
    return Sample(params)
