"""Steps to wire messages and results back.

Station: between `Scheduler` and `ExecutorConnection`. A step is turned into a message as soon as it is scheduled, while
its requests are as the scheduler left them.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvplane.common.v1.common_pb2 import Int32Array
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service.core.block_tag import encode_tag
from kvmanager_service.core.errors import BadResultError, RowFailedError
from kvmanager_service.core.request import TOKEN_BYTES, Request, SamplingParams, TokenLogprobs
from kvmanager_service.core.step import BlockCopy, ScheduledRow, Step, StepResult

_UNKNOWN_TOKEN = bytes(TOKEN_BYTES)
_ID_BYTES = 4
MAX_REASON_CHARS = 63
"""What `google.rpc.ErrorInfo` allows."""
MAX_ERROR_CHARS = 400
"""Of what an executor says of a failed row. The client gets it in trailers, of which gRPC takes 8 KiB; there a
character has up to 12 bytes in the message and 6 in the details."""
_NOTHING: frozenset[int] = frozenset()
_NO_ADAPTERS: Mapping[str, int] = {}


def build_execute_request(
    step: Step,
    kv_epoch: int,
    block_size: int,
    table_sizes: Sequence[int] = (),
    adapter_ids: Mapping[str, int] = _NO_ADAPTERS,
) -> pb.ExecuteRequest:
    """Write a step down so that any executor whose blocks hold the tables' content can run it.

    Args:
        step: just scheduled.
        kv_epoch: the content its tables speak of.
        block_size: tokens per block of the one table that each request has in `blocks`.
        table_sizes: tokens per block by KV group, where requests have their tables in `tables`; then block_size means
            nothing.
        adapter_ids: what the executor calls each adapter; those of all requests are among them.
    """
    query_indptr = [0]
    block_indptr = [0]
    positions: list[int] = []
    last_block_len: list[int] = []
    tokens: list[bytes | bytearray] = []
    tables: list[bytearray] = []
    num_tokens = num_blocks = 0
    for row in step.rows:
        request, start, stop = row.request, row.start, row.stop
        row_blocks = (stop + block_size - 1) // block_size
        num_tokens += row.num_tokens
        num_blocks += row_blocks
        query_indptr.append(num_tokens)
        block_indptr.append(num_blocks)
        last_block_len.append(stop - (row_blocks - 1) * block_size)
        table = request.block_id_bytes
        tables.append(table if len(table) == row_blocks * _ID_BYTES else table[: row_blocks * _ID_BYTES])
        if row.num_tokens == 1:
            positions.append(start)
        else:
            positions += range(start, stop)
        if row.feeds_from < 0:
            tokens.append(request.token_bytes[start * TOKEN_BYTES : stop * TOKEN_BYTES])
        else:
            if row.num_tokens > 1:
                tokens.append(request.token_bytes[start * TOKEN_BYTES :])
            tokens.append(_UNKNOWN_TOKEN)
    message = pb.ExecuteRequest(
        step_id=step.step_id,
        kv_epoch=kv_epoch,
        query_indptr=_int32(query_indptr),
        token_ids=Int32Array(data=b"".join(tokens)),
        positions=_int32(positions),
        block_tables=[_build_group_tables(step.rows, group, size) for group, size in enumerate(table_sizes)]
        or [_block_tables(block_indptr, tables, last_block_len)],
    )
    if step.feeds_from_step_id:
        message.feeds_from_step_id = step.feeds_from_step_id
        message.feeds_from.CopyFrom(_int32([row.feeds_from for row in step.rows]))
    if step.num_samples:
        message.sampling.CopyFrom(_build_sampling(step.rows))
    if step.tags:
        message.block_tags.block_ids.CopyFrom(_int32([block_id for block_id, _ in step.tags]))
        message.block_tags.tags.extend(b"" if content is None else encode_tag(content) for _, content in step.tags)
    if step.copies:
        message.copies.CopyFrom(_build_copies(step.copies))
    if adapter_ids:
        column = [0 if row.request.lora is None else adapter_ids[row.request.lora.lora_id] for row in step.rows]
        if any(column):
            message.adapter_ids.CopyFrom(_int32(column))
    return message


def _build_group_tables(rows: list[ScheduledRow], group: int, block_size: int) -> pb.BlockTables:
    """The tables of all rows in one of several KV groups."""
    indptr = [0]
    last_block_len: list[int] = []
    tables: list[bytearray] = []
    for row in rows:
        num_blocks = (row.stop + block_size - 1) // block_size
        indptr.append(indptr[-1] + num_blocks)
        last_block_len.append(row.stop - (num_blocks - 1) * block_size)
        tables.append(row.request.tables[group].block_id_bytes[: num_blocks * _ID_BYTES])
    return _block_tables(indptr, tables, last_block_len)


def _block_tables(indptr: list[int], tables: list[bytearray], last_block_len: list[int]) -> pb.BlockTables:
    return pb.BlockTables(
        block_indptr=_int32(indptr),
        block_ids=Int32Array(data=b"".join(tables)),
        last_block_len=_int32(last_block_len),
    )


def _build_copies(copies: list[BlockCopy]) -> pb.BlockCopies:
    return pb.BlockCopies(
        directions=_int32([copy.direction for copy in copies]),
        source_ids=_int32([copy.source_id for copy in copies]),
        target_ids=_int32([copy.target_id for copy in copies]),
    )


def _build_sampling(rows: list[ScheduledRow]) -> pb.SamplingBatch:
    """Say how the rows that sample do it; parameters that several of them share are sent once."""
    sampling_rows: list[int] = []
    params: list[pb.TokenSampling] = []
    params_index: list[int] = []
    seeds: list[int] = []
    penalised: list[tuple[int, Request]] = []
    distinct: dict[tuple[SamplingParams, frozenset[int]], int] = {}
    seen: dict[int, int] = {}  # by identity: most rows share one object, and hashing its values for each is not free
    for index, row in enumerate(rows):
        if row.sample_index < 0:
            continue
        request = row.request
        sampling = request.sampling
        place = None if row.suppress_stop else seen.get(id(sampling))
        if place is None:
            suppressed = request.stop_token_ids if row.suppress_stop else _NOTHING
            place = distinct.setdefault((sampling, suppressed), len(params))
            if place == len(params):
                params.append(_token_sampling(sampling, suppressed))
            if not row.suppress_stop:
                seen[id(sampling)] = place
        if sampling.has_penalty:
            penalised.append((len(sampling_rows), request))
        sampling_rows.append(index)
        params_index.append(place)
        seeds.append(request.seed)
        for branch in row.branches or ():  # of one request with this row's: parameters and tokens are the same
            if sampling.has_penalty:
                penalised.append((len(sampling_rows), branch.request))
            sampling_rows.append(index)
            params_index.append(place)
            seeds.append(branch.request.seed)
    batch = pb.SamplingBatch(rows=_int32(sampling_rows), params=params, params_index=_int32(params_index), seeds=seeds)
    if penalised:
        batch.penalties.CopyFrom(_build_penalties(penalised))
    return batch


@functools.lru_cache(maxsize=256)  # a step sends the same ones as the step before
def _token_sampling(params: SamplingParams, suppressed: frozenset[int]) -> pb.TokenSampling:
    return pb.TokenSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        suppressed_token_ids=sorted(suppressed),
        num_logprobs=params.num_logprobs,
    )


def _build_penalties(penalised: list[tuple[int, Request]]) -> pb.PenaltyHistories:
    indptr = [0]
    for _, request in penalised:
        indptr.append(indptr[-1] + request.num_tokens)
    return pb.PenaltyHistories(
        sample_index=_int32([index for index, _ in penalised]),
        indptr=_int32(indptr),
        token_ids=Int32Array(data=b"".join(request.token_bytes for _, request in penalised)),
        prompt_lens=_int32([request.num_prompt_tokens for _, request in penalised]),
    )


def read_execute_response(message: pb.ExecuteResponse, kv_epoch: int) -> StepResult:
    """Read a result. Whether it fits the step is for `Scheduler.update` to say.

    Args:
        message: what the executor answered.
        kv_epoch: of the cache that the books are about.

    Raises:
        BadResultError: it was computed from another cache than that; a column is not a whole number of values; or the
            logprobs' offsets do not fit the samples.
    """
    if message.kv_epoch != kv_epoch:
        raise BadResultError(
            f"expected a result of kv_epoch {kv_epoch}, got step {message.step_id} of {message.kv_epoch}: it was"
            " computed from another cache"
        )
    try:
        return _read_execute_response(message)
    except ValueError as error:
        raise BadResultError(f"expected a well-formed result of step {message.step_id}, got: {error}") from error


def _read_execute_response(message: pb.ExecuteResponse) -> StepResult:
    sampled = _read_int32(message.sampled_token_ids)
    return StepResult(
        step_id=message.step_id,
        sampled=sampled,
        computed_upto=_read_int32(message.computed_upto),
        logprobs=_read_logprobs(message.logprobs, len(sampled)) if message.HasField("logprobs") else {},
        errors={
            error.row: RowFailedError(
                _shorten(error.reason, MAX_REASON_CHARS) or "ROW_FAILED",
                _shorten(error.message, MAX_ERROR_CHARS) or "the executor gave no reason",
                row=error.row,
            )
            for error in message.row_errors
        },
        compute_us=message.compute_us,
        copy_us=message.copy_us,
    )


def _read_logprobs(message: pb.LogprobsBatch, num_samples: int) -> dict[int, TokenLogprobs]:
    indptr = _read_int32(message.indptr)
    token_ids = _read_int32(message.token_ids)
    logprobs = array("f")
    logprobs.frombytes(message.logprobs.data)
    if len(indptr) != num_samples + 1 or indptr[0] != 0 or indptr != sorted(indptr):
        raise ValueError(f"expected {num_samples + 1} logprobs offsets that grow from 0, got {indptr[:3]}, ...")
    if not indptr[-1] == len(token_ids) == len(logprobs):
        raise ValueError(
            f"expected {indptr[-1]} logprobs and their token ids, got {len(logprobs)} and {len(token_ids)}"
        )
    return {
        index: TokenLogprobs(tuple(token_ids[start:stop]), tuple(logprobs[start:stop]))
        for index, (start, stop) in enumerate(pairwise(indptr))
        if stop > start
    }


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _int32(values: list[int]) -> Int32Array:
    return Int32Array(data=array("i", values).tobytes())


def _read_int32(column: Int32Array) -> list[int]:
    values = array("i")
    values.frombytes(column.data)
    return values.tolist()


__all__ = ["build_execute_request", "read_execute_response"]
