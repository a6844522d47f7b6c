"""Runs cases one after the other and says how each ended.

Station: called by the command, and by tests. Cases are independent: each begins with an empty cache.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvplane_client.conformance.adapter_sources import AdapterSources, choose_sources
from kvplane_client.conformance.alone import ask_alone
from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.cases import all_cases
from kvplane_client.conformance.judges import Judge, ModelJudge, SelfJudge, SimJudge, tolerance_of
from kvplane_client.conformance.outcome import CaseFailedError, CaseSkippedError, ExecutorGoneError, UnusableError
from kvplane_client.conformance.registry import Case
from kvplane_client.conformance.target import Target

if TYPE_CHECKING:
    from kvplane_client.conformance.reference_model import ReferenceModel

__all__ = ["Outcome", "Result", "choose_judge", "run_cases", "selected"]


class Outcome(StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Result:
    """One case's end.

    Attributes:
        name: The case's.
        outcome: How it ended.
        seconds: How long it took.
        summary: What the case does.
        contract: The sentence that was broken; empty for a case that did not fail.
        expected: What it makes one expect.
        got: What came.
        reason: Why it was skipped.
    """

    name: str
    outcome: Outcome
    seconds: float
    summary: str
    contract: str = ""
    expected: str = ""
    got: str = ""
    reason: str = ""


def selected(filters: Sequence[str]) -> list[Case]:
    """Returns the cases whose names have any of these texts in them; all without one."""
    return [case for case in all_cases() if not filters or any(text in case.name for text in filters)]


def choose_judge(target: Target, model: ReferenceModel | None, tolerance: float | None) -> Judge:
    """Returns the strictest judge there is for an executor.

    Args:
        target: The executor, met.
        model: What it serves, where the kit can compute that.
        tolerance: How far log probabilities may lie apart; None goes by the executor's types.

    Raises:
        UnusableError: It serves another model.
    """
    allowed = tolerance_of(target) if tolerance is None else tolerance
    if model is not None:
        if model.vocab_size != target.info.vocab_size:
            message = f"--model: expected the model that is served, with vocab_size {target.info.vocab_size}"
            raise UnusableError(f"{message}, got one with {model.vocab_size}")
        return ModelJudge(model, allowed)
    if SimJudge.applies_to(target):
        return SimJudge(target)
    return SelfJudge(ask_alone(target), allowed)


async def run_cases(
    target: Target, judge: Judge, cases: Sequence[Case], adapters: Sequence[str] = ()
) -> AsyncIterator[Result]:
    """Runs cases and yields each one's end. Where the executor has gone, those that are left fail at once.

    Args:
        target: The executor, met.
        judge: Of its outputs.
        cases: In the order in which they are run.
        adapters: Sources of LoRA adapters for the model that is served, for one that the kit can make none for.
    """
    sources = choose_sources(target, judge, adapters)
    gone_since = ""
    try:
        for case in cases:
            if gone_since:
                got = f"none since {gone_since}"
                yield Result(
                    case.name, Outcome.FAILED, 0.0, case.summary, case.contract, "an executor that answers", got
                )
                continue
            result = await _run(target, judge, sources, case)
            yield result
            if result.outcome is Outcome.FAILED and not await target.is_alive():
                gone_since = case.name
    finally:
        sources.close()


async def _run(target: Target, judge: Judge, sources: AdapterSources, case: Case) -> Result:
    started = time.monotonic()
    outcome, contract, expected, got, reason = Outcome.PASSED, "", "", "", ""
    try:
        bench = Bench(target, judge, sources, await target.fresh())
        try:
            await case.run(bench)
        finally:
            await bench.close()
        await bench.judged(case.contract)
    except CaseFailedError as error:
        outcome, contract, expected, got = Outcome.FAILED, error.contract or case.contract, error.expected, error.got
    except ExecutorGoneError as error:
        outcome, contract, expected, got = Outcome.FAILED, case.contract, "an executor that answers", str(error)
    except CaseSkippedError as error:
        outcome, reason = Outcome.SKIPPED, str(error)
    seconds = time.monotonic() - started
    return Result(case.name, outcome, seconds, case.summary, contract, expected, got, reason)
