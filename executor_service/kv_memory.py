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
from executor_service.mapped_memory import Filling, forget
from executor_service.memory_profiler import host_memory_left

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
        self._device = device
        self._kernels = kernels
        what = f"{num_blocks} KV blocks ({num_blocks * size} bytes)"
        try:
            _require_left(device, num_blocks * size)
            self.cache = PagedKvCache(layout, num_blocks, device, codecs)
            what = f"{num_host_blocks} host blocks ({num_host_blocks * size} bytes)"
            _require_left(device, (num_blocks + num_host_blocks) * size)
            self.host = HostBlocks(layout, num_host_blocks, device)
            self._filling = self._fill()
        except RuntimeError as error:  # torch's allocators raise nothing narrower on CPU
            raise NotEnoughMemoryError(
                "NOT_ENOUGH_MEMORY",
                f"expected room for {what}, got: {error}",
                num_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                bytes_per_block=size,
            ) from error

    def has(self, num_blocks: int, num_host_blocks: int) -> bool:
        """Whether it is of these sizes."""
        return (self.cache.num_blocks, self.host.num_blocks) == (num_blocks, num_host_blocks)

    def clear(self) -> None:
        """Zero everything. What is not resident yet is not touched for it."""
        if not self._filling.is_under_way:
            self.cache.clear()
            self.host.clear()
            return
        self._filling.stop()
        for tensor in (*self.cache.layers, self.host.blocks):
            forget(tensor)
        self._filling = self._fill()

    def note_step(self) -> None:
        """A step runs: what is not resident yet waits for it."""
        self._filling.give_way()

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

    def _fill(self) -> Filling:
        """Have memory on a CPU made resident: of K of each layer, and of V, blocks lie in it by number."""
        halves = [half for layer in self.cache.layers for half in layer]
        return Filling([*halves, self.host.blocks] if self._device.type == "cpu" else [])

    def _ids(self, block_ids: Int32) -> torch.Tensor:
        """Block ids on the device. Shape: (C,) int64."""
        return upload(block_ids.astype(np.int64), self._device)


def _require_left(device: torch.device, size: int) -> None:
    """Refuse on a CPU what the machine cannot give now: the kernel would promise it, and end the process that uses it.

    Raises:
        RuntimeError: it is more than is left. Units: size in bytes.
    """
    if device.type == "cpu" and size > (left := host_memory_left()):
        raise RuntimeError(
            f"{left} bytes that the machine has left; lower --memory-limit, or end who else took memory since it was"
            " measured"
        )


def copy_chunk(layout: KvLayout) -> int:
    """Most blocks that are copied at once."""
    return max(1, _COPY_BYTES // layout.bytes_per_block)


def copy_workspace_bytes(layout: KvLayout) -> int:
    """Device memory that copies take at most: their workspace, and what is gathered of one layer."""
    workspace = copy_chunk(layout) * layout.bytes_per_block
    return workspace + workspace // layout.num_layers
