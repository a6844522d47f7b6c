"""The process: `python -m kvmanager_service` starts, explains itself, drains and stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import inference_service_pb2_grpc

ROOT = Path(__file__).parents[3]


async def spawn(*arguments: str, **extra: str) -> asyncio.subprocess.Process:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])} | extra
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvmanager_service",
        *arguments,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def wait_started(process: asyncio.subprocess.Process) -> int:
    """Return the port of the line that says it has started."""
    assert process.stderr is not None
    async for line in process.stderr:
        event = json.loads(line)
        if event["event"] == "manager_started":
            return int(event["port"])
    raise AssertionError("the manager ended before it had started")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_process_without_executor_is_unavailable_and_stops_at_a_signal(number: signal.Signals) -> None:
    process = await spawn("--port", "0", "--log-format", "json")
    port = await wait_started(process)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        health = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_service_pb2_grpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    process.send_signal(number)
    _, rest = await process.communicate()
    events = [json.loads(line)["event"] for line in rest.decode().splitlines()]
    assert process.returncode == 0, rest.decode()
    assert events[0] == "signal_received"
    assert events[-1] == "manager_stopped"


@pytest.mark.parametrize(("flag", "status"), [("--exit-with-parent", 1), ("--no-exit-with-parent", 0)])
async def test_process_with_exit_with_parent_ends_at_the_end_of_standard_input(flag: str, status: int) -> None:
    process = await spawn("--port", "0", "--log-format", "json", flag)
    port = await wait_started(process)
    assert process.stdin is not None
    process.stdin.close()
    if status == 0:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        process.send_signal(signal.SIGTERM)
    _, rest = await process.communicate()
    assert process.returncode == status
    assert ("manager_stopped" in rest.decode()) is (status == 0)


async def test_process_bad_setting_exits_2_and_says_why() -> None:
    process = await spawn("--port", "x")
    _, text = await process.communicate()
    assert process.returncode == 2
    assert "--port: expected a valid integer" in text.decode()


async def test_process_port_in_use_exits_2_and_says_which() -> None:
    first = await spawn("--port", "0", "--log-format", "json")
    port = await wait_started(first)
    second = await spawn("--port", str(port), "--log-format", "json")
    _, text = await second.communicate()
    first.terminate()
    await first.communicate()
    assert second.returncode == 2
    assert f"127.0.0.1:{port}" in text.decode()


@pytest.mark.parametrize(
    ("log_format", "extra", "shown"),
    [("json", {}, False), ("json", {"GRPC_VERBOSITY": "ERROR"}, True), ("console", {}, True)],
)
async def test_process_that_logs_json_keeps_lines_of_grpcs_core_out_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, log_format: str, extra: dict[str, str], shown: bool
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    first = await spawn("--port", "0", "--log-format", "json")
    port = await wait_started(first)
    second = await spawn("--port", str(port), "--log-format", log_format, **extra)
    _, text = await second.communicate()
    first.terminate()
    await first.communicate()
    ours = [line for line in text.decode().splitlines() if line.startswith("kvmanager_service: --host/--port")]
    assert len(ours) == 1
    assert ("Failed to add port" in text.decode()) is shown


async def test_process_help_teaches_and_exits_0() -> None:
    process = await spawn("--help")
    text, _ = await process.communicate()
    assert process.returncode == 0
    assert "KVPLANE_MANAGER_MAX_NUM_SEQS" in text.decode()


async def test_process_imports_no_torch() -> None:
    code = (
        "import sys, kvmanager_service.server, kvmanager_service.text_model, kvmanager_service.config;"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=environment, stdout=asyncio.subprocess.PIPE
    )
    text, _ = await process.communicate()
    assert text.decode().strip() == "[]"
