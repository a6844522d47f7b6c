"""Sampling: each rule against a naive oracle, distributions, purity, failures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service import sampler
from executor_service.backends.base import PenaltyHistory, TokenSampling
from executor_service.sampler import SampleResult, sample, uniform
from tests.unit.executor.step_builder import GREEDY, sampling, sampling_batch

INF = float("inf")
NAN = float("nan")


def history(prompt: Sequence[int], output: Sequence[int]) -> PenaltyHistory:
    return PenaltyHistory(np.array([*prompt, *output], dtype=np.int32), len(prompt))


def run(
    logits: npt.NDArray[np.float32],
    params: Sequence[TokenSampling],
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    histories: dict[int, PenaltyHistory] | None = None,
) -> SampleResult:
    batch = sampling_batch(params, seeds=seeds, positions=positions, histories=histories)
    return sample(torch.from_numpy(logits.copy()), batch)


def oracle_logits(
    row: npt.NDArray[np.float32], p: TokenSampling, past: PenaltyHistory | None
) -> npt.NDArray[np.float32]:
    """Penalties, bias and suppression, one token at a time."""
    out = row.copy()
    tokens = [] if past is None else past.token_ids.tolist()
    output = tokens[past.prompt_len :] if past is not None else []
    for token in set(tokens):
        factor = np.float32(p.repetition_penalty)
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(output):
        out[token] -= np.float32(p.presence_penalty + p.frequency_penalty * output.count(token))
    for token, amount in zip(p.logit_bias.token_ids, p.logit_bias.values, strict=True):
        out[token] += np.float32(amount)
    for token in p.suppressed_token_ids:
        out[token] = -np.inf
    return out


def oracle_kept(out: npt.NDArray[np.float32], p: TokenSampling) -> list[tuple[int, float]]:
    """(token, weight) of what is kept, in the order of the inverse CDF."""
    scaled = (out - out.max()) / np.float32(p.temperature)
    weights = np.exp(scaled.astype(np.float64))
    pairs = list(enumerate(weights.tolist()))
    if not (p.top_k or p.top_p < 1 or p.min_p):
        return pairs
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    if p.top_k:
        pairs = pairs[: p.top_k]
    if p.top_p < 1:
        mass, before, kept = sum(w for _, w in pairs), 0.0, []
        for token, weight in pairs:
            if kept and before >= p.top_p * mass:
                break
            kept.append((token, weight))
            before += weight
        pairs = kept
    return [(token, weight) for token, weight in pairs if weight >= p.min_p]


def oracle_token(
    row: npt.NDArray[np.float32], p: TokenSampling, past: PenaltyHistory | None, seed: int, position: int
) -> int:
    out = oracle_logits(row, p, past)
    if not np.isfinite(out.max()):
        return -1
    if p.temperature == 0:
        return int(np.argmax(out))
    pairs = oracle_kept(out, p)
    number = uniform(np.array([seed], dtype=np.uint64), np.array([position], dtype=np.int32))[0]
    target, passed = number * sum(w for _, w in pairs), 0.0
    for token, weight in pairs:
        passed += weight
        if passed > target:
            return token
    return pairs[-1][0]


@st.composite
def cases(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], list[TokenSampling], dict[int, PenaltyHistory]]:
    """Rows with many ties (multiples of 1/4) and values of top_p at which no cut lies exactly on a tie."""
    size, vocab = draw(st.integers(1, 5)), draw(st.integers(2, 40))
    quarters = st.integers(-24, 24).map(lambda n: n / 4)
    logits = np.array(draw(st.lists(st.lists(quarters, min_size=vocab, max_size=vocab), min_size=size, max_size=size)))
    tokens = st.integers(0, vocab - 1)
    params, histories = [], {}
    for row in range(size):
        p = sampling(
            temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
            top_k=draw(st.sampled_from([0, 1, 3, 17, 1000])),
            top_p=draw(st.sampled_from([1.0, 0.137, 0.523, 0.871, 1e-6])),
            min_p=draw(st.sampled_from([0.0, 0.0171, 0.31, 1.0])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
            presence_penalty=draw(st.sampled_from([0.0, 0.6, -1.5])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.2])),
            logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.25, 100.0]), max_size=3)),
            suppressed_token_ids=tuple(draw(st.lists(tokens, max_size=3))),
        )
        params.append(p)
        if p.has_penalty:
            histories[row] = history(draw(st.lists(tokens, max_size=6)), draw(st.lists(tokens, max_size=6)))
    return logits.astype(np.float32), params, histories


@given(case=cases(), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20), few=st.sampled_from([1, 4, 256]))
@settings(max_examples=400)
def test_sample_any_parameters_equals_naive_oracle(
    case: tuple[npt.NDArray[np.float32], list[TokenSampling], dict[int, PenaltyHistory]],
    seed: int,
    position: int,
    few: int,
) -> None:
    logits, params, histories = case
    seeds = [(seed + row * 977) % 2**64 for row in range(len(params))]
    positions = [position + row for row in range(len(params))]
    before, sampler._FEW = sampler._FEW, few  # how many candidates are looked at first must not matter
    try:
        result = run(logits, params, seeds=seeds, positions=positions, histories=histories)
    finally:
        sampler._FEW = before
    expected = [
        oracle_token(logits[row], params[row], histories.get(row), seeds[row], positions[row])
        for row in range(len(params))
    ]
    assert result.token_ids.tolist() == expected
    assert result.failed == tuple(row for row, token in enumerate(expected) if token < 0)


@given(case=cases(), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=100)
def test_sample_row_alone_equals_row_in_a_batch(
    case: tuple[npt.NDArray[np.float32], list[TokenSampling], dict[int, PenaltyHistory]], seed: int
) -> None:
    logits, params, histories = case
    together = run(logits, params, seeds=[seed] * len(params), histories=histories)
    for row, p in enumerate(params):
        own = {0: histories[row]} if row in histories else {}
        alone = run(logits[row : row + 1], [p], seeds=[seed], histories=own)
        assert alone.token_ids[0] == together.token_ids[row]


def test_sample_large_vocabulary_row_alone_equals_row_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 2, (12, 5000)).astype(np.float32)
    kinds = [
        sampling(temperature=0.8),
        sampling(temperature=1.5, top_p=0.9),  # needs more than a few candidates
        sampling(temperature=0.9, top_k=40, min_p=0.05),
        sampling(temperature=1.0, top_k=3000, top_p=0.7, num_logprobs=4),
    ]
    params = [kinds[row % 4] for row in range(12)]
    seeds = list(range(12))
    alone = [int(run(logits[r : r + 1], [params[r]], seeds=[r]).token_ids[0]) for r in range(12)]
    monkeypatch.setattr(sampler, "_PORTION_ELEMENTS", 5 * 5000)
    together = run(logits, params, seeds=seeds)
    assert together.token_ids.tolist() == alone
    assert sorted(together.logprobs) == [3, 7, 11]
    assert alone == [oracle_token(logits[r], params[r], None, r, 1) for r in range(12)]


def test_sample_greedy_ties_take_the_lowest_id() -> None:
    logits = np.array([[0, 3, 3, 1, 3], [2, 2, 2, 2, 2]], dtype=np.float32)
    assert run(logits, [GREEDY, GREEDY]).token_ids.tolist() == [1, 0]


def test_sample_greedy_only_costs_one_max(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a greedy batch must not come here")

    for name in ("adjust_logits", "_sample_portion", "_row_logprobs"):
        monkeypatch.setattr(sampler, name, forbidden)
    assert run(np.eye(4, dtype=np.float32), [GREEDY] * 4).token_ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("params", [GREEDY, sampling(temperature=1.0), sampling(temperature=1.0, top_p=0.5)])
@pytest.mark.parametrize("bad", [[NAN, 1, 2], [INF, 1, 2], [1, 2, NAN], [-INF, -INF, -INF]])
def test_sample_row_without_finite_maximum_fails_alone(bad: list[float], params: TokenSampling) -> None:
    logits = np.array([[0, 9, 0], bad, [9, 0, -INF]], dtype=np.float32)
    result = run(logits, [sampling(num_logprobs=1), params, sampling(num_logprobs=0)])
    assert result.token_ids.tolist() == [1, -1, 0]
    assert result.failed == (1,)
    assert sorted(result.logprobs) == [0, 2]


def test_sample_everything_suppressed_fails_and_leaves_raw_logits_alone() -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    batch = sampling_batch([sampling(suppressed_token_ids=(0, 1)), sampling(suppressed_token_ids=(1,))])
    result = sample(logits, batch)
    assert result.token_ids.tolist() == [-1, 0]
    assert result.failed == (0,)
    assert logits.tolist() == [[1.0, 2.0], [1.0, 2.0]]


def test_sample_suppressed_token_is_never_drawn() -> None:
    logits = np.zeros((2000, 3), dtype=np.float32)
    result = run(logits, [sampling(temperature=2.0, suppressed_token_ids=(1,))] * 2000, seeds=list(range(2000)))
    assert set(result.token_ids.tolist()) == {0, 2}


@pytest.mark.parametrize("temperature", [1e-7, 1e-3])
def test_sample_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    logits = np.array([[1e4, 2e4, -3e4]], dtype=np.float32)
    assert run(logits, [sampling(temperature=temperature)]).token_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (sampling(temperature=1.0), 6),
        (sampling(temperature=0.5), 6),
        (sampling(temperature=1.0, top_k=3), 3),
        (sampling(temperature=2.0, top_p=0.8), 4),
        (sampling(temperature=1.0, min_p=0.2), 4),
    ],
)
def test_sample_many_seeds_follow_the_distribution(params: TokenSampling, kept: int) -> None:
    row = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.05, 0.1])).astype(np.float32)
    count = 20_000
    result = run(np.tile(row, (count, 1)), [params] * count, seeds=[12345] * count, positions=list(range(count)))
    pairs = oracle_kept(row, params)
    total = sum(w for _, w in pairs)
    observed = np.bincount(result.token_ids, minlength=6)
    assert np.count_nonzero(observed) == len(pairs) == kept
    chi_square = sum((observed[t] - count * w / total) ** 2 / (count * w / total) for t, w in pairs)
    assert chi_square < 30  # 5 degrees of freedom: p < 2e-5


def test_uniform_over_seeds_and_positions_is_flat_and_uncorrelated() -> None:
    seeds = np.arange(256, dtype=np.uint64)
    grid = np.array([uniform(seeds, np.full(256, p, dtype=np.int32)) for p in range(256)])
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = np.histogram(grid, bins=64, range=(0, 1))[0]
    assert ((counts - 1024) ** 2 / 1024).sum() < 120  # 63 degrees of freedom: p < 2e-5
    for shifted in (np.roll(grid, 1, axis=0), np.roll(grid, 1, axis=1), grid.T):
        assert abs(np.corrcoef(grid.ravel(), shifted.ravel())[0, 1]) < 0.02
    assert len(np.unique(grid)) == grid.size


def test_uniform_known_values_never_change() -> None:
    seeds = np.array([0, 1, 2**64 - 1], dtype=np.uint64)
    numbers = uniform(seeds, np.array([0, 7, 2**31 - 1], dtype=np.int32))
    # Computed with Python's integers; a change would give running requests other tokens after an update.
    assert numbers.tolist() == [0.8833108082136426, 0.18594545577485155, 0.4633207737599515]


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_sample_logprobs_are_those_of_raw_logits(count: int) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (2, 50)).astype(np.float32)
    logits[0, [4, 9, 2]] = logits[0].max() + 1  # a tie at the top, and across the end of a list of one
    params = [sampling(temperature=0.7, logit_bias={31: 100.0}, num_logprobs=count), sampling(num_logprobs=-1)]
    result = run(logits, params)
    assert list(result.logprobs) == [0]
    found = result.logprobs[0]
    wide = logits[0].astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum())
    order = np.argsort(-logits[0], kind="stable")[:count].tolist()
    assert found.token_ids.tolist() == [31, *order]
    assert found.token_ids.dtype == np.int32
    np.testing.assert_allclose(found.logprobs, expected[[31, *order]], rtol=1e-5, atol=1e-5)


def test_sample_bfloat16_logits_are_compared_in_float32() -> None:
    logits = torch.tensor([[1.0, 1.0078125, 0.5]], dtype=torch.bfloat16)
    result = sample(logits, sampling_batch([sampling(num_logprobs=2, logit_bias={0: 0.0078})]))
    assert result.token_ids.tolist() == [1]
    np.testing.assert_allclose(np.exp(result.logprobs[0].logprobs[1:]), [0.3857, 0.3827], atol=1e-3)
