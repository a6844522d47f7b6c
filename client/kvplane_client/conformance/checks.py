"""Checks that hold a value to a sentence of the contract.

Station: used by `answers`, `stream` and `bench`, and through the latter by cases.
"""

from __future__ import annotations

from kvplane.common.v1 import common_pb2

from kvplane_client.conformance.outcome import CaseFailedError
from kvplane_client.conformance.steps import floats_of, values_of

__all__ = ["equal", "floats", "ints", "true"]


def true(condition: bool, contract: str, expected: object, got: object) -> None:
    """Raises CaseFailedError where a condition does not hold."""
    if not condition:
        raise CaseFailedError(contract, expected, got)


def equal(got: object, expected: object, contract: str) -> None:
    """Raises CaseFailedError where two values differ."""
    true(got == expected, contract, expected, got)


def ints(array: common_pb2.Int32Array, name: str) -> list[int]:
    """Unpacks a column that came, once it is known to be one."""
    _whole(array.data, "Int32Array.data: Its length is a multiple of 4", name)
    return values_of(array)


def floats(array: common_pb2.Float32Array, name: str) -> list[float]:
    """The same of numbers."""
    _whole(array.data, "Float32Array.data: Its length is a multiple of 4", name)
    return floats_of(array)


def _whole(data: bytes, contract: str, name: str) -> None:
    true(len(data) % 4 == 0, contract, f"a multiple of 4 bytes in {name}", len(data))
