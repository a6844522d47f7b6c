"""Which executors this manager can use, from what they say of themselves.

Station: called by `executor_life` before it uses an executor. Pure but for the thread in which a tokenizer is built: it
knows neither the registry nor any connection.
"""

from __future__ import annotations

import asyncio

from kvplane.executor.v1.executor_service_pb2 import GetModelInfoResponse

from kvmanager_service.core.kv_cache_coordinator import needs_no_coordinator
from kvmanager_service.core.scheduler_config import RECOMPUTE
from kvmanager_service.engine_api import ModelView
from kvmanager_service.executor_client import ReadyExecutor
from kvmanager_service.executor_groups import UnsupportedGroupsError, longest_fit, read_groups
from kvmanager_service.text_model import TextModel


class ExecutorUnfitError(Exception):
    """This manager can not use an executor, however often it tries.

    Args:
        reason: the ErrorInfo reason that the executor is told.
        message: expected, got and what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def require_model(model: ModelView | None, info: GetModelInfoResponse) -> None:
    """Raise ExecutorUnfitError unless the executor serves the manager's model, or none is served yet."""
    if model is not None and info.model_fingerprint != model.fingerprint:
        raise ExecutorUnfitError(
            "MODEL_MISMATCH",
            f"expected an executor that serves {model.name!r} ({model.fingerprint}), got other weights, or K/V"
            f" quantised otherwise: {info.model_name!r} ({info.model_fingerprint}, {info.kv_cache_dtype}); start it"
            " with the same model and --kv-cache-dtype",
        )


def require_geometry(ready: ReadyExecutor, preemption_mode: str = RECOMPUTE) -> None:
    """Raise ExecutorUnfitError unless there can be books on the executor's cache.

    Args:
        ready: the executor.
        preemption_mode: the manager's; blocks of several KV groups, of windows or of states are not swapped.
    """
    kv_cache = ready.kv_cache
    if kv_cache.block_size < 1 or kv_cache.num_blocks < 2 or ready.num_host_blocks < 0:
        raise ExecutorUnfitError(
            "KV_GEOMETRY_UNSUPPORTED",
            "kv_cache: expected block_size of at least 1, num_blocks of at least 2 and num_host_blocks of at least 0,"
            f" got {kv_cache.block_size}, {kv_cache.num_blocks} and {ready.num_host_blocks}; mend the executor",
        )
    try:
        groups = read_groups(ready.info.kv_groups, kv_cache.block_size)
    except UnsupportedGroupsError as error:
        raise ExecutorUnfitError(
            "KV_GEOMETRY_UNSUPPORTED",
            f"kv_groups: expected {error}; serve another model, or a manager that knows what this one needs",
        ) from error
    if kv_cache.num_blocks <= len(groups):
        raise ExecutorUnfitError(
            "KV_GEOMETRY_UNSUPPORTED",
            f"kv_cache: expected num_blocks above the number of groups, {len(groups)}, so that each has one, got"
            f" {kv_cache.num_blocks}; give the executor more memory for KV",
        )
    if preemption_mode != RECOMPUTE and not needs_no_coordinator(groups):
        raise ExecutorUnfitError(
            "KV_GEOMETRY_UNSUPPORTED",
            f"kv_groups: expected one group of full attention for --preemption-mode {preemption_mode}, got"
            f" {len(groups)} groups, a sliding window or a state; start the manager with --preemption-mode {RECOMPUTE}",
        )


def require_length(model: ModelView | None, ready: ReadyExecutor, longest_chunk: int) -> None:
    """Raise ExecutorUnfitError unless it can compute every sequence that fits both the model, as served, and the pool.

    It would fail the steps of longer ones, and with them of all that share those steps.

    Args:
        model: what is served; None before anything is.
        ready: an executor of a geometry that will do.
        longest_chunk: most tokens of one request in a step.
    """
    if model is None:
        return
    kv_cache = ready.kv_cache
    groups = read_groups(ready.info.kv_groups, kv_cache.block_size)
    longest = longest_fit(groups, kv_cache.num_blocks - 1, model.max_model_len, longest_chunk)
    if ready.info.max_model_len < longest:
        raise ExecutorUnfitError(
            "MODEL_LEN_TOO_SHORT",
            f"max_model_len: expected at least {longest}, which requests were admitted for, got"
            f" {ready.info.max_model_len}; start the executor with as much, or the manager anew",
        )


async def load_model(info: GetModelInfoResponse) -> ModelView:
    """Make the model from what an executor says of it. Raises ExecutorUnfitError when its files cannot be read."""
    files = {file.name: file.content for file in info.tokenizer_files}
    try:
        text = await asyncio.to_thread(TextModel.from_files, files)
    except Exception as error:
        raise ExecutorUnfitError(
            "TOKENIZER_UNREADABLE",
            f"tokenizer_files: expected a tokenizer and a chat template that can be read, got"
            f" {type(error).__name__}: {error}; mend the model's files",
        ) from error
    return ModelView(
        name=info.model_name,
        fingerprint=info.model_fingerprint,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=tuple(info.eos_token_ids),
        max_logprobs=info.max_logprobs,
        dtype=info.dtype,
        text=text,
    )
