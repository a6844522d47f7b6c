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
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

from kvplane.kvmanager.v1 import sequence_pool_pb2 as pb

from kvplane_client._sequence_wire import to_operation, values
from kvplane_client.errors import (
    AbortedError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ManagerTooOldError,
    NotFoundError,
    ResourceExhaustedError,
    error_from_wire,
)
from kvplane_client.sequence_types import (
    BlockShortage,
    CloseSequence,
    CommitSequence,
    ExtendSequence,
    ForkSequence,
    MultimodalItem,
    OpenSequence,
    PromptEmbedding,
    SequenceDone,
    SequenceOperation,
    SequencePoolInfo,
    SequenceResult,
    SequenceTable,
    TokenSpan,
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
]

_NOT_APPLIED = (InvalidArgumentError, NotFoundError, AbortedError, ResourceExhaustedError, ManagerTooOldError)
"""What a batch is refused with as a whole: too many operations, no such pool, not its turn, too large for a message, a
manager that is too old for it. After any other error it may have been applied."""


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
        messages = [to_operation(operation) for operation in done]
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
            block_ids[first:] = values(message.block_ids)
        else:
            block_ids = self._tables[name] = values(message.block_ids).tolist()
        copies = zip(values(message.copy_source_ids), values(message.copy_target_ids), strict=True)
        return SequenceTable(block_ids, message.num_computed_tokens, tuple(copies), first)


def _require_no_spans(operations: Iterable[SequenceOperation]) -> None:
    for operation in operations:
        if isinstance(operation, OpenSequence | ExtendSequence) and operation.spans:
            raise FailedPreconditionError(
                f"spans: expected none of sequence {operation.sequence_id!r}, since the manager does not know them and"
                f" would share what is not the same, got {len(operation.spans)}; upgrade the manager"
            )
