"""The steps that are timed: within the limits, and enough to tell the terms apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmanager_service.calibration.fit import Measured, fit_cost_model
from kvmanager_service.calibration.shapes import (
    MOST_CONTEXT,
    CalibrationLimits,
    blocks_by_group,
    choose_shapes,
    make_step,
)
from kvmanager_service.core.kv_groups import FullAttention, RecurrentState, SlidingWindow
from kvmanager_service.core.request import TOKEN_BYTES
from kvmanager_service.replay.cost_model import CostModel, quantities
from kvmanager_service.replay.group_reads import GroupReads

USUAL = CalibrationLimits(
    max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=8192, block_size=16, num_blocks=30_000, vocab_size=90
)
LIMITS = [
    USUAL,
    replace(USUAL, max_model_len=131_072, num_blocks=500_000, max_num_batched_tokens=8192),
    replace(USUAL, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=128, num_blocks=10),
    replace(USUAL, max_num_seqs=1),
    replace(USUAL, block_size=1, num_blocks=1000, max_model_len=600),
    replace(USUAL, groups=(FullAttention(16), SlidingWindow(16, 512), SlidingWindow(16, 512))),
    replace(USUAL, groups=(FullAttention(16), RecurrentState(16)), num_blocks=600),
    replace(USUAL, groups=(SlidingWindow(16, 100),)),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_shapes_keep_to_the_limits_and_tell_the_terms_apart(limits: CalibrationLimits) -> None:
    shapes = choose_shapes(limits)
    assert 6 <= len(shapes) == len(set(shapes)) <= 40
    steps = []
    for shape in shapes:
        step = make_step(shape, 1, limits, blocks_by_group(shapes, limits))
        assert len(step.rows) <= limits.max_num_seqs
        assert sum(row.num_tokens for row in step.rows) == step.num_tokens <= limits.max_num_batched_tokens
        assert max(row.stop for row in step.rows) < limits.max_model_len
        assert len(step.rows) == 1 or sum(row.stop for row in step.rows) <= MOST_CONTEXT
        counts = quantities(step, GroupReads(limits.kv_groups))
        steps.append(Measured(str(shape), counts, CostModel().microseconds(counts)))
    fit_cost_model(steps)


def test_shapes_of_limits_that_admit_no_step_are_none() -> None:
    assert choose_shapes(replace(USUAL, max_model_len=1)) == []
    assert choose_shapes(replace(USUAL, num_blocks=1)) == []


@pytest.mark.parametrize("limits", LIMITS)
def test_steps_rows_share_no_block_and_hold_what_they_read(limits: CalibrationLimits) -> None:
    """Nor does a group ever have a block of another: there is no telling what K and V are as a state."""
    shapes = choose_shapes(limits)
    num_blocks = blocks_by_group(shapes, limits)
    assert sum(num_blocks) < limits.num_blocks
    owners: dict[int, int] = {}
    for shape in shapes:
        step = make_step(shape, 3, limits, num_blocks)
        assert step.step_id == 3
        ids: list[int] = []
        for row in step.rows:
            tables = [table.block_id_bytes for table in row.request.tables] or [row.request.block_id_bytes]
            for index, (group, column) in enumerate(zip(limits.kv_groups, tables, strict=True)):
                table = memoryview(bytes(column)).cast("i").tolist()
                first = group.first_needed_token(row.start) // group.block_size
                assert len(table) == -(-row.stop // group.block_size)
                assert table[:first] == [0] * first
                ids += table[first:]
                assert all(owners.setdefault(block_id, index) == index for block_id in table[first:])
            tokens = memoryview(row.request.tokens(row.start, row.stop)).cast("i").tolist()
            assert len(tokens) == row.num_tokens
            assert all(0 <= token < limits.vocab_size for token in tokens)
            assert len(row.request.token_bytes) == row.stop * TOKEN_BYTES
        assert len(ids) == len(set(ids))
        assert all(1 <= block_id <= sum(num_blocks) for block_id in ids)
