"""One step: what the scheduler decided, and what an executor made of it.

Station: `Scheduler.schedule` returns a `Step`, `step_message` turns it into bytes at once, `Scheduler.update` takes it
back together with a `StepResult`. Neither knows the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.errors import BadResultError, RowFailedError
from kvmanager_service.core.request import Request, TokenLogprobs


class ScheduledRow:
    """The next tokens of one request.

    Attributes:
        start: position of the first token computed.
        num_tokens: how many tokens are computed.
        stop: the row's sequence length once it is computed.
        incarnation: the request's at the time of scheduling.
        feeds_from: index into the samples of the step before whose token is this row's last input, or -1.
        sample_index: index into this step's samples, or -1 when the row samples nothing.
        suppress_stop: whether tokens that would stop the request must not be sampled (min_tokens not reached).
        branches: requests forked from this one by this row, which samples for each of them, too; None for none.
    """

    __slots__ = (
        "branches",
        "feeds_from",
        "incarnation",
        "num_tokens",
        "request",
        "sample_index",
        "start",
        "stop",
        "suppress_stop",
    )

    def __init__(self, request: Request, num_tokens: int) -> None:
        self.request = request
        self.start = request.num_computed_tokens
        self.num_tokens = num_tokens
        self.stop = request.num_computed_tokens + num_tokens
        self.incarnation = request.incarnation
        self.feeds_from = -1
        self.sample_index = -1
        self.suppress_stop = False
        self.branches: list[Branch] | None = None


class Branch:
    """A request that a row samples for besides its own.

    Attributes:
        row: the row.
        row_index: its index in the step.
        request: whose table begins as the row's.
        incarnation: the request's at the time of scheduling.
        sample_index: index into the step's samples.
    """

    __slots__ = ("incarnation", "request", "row", "row_index", "sample_index")

    def __init__(self, row: ScheduledRow, row_index: int, request: Request) -> None:
        self.row = row
        self.row_index = row_index
        self.request = request
        self.incarnation = request.incarnation
        self.sample_index = -1


class CopyDirection(IntEnum):
    """Between which memories a block is copied; the values are those of the wire."""

    DEVICE_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    HOST_TO_DEVICE = 3


class BlockCopy(NamedTuple):
    """An order to copy a whole block. Device blocks are in [1, num_blocks), host blocks in [0, num_host_blocks)."""

    direction: CopyDirection
    source_id: int
    target_id: int


class Step:
    """A batch to compute.

    Attributes:
        step_id: grows from 1; never reused.
        num_tokens: tokens computed over all rows.
        num_samples: how many rows sample a token.
        feeds_from_step_id: the step that the rows' feeds_from speak of, or 0.
        tags: contents committed since the step before, for the executor to keep with the blocks; None for a block
            whose content is not trusted any more.
        copies: done in this order before any row writes.
        branches: those of all rows, in order.
    """

    __slots__ = ("branches", "copies", "feeds_from_step_id", "num_samples", "num_tokens", "rows", "step_id", "tags")

    def __init__(
        self,
        step_id: int,
        rows: list[ScheduledRow],
        num_tokens: int,
        num_samples: int,
        *,
        feeds_from_step_id: int,
        tags: list[tuple[int, BlockContent | None]],
        copies: list[BlockCopy],
        branches: list[Branch] | None = None,
    ) -> None:
        self.step_id = step_id
        self.rows = rows
        self.num_tokens = num_tokens
        self.num_samples = num_samples
        self.feeds_from_step_id = feeds_from_step_id
        self.tags = tags
        self.copies = copies
        self.branches = branches or []


class StepResult:
    """What an executor answered.

    Args:
        sampled: one token id per sample, in the order of sample_index; -1 where the row failed.
        computed_upto: one sequence length per row.
        logprobs: by sample index, for rows that asked.
        errors: by row index, rows that failed alone.
        compute_us: how long the step computed, in microseconds, its copies included; 0 where nobody measured.
        copy_us: how long its copies took.
    """

    __slots__ = ("compute_us", "computed_upto", "copy_us", "errors", "logprobs", "sampled", "step_id")

    def __init__(
        self,
        step_id: int,
        sampled: list[int],
        computed_upto: list[int],
        logprobs: dict[int, TokenLogprobs] | None = None,
        errors: dict[int, RowFailedError] | None = None,
        *,
        compute_us: int = 0,
        copy_us: int = 0,
    ) -> None:
        self.step_id = step_id
        self.sampled = sampled
        self.computed_upto = computed_upto
        self.logprobs = logprobs or {}
        self.errors = errors or {}
        self.compute_us = compute_us
        self.copy_us = copy_us


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
    swapped_out: int = 0
    swapped_in: int = 0


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
    if (
        not result.errors
        and [row.stop for row in step.rows] == result.computed_upto
        and min(result.sampled, default=0) >= 0
    ):
        return
    for index, row in enumerate(step.rows):
        if index in result.errors:
            continue
        if result.computed_upto[index] != row.stop:
            raise BadResultError(
                f"expected row {index} of step {step.step_id} to be computed up to {row.stop}, got "
                f"{result.computed_upto[index]} and no row error"
            )
        if row.sample_index >= 0 and result.sampled[row.sample_index] < 0:
            raise _no_sample(step, index, result.sampled[row.sample_index])
        for branch in row.branches or ():
            if result.sampled[branch.sample_index] < 0:
                raise _no_sample(step, index, result.sampled[branch.sample_index])


def _no_sample(step: Step, row_index: int, got: int) -> BadResultError:
    return BadResultError(
        f"expected row {row_index} of step {step.step_id} to sample a token, got {got} and no row error"
    )
