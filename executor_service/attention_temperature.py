"""Attention whose queries grow with their positions, as in the layers of Llama 4 that have no rotary positions.

Station: `take_temperature` is called by `backends.torch_loading` when a model is loaded; `model_runner` asks for a
step's factors once and applies them in each such layer. transformers' module counts a token's position from the start
of its input, which here is rows of many sequences end to end: so it is told to leave its queries alone.

    factor(p) = 1 + attn_scale * log(1 + floor((p + 1) / floor_scale))

Source: scalable softmax (Nakanishi, 2025), as Llama 4 has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

__all__ = ["AttentionTemperature", "StepTemperature", "take_temperature"]


@dataclass(frozen=True)
class StepTemperature:
    """The factors of one step. Shape: factors (T, 1, 1) in float32."""

    layers: frozenset[int]
    factors: torch.Tensor

    def scaled(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """A layer's queries, times their factors if it is one of `layers`. Shape: (T, H_q, D)."""
        return (query * self.factors).to(query.dtype) if layer in self.layers else query


@dataclass(frozen=True)
class AttentionTemperature:
    """Which layers have one, and what it depends on. Units: floor_scale in tokens."""

    layers: frozenset[int]
    floor_scale: float
    attn_scale: float

    def at(self, positions: torch.Tensor) -> StepTemperature:
        """The factors of tokens at these positions. Shape: (T,)."""
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        return StepTemperature(self.layers, (torch.log1p(steps) * self.attn_scale + 1.0)[:, None, None])


def take_temperature(model: PreTrainedModel) -> AttentionTemperature | None:
    """Learn which layers scale their queries so, and have them leave it; None where no layer does."""
    layers = set()
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            layers.add(int(module.layer_idx))  # type: ignore[arg-type]
            module.attn_temperature_tuning = False
    if not layers:
        return None
    config = model.config.get_text_config(decoder=True)
    return AttentionTemperature(frozenset(layers), float(config.floor_scale), float(config.attn_scale))
