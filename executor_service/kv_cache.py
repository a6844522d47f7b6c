"""The physical paged KV cache: one tensor per layer, in NHD layout.

Station: allocated by `kv_memory`, written and read by `kernels.torch_paged`; page by page by `state_layers`, where
layers keep a state in place of K/V. It knows shapes and bytes; which block holds what is the manager's knowledge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from executor_service.kernels.fp8 import FP8_TYPES, PLAIN, LayerCodecs
from executor_service.mapped_memory import map_zeros
from executor_service.memory_profiler import kv_bytes_per_block


@dataclass(frozen=True)
class KvLayout:
    """Geometry of the cache, equal in all layers.

    Of a model with several KV groups a layer, here, is a page: what one layer of each group has in its blocks, see
    `layer_groups`. Where layers keep unequal amounts of a token, heads and block_size are those of the layers that keep
    most of one; others have the same bytes for more tokens.

    Units:
        block_size: tokens per block; head_dim: elements; dtype: the type that K and V are stored in.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def is_quantized(self) -> bool:
        """Whether K and V are stored in fp8."""
        return self.dtype in FP8_TYPES.values()

    @property
    def storage_dtype(self) -> torch.dtype:
        """The type of the tensors: fp8 lies in bytes (uint8), since torch does not write it by index."""
        return torch.uint8 if self.is_quantized else self.dtype

    @property
    def bytes_per_token_and_layer(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, K and V together."""
        return kv_bytes_per_block(
            self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.dtype.itemsize
        )


class PagedKvCache:
    """`num_blocks` blocks of K and V in every layer.

    Args:
        layout: geometry.
        num_blocks: blocks, the null block included.
        device: where the tensors lie.
        codecs: how the values of each layer of the model become bytes; only, and always, for a layout of type fp8. Of
            several layers that share a page each has its own: no block holds K and V of two of them.

    Each layer is one contiguous tensor of shape (2, num_blocks, block_size, num_kv_heads, head_dim): index 0 is K,
    index 1 is V, and a block is contiguous in each (NHD: token, head, dim). A slot, block_id * block_size + offset, is
    a row of `keys[layer]` and `values[layer]`; where a layer's heads make other rows of the same bytes, of `rows_of`.

    Shape:
        layers[l]: (2, num_blocks, block_size, num_kv_heads, head_dim); keys[l], values[l]: views of it,
        (num_blocks * block_size, num_kv_heads * head_dim).

    Invariants:
        No slot ever holds what another process or tensor left there. On a CPU memory is taken as it is written, or made
        resident by a `Filling`; on another device at once.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device,
        codecs: Sequence[LayerCodecs] = (),
    ) -> None:
        assert bool(codecs) == layout.is_quantized
        self.layout = layout
        self.num_blocks = num_blocks
        self._codecs = codecs
        shape = (2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        dtype = layout.storage_dtype
        if device.type == "cpu":
            self.layers = map_zeros([shape] * layout.num_layers, dtype)
        else:
            self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layout.num_layers)]
        width = layout.num_kv_heads * layout.head_dim
        self.keys = [layer[0].view(-1, width) for layer in self.layers]
        self.values = [layer[1].view(-1, width) for layer in self.layers]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.layout.bytes_per_block

    def codecs_of(self, layer: int) -> LayerCodecs:
        """How K and V of a layer of the model are stored."""
        return self._codecs[layer] if self._codecs else PLAIN

    def rows_of(self, layer: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a page as rows of so many elements, of which a block has a whole number. Shape: (slots, width)."""
        keys, values = self.keys[layer], self.values[layer]
        if keys.shape[1] == width:
            return keys, values
        return keys.view(-1, width), values.view(-1, width)

    def is_finite(self, layer: int, slots: torch.Tensor, width: int = 0) -> torch.Tensor:
        """Whether K and V in these slots are numbers, of rows of so many elements; 0: the layout's.

        Shape:
            slots: (S,) int64; returns (S,).
        """
        keys, values = self.rows_of(layer, width or self.keys[layer].shape[1])
        stored = keys[slots], values[slots]
        if self.layout.is_quantized:
            stored = stored[0].view(self.layout.dtype).float(), stored[1].view(self.layout.dtype).float()
        return torch.isfinite(stored[0]).all(dim=-1) & torch.isfinite(stored[1]).all(dim=-1)

    def read_pages(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Copy whole pages, for layers that keep something else in them than K/V: the half of K, then that of V.

        Shape:
            block_ids: (B,) int64; returns (B, bytes of a page) uint8.
        """
        halves = [half[block_ids].view(len(block_ids), -1).view(torch.uint8) for half in self.layers[layer]]
        return torch.cat(halves, dim=1)

    def write_pages(self, layer: int, block_ids: torch.Tensor, pages: torch.Tensor) -> None:
        """Overwrite whole pages. Shape: as in `read_pages`; no id twice."""
        for half, stored in zip(self.layers[layer], pages.chunk(2, dim=1), strict=True):
            shape = (len(block_ids), *half.shape[1:])
            half.index_copy_(0, block_ids, stored.contiguous().view(half.dtype).view(shape))

    def clear(self) -> None:
        """Zero every slot."""
        for layer in self.layers:
            layer.zero_()
