"""From an `ExecuteRequest` to the arrays a backend runs, in two halves.

Station: `parse_step` is called by `step_runner` when a request is read, while the step before it still computes;
`fill_batch` when the step is taken up, since only then the tokens of the step before are known. Checks every sentence
of the contract that the arrays alone can break; epoch and order are `step_runner`'s. Knows no request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.array_checks import frozen, int32_column, require_indptr, require_length, require_range
from executor_service.backends.base import (
    STATE,
    GroupTables,
    Int32,
    PenaltyHistory,
    SamplingBatch,
    StepBatch,
    chunk_size,
    first_read,
)
from executor_service.block_copies import NO_COPIES, StepCopies, parse_copies
from executor_service.block_tags import MAX_TAG_BYTES
from executor_service.errors import InvalidFieldError
from executor_service.sampling_input import SamplingParser

__all__ = ["ParsedStep", "StepLimits", "fill_batch", "parse_step"]


@dataclass(frozen=True)
class StepLimits:
    """What a step is checked against; one object for the life of an epoch.

    Units:
        max_model_len, max_num_batched_tokens: tokens; max_num_seqs: rows, and samples; num_blocks includes the null
        block; windows, group_block_sizes: one value for each KV group, as `KvGroupSpec.window` and tokens per block;
        block_size: tokens per block of groups that have none of their own, for those who ask.
    """

    kv_epoch: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    windows: tuple[int, ...]
    group_block_sizes: tuple[int, ...]
    max_num_batched_tokens: int
    max_num_seqs: int
    sampling: SamplingParser


@dataclass(frozen=True)
class ParsedStep:
    """A checked step that still lacks the tokens fed from the step before.

    Shape:
        as in `StepBatch`, but that adapters may not be loaded; fed_rows, fed_places, feed_index: (F,), the rows that
        are fed, where in token_ids, and from which sampled token; written_blocks: (groups * T,), what the rows write,
        repeats allowed.

    Invariants:
        feeds_in_order: every token of the step is fed, the i-th from sample i, as in most steps that only decode.
        token_ids is private and writable when rows are fed, with 0 at their places; all else is read-only.
    """

    query_indptr: Int32
    token_ids: Int32
    positions: Int32
    seq_lens: Int32
    tables: Sequence[GroupTables]
    slot_mappings: Sequence[npt.NDArray[np.int64]]
    written_blocks: npt.NDArray[np.int64]
    fed_rows: npt.NDArray[np.int64]
    fed_places: Int32
    feed_index: Int32
    feeds_in_order: bool
    sampling: SamplingBatch | None
    copies: StepCopies
    tag_block_ids: Sequence[int]
    tags: Sequence[bytes]
    adapter_ids: Int32 | None


def parse_step(request: pb.ExecuteRequest, limits: StepLimits) -> ParsedStep:
    """Check a step's arrays and lay them out for the backend.

    Raises:
        InvalidFieldError: names the first field found to break the contract.
    """
    query_indptr, token_ids = _rows(request, limits)
    num_rows = len(query_indptr) - 1
    fed_rows, feed_index = _feeds(request, num_rows)
    fed_places = query_indptr[fed_rows + 1] - np.int32(1)
    if len(fed_rows):
        token_ids = token_ids.copy()
        token_ids[fed_places] = 0
    require_range(token_ids, 0, limits.vocab_size, "token_ids")
    positions = _positions(request, query_indptr, limits)
    seq_lens = frozen(positions[query_indptr[1:] - 1] + np.int32(1))
    starts = positions[query_indptr[:-1]]
    tables = _tables(request, seq_lens, starts, limits)
    row_of_token = np.repeat(np.arange(num_rows), np.diff(query_indptr))
    sizes = limits.group_block_sizes
    slots = [_slots(index, table, positions, row_of_token, sizes[index]) for index, table in enumerate(tables)]
    written = [of_group // size for of_group, size in zip(slots, sizes, strict=True)]
    if len(written) > 1:
        _require_blocks_of_one_group(written)
    for index, window in enumerate(limits.windows):
        if window == STATE and num_rows:
            sources = _sources(tables[index], starts, sizes[index])
            _require_states_of_one_row(index, written[index], row_of_token, sources)
    tag_block_ids, tags = _tags(request, limits)
    return ParsedStep(
        query_indptr=query_indptr,
        token_ids=token_ids,
        positions=positions,
        seq_lens=seq_lens,
        tables=tables,
        slot_mappings=slots,
        written_blocks=frozen(np.concatenate(written)),
        fed_rows=fed_rows,
        fed_places=fed_places,
        feed_index=feed_index,
        feeds_in_order=len(feed_index) == len(token_ids) and bool((feed_index == np.arange(len(feed_index))).all()),
        sampling=_sampling(request, seq_lens, limits),
        copies=_copies(request, limits),
        tag_block_ids=tag_block_ids,
        tags=tags,
        adapter_ids=_adapter_ids(request, num_rows),
    )


def fill_batch(step_id: int, step: ParsedStep, sampled_before: Int32) -> tuple[StepBatch, list[int]]:
    """Put the tokens of the step before into their places.

    Args:
        step_id: the step's.
        step: what `parse_step` returned; its token_ids are filled in place.
        sampled_before: (S',) tokens sampled by the step before, -1 where a row failed.

    Returns:
        The batch, and the rows fed by a row that failed: they run with token 0 and their result means nothing.

    Raises:
        InvalidFieldError: feeds_from names a token the step before did not sample.
    """
    sampling = step.sampling
    failed: list[int] = []
    if len(step.fed_rows):
        # The backend waits for this: no more array calls than it takes. Indexing by an array lets go of the interpreter
        # lock, and the event loop, just woken, would keep it for as long as it builds a response; a slice does not.
        num_fed = len(step.feed_index)
        in_order = step.feeds_in_order and num_fed <= len(sampled_before)
        try:
            tokens = sampled_before[:num_fed] if in_order else sampled_before[step.feed_index]
        except IndexError:
            raise _not_sampled(step, len(sampled_before)) from None
        if tokens.min() < 0:
            failed = step.fed_rows[tokens < 0].tolist()
            tokens = np.maximum(tokens, 0)
        if in_order:
            step.token_ids[:] = tokens
        else:
            step.token_ids[step.fed_places] = tokens
        if sampling is not None and sampling.histories:
            fed = dict(zip(step.fed_rows.tolist(), tokens.tolist(), strict=True))
            sampling = dataclasses.replace(sampling, histories=_extended(sampling, fed))
    batch = StepBatch(
        step_id=step_id,
        query_indptr=step.query_indptr,
        token_ids=frozen(step.token_ids),
        positions=step.positions,
        seq_lens=step.seq_lens,
        tables=step.tables,
        slot_mappings=step.slot_mappings,
        sampling=sampling,
        adapter_ids=step.adapter_ids,
    )
    return batch, failed


def _rows(request: pb.ExecuteRequest, limits: StepLimits) -> tuple[Int32, Int32]:
    """Check query_indptr and the number of tokens."""
    query_indptr = int32_column(request.query_indptr, "query_indptr")
    token_ids = int32_column(request.token_ids, "token_ids")
    num_rows = len(query_indptr) - 1
    if not 0 <= num_rows <= limits.max_num_seqs:
        expected = f"1 to {limits.max_num_seqs + 1} values (max_num_seqs as profiled, plus 1)"
        raise InvalidFieldError("query_indptr", expected, f"{num_rows + 1} values")
    if len(token_ids) > limits.max_num_batched_tokens:
        expected = f"at most {limits.max_num_batched_tokens} values (max_num_batched_tokens as profiled)"
        raise InvalidFieldError("token_ids", expected, f"{len(token_ids)} values")
    require_indptr(query_indptr, num_rows + 1, len(token_ids), "query_indptr", strictly=True)
    return query_indptr, token_ids


def _feeds(request: pb.ExecuteRequest, num_rows: int) -> tuple[npt.NDArray[np.int64], Int32]:
    """Return the rows that are fed, and from which index; its upper bound is known only later."""
    feeds_from = int32_column(request.feeds_from, "feeds_from")
    if len(feeds_from):
        require_length(feeds_from, num_rows, "feeds_from")
        require_range(feeds_from, -1, 2**31, "feeds_from")
    fed_rows = np.flatnonzero(feeds_from >= 0)
    return fed_rows, feeds_from[fed_rows]


def _adapter_ids(request: pb.ExecuteRequest, num_rows: int) -> Int32 | None:
    """Return which adapter each row has; None where none has one."""
    adapter_ids = int32_column(request.adapter_ids, "adapter_ids")
    if not len(adapter_ids):
        return None
    require_length(adapter_ids, num_rows, "adapter_ids")
    require_range(adapter_ids, 0, 2**31, "adapter_ids")
    return adapter_ids if adapter_ids.any() else None


def _positions(request: pb.ExecuteRequest, query_indptr: Int32, limits: StepLimits) -> Int32:
    """Check that positions are in the model's range and consecutive within each row."""
    positions = int32_column(request.positions, "positions")
    require_length(positions, int(query_indptr[-1]), "positions")
    require_range(positions, 0, limits.max_model_len, "positions")
    if len(positions) > len(query_indptr) - 1:
        follows = positions[1:] == positions[:-1] + 1
        follows[query_indptr[1:-1] - 1] = True
        if not follows.all():
            place = int(np.argmin(follows)) + 1
            expected = f"{int(positions[place - 1]) + 1}, consecutive within a row"
            raise InvalidFieldError(f"positions[{place}]", expected, int(positions[place]))
    return positions


def _tables(request: pb.ExecuteRequest, seq_lens: Int32, starts: Int32, limits: StepLimits) -> list[GroupTables]:
    """Check one table per KV group and row, of exactly the blocks that hold the row's sequence."""
    num_groups = len(limits.windows)
    if len(request.block_tables) != num_groups:
        expected = f"{num_groups} entries, one for each KV group"
        raise InvalidFieldError("block_tables", expected, f"{len(request.block_tables)} entries")
    # By size: groups are many and sizes few.
    needed = {size: (seq_lens - 1) // np.int32(size) + 1 for size in limits.group_block_sizes}
    return [
        _table(
            message,
            f"block_tables[{index}]",
            seq_lens=seq_lens,
            starts=starts,
            blocks_needed=needed[size],
            window=window,
            block_size=size,
            num_blocks=limits.num_blocks,
        )
        for index, (message, window, size) in enumerate(
            zip(request.block_tables, limits.windows, limits.group_block_sizes, strict=True)
        )
    ]


def _table(
    message: pb.BlockTables,
    field: str,
    *,
    seq_lens: Int32,
    starts: Int32,
    blocks_needed: Int32,
    window: int,
    block_size: int,
    num_blocks: int,
) -> GroupTables:
    """Check the tables of one group; `starts` are the positions of the rows' first tokens."""
    block_ids = int32_column(message.block_ids, f"{field}.block_ids")
    indptr = int32_column(message.block_indptr, f"{field}.block_indptr")
    require_indptr(indptr, len(seq_lens) + 1, len(block_ids), f"{field}.block_indptr", strictly=False)
    lengths = indptr[1:] - indptr[:-1]
    if (lengths != blocks_needed).any():
        row = int(np.argmax(lengths != blocks_needed))
        expected = (
            f"{int(blocks_needed[row])} blocks for row {row} (sequence of {int(seq_lens[row])} tokens, "
            f"block_size {block_size})"
        )
        raise InvalidFieldError(f"{field}.block_indptr", expected, f"{int(lengths[row])} blocks")
    require_range(block_ids, 0 if window else 1, num_blocks, f"{field}.block_ids")
    if window:
        _require_window(block_ids, indptr, f"{field}.block_ids", starts=starts, window=window, block_size=block_size)
    last_block_len = int32_column(message.last_block_len, f"{field}.last_block_len")
    require_length(last_block_len, len(seq_lens), f"{field}.last_block_len")
    lens_needed = (seq_lens - 1) % np.int32(block_size) + 1
    if (last_block_len != lens_needed).any():
        row = int(np.argmax(last_block_len != lens_needed))
        expected = f"{int(lens_needed[row])} (sequence of {int(seq_lens[row])} tokens, block_size {block_size})"
        raise InvalidFieldError(f"{field}.last_block_len[{row}]", expected, int(last_block_len[row]))
    return GroupTables(indptr, block_ids, last_block_len)


def _require_window(
    block_ids: Int32, indptr: Int32, field: str, *, starts: Int32, window: int, block_size: int
) -> None:
    """Check that no table has the null block where a token of the row reads or writes."""
    nulls = np.flatnonzero(block_ids == 0)
    if not len(nulls):
        return
    rows = np.searchsorted(indptr, nulls, side="right") - 1
    first = first_read(starts[rows], window)
    needed = nulls - indptr[rows] >= first // np.int32(block_size)
    if needed.any():
        place = int(np.argmax(needed))
        row, start = int(rows[place]), int(starts[rows[place]])
        raise InvalidFieldError(
            f"{field}[{int(nulls[place])}]",
            f"a block in [1, num_blocks) for positions from {int(first[place])} on, which row {row} reads from "
            f"position {start} with {_described(window)}",
            "the null block, 0",
        )


def _described(window: int) -> str:
    """How a group other than of full attention is told of."""
    if window == STATE:
        return "a state"
    size = chunk_size(window)
    return f"chunks of {size}" if size else f"a window of {window}"


def _require_blocks_of_one_group(written_blocks: list[npt.NDArray[np.int64]]) -> None:
    """Check that no block is written in two groups. Shape: (T,) for each."""
    written = np.sort(np.concatenate([np.unique(blocks) for blocks in written_blocks]))
    twice = written[1:] == written[:-1]
    if twice.any():
        raise InvalidFieldError(
            "block_tables",
            "every block written in one KV group",
            f"block {int(written[np.argmax(twice)])} in two",
        )


def _sources(table: GroupTables, starts: Int32, block_size: int) -> npt.NDArray[np.int64]:
    """The block whose state each row starts from, -1 for none; `starts` are the rows' first positions. Shape: (R,)."""
    entries = table.block_indptr[:-1] + np.maximum(starts - 1, 0) // np.int32(block_size)
    return np.where(starts > 0, table.block_ids[entries].astype(np.int64), -1)


def _require_states_of_one_row(
    group: int,
    blocks: npt.NDArray[np.int64],
    row_of_token: npt.NDArray[np.int64],
    sources: npt.NDArray[np.int64],
) -> None:
    """Check that no block in which a row leaves a state is another row's, to start from or to leave one in.

    What one row would find there depends on when the other is computed.

    Args:
        group: the KV group.
        blocks: (T,) the block of each token's position.
        row_of_token: (T,) the row of each token.
        sources: (R,) what `_sources` returned.
    """
    written, place = np.unique(blocks, return_index=True)
    writer = row_of_token[place]
    used = np.concatenate([blocks, sources])
    user = np.concatenate([row_of_token, np.arange(len(sources))])
    where = np.minimum(np.searchsorted(written, used), len(written) - 1)
    shared = (written[where] == used) & (writer[where] != user)
    if shared.any():
        index = int(np.argmax(shared))
        raise InvalidFieldError(
            f"block_tables[{group}].block_ids",
            "every block in which a row leaves a state used by no other row",
            f"block {int(used[index])} in rows {int(writer[where[index]])} and {int(user[index])}",
        )


def _slots(
    group: int, table: GroupTables, positions: Int32, row_of_token: npt.NDArray[np.int64], block_size: int
) -> npt.NDArray[np.int64]:
    """Return the slot of each token; two tokens never write the same one."""
    places = table.block_indptr[row_of_token] + positions // np.int32(block_size)
    slots = table.block_ids[places].astype(np.int64) * block_size + positions % np.int32(block_size)
    ordered = np.sort(slots)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        block, offset = divmod(int(ordered[np.argmax(twice)]), block_size)
        raise InvalidFieldError(
            f"block_tables[{group}].block_ids",
            "every slot written by one token of the step",
            f"two tokens for offset {offset} of block {block}",
        )
    return frozen(slots)


def _sampling(request: pb.ExecuteRequest, seq_lens: Int32, limits: StepLimits) -> SamplingBatch | None:
    """Check the sampling part, if there is one."""
    if not request.HasField("sampling"):
        return None
    return limits.sampling.parse(request.sampling, seq_lens, limits.max_num_seqs)


def _copies(request: pb.ExecuteRequest, limits: StepLimits) -> StepCopies:
    """Check the copies, if there are any."""
    if not request.HasField("copies"):
        return NO_COPIES
    return parse_copies(request.copies, limits.num_blocks, limits.num_host_blocks)


def _tags(request: pb.ExecuteRequest, limits: StepLimits) -> tuple[list[int], list[bytes]]:
    """Check the tags to store."""
    if not request.HasField("block_tags"):
        return [], []
    block_ids = int32_column(request.block_tags.block_ids, "block_tags.block_ids")
    tags = list(request.block_tags.tags)
    require_length(block_ids, len(tags), "block_tags.block_ids")
    require_range(block_ids, 1, limits.num_blocks, "block_tags.block_ids")
    for index, tag in enumerate(tags):
        if len(tag) > MAX_TAG_BYTES:
            raise InvalidFieldError(f"block_tags.tags[{index}]", f"at most {MAX_TAG_BYTES} bytes", f"{len(tag)} bytes")
    return block_ids.tolist(), tags


def _not_sampled(step: ParsedStep, num_sampled: int) -> InvalidFieldError:
    """Name the first of the feeds that names a token which the step before did not sample."""
    place = int(np.argmax(step.feed_index >= num_sampled))
    expected = f"-1 or an index into the {num_sampled} tokens of the step before"
    return InvalidFieldError(f"feeds_from[{int(step.fed_rows[place])}]", expected, int(step.feed_index[place]))


def _extended(sampling: SamplingBatch, fed: dict[int, int]) -> dict[int, PenaltyHistory]:
    """Append to each history the token its row was fed."""
    return {
        sample: PenaltyHistory(frozen(np.append(history.token_ids, np.int32(fed[row]))), history.prompt_len)
        if (row := int(sampling.rows[sample])) in fed
        else history
        for sample, history in sampling.histories.items()
    }
