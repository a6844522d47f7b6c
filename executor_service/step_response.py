"""From a step's outcome to its `ExecuteResponse`.

Station: called by `step_runner` on the event loop, so that the compute thread is at the next step meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.base import RowLogprobs
from executor_service.kv_session import StepOutcome

__all__ = ["build_response"]


def build_response(
    step_id: int, kv_epoch: int, outcome: StepOutcome, *, compute_us: int, queue_us: int
) -> pb.ExecuteResponse:
    """Pack the outcome's columns.

    Units:
        compute_us, queue_us: microseconds.
    """
    response = pb.ExecuteResponse(
        step_id=step_id,
        kv_epoch=kv_epoch,
        sampled_token_ids=_int32(outcome.sampled_token_ids),
        computed_upto=_int32(outcome.computed_upto),
        row_errors=[
            pb.RowError(row=failure.row, reason=failure.reason, message=failure.message) for failure in outcome.failures
        ],
        compute_us=compute_us,
        queue_us=queue_us,
        copy_us=outcome.copy_us,
    )
    kept = {sample: row for sample, row in outcome.result.logprobs.items() if outcome.sampled_token_ids[sample] >= 0}
    if kept:
        response.logprobs.CopyFrom(_logprobs(kept, len(outcome.sampled_token_ids)))
    return response


def _logprobs(rows: Mapping[int, RowLogprobs], num_samples: int) -> pb.LogprobsBatch:
    """Lay the rows' log probabilities end to end; a row without any takes no entry."""
    counts = np.zeros(num_samples, dtype=np.int32)
    for sample, row in rows.items():
        counts[sample] = len(row.token_ids)
    ordered = [rows[sample] for sample in sorted(rows)]
    values = np.concatenate([row.logprobs for row in ordered]).astype("<f4")
    return pb.LogprobsBatch(
        indptr=_int32(np.concatenate(([0], np.cumsum(counts)))),
        token_ids=_int32(np.concatenate([row.token_ids for row in ordered])),
        logprobs=common_pb2.Float32Array(data=values.tobytes()),
    )


def _int32(values: npt.NDArray[np.signedinteger]) -> common_pb2.Int32Array:
    """Pack a column of integers."""
    return common_pb2.Int32Array(data=values.astype("<i4", copy=False).tobytes())
