"""Where output waits between the engine's step and the wire.

Station: the engine pushes (synchronously, once per step and request), the inference servicer reads. `OutputStream`
sends one request's outputs as a Generate call, `ManyStream` those of many requests as one GenerateMany call.

A reader that is slow, or not scheduled yet, finds everything since its last read merged into one message. So a push
never waits, what is pending is bounded by the request's max_tokens, and all pushes of one step (during which no reader
runs) make one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.core.request import RequestOutput
from kvmanager_service.engine_api import OutputSink, StopMatch
from kvmanager_service.errors import to_status
from kvmanager_service.pacer import Pacer
from kvmanager_service.request_stream import RequestStream

__all__ = ["ManyStream", "OutputStream"]


MAX_UNREAD = 4_000
"""Requests whose output or error a GenerateMany reader may leave unread before no more orders of it are taken."""


class _BranchSink:
    """The sink of one more output of an `OutputStream`."""

    __slots__ = ("_output", "_stream")

    def __init__(self, output: OutputStream, stream: RequestStream) -> None:
        self._output = output
        self._stream = stream

    def push(self, output: RequestOutput) -> StopMatch | None:
        return self._output.take_in(self._stream, output)


class OutputStream:
    """The outputs of one Generate call: an `OutputSink` for the engine, an async iterator for the servicer.

    Between two messages lies the pace of `pacer`, so that many streams do not drown the loop in small messages; the
    first message and the last do not wait.
    """

    def __init__(self, stream: RequestStream, pacer: Pacer) -> None:
        self.stream = stream
        self._pending: dict[RequestStream, None] = {}
        self._num_open = 1
        self._error: Exception | None = None
        self._pacer = pacer
        self._resting = False
        self._ready = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether every output has had its last push."""
        return not self._num_open

    def branch(self, stream: RequestStream) -> OutputSink:
        """Return the sink of one more output of the request, which is about to be submitted."""
        self._num_open += 1
        return _BranchSink(self, stream)

    def push(self, output: RequestOutput) -> StopMatch | None:
        """Take what a step brought and wake the reader."""
        return self.take_in(self.stream, output)

    def take_in(self, stream: RequestStream, output: RequestOutput) -> StopMatch | None:
        """Take what a step brought of one output and wake the reader."""
        match = stream.absorb(output)
        if stream.has_output:
            self._pending[stream] = None
        if stream.finished:
            self._num_open -= 1
            self._error = self._error or stream.error
        if not self._resting or self._is_over:
            self._ready.set()
        return match

    @property
    def _is_over(self) -> bool:
        return not self._num_open or self._error is not None

    def __aiter__(self) -> OutputStream:
        """Iterate once; there is one reader."""
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        """Wait for output and return all there is.

        Raises:
            StopAsyncIteration: the last message was returned.
            CoreError: what the request failed with.
        """
        while not self._pending or (self._resting and not self._is_over):
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        stream = next(iter(self._pending))
        del self._pending[stream]
        rest = self._pacer.rest_s
        if rest and not self._pending and not self._is_over:
            self._resting = True
            asyncio.get_running_loop().call_later(rest, self._rested)
        return stream.take()

    def _rested(self) -> None:
        self._resting = False
        self._ready.set()


class _ManyRequest:
    """A request of a `ManyStream`: what its outputs have in common, so that none of them looks at the others.

    Attributes:
        request_id: the request.
        num_open: outputs that have not finished.
        failed: whether an output has failed, and with it the request: the client is told of no other.
    """

    __slots__ = ("failed", "num_open", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_open = 0
        self.failed = False

    @property
    def is_over(self) -> bool:
        return self.failed or not self.num_open


class _ManySink:
    """The sink of one output of a request of a `ManyStream`.

    Attributes:
        request: the request.
    """

    __slots__ = ("_many", "_stream", "request")

    def __init__(self, many: ManyStream, stream: RequestStream, request: _ManyRequest) -> None:
        self._many = many
        self._stream = stream
        self.request = request
        request.num_open += 1

    def branch(self, stream: RequestStream) -> _ManySink:
        """Return the sink of one more output of the request, which is about to be submitted."""
        return _ManySink(self._many, stream, self.request)

    def push(self, output: RequestOutput) -> StopMatch | None:
        request = self.request
        if request.failed:
            return None  # the client was told that the request is over
        match = self._stream.absorb(output)
        if self._stream.finished:
            request.num_open -= 1
            request.failed = self._stream.error is not None
        self._many.wake(self._stream, request)
        if request.failed and request.num_open:
            self._many.abandon(request.request_id)
        return match


class ManyStream:
    """The outputs of one GenerateMany call: a sink for each request, and an async iterator for the servicer.

    Args:
        abandon: called with the id of a request of which one output has failed and others go on, to end these.
    """

    def __init__(self, abandon: Callable[[str], None]) -> None:
        self.abandon = abandon
        self._open: dict[str, _ManyRequest] = {}
        self._pending: dict[RequestStream, None] = {}
        self._errors: list[pb.RequestError] = []
        self._failure: Exception | None = None
        self._input_closed = False
        self._ready = asyncio.Event()
        self._room = asyncio.Event()

    async def wait_for_room(self) -> None:
        """Wait while too much is unread: without it, who sends orders and never reads would fill our memory."""
        while len(self._pending) + len(self._errors) >= MAX_UNREAD:
            self._room.clear()
            await self._room.wait()

    def sink(self, stream: RequestStream) -> _ManySink:
        """Return the sink for a request that is about to be submitted."""
        return _ManySink(self, stream, _ManyRequest(stream.request_id))

    def opened(self, request: _ManyRequest) -> None:
        """Note that a request was accepted, so that the call lasts until it has finished."""
        if not request.is_over:
            self._open[request.request_id] = request

    def fail(self, request_id: str, error: Exception) -> None:
        """Send an error for one request."""
        self._errors.append(pb.RequestError(request_id=request_id, error=to_status(error).to_proto()))
        self._ready.set()

    def close_input(self, failure: Exception | None = None) -> None:
        """Let the call end: after the last request, or at once with a failure of the whole call."""
        self._input_closed = True
        self._failure = failure
        self._ready.set()

    def is_open(self, request_id: str) -> bool:
        """Whether a request of this call is unfinished."""
        return request_id in self._open

    def unfinished(self) -> tuple[str, ...]:
        """Return the ids of the unfinished requests."""
        return tuple(self._open)

    def wake(self, stream: RequestStream, request: _ManyRequest) -> None:
        """Note that an output of a request has something to take, and wake the reader."""
        self._pending[stream] = None
        if request.is_over and self._open.get(request.request_id) is request:
            del self._open[request.request_id]
        self._ready.set()

    def __aiter__(self) -> ManyStream:
        """Iterate once; there is one reader."""
        return self

    async def __anext__(self) -> pb.GenerateManyResponse:
        """Wait for output of any request and return all there is.

        Raises:
            StopAsyncIteration: the input is closed and every request has finished.
            Exception: what `close_input` was given.
        """
        while not self._pending and not self._errors:
            if self._failure is not None:
                raise self._failure
            if self._input_closed and not self._open:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        pending, self._pending = self._pending, {}
        for stream in pending:
            if stream.error is not None:
                self.fail(stream.request_id, stream.error)
        errors, self._errors = self._errors, []
        self._room.set()
        outputs = [stream.take() for stream in pending if stream.has_output]
        return pb.GenerateManyResponse(outputs=outputs, errors=errors)
