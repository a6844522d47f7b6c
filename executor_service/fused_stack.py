"""All fused layers of a model as one call of a compiled kernel, in steps in which nobody looks in between.

Station: `backends.torch_loading` calls `stack_layers` once layers are fused and packed; from then on the first
`FusedLayer` of a step computes all of them here, and the others hand its result on.

Why: called one by one, 30 layers are 300 calls and 210 times that threads sleep and are woken; together that takes
longer than reading the weights of a small model. Results are the same to the last bit, which is tried before it is
relied on.

The layers run one by one again as long as a forward hook hangs on a projection of any of them (LoRA), and where K/V are
stored in another type than the model's. Hooks on other modules of a layer are not called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import structlog
import torch
from torch import nn

from executor_service.backends.base import GroupTables
from executor_service.fused_layers import FusedLayer
from executor_service.huge_pages import advise_huge_pages
from executor_service.kernels.native_paged import NativeKernels, NativeStep
from executor_service.kernels.paged_kernels import GroupStep
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.layer_groups import LayerGroups
from executor_service.model_runner import PagedStep, ProbeStep
from executor_service.native.ops import Columns, NativeOps
from executor_service.packed_linear import PackedLinear

__all__ = ["FusedStack", "stack_layers"]

_log = structlog.get_logger(__name__)

_TRIED_TOKENS = 20
_TRIED_BLOCK = 16


class FusedStack:
    """The layers of one model.

    Args:
        layers: in the order they run in; their products are packed.
        native: the kernels.

    Invariants:
        Packed weights, norms and biases stay where they are: their addresses are written down here.
    """

    def __init__(self, layers: Sequence[FusedLayer], native: NativeOps) -> None:
        self._layers = list(layers)
        self._native = native
        self._sizes: Columns = np.array(_sizes(layers[0]), dtype=np.int64)
        self._table: Columns = np.stack([_fields(layer) for layer in layers])
        self._indices = [layer.self_attn.layer_idx for layer in layers]
        self._watched = [module for layer in layers for module in layer.projections()]
        self._running: PagedStep | None = None
        self._workspace = torch.empty(0, dtype=torch.bfloat16)

    def take(
        self,
        layer: FusedLayer,
        states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: PagedStep | ProbeStep,
    ) -> bool:
        """Whether this layer's work is done here; the first layer asks before any is.

        Shape:
            states: (1, T, E); they become what the last layer returns, for the tokens that the step wants.
        """
        if layer is self._layers[0]:
            self._running = None
            if isinstance(step, PagedStep) and self._can_run(states, step):
                self._run(states, position_embeddings, step)
                self._running = step
        taken = self._running is not None and self._running is step
        if layer is self._layers[-1]:
            self._running = None
        return taken

    def _can_run(self, states: torch.Tensor, step: PagedStep) -> bool:
        return (
            step.temperature is None
            and not step.cache.layout.is_quantized
            and states.is_contiguous()
            and all(isinstance(attention, NativeStep) for attention in step.attention.values())
            and not any(module._forward_hooks or module._forward_pre_hooks for module in self._watched)
        )

    def _run(
        self, states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: PagedStep
    ) -> None:
        cos, sin = position_embeddings
        places = {group: place for place, group in enumerate(step.attention)}
        pages = [
            (
                step.cache.keys[step.groups.page_of[layer]].data_ptr(),
                step.cache.values[step.groups.page_of[layer]].data_ptr(),
                places[step.groups.group_of[layer]],
            )
            for layer in self._indices
        ]
        groups = [_group(attention) for attention in step.attention.values()]
        needed = self._native.layers_workspace(self._sizes, states.shape[1])
        if needed > len(self._workspace):
            # Kept from step to step: memory that is new in each has to be cleared by the kernel each time.
            self._workspace = torch.empty(0, dtype=torch.bfloat16)
            self._workspace = torch.empty(needed, dtype=torch.bfloat16)
            advise_huge_pages(self._workspace)
        self._native.run_layers(
            states,
            cos.contiguous(),
            sin.contiguous(),
            sizes=self._sizes,
            layers=self._table,
            pages=np.array(pages, dtype=np.int64),
            groups=np.array(groups, dtype=np.int64),
            workspace=self._workspace,
            wanted=None if step.wanted is None else np.unique(step.wanted.numpy()),
        )


def _group(attention: Any) -> tuple[int, ...]:
    """The fields of `Group` in native/layers.h."""
    assert isinstance(attention, NativeStep)
    rows = attention.rows
    return (*rows.addresses, attention.slots.data_ptr(), rows.block_size, rows.window, rows.num_rows)


def _fields(layer: FusedLayer) -> Columns:
    """The fields of `Layer` in native/layers.h."""
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    tensors: list[torch.Tensor | None] = [layer.input_layernorm.weight]
    tensors += _product(attention.qkv_proj.product)
    tensors += [None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm)]
    tensors += _product(attention.o_proj)
    tensors.append(layer.post_attention_layernorm.weight)
    tensors += [*_product(mlp.gate_up_proj.product), *_product(mlp.down_proj)]
    first, second = layer.eps
    numbers = np.array([first, *attention.head_eps, second, attention.scaling], dtype=np.float64)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return np.concatenate([np.array(addresses, dtype=np.int64), numbers.view(np.int64)])


def _product(linear: PackedLinear) -> list[torch.Tensor | None]:
    return [linear.packed, linear.bias]


@torch.inference_mode()
def stack_layers(model: nn.Module, run: Callable[[ProbeStep], object], groups: LayerGroups, native: NativeOps) -> int:
    """Make one call of a model's fused layers, all or none.

    Args:
        model: its layers learn of the stack.
        run: runs it once, on a few tokens.
        groups: which layers share a block table.
        native: the kernels.

    Returns:
        How many layers it is; 0 where the model is not of fused layers alone, something happens between them, or the
        kernel takes none of their kind.
    """
    layers = [module for module in model.modules() if isinstance(module, FusedLayer)]
    layers.sort(key=lambda layer: layer.self_attn.layer_idx)
    if not layers or len(layers) != len(groups.group_of) or not all(_is_taken(layer, layers[0]) for layer in layers):
        return 0
    if not _are_in_line(layers, run):
        return 0
    stack = FusedStack(layers, native)
    if not _same(stack, layers, groups, native):
        _log.warning("layers_not_stacked", why="together they give other results than one by one")
        return 0
    for layer in layers:
        layer.stack = stack
    return len(layers)


def _is_taken(layer: FusedLayer, first: FusedLayer) -> bool:
    """Whether the kernel knows such a layer, and whether it is of the first one's sizes."""
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    products = [attention.qkv_proj.product, attention.o_proj, mlp.gate_up_proj.product, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm]
    return (
        all(isinstance(product, PackedLinear) and product.is_native for product in products)
        and all(norm is None or _is_plain(norm.weight) for norm in norms)
        and (attention.q_norm is None) == (attention.k_norm is None)
        and None not in attention.head_eps
        and _sizes(layer) == _sizes(first)
    )


def _is_plain(weight: Any) -> bool:
    return bool(weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.dim() == 1)


def _sizes(layer: FusedLayer) -> tuple[int, ...]:
    attention = layer.self_attn
    return attention.width, attention.heads, attention.kv_heads, attention.dim, layer.mlp.inner


def _are_in_line(layers: Sequence[FusedLayer], run: Callable[[ProbeStep], object]) -> bool:
    """Whether in a run all layers have the same position embeddings and each begins with what the last one returned."""
    entered: list[tuple[torch.Tensor, Any]] = []
    left: list[torch.Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
        entered.append((args[0].clone(), arguments.get("position_embeddings")))

    def leave(_: nn.Module, __: tuple[Any, ...], result: torch.Tensor) -> None:
        left.append(result.clone())

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        run(ProbeStep())
    finally:
        for handle in handles:
            handle.remove()
    if len(entered) != len(layers) or any(embeddings is None for _, embeddings in entered):
        return False
    first = entered[0][1]
    return all(all(map(torch.equal, first, embeddings)) for _, embeddings in entered) and all(
        torch.equal(result, states) for result, (states, _) in zip(left[:-1], entered[1:], strict=True)
    )


def _same(stack: FusedStack, layers: Sequence[FusedLayer], groups: LayerGroups, native: NativeOps) -> bool:
    """Whether the stack and its layers one by one give the same, on a row that begins and one that goes on.

    So they do for all tokens, and where only the last of each row are wanted.
    """
    attention = layers[0].self_attn
    layout = KvLayout(groups.num_pages, attention.kv_heads, attention.dim, _TRIED_BLOCK, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn((1, _TRIED_TOKENS, attention.width), generator=generator).bfloat16()
    angles = torch.rand((1, _TRIED_TOKENS, attention.dim), generator=generator)
    embeddings = angles.cos().bfloat16(), angles.sin().bfloat16()
    last = torch.tensor([0, _TRIED_TOKENS - 1])  # of each row
    results = []
    for together, wanted in ((False, None), (True, None), (True, last)):
        cache = PagedKvCache(layout, 4, torch.device("cpu"))
        step = PagedStep(_tried_step(groups, native), cache, groups, wanted=wanted)
        out = states.clone()
        for layer in layers:
            if not together:
                out = layer(out, position_embeddings=embeddings, paged_step=step)
            elif not stack.take(layer, out, embeddings, step):
                return False
        results.append((out, cache.layers))
    (expected, kept), *others = results
    return (
        torch.equal(others[0][0], expected)
        and torch.equal(others[1][0][:, last], expected[:, last])
        and all(all(map(torch.equal, layers_of, kept)) for _, layers_of in others)
    )


def _tried_step(groups: LayerGroups, native: NativeOps) -> dict[int, NativeStep]:
    """A row of one token after three, in block 1, and one of the others' number, in blocks 2 and 3."""
    rest = _TRIED_TOKENS - 1
    slots = np.array([_TRIED_BLOCK + 3, *(2 * _TRIED_BLOCK + np.arange(rest))], dtype=np.int64)
    tables = GroupTables(
        np.array([0, 1, 3], np.int32), np.array([1, 2, 3], np.int32), np.array([4, rest - _TRIED_BLOCK], np.int32)
    )
    steps = NativeKernels(native).plan(
        np.array([0, 1, _TRIED_TOKENS], np.int32),
        np.array([4, rest], np.int32),
        [GroupStep(window, tables, slots, _TRIED_BLOCK) for window in groups.windows],
        device=torch.device("cpu"),
    )
    return dict(enumerate(steps))
