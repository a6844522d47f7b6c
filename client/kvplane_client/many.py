"""Many requests on one stream, resumed together when it breaks.

Station: what ``AsyncClient.many`` returns. It calls InferenceService.GenerateMany: one runner task owns the call, reads
its responses and hands each output to the request it belongs to. Requests are tracked by the id of their current
attempt; a piece for an id that is not tracked belongs to a request nobody waits for any more.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, Unpack

import grpc
import grpc.aio
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvplane_client._manager_calls import ManagerCalls
from kvplane_client._request_builder import build_fork, build_request
from kvplane_client._resumable import ResumableRequest
from kvplane_client._stubs import task_is_cancelled
from kvplane_client.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    KvPlaneError,
    ManagerTooOldError,
    RequestCancelledError,
    UnavailableError,
    error_from_rpc,
    error_from_wire,
)
from kvplane_client.many_request import Fork, ManyRequest
from kvplane_client.retry import Deadline, RetryState
from kvplane_client.types import GenerateOptions, Prompt

if TYPE_CHECKING:
    from kvplane.kvmanager.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

__all__ = ["ManyStream"]

_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.GenerateManyRequest, pb.GenerateManyResponse]"
_LOST_STATUS = "Internal error from Core"


class ManyStream:
    """Any number of requests multiplexed over one call; a context manager.

    A broken call is made anew and every unfinished request goes on where it was. Leaving the context aborts what is
    unfinished.

    Args:
        stub: The service.
        calls: How the client makes calls. Its timeout is that of a request that names none, and of none for the stream.
    """

    def __init__(self, stub: InferenceServiceAsyncStub, calls: ManagerCalls) -> None:
        self._stub = stub
        self._calls = calls
        self._requests: dict[str, ManyRequest] = {}
        self._orders: asyncio.Queue[pb.GenerateManyRequest] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def submit(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> ManyRequest:
        """Starts a request.

        Args:
            prompt: Text, token ids or a conversation.
            **options: See :class:`GenerateOptions`.

        Returns:
            The request, to iterate over.

        Raises:
            InvalidArgumentError: A value cannot be sent at all; others are refused through the request.
            AlreadyExistsError: The id belongs to an unfinished request of this stream.
            FailedPreconditionError: The stream is closed.
        """
        self._require_open()
        return self._start(ResumableRequest(build_request(prompt, options)), options.get("deadline"))

    def _fork(self, parent: ManyRequest, fork: Fork) -> ManyRequest:
        """Starts a request that branches off from one of this stream; see :meth:`ManyRequest.fork`."""
        self._require_open()
        state = parent.state
        output = (state.wire_id, fork.index)
        request = build_fork(state.request, output, fork.token_ids, fork.request_id, fork.seed)
        return self._start(ResumableRequest(request), fork.deadline)

    def _require_open(self) -> None:
        if self._closed:
            raise FailedPreconditionError("the stream is closed: open another with many()")

    def _start(self, state: ResumableRequest, deadline: float | None) -> ManyRequest:
        if any(request.request_id == state.request_id for request in self._requests.values()):
            raise AlreadyExistsError(f"request_id {state.request_id!r} is unfinished on this stream: choose another")
        limit = Deadline(self._calls.timeout if deadline is None else deadline)
        request = ManyRequest(state, self._calls.new_retry(limit), self.abort, self._fork)
        self._requests[state.wire_id] = request
        if (seconds := limit.remaining()) is not None:
            request.expiry = asyncio.get_running_loop().call_later(seconds, self._expire, request)
        self._send(request)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run(), name="kvplane-many")
        return request

    def abort(self, request: ManyRequest) -> None:
        """Ends one request of this stream; one that is over is left alone."""
        if self._requests.get(request.state.wire_id) is request:
            request.abort_asked = True
            if request.sent:
                self._order(pb.GenerateManyRequest(abort_request_id=request.state.wire_id))

    async def aclose(self) -> None:
        """Ends the stream and every unfinished request. May be called any number of times."""
        self._closed = True
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            await asyncio.wait({runner})
            if not runner.cancelled() and (failure := runner.exception()) is not None:
                raise failure
        self._fail_all(RequestCancelledError("the stream was closed before the request had finished"))

    async def _run(self) -> None:
        """Makes the call, and makes it anew while requests are unfinished and the policy allows."""
        retry = self._calls.new_retry(Deadline(None))
        reason: KvPlaneError = InternalError("the client's reader of this stream has failed")
        try:
            while True:
                error = await self._one_call(retry)
                if not self._requests:
                    return
                pause = retry.next_pause(error)
                if pause is None:
                    reason = error
                    return
                for request in list(self._requests.values()):
                    if request.sent:
                        self._renew(request, error)
                await asyncio.sleep(pause)
        finally:
            # Whatever ended the runner, nobody is left waiting; when the user closed the stream, aclose() says so.
            if not self._closed:
                self._fail_all(reason)

    async def _one_call(self, retry: RetryState) -> KvPlaneError:
        """Serves one call until it ends and returns why it did."""
        self._calls.contract.note_connection()
        call = self._stub.GenerateMany()
        self._orders = asyncio.Queue()
        for request in list(self._requests.values()):
            self._send(request)
        writer = asyncio.create_task(self._write(call, self._orders), name="kvplane-many-writer")
        try:
            while isinstance(response := await call.read(), pb.GenerateManyResponse):
                self._dispatch(response, retry)
            return InternalError("the server ended the stream before its requests had finished")
        except grpc.aio.AioRpcError as rpc_error:
            return _why_ended(rpc_error)
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            return RequestCancelledError("the client was closed during the stream")
        finally:
            self._orders = None
            writer.cancel()
            call.cancel()
            await asyncio.wait({writer})
            if not writer.cancelled():
                writer.result()

    async def _write(self, call: _Call, orders: asyncio.Queue[pb.GenerateManyRequest]) -> None:
        """Writes orders until the call ends; why it ended is the reader's to tell."""
        withheld: set[str] = set()
        while True:
            order = await orders.get()
            if self._is_overtaken(order, withheld):
                continue
            try:
                await call.write(order)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

    def _is_overtaken(self, order: pb.GenerateManyRequest, withheld: set[str]) -> bool:
        """Whether an order starts a request that ended before its turn, or aborts one that so was never started."""
        if order.HasField("generate"):
            wire_id = order.generate.request_id
            if wire_id in self._requests:
                return False
            withheld.add(wire_id)
            return True
        if order.abort_request_id in withheld:
            withheld.remove(order.abort_request_id)
            return True
        return False

    async def _ask(self, request: ManyRequest) -> None:
        """Sends a request once the manager has said that it knows what must not be ignored of it; else it fails.

        Nobody waits but this request, and no longer than it lives: who forgets it ends this task.
        """
        error: KvPlaneError
        attempt = request.state.attempt()
        try:
            if (question := self._parents_question(attempt)) is not None:
                await asyncio.wait({question})
            await self._calls.contract.require(attempt, timeout=None)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_from_rpc(rpc_error)
        except ManagerTooOldError as too_old:
            error = too_old
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            error = RequestCancelledError("the client was closed before the request was sent")
        else:
            request.question = None
            self._send(request)
            return
        request.question = None
        self._request_failed(request, error)

    def _parents_question(self, attempt: pb.GenerateRequest) -> asyncio.Task[None] | None:
        """What the parent of a fork, whom the manager has to know first, waits for."""
        output = attempt.fork_of
        parent = self._requests.get(output) or self._requests.get(output.rpartition("#")[0])
        return None if parent is None else parent.question

    def _dispatch(self, response: pb.GenerateManyResponse, retry: RetryState) -> None:
        for output in response.outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            if output.token_ids:
                retry.progressed()
                request.retry.progressed()
            self._deliver(request, output)
        for failure in response.errors:
            request = self._requests.get(failure.request_id)
            if request is not None:
                self._request_failed(request, error_from_wire(failure.error))

    def _deliver(self, request: ManyRequest, output: pb.GenerateResponse) -> None:
        try:
            chunk = request.state.accept(output)
        except KvPlaneError as error:
            self._end(request, error)
            return
        if request.state.finished:
            self._forget(request)
        request.put(chunk)

    def _request_failed(self, request: ManyRequest, error: KvPlaneError) -> None:
        pause = request.retry.next_pause(error)
        if pause is None:
            self._end(request, error)
            return
        self._renew(request, error)
        asyncio.get_running_loop().call_later(pause, self._send, request)

    def _renew(self, request: ManyRequest, error: KvPlaneError) -> None:
        """Prepares a request's next attempt."""
        del self._requests[request.state.wire_id]
        request.state.prepare_retry(error)
        self._requests[request.state.wire_id] = request
        request.sent = False

    def _send(self, request: ManyRequest) -> None:
        """Sends a request's current attempt, once; without a call it waits for the next one.

        Where the manager has to be asked first, others overtake it, but for its forks.
        """
        live = self._requests.get(request.state.wire_id) is request
        if self._orders is None or request.sent or request.question is not None or not live:
            return
        attempt = request.state.attempt()
        try:
            may_send = self._parents_question(attempt) is None and self._calls.contract.allows(attempt)
        except ManagerTooOldError as too_old:
            self._request_failed(request, too_old)
            return
        if not may_send:
            request.question = asyncio.create_task(self._ask(request), name="kvplane-many-question")
            return
        request.sent = True
        self._order(pb.GenerateManyRequest(generate=attempt))
        if request.abort_asked:
            self._order(pb.GenerateManyRequest(abort_request_id=request.state.wire_id))

    def _order(self, order: pb.GenerateManyRequest) -> None:
        if self._orders is not None:
            self._orders.put_nowait(order)

    def _expire(self, request: ManyRequest) -> None:
        self.abort(request)
        self._end(request, DeadlineExceededError(f"request {request.request_id!r}: its deadline passed"))

    def _end(self, request: ManyRequest, error: KvPlaneError) -> None:
        self._forget(request)
        request.put(error)

    def _forget(self, request: ManyRequest) -> None:
        del self._requests[request.state.wire_id]
        if request.expiry is not None:
            request.expiry.cancel()
        if request.question is not None:
            request.question.cancel()

    def _fail_all(self, error: KvPlaneError) -> None:
        for request in list(self._requests.values()):
            self._end(request, error)


def _why_ended(rpc_error: grpc.aio.AioRpcError) -> KvPlaneError:
    """Returns the error of an ended call, but UNAVAILABLE where ``grpc.aio`` has lost it.

    A write that meets the end of the call makes ``grpc.aio`` overwrite the server's status with an INTERNAL of its own
    (grpc/grpc#36066). Trying again is harmless, and tells the status when it is not about the connection.
    """
    if rpc_error.code() is grpc.StatusCode.INTERNAL and rpc_error.details() == _LOST_STATUS:
        return UnavailableError("the stream ended during a write, and its status was lost")
    return error_from_rpc(rpc_error)
