"""The torch backend: decoders of transformers with full attention, sliding windows, chunks or states, on CPU or CUDA.

Station: built and driven by the gRPC shell through `backends.base.Backend`, always from one thread. Here are its calls,
in the order they come: load, profile, cache, steps, adapters. What they take is beside it:

    torch_config    what it is told
    torch_loading   from a checkpoint to a model that runs steps
    torch_model     that model, which steps, profile and adapters work with
    torch_memory    what is refused for want of memory, and how many blocks fit
    torch_graphs    decode steps recorded as CUDA graphs
"""

from __future__ import annotations

from collections.abc import Sequence

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
from executor_service.backends.torch_config import TorchBackendConfig
from executor_service.backends.torch_graphs import StepRecording
from executor_service.backends.torch_loading import prepare_model
from executor_service.backends.torch_memory import MemoryBudget
from executor_service.backends.torch_model import PagedModel
from executor_service.devices import make_current, resolve_device
from executor_service.gguf_conversion import default_cache_dir
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.native_paged import NativeKernels
from executor_service.kernels.paged_kernels import PagedKernels
from executor_service.kernels.torch_paged import TorchKernels
from executor_service.kv_memory import KvMemory
from executor_service.kv_scales import require_fp8
from executor_service.layer_groups import KvShape
from executor_service.memory_profiler import PeakMeter, release_free_memory, tune_malloc
from executor_service.model_loader import LoadedModel
from executor_service.native.ops import NativeOps, load_native_ops
from executor_service.tensor_parallel.adapter_parts import AdapterPart
from executor_service.tensor_parallel.sharding import ModelShard

__all__ = ["TorchBackend", "TorchBackendConfig"]

# What torch raises (out of memory, a failed kernel), and the compiled kernels of what does not fit them.
_FAILURES = (RuntimeError, ValueError)


class TorchBackend(Backend):
    """Runs steps with torch.

    Invariants:
        K/V memory is allocated at most once at a time; a new size frees the old one first.
    """

    def __init__(self, config: TorchBackendConfig) -> None:
        self._config = config
        self._device = resolve_device(config.device)
        self._budget = MemoryBudget(config, self._device)
        self._recording = StepRecording(self._device, enforce_eager=config.enforce_eager)
        self._shard: ModelShard | None = None
        self._model: PagedModel | None = None
        self._memory: KvMemory | None = None

    def join(self, shard: ModelShard) -> None:
        """Be one rank of several: from `load` on only this part of the model is here. Called before it."""
        self._shard = shard

    def load(self) -> ModelInfo:
        """Load the weights and learn the K/V geometry; see the base class."""
        config, device = self._config, self._device
        make_current(device)  # of this thread, in which all the other calls come, too
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if device.type == "cpu":
            tune_malloc()
        if config.fp8 is not None:
            require_fp8(config.fp8, device)
        native = None
        if device.type == "cpu" and config.native_kernels:
            native = load_native_ops(lambda: config.cache_dir or default_cache_dir())
        with PeakMeter(device) as meter:
            model = prepare_model(
                config,
                device,
                admit=self._admit_weights,
                make_kernels=self._make_kernels,
                native=native,
                shard=self._shard,
            )
        self._budget.note_loaded(model, meter.peak_bytes)
        self._model = model
        return model.info(device, config.max_loras)

    def profile_memory(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Run the worst step of these limits and count what is left; see the base class."""
        model = self._ready()
        self._drop_memory()
        return self._budget.profile(model, self._recording, max_num_batched_tokens, max_num_seqs)

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate cache and host blocks, or clear those of this size; see the base class."""
        model = self._ready()
        if self._memory is not None and self._memory.has(num_blocks, num_host_blocks):
            self._memory.clear()
            return
        self._drop_memory()
        self._memory = KvMemory(
            model.layout, num_blocks, num_host_blocks, self._device, model.kernels, codecs=model.codecs
        )
        self._recording.record(model, self._memory.cache)

    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        """Copy blocks of all layers; see the base class."""
        memory = self._ready_memory()
        try:
            memory.copy(copies)
        except RuntimeError as error:  # what torch raises: out of memory, a failed transfer
            raise BackendError("COPY_FAILED", f"copying blocks failed in torch: {error}") from error

    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step; see the base class."""
        model = self._ready()
        memory = self._ready_memory()
        memory.note_step()
        try:
            return model.run(batch, memory.cache)
        except _FAILURES as error:
            raise BackendError("STEP_FAILED", f"step {batch.step_id} failed in torch: {error}") from error

    def follow(self, batch: StepBatch) -> list[RowFailure]:
        """Compute a step as `execute` does, and sample nothing: for a rank that another one samples for.

        Returns:
            Rows whose K/V here is not finite.

        Raises:
            BackendError: the whole step failed.
        """
        model = self._ready()
        memory = self._ready_memory()
        try:
            return model.follow(batch, memory.cache)
        except _FAILURES as error:
            raise BackendError("STEP_FAILED", f"step {batch.step_id} failed in torch: {error}") from error

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits of the sampling rows instead of their tokens, K/V written as in `execute`: for who measures quality.

        Shape:
            returns (S, V) in the model's type.
        """
        model = self._ready()
        return model.forward(batch, self._ready_memory().cache)

    def read_adapter(self, source: str) -> AdapterContent:
        """Read an adapter in peft's format; see the base class."""
        return self._ready().require_adapters().read(source)

    def read_adapter_parts(self, source: str) -> tuple[AdapterContent, list[AdapterPart]]:
        """Read an adapter for all ranks: what `load_adapter` takes here, and `load_adapter_part` in each of the others.

        Raises:
            AdapterError: as `read_adapter`.
        """
        return self._ready().require_adapters().read_parts(source)

    def load_adapter(self, adapter_id: int, content: AdapterContent) -> None:
        """Hook its layers; see the base class."""
        matrices = content.weights
        assert isinstance(matrices, dict), "what read_adapter() returned"
        self._ready().require_adapters().add(adapter_id, matrices)

    def load_adapter_part(self, adapter_id: int, part: AdapterPart) -> None:
        """Hook the layers of an adapter that rank 0 has read; this rank's part of it."""
        adapters = self._ready().require_adapters()
        adapters.add(adapter_id, adapters.laid_out(part.matrices()))

    def unload_adapter(self, adapter_id: int) -> None:
        """Let go of its matrices; see the base class."""
        self._ready().require_adapters().remove(adapter_id)
        release_free_memory(self._device)

    def close(self) -> None:
        """Give back weights and cache."""
        self._model = None
        self._drop_memory()

    def _make_kernels(
        self,
        loaded: LoadedModel,
        kv_dtype: torch.dtype,
        shapes: Sequence[KvShape],
        limits: AttentionLimits,
        native: NativeOps | None,
    ) -> PagedKernels:
        """See `torch_loading.MakeKernels`; a backend with other kernels makes them here. Raises BackendError."""
        if native is not None and NativeKernels.fits(native, kv_dtype, *(shape.head_dim for shape in shapes)):
            return NativeKernels(native)
        return TorchKernels(limits)

    def _admit_weights(self, weights_bytes: int) -> None:
        """Ask before the weights are read whether they fit; a rank reads its share of them."""
        # At least: some of them are in every rank.
        self._budget.admit_weights(self._shard.share(weights_bytes) if self._shard else weights_bytes)

    def _ready(self) -> PagedModel:
        if self._model is None:
            raise BackendError("NOT_LOADED", "expected load() first, got a backend without a model")
        return self._model

    def _ready_memory(self) -> KvMemory:
        if self._memory is None:
            raise BackendError("NO_KV_CACHE", "expected initialize_kv_cache before a step, got no cache")
        return self._memory

    def _drop_memory(self) -> None:
        """Give back cache and host blocks. They are gone even if it raises BackendError: pages may stay locked then."""
        memory, self._memory = self._memory, None
        if self._model is not None:
            self._recording.drop(self._model)
        try:
            if memory is not None:
                memory.close()
        except RuntimeError as error:
            raise BackendError("HOST_MEMORY_NOT_FREED", f"{error}; start the executor anew") from error
        finally:
            del memory
            release_free_memory(self._device)
