"""The block-table API of `KvManagerService`: from messages to operations on a pool, and back.

Station: called by `servicers.kv_manager`. What is wrong with one operation becomes its result; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pb

from kvmanager_service import sequence_pools
from kvmanager_service.callers import tenant_of_request
from kvmanager_service.core.block_hash import KeyDomain
from kvmanager_service.core.errors import CoreError, invalid_parameter
from kvmanager_service.core.extra_keys import LoraAdapter, PromptSpan
from kvmanager_service.core.request import TOKEN_BYTES
from kvmanager_service.core.sequence_pool import (
    MAX_SPANS,
    BlockShortage,
    SequencePool,
    TableChange,
    require_few_spans,
)
from kvmanager_service.errors import BatchTooLargeError, to_status
from kvmanager_service.field_checks import MAX_SALT_CHARS, MAX_TENANT_CHARS
from kvmanager_service.sequence_pools import OpenedPool, PoolSpec, SequencePools

__all__ = ["MAX_ANSWER_BYTES", "MAX_OPERATIONS", "Pools", "close_pool", "list_pools", "open_pool", "update_sequences"]

MAX_OPERATIONS = 16_384
MAX_ANSWER_BYTES = 4 << 20
"""Of the results of a batch: beyond it no operation is applied that is answered with a table. The table of all blocks
that a manager has by default takes as much. The newest answer of each pool is kept."""
MAX_ID_CHARS = 128

_SPAN_DOMAINS = {
    pb.TOKEN_SPAN_KIND_MULTIMODAL_ITEM: KeyDomain.MULTIMODAL_ITEM,
    pb.TOKEN_SPAN_KIND_PROMPT_EMBEDDING: KeyDomain.PROMPT_EMBEDDING,
}

Pools = SequencePools[pb.UpdateSequencesResponse]


async def open_pool(pools: Pools, request: pb.OpenPoolRequest) -> pb.OpenPoolResponse:
    """Serve `OpenPool`; see the proto."""
    spec = PoolSpec(
        request.pool_id,
        request.num_blocks,
        request.block_size,
        not request.disable_prefix_caching,
        request.eviction_policy,
        request.lease_ms,
    )
    return pb.OpenPoolResponse(pool=_to_info(await pools.open(spec)))


def close_pool(pools: Pools, request: pb.ClosePoolRequest) -> pb.ClosePoolResponse:
    """Serve `ClosePool`; see the proto."""
    pools.close(request.pool_id)
    return pb.ClosePoolResponse()


def list_pools(pools: Pools) -> pb.ListPoolsResponse:
    """Serve `ListPools`; see the proto."""
    return pb.ListPoolsResponse(pools=map(_to_info, pools.list()))


async def update_sequences(pools: Pools, request: pb.UpdateSequencesRequest) -> pb.UpdateSequencesResponse:
    """Serve `UpdateSequences`; see the proto."""
    if len(request.operations) > MAX_OPERATIONS:
        raise invalid_parameter("operations", f"at most {MAX_OPERATIONS}", len(request.operations))
    pool = pools.use(request.pool_id)
    return await pools.update(pool, request.batch_id, request, partial(_apply_all, pool, request))


async def _apply_all(
    pool: OpenedPool[pb.UpdateSequencesResponse], request: pb.UpdateSequencesRequest
) -> pb.UpdateSequencesResponse:
    results: list[pb.SequenceResult] = []
    num_bytes = 0
    turn_ends_at = time.monotonic() + sequence_pools.MAX_TURN_S
    for operation in request.operations:
        if time.monotonic() > turn_ends_at:
            await pool.end_turn()
            turn_ends_at = time.monotonic() + sequence_pools.MAX_TURN_S
        result = _apply(pool.sequences, operation, num_bytes)
        num_bytes += result.ByteSize()
        results.append(result)
    return pb.UpdateSequencesResponse(batch_id=request.batch_id, results=results)


def _apply(pool: SequencePool, operation: pb.SequenceOperation, num_bytes: int) -> pb.SequenceResult:
    """Apply an operation of a batch whose answer takes so many bytes as yet."""
    kind = operation.WhichOneof("operation")
    try:
        if kind is None:
            raise invalid_parameter("operation", "one that is set", "none")
        if num_bytes >= MAX_ANSWER_BYTES and kind in _ANSWERED_WITH_A_TABLE:
            raise BatchTooLargeError(
                "BATCH_TOO_LARGE",
                f"expected a batch whose answer takes less than {MAX_ANSWER_BYTES} bytes, got {num_bytes} before this "
                "operation; send it in the next batch",
                max_bytes=MAX_ANSWER_BYTES,
            )
        outcome = _OPERATIONS[kind](pool, getattr(operation, kind))
    except CoreError as error:
        return pb.SequenceResult(error=to_status(error).to_proto())
    if outcome is None:
        return pb.SequenceResult(done=pb.SequenceDone())
    if isinstance(outcome, BlockShortage):
        return pb.SequenceResult(
            shortage=pb.BlockShortage(
                needed_blocks=outcome.needed_blocks, free_blocks=outcome.free_blocks, victim_ids=outcome.victim_ids
            )
        )
    return pb.SequenceResult(table=_to_table(outcome))


def _open(pool: SequencePool, message: pb.OpenSequence) -> TableChange | BlockShortage:
    _check_id("sequence_id", message.sequence_id)
    _check_length("cache_salt", message.cache_salt, 0, MAX_SALT_CHARS)
    _check_length("tenant", message.tenant, 0, MAX_TENANT_CHARS)
    if message.lora_revision and not message.lora_id:
        raise invalid_parameter("lora_revision", "none without lora_id", repr(message.lora_revision))
    return pool.open(
        message.sequence_id,
        _tokens(message.token_ids),
        _slots(message.num_slots),
        priority=message.priority,
        cache_salt=message.cache_salt,
        lora=LoraAdapter(message.lora_id, message.lora_revision) if message.lora_id else None,
        spans=_spans(message.spans),
        tenant=tenant_of_request(message.tenant),
        is_resumed=message.is_resumed,
    )


def _extend(pool: SequencePool, message: pb.ExtendSequence) -> TableChange | BlockShortage:
    _check_id("sequence_id", message.sequence_id)
    # First, for it stands even if the rest is refused.
    if message.num_computed_tokens:
        pool.commit(message.sequence_id, message.num_computed_tokens)
    return pool.extend(
        message.sequence_id, _tokens(message.token_ids), _slots(message.num_slots), _spans(message.spans)
    )


def _commit(pool: SequencePool, message: pb.CommitSequence) -> None:
    _check_id("sequence_id", message.sequence_id)
    pool.commit(message.sequence_id, message.num_computed_tokens)


def _fork(pool: SequencePool, message: pb.ForkSequence) -> TableChange:
    _check_id("sequence_id", message.sequence_id)
    _check_id("new_sequence_id", message.new_sequence_id)
    return pool.fork(message.sequence_id, message.new_sequence_id, message.num_tokens, priority=message.priority)


def _close(pool: SequencePool, message: pb.CloseSequence) -> None:
    _check_id("sequence_id", message.sequence_id)
    pool.close(message.sequence_id)


_OPERATIONS: dict[str, Callable[[SequencePool, Any], TableChange | BlockShortage | None]] = {
    "open": _open,
    "extend": _extend,
    "commit": _commit,
    "fork": _fork,
    "close": _close,
}
_ANSWERED_WITH_A_TABLE = frozenset(("open", "extend", "fork"))


def _to_table(change: TableChange) -> pb.SequenceTable:
    table = pb.SequenceTable(
        first_block=change.first_block,
        block_ids=common_pb2.Int32Array(data=change.block_ids),
        num_computed_tokens=change.num_computed_tokens,
    )
    if change.copies:
        table.copy_source_ids.data = b"".join(source.to_bytes(4, "little") for source, _ in change.copies)
        table.copy_target_ids.data = b"".join(target.to_bytes(4, "little") for _, target in change.copies)
    return table


def _to_info(opened: OpenedPool[pb.UpdateSequencesResponse]) -> pb.SequencePoolInfo:
    sequences = opened.sequences
    pool = sequences.kv.pool
    return pb.SequencePoolInfo(
        pool_id=opened.pool_id,
        num_blocks=len(pool.blocks),
        block_size=sequences.kv.block_size,
        free_blocks=pool.num_free_blocks,
        cached_blocks=pool.num_cached_blocks,
        num_sequences=len(sequences.sequences),
        prefix_queries=sequences.prefix_queries,
        prefix_hits=sequences.prefix_hits,
        lease_ms=round(opened.lease_s * 1e3),
        lease_remaining_ms=int(opened.lease_remaining_s * 1e3),
        last_batch_id=opened.last_batch_id,
        max_spans=MAX_SPANS,
        isolate_tenants=sequences.isolate_tenants,
    )


def _tokens(column: common_pb2.Int32Array) -> bytes:
    """The column's bytes. Raises InvalidRequestError for a part of a value, or a negative one."""
    data = column.data
    if len(data) % TOKEN_BYTES:
        raise invalid_parameter("token_ids", "a whole number of 4-byte values", f"{len(data)} bytes")
    if data and max(data[TOKEN_BYTES - 1 :: TOKEN_BYTES]) > 0x7F:
        raise invalid_parameter("token_ids", "no negative value", "one")
    return data


def _spans(messages: Sequence[pb.TokenSpan]) -> Sequence[PromptSpan]:
    """What stands behind tokens. Raises InvalidRequestError for a kind that is not known; the pool checks the rest.

    More than any sequence may have are refused before they are looked at.
    """
    if not messages:
        return ()
    require_few_spans(len(messages))
    spans = []
    for index, message in enumerate(messages):
        domain = _SPAN_DOMAINS.get(message.kind)
        if domain is None:
            raise invalid_parameter(f"spans[{index}].kind", "MULTIMODAL_ITEM or PROMPT_EMBEDDING", message.kind)
        spans.append(PromptSpan(domain, message.digest, message.offset, message.length))
    return spans


def _slots(num_slots: int) -> int:
    if num_slots < 0:
        raise invalid_parameter("num_slots", "at least 0", num_slots)
    return num_slots


def _check_id(field: str, value: str) -> None:
    _check_length(field, value, 1, MAX_ID_CHARS)


def _check_length(field: str, value: str, least: int, most: int) -> None:
    if not least <= len(value) <= most:
        raise invalid_parameter(field, f"{least} to {most} characters", f"{len(value)}")
