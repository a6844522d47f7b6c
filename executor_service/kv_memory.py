"""All memory for K/V: the cache on the device and the host blocks beside it, which live and die together.

Station: allocated by `backends.torch_backend`, which has a step's copies done here; the step itself runs on the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor_service.backends.base import BlockCopies, CopyDirection, Int32, NotEnoughMemoryError
from executor_service.devices import upload
from executor_service.host_blocks import HostBlocks
from executor_service.kernels.block_copy import copy_from_host, copy_to_host
from executor_service.kernels.fp8 import LayerCodecs
from executor_service.kernels.paged_kernels import PagedKernels
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.mapped_memory import Filling

# Blocks that are copied at once: enough to keep a bus busy. One block at least, however large.
_COPY_BYTES = 16 * 1024 * 1024


class KvMemory:
    """The cache and its host blocks.

    Args:
        layout: geometry of both.
        num_blocks: blocks of the cache, the null block included.
        num_host_blocks: host blocks.
        device: where the cache lies.
        kernels: what copies within the cache.
        codecs: as `PagedKvCache` takes them.

    Raises:
        NotEnoughMemoryError: there is no room; nothing is kept then.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_host_blocks: int,
        device: torch.device,
        kernels: PagedKernels,
        *,
        codecs: Sequence[LayerCodecs] = (),
    ) -> None:
        size = layout.bytes_per_block
        what = f"{num_blocks} KV blocks ({num_blocks * size} bytes)"
        try:
            self.cache = PagedKvCache(layout, num_blocks, device, codecs)
            what = f"{num_host_blocks} host blocks ({num_host_blocks * size} bytes)"
            self.host = HostBlocks(layout, num_host_blocks, device)
        except RuntimeError as error:  # torch's allocators raise nothing narrower on CPU
            raise NotEnoughMemoryError(
                "NOT_ENOUGH_MEMORY",
                f"expected room for {what}, got: {error}",
                num_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                bytes_per_block=size,
            ) from error
        self._device = device
        self._kernels = kernels
        self._filling = Filling([*self._halves(), self.host.blocks] if device.type == "cpu" else [])

    def has(self, num_blocks: int, num_host_blocks: int) -> bool:
        """Whether it is of these sizes."""
        return (self.cache.num_blocks, self.host.num_blocks) == (num_blocks, num_host_blocks)

    def clear(self) -> None:
        """Zero everything."""
        self.cache.clear()
        self.host.clear()

    def close(self) -> None:
        """Give the host's memory back; the device's goes with the object."""
        self._filling.stop()
        self.host.close()

    @torch.inference_mode()
    def copy(self, copies: Sequence[BlockCopies]) -> None:
        """Copy whole blocks, one entry after the other, and return when it is done. Raises RuntimeError if it fails."""
        layers, host, chunk = self.cache.layers, self.host.blocks, copy_chunk(self.cache.layout)
        for run in copies:
            if run.direction is CopyDirection.DEVICE_TO_HOST:
                copy_to_host(layers, host, self._ids(run.source_ids), run.target_ids.tolist(), chunk=chunk)
            elif run.direction is CopyDirection.HOST_TO_DEVICE:
                copy_from_host(layers, host, run.source_ids.tolist(), self._ids(run.target_ids), chunk=chunk)
            else:
                self._kernels.copy_within(layers, self._ids(run.source_ids), self._ids(run.target_ids), chunk=chunk)
        if self._device.type == "cuda":
            # Once for all of them: what failed is then known to be a copy, and so is what they took.
            torch.cuda.current_stream(self._device).synchronize()

    def _halves(self) -> list[torch.Tensor]:
        """K of each layer, and V; blocks lie in each by number."""
        return [half for layer in self.cache.layers for half in layer]

    def _ids(self, block_ids: Int32) -> torch.Tensor:
        """Block ids on the device. Shape: (C,) int64."""
        return upload(block_ids.astype(np.int64), self._device)


def copy_chunk(layout: KvLayout) -> int:
    """Most blocks that are copied at once."""
    return max(1, _COPY_BYTES // layout.bytes_per_block)


def copy_workspace_bytes(layout: KvLayout) -> int:
    """Device memory that copies take at most: their workspace, and what is gathered of one layer."""
    workspace = copy_chunk(layout) * layout.bytes_per_block
    return workspace + workspace // layout.num_layers
