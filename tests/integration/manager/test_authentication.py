"""Who may call what: a manager with keys, over real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import (
    executor_registry_service_pb2,
    inference_service_pb2,
    kv_manager_service_pb2,
)
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pool_pb

from kvmanager_service.config import ConfigError, ManagerConfig
from kvmanager_service.core.extra_keys import request_keys
from kvmanager_service.core.request import FinishReason, RequestStatus
from kvmanager_service.engine_api import ManagerState, RequestView
from kvmanager_service.registry import ExecutorRegistry
from kvmanager_service.server import Health, ManagerServer
from tests.certificates import make_certificate
from tests.integration.manager.fake_engine import FakeEngine, Manager, details, running_manager, until
from tests.integration.manager.scripted_executor import ScriptedExecutor, running_split
from tests.unit.manager.manager_builders import generate_request

KEYS = {name: f"{name}-key-0123456789" for name in ("alice", "bob", "root", "worker")}
FILE = f"""
[tenants]
alice = "{KEYS["alice"]}"
bob = "{KEYS["bob"]}"
[operators]
root = "{KEYS["root"]}"
[executors]
worker = "{KEYS["worker"]}"
"""
ROLES = {"alice": "tenant", "root": "operator", "worker": "executor"}
USERS, OPERATORS = {"alice", "root"}, {"root"}
MAY_CALL = {
    "Generate": USERS,
    "GenerateMany": USERS,
    "Abort": USERS,
    "GetModel": USERS,
    "GetContract": USERS,
    "GetStats": OPERATORS,
    "ListRequests": USERS,
    "ListBlocks": OPERATORS,
    "TraceBlock": OPERATORS,
    "WatchKvEvents": OPERATORS,
    "PinPrefix": OPERATORS,
    "UnpinPrefix": OPERATORS,
    "ListPinnedPrefixes": OPERATORS,
    "LoadAdapter": OPERATORS,
    "UnloadAdapter": OPERATORS,
    "ListAdapters": OPERATORS,
    "ResetPrefixCache": OPERATORS,
    "OpenPool": OPERATORS,
    "ClosePool": OPERATORS,
    "ListPools": OPERATORS,
    "UpdateSequences": OPERATORS,
    "Register": {"worker"},
    "ListExecutors": {"worker", "root"},
    "SwitchExecutor": OPERATORS,
}
METHODS = [
    method
    for module in (inference_service_pb2, kv_manager_service_pb2, executor_registry_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[name]}"),)


def write(path: Path, content: str) -> None:
    path.write_text(content)
    path.chmod(0o600)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, FILE)
    return path


@pytest.fixture
async def guarded(key_file: Path) -> AsyncIterator[Manager]:
    """A manager with keys and a fake engine."""
    async with running_manager(api_keys=str(key_file), isolate_tenants=True) as manager:
        yield manager


def call(channel: grpc.aio.Channel, method: Any, metadata: tuple[tuple[str, str], ...]) -> Any:
    """Call a method of whatever kind with an empty message."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        return channel.stream_stream(path)(iter([b""]), metadata=metadata)
    return (channel.unary_stream if method.server_streaming else channel.unary_unary)(path)(b"", metadata=metadata)


async def outcome(made: Any) -> tuple[grpc.StatusCode, str]:
    """Return the code a call ends with, and the reason that comes with it; a stream is read once."""
    try:
        if hasattr(made, "read"):
            await made.read()
            made.cancel()
        else:
            await made
    except grpc.aio.AioRpcError as error:
        return error.code(), details(error)[0]
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_method_is_for_the_roles_that_it_is_for_and_no_others(guarded: Manager, method: Any) -> None:
    assert await outcome(call(guarded.channel, method, ())) == (grpc.StatusCode.UNAUTHENTICATED, "MISSING_KEY")
    for name in ROLES:
        if name in MAY_CALL[method.name]:
            if method.name in ("Generate", "GenerateMany", "WatchKvEvents"):
                continue  # they wait for what never comes; the tests below call them
            code, _ = await outcome(call(guarded.channel, method, bearer(name)))
            assert code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        else:
            answer = await outcome(call(guarded.channel, method, bearer(name)))
            assert answer == (grpc.StatusCode.PERMISSION_DENIED, "METHOD_FORBIDDEN")


async def test_forbidden_method_says_whose_key_it_wants(guarded: Manager) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await guarded.kv.GetStats(manager_pb.GetStatsRequest(), metadata=bearer("alice"))
    method = "/kvplane.kvmanager.v1.KvManagerService/GetStats"
    assert details(caught.value)[1] == {"method": method, "role": "tenant", "caller": "alice"}
    assert "expected the key of an operator, got that of tenant 'alice'" in str(caught.value.details())


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "MISSING_KEY"),
        ((("authorization", ""),), "MISSING_KEY"),
        ((("authorization", "Bearer"),), "MISSING_KEY"),
        ((("authorization", KEYS["alice"]),), "MISSING_KEY"),
        ((("authorization", f"Basic {KEYS['alice']}"),), "MISSING_KEY"),
        ((*bearer("alice"), *bearer("bob")), "MISSING_KEY"),
        ((("x-api-key", KEYS["alice"]),), "MISSING_KEY"),
        ((("authorization", f"Bearer {KEYS['alice']}x"),), "UNKNOWN_KEY"),
        ((("authorization", f"Bearer {KEYS['alice'][:-1]}"),), "UNKNOWN_KEY"),
        ((("authorization", "Bearer alice"),), "UNKNOWN_KEY"),
    ],
)
async def test_call_without_a_known_key_is_refused_and_no_key_is_told(
    guarded: Manager, capsys: pytest.CaptureFixture[str], metadata: tuple[tuple[str, str], ...], reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await guarded.inference.GetModel(pb.GetModelRequest(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert details(caught.value)[:2] == (reason, {})
    told = f"{caught.value.details()} {capsys.readouterr()}"
    assert not any(key in told for key in KEYS.values())


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
async def test_bearer_is_known_in_any_case(guarded: Manager, scheme: str) -> None:
    metadata = (("authorization", scheme + KEYS["alice"]),)
    assert (await guarded.inference.GetModel(pb.GetModelRequest(), metadata=metadata)).vocab_size


async def test_health_and_reflection_are_open(guarded: Manager) -> None:
    health = health_pb2_grpc.HealthStub(guarded.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status
    watch.cancel()
    reflection = reflection_pb2_grpc.ServerReflectionStub(guarded.channel)
    answers = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    assert len((await answers.read()).list_services_response.service) == 5
    answers.cancel()


async def test_method_that_is_none_is_told_to_operators_only(guarded: Manager) -> None:
    unknown = guarded.channel.unary_unary("/kvplane.kvmanager.v1.KvManagerService/Nothing")
    assert await code_of(unknown(b"")) is grpc.StatusCode.UNAUTHENTICATED
    assert await code_of(unknown(b"", metadata=bearer("alice"))) is grpc.StatusCode.PERMISSION_DENIED
    assert await code_of(unknown(b"", metadata=bearer("root"))) is grpc.StatusCode.UNIMPLEMENTED


async def code_of(made: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await made
    return caught.value.code()


@pytest.mark.parametrize(
    ("caller", "named", "expected"),
    [
        ("alice", "", "alice"),
        ("alice", "alice", "alice"),
        ("alice", "bob", None),
        ("alice", "root", None),
        ("root", "", "root"),
        ("root", "alice", "alice"),
        ("root", "whoever", "whoever"),
    ],
)
async def test_request_is_of_the_tenant_that_the_key_is_of(
    guarded: Manager, caller: str, named: str, expected: str | None
) -> None:
    """By Generate and by GenerateMany, whose stream is authenticated once and whose orders are checked each."""
    one = guarded.inference.Generate(generate_request(request_id="one", tenant=named), metadata=bearer(caller))
    many = guarded.inference.GenerateMany(metadata=bearer(caller))
    for request_id, tenant in (("many", named), ("own", "")):
        await many.write(pb.GenerateManyRequest(generate=generate_request(request_id=request_id, tenant=tenant)))
    if expected is None:
        assert await outcome(one) == (grpc.StatusCode.PERMISSION_DENIED, "TENANT_FORBIDDEN")
        (error,) = (await many.read()).errors
        assert (error.request_id, error.error.reason) == ("many", "TENANT_FORBIDDEN")
        assert error.error.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        await guarded.engine.submitted("own")
    else:
        await guarded.engine.submitted("one", "many", "own")
        for request_id in ("one", "many"):
            new = guarded.engine.open[request_id][0]
            assert (new.tenant, new.is_isolated) == (expected, True)
    assert guarded.engine.open["own"][0].tenant == caller
    one.cancel()
    many.cancel()


async def test_many_long_texts_are_of_the_streams_caller(guarded: Manager) -> None:
    """They are admitted in tasks of their own."""
    many = guarded.inference.GenerateMany(metadata=bearer("bob"))
    request = pb.GenerateRequest(request_id="long", text="the dog " * 30_000)
    await many.write(pb.GenerateManyRequest(generate=request))
    message = await many.read()
    assert message.errors[0].error.reason == "PROMPT_TOO_LONG"
    request.tenant = "alice"
    await many.write(pb.GenerateManyRequest(generate=request))
    assert (await many.read()).errors[0].error.reason == "TENANT_FORBIDDEN"
    many.cancel()


async def test_calls_of_one_channel_do_not_mix_their_callers(guarded: Manager) -> None:
    names = ["alice", "bob", "root"] * 20
    calls = [
        guarded.inference.Generate(generate_request(request_id=f"{name}-{index}"), metadata=bearer(name))
        for index, name in enumerate(names)
    ]
    await guarded.engine.submitted(*(f"{name}-{index}" for index, name in enumerate(names)))
    assert {key: new.tenant for key, (new, _) in guarded.engine.open.items()} == {
        f"{name}-{index}": name for index, name in enumerate(names)
    }
    for made in calls:
        made.cancel()


async def test_abort_ends_own_requests_and_tells_nothing_of_others(guarded: Manager) -> None:
    stream = guarded.inference.Generate(generate_request(request_id="r"), metadata=bearer("alice"))
    await guarded.engine.submitted("r")
    order = pb.AbortRequest(request_id="r")
    with pytest.raises(grpc.aio.AioRpcError) as of_another:
        await guarded.inference.Abort(order, metadata=bearer("bob"))
    assert of_another.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as of_nobody:
        await guarded.inference.Abort(pb.AbortRequest(request_id="q"), metadata=bearer("bob"))
    assert of_nobody.value.details() == of_another.value.details()
    await guarded.inference.Abort(order, metadata=bearer("alice"))
    assert [piece.finish_reason async for piece in stream] == [3]

    stream = guarded.inference.Generate(generate_request(request_id="r"), metadata=bearer("alice"))
    await guarded.engine.submitted("r")
    await guarded.inference.Abort(order, metadata=bearer("root"))
    assert guarded.engine.aborted == ["r", "r"]


async def test_list_requests_shows_a_tenant_its_own(guarded: Manager) -> None:
    guarded.engine.request_views = [
        RequestView(name, RequestStatus.RUNNING, 0, 1, 0, 0, 0, 0, (), float(index), 0.0, tenant=tenant)
        for index, (name, tenant) in enumerate([("a1", "alice"), ("b1", "bob"), ("a2", "alice"), ("n", "")])
    ]
    shown = {}
    for name in ("alice", "bob", "root"):
        page = await guarded.kv.ListRequests(manager_pb.ListRequestsRequest(), metadata=bearer(name))
        shown[name] = [info.request_id for info in page.requests]
    assert shown == {"alice": ["a1", "a2"], "bob": ["b1"], "root": ["a1", "b1", "a2", "n"]}
    wanted = manager_pb.ListRequestsRequest(request_id="b1")
    assert not (await guarded.kv.ListRequests(wanted, metadata=bearer("alice"))).requests


async def test_pin_is_of_the_tenant_that_an_operator_names(guarded: Manager) -> None:
    prefix = pb.TokenIds(ids=[1, 2, 3])
    for name, tenant in (("for-alice", "alice"), ("own", "")):
        request = manager_pb.PinPrefixRequest(name=name, token_ids=prefix, tenant=tenant)
        await guarded.kv.PinPrefix(request, metadata=bearer("root"))
    pinned = guarded.engine.pinned
    assert pinned["for-alice"].extra_keys == request_keys("", "alice", None)
    assert pinned["own"].extra_keys == request_keys("", "root", None)


async def test_sequence_is_of_the_tenant_that_the_engine_names_or_of_its_key(guarded: Manager) -> None:
    """Its sequences share blocks within a tenant; who names none is the operator whose key it has."""
    await guarded.kv.OpenPool(
        pool_pb.OpenPoolRequest(pool_id="p", num_blocks=33, block_size=4), metadata=bearer("root")
    )
    hits = []
    for batch, tenant in enumerate(["alice", "alice", "bob", "", "root"], start=1):
        opening = pool_pb.OpenSequence(
            sequence_id=f"s{batch}", token_ids=common_pb2.Int32Array(data=bytes(20)), tenant=tenant
        )
        opening.spans.add(kind=pool_pb.TOKEN_SPAN_KIND_MULTIMODAL_ITEM, digest=bytes(32), offset=1, length=2)
        committing = pool_pb.CommitSequence(sequence_id=f"s{batch}", num_computed_tokens=5)
        request = pool_pb.UpdateSequencesRequest(
            pool_id="p",
            batch_id=batch,
            operations=[pool_pb.SequenceOperation(open=opening), pool_pb.SequenceOperation(commit=committing)],
        )
        answer = await guarded.kv.UpdateSequences(request, metadata=bearer("root"))
        hits.append(answer.results[0].table.num_computed_tokens)
    assert hits == [0, 4, 0, 0, 4]


async def test_keys_are_read_anew_and_a_bad_file_changes_nothing(guarded: Manager, key_file: Path) -> None:
    async def known(name: str) -> bool:
        code, _ = await outcome(guarded.inference.GetModel(pb.GetModelRequest(), metadata=bearer(name)))
        return code is grpc.StatusCode.OK

    stream = guarded.inference.Generate(generate_request(request_id="r"), metadata=bearer("bob"))
    await guarded.engine.submitted("r")
    write(key_file, f'[tenants]\nalice = "{KEYS["alice"]}"')
    assert await known("bob"), "nobody has told the manager"
    guarded.server.reload_keys()
    assert (await known("alice"), await known("bob")) == (True, False)
    guarded.engine.step("r", 5, finish=FinishReason.LENGTH)
    assert [list(piece.token_ids) async for piece in stream] == [[5]], "a call that has begun goes on"
    write(key_file, "[tenants")
    guarded.server.reload_keys()
    assert (await known("alice"), await known("bob")) == (True, False)


async def test_without_keys_a_request_says_whose_it_is(manager: Manager) -> None:
    for name in ("", "alice"):
        metadata = bearer("bob")  # of no interest
        call = manager.inference.Generate(generate_request(request_id=f"r{name}", tenant=name), metadata=metadata)
        await manager.engine.submitted(f"r{name}")
        assert manager.engine.open[f"r{name}"][0].tenant == name
        await manager.inference.Abort(pb.AbortRequest(request_id=f"r{name}"))
        assert [piece.finish_reason async for piece in call] == [3]


@asynccontextmanager
async def serving_split(**settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A real engine with a scripted executor behind a server with these settings."""
    async with running_split(ScriptedExecutor()) as split:
        await until(lambda: split.engine.stats().state is ManagerState.SERVING)
        server = ManagerServer(ManagerConfig(port=0, **settings), split.engine, split.registry, Health())
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield channel
        await server.stop(0)


@pytest.mark.parametrize(("isolate", "expected"), [(True, [0, 4, 0, 4, 0, 4]), (False, [0, 4, 4, 4, 4, 4])])
async def test_tenants_do_not_hit_what_others_have_cached(key_file: Path, isolate: bool, expected: list[int]) -> None:
    """One prompt, one after another: of two tenants, each twice, of an operator, and of it in a tenant's name."""
    calls = [("alice", ""), ("alice", "alice"), ("bob", ""), ("bob", ""), ("root", ""), ("root", "alice")]
    async with serving_split(api_keys=str(key_file), isolate_tenants=isolate) as channel:
        generate: Callable[..., Any] = channel.unary_stream(
            "/kvplane.kvmanager.v1.InferenceService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        cached = []
        for caller, named in calls:
            request = generate_request(*range(1, 7), tenant=named)
            request.stopping.max_tokens = 1
            responses = [response async for response in generate(request, metadata=bearer(caller))]
            cached.append(responses[-1].usage.cached_tokens)
        claimed = generate(generate_request(*range(1, 7), tenant="alice"), metadata=bearer("bob"))
        assert await outcome(claimed) == (grpc.StatusCode.PERMISSION_DENIED, "TENANT_FORBIDDEN")
    assert cached == expected


async def test_abort_by_tenant_reaches_every_output_of_its_own_request(key_file: Path) -> None:
    """On the real books, where a request with several outputs is a family of sequences."""
    async with running_split(executor := ScriptedExecutor()) as split:
        await until(lambda: split.engine.stats().state is ManagerState.SERVING)
        executor.compute.clear()
        server = ManagerServer(ManagerConfig(port=0, api_keys=str(key_file)), split.engine, split.registry, Health())
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = Manager(FakeEngine(), split.registry, Health(), server, channel).inference
            stream = stub.Generate(generate_request(1, 2, 3, request_id="r", n=3), metadata=bearer("alice"))
            await until(lambda: len(split.engine.requests(include_finished=False)) == 3)
            for request_id in ("r", "r#1"):
                order = pb.AbortRequest(request_id=request_id)
                assert await code_of(stub.Abort(order, metadata=bearer("bob"))) is grpc.StatusCode.NOT_FOUND
            await stub.Abort(pb.AbortRequest(request_id="r#1"), metadata=bearer("alice"))
            await stub.Abort(pb.AbortRequest(request_id="r"), metadata=bearer("alice"))
            assert sorted([piece.index async for piece in stream]) == [0, 1, 2]
            executor.compute.set()
        await server.stop(0)


async def test_executor_registers_by_key(guarded: Manager) -> None:
    request = registry_pb.RegisterRequest(executor_id="e", address="host:1")
    for name in ("alice", "root"):
        refused = guarded.executors.Register(request, metadata=bearer(name))
        assert await outcome(refused) == (grpc.StatusCode.PERMISSION_DENIED, "METHOD_FORBIDDEN")
    await guarded.executors.Register(request, metadata=bearer("worker"))
    listed = await guarded.executors.ListExecutors(registry_pb.ListExecutorsRequest(), metadata=bearer("root"))
    assert [info.executor_id for info in listed.executors] == ["e"]


async def test_tls_serves_who_trusts_the_certificate(tmp_path: Path, key_file: Path) -> None:
    made = make_certificate(tmp_path)
    settings = {"tls_certificate": str(made.certificate), "tls_key": str(made.key), "api_keys": str(key_file)}
    trusting = grpc.ssl_channel_credentials(made.certificate.read_bytes())
    async with running_manager(credentials=trusting, **settings) as manager:
        assert (await manager.inference.GetModel(pb.GetModelRequest(), metadata=bearer("alice"))).vocab_size
        for channel in (
            grpc.aio.insecure_channel(f"localhost:{manager.server.port}"),
            grpc.aio.secure_channel(f"localhost:{manager.server.port}", grpc.ssl_channel_credentials()),
        ):
            async with channel:
                call = channel.unary_unary("/kvplane.kvmanager.v1.InferenceService/GetModel")
                assert await code_of(call(b"", metadata=bearer("alice"))) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("broken", ["missing", "other key", "no pem", "password", "open key", "key twice"])
def test_tls_files_that_will_not_do_are_refused(tmp_path: Path, broken: str) -> None:
    made = make_certificate(tmp_path, password="secret" if broken == "password" else "")
    certificate, key = made.certificate, made.key
    if broken == "missing":
        certificate = tmp_path / "none.crt"
    elif broken == "other key":
        (tmp_path / "other").mkdir()
        key = make_certificate(tmp_path / "other").key
    elif broken == "no pem":
        certificate.write_text("a certificate")
    elif broken == "key twice":
        certificate = key
    elif broken == "open key":
        key.chmod(0o644)
    config = ManagerConfig(port=0, tls_certificate=str(certificate), tls_key=str(key))
    with pytest.raises(ConfigError, match=r"^--tls-.*: expected .*, got .*") as caught:
        ManagerServer(config, FakeEngine(), ExecutorRegistry(lambda: 0.0, 1_000), Health())
    assert "PRIVATE KEY" not in str(caught.value)
    assert "None" not in str(caught.value)


def test_tls_certificate_and_key_come_together() -> None:
    for settings in ({"tls_certificate": "c"}, {"tls_key": "k"}):
        with pytest.raises(ValueError, match=rf"together, or neither for plain text; got {next(iter(settings))} alone"):
            ManagerConfig(**settings)
