"""A rank's part of a model whose layers keep a state: a plan of our own, since transformers' leaves such layers whole.

Station: `sharding` asks for the plan of a model's type, and has mixers (the modules that keep a state) cut here.

A mixer of Mamba's second form is cut by its heads, as attention is: each rank has the state of its heads, and their
part of all that is done for each head or channel alone.

    in_proj    by outputs: gate | x | B | C | dt, of which gate, x and dt are of heads; B and C of groups of heads
    conv1d     by channels: x | B | C
    norm       over the channels of each group of heads
    out_proj   by inputs: the ranks add up

Where the ranks can share the groups evenly each has whole ones. Where there is one group all ranks have its B and C,
and its norm needs a sum over the ranks of one number for each token.

Source: the cuts of attention in Shoeybi et al. 2019, "Megatron-LM", for heads of states (Waleffe et al. 2024, "An
Empirical Study of Mamba-based Language Models", section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from executor_service.backends.base import BackendError
from executor_service.tensor_parallel.adapter_parts import LayerCut

__all__ = ["HALVES", "MIXER", "PLANS", "SharedNorm", "cut_of_halves", "mixer_cuts", "take_mixer"]

HALVES, MIXER = "halves", "mixer"
"""Styles of ours: of two things side by side each rank has its part of both; a module that keeps a state."""

_ATTENTION = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mamba": MIXER,
    "lm_head": "colwise",
}
PLANS: Mapping[str, Mapping[str, str]] = {
    "bamba": _ATTENTION
    | {
        "model.layers.*.feed_forward.gate_proj": "colwise",
        "model.layers.*.feed_forward.up_proj": "colwise",
        "model.layers.*.feed_forward.down_proj": "rowwise",
    },
    "granitemoehybrid": _ATTENTION
    | {
        "model.layers.*.shared_mlp.input_linear": HALVES,
        "model.layers.*.shared_mlp.output_linear": "rowwise",
        "model.layers.*.block_sparse_moe": "experts",  # not cut here: named so that it is refused
    },
}
"""By the type of a model."""


class _Sums(Protocol):
    """What ranks do together; see `sharding.Exchange`."""

    rank: int
    size: int

    def add(self, partial: torch.Tensor) -> None:
        """Sum over the ranks, in place."""


class SharedNorm(nn.Module):
    """The norm of a mixer's one group, of whose channels each rank has a part.

    Args:
        norm: the whole one: y = w * h / sqrt(mean(h²) + eps), h = x * silu(gate), computed in float32.
        weight: this rank's part of w.
        exchange: the ranks.
    """

    def __init__(self, norm: nn.Module, weight: nn.Parameter, exchange: _Sums) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon: float = norm.variance_epsilon  # type: ignore[assignment]
        self._channels = int(norm.weight.numel())  # type: ignore[union-attr,operator]
        self._exchange = exchange

    def forward(self, states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Shape: both (..., channels / ranks); returns the same."""
        gated = states.float() * nn.functional.silu(gate.float())
        squares = gated.pow(2).sum(dim=-1, keepdim=True)
        self._exchange.add(squares)
        normed = gated * torch.rsqrt(squares / self._channels + self.variance_epsilon)
        return self.weight * normed.to(states.dtype)


def mixer_cuts(name: str, mixer: Any, size: int) -> tuple[LayerCut, LayerCut]:
    """How the outputs of a mixer's first projection are shared, and the channels of its convolution.

    Raises:
        BackendError: heads, or several groups of them, do not come in equal parts, or its norm is over other channels
            than those of a group.
    """
    heads, groups = int(mixer.num_heads), int(mixer.n_groups)
    if heads % size or (groups > 1 and groups % size):
        raise BackendError(
            "BAD_TENSOR_PARALLEL_SIZE",
            f"expected a --tensor-parallel-size by which the {heads} heads of {name}, and of several groups the"
            f" {groups}, can be divided, got {size}",
            tensor_parallel_size=size,
            layer=name,
        )
    inner = int(mixer.intermediate_size)
    of_one = int(getattr(mixer.norm, "group_size", inner))  # one that knows no groups is over all channels
    if of_one * groups != inner:
        raise BackendError(
            "TENSOR_PARALLEL_NOT_SUPPORTED",
            f"expected the norm of {name}, {type(mixer.norm).__name__}, to be over the {inner // groups} channels of"
            f" each of its {groups} groups of heads, got one over {of_one}; use --tensor-parallel-size 1",
            layer=name,
        )
    of_groups = groups * int(mixer.ssm_state_size), groups > 1
    channels = ((inner, True), of_groups, of_groups)
    projected = LayerCut(by_outputs=True, blocks=((inner, True), *channels, (heads, True)))
    return projected, LayerCut(by_outputs=True, blocks=channels)


def take_mixer(mixer: Any, channels: LayerCut, exchange: _Sums) -> None:
    """Cut what of a mixer is no projection, in place: its convolution, its norm, and what it has for each head.

    Args:
        mixer: a module of Mamba's second form, whose code goes by these attributes.
        channels: as `mixer_cuts` returns them.
        exchange: the ranks.
    """
    rank, size = exchange.rank, exchange.size
    conv = mixer.conv1d
    conv.weight = _own(channels.take(conv.weight, 0, rank, size))
    if conv.bias is not None:
        conv.bias = _own(channels.take(conv.bias, 0, rank, size))
    conv.in_channels = conv.out_channels = conv.groups = len(conv.weight)
    of_heads = LayerCut.evenly(mixer.num_heads, by_outputs=True)
    for name in ("dt_bias", "A_log", "D"):
        setattr(mixer, name, _own(of_heads.take(getattr(mixer, name), 0, rank, size)))
    of_inner = LayerCut.evenly(mixer.intermediate_size, by_outputs=True)
    weight = _own(of_inner.take(mixer.norm.weight, 0, rank, size))
    if mixer.n_groups > 1:
        mixer.norm.weight = weight
        mixer.n_groups //= size
    else:
        mixer.norm = SharedNorm(mixer.norm, weight, exchange)
    mixer.num_heads //= size
    mixer.intermediate_size //= size
    mixer.conv_dim = conv.in_channels


def cut_of_halves(name: str, linear: nn.Linear, size: int) -> LayerCut:
    """Of two halves of the outputs each rank has its part. Raises BackendError where they have none."""
    half = linear.out_features // 2
    if half % size:
        raise BackendError(
            "BAD_TENSOR_PARALLEL_SIZE",
            f"expected a --tensor-parallel-size by which the {half} neurons of {name} can be divided, got {size}",
            tensor_parallel_size=size,
            layer=name,
        )
    return LayerCut(by_outputs=True, blocks=((half, True), (half, True)))


def _own(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
