"""From measured steps to terms: known ones come back, none falls below 0, and what cannot be known is said."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvmanager_service.calibration.fit import Measured, UndeterminedError, fit_cost_model, relative_error
from kvmanager_service.calibration.shapes import CalibrationLimits, blocks_by_group, choose_shapes, make_step
from kvmanager_service.core.kv_groups import FullAttention, KVGroup, RecurrentState, SlidingWindow
from kvmanager_service.replay.cost_model import TERMS, CostModel, quantities
from kvmanager_service.replay.group_reads import GroupReads

LIMITS = CalibrationLimits(
    max_num_batched_tokens=512, max_num_seqs=32, max_model_len=1024, block_size=16, num_blocks=4096, vocab_size=1000
)


def measured(model: CostModel, noise: random.Random | None = None, groups: tuple[KVGroup, ...] = ()) -> list[Measured]:
    """The steps of a calibration, as an executor with these terms would take for them."""
    steps = []
    limits = replace(LIMITS, groups=groups)
    shapes = choose_shapes(limits)
    for shape in shapes:
        step = make_step(shape, 1, limits, blocks_by_group(shapes, limits))
        counts = quantities(step, GroupReads(limits.kv_groups))
        factor = 1.0 if noise is None else noise.uniform(0.8, 1.2)
        steps.append(Measured(str(shape), counts, model.microseconds(counts) * factor))
    return steps


def terms(model: CostModel) -> list[float]:
    return [getattr(model, name) for name in TERMS]


@pytest.mark.parametrize(
    "known",
    [
        CostModel(),
        CostModel(60_000.0, 1_700.0, 1_800.0, 14.0, 0.6),
        CostModel(5_000.0, 20.0, 20.0, 0.0, 0.0),
        CostModel(0.0, 1.0, 1.0, 0.001, 0.0),
    ],
)
def test_fit_of_exact_times_gives_the_terms_back(known: CostModel) -> None:
    steps = measured(known)
    found = fit_cost_model(steps)
    assert terms(found) == pytest.approx(terms(known), rel=1e-4, abs=1e-4)
    assert max(abs(relative_error(found, step)) for step in steps) < 1e-4


@pytest.mark.parametrize(
    "groups",
    [
        (FullAttention(16), SlidingWindow(16, 64), SlidingWindow(16, 64)),
        (FullAttention(16), RecurrentState(16)),
        (SlidingWindow(16, 200),),
    ],
)
def test_fit_of_a_model_with_groups_gives_the_terms_back(groups: tuple[KVGroup, ...]) -> None:
    known = CostModel(6_000.0, 150.0, 180.0, 1.4, 0.06)
    assert terms(fit_cost_model(measured(known, groups=groups))) == pytest.approx(terms(known), rel=1e-4)


def test_fit_of_a_model_of_states_alone_has_no_terms_of_what_is_read() -> None:
    known = CostModel(6_000.0, 150.0, 180.0, 0.0, 0.0)
    steps = measured(known, groups=(RecurrentState(16),))
    assert terms(fit_cost_model(steps, has_kv=False)) == pytest.approx(terms(known), rel=1e-4)
    with pytest.raises(UndeterminedError, match="context_token_us, attention_pair_us apart"):
        fit_cost_model(steps)
    with pytest.raises(UndeterminedError, match="do not tell step_us, prefill_token_us, decode_row_us apart"):
        fit_cost_model(steps[:1], has_kv=False)


def test_fit_of_noisy_times_is_never_below_zero_and_none_better_is_near() -> None:
    """No step up in any term makes the sum of squares less, nor one down where there is room."""
    zeros = 0
    for seed in range(40):
        rng = random.Random(seed)
        steps = measured(CostModel(50.0, 2_000.0, 100.0, 0.01, 0.001), rng)
        found = terms(fit_cost_model(steps))
        assert min(found) >= 0, seed
        zeros += found.count(0.0)
        least = squares(found, steps)
        for index, value in enumerate(found):
            for change in (0.01 * (value or 1.0), -0.01 * value):
                moved = [*found[:index], value + change, *found[index + 1 :]]
                assert squares(moved, steps) >= least - 1e-9, (seed, TERMS[index], change)
    assert zeros > 10, "the bound was never tried"


def squares(values: list[float], steps: list[Measured]) -> float:
    model = CostModel(*values)
    return sum(relative_error(model, step) ** 2 for step in steps)


def test_fit_counts_a_short_step_as_much_as_a_long_one() -> None:
    """Two steps that no model fits both of: the error is shared by their own sizes, not swallowed by the short one."""
    steps = [*measured(CostModel()), *measured(CostModel(step_us=10_000.0))]
    found = fit_cost_model(steps)
    assert max(abs(relative_error(found, step)) for step in steps) < 0.5


def test_fit_of_steps_that_do_not_tell_terms_apart_says_so() -> None:
    prompts = [step for step in measured(CostModel()) if step.counts[2] == 0]
    with pytest.raises(UndeterminedError, match="do not tell step_us, prefill_token_us"):
        fit_cost_model(prompts)
    with pytest.raises(UndeterminedError):
        fit_cost_model(measured(CostModel())[:4])
