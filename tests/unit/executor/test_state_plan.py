"""Where rows are cut, which state each piece starts from, and in which order they run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.backends.base import GroupTables
from executor_service.state_plan import StateRun, plan_states

CPU = torch.device("cpu")
Spans = list[tuple[int, int]]


def tables_of(seq_lens: list[int], block_size: int) -> GroupTables:
    """Entry e of row r is block 100 * (r + 1) + e."""
    counts = [-(-length // block_size) for length in seq_lens]
    ids = [100 * (row + 1) + entry for row, count in enumerate(counts) for entry in range(count)]
    ends = [length - (count - 1) * block_size for length, count in zip(seq_lens, counts, strict=True)]
    return GroupTables(*(np.array(column, dtype=np.int32) for column in ([0, *np.cumsum(counts)], ids, ends)))


def plan(spans: Spans, block_size: int, most_rows: int = 100) -> list[StateRun]:
    """Rows that compute [start, stop)."""
    indptr = np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32)
    seq_lens = [stop for _, stop in spans]
    tables = tables_of(seq_lens, block_size)
    lens = np.array(seq_lens, dtype=np.int32)
    return plan_states(indptr, lens, tables, block_size=block_size, most_rows=most_rows, device=CPU)


def shown(run: StateRun) -> tuple[list[int], list[int], list[int], list[bool]]:
    starts = [False] * len(run.targets) if run.starts is None else run.starts.tolist()
    return run.tokens.tolist(), run.sources.tolist(), run.targets.tolist(), starts


def test_plan_row_over_block_ends_is_cut_there_and_goes_on_from_what_it_left() -> None:
    runs = plan([(6, 13)], block_size=4)
    assert [shown(run) for run in runs] == [
        ([0, 1], [101], [101], [False]),
        ([2, 3, 4, 5], [101], [102], [False]),
        ([6], [102], [103], [False]),
    ]
    assert [run.length for run in runs] == [2, 4, 1]


def test_plan_row_that_begins_at_a_checkpoint_leaves_it_alone() -> None:
    assert [shown(run) for run in plan([(8, 9)], block_size=4)] == [([0], [101], [102], [False])]
    assert [shown(run) for run in plan([(8, 12)], block_size=4)] == [([0, 1, 2, 3], [101], [102], [False])]


def test_plan_row_at_position_0_starts_from_no_state() -> None:
    (first, second) = plan([(0, 5)], block_size=4)
    assert (first.targets.tolist(), first.starts is not None and first.starts.tolist()) == ([100], [True])
    assert shown(second) == ([4], [100], [101], [False])


def test_plan_decode_rows_run_together_in_portions() -> None:
    runs = plan([(5, 6), (0, 1), (8, 9), (3, 4), (7, 8)], block_size=4, most_rows=2)
    assert [shown(run) for run in runs] == [
        ([0, 1], [101, 200], [101, 200], [False, True]),
        ([2, 3], [301, 400], [302, 400], [False, False]),
        ([4], [501], [501], [False]),
    ]


def test_plan_first_segments_of_all_rows_come_before_any_second() -> None:
    runs = plan([(3, 6), (4, 5), (2, 9)], block_size=4)
    # By row: 0 is [3, 4), [4, 6); 1 is [4, 5); 2 is [2, 4), [4, 8), [8, 9).
    assert [run.tokens.tolist() for run in runs] == [[0, 3], [4, 5], [1, 2], [6, 7, 8, 9], [10]]


@pytest.mark.parametrize("block_size", [1, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_plan_any_rows_is_what_a_loop_over_tokens_says(block_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans = [(start, start + int(rng.integers(1, 20))) for start in rng.integers(0, 30, 12).tolist()]
    state: dict[int, int] = {}  # by block, the position its state is after
    for row, (start, _) in enumerate(spans):
        if start:
            state[100 * (row + 1) + (start - 1) // block_size] = start - 1
    positions = [position for start, stop in spans for position in range(start, stop)]
    rows = [row for row, (start, stop) in enumerate(spans) for _ in range(start, stop)]
    done: set[int] = set()
    for run in plan(spans, block_size, most_rows=3):
        tokens = run.tokens.view(-1, run.length).tolist()
        starts = [False] * len(tokens) if run.starts is None else run.starts.tolist()
        found = [-1 if fresh else state[source] for fresh, source in zip(starts, run.sources.tolist(), strict=True)]
        for piece, before, target in zip(tokens, found, run.targets.tolist(), strict=True):
            assert [positions[token] for token in piece] == list(range(before + 1, before + 1 + run.length))
            assert len({rows[token] for token in piece}) == 1
            assert not done & set(piece)
            done |= set(piece)
            state[target] = positions[piece[-1]]
    assert done == set(range(len(positions)))
    for row, (start, stop) in enumerate(spans):
        for entry in range(start // block_size, (stop - 1) // block_size + 1):
            assert state[100 * (row + 1) + entry] == min((entry + 1) * block_size, stop) - 1
