"""What a decoder layer computes beside matrix products and attention, each as one operation.

Station: called by `fused_layers`. `TorchOps` is plain torch, and the oracle of `native.ops.NativeOps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn import functional

__all__ = ["LayerOps", "TorchOps"]


class LayerOps(ABC):
    """Operations over all tokens of a step."""

    @abstractmethod
    def rms_norm(
        self, states: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Weight * x / sqrt(mean(x^2) + eps), where x is `states`, after `added` was added to it in place.

        Shape:
            states, added, result: (..., N), contiguous; weight: (N,).

        Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
        """

    @abstractmethod
    def rotate(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotary positions, in place: (a, b) becomes (a cos - b sin, b cos + a sin), a and b a head's two halves.

        Shape:
            states: (T, H, D), a head contiguous and a token's heads side by side; cos, sin: (1, T, D), contiguous.

        Source: Su et al., "RoFormer", 2021.
        """

    @abstractmethod
    def silu_and_mul(self, both: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up.

        Shape:
            both: (1, T, 2 * N), contiguous, gate before up; returns (1, T, N).
        """


class TorchOps(LayerOps):
    """In torch, with the roundings of transformers' modules."""

    def rms_norm(
        self, states: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the base class."""
        if added is not None:
            states += added
        wide = states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(states.dtype)

    def rotate(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """See the base class."""
        first, second = states.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        states.copy_(states * cos[0].unsqueeze(1) + swapped * sin[0].unsqueeze(1))

    def silu_and_mul(self, both: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up
