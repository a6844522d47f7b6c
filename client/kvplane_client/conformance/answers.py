"""Holds each answer to a step to what the contract says of any.

Station: called by `stream`. Knows the step that was sent and the answer that came; what the tokens should have been is
for a judge to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance import checks
from kvplane_client.conformance.judges import Output
from kvplane_client.conformance.steps import Row, Sample

__all__ = ["Answer", "SentStep", "checked_answer"]

_ORDER = "ExecutorService.Execute: Execute runs steps in the order sent, one response a step."
_EPOCH = "ExecuteResponse.kv_epoch: kv_epoch is the executor's."
_ROW_ERRORS = (
    "ExecuteResponse.row_errors: row_errors are rows that failed alone, such as non-finite logits; the others are good."
)
_SAMPLED = "ExecuteResponse.sampled_token_ids: sampled_token_ids has S values, in the order of SamplingBatch.rows"
_NOT_SAMPLED = "ExecuteResponse.sampled_token_ids: -1 for a row in row_errors."
_REASONS = "RowError.reason: reason is UPPER_SNAKE_CASE"
_REASON = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_UPTO = (
    "ExecuteResponse.computed_upto: computed_upto has R values: how many tokens of the row's sequence have K/V in the "
    "cache now."
)
_TIMES = {
    "compute_us": "ExecuteResponse.compute_us: compute_us is how long the step computed, in microseconds",
    "queue_us": "ExecuteResponse.queue_us: queue_us is how long the step lay in the executor before, in microseconds.",
    "copy_us": "ExecuteResponse.copy_us: copy_us is how long the step's copies took, in microseconds.",
}
_BORDERS = (
    "LogprobsBatch.indptr: indptr has S + 1 values: the entries of sampling row s are indptr[s] to indptr[s + 1]."
)
_ENTRIES = "LogprobsBatch.token_ids: token_ids has one value for each entry."
_LIKELIEST = "LogprobsBatch.indptr: None, or the produced token first and then the likeliest ones, likeliest first."


@dataclass(frozen=True)
class SentStep:
    """A step that is not answered yet.

    Attributes:
        step_id: Its id.
        rows: What it computes.
        samples: The row of each and how it is drawn.
        fails: The rows that cannot but fail.
    """

    step_id: int
    rows: Sequence[Row]
    samples: Sequence[tuple[int, Sample]]
    fails: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Answer:
    """One step's result, checked. outputs: one for each sample."""

    response: pb.ExecuteResponse
    outputs: list[Output]

    @property
    def tokens(self) -> list[int]:
        """The sampled tokens."""
        return [output.token for output in self.outputs]


def checked_answer(sent: SentStep, response: pb.ExecuteResponse, *, kv_epoch: int, vocab_size: int) -> Answer:
    """Checks an answer.

    Args:
        sent: The step that it should be to.
        response: What came.
        kv_epoch: The executor's.
        vocab_size: The model's.

    Raises:
        CaseFailedError: It breaks the contract.
    """
    checks.equal(response.step_id, sent.step_id, _ORDER)
    checks.equal(response.kv_epoch, kv_epoch, _EPOCH)
    failed = {error.row: error.reason for error in response.row_errors}
    wanted = "no row" if not sent.fails else f"rows {sorted(sent.fails)}"
    one_each = failed.keys() == sent.fails and len(response.row_errors) == len(failed)
    checks.true(one_each, _ROW_ERRORS, wanted, [(error.row, error.reason) for error in response.row_errors])
    for reason in failed.values():
        checks.true(_REASON.fullmatch(reason) is not None, _REASONS, "a reason in UPPER_SNAKE_CASE", reason)
    tokens = checks.ints(response.sampled_token_ids, "sampled_token_ids")
    checks.equal(len(tokens), len(sent.samples), _SAMPLED)
    for token, (row, _) in zip(tokens, sent.samples, strict=True):
        if row in failed:
            checks.equal(token, -1, _NOT_SAMPLED)
        else:
            checks.true(0 <= token < vocab_size, _SAMPLED, f"ids in [0, {vocab_size})", tokens)
    _check_computed(sent, checks.ints(response.computed_upto, "computed_upto"))
    for name, contract in _TIMES.items():
        took = getattr(response, name)
        checks.true(took >= 0, contract, "at least 0", took)
    return Answer(response, _outputs(sent, response, tokens))


def _check_computed(sent: SentStep, computed_upto: list[int]) -> None:
    """Checks what is said to be in the cache: a row that failed may have less than the step asked for."""
    ends = [row.end for row in sent.rows]
    settled = [
        min(max(upto, 0), end) if row in sent.fails else end
        for row, (end, upto) in enumerate(zip(ends, computed_upto, strict=False))
    ]
    checks.equal(computed_upto, settled if len(settled) == len(ends) else ends, _UPTO)


def _outputs(sent: SentStep, response: pb.ExecuteResponse, tokens: list[int]) -> list[Output]:
    """Puts tokens and log probabilities together."""
    wanted = [0 if row in sent.fails else sample.params.num_logprobs + 1 for row, sample in sent.samples]
    if not any(wanted):
        return [Output(token, ()) for token in tokens]
    message = response.logprobs
    values = checks.floats(message.logprobs, "logprobs")
    ids = checks.ints(message.token_ids, "logprobs.token_ids")
    borders = [sum(wanted[:place]) for place in range(len(wanted) + 1)]
    checks.equal(checks.ints(message.indptr, "logprobs.indptr"), borders, _BORDERS)
    checks.equal((len(ids), len(values)), (borders[-1], borders[-1]), _ENTRIES)
    outputs = []
    for token, start, end in zip(tokens, borders, borders[1:], strict=False):
        entries = tuple(zip(ids[start:end], values[start:end], strict=True))
        likeliest = [value for _, value in entries[1:]]
        in_order = not entries or (entries[0][0] == token and likeliest == sorted(likeliest, reverse=True))
        checks.true(in_order, _LIKELIEST, f"token {token}, then others by falling log probability", entries)
        outputs.append(Output(token, entries))
    return outputs
