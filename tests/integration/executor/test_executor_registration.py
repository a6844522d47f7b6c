"""Registration against a real registry service."""

import asyncio
import socket
from contextlib import asynccontextmanager

import grpc
import pytest
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as pb
from kvplane.kvmanager.v1 import executor_registry_service_pb2_grpc as pb_grpc
from structlog.testing import capture_logs

from executor_service.manager_access import AccessError, ManagerAccess
from executor_service.registration import Backoff, Registration
from executor_service.server import running_executor
from tests.unit.executor_shell.executor_backends import DEADLOCK_S
from tests.unit.executor_shell.executor_builders import sim_config

QUICK = Backoff(first_s=0.01, longest_s=0.05, refused_s=0.01)


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


class Registry(pb_grpc.ExecutorRegistryServiceServicer):
    """Answers with `refusals` first, then grants leases."""

    def __init__(self, *, lease_ms=30, manager_id="m-1", refusals=()):
        self.lease_ms = lease_ms
        self.manager_id = manager_id
        self.refusals = list(refusals)
        self.requests = asyncio.Queue()

    async def Register(self, request, context):  # noqa: N802
        self.requests.put_nowait(request)
        if self.refusals:
            await context.abort(self.refusals.pop(0), "refused by the test")
        return pb.RegisterResponse(lease_ms=self.lease_ms, manager_id=self.manager_id)

    async def ListExecutors(self, request, context):  # noqa: N802
        return pb.ListExecutorsResponse()

    async def next(self):
        async with asyncio.timeout(DEADLOCK_S):
            return await self.requests.get()


@asynccontextmanager
async def manager(registry, port=0):
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    pb_grpc.add_ExecutorRegistryServiceServicer_to_server(registry, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def registering(address):
    task = asyncio.create_task(Registration(address, "e-1", "10.0.0.1:5", QUICK).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def logged(logs, event):
    """Wait for an event, and return it."""
    async with asyncio.timeout(DEADLOCK_S):
        # What logs has no event to wait for.
        while not (found := [log for log in logs if log["event"] == event]):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return found[-1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_executor_registers_its_bound_address_and_renews():
    registry = Registry()
    async with manager(registry) as address:
        with capture_logs() as logs:
            async with running_executor(sim_config(manager=address, executor_id="e-9")) as executor:
                seen = [await registry.next() for _ in range(4)]
        assert {(request.executor_id, request.address) for request in seen} == {("e-9", executor.address)}
    registered = [log for log in logs if log["event"] == "executor_registered"]
    assert [(log["manager_id"], log["lease_ms"], log["log_level"]) for log in registered] == [("m-1", 30, "info")]


@pytest.mark.parametrize(
    ("values", "host"),
    [
        ({"advertise_address": "gpu-7.example:1234"}, "gpu-7.example"),
        ({"host": "0.0.0.0"}, socket.gethostname()),
        pytest.param({"host": "::"}, socket.gethostname(), marks=needs_ipv6),
        pytest.param({"host": "::1"}, "[::1]", marks=needs_ipv6),
        ({}, "127.0.0.1"),
    ],
)
async def test_executor_advertises_an_address_that_others_can_reach(values, host):
    registry = Registry()
    async with manager(registry) as address, running_executor(sim_config(manager=address, **values)):
        assert (await registry.next()).address.rpartition(":")[0] == host


async def test_executor_does_not_register_before_it_is_loaded_or_after_it_stopped():
    registry = Registry()
    async with manager(registry) as address:
        async with running_executor(sim_config(manager=address)):
            await registry.next()
        while not registry.requests.empty():
            registry.requests.get_nowait()
        async with registering(address):
            assert (await registry.next()).executor_id == "e-1"


async def test_registration_manager_down_at_first_is_retried():
    port, registry = free_port(), Registry()
    with capture_logs() as logs:
        async with registering(f"127.0.0.1:{port}"):
            down = await logged(logs, "manager_unreachable")
            assert (down["code"], down["log_level"]) == ("UNAVAILABLE", "warning")
            async with manager(registry, port):
                await registry.next()
                await logged(logs, "executor_registered")
    assert [log["event"] for log in logs] == ["manager_unreachable", "executor_registered"]


async def test_registration_manager_restarts_is_registered_again_and_logged():
    port = free_port()
    with capture_logs() as logs:
        async with registering(f"127.0.0.1:{port}"):
            async with manager(first := Registry(manager_id="m-1"), port):
                await first.next()
                await logged(logs, "executor_registered")
            await logged(logs, "manager_unreachable")
            async with manager(second := Registry(manager_id="m-2"), port):
                await second.next()
                await second.next()
    registered = [log["manager_id"] for log in logs if log["event"] == "executor_registered"]
    assert registered == ["m-1", "m-2"]


async def test_registration_refused_logs_an_error_once_and_keeps_trying():
    other_model = grpc.StatusCode.FAILED_PRECONDITION
    registry = Registry(refusals=[other_model] * 3)
    async with manager(registry) as address:
        with capture_logs() as logs:
            async with registering(address):
                for _ in range(5):
                    await registry.next()
    assert [(log["event"], log["log_level"]) for log in logs] == [
        ("registration_refused", "error"),
        ("executor_registered", "info"),
    ]
    assert logs[0]["error"] == "refused by the test"


def test_backoff_doubles_to_a_bound_with_jitter():
    unavailable = grpc.StatusCode.UNAVAILABLE
    longest = Backoff(first_s=0.1, longest_s=5.0, refused_s=30.0, jitter=lambda: 1.0)
    assert [longest.after(count, unavailable) for count in (1, 2, 3, 7, 10_000)] == [0.1, 0.2, 0.4, 5.0, 5.0]
    assert longest.after(1, grpc.StatusCode.FAILED_PRECONDITION) == 30.0
    shortest = Backoff(first_s=0.1, longest_s=5.0, jitter=lambda: 0.0)
    assert shortest.after(10_000, grpc.StatusCode.DEADLINE_EXCEEDED) == 2.5


class Metadata(Registry):
    """Keeps the metadata of each call in place of its message."""

    async def Register(self, request, context):  # noqa: N802
        self.requests.put_nowait(dict(context.invocation_metadata()).get("authorization"))
        return pb.RegisterResponse(lease_ms=self.lease_ms, manager_id=self.manager_id)


@pytest.mark.parametrize(
    ("in_file", "in_environment", "sent"),
    [
        ("a-key\n", "", "Bearer a-key"),
        ("", "its-key", "Bearer its-key"),
        ("a-key", "its-key", "Bearer a-key"),
        ("", "", None),
    ],
)
async def test_executor_sends_the_key_of_its_file_or_of_the_environment(
    tmp_path, monkeypatch, in_file, in_environment, sent
):
    monkeypatch.setenv("KVPLANE_API_KEY", in_environment)
    (tmp_path / "key").write_text(in_file)
    registry = Metadata()
    async with manager(registry) as address:
        config = sim_config(manager=address, manager_api_key_file=str(tmp_path / "key") if in_file else "")
        with capture_logs() as logs:
            async with running_executor(config):
                assert await registry.next() == sent
    assert not [log for log in logs if log["event"] == "key_in_plain_text"]


async def test_executor_warns_of_a_key_in_plain_text_to_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPLANE_API_KEY", "a-key-0123")
    (tmp_path / "ca").write_text("-----BEGIN CERTIFICATE-----")
    for settings, warned in (({}, 1), ({"manager_tls": True}, 0), ({"manager_tls_ca": str(tmp_path / "ca")}, 0)):
        with capture_logs() as logs:
            ManagerAccess.from_config(sim_config(manager="manager.example:50051", **settings))
        assert [log["log_level"] for log in logs] == ["warning"] * warned
        assert "a-key-0123" not in str(logs)


@pytest.mark.parametrize(
    ("setting", "content", "told"),
    [
        ("manager_api_key_file", None, "--manager-api-key-file: expected .*No such file"),
        ("manager_api_key_file", b"", "visible ASCII"),
        ("manager_api_key_file", b"two words-0123", "visible ASCII"),
        ("manager_api_key_file", b"\xff\xfe0123", "no text"),
        ("manager_tls_ca", None, "--manager-tls-ca: expected .*No such file"),
        ("manager_tls_ca", b"none", "holds none"),
    ],
)
def test_executor_refuses_files_that_it_cannot_use_and_quotes_none(tmp_path, setting, content, told):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(AccessError, match=f"expected .* got .*{told}|{told}") as caught:
        ManagerAccess.from_config(sim_config(manager="localhost:1", **{setting: str(tmp_path / "file")}))
    assert "0123" not in str(caught.value).replace(str(tmp_path), "")
