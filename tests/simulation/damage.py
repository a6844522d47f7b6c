"""Answers that no honest executor sends.

Station: asked by `Deeds`, which hands them to a manager that must refuse them.
"""

from __future__ import annotations

import random

from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service.core.request import TOKEN_BYTES
from tests.unit.core.builders import token_bytes


def damage(response: pb.ExecuteResponse, rng: random.Random) -> None:
    """Make a good response one that no honest executor sends."""
    samples = len(response.sampled_token_ids.data) // TOKEN_BYTES
    rows = len(response.computed_upto.data) // TOKEN_BYTES
    kinds = ["step", "extra sample", "missing row", "short", "ragged", "row beyond", "row before", "logprobs"]
    if not rows:  # a step that takes tags along and nothing else has no row to leave out
        kinds.remove("missing row")
    kind = rng.choice([*kinds, "negative"] if samples else kinds)
    if kind == "step":
        response.step_id += rng.choice((-1, 1))
    elif kind == "extra sample":
        response.sampled_token_ids.data += token_bytes([5])
    elif kind == "missing row":
        response.computed_upto.data = response.computed_upto.data[TOKEN_BYTES:]
    elif kind == "short":
        response.computed_upto.data = token_bytes([0]) + response.computed_upto.data[TOKEN_BYTES:]
        del response.row_errors[:]
    elif kind == "ragged":
        response.computed_upto.data += b"\0"
    elif kind == "row beyond":
        response.row_errors.add(row=rows, reason="NON_FINITE_LOGITS")
    elif kind == "row before":
        response.row_errors.add(row=-1, reason="NON_FINITE_LOGITS")
    elif kind == "negative":
        response.sampled_token_ids.data = token_bytes([-1] * samples)
        del response.row_errors[:]
    else:
        response.logprobs.indptr.data = token_bytes([0, 2, 1])
