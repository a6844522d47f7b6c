"""Waiting for a manager that starts.

Station: below ``AsyncClient.wait_ready``. Ready means that the health service says SERVING and that GetModel answers,
which the contract promises from the first executor on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from kvplane.kvmanager.v1 import inference_service_pb2 as pb

from kvplane_client._contract import ManagerContract
from kvplane_client._stubs import Stubs
from kvplane_client.errors import UnavailableError, error_from_rpc
from kvplane_client.retry import Deadline

__all__ = ["wait_until_ready"]

_POLL_SECONDS = 0.1
_PROBE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Missing:
    """What a manager lacks to be ready.

    Attributes:
        what: "connection", "health" or "model".
        message: For people.
    """

    what: str
    message: str


async def wait_until_ready(stubs: Stubs, contract: ManagerContract, deadline: Deadline) -> pb.GetModelResponse:
    """Polls until the manager is ready.

    Args:
        stubs: Where to ask.
        contract: What the manager knows; it may be another one after each probe.
        deadline: When to give up.

    Returns:
        The served model.

    Raises:
        UnavailableError: The deadline passed; says what was missing last, and names it in metadata["missing"].
        KvPlaneError: The server answered with an error other than UNAVAILABLE.
    """
    missing = _Missing("connection", "no answer yet")
    while True:
        remaining = deadline.remaining()
        if remaining == 0:
            raise UnavailableError(
                f"{stubs.target} is not ready: {missing.message}",
                metadata={"target": stubs.target, "missing": missing.what},
            )
        seconds = _PROBE_SECONDS if remaining is None else min(_PROBE_SECONDS, remaining)
        contract.note_connection()
        answer = await _probe(stubs, seconds)
        if isinstance(answer, pb.GetModelResponse):
            return answer
        missing = answer
        await asyncio.sleep(_POLL_SECONDS if remaining is None else min(_POLL_SECONDS, remaining))


async def _probe(stubs: Stubs, seconds: float) -> pb.GetModelResponse | _Missing:
    """Asks once; returns the model, or what is missing."""
    try:
        health = await stubs.health_check(health_pb2.HealthCheckRequest(), timeout=seconds)
        if health.status != health_pb2.HealthCheckResponse.SERVING:
            status = health_pb2.HealthCheckResponse.ServingStatus.Name(health.status)
            why = "it has no executor that is ready, or drains" if status == "NOT_SERVING" else "it does not say why"
            return _Missing("health", f"health is {status}: {why}")
        return await stubs.inference.GetModel(pb.GetModelRequest(), timeout=seconds)
    except grpc.aio.AioRpcError as rpc_error:
        error = error_from_rpc(rpc_error)
        if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return _Missing("model" if error.reason else "connection", error.message)
        raise error from None
