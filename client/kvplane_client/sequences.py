"""The block-table API: tables for an engine that runs its own loop and holds its own K/V.

Station: made by ``AsyncClient.open_pool`` and ``Client.open_pool``. An engine sends one batch of operations a step,
and gets one result for each.

Example::

    with Client("localhost:50051") as client, client.open_pool(num_blocks=256, block_size=16) as pool:
        (table,) = pool.update([OpenSequence("a", token_ids)])
        # compute token_ids[table.num_computed_tokens:] into the slots of table.block_ids, sample a token
        (table,) = pool.update([ExtendSequence("a", [token], num_computed_tokens=len(token_ids))])

Tokens whose ids do not say what they stand for, such as an image's placeholders, come with a span that does::

    OpenSequence("b", token_ids, spans=[MultimodalItem(sha256(image).digest(), offset=5, length=256)])
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pb

from kvplane_client.errors import (
    AbortedError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    KvPlaneError,
    NotFoundError,
    ResourceExhaustedError,
    error_from_wire,
)

__all__ = [
    "BlockShortage",
    "CloseSequence",
    "CommitSequence",
    "ExtendSequence",
    "ForkSequence",
    "MultimodalItem",
    "OpenSequence",
    "PromptEmbedding",
    "SequenceDone",
    "SequenceOperation",
    "SequencePool",
    "SequencePoolInfo",
    "SequenceResult",
    "SequenceTable",
    "TokenSpan",
    "pool_info_from",
]


_NOT_APPLIED = (InvalidArgumentError, NotFoundError, AbortedError, ResourceExhaustedError)
"""What a batch is refused with as a whole: too many operations, no such pool, not its turn, too large for a message.
After any other error it may have been applied."""


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """Tokens that are the placeholders of an image or the like. They are shared with the same item alone.

    Attributes:
        digest: A hash of the item and of what decides how it is encoded, such as SHA-256: an equal one is taken for
            equal content. 16 to 64 bytes.
        offset: The position of the first of its tokens in the whole sequence.
        length: How many they are.
    """

    digest: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PromptEmbedding:
    """Tokens in whose place embeddings are handed in. The attributes are those of :class:`MultimodalItem`."""

    digest: bytes
    offset: int
    length: int


TokenSpan: TypeAlias = MultimodalItem | PromptEmbedding


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Begin a sequence. Answered with its table.

    Attributes:
        sequence_id: Names it.
        token_ids: What it begins with; at least one.
        num_slots: How many tokens the table must hold; 0 for those given.
        priority: The highest value gives way first; among equals, whoever was opened last.
        cache_salt: Separates prefix caches.
        lora_id: The adapter it runs with.
        lora_revision: The adapter's weights.
        spans: What its tokens stand for beside their ids: in order, and apart from each other.
        tenant: Whose it is; counts where ``info.isolate_tenants`` is set.
        is_resumed: It was open before and had to give way; the pool's ``prefix_queries`` and ``prefix_hits`` leave it
            out.
    """

    sequence_id: str
    token_ids: Sequence[int]
    num_slots: int = 0
    priority: int = 0
    cache_salt: str = ""
    lora_id: str = ""
    lora_revision: str = ""
    is_resumed: bool = False
    spans: Sequence[TokenSpan] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ExtendSequence:
    """Make room for more tokens, and the slots that are not computed yet the sequence's own. Answered with its table.

    What is committed stands, whatever becomes of the rest: when blocks run short, and when it is refused.

    Attributes:
        sequence_id: Whose.
        token_ids: Tokens that became known since.
        num_slots: How many tokens the table must hold; 0 for all known ones.
        num_computed_tokens: Commits first, as :class:`CommitSequence` does: an engine's step in one operation. 0
            commits nothing.
        spans: What these tokens stand for beside their ids; offsets are of the whole sequence.
    """

    sequence_id: str
    token_ids: Sequence[int] = ()
    num_slots: int = 0
    num_computed_tokens: int = 0
    spans: Sequence[TokenSpan] = ()


@dataclass(frozen=True, slots=True)
class CommitSequence:
    """Say up to where the engine's memory holds a sequence: its full blocks can be hit from now on."""

    sequence_id: str
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class ForkSequence:
    """Begin a sequence that shares another one's blocks; whoever extends first copies. Answered with its table.

    It has the other's adapter, salt, tenant, and the spans of the tokens in common.

    Attributes:
        sequence_id: The one that is branched.
        new_sequence_id: Names the branch.
        num_tokens: How many tokens they have in common, not ending within a span; 0 for all that was committed.
        priority: The branch's.
    """

    sequence_id: str
    new_sequence_id: str
    num_tokens: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class CloseSequence:
    """End a sequence. What it holds stays cached until the blocks are needed."""

    sequence_id: str


SequenceOperation: TypeAlias = OpenSequence | ExtendSequence | CommitSequence | ForkSequence | CloseSequence


@dataclass(frozen=True, slots=True)
class SequenceTable:
    """A sequence's block table after an operation.

    Attributes:
        block_ids: The whole table: token ``i`` belongs into block ``block_ids[i // block_size]``. Read only: it is the
            pool's own list, which later operations on the sequence (of the same batch, too) bring up to date; copy it
            to keep it as it is.
        num_computed_tokens: How many of its tokens have K/V in these blocks.
        copies: Pairs of source and target block, to copy whole and in order before anything is written.
        first_block: Where in the table the operation changed it; entries before that are as they were.
    """

    block_ids: Sequence[int]
    num_computed_tokens: int
    copies: tuple[tuple[int, int], ...] = ()
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class BlockShortage:
    """Too few blocks are free; nothing has changed but for what an :class:`ExtendSequence` committed first.

    Attributes:
        needed_blocks: How many the operation takes.
        free_blocks: How many are free.
        victim_ids: Sequences that should give way, first to last: close them, and ask again. Empty when none should:
            the asking sequence comes last itself, or those behind it do not free enough. Then wait until another one
            closes, or close it.
    """

    needed_blocks: int
    free_blocks: int
    victim_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SequenceDone:
    """An operation succeeded that has no table to show."""


SequenceResult: TypeAlias = SequenceTable | BlockShortage | SequenceDone | KvPlaneError


@dataclass(frozen=True, slots=True)
class SequencePoolInfo:
    """A pool at one moment; see ``SequencePoolInfo`` in the contract. Times are in seconds."""

    pool_id: str
    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int
    num_sequences: int
    prefix_queries: int
    prefix_hits: int
    lease_seconds: float
    lease_remaining_seconds: float
    last_batch_id: int
    max_spans: int = 0
    isolate_tenants: bool = False


class SequencePool:
    """One engine's pool; an asynchronous context manager that closes it.

    One batch is under way at a time: calls wait for each other. A batch whose answer was lost is sent again, and not
    applied twice: at once after UNAVAILABLE, else (a timeout, a cancellation, Ctrl-C) by the next call.

    Attributes:
        info: The pool as it was opened.
        recovered: What ``update`` learned, before its own batch, of batches whose answer was lost: each operation with
            its result, whose copies are to be made first. Nearly always empty; kept until ``update`` is called after
            a call of it that returned.
    """

    def __init__(
        self,
        info: SequencePoolInfo,
        update: Callable[[pb.UpdateSequencesRequest], Awaitable[pb.UpdateSequencesResponse]],
        close: Callable[[str], Awaitable[None]],
    ) -> None:
        self.info = info
        self._update = update
        self._close = close
        self._lock = asyncio.Lock()
        self._last_batch_id = info.last_batch_id
        self._tables: dict[str, list[int]] = {}
        self._unanswered: tuple[pb.UpdateSequencesRequest, list[SequenceOperation]] | None = None
        self.recovered: list[tuple[SequenceOperation, SequenceResult]] = []
        self._is_recovered_known = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def update(self, operations: Iterable[SequenceOperation] = ()) -> list[SequenceResult]:
        """Applies operations in order. Without any it renews the lease.

        Returns:
            For each operation its result: a table, done, a shortage of blocks, or the error that it was refused with.
            One that fails changes nothing (but what an :class:`ExtendSequence` committed first) and stops no other.

        Raises:
            InvalidArgumentError: A value cannot be sent at all, or there are too many operations.
            FailedPreconditionError: There are spans, and the manager is too old to know them: it would take two images
                for one. Nothing was sent.
            ResourceExhaustedError: The batch is too large for one message.
            NotFoundError: The pool's lease ran out, or the manager was started anew: open another.
            AbortedError: Somebody else uses this pool.
            UnavailableError, DeadlineExceededError: No answer came. The batch may have been applied: the next call
                finds out before it sends its own, see ``recovered``.
        """
        done = list(operations)
        if not self.info.max_spans:
            _require_no_spans(done)
        messages = [_to_operation(operation) for operation in done]
        async with self._lock:
            if self._is_recovered_known:
                self.recovered = []
                self._is_recovered_known = False
            if self._unanswered is not None:
                lost = self._unanswered[1]
                self.recovered += zip(lost, await self._settle(*self._unanswered), strict=True)
            request = pb.UpdateSequencesRequest(
                pool_id=self.info.pool_id, batch_id=self._last_batch_id + 1, operations=messages
            )
            results = await self._settle(request, done)
            self._is_recovered_known = True
            return results

    async def close(self) -> None:
        """Closes the pool. Raises NotFoundError when it is gone already."""
        await self._close(self.info.pool_id)

    async def _settle(
        self, request: pb.UpdateSequencesRequest, operations: list[SequenceOperation]
    ) -> list[SequenceResult]:
        """Sends a batch, for the first time or again. Until it is known what became of it, no other may follow."""
        self._unanswered = request, operations
        try:
            response = await self._update(request)
        except _NOT_APPLIED:
            self._unanswered = None
            raise
        self._unanswered = None
        self._last_batch_id = request.batch_id
        if len(response.results) != len(operations):
            raise InternalError(f"expected {len(operations)} results, got {len(response.results)}: report it")
        return [self._result(*pair) for pair in zip(operations, response.results, strict=True)]

    def _result(self, operation: SequenceOperation, result: pb.SequenceResult) -> SequenceResult:
        match result.WhichOneof("result"):
            case "table":
                return self._table(operation, result.table)
            case "done":
                if isinstance(operation, CloseSequence):
                    self._tables.pop(operation.sequence_id, None)
                return SequenceDone()
            case "shortage":
                shortage = result.shortage
                return BlockShortage(shortage.needed_blocks, shortage.free_blocks, tuple(shortage.victim_ids))
            case "error":
                return error_from_wire(result.error)
            case _:
                raise InternalError("expected a result that this client knows, got none: use a newer client")

    def _table(self, operation: SequenceOperation, message: pb.SequenceTable) -> SequenceTable:
        name = operation.new_sequence_id if isinstance(operation, ForkSequence) else operation.sequence_id
        first = message.first_block
        if isinstance(operation, ExtendSequence):
            block_ids = self._tables[name]
            if len(block_ids) < first:
                raise InternalError(
                    f"expected a table of {first} blocks to go on from, got {len(block_ids)}: report it"
                )
            block_ids[first:] = _values(message.block_ids)
        else:
            block_ids = self._tables[name] = _values(message.block_ids).tolist()
        copies = zip(_values(message.copy_source_ids), _values(message.copy_target_ids), strict=True)
        return SequenceTable(block_ids, message.num_computed_tokens, tuple(copies), first)


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


def _to_operation(operation: SequenceOperation) -> pb.SequenceOperation:
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


def _require_no_spans(operations: Iterable[SequenceOperation]) -> None:
    for operation in operations:
        if isinstance(operation, OpenSequence | ExtendSequence) and operation.spans:
            raise FailedPreconditionError(
                f"spans: expected none of sequence {operation.sequence_id!r}, since the manager does not know them and"
                f" would share what is not the same, got {len(operation.spans)}; upgrade the manager"
            )


def _column(values: Sequence[int]) -> common_pb2.Int32Array:
    return common_pb2.Int32Array(data=array("i", values).tobytes())


def _values(column: common_pb2.Int32Array) -> array[int]:
    values = array("i")
    values.frombytes(column.data)
    return values
