"""deploy/healthcheck.py, run as the images run it, against a real health service."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

HEALTHCHECK = Path(__file__).parents[2] / "deploy" / "healthcheck.py"
Status = health_pb2.HealthCheckResponse


@pytest.fixture
def server() -> Iterator[tuple[str, health.HealthServicer]]:
    """A server with a health service: its target, and the servicer to set statuses on."""
    servicer = health.HealthServicer()
    grpc_server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    yield f"127.0.0.1:{port}", servicer
    grpc_server.stop(None).wait()


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, HEALTHCHECK, *arguments], capture_output=True, text=True, check=False)


def test_healthcheck_serving_server_exits_0(server):
    target, servicer = server
    servicer.set("", Status.SERVING)
    assert check(target).returncode == 0


def test_healthcheck_not_serving_server_exits_1_and_names_the_status(server):
    target, servicer = server
    servicer.set("", Status.NOT_SERVING)
    result = check(target)
    assert (result.returncode, result.stderr) == (1, f"{target}: NOT_SERVING\n")


def test_healthcheck_unknown_service_exits_1(server):
    result = check(server[0], "no.such.Service")
    assert result.returncode == 1
    assert "NOT_FOUND" in result.stderr


def test_healthcheck_nobody_listening_exits_1_within_its_timeout():
    result = check("127.0.0.1:1")
    assert result.returncode == 1
    assert "127.0.0.1:1: " in result.stderr
