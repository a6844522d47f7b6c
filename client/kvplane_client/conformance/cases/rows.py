"""Rows of a step are independent: neighbours, their number and their order change nothing."""

from __future__ import annotations

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.target import MAX_SEQS

TOPIC = Topic("rows")

_SAMPLES = "ExecuteResponse.sampled_token_ids: sampled_token_ids has S values, in the order of SamplingBatch.rows"
_LEN = "SamplingBatch.rows: rows has S values: the rows that sample after their last token, never falling."
_STEP = "ExecuteRequest: ExecuteRequest is one step: R rows, each the next tokens of one sequence."


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
