"""Memory in pages of 2 MB on a CPU, for what is read from end to end in every step: packed weights and K/V.

Station: `native.ops` lays weights out in an arena; `mapped_memory` and `fused_stack` ask for huge pages. It
knows addresses and Linux, and nothing of what lies there.

Why: with pages of 4 KB a core reads memory in order at 16 GB/s on the machine of docs/performance.md, with pages of
2 MB at 27: the hardware fetches ahead within a page only. A decode step of few rows is nothing but reading.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

__all__ = ["PAGE", "HugePageArena", "advise_huge_pages"]

PAGE = 2 * 1024 * 1024
"""Bytes of a huge page on x86-64 and most of arm64."""

_ALIGNMENT = 64  # bytes: a line of the cache
_CHUNK = 16 * PAGE  # bytes


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for huge pages for what was allocated and not written yet, as many as lie in it whole.

    Returns:
        Whether the kernel took the advice. It refuses where it knows no huge pages; nothing is different then but
        speed.
    """
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return False
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - start < PAGE:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise(start, end - start, mmap.MADV_HUGEPAGE) == 0  # type: ignore[no-any-return]


class HugePageArena:
    """Hands out memory side by side in huge pages, for tensors that live as long as each other.

    One tensor of its own mapping begins anywhere in a page, and a small one has no whole huge page in it.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of one dimension, not initialized. Shape: (count,)."""
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._left):
            room = -(-max(size, _CHUNK) // PAGE) * PAGE
            with torch.inference_mode(mode=False):  # written where that is on, and where it is off
                chunk = torch.empty(room + PAGE, dtype=torch.uint8)
            chunk = chunk[-chunk.data_ptr() % PAGE :][:room]
            advise_huge_pages(chunk)
            self._left = chunk
        taken, self._left = self._left[: count * dtype.itemsize], self._left[size:]
        return taken.view(dtype)
