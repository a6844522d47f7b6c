"""The steps that are timed, and how each is made.

Station: called by `measurement`; makes `Step`s of the core, so that what is measured goes the way of what is served.

The terms of a cost model are told apart by steps in which they do not grow together: prompts of several lengths, chunks
that come late in a prompt (the same tokens, more context), and decoding rows, few and many, short and long. Lengths are
odd ones: those of prompts are anything, and kernels like powers of two so much that a prompt of 230 tokens may take
longer than one of 256.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from kvmanager_service.core.request import TOKEN_BYTES, NewRequest, Request, StopRules
from kvmanager_service.core.step import ScheduledRow, Step

__all__ = ["CalibrationLimits", "StepShape", "choose_shapes", "make_step"]

MOST_CONTEXT = 1 << 16
"""Tokens of context in one step, over all rows: enough to see them, few enough to have room in a cache of a few GB."""
_SHORTEST = 19
_LONG_CHUNK = 247


@dataclass(frozen=True, slots=True)
class CalibrationLimits:
    """What steps must keep to.

    Attributes:
        max_num_batched_tokens, max_num_seqs: most tokens and rows of a step.
        max_model_len: most tokens of a sequence, the one that is sampled included.
        block_size: tokens per block.
        num_blocks: blocks there may be, the null block included.
        vocab_size: token ids are below.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of equal rows.

    Attributes:
        num_rows: rows.
        num_tokens: tokens that each computes.
        start: tokens of each that are in the cache already.
    """

    num_rows: int
    num_tokens: int
    start: int

    @property
    def stop(self) -> int:
        """Sequence length of each row once it is computed."""
        return self.start + self.num_tokens

    def num_blocks(self, block_size: int) -> int:
        """Blocks of all rows; they share none."""
        return self.num_rows * -(-self.stop // block_size)

    def fits(self, limits: CalibrationLimits) -> bool:
        """Whether the step keeps to the limits, and to `MOST_CONTEXT` unless it is a single row."""
        return (
            self.num_rows <= limits.max_num_seqs
            and self.num_rows * self.num_tokens <= limits.max_num_batched_tokens
            and self.stop < limits.max_model_len
            and self.num_blocks(limits.block_size) < limits.num_blocks
            and (self.num_rows == 1 or self.num_rows * self.stop <= MOST_CONTEXT)
        )

    def __str__(self) -> str:
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows:,} rows"
        tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens:,} tokens"
        return f"{rows} of {tokens} to length {self.stop:,}"


def choose_shapes(limits: CalibrationLimits) -> list[StepShape]:
    """Choose the steps to be timed, at most a few dozen. Under tiny limits they may not tell all terms apart."""
    longest = min(limits.max_model_len - 1, (limits.num_blocks - 1) * limits.block_size, MOST_CONTEXT)
    most_tokens = min(longest, limits.max_num_batched_tokens)
    chunk = min(_LONG_CHUNK, most_tokens)
    lengths = _ladder(_SHORTEST, 9, longest)
    prompts = [StepShape(1, length, 0) for length in _ladder(_SHORTEST, 3, most_tokens) if length > 1]
    prompts += [StepShape(rows, chunk // rows, 0) for rows in (4, 16) if chunk // rows > 1]
    prompts += [StepShape(1, chunk, length - chunk) for length in lengths if length > chunk > 1]
    decodes = [
        StepShape(rows, 1, length - 1) for rows in _ladder(1, 7, limits.max_num_seqs) for length in lengths if length
    ]
    return [shape for shape in dict.fromkeys(prompts + decodes) if shape.fits(limits)]


def _ladder(least: int, factor: int, most: int) -> list[int]:
    """Least, least * factor and so on below most, and most."""
    values = []
    while least < most:
        values.append(least)
        least *= factor
    return [*values, most]


def make_step(shape: StepShape, step_id: int, limits: CalibrationLimits, num_blocks: int) -> Step:
    """Make a step of a shape. Every row samples as a request does by default, so an answer means it is done.

    What the context's blocks hold does not matter to the time. Tokens are spread over the vocabulary and tables over
    the pool, as they are when it has served for a while; the same ones each time.

    Args:
        shape: it fits the limits.
        step_id: the step's.
        limits: the executor's.
        num_blocks: of the cache, the null block included; at least those of the shape and one more.
    """
    rng = random.Random(0)  # noqa: S311 - no secret
    per_row = -(-shape.stop // limits.block_size)
    block_ids = rng.sample(range(1, num_blocks), shape.num_rows * per_row)
    rows = []
    for index in range(shape.num_rows):
        computed = array("i", (rng.randrange(limits.vocab_size) for _ in range(shape.num_tokens)))
        prompt = bytes(shape.start * TOKEN_BYTES) + computed.tobytes()
        request = Request(NewRequest(f"row-{index}", prompt, StopRules(max_tokens=1), seed=index), index)
        request.num_computed_tokens = shape.start
        request.block_id_bytes += array("i", block_ids[index * per_row : (index + 1) * per_row]).tobytes()
        row = ScheduledRow(request, shape.num_tokens)
        row.sample_index = index
        rows.append(row)
    num_tokens = shape.num_rows * shape.num_tokens
    return Step(step_id, rows, num_tokens, shape.num_rows, feeds_from_step_id=0, tags=[], copies=[])
