"""What a case is, and how a file of cases puts them together.

Station: each module of `cases` makes one `Topic` and decorates its functions; `cases` collects the topics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvplane_client.conformance.bench import Bench

__all__ = ["Case", "Topic"]

CaseFunction: TypeAlias = "Callable[[Bench], Awaitable[None]]"


@dataclass(frozen=True)
class Case:
    """One thing that is tried on an executor.

    Attributes:
        name: Topic and function, such as "tables/shuffled".
        contract: The sentence it holds the executor to, where what it finds wrong says no other.
        summary: What it does, in one line.
        run: Does it, on a fresh cache.
    """

    name: str
    contract: str
    summary: str
    run: CaseFunction


class Topic:
    """The cases of one file, in its order.

    Args:
        name: The first half of their names.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def case(self, contract: str) -> Callable[[CaseFunction], CaseFunction]:
        """Registers the function below as a case; its docstring's first line is the summary."""

        def register(function: CaseFunction) -> CaseFunction:
            summary = (function.__doc__ or "").strip().partition("\n")[0]
            self.add(getattr(function, "__name__", ""), contract, summary, function)
            return function

        return register

    def add(self, name: str, contract: str, summary: str, run: CaseFunction) -> None:
        """Registers a case by its parts, as one of many that differ in a value."""
        full_name = f"{self.name}/{name}"
        assert name
        assert summary
        assert all(known.name != full_name for known in self.cases), full_name
        self.cases.append(Case(full_name, contract, summary, run))
