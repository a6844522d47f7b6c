"""The error table, as status and as the error of one request of many."""

from __future__ import annotations

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from structlog.testing import capture_logs

from kvmanager_service.core import errors as core
from kvmanager_service.errors import (
    RULES,
    AdapterInUseError,
    AdapterLimitError,
    BatchTooLargeError,
    DuplicateAdapterError,
    ExecutorIdReusedError,
    ExecutorRejectedError,
    ExecutorSwitchError,
    PermissionDeniedError,
    PreconditionError,
    StaleBatchError,
    TooManyPoolsError,
    UnauthenticatedError,
    UnavailableError,
    UnknownAdapterError,
    UnknownExecutorError,
    to_status,
)

CODES = {
    core.InvalidRequestError: "INVALID_ARGUMENT",
    core.UnknownRequestError: "NOT_FOUND",
    core.UnknownPinError: "NOT_FOUND",
    core.DuplicatePinError: "ALREADY_EXISTS",
    core.PinLimitError: "RESOURCE_EXHAUSTED",
    core.DuplicateRequestError: "ALREADY_EXISTS",
    core.QueueFullError: "RESOURCE_EXHAUSTED",
    core.PoolExhaustedError: "RESOURCE_EXHAUSTED",
    core.EventsForgottenError: "OUT_OF_RANGE",
    core.PoolInUseError: "FAILED_PRECONDITION",
    core.RowFailedError: "INTERNAL",
    core.TooManySequencesError: "RESOURCE_EXHAUSTED",
    AdapterInUseError: "FAILED_PRECONDITION",
    AdapterLimitError: "RESOURCE_EXHAUSTED",
    DuplicateAdapterError: "ALREADY_EXISTS",
    UnknownAdapterError: "NOT_FOUND",
    BatchTooLargeError: "RESOURCE_EXHAUSTED",
    ExecutorIdReusedError: "ALREADY_EXISTS",
    ExecutorRejectedError: "FAILED_PRECONDITION",
    ExecutorSwitchError: "FAILED_PRECONDITION",
    UnknownExecutorError: "NOT_FOUND",
    PreconditionError: "FAILED_PRECONDITION",
    StaleBatchError: "ABORTED",
    TooManyPoolsError: "RESOURCE_EXHAUSTED",
    UnavailableError: "UNAVAILABLE",
    UnauthenticatedError: "UNAUTHENTICATED",
    PermissionDeniedError: "PERMISSION_DENIED",
}


def test_errors_every_core_error_has_a_row() -> None:
    named = [getattr(core, name) for name in core.__all__]
    kinds = {kind for kind in named if isinstance(kind, type) and issubclass(kind, core.CoreError)} - {core.CoreError}
    assert kinds <= set(CODES) == set(RULES)


@pytest.mark.parametrize(("kind", "code"), CODES.items(), ids=lambda value: getattr(value, "__name__", value))
def test_errors_status_carries_code_message_and_error_info(kind: type[core.CoreError], code: str) -> None:
    status = to_status(kind("SOME_REASON", "expected 1, got 2", field="x", got=2)).to_rpc_status()
    assert status.code == grpc.StatusCode[code].value[0]
    assert status.message == "expected 1, got 2"
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == ("SOME_REASON", "kvplane", {"field": "x", "got": "2"})


def test_errors_only_a_full_queue_advises_when_to_retry() -> None:
    for kind in CODES:
        status = to_status(kind("R", "m")).to_rpc_status()
        retries = [detail for detail in status.details if detail.Is(RetryInfo.DESCRIPTOR)]
        assert bool(retries) == (kind is core.QueueFullError)
        if retries:
            retry = RetryInfo()
            retries[0].Unpack(retry)
            assert retry.retry_delay.ToMilliseconds() == 1_000


def test_errors_proto_form_carries_the_same() -> None:
    error = to_status(core.QueueFullError("QUEUE_FULL", "m", max_waiting=3)).to_proto()
    assert (error.code, error.message, error.reason) == (8, "m", "QUEUE_FULL")
    assert (dict(error.metadata), error.retry_delay_ms) == ({"max_waiting": "3"}, 1_000)


def test_errors_subclass_without_row_uses_its_parents() -> None:
    class TighterError(core.InvalidRequestError):
        pass

    assert to_status(TighterError("R", "m")).code is grpc.StatusCode.INVALID_ARGUMENT


def test_errors_unexpected_exception_is_internal_and_logged_without_its_message() -> None:
    def fail(prompt: str) -> None:
        try:
            {}[prompt]
        except KeyError as error:
            raise ValueError(prompt) from error

    prompt = "".join(["the sec", "ret prompt"])
    with pytest.raises(ValueError, match="secret") as caught:
        fail(prompt)
    with capture_logs() as logs:
        status = to_status(caught.value)
    assert status.code is grpc.StatusCode.INTERNAL
    assert "secret" not in status.message
    (entry,) = logs
    assert (entry["event"], entry["error_type"]) == ("unexpected_error", "ValueError")
    assert "in fail" in entry["stack"]
    assert "KeyError" in entry["stack"]
    assert "secret" not in str(entry)
