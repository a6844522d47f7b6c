"""What an output should have been.

Station: `bench` collects what an executor produced, with the sequence it stands for, and has a judge say what should
have come. There are three, the first that applies is used:

    ModelJudge   the executor serves a model that the kit can compute itself (`reference_model`);
    SimJudge     it is a `sim` executor, whose outputs follow from a public formula (`sim_formula`);
    SelfJudge    any other: the executor itself, which computes each sequence anew, alone, in one step, in blocks that
                 hold nothing, after the case is over. What tables, chunks, neighbours, copies and caches must not
                 change then did not change it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvplane_client.conformance import sim_formula
from kvplane_client.conformance.steps import Adapter
from kvplane_client.conformance.target import Target

if TYPE_CHECKING:
    from kvplane_client.conformance.reference_model import ReferenceModel

__all__ = [
    "Expected",
    "Judge",
    "ModelJudge",
    "Output",
    "Question",
    "SelfJudge",
    "SimJudge",
    "disagreement",
    "tolerance_of",
]

_TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
_COARSE_TOLERANCE = 0.5
_SIM_FINGERPRINT = "sim-1-vocab-"

Tokens = tuple[int, ...]


class Question(NamedTuple):
    """What comes after a sequence, with an adapter or without?"""

    tokens: Tokens
    adapter: Adapter | None = None

    @property
    def key(self) -> tuple[Tokens, str]:
        """Equal for questions of one answer: an adapter is what its revision names, whenever it was loaded."""
        return self.tokens, "" if self.adapter is None else self.adapter.revision


@dataclass(frozen=True)
class Output:
    """What came after a sequence: a token, and (id, log probability) of it and of the likeliest."""

    token: int
    logprobs: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Expected:
    """What should come: this token; or one that is as likely, to the tolerance, as the likeliest of these."""

    token: int
    logprobs: Mapping[int, float]


class Judge(ABC):
    """Knows what comes after sequences.

    Attributes:
        name: For the report.
        tolerance: How far log probabilities may lie apart.
    """

    name: str
    tolerance: float

    @abstractmethod
    async def expected(self, questions: Sequence[Question]) -> list[Expected]:
        """Says what comes after each. Whatever the cache holds, and adapters that are loaded, may be gone then."""


class SimJudge(Judge):
    """The formula of the sim backend."""

    name = "the formula of the sim backend"
    tolerance = 0.0

    def __init__(self, target: Target) -> None:
        geometry = target.geometry
        self._vocab_size = target.info.vocab_size
        self._windows = [1 if group in geometry.states else size for group, size in enumerate(geometry.windows)]

    @staticmethod
    def applies_to(target: Target) -> bool:
        """Whether the executor's outputs follow from the formula."""
        return target.info.backend == "sim" and target.info.model_fingerprint.startswith(_SIM_FINGERPRINT)

    async def expected(self, questions: Sequence[Question]) -> list[Expected]:
        """Computes the formula."""
        return [Expected(self._next_token(*question), {}) for question in questions]

    def _next_token(self, tokens: Tokens, adapter: Adapter | None) -> int:
        salt = 0 if adapter is None else sim_formula.adapter_salt(adapter.revision)
        return sim_formula.next_token(tokens, self._vocab_size, self._windows, salt)


class ModelJudge(Judge):
    """The kit's own arithmetic over the weights that the executor serves."""

    name = "the reference model in NumPy"

    def __init__(self, model: ReferenceModel, tolerance: float) -> None:
        self.model = model
        self.tolerance = tolerance
        self._known: dict[tuple[Tokens, str], Expected] = {}

    async def expected(self, questions: Sequence[Question]) -> list[Expected]:
        """Computes the model; one pass gives what comes after every beginning of a sequence."""
        for question in sorted(questions, key=lambda one: len(one.tokens), reverse=True):
            tokens, adapter = question
            if question.key not in self._known:
                rows = self.model.logprobs(tokens, None if adapter is None else Path(adapter.source))
                for length, row in enumerate(rows, start=1):
                    logprobs = dict(enumerate(row))
                    token = max(logprobs, key=logprobs.__getitem__)
                    self._known.setdefault(Question(tokens[:length], adapter).key, Expected(token, logprobs))
        return [self._known[question.key] for question in questions]


class SelfJudge(Judge):
    """The executor itself, asked in the plainest way.

    Args:
        ask: Has the executor compute sequences, each alone and whole, on an empty cache.
        tolerance: How far log probabilities may lie apart.
    """

    name = "the executor itself: each sequence alone, whole, in empty blocks"

    def __init__(self, ask: Callable[[Sequence[Question]], Awaitable[list[Output]]], tolerance: float) -> None:
        self._ask = ask
        self.tolerance = tolerance
        self._known: dict[tuple[Tokens, str], Expected] = {}

    async def expected(self, questions: Sequence[Question]) -> list[Expected]:
        """Has those computed that are not known yet."""
        unknown = list({question.key: question for question in questions if question.key not in self._known}.values())
        if unknown:
            for question, output in zip(unknown, await self._ask(unknown), strict=True):
                self._known[question.key] = Expected(output.token, dict(output.logprobs))
        return [self._known[question.key] for question in questions]


def disagreement(output: Output, expected: Expected, tolerance: float) -> tuple[str, str] | None:
    """Compares what came with what should have come.

    Returns:
        None where they agree, else what was expected and what was got.
    """
    if not expected.logprobs:
        return None if output.token == expected.token else (f"token {expected.token}", f"token {output.token}")
    likeliest = max(expected.logprobs.values())
    # Written so that NaN disagrees.
    if not expected.logprobs.get(output.token, float("-inf")) >= likeliest - tolerance:
        wanted = f"token {expected.token} (log probability {likeliest:.4f})"
        return wanted, f"token {output.token}, {_of_token(output)}"
    for token, logprob in output.logprobs:
        wanted_logprob = expected.logprobs.get(token)
        if wanted_logprob is not None and not abs(logprob - wanted_logprob) <= tolerance:
            return (
                f"log probability {wanted_logprob:.4f} of token {token}, to {tolerance:g}",
                f"{logprob:.4f}",
            )
    return None


def tolerance_of(target: Target) -> float:
    """How far apart log probabilities may lie that were computed in another order: what the types make of it."""
    types = (target.info.dtype, target.info.kv_cache_dtype)
    return max(_TOLERANCES.get(name, _COARSE_TOLERANCE) for name in types)


def _of_token(output: Output) -> str:
    return f"log probability {output.logprobs[0][1]:.4f}" if output.logprobs else "no log probability"
