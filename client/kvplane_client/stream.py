"""One request on a stream of its own, resumed when the stream breaks.

Station: what ``AsyncClient.stream`` returns. It calls InferenceService.Generate and knows nothing of other requests.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

import grpc
import grpc.aio
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvplane_client._contract import ManagerContract
from kvplane_client._resumable import ResumableRequest
from kvplane_client._stubs import task_is_cancelled
from kvplane_client.errors import (
    InternalError,
    KvPlaneError,
    NotFoundError,
    RequestCancelledError,
    error_from_rpc,
)
from kvplane_client.retry import Deadline, RetryState
from kvplane_client.types import Chunk, Completion, completions_of

if TYPE_CHECKING:
    from kvplane.kvmanager.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

__all__ = ["GenerationStream"]

_Call: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"


class GenerationStream:
    """The output of one request: an asynchronous iterator of :class:`Chunk` and a context manager.

    The request starts with the first chunk that is asked for. Leaving the context, or cancelling the task that waits
    for a chunk, ends it and frees its blocks on the server; so does dropping the stream, but at a time of Python's
    choosing. A stream serves one task.

    Attributes:
        request_id: The request's id.
    """

    def __init__(
        self,
        stub: InferenceServiceAsyncStub,
        contract: ManagerContract,
        request: ResumableRequest,
        retry: RetryState,
        deadline: Deadline,
    ) -> None:
        self._stub = stub
        self._contract = contract
        self._request = request
        self._retry = retry
        self._deadline = deadline
        self._call: _Call | None = None
        self._closed = False
        self._cancelled = False
        self.request_id = request.request_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Returns the next chunk.

        Raises:
            StopAsyncIteration: The last chunk was delivered, or the stream was closed.
            ManagerTooOldError: The manager does not know what must not be ignored of the request.
            KvPlaneError: The request failed; UNAVAILABLE only after the retry policy was exhausted.
        """
        if self._cancelled:
            raise RequestCancelledError(f"request {self.request_id!r} was cancelled while it was waited for")
        while not self._closed:
            try:
                if self._call is None:
                    self._call = await self._begin()
                response = await self._call.read()
            except grpc.aio.AioRpcError as rpc_error:
                await self._recover(error_from_rpc(rpc_error))
                continue
            except asyncio.CancelledError:
                self._cancelled = True
                if task_is_cancelled():
                    raise
                raise RequestCancelledError("the client was closed during the request") from None
            if isinstance(response, pb.GenerateResponse):
                if response.token_ids:
                    self._retry.progressed()
                return self._request.accept(response)
            self._end()
        raise StopAsyncIteration

    async def completion(self) -> Completion:
        """Waits for the end and returns everything of the first output not yet taken from the stream.

        Raises:
            KvPlaneError: The request failed.
        """
        return (await self.completions())[0]

    async def completions(self) -> list[Completion]:
        """Waits for the end and returns everything not yet taken from the stream, output by output.

        Raises:
            KvPlaneError: The request failed.
        """
        return await completions_of(self, self._request.num_outputs)

    async def abort(self) -> None:
        """Ends the request; the stream then delivers a last chunk with finish_reason ABORT.

        A request that is over, or not begun, needs no abort, so the server's NOT_FOUND is not an error here.

        Raises:
            KvPlaneError: The server could not be told.
        """
        try:
            order = pb.AbortRequest(request_id=self._request.wire_id)
            self._contract.note_connection()
            await self._stub.Abort(order, timeout=self._deadline.remaining())
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
            if not isinstance(error, NotFoundError):
                raise error from None

    async def aclose(self) -> None:
        """Ends the stream, and the request if it is unfinished. May be called any number of times."""
        self._closed = True
        if self._call is not None and not self._call.done():
            self._call.cancel()

    async def _begin(self) -> _Call:
        """Makes the call of the next attempt."""
        attempt = self._request.attempt()
        try:
            await self._contract.require(attempt, self._deadline.remaining())
        except KvPlaneError:
            self._closed = True
            raise
        return self._stub.Generate(attempt, timeout=self._deadline.remaining())

    async def _recover(self, error: KvPlaneError) -> None:
        """Prepares the next attempt after a pause, or raises."""
        self._call = None
        if self._request.finished:
            # The output is complete; only the status of the call was lost.
            self._closed = True
            return
        try:
            await self._retry.pause_or_raise(error)
        except KvPlaneError:
            self._closed = True
            raise
        self._request.prepare_retry(error)

    def _end(self) -> None:
        """The server ended the stream."""
        self._closed = True
        if not self._request.finished:
            raise InternalError(
                f"request {self.request_id!r}: the server ended the stream without a finish reason",
                metadata={"request_id": self.request_id},
            )
