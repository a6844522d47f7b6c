"""Executors that draw wrong: the example in NumPy, each with one fault in what it makes of parameters.

Imports the example: its folder must be on the path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from kvplane_numpy.backend import NumpyBackend, NumpyBackendConfig

from executor_service.backends.base import PenaltyHistory, SamplingBatch, StepBatch, StepResult, TokenSampling


class FaultySampling(NumpyBackend):
    """The example, and how a step's sampling is spoiled before it is computed."""

    def __init__(self, config: NumpyBackendConfig) -> None:
        super().__init__(config)

    def execute(self, batch: StepBatch) -> StepResult:
        if batch.sampling is not None:
            batch = dataclasses.replace(batch, sampling=self.spoilt(batch.sampling, np.diff(batch.query_indptr)))
        return super().execute(batch)

    def spoilt(self, sampling: SamplingBatch, lengths: np.ndarray) -> SamplingBatch:  # type: ignore[type-arg]
        """What the example is given instead. lengths: how many tokens each row computes."""
        return sampling


class DrawsWithoutPositions(FaultySampling):
    """A random number is a function of the seed alone."""

    def spoilt(self, sampling, lengths):
        return dataclasses.replace(sampling, positions=np.zeros_like(sampling.positions))


class ForgetsFedTokens(FaultySampling):
    """Leaves the newest token of a row that decodes out of its history."""

    def spoilt(self, sampling, lengths):
        histories = {
            place: PenaltyHistory(history.token_ids[:-1], min(history.prompt_len, len(history.token_ids) - 1))
            if lengths[sampling.rows[place]] == 1
            else history
            for place, history in sampling.histories.items()
        }
        return dataclasses.replace(sampling, histories=histories)


class RepeatsOutputsOnly(FaultySampling):
    """Leaves the prompt out of what repetition is counted in."""

    def spoilt(self, sampling, lengths):
        histories = {
            place: PenaltyHistory(history.token_ids[history.prompt_len :], 0)
            for place, history in sampling.histories.items()
        }
        return dataclasses.replace(sampling, histories=histories)


class BiasesWhatIsSuppressed(FaultySampling):
    """Adds a bias last, so that it brings back what was suppressed."""

    def spoilt(self, sampling, lengths):
        def change(one: TokenSampling) -> TokenSampling:
            return dataclasses.replace(one, suppressed_token_ids=()) if one.logit_bias.values.size else one

        return _with_params(sampling, change)


class NarrowsBeforeTemperature(FaultySampling):
    """Goes by top_p and min_p before the temperature."""

    def spoilt(self, sampling, lengths):
        def change(one: TokenSampling) -> TokenSampling:
            narrows = one.temperature > 1 and (one.top_p < 1 or one.min_p)
            return dataclasses.replace(one, top_k=1) if narrows else one

        return _with_params(sampling, change)


def _with_params(sampling: SamplingBatch, change: Callable[[TokenSampling], TokenSampling]) -> SamplingBatch:
    return dataclasses.replace(sampling, params=[change(one) for one in sampling.params])
