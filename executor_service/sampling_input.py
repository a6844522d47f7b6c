"""The sampling part of a step: from `SamplingBatch` messages to the backend's arrays, checked.

Station: called by `input_batch`. Knows no row's tokens but those in penalty histories.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.array_checks import (
    frozen,
    int32_column,
    require_growing,
    require_indptr,
    require_length,
    require_range,
)
from executor_service.backends.base import Int32, LogitBias, PenaltyHistory, SamplingBatch, TokenSampling
from executor_service.errors import InvalidFieldError

__all__ = ["SamplingParser"]

# Parameter sets that are kept, and the bytes of their messages together: room for the largest of 256 requests.
_MAX_KNOWN = 4096
_MAX_KNOWN_BYTES = 4 * 1024 * 1024


class SamplingParser:
    """Parses the sampling part of steps.

    A manager sends the same parameter sets every step; they are looked up by their bytes, since checking eleven fields,
    and each entry of a logit_bias, costs ten times as much.

    Args:
        vocab_size: number of token ids.
        max_logprobs: most top log probabilities a sample may ask for.
    """

    def __init__(self, vocab_size: int, max_logprobs: int) -> None:
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self._known: dict[bytes, TokenSampling] = {}
        self._known_bytes = 0

    def parse(self, message: pb.SamplingBatch, seq_lens: Int32, max_samples: int) -> SamplingBatch | None:
        """Check the message and turn it into arrays.

        Args:
            message: the step's sampling part.
            seq_lens: (R,) sequence length of each row after the step.
            max_samples: most samples; a row may be sampled more than once, but each takes memory for its logits.

        Returns:
            None when no row samples. Histories lack the tokens that are fed from the step before.

        Raises:
            InvalidFieldError: a value breaks the contract.
        """
        rows = int32_column(message.rows, "sampling.rows")
        if len(rows) > max_samples:
            expected = f"at most {max_samples} values (max_num_seqs as profiled)"
            raise InvalidFieldError("sampling.rows", expected, f"{len(rows)} values")
        require_range(rows, 0, len(seq_lens), "sampling.rows")
        require_growing(rows, "sampling.rows", strictly=False)
        params = [self._params(one, index) for index, one in enumerate(message.params)]
        params_index = int32_column(message.params_index, "sampling.params_index")
        require_length(params_index, len(rows), "sampling.params_index")
        require_range(params_index, 0, len(params), "sampling.params_index")
        if len(message.seeds) != len(rows):
            raise InvalidFieldError("sampling.seeds", f"{len(rows)} values", f"{len(message.seeds)} values")
        histories = self._histories(message, params, params_index)
        if not len(rows):
            return None
        return SamplingBatch(
            rows=rows,
            params=params,
            params_index=params_index,
            seeds=frozen(np.array(message.seeds, dtype=np.uint64)),
            positions=frozen(seq_lens[rows]),
            histories=histories,
        )

    def _params(self, message: pb.TokenSampling, index: int) -> TokenSampling:
        """Check one parameter set, or find it among those checked before."""
        key = message.SerializeToString()
        known = self._known.get(key)
        if known is None:
            known = self._check_params(message, f"sampling.params[{index}]")
            self._keep(key, known)
        return known

    def _keep(self, key: bytes, params: TokenSampling) -> None:
        """Remember a checked parameter set; when there are too many, begin anew."""
        if len(key) > _MAX_KNOWN_BYTES:
            return
        if len(self._known) >= _MAX_KNOWN or self._known_bytes + len(key) > _MAX_KNOWN_BYTES:
            self._known.clear()
            self._known_bytes = 0
        self._known[key] = params
        self._known_bytes += len(key)

    def _check_params(self, message: pb.TokenSampling, field: str) -> TokenSampling:
        """Check the ranges that the proto states. Comparisons are written so that NaN fails them."""
        for name, good, expected in (
            ("temperature", 0 <= message.temperature < math.inf, "a finite number of at least 0"),
            ("top_k", message.top_k >= 0, "at least 0"),
            ("top_p", 0 < message.top_p <= 1, "a number in (0, 1]"),
            ("min_p", 0 <= message.min_p <= 1, "a number in [0, 1]"),
            ("repetition_penalty", 0.0625 <= message.repetition_penalty <= 16, "a number in [0.0625, 16]"),
            ("presence_penalty", -2 <= message.presence_penalty <= 2, "a number in [-2, 2]"),
            ("frequency_penalty", -2 <= message.frequency_penalty <= 2, "a number in [-2, 2]"),
            ("num_logprobs", -1 <= message.num_logprobs <= self._max_logprobs, f"-1 to {self._max_logprobs}"),
        ):
            if not good:
                raise InvalidFieldError(f"{field}.{name}", expected, getattr(message, name))
        bias = LogitBias.of(message.logit_bias)
        suppressed = tuple(message.suppressed_token_ids)
        self._check_ids(bias.token_ids, f"{field}.logit_bias")
        self._check_ids(suppressed, f"{field}.suppressed_token_ids")
        finite = np.isfinite(bias.values)
        if not finite.all():
            place = int(np.argmin(finite))
            name = f"{field}.logit_bias[{bias.token_ids[place]}]"
            raise InvalidFieldError(name, "a finite number", bias.values[place])
        return TokenSampling(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=bias,
            suppressed_token_ids=suppressed,
            num_logprobs=message.num_logprobs,
        )

    def _check_ids(self, token_ids: Iterable[int], field: str) -> None:
        """Check that ids are in the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidFieldError(field, f"token ids in [0, {self._vocab_size})", token_id)

    def _histories(
        self, message: pb.SamplingBatch, params: list[TokenSampling], params_index: Int32
    ) -> dict[int, PenaltyHistory]:
        """Check the penalty histories: one for each sample whose params penalise, none for another."""
        penalised = np.array([one.has_penalty for one in params], dtype=np.bool_)
        expected = np.flatnonzero(penalised[params_index])
        if not len(expected) and not message.HasField("penalties"):
            return {}
        field = "sampling.penalties"
        sample_index = int32_column(message.penalties.sample_index, f"{field}.sample_index")
        if not np.array_equal(sample_index, expected):
            raise InvalidFieldError(
                f"{field}.sample_index",
                f"exactly the indices of the samples whose params penalise, {_some(expected)}",
                _some(sample_index),
            )
        indptr = int32_column(message.penalties.indptr, f"{field}.indptr")
        token_ids = int32_column(message.penalties.token_ids, f"{field}.token_ids")
        prompt_lens = int32_column(message.penalties.prompt_lens, f"{field}.prompt_lens")
        if len(expected) or len(indptr):
            require_indptr(indptr, len(expected) + 1, len(token_ids), f"{field}.indptr", strictly=False)
        else:
            require_length(token_ids, 0, f"{field}.token_ids")
        require_range(token_ids, 0, self._vocab_size, f"{field}.token_ids")
        require_length(prompt_lens, len(expected), f"{field}.prompt_lens")
        result = {}
        for place, sample in enumerate(expected.tolist()):
            start, end, prompt_len = int(indptr[place]), int(indptr[place + 1]), int(prompt_lens[place])
            if not 0 <= prompt_len <= end - start:
                raise InvalidFieldError(f"{field}.prompt_lens[{place}]", f"a value in [0, {end - start}]", prompt_len)
            result[sample] = PenaltyHistory(token_ids[start:end], prompt_len)
        return result


def _some(values: np.ndarray[tuple[int], np.dtype[np.signedinteger]]) -> str:
    """Show the first values of a column."""
    shown = ", ".join(str(value) for value in values[:8].tolist())
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"
