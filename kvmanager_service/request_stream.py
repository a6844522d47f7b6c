"""One output of a request on its way from the engine's step to the wire.

Station: made by `admission`; written by the sink of an `output_stream`, which also takes from it. What was pushed since
the last take is merged into one message.
"""

from __future__ import annotations

from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.core.request import FinishReason, RequestOutput, TokenLogprobs
from kvmanager_service.engine_api import StopMatch
from kvmanager_service.text.output_text import OutputText

__all__ = ["FINISH_REASONS", "RequestStream"]

FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
"""The wire's finish reasons. ERROR has none: the stream fails instead."""


class RequestStream:
    """One output of a request: what was pushed and not yet taken.

    Attributes:
        request_id: the request.
        finished: whether the last output was pushed.
        error: what the request failed with, after its last piece is taken.
    """

    __slots__ = (
        "_cached_tokens",
        "_completion_tokens",
        "_finish_reason",
        "_index",
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

    def __init__(
        self, request_id: str, prompt_tokens: int, text: OutputText | None, num_resumed: int = 0, index: int = 0
    ) -> None:
        """Start a stream; `text` None means that no text is made, `index` is which of a request's outputs it is."""
        self.request_id = request_id
        self._index = index
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
            request_id=self.request_id,
            text="".join(self._text_parts),
            token_ids=self._token_ids,
            index=self._index,
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


def _to_logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
    return pb.TokenLogprobs(
        logprob=entry.logprobs[0], top=[pb.TokenLogprob(token_id=token, logprob=value) for token, value in top]
    )
