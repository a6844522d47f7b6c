"""How the state that a layer keeps lies in its page of a block.

Station: learned by `state_layers` in the probe, which reads and writes states by it; `backends.torch_loading` chooses
blocks by it that are large enough. It knows bytes and shapes; it knows no row and no block.

    page: | conv state | recurrent state | bytes that nothing uses |

A page is as many bytes as attention's page of the same cache, whose type of number means nothing here: each part is
stored in the type that the layer computes it in, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

__all__ = ["StateLayout", "StatePart"]


@dataclass(frozen=True)
class StatePart:
    """One tensor of a layer's state. Shape: that of one sequence, without a batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StateLayout:
    """The parts of a layer's state, in the order in which they lie in a page; the same for all layers of a model."""

    parts: tuple[StatePart, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that a state takes of a page."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def ends(self) -> list[int]:
        """Where each part ends, which is where the next one begins. Units: bytes."""
        return list(accumulate(part.num_bytes for part in self.parts))

    def unpack(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """Copy the parts out of pages. Shape: pages (B, page bytes) uint8; returns (B, *shape) for each part."""
        return [
            pages[:, end - part.num_bytes : end]
            .clone(memory_format=torch.contiguous_format)
            .view(part.dtype)
            .view(len(pages), *part.shape)
            for end, part in zip(self.ends, self.parts, strict=True)
        ]

    def pack(self, states: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        """Put the parts into pages; the bytes behind them stay. Shape: as in `unpack`."""
        for end, part, state in zip(self.ends, self.parts, states, strict=True):
            stored = state.to(part.dtype).reshape(len(pages), -1)
            pages[:, end - part.num_bytes : end] = stored.view(torch.uint8)

    def tokens_per_block(self, bytes_per_token: int) -> int:
        """Fewest tokens per block with which a page of K/V holds a state. Units: bytes of a token in one layer."""
        return -(-self.num_bytes // bytes_per_token)

    def head_dim(self, block_size: int, itemsize: int) -> int:
        """Elements of a head with which a page of K/V of one head holds a state, for a cache that no layer attends to.

        Args:
            block_size: tokens per block.
            itemsize: bytes of an element.
        """
        return -(-self.num_bytes // (2 * block_size * itemsize))
