"""The terms of a cost model from measured steps.

Station: called by `command` with what `measurement` found. Pure arithmetic; a handful of numbers needs no library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from kvmanager_service.replay.cost_model import KV_TERMS, TERMS, CostModel, Quantities

__all__ = ["Measured", "UndeterminedError", "fit_cost_model", "relative_error"]

_SMALLEST_PIVOT = 1e-9
_SIGNIFICANT_DIGITS = 6


class UndeterminedError(Exception):
    """The measured steps do not tell all terms apart."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A step that was timed.

    Attributes:
        name: what is said of it.
        counts: its `quantities`.
        microseconds: how long it took, more than 0.
    """

    name: str
    counts: Quantities
    microseconds: float


def fit_cost_model(measured: Sequence[Measured], *, has_kv: bool = True) -> CostModel:
    """Find the terms, none below 0, whose relative errors have the least sum of squares.

    Relative, so that a decode step of 5 ms counts as much as a prompt of 5 s. Not below 0, so that no step of any size
    is ever predicted to take less than nothing. With so few terms that is exact: each set of terms that are not 0 is an
    ordinary least squares problem, and of those whose solution is not below 0 the best is the answer.

    Args:
        measured: steps that were timed.
        has_kv: whether any layer keeps K and V. Where none does, the terms of what is read of them are 0.

    Raises:
        UndeterminedError: some term could be anything.
    """
    rows = [[count / step.microseconds for count in step.counts] for step in measured]
    every = [index for index, name in enumerate(TERMS) if has_kv or name not in KV_TERMS]
    unbounded = _least_squares(rows, every)
    if unbounded is None:
        names = ", ".join(TERMS[index] for index in every)
        raise UndeterminedError(f"{len(measured)} steps that do not tell {names} apart")
    solutions = [unbounded]
    if min(unbounded) < 0:
        smaller = [kept for size in range(1, len(every)) for kept in combinations(every, size)]
        solutions = [found for kept in smaller if (found := _least_squares(rows, kept)) is not None and min(found) >= 0]
    best = min(solutions, key=lambda terms: _squared_error(rows, terms))
    return CostModel(*(float(f"{term:.{_SIGNIFICANT_DIGITS}g}") for term in best))


def relative_error(model: CostModel, step: Measured) -> float:
    """By what share of its measured time the model is too long for a step, or below 0 too short."""
    return model.microseconds(step.counts) / step.microseconds - 1


def _squared_error(rows: Sequence[Sequence[float]], terms: Sequence[float]) -> float:
    return sum((sum(value * term for value, term in zip(row, terms, strict=True)) - 1) ** 2 for row in rows)


def _least_squares(rows: Sequence[Sequence[float]], kept: Sequence[int]) -> list[float] | None:
    """Terms x with x . row nearest to 1 over all rows; those not kept are 0. None where they are not unique."""
    scales = [sum(row[index] ** 2 for row in rows) ** 0.5 for index in kept]
    if not all(scales):
        return None
    columns = [[row[index] / scale for row in rows] for index, scale in zip(kept, scales, strict=True)]
    matrix = [[sum(a * b for a, b in zip(one, other, strict=True)) for other in columns] for one in columns]
    solved = _solve(matrix, [sum(column) for column in columns])
    if solved is None:
        return None
    terms = [0.0] * len(TERMS)
    for index, value, scale in zip(kept, solved, scales, strict=True):
        terms[index] = value / scale
    return terms


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss-Jordan elimination with pivoting; the diagonal is 1. None for a matrix as good as singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        if abs(rows[pivot][column]) < _SMALLEST_PIVOT:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(size):
            if index != column:
                factor = rows[index][column] / rows[column][column]
                rows[index] = [a - factor * b for a, b in zip(rows[index], rows[column], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]
