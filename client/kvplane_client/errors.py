"""Errors of the client: what a failed call or request raises.

Every error a user can meet is a :class:`KvPlaneError`; the tree follows the codes of the wire::

    KvPlaneError                    any code without a class of its own
    ├── InvalidArgumentError        a bad parameter, or a prompt that can never fit: change the request
    ├── NotFoundError               no such request
    ├── AlreadyExistsError          the request id is in use
    ├── ResourceExhaustedError      the queue is full (``retry_delay`` says how long to wait), or the pool is too small
    ├── FailedPreconditionError     not in this state: no chat template, cache in use
    │   └── ManagerTooOldError      it would ignore what must not be ignored: nothing was sent; upgrade the manager
    ├── UnauthenticatedError        no key, or one that the manager does not know
    ├── PermissionDeniedError       the key is not for this method, or names another tenant
    ├── AbortedError                overtaken by a reset of the executor's cache
    ├── OutOfRangeError             events of the cache that are not kept any more: start with a snapshot
    ├── UnavailableError            starting, draining, no executor, or no connection; the client retried in vain
    ├── RequestCancelledError       the server cancelled the call (also an ``asyncio`` cancellation of the server's own)
    ├── DeadlineExceededError       the deadline passed; the server has freed the request's blocks (also a TimeoutError)
    └── InternalError               a broken invariant, on either side: report it

Station: the bottom of the package. It turns ``grpc.aio.AioRpcError`` and ``kvplane.common.v1.Error`` into these
classes and knows nothing of retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from kvplane.common.v1 import common_pb2

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "KvPlaneError",
    "ManagerTooOldError",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
    "error_from_rpc",
    "error_from_wire",
]

ERROR_DOMAIN = "kvplane"
_STATUS_DETAILS_KEY = "grpc-status-details-bin"


class KvPlaneError(Exception):
    """A call or a request failed.

    Attributes:
        code: The gRPC status code.
        message: What was expected, what was got, what to do. The same as ``str(error)``.
        reason: The ErrorInfo reason in UPPER_SNAKE_CASE; empty when the failure did not come from KVPlane itself.
        metadata: The names and values the message speaks of.
        retry_delay: How long the server advises to wait before a new attempt, in seconds; None without advice.
    """

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_delay: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.reason = reason
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_delay = retry_delay

    def __repr__(self) -> str:
        return f"{type(self).__name__}(code={self.code.name}, reason={self.reason!r}, message={self.message!r})"


class InvalidArgumentError(KvPlaneError):
    """A parameter is out of its range, or the prompt can never fit."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(KvPlaneError):
    """There is no request of that id."""

    default_code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(KvPlaneError):
    """The request id is waiting or running already."""

    default_code = grpc.StatusCode.ALREADY_EXISTS


class ResourceExhaustedError(KvPlaneError):
    """The queue is full, or a lone request outgrew the pool."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPreconditionError(KvPlaneError):
    """The server is not in a state for this call."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class ManagerTooOldError(FailedPreconditionError):
    """The manager does not know what must not be ignored of the request (``metadata["fields"]``): it was not sent."""


class UnauthenticatedError(KvPlaneError):
    """The manager wants a key, and got none that it knows."""

    default_code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(KvPlaneError):
    """The key is not for what was asked."""

    default_code = grpc.StatusCode.PERMISSION_DENIED


class AbortedError(KvPlaneError):
    """A reset overtook the call."""

    default_code = grpc.StatusCode.ABORTED


class OutOfRangeError(KvPlaneError):
    """Events of the prefix cache were asked for that are not kept any more."""

    default_code = grpc.StatusCode.OUT_OF_RANGE


class UnavailableError(KvPlaneError):
    """The server cannot be reached, or is starting, draining or without an executor."""

    default_code = grpc.StatusCode.UNAVAILABLE


class RequestCancelledError(KvPlaneError):
    """The server cancelled the call."""

    default_code = grpc.StatusCode.CANCELLED


class DeadlineExceededError(KvPlaneError, TimeoutError):
    """The deadline passed before the end."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class InternalError(KvPlaneError):
    """An invariant did not hold."""

    default_code = grpc.StatusCode.INTERNAL


_CLASS_BY_CODE: dict[grpc.StatusCode, type[KvPlaneError]] = {
    cls.default_code: cls
    for cls in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        ResourceExhaustedError,
        FailedPreconditionError,
        UnauthenticatedError,
        PermissionDeniedError,
        AbortedError,
        OutOfRangeError,
        UnavailableError,
        RequestCancelledError,
        DeadlineExceededError,
        InternalError,
    )
}
_CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def error_from_rpc(rpc_error: grpc.aio.AioRpcError) -> KvPlaneError:
    """Turns the failure of a call into the error users see.

    Args:
        rpc_error: What ``grpc.aio`` raised.

    Returns:
        An error of the class that belongs to the code, with the details of ``google.rpc.Status`` where there are any.
    """
    reason, metadata, retry_delay = _read_details(rpc_error)
    code = rpc_error.code()
    message = rpc_error.details() or f"the call failed with {code.name} and no message"
    return _make(code, message, reason, metadata, retry_delay)


def error_from_wire(error: common_pb2.Error) -> KvPlaneError:
    """Turns the error of one request of a GenerateMany stream into the error users see."""
    code = _CODE_BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
    retry_delay = error.retry_delay_ms / 1000 if error.retry_delay_ms > 0 else None
    return _make(code, error.message, error.reason, error.metadata, retry_delay)


def _make(
    code: grpc.StatusCode, message: str, reason: str, metadata: Mapping[str, str], retry_delay: float | None
) -> KvPlaneError:
    cls = _CLASS_BY_CODE.get(code, KvPlaneError)
    return cls(message, code=code, reason=reason, metadata=metadata, retry_delay=retry_delay)


def _read_details(rpc_error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str], float | None]:
    """Reads ErrorInfo and RetryInfo; details that cannot be parsed leave code and message to speak alone."""
    reason, metadata, retry_delay = "", {}, None
    for detail in _status_of(rpc_error).details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        try:
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(retry):
                retry_delay = retry.retry_delay.ToMilliseconds() / 1000
        except DecodeError:
            continue
    return reason, metadata, retry_delay


def _status_of(rpc_error: grpc.aio.AioRpcError) -> status_pb2.Status:
    status = status_pb2.Status()
    for key, value in rpc_error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY:
            try:
                status.ParseFromString(value if isinstance(value, bytes) else value.encode())
            except DecodeError:
                return status_pb2.Status()
    return status
