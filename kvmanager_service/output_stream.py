"""Where output waits between the engine's step and the wire.

Station: the engine pushes (synchronously, once per step and request), the inference servicer reads. `RequestStream` is
one request's output on its way; `OutputStream` sends it as one Generate call, `ManyStream` sends those of many requests
as one GenerateMany call.

A reader that is slow, or not scheduled yet, finds everything since its last read merged into one message. So a push
never waits, what is pending is bounded by the request's max_tokens, and all pushes of one step (during which no reader
runs) make one message.
"""

from __future__ import annotations

import asyncio

from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.core.request import FinishReason, RequestOutput, TokenLogprobs
from kvmanager_service.engine_api import StopMatch
from kvmanager_service.errors import to_status
from kvmanager_service.text.output_text import OutputText

__all__ = ["FINISH_REASONS", "ManyStream", "OutputStream", "RequestStream"]

FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
"""The wire's finish reasons. ERROR has none: the stream fails instead."""


class RequestStream:
    """One request's output: what was pushed and not yet taken.

    Attributes:
        request_id: the request.
        finished: whether the last output was pushed.
        error: what the request failed with, after its last piece is taken.
    """

    __slots__ = (
        "_cached_tokens",
        "_completion_tokens",
        "_finish_reason",
        "_logprobs",
        "_prompt_tokens",
        "_started",
        "_stop_token_id",
        "_text",
        "_text_parts",
        "_token_ids",
        "error",
        "finished",
        "request_id",
    )

    def __init__(self, request_id: str, prompt_tokens: int, text: OutputText | None, num_resumed: int = 0) -> None:
        """Start a stream; `text` None means that no text is made."""
        self.request_id = request_id
        self.finished = False
        self.error: Exception | None = None
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = num_resumed
        self._cached_tokens = 0
        self._started = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text_parts: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._stop_token_id: int | None = None

    @property
    def has_output(self) -> bool:
        """Whether there is something to take."""
        return bool(self._token_ids) or self._finish_reason is not None

    def absorb(self, output: RequestOutput) -> StopMatch | None:
        """Take what a step brought; see `OutputSink.push`."""
        self._cached_tokens = output.num_cached_tokens
        token_ids = output.token_ids
        match = self._absorb_text(output) if self._text is not None else None
        if match is not None:
            token_ids = token_ids[: match.num_tokens]
        self._token_ids += token_ids
        self._completion_tokens += len(token_ids)
        if output.logprobs:
            self._logprobs += output.logprobs[: len(token_ids)]
        if match is not None:
            self._finish_reason = FinishReason.STOP
            self.finished = True
        elif output.finish_reason is not None:
            self.finished = True
            self.error = output.error
            if output.error is None:
                self._finish_reason = output.finish_reason
                self._stop_token_id = output.stop_token_id
        return match

    def take(self) -> pb.GenerateResponse:
        """Return everything pending as one message."""
        response = pb.GenerateResponse(
            request_id=self.request_id, text="".join(self._text_parts), token_ids=self._token_ids
        )
        self._token_ids, self._text_parts = [], []
        if self._logprobs:
            response.logprobs.extend(map(_to_logprobs, self._logprobs))
            self._logprobs = []
        if self._finish_reason is not None:
            response.finish_reason = FINISH_REASONS[self._finish_reason]
            if self._stop_token_id is not None:
                response.stop_token_id = self._stop_token_id
            elif self._text is not None and self._text.match is not None:
                response.stop_string = self._text.match
            self._finish_reason = None
        if not self._started or self.finished:
            self._started = True
            response.usage.prompt_tokens = self._prompt_tokens
            response.usage.completion_tokens = self._completion_tokens
            response.usage.cached_tokens = self._cached_tokens
        return response

    def _absorb_text(self, output: RequestOutput) -> StopMatch | None:
        """Make the text of an output's tokens; a token that ended the request has none."""
        text, parts = self._text, self._text_parts
        assert text is not None
        token_ids = output.token_ids if output.stop_token_id is None else output.token_ids[:-1]
        for index, token_id in enumerate(token_ids):
            if piece := text.push(token_id):
                parts.append(piece)
            if text.match is not None:
                return StopMatch(text.match, index + 1)
        if output.finish_reason is not None and output.error is None:
            parts.append(text.finish())
            if text.match is not None:
                return StopMatch(text.match, len(output.token_ids))
        return None


class OutputStream:
    """The output of one Generate call: an `OutputSink` for the engine, an async iterator for the servicer."""

    def __init__(self, stream: RequestStream) -> None:
        self.stream = stream
        self._ready = asyncio.Event()

    def push(self, output: RequestOutput) -> StopMatch | None:
        """Take what a step brought and wake the reader."""
        match = self.stream.absorb(output)
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
        while not stream.has_output:
            if stream.error is not None:
                raise stream.error
            if stream.finished:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return stream.take()


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
        outputs = [stream.take() for stream in pending if stream.has_output]
        return pb.GenerateManyResponse(outputs=outputs, errors=errors)


def _to_logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
    return pb.TokenLogprobs(
        logprob=entry.logprobs[0], top=[pb.TokenLogprob(token_id=token, logprob=value) for token, value in top]
    )
