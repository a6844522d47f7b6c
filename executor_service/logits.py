"""What sampling parameters do to logits before anything is drawn: penalties, bias, suppression.

Station: called by `sampler`. Each step touches only the tokens it names, for all rows of a portion at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor_service.backends.base import PenaltyHistory, TokenSampling
from executor_service.devices import upload


def changes_logits(params: TokenSampling) -> bool:
    """Whether these parameters change logits before temperature."""
    return params.has_penalty or bool(params.logit_bias) or bool(params.suppressed_token_ids)


def adjust_logits(
    logits: torch.Tensor, params: Sequence[TokenSampling], histories: Sequence[PenaltyHistory | None]
) -> None:
    """Apply repetition, presence and frequency penalties, bias and suppression, in this order, in place.

    Repetition divides positive logits of every token of prompt and output, and multiplies the others; presence and
    frequency take their amount off each output token, once or for each time it occurs.

    Args:
        logits: float32 logits, changed in place.
        params: parameters of each row.
        histories: tokens of each row that has penalties; None is an empty history.

    Shape:
        logits: (B, V), contiguous.
    """
    _repetition(logits, params, histories)
    _presence_and_frequency(logits, params, histories)
    _bias(logits, params)
    _suppress(logits, params)


def _repetition(
    logits: torch.Tensor, params: Sequence[TokenSampling], histories: Sequence[PenaltyHistory | None]
) -> None:
    """Weaken what occurred anywhere."""
    places, factors = _Places(logits), []
    for row, (own, history) in enumerate(zip(params, histories, strict=True)):
        if own.repetition_penalty != 1.0 and history is not None:
            seen = np.unique(history.token_ids)
            places.add(row, seen)
            factors.append(np.full(len(seen), own.repetition_penalty, dtype=np.float32))
    if factors:
        factor = upload(np.concatenate(factors), logits.device)
        old = places.read()
        places.write(torch.where(old > 0, old / factor, old * factor))


def _presence_and_frequency(
    logits: torch.Tensor, params: Sequence[TokenSampling], histories: Sequence[PenaltyHistory | None]
) -> None:
    """Weaken what occurred in the output."""
    places, amounts = _Places(logits), []
    for row, (own, history) in enumerate(zip(params, histories, strict=True)):
        if (own.presence_penalty or own.frequency_penalty) and history is not None:
            seen, counts = np.unique(history.token_ids[history.prompt_len :], return_counts=True)
            places.add(row, seen)
            amounts.append((own.presence_penalty + own.frequency_penalty * counts).astype(np.float32))
    if amounts:
        places.write(places.read() - upload(np.concatenate(amounts), logits.device))


def _bias(logits: torch.Tensor, params: Sequence[TokenSampling]) -> None:
    """Add to the logits of the named tokens."""
    places, amounts = _Places(logits), []
    for row, own in enumerate(params):
        if own.logit_bias:
            places.add(row, own.logit_bias.token_ids)
            amounts.append(own.logit_bias.values)
    if amounts:
        places.write(places.read() + upload(np.concatenate(amounts), logits.device))


def _suppress(logits: torch.Tensor, params: Sequence[TokenSampling]) -> None:
    """Make the named tokens impossible."""
    places = _Places(logits)
    for row, own in enumerate(params):
        if own.suppressed_token_ids:
            places.add(row, np.array(own.suppressed_token_ids, dtype=np.int64))
    if places:
        places.write(torch.full_like(places.read(), -torch.inf))


class _Places:
    """A growing list of (row, token) places in the logits. Invariant: no place twice, or all with one value."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._flat = logits.view(-1)
        self._vocab_size = logits.shape[1]
        self._parts: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
        self._index: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, row: int, token_ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        """Name tokens of one row."""
        self._parts.append(token_ids + np.int64(row * self._vocab_size))

    def read(self) -> torch.Tensor:
        """The logits at the places."""
        return self._flat[self._where()]

    def write(self, values: torch.Tensor) -> None:
        """Set the logits at the places."""
        self._flat[self._where()] = values

    def _where(self) -> torch.Tensor:
        if self._index is None:
            self._index = upload(np.concatenate(self._parts), self._flat.device)
        return self._index
