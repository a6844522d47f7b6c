"""Admission: a `GenerateRequest` becomes a request of the engine with a stream for its output.

Station: called by the inference servicer for `Generate` and `GenerateMany`; calls `convert`, the text model and the
engine. Holds no state but where ids, seeds and time come from.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.callers import tenant_of_request
from kvmanager_service.convert import (
    check_request,
    open_outputs,
    resumed_field,
    resumed_ids,
    to_new_request,
    token_array,
)
from kvmanager_service.core.errors import invalid_parameter
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
    def takes_long(request: pb.GenerateRequest) -> bool:  # which nobody has checked yet
        """Whether admitting a request leaves the loop for a thread, so that others should not wait for it."""
        messages = request.chat.messages
        if len(request.text) > INLINE_CHARS // 2 or len(messages) > INLINE_TURNS:
            return True
        size = sum(len(message.content) for message in messages)
        return size > INLINE_CHARS // 2 or _num_resumed(request) > INLINE_RESUMED

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
        request_id = request.request_id or self._make_id()
        new = to_new_request(
            request,
            prompt,
            sampling,
            model,
            request_id=request_id,
            seed=self._draw_seed(),
            arrival_time=arrival_time,
            isolate_tenants=self._isolate_tenants,
            lora=lora,
        )
        outputs = open_outputs(request)  # in the order of `new` and its branches
        texts = {} if model.text is None else {index: _output_text(request, model.text) for index in outputs}
        if _num_resumed(request) > INLINE_RESUMED:
            await asyncio.to_thread(_replay, request, texts)
        else:
            _replay(request, texts)
        streams = [
            RequestStream(
                request_id, len(prompt), texts.get(index), num_resumed=len(resumed_ids(request, index)), index=index
            )
            for index in outputs
        ]
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


def _num_resumed(request: pb.GenerateRequest) -> int:
    """Return how many tokens of the earlier stream are to be detokenised."""
    of_several = sum(len(output.token_ids) for output in request.resume_outputs if not output.is_finished)
    return len(request.resume_token_ids.ids) + of_several


def _output_text(request: pb.GenerateRequest, model: TextModel) -> OutputText:
    """Make an output's text."""
    rules = request.stopping
    stop = StopStrings(rules.stop, include=rules.include_stop) if rules.stop else None
    return OutputText(model.tokenizer.detokenizer(), stop, rules.min_tokens)


def _replay(request: pb.GenerateRequest, texts: Mapping[int, OutputText]) -> None:
    """Bring the texts of its outputs to where the earlier stream broke off: push the tokens whose text the client has.

    Raises:
        InvalidRequestError: an output's tokens hold a stop string.
    """
    for index, text in texts.items():
        for token_id in resumed_ids(request, index):
            text.push(token_id)
            if text.match is not None:
                field, was_complete = resumed_field(request, index)
                expected = "tokens of an unfinished output"
                raise invalid_parameter(field, expected, "a stop string in their text", was_complete)
