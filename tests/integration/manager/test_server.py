"""Registry, health and reflection over a real connection; two managers do not share a port."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvmanager_service.config import ConfigError, ManagerConfig
from kvmanager_service.core.request import FinishReason
from kvmanager_service.registry import ExecutorRegistry, ExecutorState
from kvmanager_service.server import SERVICE_NAMES, Health, ManagerServer
from tests.integration.manager.fake_engine import FakeEngine, Manager, running_manager, until
from tests.unit.manager.manager_builders import generate_request

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_register_grants_lease_and_list_shows_state(manager: Manager) -> None:
    granted = [
        await manager.executors.Register(registry_pb.RegisterRequest(executor_id=name, address=f"host:{port}"))
        for name, port in (("a", 1), ("b", 2), ("a", 1))
    ]
    assert {grant.lease_ms for grant in granted} == {10_000}
    assert {grant.manager_id for grant in granted} == {manager.server.manager_id}
    manager.registry.set_state("a", ExecutorState.STANDBY, "refused")
    manager.registry.set_state("b", ExecutorState.ACTIVE)
    listed = (await manager.executors.ListExecutors(registry_pb.ListExecutorsRequest())).executors
    assert list(listed) == [
        registry_pb.ExecutorInfo(
            executor_id="a",
            address="host:1",
            state=registry_pb.EXECUTOR_STATE_STANDBY,
            lease_remaining_ms=10_000,
            last_error="refused",
        ),
        registry_pb.ExecutorInfo(
            executor_id="b", address="host:2", state=registry_pb.EXECUTOR_STATE_ACTIVE, lease_remaining_ms=10_000
        ),
    ]


async def test_manager_ids_of_two_runs_differ() -> None:
    async with running_manager() as one, running_manager() as two:
        assert one.server.manager_id != two.server.manager_id


@pytest.mark.parametrize("name", ["", *SERVICE_NAMES])
async def test_health_follows_the_engine(manager: Manager, name: str) -> None:
    stub = health_pb2_grpc.HealthStub(manager.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
    assert (await watch.read()).status == NOT_SERVING
    manager.health.set_serving(True)
    assert (await watch.read()).status == SERVING
    manager.health.set_serving(False)
    assert (await watch.read()).status == NOT_SERVING
    assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == NOT_SERVING
    watch.cancel()


async def test_health_quick_changes_end_at_the_last(manager: Manager) -> None:
    for serving in (True, False, True, False, True):
        manager.health.set_serving(serving)
    stub = health_pb2_grpc.HealthStub(manager.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
    while (await watch.read()).status != SERVING:
        pass
    await until(lambda: not manager.health._updates)
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
    watch.cancel()


async def test_reflection_lists_every_service(manager: Manager) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(manager.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    (answer,) = [response async for response in call]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {*SERVICE_NAMES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_server_port_in_use_is_a_setting_to_correct(manager: Manager) -> None:
    config = ManagerConfig(port=manager.server.port)
    second = ManagerServer(config, FakeEngine(), ExecutorRegistry(lambda: 0.0, 1_000), Health())
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{manager.server.port}"):
        await second.start()
    await second.stop(0)


async def test_server_takes_messages_of_many_megabytes(manager: Manager) -> None:
    ids = [1] * 9_000_000
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await manager.inference.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_server_stop_with_grace_delivers_last_messages(manager: Manager) -> None:
    call = manager.inference.Generate(generate_request(request_id="r"))
    await manager.engine.submitted("r")
    manager.engine.step("r", 5, finish=FinishReason.LENGTH)
    await manager.server.stop(5)
    assert [list(piece.token_ids) async for piece in call] == [[5]]
