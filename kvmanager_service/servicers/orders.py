"""The incoming half of GenerateMany: starts and aborts requests as orders arrive.

Station: a task beside the servicer's method, which sends the outgoing half. Short requests are admitted in order; those
that take a thread (long texts) are admitted beside each other, a few at a time, so that nobody waits behind one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.admission import Admission
from kvmanager_service.core.errors import invalid_parameter
from kvmanager_service.engine_api import Engine
from kvmanager_service.output_stream import ManyStream

__all__ = ["OrderReader"]

MAX_SLOW_ADMISSIONS = 8
"""Long texts of one stream that are tokenised at once; further orders of the stream wait."""


class OrderReader:
    """Takes the orders of one stream."""

    def __init__(self, engine: Engine, admission: Admission, many: ManyStream) -> None:
        self._engine = engine
        self._admission = admission
        self._many = many
        self._slots = asyncio.Semaphore(MAX_SLOW_ADMISSIONS)
        self._starting: set[str] = set()
        self._aborted: set[str] = set()

    async def run(self, orders: AsyncIterator[pb.GenerateManyRequest]) -> None:
        """Take orders until the client half-closes, then close the stream's input."""
        try:
            async with asyncio.TaskGroup() as slow:
                async for order in orders:
                    await self._take(order, slow)
                    await self._many.wait_for_room()
        except ExceptionGroup as group:  # handed to the outgoing half, which fails the call with it
            self._many.close_input(group.exceptions[0])
        else:
            self._many.close_input()

    async def _take(self, order: pb.GenerateManyRequest, slow: asyncio.TaskGroup) -> None:
        kind = order.WhichOneof("order")
        if kind == "abort_request_id":
            self._abort(order.abort_request_id)
        elif kind is None:
            self._many.fail("", invalid_parameter("order", "generate or abort_request_id", "neither", "set one"))
        elif not order.generate.request_id:
            self._many.fail(
                "", invalid_parameter("generate.request_id", "1 to 256 characters", "none", "name the request")
            )
        elif self._admission.takes_long(order.generate):
            await self._slots.acquire()
            self._starting.add(order.generate.request_id)  # here: an abort may come before the task has begun
            slow.create_task(self._start_slow(order.generate))
        else:
            await self._start(order.generate)

    async def _start(self, request: pb.GenerateRequest) -> None:
        try:
            sink = await self._admission.admit(request, self._many.sink)
        except Exception as error:  # noqa: BLE001 - sent to the client as this request's error, logged if unexpected
            self._many.fail(request.request_id, error)
        else:
            self._many.opened(sink.request)

    async def _start_slow(self, request: pb.GenerateRequest) -> None:
        request_id = request.request_id
        try:
            await self._start(request)
        finally:
            self._slots.release()
            self._starting.discard(request_id)
        if request_id in self._aborted:
            self._aborted.discard(request_id)
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        """End a request of this stream; one that has finished, or never was, is ignored."""
        if request_id in self._starting:
            self._aborted.add(request_id)
        elif self._many.is_open(request_id):
            self._engine.abort(request_id)
