"""From logits to tokens: a pure function of (logits, parameters, seed, position).

Station: called by `model_runner` after the forward pass, and by the memory profile. It knows no request and keeps no
state, so a row's token does not depend on which rows stand beside it, and re-running a step gives the same tokens.

Order: repetition, presence, frequency penalty, bias, suppression, temperature, top_k, top_p, min_p. Log probabilities
are those of the raw logits. Ties go to the lowest token id everywhere. A batch of greedy rows without extras costs one
max over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from executor_service.backends.base import Float32, Int32, RowLogprobs, SamplingBatch, TokenSampling
from executor_service.devices import upload
from executor_service.logits import adjust_logits, changes_logits

# Rows are handled in portions of at most this many logits, so that the workspace does not grow with the batch.
_PORTION_ELEMENTS = 2 * 1024 * 1024
# A GPU needs larger ones to be busy, and each makes the host wait for it several times.
_GPU_PORTION_ELEMENTS = 16 * 1024 * 1024
# Candidates looked at before a whole row is sorted.
_FEW = 256


@dataclass(frozen=True)
class SampleResult:
    """Tokens of S rows. Shape: token_ids (S,), -1 where the row failed; failed: indices of those."""

    token_ids: Int32
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    failed: tuple[int, ...] = ()


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampleResult:
    """Choose one token for each row.

    Args:
        logits: raw logits of the sampling rows; not changed.
        batch: parameters, seeds, positions and histories of the rows.

    Shape:
        logits: (S, V), any float type.

    Returns:
        Tokens, the log probabilities that were asked for, and the rows that have none because their logits hold NaN
        or +inf, or because nothing is left to choose (all -inf).
    """
    params = [batch.params[index] for index in batch.params_index]
    tokens = _greedy(*logits.max(dim=-1))
    finite = tokens >= 0
    extras = np.array([p.temperature > 0.0 or changes_logits(p) for p in params], dtype=bool)
    for rows in _portions(np.flatnonzero(extras & finite), logits):
        chosen = _sample_portion(logits[upload(rows, logits.device)].float(), rows, params, batch)
        tokens[rows] = chosen
        finite[rows] &= chosen >= 0
    tokens[~finite] = -1
    wanted = np.flatnonzero(np.array([p.num_logprobs >= 0 for p in params], dtype=bool) & finite)
    logprobs: dict[int, RowLogprobs] = {}
    for rows in _portions(wanted, logits):
        counts = [params[row].num_logprobs for row in rows]
        found = _row_logprobs(logits[upload(rows, logits.device)].float(), tokens[rows], counts)
        logprobs.update(zip(rows.tolist(), found, strict=True))
    return SampleResult(tokens, logprobs, tuple(np.flatnonzero(~finite).tolist()))


def uniform(seeds: npt.NDArray[np.uint64], positions: Int32) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): counter-based, so it needs no generator state.

    Two rounds of splitmix64's finaliser, one over the seed and one over the mixed seed plus a counter.

    Shape:
        seeds, positions and the result: (S,).

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    counter = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = _mix(_mix(seeds.astype(np.uint64)) + counter)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser, elementwise, modulo 2**64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _greedy(highest: torch.Tensor, places: torch.Tensor) -> Int32:
    """The likeliest token of each row, -1 where its logit is not finite, in one transfer. Shape: all (B,)."""
    return torch.where(torch.isfinite(highest), places, -1).to(torch.int32).cpu().numpy()


def _portions(rows: npt.NDArray[np.int64], logits: torch.Tensor) -> Iterator[npt.NDArray[np.int64]]:
    """Split rows so that each part has a bounded number of logits."""
    most = _PORTION_ELEMENTS if logits.device.type == "cpu" else _GPU_PORTION_ELEMENTS
    size = max(1, most // logits.shape[1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _sample_portion(
    logits: torch.Tensor, rows: npt.NDArray[np.int64], params: list[TokenSampling], batch: SamplingBatch
) -> Int32:
    """Tokens of rows that need more than an argmax; -1 where nothing is left. Changes `logits` (B, V)."""
    own = [params[row] for row in rows]
    adjust_logits(logits, own, [batch.histories.get(int(row)) for row in rows])
    highest, greedy = logits.max(dim=-1)
    tokens = _greedy(highest, greedy)
    alive = tokens >= 0
    random = np.array([p.temperature > 0.0 for p in own], dtype=bool) & alive
    cut = np.array([p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in own], dtype=bool)
    numbers = uniform(batch.seeds[rows], batch.positions[rows])
    for kind, draw in ((random & ~cut, _draw_from_all), (random & cut, _draw_from_cut)):
        which = np.flatnonzero(kind)
        if len(which):
            index = upload(which, logits.device)
            heat = upload(np.array([own[i].temperature for i in which], dtype=np.float32), logits.device)
            # The largest is taken off before the division, so that no temperature can overflow.
            scaled = (logits[index] - highest[index, None]) / heat[:, None]
            tokens[which] = draw(scaled, [own[i] for i in which], numbers[which])
    return tokens


def _draw_from_all(scaled: torch.Tensor, params: list[TokenSampling], numbers: npt.NDArray[np.float64]) -> Int32:
    """Inverse CDF over the whole vocabulary, in the order of token ids. Shape: scaled (B, V), the largest 0."""
    return _inverse_cdf(scaled.double().exp_().cumsum_(dim=-1), numbers).to(torch.int32).cpu().numpy()


def _draw_from_cut(scaled: torch.Tensor, params: list[TokenSampling], numbers: npt.NDArray[np.float64]) -> Int32:
    """Inverse CDF over what top_k, top_p and min_p keep, likeliest first. Shape: scaled (B, V), the largest 0.

    A few of the likeliest tokens decide most rows; rows for which they do not are sorted whole. Both give the same.
    """
    cut = _Cut.of(params, scaled)
    few = min(scaled.shape[1], _FEW)
    values, ids, sure = _likeliest(scaled, few)
    weights = values.double().exp_()
    cumulative = weights.cumsum(dim=-1)
    tokens = _pick(weights, cumulative, ids, cut, numbers)
    undecided = np.flatnonzero(~(sure & cut.decided_by(weights, cumulative)).cpu().numpy())
    if len(undecided):
        index = upload(undecided, scaled.device)
        values, ids = torch.sort(scaled[index], dim=-1, descending=True, stable=True)
        weights = values.double().exp_()
        tokens[undecided] = _pick(weights, weights.cumsum(dim=-1), ids, cut.rows(index), numbers[undecided])
    return tokens


@dataclass(frozen=True)
class _Cut:
    """Which tokens B rows keep. Shape: all (B,); mass is the weight of a row's whole vocabulary."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    mass: torch.Tensor
    vocab_size: int

    @classmethod
    def of(cls, params: list[TokenSampling], scaled: torch.Tensor) -> _Cut:
        """The rows' limits; a top_k of 0 is the whole vocabulary."""
        vocab_size, device = scaled.shape[1], scaled.device
        top_k = upload(np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64), device)
        top_p = upload(np.array([p.top_p for p in params], dtype=np.float64), device)
        min_p = upload(np.array([p.min_p for p in params], dtype=np.float64), device)
        # Row by row: a reduction over many rows may add up in another order than over one.
        mass = torch.stack([row.double().exp_().sum() for row in scaled])
        return cls(top_k, top_p, min_p, mass, vocab_size)

    def rows(self, index: torch.Tensor) -> _Cut:
        """Some of the rows."""
        return _Cut(self.top_k[index], self.top_p[index], self.min_p[index], self.mass[index], self.vocab_size)

    def decided_by(self, weights: torch.Tensor, cumulative: torch.Tensor) -> torch.Tensor:
        """Rows whose kept tokens all lie within the first C. Shape: weights, cumulative (B, C); returns (B,)."""
        few = weights.shape[1]
        uncut = self.top_k >= self.vocab_size
        by_k = self.top_k <= few
        by_p = uncut & (cumulative[:, -1] >= self.top_p * self.mass)
        by_min = (weights[:, -1] < self.min_p) & (uncut | (self.top_p >= 1.0))
        return by_k | by_p | by_min

    def kept(self, weights: torch.Tensor, cumulative: torch.Tensor) -> torch.Tensor:
        """Which of the first C tokens are kept, a prefix of each row. Shape: all (B, C)."""
        few = weights.shape[1]
        within_k = torch.arange(few, device=weights.device) < self.top_k[:, None]
        # top_p speaks of what top_k left.
        last_k = (self.top_k.clamp(max=few) - 1)[:, None]
        left = torch.where(self.top_k < self.vocab_size, cumulative.gather(1, last_k)[:, 0], self.mass)
        before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
        within_p = (self.top_p >= 1.0)[:, None] | (before < (self.top_p * left)[:, None])
        kept = within_k & within_p & (weights >= self.min_p[:, None])
        kept[:, 0] = True
        return kept


def _pick(
    weights: torch.Tensor, cumulative: torch.Tensor, ids: torch.Tensor, cut: _Cut, numbers: npt.NDArray[np.float64]
) -> Int32:
    """Draw from sorted weights. Shape: weights, cumulative, ids (B, C) likeliest first; numbers (B,)."""
    kept = cut.kept(weights, cumulative)
    # Past the end of what is kept the cumulative weight just stays.
    total = cumulative.gather(1, kept.sum(dim=-1, keepdim=True) - 1)
    place = _inverse_cdf(torch.where(kept, cumulative, total), numbers)
    return ids.gather(1, place[:, None])[:, 0].to(torch.int32).cpu().numpy()


def _inverse_cdf(cumulative: torch.Tensor, numbers: npt.NDArray[np.float64]) -> torch.Tensor:
    """First index whose cumulative weight exceeds u times the total.

    Shape:
        cumulative: (B, C), never falling; returns (B,) int64, on its device.
    """
    total = cumulative[:, -1:].contiguous()
    target = upload(numbers, cumulative.device)[:, None] * total
    index = torch.searchsorted(cumulative, target, right=True)
    # Rounding may lift the target to the total itself: the last token that has weight is meant.
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(index, last)[:, 0]


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` largest of each row, ties by token id.

    Shape:
        logits: (B, V); returns values and ids (B, count), and (B,) whether the row's selection is sure: no tie lies
        across its end.
    """
    values, ids = logits.topk(min(count + 1, logits.shape[1]), dim=-1)
    sure = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    if values.shape[1] > count:
        sure = values[:, count - 1] != values[:, count]
        values, ids = values[:, :count], ids[:, :count]
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order), sure


def _row_logprobs(logits: torch.Tensor, tokens: Int32, counts: list[int]) -> list[RowLogprobs]:
    """Log probabilities of the produced token and the `counts[i]` likeliest. Shape: logits (B, V), tokens (B,)."""
    norm = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    produced = logits.gather(1, upload(tokens.astype(np.int64), logits.device)[:, None])
    most = min(max(counts), logits.shape[1])
    values, ids = produced[:, :0], torch.zeros((len(counts), 0), dtype=torch.int64, device=logits.device)
    if most:
        values, ids, sure = _likeliest(logits, most)
        rest = torch.nonzero(~sure)[:, 0]
        if len(rest):
            sorted_values, sorted_ids = torch.sort(logits[rest], dim=-1, descending=True, stable=True)
            values[rest], ids[rest] = sorted_values[:, :most], sorted_ids[:, :most]
    every = (torch.cat([produced, values], dim=1) - norm[:, None]).cpu().numpy()
    every_ids = np.concatenate([tokens[:, None], ids.to(torch.int32).cpu().numpy()], axis=1)
    return [_logprobs_of(every_ids[i, : n + 1], every[i, : n + 1]) for i, n in enumerate(counts)]


def _logprobs_of(token_ids: Int32, logprobs: Float32) -> RowLogprobs:
    """Copies, so that a row's few values do not keep the whole portion alive."""
    return RowLogprobs(token_ids.copy(), logprobs.copy())
