"""One backend made of ranks: each holds its shard of the weights, and its K/V heads of every block.

Station: `backends.registry` puts it around rank 0's backend where `--tensor-parallel-size` is above 1; the shell drives
it like any other. It passes every call to the workers (`workers`), does rank 0's part, and makes one answer of all.

    shell ─▶ TensorParallelBackend ─▶ rank 0: TorchBackend ◀─ sums, logits (group) ─▶ TorchBackend :rank 1
                                  └─▶ workers ─ calls, answers (calls) ──────────────▶ worker ────┘

What settings give the executor as a whole, the ranks share evenly: --num-threads, --swap-space, and on a CPU the
memory; a GPU is one rank's alone. Blocks are numbered alike in all ranks, so there are as many as fit in the rank where
fewest do.

A rank that dies, hangs, or fails in the middle of an exchange ends the group: the call fails with a reason, the other
ranks are ended, and the process is told to end (`on_lost`), for whoever keeps executors running to start it anew. The
manager's streams go on when it has registered, as after any executor's death: nothing of a request was here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch

from executor_service.backends.base import (
    AdapterContent,
    Backend,
    BackendError,
    BlockCopies,
    MemoryProfile,
    ModelInfo,
    RowFailure,
    StepBatch,
    StepResult,
)
from executor_service.backends.registry import create_backend
from executor_service.backends.torch_backend import TorchBackend
from executor_service.config import ExecutorConfig
from executor_service.devices import resolve_device
from executor_service.memory_profiler import total_memory
from executor_service.tensor_parallel.adapter_parts import AdapterPart
from executor_service.tensor_parallel.calls import Failure, RankConfig, without_sampling
from executor_service.tensor_parallel.group import RankGroup
from executor_service.tensor_parallel.sharding import ModelShard
from executor_service.tensor_parallel.workers import Workers

__all__ = ["TensorParallelBackend", "profile_of_all", "rank_configs"]

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _OfRanks:
    """An adapter's weights, as rank 0 takes them and as the others do."""

    own: AdapterContent
    others: Sequence[AdapterPart]


class TensorParallelBackend(Backend):
    """Ranks that compute together; this process is rank 0.

    Args:
        own: rank 0's backend.
        ranks: each rank's share of the configuration, as `rank_configs` makes them.
        timeout_s: seconds that ranks wait for each other in a step.
    """

    def __init__(self, own: TorchBackend, ranks: Sequence[ExecutorConfig], timeout_s: float) -> None:
        self._own = own
        self._ranks = ranks
        self._size = len(ranks)
        self._timeout_s = timeout_s
        self._tell: Callable[[BackendError], None] = lambda error: None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._workers: Workers | None = None
        self._group: RankGroup | None = None

    @classmethod
    def of(cls, config: ExecutorConfig) -> TensorParallelBackend:
        """Make rank 0's backend, and plan the others; none is started before `load`.

        Raises:
            BackendError: the backend cannot be built, or there are fewer GPUs than ranks.
        """
        ranks = rank_configs(config)
        own = create_backend(ranks[0])
        assert isinstance(own, TorchBackend), "the registry has seen that it can join"
        return cls(own, ranks, config.tensor_parallel_timeout_s)

    def on_lost(self, tell: Callable[[BackendError], None]) -> None:
        """Take whom to tell that the group is at its end; see the base class."""
        self._tell = tell

    def load(self) -> ModelInfo:
        """Start the ranks and load each one's shard; see the base class."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvplane-ranks-")
        store = Path(self._folder.name) / "store"
        told = [
            RankConfig(config, rank, self._size, str(store), self._timeout_s) for rank, config in enumerate(self._ranks)
        ]
        self._workers = Workers(told[1:], self._tell)
        self._workers.answers(patiently=True)  # they run: now none waits in vain for another to start
        self._together("join", lambda: self._join(store), patiently=True)
        info, _ = self._together("load", self._own.load, patiently=True)
        return replace(
            info,
            tensor_parallel_size=self._size,
            kv_groups=tuple(
                replace(
                    group,
                    num_kv_heads=group.num_kv_heads * self._size,
                    bytes_per_block=group.bytes_per_block * self._size,
                )
                for group in info.kv_groups
            ),
        )

    def profile_memory(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Run the worst step in all ranks, and let the tightest speak for them; see the base class."""
        limits = max_num_batched_tokens, max_num_seqs
        own, others = self._together(
            "profile_memory", lambda: self._own.profile_memory(*limits), *limits, patiently=True
        )
        return profile_of_all([own, *others])

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate every rank's heads of all blocks; see the base class."""
        sizes = num_blocks, num_host_blocks
        self._each("initialize_kv_cache", lambda: self._own.initialize_kv_cache(*sizes), *sizes, patiently=True)

    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        """Copy blocks in all ranks; see the base class."""
        self._each("copy_blocks", lambda: self._own.copy_blocks(copies), copies)

    def execute(self, batch: StepBatch) -> StepResult:
        """Compute a step in all ranks; rank 0 samples. See the base class."""
        result, others = self._together("follow", lambda: self._own.execute(batch), without_sampling(batch))
        failures: dict[int, RowFailure] = {}
        for failure in (*result.failures, *(failure for rank in others for failure in rank)):
            failures.setdefault(failure.row, failure)
        return replace(result, failures=list(failures.values()))

    def read_adapter(self, source: str) -> AdapterContent:
        """Read an adapter, and cut it for all ranks; see the base class."""
        content, others = self._own.read_adapter_parts(source)
        return replace(content, weights=_OfRanks(content, others))

    def load_adapter(self, adapter_id: int, content: AdapterContent) -> None:
        """Give each rank its part of an adapter; if one cannot take it none has any. See the base class."""
        of_ranks = content.weights
        assert isinstance(of_ranks, _OfRanks), "what read_adapter() returned"
        workers = self._running()
        workers.call_each("load_adapter", [(adapter_id, part) for part in of_ranks.others])
        try:
            try:
                self._own.load_adapter(adapter_id, of_ranks.own)
            finally:
                workers.answers()
        except Exception:
            self._take_back_adapter(adapter_id)
            raise

    def unload_adapter(self, adapter_id: int) -> None:
        """Let go of an adapter in all ranks; see the base class."""
        self._each("unload_adapter", lambda: self._own.unload_adapter(adapter_id), adapter_id)

    def _take_back_adapter(self, adapter_id: int) -> None:
        """Have no rank keep what could not be loaded; if that fails, too, the first failure is what counts."""
        try:
            self.unload_adapter(adapter_id)
        except Exception as error:  # noqa: BLE001 - logged: what is raised is why there was something to take back
            _log.error("adapter_not_taken_back", adapter_id=adapter_id, error=repr(error))

    def close(self) -> None:
        """End the workers, and give back what rank 0 holds."""
        if self._workers is not None:
            self._workers.close()
        if self._group is not None:
            self._group.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._workers = self._group = self._folder = None
        self._own.close()

    def _join(self, store: Path) -> None:
        device = resolve_device(self._ranks[0].device)
        self._group = RankGroup(0, self._size, store, device, self._timeout_s)
        self._own.join(ModelShard(self._group))

    def _together(
        self, name: str, own: Callable[[], _T], *arguments: object, patiently: bool = False
    ) -> tuple[_T, list[Any]]:
        """Do a call with exchanges in all ranks. A rank that fails leaves others in the middle: that ends the group.

        Returns:
            What it returned in rank 0, and in the others.
        """
        workers = self._running()
        try:
            workers.call(name, *arguments)
            try:
                value = own()
            except (BackendError, RuntimeError) as error:
                raise workers.cause(Failure.of(error).error(0, self._size)) from error
            return value, workers.answers(patiently=patiently)
        except Exception as error:
            workers.give_up(error if isinstance(error, BackendError) else Failure.of(error).error(0, self._size))
            raise

    def _each(self, name: str, own: Callable[[], None], *arguments: object, patiently: bool = False) -> None:
        """Do a call without exchanges in all ranks. Every rank's answer is taken, whatever another's is."""
        workers = self._running()
        workers.call(name, *arguments)
        try:
            own()
        finally:
            workers.answers(patiently=patiently)

    def _running(self) -> Workers:
        if self._workers is None:
            raise BackendError("NOT_LOADED", "expected load() first, got a backend without a model")
        return self._workers


def rank_configs(config: ExecutorConfig) -> list[ExecutorConfig]:
    """Each rank's share of the executor's settings.

    Raises:
        BackendError: there are fewer GPUs than ranks.
    """
    size = config.tensor_parallel_size
    device = resolve_device(config.device)
    shared: dict[str, object] = {
        "tensor_parallel_size": 1,
        "num_threads": max(1, (config.num_threads or torch.get_num_threads()) // size),
        "swap_space": config.swap_space // size,
        "enforce_eager": True,  # a recorded step would hold exchanges that rank 0 gathers and others do not
    }
    if device.type == "cpu":
        shared["memory_limit"] = total_memory(device, config.memory_limit) // size
        return [config.model_copy(update=shared | {"device": "cpu"}) for _ in range(size)]
    first = device.index or 0
    count = torch.cuda.device_count()
    if first + size > count:
        raise BackendError(
            "BAD_DEVICE",
            f"expected {size} CUDA devices from cuda:{first} on, one for each rank, got {count} in all; lower"
            " --tensor-parallel-size",
            tensor_parallel_size=size,
            devices=count,
        )
    return [config.model_copy(update=shared | {"device": f"cuda:{first + rank}"}) for rank in range(size)]


def profile_of_all(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """The group's profile: as many blocks as in the rank where fewest fit, and every byte count of that rank times all.

    So the terms of the formula go on fitting together, and a block's bytes are those of the whole block.
    """
    tightest = min(profiles, key=lambda profile: profile.num_blocks)
    size = len(profiles)
    return replace(
        tightest,
        total_bytes=tightest.total_bytes * size,
        weights_bytes=tightest.weights_bytes * size,
        peak_bytes=tightest.peak_bytes * size,
        available_bytes=tightest.available_bytes * size,
        bytes_per_block=tightest.bytes_per_block * size,
        num_host_blocks=min(profile.num_host_blocks for profile in profiles),
    )
