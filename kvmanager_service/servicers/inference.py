"""InferenceService: text or token ids in, streamed output out.

Station: called by grpc, calls `admission` and the engine. When a call ends for whatever reason (cancelled, deadline,
connection lost), its unfinished requests are aborted at once, so that their blocks are free within a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import inference_service_pb2_grpc as pb_grpc

from kvmanager_service.admission import Admission
from kvmanager_service.callers import own_tenant
from kvmanager_service.convert import check_request_id
from kvmanager_service.core.errors import UnknownRequestError
from kvmanager_service.engine_api import Engine
from kvmanager_service.errors import RpcErrors
from kvmanager_service.output_stream import ManyStream, OutputStream
from kvmanager_service.pacer import Pacer
from kvmanager_service.servicers.orders import OrderReader

__all__ = ["CONTRACT_VERSION", "InferenceServicer"]

_log = structlog.get_logger(__name__)

CONTRACT_VERSION = 1
"""The highest `known_since` of the contract. Whoever gives a field a higher one raises it, and has the field served."""

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Serves Generate, GenerateMany, Abort, GetModel and GetContract."""

    def __init__(self, engine: Engine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission
        self._pacer = Pacer()

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Serve `Generate`; see the proto."""
        async with RpcErrors(context):
            output = await self._admission.admit(request, lambda stream: OutputStream(stream, self._pacer))
            self._pacer.enter()
            context.add_done_callback(lambda _: self._end(output))  # type: ignore[arg-type]
            async for response in output:
                yield response

    async def GenerateMany(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Context
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        """Serve `GenerateMany`; see the proto."""
        async with RpcErrors(context):
            many = ManyStream(self._abandon)
            reader = OrderReader(self._engine, self._admission, many)
            task = asyncio.create_task(reader.run(request_iterator), name="generate-many-orders")
            context.add_done_callback(lambda _: self._end_many(task, many))  # type: ignore[arg-type]
            async for response in many:
                yield response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """Serve `Abort`; see the proto."""
        async with RpcErrors(context):
            check_request_id(request.request_id)
            self._engine.abort(request.request_id, own_tenant())
        return pb.AbortResponse()

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: N802
        """Serve `GetModel`; see the proto."""
        async with RpcErrors(context):
            model = self._engine.model()
        return pb.GetModelResponse(
            name=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_logprobs=model.max_logprobs,
            has_chat_template=model.text is not None and model.text.chat_template is not None,
            has_tokenizer=model.text is not None,
            dtype=model.dtype,
        )

    async def GetContract(  # noqa: N802
        self, request: pb.GetContractRequest, context: Context
    ) -> pb.GetContractResponse:
        """Serve `GetContract`; see the proto."""
        return pb.GetContractResponse(contract_version=CONTRACT_VERSION)

    def _end(self, output: OutputStream) -> None:
        self._pacer.leave()
        if not output.finished:
            self._engine.abort(output.stream.request_id)

    def _abandon(self, request_id: str) -> None:
        """An output of a request has failed: end the others, once the engine is done with telling of it."""
        asyncio.get_running_loop().call_soon(self._abort_if_open, request_id)

    def _abort_if_open(self, request_id: str) -> None:
        try:
            self._engine.abort(request_id)
        except UnknownRequestError:
            _log.debug("request_over_already", request_id=request_id)  # the others failed with it

    def _end_many(self, orders: asyncio.Task[None], many: ManyStream) -> None:
        self._abort_unfinished(many)
        orders.cancel()
        # A long text that comes out of its thread right now is still submitted.
        orders.add_done_callback(lambda _: self._abort_unfinished(many))

    def _abort_unfinished(self, many: ManyStream) -> None:
        for request_id in many.unfinished():
            self._engine.abort(request_id)
