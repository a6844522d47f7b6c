"""Copies of whole blocks within the cache, all layers in one launch.

Station: launched by `triton_paged` before a step runs. The oracle is `reference.copy_blocks`; copies from and to host
blocks stay with `block_copy`, where the bus is the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Blocks are copied as integers, the widest that divide them: bits, whatever the cache's type. By bytes, widest first.
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(
    do_not_specialize=["num_blocks", "block_words"], do_not_specialize_on_alignment=["addresses", "source", "target"]
)
def copy_blocks_kernel(  # type: ignore[no-untyped-def]
    addresses,
    source,
    target,
    num_blocks,
    block_words,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A piece of one block of K or V in one layer. Grid: (copies, layers * 2, pieces)."""
    place = tl.program_id(0)
    layer = tl.program_id(1) // 2
    part = tl.program_id(1) % 2
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(addresses + layer).to(tl.pointer_type(WORD))
    blocks_before = part * num_blocks.to(tl.int64)
    own = (blocks_before + tl.load(source + place)) * block_words + offsets
    other = (blocks_before + tl.load(target + place)) * block_words + offsets
    mask = offsets < block_words
    tl.store(base + other, tl.load(base + own, mask=mask), mask=mask)


def copy_blocks(
    layers: Sequence[torch.Tensor],
    addresses: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    block: int = 2048,
) -> None:
    """Copy blocks within the cache.

    Args:
        layers: the cache's layers, contiguous and all alike, changed in place.
        addresses: `layer_addresses(layers)`.
        source: ids of the blocks to copy.
        target: where each goes; no block twice, and none of `source`.
        block: words per program.

    Shape:
        layers[l]: (2, num_blocks, block_size, H_kv, D); addresses: (L,) int64; source, target: (C,) int64.
    """
    num_blocks = layers[0].shape[1]
    block_bytes = layers[0].nbytes // (2 * num_blocks)
    size = next(size for size in _WORDS if block_bytes % size == 0)
    block_words = block_bytes // size
    copy_blocks_kernel[(len(source), len(layers) * 2, triton.cdiv(block_words, block))](
        addresses,
        source.contiguous(),
        target.contiguous(),
        num_blocks,
        block_words,
        WORD=_WORDS[size],
        BLOCK=block,
        num_warps=4,
    )


def layer_addresses(layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where each layer lies in its device's memory. Shape: (L,) int64, on that device."""
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=layers[0].device)
