"""How the sim backend turns what a row's table holds into a token.

Station: called by `sim_backend`. Knows temperature (zero or not), seed, suppression, and whether a row has penalties;
top_k, top_p, min_p and logit_bias do not change its tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor_service.backends.base import Int32, RowFailure, RowLogprobs, SamplingBatch, StepResult
from executor_service.backends.sim_digest import PENALTY, history_digest, mix_array

__all__ = ["choose_tokens"]


def choose_tokens(sampling: SamplingBatch, contents: npt.NDArray[np.uint64], vocab_size: int) -> StepResult:
    """Choose a token for each sampling row.

    Args:
        sampling: the S rows and how they sample.
        contents: (S,) digest of all that each row's table holds.
        vocab_size: number of token ids.
    """
    state = mix_array(contents)
    for sample, history in sampling.histories.items():
        state[sample : sample + 1] ^= mix_array(history_digest(history.token_ids, history.prompt_len) + PENALTY)
    random = np.array([params.temperature > 0 for params in sampling.params])[sampling.params_index]
    drawn = mix_array(state + mix_array(sampling.seeds ^ mix_array(sampling.positions.astype(np.uint64))))
    tokens = (np.where(random, drawn, mix_array(state)) % np.uint64(vocab_size)).astype(np.int32)
    failures = _suppress(sampling, tokens, vocab_size)
    return StepResult(tokens, _logprobs(sampling, tokens), failures)


def _suppress(sampling: SamplingBatch, tokens: Int32, vocab_size: int) -> list[RowFailure]:
    """Move tokens that may not be produced on to the next id that may; -1 where there is none."""
    failures: list[RowFailure] = []
    banned = [frozenset(params.suppressed_token_ids) for params in sampling.params]
    if not any(banned):
        return failures
    for sample, index in enumerate(sampling.params_index.tolist()):
        if len(banned[index]) == vocab_size:
            tokens[sample] = -1
            row = int(sampling.rows[sample])
            failures.append(RowFailure(row, "ALL_TOKENS_SUPPRESSED", "every token id is suppressed"))
            continue
        while int(tokens[sample]) in banned[index]:
            tokens[sample] = (int(tokens[sample]) + 1) % vocab_size
    return failures


def _logprobs(sampling: SamplingBatch, tokens: Int32) -> dict[int, RowLogprobs]:
    """Return the produced token's log probability for rows that asked: the model is certain of each."""
    if all(params.num_logprobs < 0 for params in sampling.params):
        return {}
    return {
        sample: RowLogprobs(tokens[sample : sample + 1], np.zeros(1, dtype=np.float32))
        for sample, index in enumerate(sampling.params_index.tolist())
        if sampling.params[index].num_logprobs >= 0
    }
