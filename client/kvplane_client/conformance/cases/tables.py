"""Block tables: where K/V lies must make no difference, and what other slots hold must make none."""

from __future__ import annotations

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.outcome import CaseFailedError, CaseSkippedError
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import Track

TOPIC = Topic("tables")

_SLOT = (
    "ExecuteRequest: The slot of position p in row r is block_ids[block_indptr[r] + p / block_size] * block_size + p % "
    "block_size."
)
_TABLE = "BlockTables.block_ids: Exactly those that hold the row's sequence up to and with this step's tokens."
_LAST = (
    "BlockTables.last_block_len: last_block_len has R values in [1, block_size]: how many slots of the row's last "
    "block are in use after this step."
)
_RANGE = (
    "BlockTables.block_ids: block_ids are the blocks of row r at block_indptr[r] to block_indptr[r + 1], each in "
    "[1, num_blocks)."
)
_SHARED = (
    "ExecuteRequest: Every layer writes the K/V of all rows before any row attends, so a row may read blocks that "
    "another row of the same step fills."
)


@TOPIC.case(_SLOT)
async def shuffled(bench: Bench) -> None:
    """Blocks in order, backwards and in no order."""
    stream = bench.stream()
    for blocks in ([0, 1, 2, 3, 4], [14, 13, 12, 11, 10], [27, 21, 25, 20, 24]):
        track = bench.track(2 * bench.block_size + 1, blocks=blocks)
        await stream.prefill(track)
        await stream.decode(track, bench.block_size + 1)


@TOPIC.case(_RANGE)
async def first_and_last_block(bench: Bench) -> None:
    """The lowest and the highest block of the cache are used like any other."""
    highest = bench.geometry.num_blocks - 1
    track = bench.track(bench.block_size + 1, blocks=[highest, 0, highest - 1])
    stream = bench.stream()
    await stream.prefill(track)
    await stream.decode(track, bench.block_size)


@TOPIC.case(_LAST)
async def every_last_block_len(bench: Bench) -> None:
    """Prompts that fill their last block to any extent."""
    size = bench.block_size
    stream = bench.stream()
    fills = range(1, size + 1) if size <= 16 else (1, 2, size // 2, size - 1, size)
    for fill in fills:
        track = bench.track(size + fill, blocks=[3, 9])
        await stream.step(track.next())


@TOPIC.case(_LAST)
async def decode_over_a_border(bench: Bench) -> None:
    """A sequence grows by single tokens out of one block, through the next, into a third."""
    track = bench.track(max(1, bench.block_size - 1))
    stream = bench.stream()
    await stream.prefill(track)
    await stream.decode(track, min(bench.block_size + 3, 40))


@TOPIC.case(_LAST)
async def stale_slots(bench: Bench) -> None:
    """Blocks hold the K/V of a longer sequence that is over: what is beyond last_block_len is not read."""
    blocks = bench.blocks(4)
    size = bench.block_size
    stream = bench.stream()
    await stream.step(bench.track(3 * size, salt=1, blocks=blocks).next())
    track = bench.track(size + 1, salt=2, blocks=blocks)
    await stream.prefill(track)
    await stream.decode(track, 3)


@TOPIC.case(_SLOT)
async def single_token(bench: Bench) -> None:
    """The smallest step: one row of one token, a table of one block."""
    track = bench.track(1)
    stream = bench.stream()
    await stream.prefill(track)
    await stream.decode(track, 1)


@TOPIC.case(_SHARED)
async def shared_prefix_filled_before(bench: Bench) -> None:
    """Sequences go on from a prefix that an earlier step filled; its blocks stay as they are."""
    size = bench.block_size
    prefix = bench.track(2 * size, blocks=bench.blocks(3))
    stream = bench.stream()
    await stream.prefill(prefix)
    tails = [_continued(bench, prefix, salt) for salt in (1, 2, 3)]
    await stream.together(*tails)
    await stream.together(*tails, prefix)
    again = _continued(bench, prefix, 4)
    await stream.prefill(again)


@TOPIC.case(_SHARED)
async def shared_prefix_filled_now(bench: Bench) -> None:
    """A prefix is filled by the last row of the step whose first rows read it."""
    _require_no_states(bench)
    size = bench.block_size
    prefix = bench.track(2 * size, blocks=bench.blocks(3))
    tails = [_continued(bench, prefix, salt) for salt in (1, 2)]
    stream = bench.stream()
    await stream.step(*(track.next() for track in tails), prefix.next())


@TOPIC.case(_SHARED)
async def prompt_cut_into_rows(bench: Bench) -> None:
    """One sequence's chunks are the rows of one step, the later ones first."""
    _require_no_states(bench)
    size = bench.block_size
    track = bench.track(3 * size)
    rows = [track.next(size), track.next(size), track.next(size)]
    await bench.stream().step(*reversed(rows))


@TOPIC.case(_TABLE)
async def rows_of_many_shapes(bench: Bench) -> None:
    """Prefills, chunks and decodes of all lengths side by side; some rows do not sample."""
    size = bench.block_size
    stream = bench.stream()
    running = [bench.track(length, salt=length) for length in (1, size, size + 1)]
    for track in running:
        await stream.prefill(track)
    chunked = bench.track(2 * size + 1, salt=3)
    rows = [running[0].next(), chunked.next(size, samples=()), running[1].next(), running[2].next()]
    answer = await stream.step(*rows, bench.track(size, salt=5).next(samples=()), bench.track(1, salt=6).next())
    for track, token in zip(running, answer.tokens, strict=False):
        track.tokens.append(token)
    await stream.step(chunked.next(), *(track.next() for track in reversed(running)))


@TOPIC.case(_SLOT)
async def every_token_counts(bench: Bench) -> None:
    """Another token anywhere in the sequence gives another output: every slot of the table is read."""
    if bench.info.max_logprobs < 1:
        raise CaseSkippedError("needs log probabilities to see a difference that does not change the likeliest token")
    size = bench.block_size
    length = 2 * size + max(1, size // 2)
    stream = bench.stream()
    base = bench.track(length, blocks=[1, 2, 3])
    unchanged = (await stream.step(base.next())).outputs[0].logprobs
    geometry = bench.geometry
    first_read = min(geometry.first_position(group, length - 1) for group in range(geometry.num_groups))
    for place in sorted({0, size - 1, size, 2 * size - 1, 2 * size, length - 1}):
        if place < first_read:  # what lies before a window need not show, and does through several layers
            continue
        track = bench.track(length, blocks=[1, 2, 3])
        track.tokens[place] = (track.tokens[place] + 1) % bench.info.vocab_size
        # The K/V first, then the last token alone: it finds the others through the table only.
        if length > 1:
            await stream.step(track.next(length - 1, samples=()))
        changed = (await stream.step(track.next())).outputs[0].logprobs
        if changed == unchanged:
            raise CaseFailedError(
                _TABLE, f"another output where token {place} of {length} is another", "the same, to the last bit"
            )


def _require_no_states(bench: Bench) -> None:
    """Raises CaseSkippedError for a model of whose steps no row may start from what another leaves."""
    if bench.geometry.states:
        raise CaseSkippedError("needs a model whose layers keep no state")


def _continued(bench: Bench, prefix: Track, salt: int) -> Track:
    """A sequence that shares two whole blocks with a prefix, and has a few tokens more."""
    size = bench.block_size
    tail = bench.prompt(salt + 1, salt=100 + salt)
    return Track(prefix.tokens[: 2 * size] + tail, prefix.blocks[:2] + bench.blocks(salt // size + 3), 2 * size)
