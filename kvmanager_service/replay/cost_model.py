"""How long an executor takes for a step: a sum of five terms, each measured or reckoned once for a model and a machine.

Station: asked by `timed` for every step.

    microseconds = step + prefill_token × tokens of rows with several tokens
                        + decode_row × rows with one token
                        + context_token × Σ over rows of the sequence length that attention reads
                        + copy_token × tokens of blocks copied from or to the host

A step without rows takes the time of its copies. Prefill attention, which grows with the square of a chunk, is in the
terms only as far as its context is: keep chunks small against contexts, or measure prefill_token at your usual chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager_service.core.step import Step


@dataclass(frozen=True, slots=True)
class CostModel:
    """Units: microseconds.

    The defaults are reckoned for 8 billion parameters in bf16 on a GPU with 3.35 TB/s and 500 TFLOP/s in use: reading
    16 GB of weights, 16 GFLOP for a token, 128 KiB of K and V for a token of context; copies at 50 GB/s.

    Attributes:
        step_us: any step: launches, and reading the weights.
        prefill_token_us: each token of a row that computes several: arithmetic.
        decode_row_us: each row that computes one token: sampling.
        context_token_us: each token of K and V that a row reads.
        copy_token_us: each token of K and V that a block has room for, when the block is swapped out or in.
    """

    step_us: float = 5000.0
    prefill_token_us: float = 32.0
    decode_row_us: float = 10.0
    context_token_us: float = 0.04
    copy_token_us: float = 2.6

    def copy_seconds(self, step: Step, block_size: int) -> float:
        """How long the step's copies take."""
        return self.copy_token_us * block_size * len(step.copies) / 1e6

    def seconds(self, step: Step, block_size: int) -> float:
        """How long the step takes, its copies included."""
        copy_seconds = self.copy_seconds(step, block_size)
        if not step.rows:
            return copy_seconds
        decode_rows = context = 0
        for row in step.rows:
            decode_rows += row.num_tokens == 1
            context += row.stop
        prefill_tokens = step.num_tokens - decode_rows
        compute_us = (
            self.step_us
            + self.prefill_token_us * prefill_tokens
            + self.decode_row_us * decode_rows
            + self.context_token_us * context
        )
        return compute_us / 1e6 + copy_seconds
