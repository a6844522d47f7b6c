"""The executor's exception tree and the one table from exceptions to gRPC statuses.

Station: raised by `input_batch`, `kv_session` and `step_runner`; turned into a status only here, for `servicer`. Every
status carries `google.rpc.ErrorInfo` with domain "kvplane".

    ExecutorError
    ├── MalformedMessageError    INVALID_ARGUMENT     bytes that are not the message
    ├── InvalidFieldError        INVALID_ARGUMENT     a value of a message is out of its range
    ├── FailedPreconditionError  FAILED_PRECONDITION  the call comes too early, or speaks of what is not there
    ├── RefusedAdapterError      INVALID_ARGUMENT     an adapter that cannot be read, or not be run
    ├── AdapterExistsError       ALREADY_EXISTS       other content is loaded under the name
    ├── AdapterLimitError        RESOURCE_EXHAUSTED   as many adapters as there is room for
    ├── UnknownAdapterError      NOT_FOUND            no adapter of that name
    ├── StaleError               ABORTED              another epoch, an old step id, a stream that was taken over
    ├── NotServingError          UNAVAILABLE          loading or stopping
    └── InternalError            INTERNAL             our own mistake, or a step that the backend could not run
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NoReturn

import grpc
import structlog
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from executor_service.backends.base import AdapterError, BackendError, NotEnoughMemoryError

__all__ = [
    "ERROR_DOMAIN",
    "AdapterExistsError",
    "AdapterLimitError",
    "ExecutorError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidFieldError",
    "MalformedMessageError",
    "NotServingError",
    "RefusedAdapterError",
    "StaleError",
    "UnknownAdapterError",
    "abort_with",
    "as_executor_error",
]

ERROR_DOMAIN = "kvplane"

# A status travels as HTTP/2 trailers, which gRPC limits to 8 KiB: a long value must not turn an error into another.
_MAX_MESSAGE_CHARS = 1_500
_MAX_VALUE_CHARS = 300

_log = structlog.get_logger(__name__)


class ExecutorError(Exception):
    """A call or a step that is refused.

    Args:
        reason: UPPER_SNAKE_CASE name for `google.rpc.ErrorInfo`.
        message: what was expected, what was got, what to do.
        metadata: the names and values the message speaks of.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, reason: str, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = {name: str(value) for name, value in metadata.items()}


class MalformedMessageError(ExecutorError):
    """The bytes of a request are not the message that the method takes."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class InvalidFieldError(ExecutorError):
    """A field of a message breaks its contract.

    Args:
        field: path of the field as the proto names it, such as "block_tables[0].block_ids".
        expected: what the contract says.
        got: what came.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(
            "INVALID_FIELD", f"{field}: expected {expected}, got {got}", field=field, expected=expected, got=got
        )


class FailedPreconditionError(ExecutorError):
    """The executor is not in the state that the call needs."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class StaleError(ExecutorError):
    """The caller speaks of a content, a step or a stream that is no longer current."""

    code = grpc.StatusCode.ABORTED


class NotServingError(ExecutorError):
    """The executor is loading or stopping; try again, or elsewhere."""

    code = grpc.StatusCode.UNAVAILABLE


class RefusedAdapterError(ExecutorError):
    """An adapter that cannot be read, or not be run."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class AdapterExistsError(ExecutorError):
    """An adapter with other content is loaded under the name."""

    code = grpc.StatusCode.ALREADY_EXISTS


class AdapterLimitError(ExecutorError):
    """As many adapters are loaded as there is room for."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnknownAdapterError(ExecutorError):
    """No adapter is loaded under the name."""

    code = grpc.StatusCode.NOT_FOUND


class InternalError(ExecutorError):
    """A step that the backend could not run, or a broken invariant of our own."""

    code = grpc.StatusCode.INTERNAL


def as_executor_error(error: Exception) -> ExecutorError:
    """Map whatever a call raised to the tree; what is no known error is logged, with its traceback, as our mistake."""
    if isinstance(error, ExecutorError):
        return error
    if isinstance(error, NotEnoughMemoryError):
        return FailedPreconditionError(error.reason, str(error), **error.metadata)
    if isinstance(error, AdapterError):
        return RefusedAdapterError(error.reason, str(error), **error.metadata)
    if isinstance(error, BackendError):
        return InternalError(error.reason, str(error), **error.metadata)
    _log.error("executor_internal_error", exc_info=error)
    return InternalError(
        "INTERNAL_ERROR",
        f"{type(error).__name__} in the executor; its log has the traceback",
        error=type(error).__name__,
    )


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: ExecutorError) -> NoReturn:
    """End the call with the error's status."""
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=ERROR_DOMAIN,
        metadata={name: value[:_MAX_VALUE_CHARS] for name, value in error.metadata.items()},
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=error.code.value[0], message=str(error)[:_MAX_MESSAGE_CHARS], details=[detail])
    try:
        await context.abort_with_status(rpc_status.to_status(status))
    except grpc.aio.AbortError as aborted:
        context.add_done_callback(functools.partial(_let_go, aborted))
        raise
    raise AssertionError("unreachable: abort raises")


def _let_go(aborted: grpc.aio.AbortError, _: object) -> None:
    """Free what a refused call held. grpc.aio keeps the error with the call, and its traceback keeps the request."""
    aborted.__traceback__ = aborted.__context__ = None
