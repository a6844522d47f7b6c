"""What can be wrong with a request, as the core sees it.

Station: raised by `core`, mapped to a gRPC status by `kvmanager_service.errors`; the core knows no gRPC.

    CoreError
    ├── InvalidRequestError     a parameter, or a prompt that can never fit
    ├── DuplicateRequestError   the id is waiting or running
    ├── UnknownRequestError     no such request is waiting or running
    ├── QueueFullError          too many requests wait
    ├── PoolExhaustedError      a lone request outgrew the pool
    ├── TooManySequencesError   a pool of sequences has as many, or as long tables, as it may
    ├── RowFailedError          the executor could not compute this request's row
    ├── DuplicatePinError       the name pins another prefix
    ├── UnknownPinError         nothing is pinned under that name
    ├── PinLimitError           pins would name too many blocks
    ├── PoolInUseError          the prefix cache cannot be reset while requests hold blocks
    └── EventsForgottenError    the cache's events are not kept that far back

    BadResultError              an executor's result does not fit its step

Never compiled (`hatch_build.py`): an exception class of mypyc can be weakly referenced, and dies without telling so.
"""

from __future__ import annotations

__all__ = [
    "BadResultError",
    "CoreError",
    "DuplicatePinError",
    "DuplicateRequestError",
    "EventsForgottenError",
    "InvalidRequestError",
    "PinLimitError",
    "PoolExhaustedError",
    "PoolInUseError",
    "QueueFullError",
    "RowFailedError",
    "TooManySequencesError",
    "UnknownPinError",
    "UnknownRequestError",
    "invalid_parameter",
]


class CoreError(Exception):
    """An error of one request; it disturbs no other.

    Attributes:
        reason: UPPER_SNAKE_CASE name for `google.rpc.ErrorInfo`.
        metadata: the names and values the message speaks of.
    """

    def __init__(self, reason: str, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = {name: str(value) for name, value in metadata.items()}


class InvalidRequestError(CoreError):
    """A parameter is out of range, or the prompt can never fit the pool or the model."""


class DuplicateRequestError(CoreError):
    """A request with this id is waiting or running."""


class UnknownRequestError(CoreError):
    """No request with this id is waiting or running."""


class QueueFullError(CoreError):
    """max_waiting requests wait already."""


class PoolExhaustedError(CoreError):
    """The request alone fills the pool and needs one more block."""


class TooManySequencesError(CoreError):
    """A pool has as many sequences as it may, or their tables as many entries."""


class RowFailedError(CoreError):
    """The executor reported that this request's row failed."""


class DuplicatePinError(CoreError):
    """Another prefix is pinned under this name."""


class UnknownPinError(CoreError):
    """Nothing is pinned under this name."""


class PinLimitError(CoreError):
    """Pinned prefixes would be too many, or name more blocks than they may."""


class PoolInUseError(CoreError):
    """Requests hold blocks."""


class EventsForgottenError(CoreError):
    """Events of the cache were asked for that are not kept any more, or are another run's."""


def invalid_parameter(field: str, expected: str, got: object, advice: str = "") -> InvalidRequestError:
    """The error of a parameter that is out of its range: what was expected, what was got, and what to do."""
    message = f"{field}: expected {expected}, got {got}" + (f"; {advice}" if advice else "")
    return InvalidRequestError("INVALID_PARAMETER", message, field=field, expected=expected, got=got)


class BadResultError(Exception):
    """A result does not fit the step it answers; nothing of it was used."""
