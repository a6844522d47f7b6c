"""From a checkpoint to a `PagedModel`: what `TorchBackend.load` does, in order, in `prepare_model`.

Station: called once by `torch_backend`. It reads the weights (`model_loader`), looks at one forward pass
(`model_runner.probe`), lays out the K/V, chooses kernels, replaces modules by faster ones that compute the same
(`fused_layers`, `packed_linear`, `fused_stack`), finds the layers that adapters may be for (`lora`), and the scales of
K/V in eight bits (`kv_scales`). How much memory there is it leaves to `torch_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog
import torch

from executor_service.attention_temperature import take_temperature
from executor_service.backends.base import STATE, BackendError
from executor_service.backends.torch_config import TorchBackendConfig
from executor_service.backends.torch_model import PagedModel
from executor_service.fused_layers import fuse_layers
from executor_service.fused_stack import stack_layers
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.fp8 import FP8_TYPES, LayerCodecs, layer_codecs
from executor_service.kernels.native_paged import NO_WORKSPACE, NativeKernels
from executor_service.kernels.paged_kernels import PagedKernels
from executor_service.kv_cache import KvLayout
from executor_service.kv_scales import (
    KvScales,
    calibrated_scales,
    calibration_passages,
    checkpoint_scales,
    quantized_fingerprint,
)
from executor_service.layer_groups import KvShape, LayerGroups, group_layers, layer_sources, page_tokens
from executor_service.layer_ops import TorchOps
from executor_service.lora import LoraAdapters, find_targets
from executor_service.memory_profiler import require_swap_space
from executor_service.model_loader import LoadedModel, load_model
from executor_service.model_runner import ModelRunner, ProbeStep, probe, run_probe
from executor_service.native.ops import NativeOps
from executor_service.packed_linear import pack_linear_layers
from executor_service.state_layers import StateLayers, install_state_layers
from executor_service.state_layout import StateLayout
from executor_service.tensor_parallel.sharding import ModelShard

__all__ = ["MakeKernels", "prepare_model"]

# One gather of K and V: large enough for good batches, small enough to be no term of the memory profile.
_GATHER_BYTES = 64 * 1024 * 1024

_log = structlog.get_logger(__name__)

# What writes K/V and attends, for a model whose K/V lies so: (model, type that K/V is stored in, shapes of it that
# layers have, none where none attends, limits of a gather, compiled kernels for the model's type if there are any).
# Raises BackendError.
MakeKernels = Callable[[LoadedModel, torch.dtype, Sequence[KvShape], AttentionLimits, NativeOps | None], PagedKernels]


def prepare_model(
    config: TorchBackendConfig,
    device: torch.device,
    *,
    admit: Callable[[int], None],
    make_kernels: MakeKernels,
    native: NativeOps | None,
    shard: ModelShard | None,
) -> PagedModel:
    """Load a model and make it one that runs steps over a paged cache.

    Args:
        config: the backend's settings.
        device: where it goes.
        admit: told how many bytes the weights will take before they are read; it raises what ends the load.
        make_kernels: see `MakeKernels`.
        native: compiled kernels, where there are any.
        shard: this rank's part of the model; None is all of it.

    Raises:
        BackendError: it cannot be loaded, or not be run so.
    """
    loaded = load_model(
        config.model,
        device=device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        name=config.model_name,
        cache_dir=config.cache_dir,
        admit=admit,
        take_part=shard.take if shard else None,
    )
    if native is not None and not native.takes(loaded.dtype):
        native = None
    states, temperature = install_state_layers(loaded.model), take_temperature(loaded.model)
    windows, of_layers = probe(loaded.model, loaded.vocab_size, states)
    shapes = sorted({shape for shape in of_layers if shape.width}, key=lambda shape: (shape.width, shape), reverse=True)
    if config.fp8 is not None and not shapes:
        raise BackendError(
            "KV_CACHE_DTYPE_NOT_SUPPORTED",
            f"expected a model with layers that attend for --kv-cache-dtype {config.kv_cache_dtype}, got one whose"
            " layers keep states only, and those are stored as they are computed. Use --kv-cache-dtype auto.",
            kv_cache_dtype=config.kv_cache_dtype,
        )
    if shard:
        shard.require_kv_heads(loaded.model, [shape.num_kv_heads for shape in shapes])
    # A window, or a chunk, as long as any sequence is none.
    groups = group_layers(
        [window if window == STATE or abs(window) < loaded.max_model_len else 0 for window in windows],
        layer_sources(loaded.model.config),
        of_layers,
    )
    heads, head_dim = shapes[0] if shapes else KvShape(0, 0)
    block_size = page_tokens(shapes, config.block_size)
    as_computed = KvLayout(groups.num_pages, heads, head_dim, block_size, loaded.dtype)
    layout = as_computed if config.fp8 is None else replace(as_computed, dtype=FP8_TYPES[config.fp8])
    if states is not None:  # the smaller K/V are, the more tokens it takes for a page that holds a state
        as_computed, layout = (_with_states(one, states.layout, config.state_interval) for one in (as_computed, layout))
    limits = _gather_limits(as_computed, layout)
    kernels = make_kernels(loaded, layout.dtype, shapes, limits, native)
    if isinstance(kernels, NativeKernels):
        limits = NO_WORKSPACE
    runner = ModelRunner(loaded.model, kernels, groups, states, temperature)
    require_swap_space(config.swap_space, layout.bytes_per_block)
    run = _probing(loaded)
    fused = 0
    if device.type == "cpu" and states is None:
        fused = fuse_layers(loaded.model, run, native or TorchOps(), native)
    packed = pack_linear_layers(loaded.model, lambda: probe(loaded.model, loaded.vocab_size, states), native)
    stacked = 0
    # Last of what changes weights: a stack knows them by their addresses.
    if fused and native is not None and isinstance(kernels, NativeKernels) and len(shapes) == 1:
        stacked = stack_layers(loaded.model, run, groups, native)
    adapters = _make_adapters(config, loaded, states, device, shard) if config.max_loras else None
    codecs: Sequence[LayerCodecs] = ()
    if config.fp8 is not None:
        scales = _find_scales(config.fp8, loaded, layout, runner, groups=groups, device=device, shard=shard)
        codecs = layer_codecs(layout.dtype, scales.keys, scales.values)
        loaded = replace(loaded, fingerprint=quantized_fingerprint(loaded.fingerprint, config.fp8, scales))
    return PagedModel(
        loaded=loaded,
        layout=layout,
        as_computed=as_computed,
        groups=groups,
        kv_cache_dtype=config.fp8 or str(layout.dtype).removeprefix("torch."),
        kernels=kernels,
        limits=limits,
        runner=runner,
        codecs=codecs,
        adapters=adapters,
        fused_layers=fused,
        packed_layers=packed,
        stacked_layers=stacked,
    )


def _gather_limits(computed: KvLayout, stored: KvLayout) -> AttentionLimits:
    """How much kernels gather at once, of K/V that is stored so and computed with so."""
    gathered = computed.bytes_per_token_and_layer
    if stored.dtype != computed.dtype:
        # Beside what is read, K or V as it is stored, and as indices of two bytes a value.
        gathered += stored.bytes_per_token_and_layer * 3 // 2
    return AttentionLimits(max(1, _GATHER_BYTES // gathered))


def _probing(loaded: LoadedModel) -> Callable[[ProbeStep], object]:
    """Runs the model once, on a few tokens."""
    # From end to end: what a layer computes may depend on how far into a sequence it is.
    far = loaded.max_model_len
    positions = sorted({0, 1, min(2, far - 1), far // 2, far - 1})

    def run(step: ProbeStep) -> object:
        return run_probe(loaded.model, loaded.vocab_size, step, positions)

    return run


def _make_adapters(
    config: TorchBackendConfig,
    loaded: LoadedModel,
    states: StateLayers | None,
    device: torch.device,
    shard: ModelShard | None,
) -> LoraAdapters:
    """Find the layers that adapters may be for."""
    adapters = LoraAdapters(
        find_targets(
            loaded.model, lambda: probe(loaded.model, loaded.vocab_size, states), shard.cuts if shard else None
        ),
        max_adapters=config.max_loras,
        max_rank=config.max_lora_rank,
        dtype=loaded.dtype,
        device=device,
        rank=shard.rank if shard else 0,
        size=shard.size if shard else 1,
    )
    if states is not None:
        states.tell(adapters.while_rows)
    return adapters


def _find_scales(
    name: str,
    loaded: LoadedModel,
    layout: KvLayout,
    runner: ModelRunner,
    *,
    groups: LayerGroups,
    device: torch.device,
    shard: ModelShard | None,
) -> KvScales:
    """Each layer's scales: the checkpoint's where it has them, else measured."""
    scales = checkpoint_scales(loaded.folder, groups)
    if scales is None:
        scales = calibrated_scales(
            runner,
            layout,
            name,
            calibration_passages(loaded.tokenizer_files, loaded.vocab_size, loaded.max_model_len),
            groups=groups,
            device=device,
            of_all_heads=shard.largest if shard else None,
        )
    k, v = (_range([column[layer] for layer in groups.attending]) for column in (scales.keys, scales.values))
    _log.info("kv_scales", kv_cache_dtype=name, source=scales.source, k=k, v=v)
    return scales


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


def _range(scales: Sequence[float]) -> str:
    """The least and the largest scale."""
    return f"{min(scales):g} to {max(scales):g}"
