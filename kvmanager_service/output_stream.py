"""Where output waits between the engine's step and the wire.

Station: the engine pushes (synchronously, once per step and request), the inference servicer reads. `OutputStream`
sends one request's output as a Generate call, `ManyStream` that of many requests as one GenerateMany call.

A reader that is slow, or not scheduled yet, finds everything since its last read merged into one message. So a push
never waits, what is pending is bounded by the request's max_tokens, and all pushes of one step (during which no reader
runs) make one message.
"""

from __future__ import annotations

import asyncio

from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.core.request import RequestOutput
from kvmanager_service.engine_api import StopMatch
from kvmanager_service.errors import to_status
from kvmanager_service.pacer import Pacer
from kvmanager_service.request_stream import RequestStream

__all__ = ["ManyStream", "OutputStream"]


MAX_UNREAD = 4_000
"""Requests whose output or error a GenerateMany reader may leave unread before no more orders of it are taken."""


class OutputStream:
    """The output of one Generate call: an `OutputSink` for the engine, an async iterator for the servicer.

    Between two messages lies the pace of `pacer`, so that many streams do not drown the loop in small messages; the
    first message and the last do not wait.
    """

    def __init__(self, stream: RequestStream, pacer: Pacer) -> None:
        self.stream = stream
        self._pacer = pacer
        self._resting = False
        self._ready = asyncio.Event()

    def push(self, output: RequestOutput) -> StopMatch | None:
        """Take what a step brought and wake the reader."""
        match = self.stream.absorb(output)
        if not self._resting or self.stream.finished:
            self._ready.set()
        return match

    def __aiter__(self) -> OutputStream:
        """Iterate once; there is one reader."""
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        """Wait for output and return all there is.

        Raises:
            StopAsyncIteration: the last message was returned.
            CoreError: what the request failed with.
        """
        stream = self.stream
        while not stream.has_output or (self._resting and not stream.finished):
            if stream.error is not None:
                raise stream.error
            if stream.finished:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        rest = self._pacer.rest_s
        if rest and not stream.finished:
            self._resting = True
            asyncio.get_running_loop().call_later(rest, self._rested)
        return stream.take()

    def _rested(self) -> None:
        self._resting = False
        self._ready.set()


class _ManySink:
    """The sink of one request of a `ManyStream`."""

    __slots__ = ("_many", "stream")

    def __init__(self, many: ManyStream, stream: RequestStream) -> None:
        self._many = many
        self.stream = stream

    def push(self, output: RequestOutput) -> StopMatch | None:
        match = self.stream.absorb(output)
        self._many.wake(self.stream)
        return match


class ManyStream:
    """The outputs of one GenerateMany call: a sink for each request, and an async iterator for the servicer."""

    def __init__(self) -> None:
        self._open: dict[str, RequestStream] = {}
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
        return _ManySink(self, stream)

    def opened(self, stream: RequestStream) -> None:
        """Note that a request was accepted, so that the call lasts until it has finished."""
        if not stream.finished:
            self._open[stream.request_id] = stream

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

    def wake(self, stream: RequestStream) -> None:
        """Note that a request has output, and wake the reader."""
        self._pending[stream] = None
        if stream.finished:
            self._open.pop(stream.request_id, None)
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
