"""The values of the block-table API as messages, and back.

Station: below :mod:`kvplane_client.sequences`. Ranges are the manager's business; here only what the wire cannot carry
is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pb

from kvplane_client.errors import InvalidArgumentError
from kvplane_client.sequence_types import (
    CloseSequence,
    CommitSequence,
    ExtendSequence,
    ForkSequence,
    MultimodalItem,
    OpenSequence,
    PromptEmbedding,
    SequenceOperation,
    SequencePoolInfo,
    TokenSpan,
)

__all__ = ["pool_info_from", "to_operation", "values"]


def pool_info_from(message: pb.SequencePoolInfo) -> SequencePoolInfo:
    """Returns the pool that a message describes."""
    return SequencePoolInfo(
        pool_id=message.pool_id,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        free_blocks=message.free_blocks,
        cached_blocks=message.cached_blocks,
        num_sequences=message.num_sequences,
        prefix_queries=message.prefix_queries,
        prefix_hits=message.prefix_hits,
        lease_seconds=message.lease_ms / 1e3,
        lease_remaining_seconds=message.lease_remaining_ms / 1e3,
        last_batch_id=message.last_batch_id,
        max_spans=message.max_spans,
        isolate_tenants=message.isolate_tenants,
    )


def to_operation(operation: SequenceOperation) -> pb.SequenceOperation:
    """Returns the message of an operation. Raises InvalidArgumentError for a value that none can carry."""
    try:
        match operation:
            case OpenSequence():
                return pb.SequenceOperation(
                    open=pb.OpenSequence(
                        sequence_id=operation.sequence_id,
                        token_ids=_column(operation.token_ids),
                        num_slots=operation.num_slots,
                        priority=operation.priority,
                        cache_salt=operation.cache_salt,
                        lora_id=operation.lora_id,
                        lora_revision=operation.lora_revision,
                        is_resumed=operation.is_resumed,
                        spans=map(_to_span, operation.spans),
                        tenant=operation.tenant,
                    )
                )
            case ExtendSequence():
                return pb.SequenceOperation(
                    extend=pb.ExtendSequence(
                        sequence_id=operation.sequence_id,
                        token_ids=_column(operation.token_ids),
                        num_slots=operation.num_slots,
                        num_computed_tokens=operation.num_computed_tokens,
                        spans=map(_to_span, operation.spans),
                    )
                )
            case CommitSequence():
                return pb.SequenceOperation(
                    commit=pb.CommitSequence(
                        sequence_id=operation.sequence_id, num_computed_tokens=operation.num_computed_tokens
                    )
                )
            case ForkSequence():
                return pb.SequenceOperation(
                    fork=pb.ForkSequence(
                        sequence_id=operation.sequence_id,
                        new_sequence_id=operation.new_sequence_id,
                        num_tokens=operation.num_tokens,
                        priority=operation.priority,
                    )
                )
            case CloseSequence():
                return pb.SequenceOperation(close=pb.CloseSequence(sequence_id=operation.sequence_id))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"{type(operation).__name__}: expected values that fit the contract: {error}"
        ) from error


def _to_span(span: TokenSpan) -> pb.TokenSpan:
    if isinstance(span, MultimodalItem):
        kind = pb.TOKEN_SPAN_KIND_MULTIMODAL_ITEM
    elif isinstance(span, PromptEmbedding):
        kind = pb.TOKEN_SPAN_KIND_PROMPT_EMBEDDING
    else:
        raise TypeError(f"spans: a MultimodalItem or a PromptEmbedding, not {type(span).__name__}")
    return pb.TokenSpan(kind=kind, digest=span.digest, offset=span.offset, length=span.length)


def _column(values: Sequence[int]) -> common_pb2.Int32Array:
    return common_pb2.Int32Array(data=array("i", values).tobytes())


def values(column: common_pb2.Int32Array) -> array[int]:
    """Returns the column's numbers."""
    values = array("i")
    values.frombytes(column.data)
    return values
