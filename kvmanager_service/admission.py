"""Admission: a `GenerateRequest` becomes a request of the engine with a stream for its output.

Station: called by the inference servicer for `Generate` and `GenerateMany`; calls `convert`, the text model and the
engine. Holds no state but where ids, seeds and time come from.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.callers import tenant_of_request
from kvmanager_service.convert import check_request, to_new_request, token_array
from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.core.request import NewRequest
from kvmanager_service.engine_api import Engine, ModelView, OutputSink
from kvmanager_service.errors import PreconditionError
from kvmanager_service.request_stream import RequestStream
from kvmanager_service.text.output_text import OutputText
from kvmanager_service.text.stop_strings import StopStrings
from kvmanager_service.text.tokenizer import INLINE_CHARS
from kvmanager_service.text_model import INLINE_TURNS, TextModel

__all__ = ["Admission"]


class BranchingSink(OutputSink, Protocol):
    """Where the first output of a request goes; it makes the sinks of the others."""

    def branch(self, stream: RequestStream) -> OutputSink:
        """Return the sink of one more output of the request."""


_Sink = TypeVar("_Sink", bound=BranchingSink)

INLINE_RESUMED = 2_000
"""Resumed tokens that are detokenised on the loop (under 5 ms); more go to a thread."""


class Admission:
    """Checks, tokenises and submits requests."""

    def __init__(
        self,
        engine: Engine,
        *,
        isolate_tenants: bool = False,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        make_id: Callable[[], str] = lambda: secrets.token_hex(12),
    ) -> None:
        self._engine = engine
        self._isolate_tenants = isolate_tenants
        self._clock = clock
        self._draw_seed = draw_seed
        self._make_id = make_id

    @staticmethod
    def takes_long(request: pb.GenerateRequest) -> bool:
        """Whether admitting a request leaves the loop for a thread, so that others should not wait for it."""
        messages = request.chat.messages
        if len(request.text) > INLINE_CHARS // 2 or len(messages) > INLINE_TURNS:
            return True
        size = sum(len(message.content) for message in messages)
        return size > INLINE_CHARS // 2 or len(request.resume_token_ids.ids) > INLINE_RESUMED

    async def admit(self, request: pb.GenerateRequest, make_sink: Callable[[RequestStream], _Sink]) -> _Sink:
        """Submit a request.

        Args:
            request: as received.
            make_sink: called with the stream of the first output right before the request is submitted; makes its sink.

        Returns:
            The sink that was made.

        Raises:
            CoreError: the request was not accepted; nothing of it is left.
        """
        arrival_time = self._clock()
        model = self._engine.model()
        sampling = check_request(request, model)
        request.tenant = tenant_of_request(request.tenant)  # the message is nobody else's
        lora = self._engine.adapter(request.adapter) if request.adapter else None
        self._engine.check_open()  # reading a prompt is work that a request with no chance should not cost
        prompt = await _encode(request, model)
        new = to_new_request(
            request,
            prompt,
            sampling,
            model,
            request_id=request.request_id or self._make_id(),
            seed=self._draw_seed(),
            arrival_time=arrival_time,
            isolate_tenants=self._isolate_tenants,
            lora=lora,
        )
        streams = []
        for index in range(1 + len(new.branches)):
            text = None if model.text is None else await _output_text(request, new, model.text)
            num_resumed = len(request.resume_token_ids.ids)
            streams.append(RequestStream(new.request_id, len(prompt), text, num_resumed=num_resumed, index=index))
        sink = make_sink(streams[0])
        self._engine.submit(new, sink, *map(sink.branch, streams[1:]))
        return sink


async def _encode(request: pb.GenerateRequest, model: ModelView) -> array[int]:
    """Return the prompt's tokens."""
    if request.HasField("token_ids"):
        return token_array(request.token_ids.ids)
    if model.text is None:
        raise PreconditionError(
            "NO_TOKENIZER",
            "prompt: expected token_ids, since the served model has no tokenizer, got text; tokenise it yourself",
            field="prompt",
        )
    if request.HasField("text"):
        return await model.text.encode_text(request.text, model.max_model_len)
    messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
    return await model.text.encode_chat(messages, model.max_model_len)


async def _output_text(request: pb.GenerateRequest, new: NewRequest, model: TextModel) -> OutputText:
    """Make the output's text, brought to where the earlier stream broke off."""
    rules = request.stopping
    stop = StopStrings(rules.stop, include=rules.include_stop) if rules.stop else None
    text = OutputText(model.tokenizer.detokenizer(), stop, new.stop.min_tokens)
    resumed = request.resume_token_ids.ids
    if len(resumed) <= INLINE_RESUMED:
        _replay(text, list(resumed))
    else:
        await asyncio.to_thread(_replay, text, list(resumed))
    return text


def _replay(text: OutputText, resumed: list[int]) -> None:
    """Push tokens whose text the client has already.

    Raises:
        InvalidRequestError: they hold a stop string.
    """
    for token_id in resumed:
        text.push(token_id)
        if text.match is not None:
            raise InvalidRequestError(
                "INVALID_PARAMETER",
                "resume_token_ids: expected tokens of an unfinished output, got a stop string in their text; the"
                " earlier stream was complete",
                field="resume_token_ids",
            )
