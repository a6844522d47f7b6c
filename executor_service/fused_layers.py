"""Decoder layers of few operations in place of transformers' own, where they are shown to compute the same.

Station: `backends.torch_loading` calls `fuse_layers` on a CPU, before linear layers are packed. It knows the shape that
most decoders since Llama have (the modules' names are what it goes by), and takes nothing on trust: the model runs
once, and a layer is replaced only if its stand-in asks the same of attention and gives the same result. A model of
another shape stays as it is.

What it saves: on a CPU a decode step of a small model is some 1,200 operations, each of them a few microseconds around
little work. Here a layer is 8: projections of one input are one product (`packed_linear`), and what lies between
products and attention is one operation each (`layer_ops`).

A projection keeps its name. Beside `qkv_proj` there are `q_proj`, `k_proj` and `v_proj`, each a `ProjectionSlice`: what
wants to see or change the output of one of them hangs a forward hook on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from executor_service.layer_ops import LayerOps
from executor_service.model_runner import AttentionCall, PagedStep, ProbeStep, paged_attention_interface
from executor_service.native.ops import NativeOps
from executor_service.packed_linear import PackedLinear, can_pack, packing_works

__all__ = ["FusedLayer", "LayerStack", "ProjectionSlice", "fuse_layers"]

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_QKV = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_GATE_UP = ("gate_proj", "up_proj")
_ALLOWED_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Difference of a layer's result over what the layer adds to its input, both as lengths."""


class ProjectionSlice(nn.Module):
    """One of several projections that are computed together, under its own name: the place for forward hooks.

    Called with the input and its own part of the output, a view, it returns the part: a hook sees what it would see of
    the projection alone, and changes the common output by changing its own in place.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def forward(self, states: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Shape: states (..., in_features), part (..., out_features)."""
        del states
        return part


class _Projections(nn.Module):
    """Several projections of one input as one product; `parts` are children of the module that has it."""

    def __init__(self, linears: Sequence[nn.Linear], native: NativeOps | None) -> None:
        super().__init__()
        self.product = PackedLinear(*linears, native=native)
        self.parts = tuple(ProjectionSlice(linear) for linear in linears)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Shape: (..., in_features) to (..., all out_features)."""
        out: torch.Tensor = self.product(states)
        start = 0
        for part in self.parts:
            if part._forward_hooks or part._forward_pre_hooks:
                part(states, out[..., start : start + part.out_features])
            start += part.out_features
        return out


class _FusedAttention(nn.Module):
    """q, k and v as one product, their norms if there are any, rotary positions, attention, output projection."""

    def __init__(self, attention: nn.Module, call: AttentionCall, ops: LayerOps, native: NativeOps | None) -> None:
        super().__init__()
        self.layer_idx: int = attention.layer_idx  # type: ignore[assignment]
        self.heads, self.dim = call.query.shape[1], call.query.shape[3]
        self.kv_heads = call.key.shape[1]
        self.scaling, self.window = call.scaling, call.window
        self.qkv_proj = _Projections([getattr(attention, name) for name in _QKV], native)
        for name, part in zip(_QKV, self.qkv_proj.parts, strict=True):
            self.add_module(name, part)
        self.q_norm, self.k_norm = (getattr(attention, name, None) for name in _HEAD_NORMS)
        self.head_eps = [0.0 if norm is None else _eps_of(norm) for norm in (self.q_norm, self.k_norm)]
        self.width = self.qkv_proj.product.in_features
        self.o_proj = attention.o_proj
        self._ops = ops

    def forward(
        self,
        states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged_step: PagedStep | ProbeStep,
    ) -> torch.Tensor:
        """Shape: (1, T, E) to the same."""
        cos, sin = position_embeddings
        heads = self.qkv_proj(states)[0].view(states.shape[1], -1, self.dim)
        split = self.heads + self.kv_heads
        query, key, value = heads[:, : self.heads], heads[:, self.heads : split], heads[:, split:]
        if self.q_norm is None:
            self._ops.rotate(heads[:, :split], cos, sin)
        else:
            query = self._head_norm(query, 0)
            key = self._head_norm(key, 1)
            self._ops.rotate(query, cos, sin)
            self._ops.rotate(key, cos, sin)
        if isinstance(paged_step, PagedStep):
            out = paged_step.attend(self.layer_idx, query, key, value, self.scaling).unsqueeze(0)
        else:
            of_heads = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
            window = self.window or None
            out, _ = paged_attention_interface(
                self, *of_heads, None, scaling=self.scaling, paged_step=paged_step, sliding_window=window
            )
        return self.o_proj(out.reshape(1, states.shape[1], -1))  # type: ignore[no-any-return]

    def _head_norm(self, heads: torch.Tensor, which: int) -> torch.Tensor:
        """Shape: (T, H, D) to the same."""
        norm = (self.q_norm, self.k_norm)[which]
        return self._ops.rms_norm(heads.contiguous(), norm.weight, self.head_eps[which])  # type: ignore[union-attr]


class _FusedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, mlp: nn.Module, ops: LayerOps, native: NativeOps | None) -> None:
        super().__init__()
        self.gate_up_proj = _Projections([getattr(mlp, name) for name in _GATE_UP], native)
        for name, part in zip(_GATE_UP, self.gate_up_proj.parts, strict=True):
            self.add_module(name, part)
        self.down_proj = mlp.down_proj
        self.inner: int = self.down_proj.in_features  # type: ignore[assignment,union-attr]
        self._ops = ops

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Shape: (1, T, E) to the same."""
        return self.down_proj(self._ops.silu_and_mul(self.gate_up_proj(states)))  # type: ignore[no-any-return]


class LayerStack(Protocol):
    """Computes several layers at once; see `fused_stack`."""

    def take(
        self,
        layer: FusedLayer,
        states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: PagedStep | ProbeStep,
    ) -> bool:
        """Whether this layer's work is done; `states` are then what it returns."""


class FusedLayer(nn.Module):
    """A decoder layer: x + attention(norm(x)), and of that, y + mlp(norm(y)). It changes its input.

    Args:
        layer: what it stands for; parameters are shared with it.
        call: what that asked of attention.
        ops: what computes between products.
        native: as `PackedLinear` takes it.

    Attributes:
        stack: what computes all layers at once, where it can.
        eps: what is added to the mean of the squares, of either norm.
    """

    stack: LayerStack | None = None

    def __init__(self, layer: nn.Module, call: AttentionCall, ops: LayerOps, native: NativeOps | None) -> None:
        super().__init__()
        self.self_attn = _FusedAttention(layer.self_attn, call, ops, native)
        self.mlp = _FusedMlp(layer.mlp, ops, native)
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.eps = [_eps_of(norm) for norm in (self.input_layernorm, self.post_attention_layernorm)]
        self._ops = ops

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged_step: PagedStep | ProbeStep,
        **others: Any,
    ) -> torch.Tensor:
        """Shape: (1, T, E) to the same. `others` are what transformers says of masks and caches, of which are none."""
        del others
        if self.stack is not None and self.stack.take(self, hidden_states, position_embeddings, paged_step):
            return hidden_states
        first, second = self.eps
        states = self._ops.rms_norm(hidden_states, self.input_layernorm.weight, first)
        added = self.self_attn(states, position_embeddings, paged_step)
        states = self._ops.rms_norm(hidden_states, self.post_attention_layernorm.weight, second, added)
        hidden_states += self.mlp(states)
        return hidden_states

    def projections(self) -> list[nn.Module]:
        """What forward hooks may hang on."""
        attention, mlp = self.self_attn, self.mlp
        return [*attention.qkv_proj.parts, attention.o_proj, *mlp.gate_up_proj.parts, mlp.down_proj]

    def pack(self) -> None:
        """Pack the products of several projections, which lets go of the dense weights."""
        self.self_attn.qkv_proj.product.pack()
        self.mlp.gate_up_proj.product.pack()


@dataclass
class _Seen:
    """One layer's call in a run of the model."""

    states: torch.Tensor
    arguments: dict[str, Any]
    result: torch.Tensor


@torch.inference_mode()
def fuse_layers(
    model: nn.Module, run: Callable[[ProbeStep], object], ops: LayerOps, native: NativeOps | None = None
) -> int:
    """Replace the decoder layers of a model on CPU, all or none.

    Args:
        model: changed in place.
        run: runs it once, on a few tokens.
        ops: what computes between products.
        native: as `PackedLinear` takes it.

    Returns:
        How many layers are fused; 0 where the model has another shape or computes something else.
    """
    places = list(_places(model))
    if not places or not packing_works():
        return 0
    probe, seen = ProbeStep(), {}
    handles = [
        getattr(layers, index).register_forward_hook(_recorder(seen, number), with_kwargs=True)
        for number, (layers, index) in enumerate(places)
    ]
    try:
        run(probe)
    finally:
        for handle in handles:
            handle.remove()
    if len(seen) != len(places):
        return 0
    fused = []
    for number, (layers, index) in enumerate(places):
        layer = getattr(layers, index)
        call = probe.calls[layer.self_attn.layer_idx]
        stand_in = FusedLayer(layer, call, ops, native).eval()
        if not _same(stand_in, call, seen[number]):
            return 0
        fused.append(stand_in)
    for (layers, index), stand_in in zip(places, fused, strict=True):
        setattr(layers, index, stand_in)
        stand_in.pack()
    return len(fused)


def _places(model: nn.Module) -> Iterator[tuple[nn.ModuleList, str]]:
    """Where layers lie that have the modules of a Llama's."""
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for index, layer in layers.named_children():
                if _has_the_shape(layer):
                    yield layers, index


def _has_the_shape(layer: nn.Module) -> bool:
    """Whether the layer has the modules, and each of them what is read of it."""
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    linears = [*(attention.pop(name, None) for name in (*_QKV, "o_proj"))]
    linears += [mlp.pop(name, None) for name in (*_GATE_UP, "down_proj")]
    return (
        all(linear is not None and can_pack(linear) for linear in linears)
        and set(attention) in (set(), set(_HEAD_NORMS))
        and set(mlp) <= {"act_fn"}
        and all(_eps_of(norm) is not None and set(dict(norm.named_parameters())) == {"weight"} for norm in norms)
        and hasattr(layer.self_attn, "layer_idx")
    )


def _eps_of(norm: nn.Module) -> float | None:
    """What is added to the mean of the squares, under either of its names."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _recorder(seen: dict[int, _Seen], number: int) -> Callable[..., None]:
    """A forward hook that keeps a layer's call."""

    def record(layer: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any], result: Any) -> None:
        del layer
        if len(args) == 1 and isinstance(result, torch.Tensor):
            kept = {name: value for name, value in arguments.items() if name != "paged_step"}
            seen[number] = _Seen(args[0].clone(), kept, result.clone())

    return record


def _same(stand_in: FusedLayer, call: AttentionCall, seen: _Seen) -> bool:
    """Whether a layer's stand-in asks the same of attention and gives the same result."""
    if "position_embeddings" not in seen.arguments:
        return False
    probe = ProbeStep()
    if seen.states.dtype not in _ALLOWED_ERROR or seen.arguments["position_embeddings"] is None:
        return False
    try:
        got = stand_in(seen.states.clone(), paged_step=probe, **seen.arguments)
    except (RuntimeError, AssertionError, TypeError, ValueError):  # other shapes than those of a Llama's
        return False
    asked = probe.calls[stand_in.self_attn.layer_idx]
    pairs = [(asked.query, call.query), (asked.key, call.key), (asked.value, call.value)]
    allowed = _ALLOWED_ERROR[seen.states.dtype]
    return (
        (asked.scaling, asked.window) == (call.scaling, call.window)
        and all(_distance(one, other) <= allowed * other.float().norm().item() for one, other in pairs)
        # The result is rounded where it is large, whatever little was added.
        and _distance(got, seen.result)
        <= allowed * _distance(seen.result, seen.states)
        + torch.finfo(seen.result.dtype).eps * seen.result.float().norm().item()
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Length of the difference; NaN, which is no proof of anything, where shapes differ."""
    return (one.float() - other.float()).norm().item() if one.shape == other.shape else float("nan")
