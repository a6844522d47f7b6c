"""Checks on the columns of a step; each failure names the field, what was expected and what was got.

Station: used by `input_batch` and `sampling_input`. The good case is a few vectorised comparisons; the place of the
fault is looked for only when there is one. Ranges are checked before differences, so that no difference can wrap.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
from kvplane.common.v1 import common_pb2

from executor_service.backends.base import Int32
from executor_service.errors import InvalidFieldError

__all__ = ["frozen", "int32_column", "require_growing", "require_indptr", "require_length", "require_range"]

_Scalar = TypeVar("_Scalar", bound=np.generic)


def frozen(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """Make an array read-only and return it."""
    values.flags.writeable = False
    return values


def int32_column(column: common_pb2.Int32Array, field: str) -> Int32:
    """View a column's bytes as int32, without a copy.

    Shape:
        returns (len(data) / 4,), read-only.

    Raises:
        InvalidFieldError: the length is no multiple of 4.
    """
    data = column.data
    if len(data) % 4:
        raise InvalidFieldError(f"{field}.data", "a multiple of 4 bytes", f"{len(data)} bytes")
    return np.frombuffer(data, dtype="<i4")


def require_length(values: Int32, length: int, field: str) -> None:
    """Check how many values a column has."""
    if len(values) != length:
        raise InvalidFieldError(field, f"{length} values", f"{len(values)} values")


def require_range(values: Int32, low: int, high: int, field: str) -> None:
    """Check that every value is in [low, high)."""
    if len(values) and (values.min() < low or values.max() >= high):
        place = int(np.argmax((values < low) | (values >= high)))
        raise InvalidFieldError(f"{field}[{place}]", f"a value in [{low}, {high})", int(values[place]))


def require_growing(values: Int32, field: str, *, strictly: bool) -> None:
    """Check the order of a column whose values are known to be in a range."""
    if len(values) < 2:
        return
    good = values[1:] > values[:-1] if strictly else values[1:] >= values[:-1]
    if not good.all():
        place = int(np.argmin(good))
        raise InvalidFieldError(
            f"{field}[{place + 1}]",
            f"{'more than' if strictly else 'at least'} the value before it, {int(values[place])}",
            int(values[place + 1]),
        )


def require_indptr(values: Int32, length: int, end: int, field: str, *, strictly: bool) -> None:
    """Check a CSR column: `length` values from 0 to `end`, (strictly) growing."""
    require_length(values, length, field)
    if values[0] != 0 or values[-1] != end:
        raise InvalidFieldError(field, f"values from 0 to {end}", f"values from {int(values[0])} to {int(values[-1])}")
    require_range(values, 0, end + 1, field)
    require_growing(values, field, strictly=strictly)
