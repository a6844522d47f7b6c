"""Host memory for blocks that are swapped out.

Station: allocated by `kv_memory` beside the cache, written and read by `kernels.block_copy`. It knows
shapes and bytes; which host block holds what is the manager's knowledge.
"""

from __future__ import annotations

import torch

from executor_service.kv_cache import KvLayout
from executor_service.mapped_memory import map_zeros

# cudaHostRegisterPortable: locked for every CUDA context, as torch itself registers memory.
_PORTABLE = 1


class HostBlocks:
    """`num_blocks` blocks, each one piece of memory over all layers.

    For a cache on CUDA the memory is page-locked, so that it is read and written by the device itself while the host
    goes on. It is locked where it lies (cudaHostRegister), rather than taken from torch's allocator of such memory,
    which rounds every size up to a power of two: 33 GiB would take 64.

    Shape:
        blocks: (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim): K is index 0 and V index 1, as in
        `PagedKvCache`.

    Invariants:
        All memory is resident from the start where it is page-locked; else as that of `PagedKvCache` on a CPU.

    Source: pytorch/pytorch issues 95823 and 150517 for the rounding.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, cache_device: torch.device) -> None:
        """Allocate. Raises RuntimeError where there is no room, or where it cannot be locked."""
        self.num_blocks = num_blocks
        heads = layout.num_kv_heads, layout.head_dim
        shape = (num_blocks, layout.num_layers, 2, layout.block_size, *heads)
        (self.blocks,) = map_zeros([shape], layout.storage_dtype)
        self._locked = cache_device.type == "cuda" and num_blocks > 0
        if self._locked:
            code = int(torch.cuda.cudart().cudaHostRegister(self.blocks.data_ptr(), self.blocks.nbytes, _PORTABLE))
            if code:
                raise RuntimeError(
                    f"{self.blocks.nbytes} bytes of host memory could not be page-locked, CUDA error {code}"
                )

    @property
    def num_bytes(self) -> int:
        """Bytes of all host blocks."""
        return self.blocks.nbytes

    def clear(self) -> None:
        """Zero every block. Nothing may be on its way to or from them."""
        self.blocks.zero_()

    def close(self) -> None:
        """Give the memory back; locked pages stay locked until told otherwise, whoever gets them next."""
        if self._locked:
            self._locked = False
            code = int(torch.cuda.cudart().cudaHostUnregister(self.blocks.data_ptr()))
            if code:
                raise RuntimeError(f"page-locked host memory could not be given back, CUDA error {code}")
        self.blocks = self.blocks[:0].clone()
        self.num_blocks = 0
