"""Memory for K/V on a CPU: mapped at once, and made resident in the background while the first requests are served.

Station: `kv_cache` and `host_blocks` map theirs here; `kv_memory` has it made resident, tells of steps meanwhile, and
stops that before it gives memory back. It knows bytes, pages and Linux, and nothing of what lies there.

Why: whoever waits for a start waits for no page that it does not need yet. The kernel writes zeros to each page before
it hands it out, 2 to 10 seconds for 9 GB on the machine of docs/performance.md, and longer where a hypervisor has to
find the memory first. What is mapped reads as zeros from the first moment on; a page that is not there yet comes when
it is touched.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence

import structlog
import torch

from executor_service.huge_pages import PAGE, advise_huge_pages

__all__ = ["Filling", "forget", "map_zeros"]

_log = structlog.get_logger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14: hands out pages as writing to each would, and leaves what they hold
_UNKNOWN = (errno.EINVAL, errno.ENOSYS)  # what older kernels say to it
_PASSES = 16
_CHUNK = PAGE  # bytes that are asked for at once: `Filling.stop`, and who else maps memory, wait for that many
_REST = 4.0  # while steps run, for each second at work so many without: they need the CPUs
_STEPS_RUN = 0.5  # seconds after a step in which another one is expected


def map_zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of zeros side by side in one mapping of their own, in huge pages where the kernel has any.

    They hold no memory until it is touched, or a `Filling` has been there. The mapping goes with the last of them.

    Raises:
        RuntimeError: the kernel refuses that much.
    """
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    sizes = [-(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for tensor in tensors]
    if not sum(sizes):
        return [torch.zeros(shape, dtype=dtype) for shape in shapes]
    try:
        mapping = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"{sum(sizes)} bytes could not be mapped: {error}") from error
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    advise_huge_pages(memory)
    parts = memory.split(sizes)
    return [part[: t.nbytes].view(dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def forget(tensor: torch.Tensor) -> None:
    """Make one of `map_zeros` all zeros again by giving its pages back, so that what was never touched is not."""
    if not tensor.nbytes:
        return
    if sys.platform != "linux" or _advise(tensor.data_ptr(), tensor.nbytes, mmap.MADV_DONTNEED):
        tensor.zero_()


class Filling:
    """Makes tensors of `map_zeros` resident in a thread of its own, their first parts first.

    It takes a CPU for itself as long as no step runs, and a fifth of one while steps do. Where the kernel cannot do
    that beside whoever writes there (before Linux 5.14), they are resident when this is made.

    Args:
        tensors: what nobody has written to yet. They stay in memory until it ends.

    Raises:
        RuntimeError: not even the first page is to be had, or no thread.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.nbytes]
        self._is_stopped = threading.Event()
        self._last_step = -math.inf
        self._thread = threading.Thread(target=self._run, name="kv-memory", daemon=True)
        if not self._tensors:
            return
        code = _populate(self._tensors[0], 0, 1)
        if code == 0:
            self._thread.start()
        elif code in _UNKNOWN:
            for tensor in self._tensors:
                tensor.zero_()
            self._tensors = []
        else:
            raise RuntimeError(f"the first page of memory for K/V is not to be had: {os.strerror(code)}")

    @property
    def is_under_way(self) -> bool:
        """Whether some of it may not be resident."""
        return self._thread.is_alive()

    def give_way(self) -> None:
        """A step runs: for the next half second it needs the CPUs more than this does."""
        self._last_step = time.monotonic()

    def stop(self) -> None:
        """Let go of the tensors, whether they are resident or not."""
        self._is_stopped.set()
        self.wait()

    def wait(self) -> None:
        """Return when it has ended."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        begun = time.monotonic()
        tensors, self._tensors = self._tensors, []
        # Blocks are handed out by number, so the first of all layers are needed before the last of any.
        for step in range(_PASSES):
            for tensor in tensors:
                end = len(tensor) * (step + 1) // _PASSES
                for start in range(len(tensor) * step // _PASSES, end, _CHUNK):
                    asked = time.monotonic()
                    if code := _populate(tensor, start, min(start + _CHUNK, end)):
                        _log.error(
                            "kv_memory_not_resident",
                            expected=f"{sum(map(len, tensors))} bytes of memory for K/V, as the profile reckoned",
                            got=os.strerror(code),
                            do="lower --memory-limit, or find out who else took memory since the start",
                        )
                        return
                    now = time.monotonic()
                    rest = _REST * (now - asked) if now - self._last_step < _STEPS_RUN else 0.0
                    if self._is_stopped.wait(rest):
                        return
        seconds = round(time.monotonic() - begun, 2)
        _log.info("kv_memory_resident", num_bytes=sum(map(len, tensors)), seconds=seconds)


def _populate(tensor: torch.Tensor, start: int, end: int) -> int:
    """Have the pages of these bytes handed out, if they can be. Returns 0, or the kernel's error number."""
    if sys.platform != "linux":
        return errno.ENOSYS
    while (code := _advise(tensor.data_ptr() + start, end - start, _MADV_POPULATE_WRITE)) == errno.EAGAIN:
        pass
    return code


def _advise(address: int, size: int, advice: int) -> int:
    """Call madvise on the pages of these bytes. Returns 0, or the kernel's error number. Other threads go on."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    refused: bool = madvise(first, address + size - first, advice) != 0
    return ctypes.get_errno() if refused else 0
