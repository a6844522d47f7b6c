import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from executor_service.backends.base import BackendError, NotEnoughMemoryError
from executor_service.errors import InvalidFieldError, StaleError, abort_with, as_executor_error


class AbortedError(Exception):
    def __init__(self, status):
        self.status = status


class RecordingContext:
    async def abort_with_status(self, status):
        raise AbortedError(status)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (StaleError("STALE_EPOCH", "old"), grpc.StatusCode.ABORTED, "STALE_EPOCH"),
        (NotEnoughMemoryError("NOT_ENOUGH", "no"), grpc.StatusCode.FAILED_PRECONDITION, "NOT_ENOUGH"),
        (BackendError("CIRCULAR", "no", rows=[1]), grpc.StatusCode.INTERNAL, "CIRCULAR"),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL, "INTERNAL_ERROR"),
    ],
)
def test_as_executor_error_maps_to_one_code(error, code, reason):
    mapped = as_executor_error(error)
    assert (mapped.code, mapped.reason) == (code, reason)
    assert "secret" not in str(mapped)


async def test_abort_with_long_values_stays_within_grpcs_metadata_limit():
    error = InvalidFieldError("f" * 20_000, "e" * 20_000, "g" * 20_000)
    with pytest.raises(AbortedError) as ended:
        await abort_with(RecordingContext(), error)
    ((key, value),) = ended.value.status.trailing_metadata
    assert key == "grpc-status-details-bin"
    assert len(value) < 6_000
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(value).details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_FIELD", "kvplane")
    assert set(info.metadata) == {"field", "expected", "got"}
