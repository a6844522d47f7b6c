"""The steps that are timed, and how each is made.

Station: called by `measurement`; makes `Step`s of the core, so that what is measured goes the way of what is served.

The terms of a cost model are told apart by steps in which they do not grow together: prompts of several lengths, chunks
that come late in a prompt (the same tokens, more context), and decoding rows, few and many, short and long. Lengths are
odd ones: those of prompts are anything, and kernels like powers of two so much that a prompt of 230 tokens may take
longer than one of 256.

Of a model with several KV groups a row has a table of each, null before what it reads. Every group has block ids of its
own in all steps: what an earlier step left in a block of K and V would be no state to begin from, and may not even be
numbers.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.kv_cache import needs_no_coordinator
from kvmanager_service.core.kv_groups import FullAttention, GroupTable, KVGroup
from kvmanager_service.core.request import TOKEN_BYTES, NewRequest, Request, StopRules
from kvmanager_service.core.step import ScheduledRow, Step

__all__ = ["CalibrationLimits", "StepShape", "blocks_by_group", "choose_shapes", "make_step"]

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
        block_size: tokens per block, of the first group.
        num_blocks: blocks there may be, the null block included.
        vocab_size: token ids are below.
        groups: the model's KV groups; none: one, of full attention.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    groups: tuple[KVGroup, ...] = ()

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        """At least one."""
        return self.groups or (FullAttention(self.block_size),)

    @property
    def blocks_per_group(self) -> int:
        """Blocks that each group may have: equal parts, since none can have another's."""
        return (self.num_blocks - 1) // len(self.kv_groups)


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

    def num_blocks(self, group: KVGroup) -> int:
        """Blocks of all rows in a group; they share none."""
        return self.num_rows * (group.num_blocks_for(self.stop) - group.first_needed_block(self.start))

    def fits(self, limits: CalibrationLimits) -> bool:
        """Whether the step keeps to the limits, and to `MOST_CONTEXT` unless it is a single row."""
        return (
            self.num_rows <= limits.max_num_seqs
            and self.num_rows * self.num_tokens <= limits.max_num_batched_tokens
            and self.stop < limits.max_model_len
            and all(self.num_blocks(group) <= limits.blocks_per_group for group in limits.kv_groups)
            and (self.num_rows == 1 or self.num_rows * self.stop <= MOST_CONTEXT)
        )

    def __str__(self) -> str:
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows:,} rows"
        tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens:,} tokens"
        return f"{rows} of {tokens} to length {self.stop:,}"


def choose_shapes(limits: CalibrationLimits) -> list[StepShape]:
    """Choose the steps to be timed, at most a few dozen. Under tiny limits they may not tell all terms apart."""
    longest = min(limits.max_model_len - 1, MOST_CONTEXT)
    for group in limits.kv_groups:
        if group.reach is None:
            longest = min(longest, limits.blocks_per_group * group.block_size)
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


def blocks_by_group(shapes: Sequence[StepShape], limits: CalibrationLimits) -> list[int]:
    """How many blocks each group needs so that every one of these steps can be made."""
    return [max(shape.num_blocks(group) for shape in shapes) for group in limits.kv_groups]


def make_step(shape: StepShape, step_id: int, limits: CalibrationLimits, num_blocks: Sequence[int]) -> Step:
    """Make a step of a shape. Every row samples as a request does by default, so an answer means it is done.

    What the context's blocks hold does not matter to the time. Tokens are spread over the vocabulary and tables over
    the pool, as they are when it has served for a while; the same ones each time.

    Args:
        shape: it fits the limits.
        step_id: the step's.
        limits: the executor's.
        num_blocks: of each group, at least those of the shape: the first group's ids begin at 1, the next one's where
            they end.
    """
    rng = random.Random(0)  # noqa: S311 - no secret
    ids = _spread_ids(shape, limits, num_blocks, rng)
    rows = []
    for index in range(shape.num_rows):
        computed = array("i", (rng.randrange(limits.vocab_size) for _ in range(shape.num_tokens)))
        prompt = bytes(shape.start * TOKEN_BYTES) + computed.tobytes()
        request = Request(NewRequest(f"row-{index}", prompt, StopRules(max_tokens=1), seed=index), index)
        request.num_computed_tokens = shape.start
        _give_tables(request, shape, limits, ids)
        row = ScheduledRow(request, shape.num_tokens)
        row.sample_index = index
        rows.append(row)
    num_tokens = shape.num_rows * shape.num_tokens
    return Step(step_id, rows, num_tokens, shape.num_rows, feeds_from_step_id=0, tags=[], copies=[])


def _spread_ids(
    shape: StepShape, limits: CalibrationLimits, num_blocks: Sequence[int], rng: random.Random
) -> list[Iterator[int]]:
    """By group, the ids of all rows' blocks."""
    ids = []
    first = 1
    for group, count in zip(limits.kv_groups, num_blocks, strict=True):
        ids.append(iter(rng.sample(range(first, first + count), shape.num_blocks(group))))
        first += count
    return ids


def _give_tables(request: Request, shape: StepShape, limits: CalibrationLimits, ids: list[Iterator[int]]) -> None:
    """Let a request have the tables that a row of the shape reads and writes."""
    null_block = KVCacheBlock(0)
    for group, of_group in zip(limits.kv_groups, ids, strict=True):
        first = group.first_needed_block(shape.start)
        blocks = [KVCacheBlock(next(of_group)) for _ in range(first, group.num_blocks_for(shape.stop))]
        if needs_no_coordinator(limits.kv_groups):
            request.block_id_bytes += array("i", [block.block_id for block in blocks]).tobytes()
            return
        table = GroupTable(group, null_block, first)
        table.extend(blocks)
        request.tables.append(table)
