"""What an executor holds: the model, what was profiled, and the cache with its epoch and tags.

Station: called by `servicer` and `step_runner`, always in the compute thread; calls the backend. Knows no gRPC. The
event loop may read `model_info`, `cache` and `limits`: each is replaced whole, never changed.

Life: `load`, `profile`, `initialize`, then steps; `initialize` and `reset` start a new epoch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from executor_service.adapters import LoadedAdapters
from executor_service.backends.base import (
    Backend,
    Int32,
    MemoryProfile,
    ModelInfo,
    RowFailure,
    StepResult,
)
from executor_service.block_copies import StepCopies
from executor_service.block_tags import BlockTagStore
from executor_service.errors import FailedPreconditionError, InvalidFieldError, NotServingError, StaleError
from executor_service.input_batch import ParsedStep, StepLimits, fill_batch
from executor_service.sampling_input import SamplingParser
from executor_service.startup_times import StartupTimes

__all__ = ["KvSession", "KvState", "StepOutcome"]

_NO_RESULT = StepResult(sampled_token_ids=np.empty(0, dtype=np.int32))
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class KvState:
    """The cache of one epoch."""

    limits: StepLimits
    tags: BlockTagStore


@dataclass(frozen=True)
class StepOutcome:
    """What a step produced, failed rows settled.

    Shape:
        sampled_token_ids: (S,), -1 for failed rows; computed_upto: (R,).

    Units:
        copy_us: microseconds that the step's copies took.
    """

    sampled_token_ids: Int32
    computed_upto: Int32
    result: StepResult
    failures: list[RowFailure]
    copy_us: int


class KvSession:
    """The executor's state between calls.

    Args:
        backend: what computes. Owned: `close` closes it.
        startup: told how long the parts of the first start take; None counts from here.
        settle: called when a cache has been made: what is there then stays for long.
    """

    def __init__(
        self, backend: Backend, startup: StartupTimes | None = None, settle: Callable[[], None] = lambda: None
    ) -> None:
        self._backend = backend
        self._startup = startup or StartupTimes()
        self._settle = settle
        self._profiles: dict[tuple[int, int], MemoryProfile] = {}
        self._last_profiled: tuple[int, int] | None = None
        self._model_info: ModelInfo | None = None
        self.adapters = LoadedAdapters(backend)
        self.cache: KvState | None = None

    @property
    def model_info(self) -> ModelInfo:
        """What was loaded.

        Raises:
            NotServingError: nothing yet.
        """
        if self._model_info is None:
            raise NotServingError("EXECUTOR_LOADING", "the model is being loaded; call again when health says SERVING")
        return self._model_info

    def load(self) -> ModelInfo:
        """Load the backend's model. Raises what the backend raises."""
        started = time.monotonic()
        with self._startup.part("model"):
            info = self._backend.load()
        self._model_info = info
        self.adapters.max_adapters = info.max_adapters
        _log.info(
            "model_loaded",
            model_name=info.model_name,
            device=info.device,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            seconds=round(time.monotonic() - started, 3),
        )
        return info

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Measure how many blocks fit; the same limits give the same answer again.

        A cache that was made under other limits is gone.

        Raises:
            InvalidFieldError: a limit below 1.
            NotEnoughMemoryError: not one sequence of max_model_len fits.
        """
        key = (max_num_batched_tokens, max_num_seqs)
        for name, value in zip(("max_num_batched_tokens", "max_num_seqs"), key, strict=True):
            if value < 1:
                raise InvalidFieldError(name, "at least 1", value)
        if self.cache is not None and key != (self.cache.limits.max_num_batched_tokens, self.cache.limits.max_num_seqs):
            # A manager of other limits: steps of its size are not what this cache was made for, and a measurement
            # takes the cache's memory.
            self.cache = None
        if key != self._last_profiled:  # a backend makes the cache for what it measured last
            _log.info(  # what a large model's start takes most of its time for
                "memory_profile_started",
                does="runs one step of the largest size to measure its memory",
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
            )
            with self._startup.part("memory_profile"):
                profile = self._backend.profile_memory(*key)
            self._profiles.setdefault(key, profile)
        self._last_profiled = key
        return self._profiles[key]

    def require_known_block_sizes(self, are_known: bool) -> None:
        """Refuse a manager that would take all KV groups' blocks for blocks of one size, where they are not.

        Args:
            are_known: whether it said that it goes by each group's own.

        Raises:
            FailedPreconditionError: it did not, and a group has its own.
        """
        info = self.model_info
        sizes = info.group_block_sizes
        if are_known or all(size == info.block_size for size in sizes):
            return
        named = ", ".join(map(str, sizes))
        raise FailedPreconditionError(
            "GROUP_BLOCK_SIZES_UNKNOWN",
            f"knows_group_block_sizes: expected a manager that knows block sizes of KV groups' own, which are {named}"
            " here, got one that does not say so; upgrade the manager, or serve a model whose groups have equal ones",
            group_block_sizes=named,
        )

    def initialize(self, num_blocks: int, num_host_blocks: int = 0) -> KvState:
        """Allocate the cache under the limits profiled last, and start a new epoch.

        Raises:
            FailedPreconditionError: nothing was profiled.
            InvalidFieldError: fewer than 2 blocks, or more of either kind than were reported.
        """
        if self._last_profiled is None:
            raise FailedPreconditionError("NOT_PROFILED", "no memory profile yet; call ProfileMemory first")
        profile = self._profiles[self._last_profiled]
        for name, value, least, most in (
            ("num_blocks", num_blocks, 2, profile.num_blocks),
            ("num_host_blocks", num_host_blocks, 0, profile.num_host_blocks),
        ):
            if not least <= value <= most:
                raise InvalidFieldError(name, f"{least} to {most}, as ProfileMemory reported", value)
        with self._startup.part("kv_cache"):
            cache = self._renew(num_blocks, num_host_blocks, *self._last_profiled)
        self._startup.tell()
        return cache

    def reset(self, kv_epoch: int) -> KvState:
        """Forget the content and the tags, keep the memory, start a new epoch.

        Raises:
            FailedPreconditionError, StaleError: as `require_cache`.
        """
        limits = self.require_cache(kv_epoch).limits
        return self._renew(
            limits.num_blocks, limits.num_host_blocks, limits.max_num_batched_tokens, limits.max_num_seqs
        )

    def require_cache(self, kv_epoch: int) -> KvState:
        """Return the cache that a message speaks of.

        Raises:
            FailedPreconditionError: there is none.
            StaleError: it has another epoch.
        """
        cache = self.cache
        if cache is None:
            raise FailedPreconditionError("KV_NOT_INITIALIZED", "there is no KV cache; call InitializeKvCache first")
        if kv_epoch != cache.limits.kv_epoch:
            raise StaleError(
                "STALE_EPOCH",
                f"kv_epoch: expected {cache.limits.kv_epoch}, got {kv_epoch}; the content it names is gone",
                expected=cache.limits.kv_epoch,
                got=kv_epoch,
            )
        return cache

    def list_tags(self, kv_epoch: int) -> dict[int, bytes]:
        """Return a copy of the tags. Raises as `require_cache`."""
        return self.require_cache(kv_epoch).tags.snapshot()

    def run(self, step_id: int, step: ParsedStep, sampled_before: Int32) -> StepOutcome:
        """Run a parsed step of the current epoch: its copies, then its rows.

        A tag goes before its block is written, and comes after the step has succeeded: at no moment does a tag speak
        of content that is not there.

        Args:
            step_id: the step's.
            step: parsed under the current limits.
            sampled_before: (S',) what the step before on the stream sampled.

        Raises:
            InvalidFieldError: feeds_from names a token that was not sampled.
            BackendError: the step could not be run.
        """
        cache = self.cache
        assert cache is not None, "the caller has checked the epoch"
        batch, fed_by_failed = fill_batch(step_id, step, sampled_before)
        copy_us = self._copy(cache.tags, step.copies) if step.copies.runs else 0
        cache.tags.drop(step.written_blocks)
        result = self._backend.execute(batch) if batch.num_rows else _NO_RESULT
        outcome = _settle(step, result, fed_by_failed, copy_us)
        self._store_tags(cache.tags, step, outcome)
        return outcome

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()

    def _copy(self, tags: BlockTagStore, copies: StepCopies) -> int:
        """Do a step's copies. Returns how long they took, in microseconds."""
        started_ns = time.perf_counter_ns()
        tags.drop(copies.written_blocks)
        self._backend.copy_blocks(copies.runs)
        return (time.perf_counter_ns() - started_ns) // 1000

    def _renew(self, num_blocks: int, num_host_blocks: int, max_num_batched_tokens: int, max_num_seqs: int) -> KvState:
        """Have the backend start an empty cache, and name it. If that fails there is no cache."""
        old = self.cache.limits.kv_epoch if self.cache else 0
        self.cache = None
        self._backend.initialize_kv_cache(num_blocks, num_host_blocks)
        info = self.model_info
        limits = StepLimits(
            kv_epoch=_new_epoch(old),
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            windows=tuple(group.window for group in info.kv_groups),
            group_block_sizes=info.group_block_sizes,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            sampling=SamplingParser(info.vocab_size, info.max_logprobs),
        )
        self._settle()
        self.cache = KvState(limits, BlockTagStore(num_blocks))
        _log.info(
            "kv_cache_started",
            kv_epoch=limits.kv_epoch,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=info.block_size,
        )
        return self.cache

    @staticmethod
    def _store_tags(tags: BlockTagStore, step: ParsedStep, outcome: StepOutcome) -> None:
        """Keep the step's tags, but for blocks into which a failed row wrote."""
        if not step.tag_block_ids:
            return
        tags.store(step.tag_block_ids, step.tags)
        for failure in outcome.failures:
            start, end = step.query_indptr[failure.row : failure.row + 2].tolist()
            start += int(outcome.computed_upto[failure.row]) - int(step.positions[start])
            tags.drop(step.written_blocks.reshape(len(step.slot_mappings), -1)[:, start:end].ravel())


def _new_epoch(old: int) -> int:
    """Draw a 64-bit epoch that is neither 0 nor the one before."""
    while (epoch := secrets.randbits(64)) in (0, old):
        pass
    return epoch


def _settle(step: ParsedStep, result: StepResult, fed_by_failed: list[int], copy_us: int) -> StepOutcome:
    """Merge the backend's failed rows with those that were fed nothing."""
    sampled = result.sampled_token_ids
    if not result.failures and not fed_by_failed:
        return StepOutcome(sampled, step.seq_lens, result, [], copy_us)
    failures = {failure.row: failure for failure in result.failures}
    computed_upto = step.seq_lens.copy()
    for row in fed_by_failed:
        message = "the row of the step before that this row's last token comes from has failed"
        failures[row] = RowFailure(row, "FED_BY_FAILED_ROW", message)
        computed_upto[row] = step.seq_lens[row] - 1
    for failure in result.failures:
        # What such a row has written is not trusted: none of its tokens counts as computed.
        computed_upto[failure.row] = step.positions[step.query_indptr[failure.row]]
    if step.sampling is not None:
        sampled = np.where(np.isin(step.sampling.rows, list(failures)), np.int32(-1), sampled)
    ordered = sorted(failures.values(), key=lambda failure: failure.row)
    return StepOutcome(sampled, computed_upto, result, ordered, copy_us)
