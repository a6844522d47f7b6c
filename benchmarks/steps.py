"""Steps for benchmarks that drive an executor's backend in their own process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from executor_service.backends.base import GroupTables, LogitBias, SamplingBatch, StepBatch, TokenSampling

BLOCK_SIZE = 16

GREEDY = TokenSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=LogitBias.of({}),
    suppressed_token_ids=(),
    num_logprobs=-1,
)


@dataclass(frozen=True)
class StepRow:
    """Tokens that stand at positions `start`... of a sequence, whose blocks `table` names; it samples greedily."""

    tokens: Sequence[int]
    start: int
    table: Sequence[int]

    @property
    def end(self) -> int:
        """Tokens of the sequence after this step."""
        return self.start + len(self.tokens)


def make_step(rows: Sequence[StepRow]) -> StepBatch:
    """A step of one KV group."""
    lens = np.array([row.end for row in rows], dtype=np.int32)
    used = -(-lens // BLOCK_SIZE)
    positions = np.concatenate([np.arange(row.start, row.end, dtype=np.int32) for row in rows])
    slots = [
        row.table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row in rows
        for position in range(row.start, row.end)
    ]
    return StepBatch(
        step_id=1,
        query_indptr=np.cumsum([0, *(len(row.tokens) for row in rows)]).astype(np.int32),
        token_ids=np.array([token for row in rows for token in row.tokens], dtype=np.int32),
        positions=positions,
        seq_lens=lens,
        tables=[
            GroupTables(
                np.concatenate([[0], np.cumsum(used)]).astype(np.int32),
                np.concatenate([row.table[:count] for row, count in zip(rows, used, strict=True)]).astype(np.int32),
                (lens - (used - 1) * BLOCK_SIZE).astype(np.int32),
            )
        ],
        slot_mappings=[np.array(slots, dtype=np.int64)],
        sampling=SamplingBatch(
            rows=np.arange(len(rows), dtype=np.int32),
            params=[GREEDY],
            params_index=np.zeros(len(rows), dtype=np.int32),
            seeds=np.zeros(len(rows), dtype=np.uint64),
            positions=lens,
            histories={},
        ),
    )
