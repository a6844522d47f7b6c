"""Steps that break the contract: each is refused with an error that names the step, and harms nothing.

Each case spoils one thing in a good step of two rows. Beside it, a sequence rests in the cache; afterwards it goes on,
on another stream. One that is wrong in a way that no sentence allows must not be answered, must not end the process,
and must not write: another sequence's K/V may be where its numbers point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.registry import Topic
from kvplane_client.conformance.steps import column, values_of
from kvplane_client.conformance.target import MAX_SEQS

TOPIC = Topic("malformed")

_INVALID = "ExecutorService.Execute: INVALID_ARGUMENT for a malformed step"
_BYTES = "Int32Array.data: Its length is a multiple of 4; anything else is INVALID_ARGUMENT."
_QUERY = "ExecuteRequest.query_indptr: query_indptr has R + 1 values, from 0 and strictly growing"
_MOST = "ExecuteRequest.query_indptr: At most max_num_seqs rows and max_num_batched_tokens tokens as profiled."
_TOKENS = "ExecuteRequest.token_ids: token_ids are the input tokens of all rows, each in [0, vocab_size)."
_POSITIONS = (
    "ExecuteRequest.positions: positions are the tokens' positions in their sequences; consecutive within a row."
)
_TABLES = "ExecuteRequest.block_tables: block_tables has one entry for each KV group"
_BORDERS = "BlockTables.block_indptr: block_indptr has R + 1 values, from 0 and never falling."
_IDS = (
    "BlockTables.block_ids: block_ids are the blocks of row r at block_indptr[r] to block_indptr[r + 1], each in [1, "
    "num_blocks)."
)
_EXACTLY = "BlockTables.block_ids: Exactly those that hold the row's sequence up to and with this step's tokens."
_LAST = "BlockTables.last_block_len: last_block_len has R values in [1, block_size]"
_FEEDS = "ExecuteRequest.feeds_from: feeds_from has R values, or none when no row is fed"
_ADAPTERS = "ExecuteRequest.adapter_ids: adapter_ids has R values, or none when no row has an adapter"
_ROWS = "SamplingBatch.rows: rows has S values: the rows that sample after their last token, never falling."
_INDEX = "SamplingBatch.params_index: params_index has S values: which of params each sampling row uses."
_SEEDS = "SamplingBatch.seeds: seeds has S values"
_SAMPLES = "SamplingBatch: S is at most max_num_seqs as profiled."
_LOGPROBS = "GetModelInfoResponse.max_logprobs: max_logprobs is the most top log probabilities a row may ask for."
_HISTORIES = "PenaltyHistories.sample_index: Every sample whose params have a penalty must be here."
_HISTORY_INDEX = (
    "PenaltyHistories.sample_index: sample_index has P values: indices into SamplingBatch.rows, strictly growing."
)
_TAGS = "BlockTags.tags: tags has one entry for each of block_ids"
_TAGGED = "BlockTags.block_ids: block_ids are the blocks, each in [1, num_blocks)."
_COPIES = (
    "BlockCopies: Errors: INVALID_ARGUMENT for columns of other lengths than each other, an unknown direction, an "
    "id out of range, or a block copied to itself; then nothing is copied."
)
_FAR = 2**31 - 1


@dataclass(frozen=True)
class _Sizes:
    """What wrong numbers depend on.

    Attributes:
        blocks: Physical, the null block included.
        resting: A block of the sequence that rests, in the group.
        group: The KV group whose table is spoiled: the first one's, then the last one's.
    """

    block_size: int
    blocks: int
    host_blocks: int
    vocab_size: int
    max_batched_tokens: int
    max_model_len: int
    max_logprobs: int
    resting: int
    group: int


Spoil = Callable[[pb.ExecuteRequest, _Sizes], None]


def _case(name: str, contract: str, summary: str, spoil: Spoil) -> None:
    """Registers a case that spoils a good step."""

    async def run(bench: Bench) -> None:
        resting = bench.track(2 * bench.block_size + 1, salt=3)
        await bench.stream().prefill(resting, tags={resting.blocks[0]: b"resting"})
        for first in (True, False):
            stream = bench.stream()
            if not first:
                await stream.decode(resting, 1)
            rows = [bench.track(bench.block_size + 2, salt=salt).next() for salt in (1, 2)]
            request = stream.build(*rows)
            spoil(request, _sizes(bench, resting.blocks[0], 0 if first else bench.geometry.num_groups - 1))
            await stream.write(request)
            step_id = 1 if first else 2
            await stream.error(grpc.StatusCode.INVALID_ARGUMENT, contract, step_id=step_id)
        bench.equal(await bench.tags(), bench.tagged({resting.blocks[0]: b"resting"}), _INVALID)
        await bench.unharmed(resting)

    TOPIC.add(name, contract, summary, run)


def _sizes(bench: Bench, resting: int, group: int) -> _Sizes:
    geometry = bench.geometry
    return _Sizes(
        block_size=geometry.block_sizes[group],
        blocks=geometry.num_blocks * geometry.blocks_each + 1,
        host_blocks=geometry.num_host_blocks * geometry.blocks_each,
        vocab_size=bench.info.vocab_size,
        max_batched_tokens=bench.target.max_batched_tokens,
        max_model_len=bench.info.max_model_len,
        max_logprobs=bench.info.max_logprobs,
        resting=geometry.physical(resting, group),
        group=group,
    )


def _edit(array: common_pb2.Int32Array, edit: Callable[[list[int]], Sequence[int]]) -> None:
    """Changes a column's values."""
    array.CopyFrom(column(edit(values_of(array))))


def _put(place: int, value: int) -> Callable[[list[int]], list[int]]:
    """An edit of one value."""

    def edit(values: list[int]) -> list[int]:
        values[place] = value
        return values

    return edit


def _cut(array: common_pb2.Int32Array) -> None:
    """Takes a byte off a column."""
    array.data = array.data[:-1]


def _each_column() -> None:
    """A case for each column whose bytes are no whole number of integers."""
    paths: dict[str, Callable[[pb.ExecuteRequest], common_pb2.Int32Array]] = {
        "query_indptr": lambda step: step.query_indptr,
        "token_ids": lambda step: step.token_ids,
        "positions": lambda step: step.positions,
        "block_indptr": lambda step: step.block_tables[-1].block_indptr,
        "block_ids": lambda step: step.block_tables[-1].block_ids,
        "last_block_len": lambda step: step.block_tables[-1].last_block_len,
        "sampling_rows": lambda step: step.sampling.rows,
        "params_index": lambda step: step.sampling.params_index,
    }
    for name, path in paths.items():
        _case(f"{name}_of_odd_bytes", _BYTES, f"A byte of {name} is missing.", lambda step, _, at=path: _cut(at(step)))  # type: ignore[misc]
    _case("feeds_from_of_odd_bytes", _BYTES, "feeds_from is a single byte.",
          lambda step, _: step.feeds_from.MergeFrom(common_pb2.Int32Array(data=b"\0")))  # fmt: skip
    _case("adapter_ids_of_odd_bytes", _BYTES, "adapter_ids is a single byte.",
          lambda step, _: step.adapter_ids.MergeFrom(common_pb2.Int32Array(data=b"\0")))  # fmt: skip


_each_column()

# Rows and tokens.
_case(
    "query_indptr_empty", _QUERY, "query_indptr has no values.", lambda step, _: _edit(step.query_indptr, lambda v: [])
)
_case("query_indptr_not_from_zero", _QUERY, "query_indptr starts at 1.",
      lambda step, _: _edit(step.query_indptr, _put(0, 1)))  # fmt: skip
_case("query_indptr_negative", _QUERY, "query_indptr has a negative value.",
      lambda step, _: _edit(step.query_indptr, _put(1, -1)))  # fmt: skip
_case("query_indptr_beyond_tokens", _QUERY, "query_indptr ends beyond token_ids.",
      lambda step, _: _edit(step.query_indptr, lambda v: [*v[:-1], v[-1] + 1]))  # fmt: skip
_case("query_indptr_far_beyond", _QUERY, "query_indptr ends at 2**31 - 1.",
      lambda step, _: _edit(step.query_indptr, _put(-1, _FAR)))  # fmt: skip
_case("query_indptr_falls", _QUERY, "query_indptr falls.",
      lambda step, _: _edit(step.query_indptr, lambda v: [v[0], v[2], v[1]]))  # fmt: skip
_case("query_indptr_empty_row", _QUERY, "A row has no tokens.",
      lambda step, _: _edit(step.query_indptr, lambda v: [v[0], v[0], v[2]]))  # fmt: skip
_case("query_indptr_one_row_more", _QUERY, "query_indptr has a row that the tables lack.",
      lambda step, _: _edit(step.query_indptr, lambda v: [v[0], 1, *v[1:]]))  # fmt: skip
_case("token_missing", _QUERY, "token_ids has one value less than query_indptr says.",
      lambda step, _: _edit(step.token_ids, lambda v: v[:-1]))  # fmt: skip
_case("token_negative", _TOKENS, "A token id is -1, and no feed fills it.",
      lambda step, _: _edit(step.token_ids, _put(1, -1)))  # fmt: skip
_case("token_beyond_vocabulary", _TOKENS, "A token id is vocab_size.",
      lambda step, sizes: _edit(step.token_ids, _put(0, sizes.vocab_size)))  # fmt: skip
_case("token_far_beyond", _TOKENS, "A token id is 2**31 - 1.", lambda step, _: _edit(step.token_ids, _put(0, _FAR)))
_case("position_missing", _POSITIONS, "positions has one value less.",
      lambda step, _: _edit(step.positions, lambda v: v[:-1]))  # fmt: skip
_case("position_skipped", _POSITIONS, "Positions of a row have a gap.",
      lambda step, _: _edit(step.positions, lambda v: [*v[:-1], v[-1] + 1]))  # fmt: skip
_case("position_repeated", _POSITIONS, "A position comes twice in a row.",
      lambda step, _: _edit(step.positions, _put(1, 0)))  # fmt: skip
_case("position_negative", _POSITIONS, "A row starts at position -1.",
      lambda step, _: _edit(step.positions, lambda v: [p - 1 for p in v]))  # fmt: skip


def _beyond_the_model(step: pb.ExecuteRequest, sizes: _Sizes) -> None:
    """Moves the last row to the end of what the model takes, and one beyond."""
    tokens = values_of(step.query_indptr)
    count = tokens[2] - tokens[1]
    _edit(step.positions, lambda v: [*v[:-count], *range(sizes.max_model_len - count + 1, sizes.max_model_len + 1)])


_case("position_beyond_model", "GetModelInfoResponse.max_model_len: max_model_len is the most tokens of a sequence.",
      "A row's last position is max_model_len.", _beyond_the_model)  # fmt: skip


def _too_many_rows(step: pb.ExecuteRequest, sizes: _Sizes) -> None:
    """One row more than profiled, each right in itself."""
    count = MAX_SEQS + 1
    step.query_indptr.CopyFrom(column(range(count + 1)))
    step.token_ids.CopyFrom(column([1] * count))
    step.positions.CopyFrom(column([0] * count))
    for table in step.block_tables:
        first = values_of(table.block_ids)[0]
        table.block_indptr.CopyFrom(column(range(count + 1)))
        others = [block for block in range(1, sizes.blocks) if block not in (first, sizes.resting)]
        table.block_ids.CopyFrom(column([first, *others[: count - 1]]))
        table.last_block_len.CopyFrom(column([1] * count))
    step.ClearField("sampling")


def _too_many_tokens(step: pb.ExecuteRequest, sizes: _Sizes) -> None:
    """One token more than profiled."""
    count = sizes.max_batched_tokens + 1
    step.query_indptr.CopyFrom(column([0, count]))
    step.token_ids.CopyFrom(column([1] * count))
    step.positions.CopyFrom(column(range(count)))
    step.sampling.rows.CopyFrom(column([0, 0]))


_case("rows_more_than_profiled", _MOST, "A step has more rows than max_num_seqs.", _too_many_rows)
_case("tokens_more_than_profiled", _MOST, "A step has more tokens than max_num_batched_tokens.", _too_many_tokens)

# Block tables.
_case("tables_missing", _TABLES, "There is no block table.", lambda step, _: step.ClearField("block_tables"))
_case("tables_one_too_many", _TABLES, "There is a table for a KV group that the model lacks.",
      lambda step, _: step.block_tables.add().CopyFrom(step.block_tables[0]))  # fmt: skip
_case("tables_one_missing", _TABLES, "The last KV group has no table.",
      lambda step, _: step.block_tables.__delitem__(-1))  # fmt: skip


def _table(name: str, contract: str, summary: str, spoil: Callable[[pb.BlockTables, _Sizes], None]) -> None:
    """Registers a case that spoils the table of a group."""
    _case(name, contract, summary, lambda step, sizes: spoil(step.block_tables[sizes.group], sizes))


def _put_blocks(table: pb.BlockTables, block_ids: Sequence[int]) -> None:
    """Gives a table these blocks; what there is more or less is the last row's."""
    table.block_ids.CopyFrom(column(block_ids))
    _edit(table.block_indptr, _put(-1, len(block_ids)))


_table("block_indptr_short", _BORDERS, "block_indptr has one value less.",
       lambda table, _: _edit(table.block_indptr, lambda v: v[:-1]))  # fmt: skip
_table("block_indptr_not_from_zero", _BORDERS, "block_indptr starts at 1.",
       lambda table, _: _edit(table.block_indptr, _put(0, 1)))  # fmt: skip
_table("block_indptr_falls", _BORDERS, "block_indptr falls.",
       lambda table, _: _edit(table.block_indptr, lambda v: [v[0], v[2], v[1]]))  # fmt: skip
_table("block_indptr_beyond", _BORDERS, "block_indptr ends beyond block_ids.",
       lambda table, _: _edit(table.block_indptr, _put(-1, _FAR)))  # fmt: skip
_table("block_indptr_negative", _BORDERS, "block_indptr has a negative value.",
       lambda table, _: _edit(table.block_indptr, _put(1, -2)))  # fmt: skip
_table("block_missing", _EXACTLY, "A row's table lacks its last block.",
       lambda table, _: _put_blocks(table, values_of(table.block_ids)[:-1]))  # fmt: skip
_table("block_too_many", _EXACTLY, "A row's table has a block more than its sequence needs.",
       lambda table, sizes: _put_blocks(table, [*values_of(table.block_ids), sizes.resting]))  # fmt: skip
_table("block_null", _IDS, "The null block stands where a row reads.",
       lambda table, _: _edit(table.block_ids, _put(0, 0)))  # fmt: skip
_table("block_negative", _IDS, "A block id is -1.", lambda table, _: _edit(table.block_ids, _put(0, -1)))
_table("block_beyond_cache", _IDS, "A block id is num_blocks.",
       lambda table, sizes: _edit(table.block_ids, _put(-1, sizes.blocks)))  # fmt: skip
_table("block_far_beyond", _IDS, "A block id is 2**31 - 1.", lambda table, _: _edit(table.block_ids, _put(-1, _FAR)))
_table("last_block_len_short", _LAST, "last_block_len has one value less.",
       lambda table, _: _edit(table.last_block_len, lambda v: v[:-1]))  # fmt: skip
_table("last_block_len_zero", _LAST, "A last_block_len is 0.", lambda table, _: _edit(table.last_block_len, _put(0, 0)))
_table("last_block_len_beyond_block", _LAST, "A last_block_len is block_size + 1.",
       lambda table, sizes: _edit(table.last_block_len, _put(0, sizes.block_size + 1)))  # fmt: skip
_table("last_block_len_negative", _LAST, "A last_block_len is -1.",
       lambda table, _: _edit(table.last_block_len, _put(1, -1)))  # fmt: skip

# Feeds.
_case("feeds_from_short", _FEEDS, "feeds_from has one value for two rows.",
      lambda step, _: step.feeds_from.CopyFrom(column([-1])))  # fmt: skip
_case("feeds_from_below_minus_one", "ExecuteRequest.feeds_from: or -1 for a row that is not fed.",
      "A value of feeds_from is -2.", lambda step, _: step.feeds_from.CopyFrom(column([-2, -1])))  # fmt: skip

# Adapters.
_case("adapter_ids_short", _ADAPTERS, "adapter_ids has one value for two rows.",
      lambda step, _: step.adapter_ids.CopyFrom(column([0])))  # fmt: skip
_case("adapter_ids_too_many", _ADAPTERS, "adapter_ids has three values for two rows.",
      lambda step, _: step.adapter_ids.CopyFrom(column([0, 0, 0])))  # fmt: skip


# Sampling.
def _sampling(name: str, contract: str, summary: str, spoil: Callable[[pb.SamplingBatch, _Sizes], None]) -> None:
    """Registers a case that spoils the sampling of two rows."""
    _case(name, contract, summary, lambda step, sizes: spoil(step.sampling, sizes))


_sampling("sampling_row_beyond", _ROWS, "A sample is of row 2, of two.", lambda batch, _: _edit(batch.rows, _put(1, 2)))
_sampling("sampling_row_negative", _ROWS, "A sample is of row -1.", lambda batch, _: _edit(batch.rows, _put(0, -1)))
_sampling("sampling_rows_fall", _ROWS, "The rows that sample fall.",
          lambda batch, _: _edit(batch.rows, lambda v: v[::-1]))  # fmt: skip
_sampling("params_index_beyond", _INDEX, "params_index names a parameter set that is not there.",
          lambda batch, _: _edit(batch.params_index, _put(0, len(batch.params))))  # fmt: skip
_sampling("params_index_negative", _INDEX, "params_index is -1.",
          lambda batch, _: _edit(batch.params_index, _put(0, -1)))  # fmt: skip
_sampling("params_index_short", _INDEX, "params_index has one value for two samples.",
          lambda batch, _: _edit(batch.params_index, lambda v: v[:-1]))  # fmt: skip
_sampling("seeds_short", _SEEDS, "There is one seed for two samples.", lambda batch, _: batch.seeds.__delitem__(0))
_sampling("seeds_too_many", _SEEDS, "There are three seeds for two samples.", lambda batch, _: batch.seeds.append(1))


def _too_many_samples(batch: pb.SamplingBatch, _: _Sizes) -> None:
    """One sample more than profiled, all of row 0."""
    count = MAX_SEQS + 1
    batch.rows.CopyFrom(column([0] * count))
    batch.params_index.CopyFrom(column([0] * count))
    del batch.seeds[:]
    batch.seeds.extend([0] * count)


_sampling("samples_more_than_profiled", _SAMPLES, "A step has more samples than max_num_seqs.", _too_many_samples)


def _params(name: str, field: str, value: float, contract: str) -> None:
    """Registers a case for a sampling parameter out of its range."""
    _sampling(name, contract, f"{field} is {value:g}.", lambda batch, _: setattr(batch.params[0], field, value))


_RANGES: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("temperature", "temperature at least 0", (-0.5, math.nan, math.inf)),
    ("top_k", "top_k keeps the k likeliest; 0 keeps all.", (-1,)),
    ("top_p", "top_p in (0, 1]", (0.0, 1.5, math.nan)),
    ("min_p", "min_p in [0, 1]", (-0.1, 1.5, math.nan)),
    ("repetition_penalty", "repetition_penalty in [0.0625, 16]", (0.0, 17.0, math.nan)),
    ("presence_penalty", "presence_penalty in [-2, 2]", (-2.5, 2.5, math.nan)),
    ("frequency_penalty", "frequency_penalty in [-2, 2]", (-2.5, 2.5, math.nan)),
    ("num_logprobs", "num_logprobs is -1 for none", (-2,)),
)
for _field, _sentence, _values in _RANGES:
    for _value in _values:
        _word = f"{_value:g}".replace("-", "minus_").replace(".", "_")
        _params(f"{_field}_{_word}", _field, _value, f"TokenSampling.{_field}: {_sentence}")

_sampling("num_logprobs_beyond", _LOGPROBS, "num_logprobs is max_logprobs + 1.",
          lambda batch, sizes: setattr(batch.params[0], "num_logprobs", sizes.max_logprobs + 1))  # fmt: skip
_sampling("logit_bias_beyond", "TokenSampling.logit_bias: logit_bias is added to the logits of the named token ids.",
          "A bias is for token vocab_size.",
          lambda batch, sizes: batch.params[0].logit_bias.update({sizes.vocab_size: 1.0}))  # fmt: skip
_sampling("suppressed_negative", "TokenSampling.suppressed_token_ids: suppressed_token_ids can not be produced",
          "Token -1 is suppressed.", lambda batch, _: batch.params[0].suppressed_token_ids.append(-1))  # fmt: skip


def _history(batch: pb.SamplingBatch, tokens: Sequence[int], prompt_lens: Sequence[int], ends: Sequence[int]) -> None:
    """Penalises both samples, with these histories."""
    batch.params[0].presence_penalty = 1.0
    batch.penalties.CopyFrom(
        pb.PenaltyHistories(
            sample_index=column([0, 1]),
            indptr=column([0, *ends]),
            token_ids=column(tokens),
            prompt_lens=column(prompt_lens),
        )
    )


_sampling("history_missing", _HISTORIES, "Parameters penalise, and there is no history.",
          lambda batch, _: setattr(batch.params[0], "presence_penalty", 1.0))  # fmt: skip
_sampling("history_token_beyond", "PenaltyHistories.token_ids: token_ids are prompt and output tokens known to the "
          "manager.", "A history has token vocab_size.",
          lambda batch, sizes: _history(batch, [sizes.vocab_size, 0], [1, 1], [1, 2]))  # fmt: skip
_sampling("history_indptr_falls", "PenaltyHistories.indptr: indptr has P + 1 values, from 0 and never falling.",
          "The histories' indptr falls.", lambda batch, _: _history(batch, [0, 0], [0, 0], [2, 1]))  # fmt: skip


def _history_of(samples: Sequence[int]) -> Callable[[pb.SamplingBatch, _Sizes], None]:
    """Penalises with histories of these samples."""

    def spoil(batch: pb.SamplingBatch, _: _Sizes) -> None:
        _history(batch, [0, 0], [0, 0], [1, 2])
        batch.penalties.sample_index.CopyFrom(column(samples))

    return spoil


_sampling("history_index_repeated", _HISTORY_INDEX, "Two histories are of one sample.", _history_of([1, 1]))
_sampling("history_index_beyond", _HISTORY_INDEX, "A history is of sample 2, of two.", _history_of([0, 2]))
_sampling("history_prompt_len_beyond", "PenaltyHistories.prompt_lens: prompt_lens has P values: how many of the row's "
          "tokens are prompt.", "A history's prompt is longer than it.",
          lambda batch, _: _history(batch, [0, 0], [2, 1], [1, 2]))  # fmt: skip


# Tags and copies.
def _tag(blocks: Callable[[_Sizes], Sequence[int]], count: int) -> Spoil:
    """Adds tags to these blocks."""
    return lambda step, sizes: step.block_tags.CopyFrom(
        pb.BlockTags(block_ids=column(blocks(sizes)), tags=[b"bad"] * count)
    )


_case("tag_of_null_block", _TAGGED, "The null block is tagged.", _tag(lambda sizes: [sizes.resting, 0], 2))
_case("tag_beyond_cache", _TAGGED, "Block num_blocks is tagged.", _tag(lambda sizes: [sizes.resting, sizes.blocks], 2))
_case("tags_fewer_than_blocks", _TAGS, "There are two blocks and one tag.", _tag(lambda sizes: [sizes.resting, 1], 1))


def _copy(
    directions: Sequence[int], sources: Callable[[_Sizes], list[int]], targets: Callable[[_Sizes], list[int]]
) -> Spoil:
    """Adds copies, the first of them a good one over the resting sequence."""

    def spoil(step: pb.ExecuteRequest, sizes: _Sizes) -> None:
        spare = next(block for block in range(1, sizes.blocks) if block != sizes.resting)
        step.copies.CopyFrom(
            pb.BlockCopies(
                directions=column([1, *directions]),
                source_ids=column([spare, *sources(sizes)]),
                target_ids=column([sizes.resting, *targets(sizes)]),
            )
        )

    return spoil


def _resting(sizes: _Sizes) -> list[int]:
    return [sizes.resting]


_case("copy_of_unknown_direction", _COPIES, "A copy's direction is 0.", _copy([0], lambda _: [1], _resting))
_case("copy_of_direction_4", _COPIES, "A copy's direction is 4.", _copy([4], lambda _: [1], _resting))
_case("copy_to_itself", _COPIES, "A block is copied to itself.", _copy([1], _resting, _resting))
_case("copy_from_null_block", _COPIES, "The null block is copied.", _copy([1], lambda _: [0], _resting))
_case("copy_to_null_block", _COPIES, "A block is copied to the null block.", _copy([1], _resting, lambda _: [0]))
_case("copy_from_beyond", _COPIES, "Block num_blocks is copied.", _copy([1], lambda sizes: [sizes.blocks], _resting))
_case("copy_to_beyond", _COPIES, "A block is copied to 2**31 - 1.", _copy([1], _resting, lambda _: [_FAR]))
_case("copy_out_beyond_host", _COPIES, "A block is copied to host block num_host_blocks.",
      _copy([2], _resting, lambda sizes: [sizes.host_blocks]))  # fmt: skip
_case("copy_in_from_beyond_host", _COPIES, "Host block num_host_blocks is copied in.",
      _copy([3], lambda sizes: [sizes.host_blocks], _resting))  # fmt: skip
_case("copy_columns_differ", _COPIES, "There are two sources and one target.", _copy([1], _resting, lambda _: []))


def _cut_then(spoil: Spoil, path: Callable[[pb.ExecuteRequest], common_pb2.Int32Array]) -> Spoil:
    """Adds something to a step, less a byte of a column."""

    def cut(step: pb.ExecuteRequest, sizes: _Sizes) -> None:
        spoil(step, sizes)
        _cut(path(step))

    return cut


_case("copy_of_odd_bytes", _BYTES, "A byte of source_ids is missing.",
      _cut_then(_copy([1], lambda _: [1], _resting), lambda step: step.copies.source_ids))  # fmt: skip
_case("tag_of_odd_bytes", _BYTES, "A byte of BlockTags.block_ids is missing.",
      _cut_then(_tag(_resting, 1), lambda step: step.block_tags.block_ids))  # fmt: skip


@TOPIC.case(_INVALID)
async def no_step_at_all(bench: Bench) -> None:
    """An empty message with the epoch alone is refused."""
    stream = bench.stream()
    await stream.write(pb.ExecuteRequest(step_id=1, kv_epoch=bench.epoch))
    await stream.error(grpc.StatusCode.INVALID_ARGUMENT, _INVALID, step_id=1)


@TOPIC.case('ExecutorService: Errors carry google.rpc.ErrorInfo with domain "kvplane".')
async def bytes_that_are_no_message(bench: Bench) -> None:
    """Bytes that do not parse end the call; the executor serves the next one."""
    resting = bench.track(bench.block_size + 1)
    await bench.stream().prefill(resting)
    for method in ("GetModelInfo", "ProfileMemory", "InitializeKvCache", "Reset"):
        await bench.target.refuses_bytes(method, b"\xff\xff\xff")
    await bench.unharmed(resting)
