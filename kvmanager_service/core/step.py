"""One step: what the scheduler decided, and what an executor made of it.

Station: `Scheduler.schedule` returns a `Step`, `step_message` turns it into bytes at once, `Scheduler.update` takes it
back together with a `StepResult`. Neither knows the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.request import Request, TokenLogprobs


class BadResultError(Exception):
    """A result does not fit the step it answers; nothing of it was used."""


@dataclass(slots=True, eq=False)
class ScheduledRow:
    """The next tokens of one request.

    Attributes:
        start: position of the first token computed.
        num_tokens: how many tokens are computed.
        incarnation: the request's at the time of scheduling.
        feeds_from: index into the samples of the step before whose token is this row's last input, or -1.
        sample_index: index into this step's samples, or -1 when the row samples nothing.
        suppress_stop: whether tokens that would stop the request must not be sampled (min_tokens not reached).
    """

    request: Request
    start: int
    num_tokens: int
    incarnation: int
    feeds_from: int = -1
    sample_index: int = -1
    suppress_stop: bool = False

    @property
    def stop(self) -> int:
        """The row's sequence length once it is computed."""
        return self.start + self.num_tokens


@dataclass(slots=True, eq=False)
class Step:
    """A batch to compute.

    Attributes:
        step_id: grows from 1; never reused.
        feeds_from_step_id: the step that the rows' feeds_from speak of, or 0.
        tags: contents committed since the step before, for the executor to keep with the blocks; None for a block
            whose content is not trusted any more.
    """

    step_id: int
    rows: list[ScheduledRow]
    num_samples: int
    feeds_from_step_id: int = 0
    tags: list[tuple[int, BlockContent | None]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed over all rows."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class StepResult:
    """What an executor answered.

    Attributes:
        sampled: one token id per sample, in the order of sample_index.
        computed_upto: one sequence length per row.
        logprobs: by sample index, for rows that asked.
        errors: by row index, rows that failed alone.
    """

    step_id: int
    sampled: Sequence[int]
    computed_upto: Sequence[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    errors: Mapping[int, RowFailedError] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the scheduler was made; see `GetStatsResponse` for each.

    `blocks_evicted` counts the pools that were replaced; the current one counts its own.
    """

    steps: int = 0
    steps_failed: int = 0
    tokens_computed: int = 0
    tokens_generated: int = 0
    preemptions: int = 0
    reschedules: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    blocks_evicted: int = 0


def check_result(step: Step, result: StepResult) -> None:
    """Check that a result answers a step, row by row.

    Raises:
        BadResultError: it is another step's, or its columns do not fit.
    """
    if step.step_id != result.step_id:
        raise BadResultError(f"expected step {step.step_id}, got the result of step {result.step_id}")
    if len(result.sampled) != step.num_samples or len(result.computed_upto) != len(step.rows):
        raise BadResultError(
            f"expected {step.num_samples} samples and {len(step.rows)} rows for step {step.step_id}, got "
            f"{len(result.sampled)} and {len(result.computed_upto)}"
        )
    for index in result.errors:
        if not 0 <= index < len(step.rows):
            raise BadResultError(f"expected row errors of {len(step.rows)} rows, got one of row {index}")
    has_missing = min(result.sampled, default=0) < 0
    for index, row in enumerate(step.rows):
        if result.computed_upto[index] != row.stop and index not in result.errors:
            raise BadResultError(
                f"expected row {index} of step {step.step_id} to be computed up to {row.stop}, got "
                f"{result.computed_upto[index]} and no row error"
            )
        if has_missing and row.sample_index >= 0 > result.sampled[row.sample_index] and index not in result.errors:
            raise BadResultError(
                f"expected row {index} of step {step.step_id} to sample a token, got "
                f"{result.sampled[row.sample_index]} and no row error"
            )
