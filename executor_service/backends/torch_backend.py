"""The torch backend: decoders of transformers with full attention, sliding windows, chunks or states, on CPU or CUDA.

Station: built and driven by the gRPC shell through `backends.base.Backend`, always from one thread. It ties the parts
together: `model_loader`, `memory_profiler`, `kv_memory`, `model_runner`; each of them knows only its own concern.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog
import torch

from executor_service.attention_temperature import take_temperature
from executor_service.backends.base import (
    STATE,
    AdapterContent,
    AdapterError,
    Backend,
    BackendError,
    BlockCopies,
    KvGroupSpec,
    MemoryProfile,
    ModelInfo,
    RowFailure,
    StepBatch,
    StepResult,
)
from executor_service.decode_graphs import Recorder, cuda_recorder, graph_sizes
from executor_service.devices import resolve_device
from executor_service.fused_layers import fuse_layers
from executor_service.fused_stack import stack_layers
from executor_service.gguf_conversion import default_cache_dir
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.fp8 import FP8_TYPES, LayerCodecs, layer_codecs
from executor_service.kernels.native_paged import NO_WORKSPACE, NativeKernels
from executor_service.kernels.paged_kernels import PagedKernels
from executor_service.kernels.torch_paged import TorchKernels
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.kv_memory import KvMemory, copy_workspace_bytes
from executor_service.kv_scales import (
    calibrated_scales,
    calibration_passages,
    checkpoint_scales,
    fp8_name,
    quantized_fingerprint,
    require_fp8,
)
from executor_service.layer_groups import LayerGroups, group_layers, layer_sources
from executor_service.layer_ops import TorchOps
from executor_service.lora import LoraAdapters, find_targets
from executor_service.memory_profiler import (
    PeakMeter,
    available_bytes,
    compute_num_blocks,
    host_memory_left,
    release_free_memory,
    require_host_blocks_fit,
    require_one_sequence,
    require_swap_space,
    require_weights_fit,
    resident_bytes,
    total_memory,
    tune_malloc,
)
from executor_service.model_loader import LoadedModel, load_model
from executor_service.model_runner import ModelRunner, ProbeStep, probe, run_probe
from executor_service.native.ops import NativeOps, load_native_ops
from executor_service.packed_linear import pack_linear_layers, warm_up
from executor_service.profile_batch import SCRATCH_BLOCKS, worst_batch
from executor_service.state_layers import install_state_layers
from executor_service.state_layout import StateLayout
from executor_service.tensor_parallel.sharding import ModelShard

MAX_LOGPROBS = 20
# One gather of K and V: large enough for good batches, small enough to be no term of the memory profile.
_GATHER_BYTES = 64 * 1024 * 1024

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TorchBackendConfig:
    """What a `TorchBackend` needs to know.

    Attributes:
        model: a local folder with safetensors, a .gguf file, or a hub id.
        model_name: the name to show; None derives it from `model`.
        device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
        dtype: "auto", "float32", "bfloat16" or "float16". auto is the checkpoint's; for a GGUF it is float32 on CPU and
            bfloat16 on CUDA.
        kv_cache_dtype: the type K/V is stored in: "auto" (the one the model computes in), "fp8_e4m3", which "fp8" is
            too, or "fp8_e5m2".
        max_model_len: the most tokens of a sequence; None takes the model's own.
        block_size: tokens per block.
        state_interval: where layers keep a state, each block is a checkpoint: block_size is multiplied until it is at
            least this, and a block can hold a state.
        gpu_memory_utilization: share of the memory to use, in (0, 1]; on CPU too.
        memory_limit: bytes to count as the device's memory; None is what `memory_profiler.total_memory` finds.
        swap_space: bytes of host memory for blocks that are swapped out, as many whole blocks as fit; on a CPU they
            are part of the device's memory.
        num_blocks_override: this many blocks, whatever fits; None measures.
        num_threads: torch's threads; None leaves torch's choice (OMP_NUM_THREADS).
        enforce_eager: never record decode steps as CUDA graphs; without a GPU, or with kernels that cannot be recorded,
            none is anyway.
        cache_dir: where converted GGUF files and compiled kernels lie; None is `default_cache_dir()`.
        native_kernels: compile kernels for this CPU, where there is a compiler.
        max_loras: adapters at once; memory for as many is reserved.
        max_lora_rank: the largest rank of an adapter.
    """

    model: str
    model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    state_interval: int = 512
    gpu_memory_utilization: float = 0.9
    memory_limit: int | None = None
    swap_space: int = 0
    num_blocks_override: int | None = None
    num_threads: int | None = None
    enforce_eager: bool = False
    cache_dir: Path | None = None
    native_kernels: bool = True
    max_loras: int = 0
    max_lora_rank: int = 16

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        checks = (
            ("block_size", self.block_size, self.block_size >= 1, "at least 1"),
            ("state_interval", self.state_interval, self.state_interval >= 1, "at least 1"),
            ("gpu_memory_utilization", self.gpu_memory_utilization, 0 < self.gpu_memory_utilization <= 1, "in (0, 1]"),
            ("memory_limit", self.memory_limit, self.memory_limit is None or self.memory_limit > 0, "above 0"),
            ("swap_space", self.swap_space, self.swap_space >= 0, "at least 0"),
            ("num_blocks_override", self.num_blocks_override, (self.num_blocks_override or 2) >= 2, "at least 2"),
            ("num_threads", self.num_threads, self.num_threads is None or self.num_threads >= 1, "at least 1"),
            ("max_loras", self.max_loras, self.max_loras >= 0, "at least 0"),
            ("max_lora_rank", self.max_lora_rank, self.max_lora_rank >= 1, "at least 1"),
        )
        for name, value, good, expected in checks:
            if not good:
                raise BackendError("BAD_CONFIG", f"expected {name} {expected}, got {value}", **{name: value})
        fp8_name(self.kv_cache_dtype)


class TorchBackend(Backend):
    """Runs steps with torch.

    Invariants:
        K/V memory is allocated at most once at a time; a new size frees the old one first.
    """

    def __init__(self, config: TorchBackendConfig) -> None:
        self._config = config
        self._device = resolve_device(config.device)
        self._loaded: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._layout: KvLayout | None = None
        self._fp8 = fp8_name(config.kv_cache_dtype)
        self._codecs: list[LayerCodecs] = []
        self._native: NativeOps | None = None
        self._groups: LayerGroups | None = None
        self._limits: AttentionLimits | None = None
        self._kernels: PagedKernels | None = None
        self._memory: KvMemory | None = None
        self._shard: ModelShard | None = None
        self._lora: LoraAdapters | None = None
        self._weights_bytes = 0
        self._graph_sizes: tuple[int, ...] = ()

    def join(self, shard: ModelShard) -> None:
        """Be one rank of several: from `load` on only this part of the model is here. Called before it."""
        self._shard = shard

    def load(self) -> ModelInfo:
        """Load the weights and learn the K/V geometry; see the base class."""
        config = self._config
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if self._device.type == "cpu":
            tune_malloc()
        if self._fp8 is not None:
            require_fp8(self._fp8, self._device)
        if self._device.type == "cpu" and config.native_kernels:
            self._native = load_native_ops(lambda: config.cache_dir or default_cache_dir())
        with PeakMeter(self._device) as meter:
            loaded = load_model(
                config.model,
                device=self._device,
                dtype=config.dtype,
                max_model_len=config.max_model_len,
                name=config.model_name,
                cache_dir=config.cache_dir,
                admit=self._admit_weights,
                take_part=self._shard.take if self._shard else None,
            )
            states, temperature = install_state_layers(loaded.model), take_temperature(loaded.model)
            if states is not None:
                _require_state_support(config, self._shard)
            windows, kv_heads, head_dim = probe(loaded.model, loaded.vocab_size, states)
            if self._shard:
                self._shard.require_kv_heads(loaded.model, kv_heads)
            # A window, or a chunk, as long as any sequence is none.
            groups = group_layers(
                [window if window == STATE or abs(window) < loaded.max_model_len else 0 for window in windows],
                layer_sources(loaded.model.config),
            )
            layout = KvLayout(groups.num_pages, kv_heads, head_dim, config.block_size, loaded.dtype)
            if states is not None:
                layout = _with_states(layout, states.layout, config.state_interval)
            gathered = layout.bytes_per_token_and_layer
            if self._fp8 is not None:
                layout = replace(layout, dtype=FP8_TYPES[self._fp8])
                # Beside what is read, K or V as it is stored, and as indices of two bytes a value.
                gathered += layout.bytes_per_token_and_layer * 3 // 2
            self._limits = AttentionLimits(max(1, _GATHER_BYTES // gathered))
            self._kernels = self._make_kernels(loaded, layout, self._limits)
            if isinstance(self._kernels, NativeKernels):
                self._limits = NO_WORKSPACE
            self._runner = ModelRunner(loaded.model, self._kernels, groups, states, temperature)
            self._groups = groups
            require_swap_space(config.swap_space, layout.bytes_per_block)
            fused = self._fuse_layers(loaded) if states is None else 0
            packed = pack_linear_layers(
                loaded.model, lambda: probe(loaded.model, loaded.vocab_size, states), self._native_for(loaded)
            )
            stacked = self._stack_layers(loaded, groups) if fused else 0
            if config.max_loras:
                self._lora = self._make_lora(loaded)
            if self._fp8 is not None:
                loaded = self._quantized(loaded, layout, self._runner, self._fp8)
            self._loaded, self._layout = loaded, layout
        release_free_memory(self._device)
        self._weights_bytes = self._held_bytes()
        _log.info(
            "weights_loaded",
            dtype=str(loaded.dtype),
            packed_layers=packed,
            fused_layers=fused,
            stacked_layers=stacked,
            held_bytes=self._weights_bytes,
            load_peak_bytes=meter.peak_bytes,
        )
        if config.memory_limit is not None and meter.peak_bytes > config.memory_limit:
            # The formula knows steps, not this: weights lie twice in memory while they are read and laid out.
            _log.warning(
                "load_peak_over_limit", load_peak_bytes=meter.peak_bytes, memory_limit_bytes=config.memory_limit
            )
        return self._info(loaded, layout)

    def profile_memory(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Run the worst step of these limits and count what is left; see the base class."""
        loaded, layout, _ = self._ready()
        self._drop_memory()
        num_host_blocks = self._config.swap_space // layout.bytes_per_block
        self._admit_host_blocks(num_host_blocks * layout.bytes_per_block)
        self._graph_sizes = graph_sizes(max_num_seqs) if self._recorder() is not None else ()
        with PeakMeter(self._device) as meter:
            self._run_worst_step(max_num_batched_tokens, max_num_seqs)
        release_free_memory(self._device)
        total = total_memory(self._device, self._config.memory_limit)
        share = self._config.gpu_memory_utilization
        host_bytes = 0
        if self._device.type == "cpu":
            host_bytes = num_host_blocks * layout.bytes_per_block
            self._require_beside(host_bytes, total, "peak", meter.peak_bytes)
        measured = compute_num_blocks(total, share, meter.peak_bytes, layout.bytes_per_block, host_bytes)
        override = self._config.num_blocks_override
        profile = MemoryProfile(
            total_bytes=total,
            utilization=share,
            weights_bytes=self._weights_bytes,
            peak_bytes=meter.peak_bytes,
            available_bytes=available_bytes(total, share, meter.peak_bytes, host_bytes),
            bytes_per_block=layout.bytes_per_block,
            num_blocks=measured if override is None else override,
            overridden=override is not None,
            num_host_blocks=num_host_blocks,
        )
        self._log_profile(profile, measured, host_bytes, max_num_batched_tokens, max_num_seqs)
        if override is None:
            require_one_sequence(
                measured,
                max_model_len=loaded.max_model_len,
                block_size=layout.block_size,
                bytes_per_block=layout.bytes_per_block,
                total_bytes=total,
                utilization=share,
                weights_bytes=self._weights_bytes,
                peak_bytes=meter.peak_bytes,
                host_bytes=host_bytes,
                blocks_for=lambda num_tokens: sum(
                    group.most_blocks(num_tokens, layout.block_size, max_num_batched_tokens)
                    for group in self._kv_groups(layout)
                ),
            )
        return profile

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate cache and host blocks, or clear those of this size; see the base class."""
        _, layout, _ = self._ready()
        if self._memory is not None and self._memory.has(num_blocks, num_host_blocks):
            self._memory.clear()
            return
        self._drop_memory()
        assert self._kernels is not None
        self._memory = KvMemory(layout, num_blocks, num_host_blocks, self._device, self._kernels, codecs=self._codecs)
        self._record_graphs(self._memory.cache)

    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        """Copy blocks of all layers; see the base class."""
        memory = self._ready_memory()
        try:
            memory.copy(copies)
        except RuntimeError as error:  # what torch raises: out of memory, a failed transfer
            raise BackendError("COPY_FAILED", f"copying blocks failed in torch: {error}") from error

    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step; see the base class."""
        self._ready()
        memory = self._ready_memory()
        try:
            return self._run(batch, memory.cache)
        except RuntimeError as error:  # what torch raises: out of memory, a failed kernel
            raise BackendError("STEP_FAILED", f"step {batch.step_id} failed in torch: {error}") from error

    def follow(self, batch: StepBatch) -> list[RowFailure]:
        """Compute a step as `execute` does, and sample nothing: for a rank that another one samples for.

        Returns:
            Rows whose K/V here is not finite.

        Raises:
            BackendError: the whole step failed.
        """
        _, _, runner = self._ready()
        memory = self._ready_memory()
        try:
            return runner.follow(batch, memory.cache)
        except RuntimeError as error:
            raise BackendError("STEP_FAILED", f"step {batch.step_id} failed in torch: {error}") from error

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits of the sampling rows instead of their tokens, K/V written as in `execute`: for who measures quality.

        Shape:
            returns (S, V) in the model's type.
        """
        _, _, runner = self._ready()
        memory = self._ready_memory()
        if batch.adapter_ids is None:
            return runner.forward(batch, memory.cache)
        with self._ready_lora().step(batch):
            return runner.forward(batch, memory.cache)

    def read_adapter(self, source: str) -> AdapterContent:
        """Read an adapter in peft's format; see the base class."""
        return self._ready_lora().read(source)

    def load_adapter(self, adapter_id: int, content: AdapterContent) -> None:
        """Hook its layers; see the base class."""
        self._ready_lora().add(adapter_id, content)

    def unload_adapter(self, adapter_id: int) -> None:
        """Let go of its matrices; see the base class."""
        self._ready_lora().remove(adapter_id)
        release_free_memory(self._device)

    def close(self) -> None:
        """Give back weights and cache."""
        self._runner = self._loaded = self._lora = None
        self._drop_memory()

    def _make_kernels(self, loaded: LoadedModel, layout: KvLayout, limits: AttentionLimits) -> PagedKernels:
        """What writes K/V and attends; a backend with other kernels makes them here. Raises BackendError."""
        native = self._native_for(loaded)
        if native is not None and self._fp8 is None and NativeKernels.fits(native, layout.dtype, layout.head_dim):
            return NativeKernels(native)
        return TorchKernels(limits)

    def _native_for(self, loaded: LoadedModel) -> NativeOps | None:
        """The compiled kernels, if there are any for the model's type."""
        return self._native if self._native is not None and self._native.takes(loaded.dtype) else None

    def _fuse_layers(self, loaded: LoadedModel) -> int:
        """Replace decoder layers by such of few operations, on a CPU. Returns how many."""
        if self._device.type != "cpu":
            return 0
        native = self._native_for(loaded)
        return fuse_layers(loaded.model, self._probing(loaded), native or TorchOps(), native)

    def _stack_layers(self, loaded: LoadedModel, groups: LayerGroups) -> int:
        """Make one call of fused layers, where the kernels can. Returns how many."""
        if self._native is None or not isinstance(self._kernels, NativeKernels):
            return 0
        return stack_layers(loaded.model, self._probing(loaded), groups, self._native)

    @staticmethod
    def _probing(loaded: LoadedModel) -> Callable[[ProbeStep], object]:
        """Runs the model once, on a few tokens."""
        # From end to end: what a layer computes may depend on how far into a sequence it is.
        far = loaded.max_model_len
        positions = sorted({0, 1, min(2, far - 1), far // 2, far - 1})

        def run(step: ProbeStep) -> object:
            return run_probe(loaded.model, loaded.vocab_size, step, positions)

        return run

    def _ready(self) -> tuple[LoadedModel, KvLayout, ModelRunner]:
        if self._loaded is None or self._layout is None or self._runner is None:
            raise BackendError("NOT_LOADED", "expected load() first, got a backend without a model")
        return self._loaded, self._layout, self._runner

    def _ready_lora(self) -> LoraAdapters:
        if self._lora is None:
            raise AdapterError("ADAPTERS_NOT_SUPPORTED", "expected an executor with --max-loras above 0, got 0")
        return self._lora

    def _make_lora(self, loaded: LoadedModel) -> LoraAdapters:
        """Find the layers that adapters may be for."""
        return LoraAdapters(
            find_targets(loaded.model, lambda: probe(loaded.model, loaded.vocab_size)),
            max_adapters=self._config.max_loras,
            max_rank=self._config.max_lora_rank,
            dtype=loaded.dtype,
            device=self._device,
        )

    def _run(self, batch: StepBatch, cache: PagedKvCache) -> StepResult:
        """Run a step, its rows' adapters at work."""
        _, _, runner = self._ready()
        if batch.adapter_ids is None:
            return runner.run(batch, cache)
        with self._ready_lora().step(batch):
            return runner.run(batch, cache)

    def _ready_memory(self) -> KvMemory:
        if self._memory is None:
            raise BackendError("NO_KV_CACHE", "expected initialize_kv_cache before a step, got no cache")
        return self._memory

    def _drop_memory(self) -> None:
        """Give back cache and host blocks. They are gone even if it raises BackendError: pages may stay locked then."""
        memory, self._memory = self._memory, None
        if self._runner is not None:
            self._runner.use_graphs(None)  # they know the cache by its addresses
        try:
            if memory is not None:
                memory.close()
        except RuntimeError as error:
            raise BackendError("HOST_MEMORY_NOT_FREED", f"{error}; start the executor anew") from error
        finally:
            del memory
            release_free_memory(self._device)

    def _admit_host_blocks(self, size: int) -> None:
        """Refuse, before the worst step is run, host blocks that cannot fit whatever it takes.

        Beside a GPU it takes none of their memory. On a CPU its peak, reckoned with later, is above the weights.
        """
        if self._device.type == "cpu":
            total = total_memory(self._device, self._config.memory_limit)
            self._require_beside(size, total, "weights", self._weights_bytes)
        else:
            left = "what others hold of the machine's memory"
            require_host_blocks_fit(size, left_bytes=host_memory_left(), left=left)

    def _require_beside(self, size: int, total: int, what: str, held: int) -> None:
        """Refuse host blocks that do not fit on a CPU beside what else is held, which is named."""
        share = self._config.gpu_memory_utilization
        left = f"total {total} * utilization {share} - {what} {held}"
        require_host_blocks_fit(size, left_bytes=available_bytes(total, share, held), left=left)

    def _admit_weights(self, weights_bytes: int) -> None:
        """Stop before weights are read that can not fit: the profile would refuse them, if memory lasts until then."""
        if self._shard:
            weights_bytes = self._shard.share(weights_bytes)  # at least: some of them are in every rank
        if self._config.num_blocks_override is None:
            total = total_memory(self._device, self._config.memory_limit)
            require_weights_fit(weights_bytes, total_bytes=total, utilization=self._config.gpu_memory_utilization)

    def _run_worst_step(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        """The step that needs most memory, over a scratch cache of a few blocks."""
        loaded, layout, runner = self._ready()
        assert self._limits is not None
        assert self._groups is not None
        assert self._kernels is not None
        windows = self._groups.windows
        attending = [window for window in windows if window != STATE]
        scratch = PagedKvCache(layout, SCRATCH_BLOCKS, self._device, self._codecs)
        reserved_bytes = self._kernels.reserved_bytes(max_num_seqs, loaded.max_model_len, attending)
        self._record_graphs(scratch)  # what they hold, they hold beside every step
        reserved = torch.ones(reserved_bytes, dtype=torch.uint8, device=self._device)
        warm_up(loaded.model, max_num_batched_tokens)
        token_counts = {max_num_batched_tokens}
        if len(attending) < len(windows):  # many rows of one token take as much memory for states as a few long ones
            token_counts.add(min(max_num_seqs, max_num_batched_tokens))
        for num_tokens in sorted(token_counts):
            batch = worst_batch(
                max_num_batched_tokens=num_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=loaded.max_model_len,
                vocab_size=loaded.vocab_size,
                block_size=layout.block_size,
                max_logprobs=MAX_LOGPROBS,
                limits=self._limits,
                num_groups=len(windows),
            )
            if self._lora is None:
                runner.run(batch, scratch)
            else:
                self._run_with_adapters(self._lora, batch, scratch)
        del reserved
        # Copies run before a step, never beside it.
        torch.ones(copy_workspace_bytes(layout), dtype=torch.uint8, device=self._device)
        runner.use_graphs(None)

    def _recorder(self) -> Recorder | None:
        """What records decode steps; None where they are not, as where layers keep a state: they plan on the host."""
        kernels = self._kernels
        if self._groups is None or STATE in self._groups.windows:
            return None
        if self._config.enforce_eager or self._device.type != "cuda" or kernels is None or not kernels.can_record:
            return None
        return cuda_recorder(self._device)

    def _record_graphs(self, cache: PagedKvCache) -> None:
        """Record decode steps over a cache, if at all; where the model does not allow it, the log says why."""
        loaded, _, runner = self._ready()
        record = self._recorder()
        if record is None or not self._graph_sizes:
            return
        start = time.monotonic()
        sizes, vocab_size, length = self._graph_sizes, loaded.vocab_size, loaded.max_model_len
        try:
            graphs = runner.record_graphs(cache, sizes, vocab_size=vocab_size, max_model_len=length, record=record)
        except BackendError as error:
            # The model is served all the same, kernel by kernel.
            self._graph_sizes = ()
            _log.warning("decode_graphs_not_recorded", why=str(error))
            return
        runner.use_graphs(graphs)
        _log.info("decode_graphs_recorded", sizes=len(sizes), most_rows=sizes[-1], seconds=time.monotonic() - start)

    def _run_with_adapters(self, lora: LoraAdapters, batch: StepBatch, scratch: PagedKvCache) -> None:
        """The worst step with as many and as large adapters as may be, while one more is read.

        It takes most where all tokens are one adapter's, or where those of two lie in turn and are gathered; which of
        them depends on a layer's shape.
        """
        on_cpu = self._device.type == "cpu"
        read = 3 * lora.max_file_bytes if on_cpu else 0  # as bytes, as tensors, and laid out
        being_read = torch.ones(read, dtype=torch.uint8)
        with lora.largest() as ids:
            for most in {1, min(2, len(ids))}:
                adapter_ids = np.arange(batch.num_rows, dtype=np.int32) % np.int32(most) + np.int32(1)
                self._run(replace(batch, adapter_ids=adapter_ids), scratch)
        del being_read

    def _quantized(self, loaded: LoadedModel, layout: KvLayout, runner: ModelRunner, name: str) -> LoadedModel:
        """Find the scales, and with them the codecs and what the model is called from then on."""
        assert self._groups is not None
        scales = checkpoint_scales(loaded.folder, len(self._groups.page_of))
        if scales is None:
            passages = calibration_passages(loaded.tokenizer_files, loaded.vocab_size, loaded.max_model_len)
            of_all_heads = self._shard.largest if self._shard else None
            scales = calibrated_scales(
                runner, layout, name, passages, groups=self._groups, device=self._device, of_all_heads=of_all_heads
            )
        self._codecs = layer_codecs(layout.dtype, scales.keys, scales.values)
        _log.info(
            "kv_scales", kv_cache_dtype=name, source=scales.source, k=_range(scales.keys), v=_range(scales.values)
        )
        return replace(loaded, fingerprint=quantized_fingerprint(loaded.fingerprint, name, scales))

    def _held_bytes(self) -> int:
        """Memory held now: the process's on CPU, the device's on CUDA."""
        if self._device.type == "cpu":
            return resident_bytes()
        return int(torch.cuda.memory_reserved(self._device))

    def _log_profile(
        self, profile: MemoryProfile, measured: int, host_bytes: int, max_num_batched_tokens: int, max_num_seqs: int
    ) -> None:
        as_auto: dict[str, int] = {}
        if self._fp8 is not None:
            # The same formula for K/V in the type that the model computes in: how much fp8 is worth.
            _, layout, runner = self._ready()
            size = replace(layout, dtype=runner.dtype).bytes_per_block
            fit = compute_num_blocks(profile.total_bytes, profile.utilization, profile.peak_bytes, size, host_bytes)
            as_auto = {"auto_bytes_per_block": size, "auto_num_blocks": fit}
        _log.info(
            "memory_profile",
            device=str(self._device),
            kv_cache_dtype=self._kv_cache_dtype(),
            total_bytes=profile.total_bytes,
            utilization=profile.utilization,
            weights_bytes=profile.weights_bytes,
            peak_bytes=profile.peak_bytes,
            available_bytes=profile.available_bytes,
            bytes_per_block=profile.bytes_per_block,
            host_bytes=host_bytes,
            num_host_blocks=profile.num_host_blocks,
            block_size=self._layout.block_size if self._layout is not None else None,
            measured_num_blocks=measured,
            num_blocks=profile.num_blocks,
            overridden=profile.overridden,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            **as_auto,
        )

    def _kv_cache_dtype(self) -> str:
        assert self._layout is not None
        return self._fp8 or str(self._layout.dtype).removeprefix("torch.")

    def _kv_groups(self, layout: KvLayout) -> tuple[KvGroupSpec, ...]:
        groups = self._groups
        assert groups is not None
        page_bytes = layout.bytes_per_block // layout.num_layers
        return tuple(
            KvGroupSpec(
                num_layers=groups.num_layers(index),
                num_kv_heads=layout.num_kv_heads if window != STATE else 0,
                head_dim=layout.head_dim if window != STATE else 0,
                bytes_per_block=groups.num_layers(index) * page_bytes,
                window=window,
            )
            for index, window in enumerate(groups.windows)
        )

    def _info(self, loaded: LoadedModel, layout: KvLayout) -> ModelInfo:
        dtype = str(loaded.dtype).removeprefix("torch.")
        return ModelInfo(
            model_name=loaded.name,
            model_fingerprint=loaded.fingerprint,
            device=str(self._device),
            dtype=dtype,
            kv_cache_dtype=self._kv_cache_dtype(),
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            block_size=layout.block_size,
            kv_groups=self._kv_groups(layout),
            max_logprobs=min(MAX_LOGPROBS, loaded.vocab_size),
            max_adapters=self._config.max_loras,
            tokenizer_files=loaded.tokenizer_files,
        )


def _with_states(layout: KvLayout, state: StateLayout, interval: int) -> KvLayout:
    """Enlarge blocks until they are a state's interval, and each page holds a state.

    Where no layer attends, pages are as those of one head of whatever size it takes.
    """
    least = layout.block_size
    if layout.num_kv_heads:
        interval = max(interval, state.tokens_per_block(layout.bytes_per_token_and_layer))
    block_size = -(-interval // least) * least
    if layout.num_kv_heads:
        return replace(layout, block_size=block_size)
    head_dim = state.head_dim(block_size, layout.dtype.itemsize)
    return replace(layout, num_kv_heads=1, head_dim=head_dim, block_size=block_size)


def _require_state_support(config: TorchBackendConfig, shard: ModelShard | None) -> None:
    """Refuse what layers that keep a state do not do."""
    if fp8_name(config.kv_cache_dtype) is not None:
        raise BackendError(
            "KV_CACHE_DTYPE_NOT_SUPPORTED",
            "expected a model without layers that keep a state for --kv-cache-dtype"
            f" {config.kv_cache_dtype}, got one with them. Use --kv-cache-dtype auto.",
            kv_cache_dtype=config.kv_cache_dtype,
        )
    refused = {"--max-loras": config.max_loras, "--tensor-parallel-size": int(shard is not None)}
    for flag in (flag for flag, value in refused.items() if value):
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected a model without layers that keep a state for {flag}, got one with them; leave the flag out",
            flag=flag,
        )


def _range(scales: Sequence[float]) -> str:
    """The least and the largest scale."""
    return f"{min(scales):g} to {max(scales):g}"
