"""The steps that are timed: within the limits, and enough to tell the terms apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmanager_service.calibration.fit import Measured, fit_cost_model
from kvmanager_service.calibration.shapes import MOST_CONTEXT, CalibrationLimits, choose_shapes, make_step
from kvmanager_service.core.request import TOKEN_BYTES
from kvmanager_service.replay.cost_model import CostModel, quantities

USUAL = CalibrationLimits(
    max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=8192, block_size=16, num_blocks=30_000, vocab_size=90
)
LIMITS = [
    USUAL,
    replace(USUAL, max_model_len=131_072, num_blocks=500_000, max_num_batched_tokens=8192),
    replace(USUAL, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=128, num_blocks=10),
    replace(USUAL, max_num_seqs=1),
    replace(USUAL, block_size=1, num_blocks=1000, max_model_len=600),
]


@pytest.mark.parametrize("limits", LIMITS)
def test_shapes_keep_to_the_limits_and_tell_the_terms_apart(limits: CalibrationLimits) -> None:
    shapes = choose_shapes(limits)
    assert 6 <= len(shapes) == len(set(shapes)) <= 40
    steps = []
    for shape in shapes:
        step = make_step(shape, 1, limits, limits.num_blocks)
        assert len(step.rows) <= limits.max_num_seqs
        assert sum(row.num_tokens for row in step.rows) == step.num_tokens <= limits.max_num_batched_tokens
        assert max(row.stop for row in step.rows) < limits.max_model_len
        assert len(step.rows) == 1 or sum(row.stop for row in step.rows) <= MOST_CONTEXT
        counts = quantities(step)
        steps.append(Measured(str(shape), counts, CostModel().microseconds(counts)))
    fit_cost_model(steps)


def test_shapes_of_limits_that_admit_no_step_are_none() -> None:
    assert choose_shapes(replace(USUAL, max_model_len=1)) == []
    assert choose_shapes(replace(USUAL, num_blocks=1)) == []


@pytest.mark.parametrize("limits", LIMITS)
def test_step_rows_share_no_block_and_hold_their_sequence(limits: CalibrationLimits) -> None:
    for shape in choose_shapes(limits):
        step = make_step(shape, 3, limits, limits.num_blocks)
        assert step.step_id == 3
        ids: list[int] = []
        for row in step.rows:
            table = memoryview(bytes(row.request.block_id_bytes)).cast("i").tolist()
            assert len(table) == -(-row.stop // limits.block_size)
            ids += table
            tokens = memoryview(row.request.tokens(row.start, row.stop)).cast("i").tolist()
            assert len(tokens) == row.num_tokens
            assert all(0 <= token < limits.vocab_size for token in tokens)
            assert len(row.request.token_bytes) == row.stop * TOKEN_BYTES
        assert len(ids) == len(set(ids))
        assert all(1 <= block_id < limits.num_blocks for block_id in ids)
