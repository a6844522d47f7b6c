"""Bytes that are not the message of a method, over a real connection, to every method of the manager."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from kvplane.kvmanager.v1 import (
    executor_registry_service_pb2,
    inference_service_pb2,
    kv_manager_service_pb2,
)
from structlog.testing import capture_logs

from kvmanager_service.core.request import FinishReason
from tests.integration.manager.fake_engine import Manager, details, until
from tests.unit.manager.manager_builders import generate_request

SERVICES = [
    inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    kv_manager_service_pb2.DESCRIPTOR.services_by_name["KvManagerService"],
    executor_registry_service_pb2.DESCRIPTOR.services_by_name["ExecutorRegistryService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
]
METHODS = [method for service in SERVICES for method in service.methods if method.name != "List"]
NO_MESSAGE = b"\xff\xff\xff"


async def send(channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes) -> Any:
    """Call a method with bytes, and return the first of what it answers."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        call: Any = channel.stream_stream(path)()
        await call.write(data)
        return await call.read()
    if method.server_streaming:
        return await channel.unary_stream(path)(data).read()
    return await channel.unary_unary(path)(data)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_bytes_that_are_no_message_are_invalid_argument(manager: Manager, method: MethodDescriptor) -> None:
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(manager.channel, method, NO_MESSAGE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)[:2] == ("MALFORMED_MESSAGE", {"got_bytes": "3"})
    assert logs == [], "a client's mistake is none of ours"


async def test_bytes_that_are_no_message_disturb_no_other_call(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    for method in METHODS:
        with pytest.raises(grpc.aio.AioRpcError):
            await send(manager.channel, method, NO_MESSAGE)
    manager.engine.step("r", 5)
    manager.engine.step("r", 6, finish=FinishReason.LENGTH)
    assert [token_id async for piece in call for token_id in piece.token_ids] == [5, 6]


async def test_generate_many_bytes_that_are_no_message_end_the_stream_and_free_its_requests(manager: Manager) -> None:
    call = manager.channel.stream_stream("/kvplane.kvmanager.v1.InferenceService/GenerateMany")()
    order = inference_service_pb2.GenerateManyRequest(generate=generate_request(request_id="r"))
    await call.write(order.SerializeToString())
    await manager.engine.submitted("r")
    await call.write(NO_MESSAGE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert details(caught.value)[0] == "MALFORMED_MESSAGE"
    await until(lambda: not manager.engine.open)
    assert manager.engine.aborted == ["r"]


async def test_call_cancelled_behind_the_check_frees_its_request(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    call.cancel()
    await until(lambda: not manager.engine.open)
    assert manager.engine.aborted == ["r"]


async def test_method_that_does_not_exist_is_unimplemented(manager: Manager) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.channel.unary_unary("/kvplane.kvmanager.v1.InferenceService/Invent")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
