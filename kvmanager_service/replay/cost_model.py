"""How long an executor takes for a step: a sum of six terms, each measured or reckoned once for a model and machine.

Station: asked by `timed` for every step. `kvmanager_service.calibration` fits the terms to what a real executor takes,
and writes the file that `read_cost_model` reads.

    microseconds = step + prefill_token × tokens of rows with several tokens
                        + decode_row × rows with one token
                        + context_token × Σ over rows of the sequence length that attention reads
                        + attention_pair × Σ over tokens of rows with several of the positions each attends to
                        + copy_token × tokens of blocks copied

Where layers read unlike parts of a sequence, both sums are of the mean over layers (`group_reads`).

A step without rows takes the time of its copies. Attention's pairs are what makes a long prompt cost more than its
tokens: they grow with the square of a prompt, and with the context of a late chunk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvmanager_service.core.kv_groups import FullAttention
from kvmanager_service.core.step import Step
from kvmanager_service.replay.group_reads import GroupReads

__all__ = ["KV_TERMS", "TERMS", "CostModel", "CostModelError", "Quantities", "quantities", "read_cost_model"]

TERMS = ("step_us", "prefill_token_us", "decode_row_us", "context_token_us", "attention_pair_us")
"""Names of the terms, in the order of `quantities`."""
KV_TERMS = ("context_token_us", "attention_pair_us")
"""Those that no step has anything of where no layer keeps K and V."""


class CostModelError(Exception):
    """A file is not one of a cost model.

    Attributes:
        path: the file's.
        expected, got: what.
    """

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(f"{path}: expected {expected}, got {got}; `kvplane calibrate HOST:PORT -o FILE` writes one")
        self.path = path
        self.expected = expected
        self.got = got


Quantities = tuple[int, int, int, float, float]
"""What each term is multiplied with: 1, tokens of rows with several, rows with one token, tokens of context, pairs."""

_MAX_US = 1e12
"""Of a term: eleven days."""
_ALL = GroupReads([FullAttention(1)])


def quantities(step: Step, reads: GroupReads = _ALL) -> Quantities:
    """What a step has of each, on a model whose layers read so."""
    if not reads.is_full:
        return _quantities_of_groups(step, reads)
    decode_rows = context = pairs = 0
    for row in step.rows:
        context += row.stop
        if row.num_tokens == 1:
            decode_rows += 1
        else:
            pairs += row.num_tokens * row.stop - row.num_tokens * (row.num_tokens - 1) // 2
    return 1, step.num_tokens - decode_rows, decode_rows, context, pairs


def _quantities_of_groups(step: Step, reads: GroupReads) -> Quantities:
    decode_rows = 0
    context = pairs = 0.0
    for row in step.rows:
        context += reads.context(row.start, row.stop)
        if row.num_tokens == 1:
            decode_rows += 1
        else:
            pairs += reads.pairs(row.start, row.stop)
    return 1, step.num_tokens - decode_rows, decode_rows, context, pairs


@dataclass(frozen=True, slots=True)
class CostModel:
    """Units: microseconds.

    The defaults are reckoned for 8 billion parameters in bf16 on a GPU with 3.35 TB/s and 500 TFLOP/s in use: reading
    16 GB of weights, 16 GFLOP for a token, 128 KiB of K and V for a token of context, 0.5 MFLOP for a pair; copies at
    50 GB/s.

    Attributes:
        step_us: any step: launches, and reading the weights.
        prefill_token_us: each token of a row that computes several: arithmetic.
        decode_row_us: each row that computes one token: sampling.
        context_token_us: each token of K and V that a row reads.
        attention_pair_us: each pair of a token of a row that computes several and one it attends to: arithmetic.
        copy_token_us: each token of K and V that a block has room for, when the block is copied; a block of one of n
            groups has room for an nth of its tokens. Not calibrated.
    """

    step_us: float = 5000.0
    prefill_token_us: float = 32.0
    decode_row_us: float = 10.0
    context_token_us: float = 0.04
    attention_pair_us: float = 0.001
    copy_token_us: float = 2.6

    def copy_seconds(self, step: Step, reads: GroupReads) -> float:
        """How long the step's copies take."""
        return self.copy_token_us * reads.tokens_per_block * len(step.copies) / 1e6

    def seconds(self, step: Step, reads: GroupReads) -> float:
        """How long the step takes, its copies included."""
        copy_seconds = self.copy_seconds(step, reads)
        if not step.rows:
            return copy_seconds
        return self.microseconds(quantities(step, reads)) / 1e6 + copy_seconds

    def microseconds(self, counts: Quantities) -> float:
        """How long a step of these `quantities` takes."""
        num_steps, prefill_tokens, decode_rows, context, pairs = counts
        return (
            self.step_us * num_steps
            + self.prefill_token_us * prefill_tokens
            + self.decode_row_us * decode_rows
            + self.context_token_us * context
            + self.attention_pair_us * pairs
        )


def read_cost_model(path: Path) -> CostModel:
    """Read the terms of a cost model: a JSON object whose "cost_model" has all five, whatever else is in it.

    Raises:
        CostModelError: it is not that.
        OSError: the file can not be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of the JSON, or of the UTF-8
        raise CostModelError(str(path), "a JSON object", str(error)) from None
    values = document.get("cost_model") if isinstance(document, dict) else None
    if not isinstance(values, dict):
        raise CostModelError(str(path), 'a JSON object with an object "cost_model"', "none")
    if values.keys() != set(TERMS):
        raise CostModelError(str(path), f"cost_model with {', '.join(TERMS)}", ", ".join(sorted(values)) or "nothing")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_US:
            raise CostModelError(str(path), f"{name}: a number in 0 to {_MAX_US:g}", repr(value))
    return CostModel(**values)
