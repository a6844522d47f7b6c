"""Calls with one answer: checked against the manager's contract, within a deadline, and made again after UNAVAILABLE.

Station: owned by ``AsyncClient``, whose methods are each one call of it. It knows no method by name.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvplane_client._contract import ManagerContract
from kvplane_client._stubs import task_is_cancelled
from kvplane_client.errors import RequestCancelledError, error_from_rpc
from kvplane_client.retry import Deadline, RetryListener, RetryPolicy, RetryState

__all__ = ["ManagerCalls"]

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class ManagerCalls:
    """Makes calls.

    Args:
        contract: What the manager knows.
        timeout: Seconds for a call with all its attempts; None means no limit.
        policy: How persistently UNAVAILABLE is answered with a new attempt.
        on_retry: Told of each pause before one.

    Attributes:
        contract: As given.
        timeout: As given.
    """

    def __init__(
        self, contract: ManagerContract, timeout: float | None, policy: RetryPolicy, on_retry: RetryListener | None
    ) -> None:
        self.contract = contract
        self.timeout = timeout
        self._policy = policy
        self._on_retry = on_retry

    def new_retry(self, deadline: Deadline) -> RetryState:
        """Returns the state of one call's attempts."""
        return RetryState(self._policy, deadline, self._on_retry)

    async def unary(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request
    ) -> _Response:
        """Calls a method, again after UNAVAILABLE.

        Raises:
            KvPlaneError: It failed, or the manager is too old for the request.
        """
        deadline = Deadline(self.timeout)
        retry = self.new_retry(deadline)
        while True:
            try:
                await self.contract.require(request, deadline.remaining())
                return await method(request, timeout=deadline.remaining())
            except grpc.aio.AioRpcError as rpc_error:
                await retry.pause_or_raise(error_from_rpc(rpc_error))
            except asyncio.CancelledError:
                if task_is_cancelled():
                    raise
                raise RequestCancelledError("the client was closed during the call") from None
