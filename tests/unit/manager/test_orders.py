"""Orders of a GenerateMany stream whose admission takes a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.admission import Admission
from kvmanager_service.output_stream import ManyStream
from kvmanager_service.request_stream import RequestStream
from kvmanager_service.servicers.inference import InferenceServicer
from kvmanager_service.servicers.orders import OrderReader
from tests.integration.manager.fake_engine import FakeEngine
from tests.unit.core.builders import make_new
from tests.unit.manager.manager_builders import generate_request


class SlowAdmission(Admission):
    """Lets every request wait for `release`, as a long text waits for its thread."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.engine = engine
        self.begun = asyncio.Event()
        self.release: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @staticmethod
    def takes_long(request: pb.GenerateRequest) -> bool:
        return True

    async def admit(self, request: pb.GenerateRequest, make_sink: Callable[[RequestStream], Any]) -> Any:
        self.begun.set()
        await self.release
        sink = make_sink(RequestStream(request.request_id, 3, None))
        self.engine.submit(make_new(request.request_id), sink)
        return sink


async def test_orders_call_that_ends_while_a_request_comes_out_of_its_thread_leaves_nothing() -> None:
    engine, many = FakeEngine(), ManyStream(lambda request_id: None)
    admission = SlowAdmission(engine)
    servicer = InferenceServicer(engine, admission)

    async def orders() -> AsyncIterator[pb.GenerateManyRequest]:
        yield pb.GenerateManyRequest(generate=generate_request(request_id="long"))
        await asyncio.get_running_loop().create_future()

    reader = asyncio.create_task(OrderReader(engine, admission, many).run(orders()))
    await admission.begun.wait()
    admission.release.set_result(None)
    servicer._end_many(reader, many)
    await asyncio.wait((reader,))
    await asyncio.sleep(0)
    assert engine.open == {}


async def test_orders_abort_before_the_admission_has_begun_is_heeded() -> None:
    engine, many = FakeEngine(), ManyStream(lambda request_id: None)
    admission = SlowAdmission(engine)
    admission.release.set_result(None)

    async def orders() -> AsyncIterator[pb.GenerateManyRequest]:
        yield pb.GenerateManyRequest(generate=generate_request(request_id="long"))
        yield pb.GenerateManyRequest(abort_request_id="long")

    await OrderReader(engine, admission, many).run(orders())
    assert engine.aborted == ["long"]
    (message,) = [message async for message in many]
    assert message.outputs[0].finish_reason == common_pb2.FINISH_REASON_ABORT
