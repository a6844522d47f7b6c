"""Which state each row of a step starts from, and where it leaves what: made once per step and KV group.

Station: `plan_states` is called by `model_runner` with a step's block tables; `state_layers` runs what it returns. Pure
index arithmetic.

A row that computes positions [c, n) starts from the state in entry (c - 1) // block_size of its table, of no tokens if
c is 0, and leaves one in every entry of [c // block_size, (n - 1) // block_size]: of all but the last the state at the
block's end, a checkpoint. So it is cut into segments at block ends, each of which starts where the one before ended.

    block_size 4, row [6, 13): segments [6, 8) from entry 1 to 1, [8, 12) from 1 to 2, [12, 13) from 2 to 3

Rows know nothing of each other: the first segments of all come first, then the second ones. Segments of one token,
which is what decode rows are, run together; longer ones run one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from executor_service.backends.base import GroupTables, Int32
from executor_service.devices import upload

__all__ = ["StateRun", "plan_states"]

_Int64 = npt.NDArray[np.int64]


class StateRun(NamedTuple):
    """B segments of equal length that run as one batch.

    Shape:
        tokens: (B * length,) int64, places in the step, segment by segment; sources, targets: (B,) int64, block ids;
        starts: (B,) bool, where a sequence starts: the source means nothing, the state is of no tokens. None for
        nowhere; rows: (B,) int64, whose segments they are.
    """

    length: int
    tokens: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    starts: torch.Tensor | None
    rows: _Int64


def plan_states(
    query_indptr: Int32,
    seq_lens: Int32,
    tables: GroupTables,
    *,
    block_size: int,
    most_rows: int,
    device: torch.device,
) -> list[StateRun]:
    """Cut a step's rows into segments, in the order in which they may run.

    Args:
        query_indptr: row r has tokens query_indptr[r] to query_indptr[r + 1].
        seq_lens: sequence lengths after this step.
        tables: the block tables of one group that keeps states.
        block_size: tokens per block.
        most_rows: most segments that run together.
        device: where the cache lies.

    Shape:
        query_indptr: (R + 1,); seq_lens: (R,).
    """
    first = seq_lens - np.diff(query_indptr)
    first_entry = first // block_size
    counts = (seq_lens - 1) // block_size - first_entry + 1
    rows = np.repeat(np.arange(len(seq_lens)), counts)
    waves = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    entries = first_entry[rows] + waves
    begins = np.maximum(first[rows], entries * block_size)
    lengths = np.minimum(seq_lens[rows], (entries + 1) * block_size) - begins
    places = (query_indptr[:-1] - first)[rows] + begins
    heads = tables.block_indptr[:-1][rows]
    targets = tables.block_ids[heads + entries]
    sources = tables.block_ids[heads + np.maximum(begins - 1, 0) // block_size]
    runs = []
    for chosen in _batches(waves, lengths, most_rows):
        length = int(lengths[chosen[0]])
        at_start = begins[chosen] == 0
        tokens = places[chosen][:, None] + np.arange(length)
        runs.append(
            StateRun(
                length=length,
                tokens=_to_device(tokens.ravel(), device),
                sources=_to_device(sources[chosen], device),
                targets=_to_device(targets[chosen], device),
                starts=torch.from_numpy(at_start).to(device) if at_start.any() else None,
                rows=rows[chosen],
            )
        )
    return runs


def _batches(waves: _Int64, lengths: npt.NDArray[np.integer], most_rows: int) -> Iterator[_Int64]:
    """Indices of segments that run together, in order. Shape: waves, lengths (segments,)."""
    for wave in range(int(waves.max()) + 1):
        of_wave = np.flatnonzero(waves == wave)
        is_single = lengths[of_wave] == 1
        singles = of_wave[is_single]
        for start in range(0, len(singles), most_rows):
            yield singles[start : start + most_rows]
        for index in of_wave[~is_single]:
            yield np.array([index])


def _to_device(column: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return upload(column.astype(np.int64), device)
