"""Errors of the manager and the one table that turns an exception into a gRPC status.

Station: raised by servicers, admission, registry and engine loop; mapped here, by nobody else. Each message says what
was expected, what was got and what to do. Prompts, texts and token ids of requests never enter a message or a log.

    CoreError (kvmanager_service.core.errors)
    ├── UnavailableError            no executor, draining, or broken: try again later
    ├── PreconditionError           the model lacks what the request needs (chat template, tokenizer)
    ├── ExecutorRejectedError       the executor serves another model, or one that cannot be used
    ├── ExecutorIdReusedError       an executor id came back with another address
    ├── UnknownExecutorError        an operator names an executor that is not registered
    ├── ExecutorSwitchError         an operator's order to move on to an executor cannot be carried out
    ├── TooManyPoolsError           pools of engines with their own loop, or blocks in them, are as many as may be
    ├── BatchTooLargeError          what a batch of operations on a pool brings is more than one answer may hold
    ├── StaleBatchError             a batch of operations on a pool is neither the next nor the newest
    ├── UnknownAdapterError         no LoRA adapter is loaded under that name
    ├── DuplicateAdapterError       an adapter with other content is loaded under that name
    ├── AdapterLimitError           the executor has as many adapters as it has room for
    ├── AdapterInUseError           an adapter cannot be unloaded while requests use it
    ├── UnauthenticatedError        a call without a key that the manager knows
    └── PermissionDeniedError       a key that is not for this method, or not for that tenant
"""

from __future__ import annotations

import functools
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from kvplane.common.v1 import common_pb2

from kvmanager_service.core.errors import (
    CoreError,
    DuplicatePinError,
    DuplicateRequestError,
    EventsForgottenError,
    InvalidRequestError,
    PinLimitError,
    PoolExhaustedError,
    PoolInUseError,
    QueueFullError,
    RowFailedError,
    TooManySequencesError,
    UnknownPinError,
    UnknownRequestError,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "DOMAIN",
    "AdapterInUseError",
    "AdapterLimitError",
    "BatchTooLargeError",
    "DuplicateAdapterError",
    "ErrorStatus",
    "ExecutorIdReusedError",
    "ExecutorRejectedError",
    "ExecutorSwitchError",
    "PermissionDeniedError",
    "PreconditionError",
    "RpcErrors",
    "StaleBatchError",
    "TooManyPoolsError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownAdapterError",
    "UnknownExecutorError",
    "abort_with",
    "to_status",
]

DOMAIN = "kvplane"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
QUEUE_FULL_RETRY_MS = 1_000
"""How long a client is told to wait when the queue is full: a guess at a few finished requests, not a promise."""

_log = structlog.get_logger(__name__)


class UnavailableError(CoreError):
    """The manager cannot take the request now: no executor, draining, or broken. Trying again may help."""


class PreconditionError(CoreError):
    """The served model lacks what the request needs, such as a tokenizer or a chat template."""


class ExecutorRejectedError(CoreError):
    """The executor cannot join: it serves another model than the manager, or one that the manager cannot use."""


class ExecutorIdReusedError(CoreError):
    """An executor id that is registered came back with another address."""


class UnknownExecutorError(CoreError):
    """No executor of that id is registered."""


class ExecutorSwitchError(CoreError):
    """The manager cannot move on to an executor: it is active, was not ready, or another order is carried out."""


class TooManyPoolsError(CoreError):
    """There are as many pools of engines with their own loop, or blocks in them, as the manager is to keep."""


class BatchTooLargeError(CoreError):
    """The answer to a batch of operations on a pool is as large as it may be; this operation is for the next."""


class StaleBatchError(CoreError):
    """A batch of operations on a pool is neither the next nor the newest."""


class UnknownAdapterError(CoreError):
    """No LoRA adapter is loaded under that name."""


class DuplicateAdapterError(CoreError):
    """An adapter with other content is loaded under that name."""


class AdapterLimitError(CoreError):
    """The executor has as many adapters as it has room for."""


class AdapterInUseError(CoreError):
    """An adapter cannot be unloaded while requests use it."""


class UnauthenticatedError(CoreError):
    """A call comes without a key that the manager knows."""


class PermissionDeniedError(CoreError):
    """The caller's key is not for this method, or not for that tenant."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What an exception type becomes."""

    code: grpc.StatusCode
    retry_delay_ms: int = 0


RULES: dict[type[CoreError], Rule] = {
    InvalidRequestError: Rule(grpc.StatusCode.INVALID_ARGUMENT),
    UnknownRequestError: Rule(grpc.StatusCode.NOT_FOUND),
    UnknownPinError: Rule(grpc.StatusCode.NOT_FOUND),
    UnknownExecutorError: Rule(grpc.StatusCode.NOT_FOUND),
    UnknownAdapterError: Rule(grpc.StatusCode.NOT_FOUND),
    DuplicateRequestError: Rule(grpc.StatusCode.ALREADY_EXISTS),
    DuplicatePinError: Rule(grpc.StatusCode.ALREADY_EXISTS),
    DuplicateAdapterError: Rule(grpc.StatusCode.ALREADY_EXISTS),
    ExecutorIdReusedError: Rule(grpc.StatusCode.ALREADY_EXISTS),
    StaleBatchError: Rule(grpc.StatusCode.ABORTED),
    TooManyPoolsError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED),
    TooManySequencesError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED),
    BatchTooLargeError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED),
    QueueFullError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, QUEUE_FULL_RETRY_MS),
    PinLimitError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED),
    AdapterLimitError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED),
    PoolExhaustedError: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED),
    EventsForgottenError: Rule(grpc.StatusCode.OUT_OF_RANGE),
    PoolInUseError: Rule(grpc.StatusCode.FAILED_PRECONDITION),
    AdapterInUseError: Rule(grpc.StatusCode.FAILED_PRECONDITION),
    PreconditionError: Rule(grpc.StatusCode.FAILED_PRECONDITION),
    ExecutorRejectedError: Rule(grpc.StatusCode.FAILED_PRECONDITION),
    ExecutorSwitchError: Rule(grpc.StatusCode.FAILED_PRECONDITION),
    UnavailableError: Rule(grpc.StatusCode.UNAVAILABLE),
    RowFailedError: Rule(grpc.StatusCode.INTERNAL),
    UnauthenticatedError: Rule(grpc.StatusCode.UNAUTHENTICATED),
    PermissionDeniedError: Rule(grpc.StatusCode.PERMISSION_DENIED),
}
"""The table. A type that is not in it, and has no parent in it, is a fault of ours: INTERNAL."""


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """An error as it goes over the wire, before it takes the form of a status or of a `common.v1.Error`."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    retry_delay_ms: int = 0

    def to_rpc_status(self) -> Status:
        """Return it as `google.rpc.Status` with `ErrorInfo`, and `RetryInfo` when there is advice."""
        status = Status(code=self.code.value[0], message=self.message)
        status.details.add().Pack(ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata))
        if self.retry_delay_ms:
            delay = Duration()
            delay.FromMilliseconds(self.retry_delay_ms)
            status.details.add().Pack(RetryInfo(retry_delay=delay))
        return status

    def to_proto(self) -> common_pb2.Error:
        """Return it as the error of one request of a multiplexed stream."""
        return common_pb2.Error(
            code=self.code.value[0],
            message=self.message,
            reason=self.reason,
            metadata=self.metadata,
            retry_delay_ms=self.retry_delay_ms,
        )


def to_status(error: Exception) -> ErrorStatus:
    """Look an exception up in the table; log it when it is not one that a client can cause."""
    if isinstance(error, CoreError):
        for kind in type(error).__mro__:
            rule = RULES.get(kind)
            if rule is not None:
                return ErrorStatus(rule.code, str(error), error.reason, error.metadata, rule.retry_delay_ms)
    _log.error("unexpected_error", error_type=type(error).__qualname__, stack=_frames(error))
    message = (
        "expected no failure here, got an internal error: this is a fault of the manager, not of the request. "
        "Look for unexpected_error in the manager's log and report it."
    )
    return ErrorStatus(grpc.StatusCode.INTERNAL, message, "INTERNAL", {"error_type": type(error).__qualname__})


class RpcErrors:
    """Runs the body of a servicer method; whatever it raises ends the call with the status of the table.

    Cancellation and `context.abort` itself pass through.

    Usage: `async with RpcErrors(context): ...`
    """

    __slots__ = ("_context",)

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        """Enter; there is nothing to prepare."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the call with the error's status, if there is one."""
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            await abort_with(self._context, error)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the call with the error's status."""
    status = to_status(error)
    details = status.to_rpc_status().SerializeToString()
    try:
        await context.abort(status.code, status.message, ((STATUS_DETAILS_KEY, details),))
    except grpc.aio.AbortError as aborted:
        context.add_done_callback(functools.partial(_let_go, aborted))  # type: ignore[arg-type]
        raise
    raise AssertionError("unreachable: abort raises")


def _let_go(aborted: grpc.aio.AbortError, _: object) -> None:
    """Free what a refused call held. grpc.aio keeps the error with the call, and its traceback keeps the request."""
    aborted.__traceback__ = aborted.__context__ = None


def _frames(error: BaseException) -> str:
    """Return the traceback of an error and its causes without their messages, which may quote a prompt."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        parts.append("".join([*traceback.format_tb(seen.__traceback__), type(seen).__qualname__]))
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\ncaused by\n".join(parts)
