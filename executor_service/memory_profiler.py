"""How many KV blocks fit: measured, not guessed.

Station: `backends.torch_backend` loads weights, `backends.torch_memory` runs the worst step inside `PeakMeter`, and
turns the peak into blocks with `compute_num_blocks`. This module knows memory; it knows no model.

The formula: `available = utilization * total - peak - host`, `num_blocks = available // bytes_per_block`, where host is
the host blocks' bytes if they lie in the same memory as the cache, that is on a CPU, and 0 elsewhere.
"""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil
import torch

from executor_service.backends.base import BackendError, NotEnoughMemoryError

# glibc's mallopt parameters, <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_THRESHOLD = 1024 * 1024
_TRIM_THRESHOLD = 8 * 1024 * 1024
_SELF = Path("/proc/self")


def kv_bytes_per_block(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype_bytes: int) -> int:
    """Bytes of one block: K and V of `block_size` tokens in every layer."""
    return 2 * num_layers * num_kv_heads * head_dim * block_size * dtype_bytes


def available_bytes(total_bytes: int, utilization: float, peak_bytes: int, host_bytes: int = 0) -> int:
    """Bytes left for KV; negative when the peak alone is too much."""
    return math.floor(total_bytes * utilization) - peak_bytes - host_bytes


def compute_num_blocks(
    total_bytes: int, utilization: float, peak_bytes: int, bytes_per_block: int, host_bytes: int = 0
) -> int:
    """Whole blocks that fit into what the peak leaves, at least 0."""
    return max(0, available_bytes(total_bytes, utilization, peak_bytes, host_bytes)) // bytes_per_block


def require_one_sequence(
    num_blocks: int,
    *,
    max_model_len: int,
    blocks_for: Callable[[int], int],
    bytes_per_block: int,
    total_bytes: int,
    utilization: float,
    weights_bytes: int,
    peak_bytes: int,
    host_bytes: int = 0,
) -> None:
    """Refuse a cache that could never hold one sequence of the longest length.

    `blocks_for` says how many blocks of all KV groups a sequence of so many tokens takes at most.

    Raises:
        NotEnoughMemoryError: with every term of the formula, what is missing, and the flags that help.
    """
    needed = blocks_for(max_model_len) + 1  # the null block
    if num_blocks >= needed:
        return
    available = available_bytes(total_bytes, utilization, peak_bytes, host_bytes)
    missing = needed * bytes_per_block - available
    fits = max(0, bisect_right(range(max_model_len), num_blocks - 1, key=blocks_for) - 1)
    raise NotEnoughMemoryError(
        "NOT_ENOUGH_MEMORY",
        f"one sequence of max_model_len={max_model_len} tokens needs {needed} KV blocks of {bytes_per_block} bytes "
        f"({needed * bytes_per_block} bytes, the null block included), but {num_blocks} fit: total {total_bytes} * "
        f"utilization {utilization} - peak {peak_bytes} (weights {weights_bytes})"
        f"{f' - host blocks {host_bytes} (swap_space)' if host_bytes else ''} leaves {available} bytes, {missing} "
        "too few. Give it more memory with --memory-limit (CPU) or --gpu-memory-utilization, shorten sequences with "
        f"--max-model-len (at most {fits} tokens fit now), or lower the peak with --max-num-batched-tokens and "
        f"--max-num-seqs{', or set less aside with --swap-space' if host_bytes else ''}.",
        needed_blocks=needed,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        total_bytes=total_bytes,
        utilization=utilization,
        weights_bytes=weights_bytes,
        peak_bytes=peak_bytes,
        host_bytes=host_bytes,
        available_bytes=available,
        missing_bytes=missing,
        max_model_len=max_model_len,
    )


def require_weights_fit(weights_bytes: int, *, total_bytes: int, utilization: float) -> None:
    """Refuse weights that alone are more than may be used.

    Raises:
        NotEnoughMemoryError: with the numbers, what is missing, and the flags that help.
    """
    usable = available_bytes(total_bytes, utilization, 0)
    if weights_bytes <= usable:
        return
    raise NotEnoughMemoryError(
        "NOT_ENOUGH_MEMORY",
        f"the weights alone take {weights_bytes} bytes, but total {total_bytes} * utilization {utilization} is "
        f"{usable} bytes, {weights_bytes - usable} too few. Give it more memory with --memory-limit (CPU) or "
        "--gpu-memory-utilization, load the weights in a smaller type with --dtype, or choose a smaller model.",
        weights_bytes=weights_bytes,
        total_bytes=total_bytes,
        utilization=utilization,
        missing_bytes=weights_bytes - usable,
    )


def require_swap_space(swap_space: int, bytes_per_block: int) -> None:
    """Refuse a swap space that holds no block: whoever set one wants to swap.

    Raises:
        BackendError: it is above 0 and below one block.
    """
    if 0 < swap_space < bytes_per_block:
        raise BackendError(
            "BAD_SWAP_SPACE",
            f"expected --swap-space of at least one block, {bytes_per_block} bytes, or 0 for none, got {swap_space}",
            swap_space=swap_space,
            bytes_per_block=bytes_per_block,
        )


def require_host_blocks_fit(host_bytes: int, *, left_bytes: int, left: str) -> None:
    """Refuse host blocks that are more than the memory they are to lie in has left.

    Args:
        host_bytes: bytes of all host blocks.
        left_bytes: what is left.
        left: in words, which memory that is and how the number came about.

    Raises:
        NotEnoughMemoryError: with the numbers, what is missing, and the flag that helps.
    """
    if host_bytes <= max(0, left_bytes):
        return
    missing = host_bytes - max(0, left_bytes)
    raise NotEnoughMemoryError(
        "NOT_ENOUGH_MEMORY",
        f"the host blocks of --swap-space take {host_bytes} bytes, but {left} leaves {left_bytes} bytes, {missing} too "
        "few. Set less aside with --swap-space.",
        host_bytes=host_bytes,
        left_bytes=left_bytes,
        missing_bytes=missing,
    )


def host_memory_left() -> int:
    """Memory of the machine that this process may still take: within its cgroup, and of what nobody holds. Bytes."""
    left = [limit - resident_bytes() for limit in _cgroup_limits()]
    return min([int(psutil.virtual_memory().available), *left])


def total_memory(device: torch.device, memory_limit: int | None) -> int:
    """Memory that the executor's share is taken from. Units: bytes.

    Args:
        device: where the model computes.
        memory_limit: the limit that was set.

    Returns:
        The limit, on CUDA at most the device's memory. Without one the device's memory; on CPU the smaller of the
        cgroup's limit and of half of what this process holds and the machine can still give: what others hold is not
        ours to count on, and a machine without limits is seldom ours alone.
    """
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
        return total if memory_limit is None else min(memory_limit, total)
    if memory_limit is not None:
        return memory_limit
    own = psutil.Process().memory_info()
    anonymous = own.rss - getattr(own, "shared", 0)  # pages of mapped files count as available already
    return min([(psutil.virtual_memory().available + anonymous) // 2, *_cgroup_limits()])


def _cgroup_limits(proc: Path = _SELF, root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Memory limits of this process's cgroup and those above it, v2 and v1."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return []  # no cgroups here (not Linux): the machine's memory is the limit
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
        folder = base / path.lstrip("/")
        for place in [folder, *folder.parents]:
            limit = place / name
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                limits.append(int(text))
            if place == base:
                break
    return limits


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def tune_malloc() -> None:
    """Make glibc give memory back and share its arenas, so that resident memory follows use.

    By default every thread may get an arena of its own, and the size above which memory is mapped (and so returned when
    freed) grows with use: peaks of different steps then add up. Elsewhere than glibc it does nothing.

    Source: mallopt(3).
    """
    libc = _glibc()
    if libc is None:
        return
    libc.mallopt(_M_ARENA_MAX, 2)
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


def release_free_memory(device: torch.device) -> None:
    """Collect garbage and give freed memory back to the system or the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


class PeakMeter:
    """Context that measures the most memory held while it is open.

    On CPU it is the process's resident memory: the kernel's own high-water mark, reset by /proc/self/clear_refs, or
    samples of a thread where that can not be reset. On CUDA it is what torch reserved at most plus what else lies on
    the device (CUDA's context, libraries, other processes).

    Attributes:
        peak_bytes: the result, once closed.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes = 0
        self._device = device
        self._sampler: _RssSampler | None = None

    def __enter__(self) -> PeakMeter:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        elif not _reset_high_water_mark():
            self._sampler = _RssSampler()
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            other = total - free - torch.cuda.memory_reserved(self._device)
            self.peak_bytes = torch.cuda.max_memory_reserved(self._device) + other
        elif self._sampler is not None:
            self.peak_bytes = self._sampler.stop()
        else:
            self.peak_bytes = high_water_mark()


def high_water_mark() -> int:
    """The most resident memory since the last reset (VmHWM). Units: bytes."""
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("expected a VmHWM line in /proc/self/status, got none")


def _reset_high_water_mark() -> bool:
    """Reset VmHWM; whether that worked (proc(5): clear_refs)."""
    try:
        (_SELF / "clear_refs").write_text("5")
    except OSError:
        return False  # not Linux, or /proc is mounted read-only: the caller samples instead
    return True


class _RssSampler(threading.Thread):
    """Samples resident memory every 2 ms, and once at each end."""

    def __init__(self) -> None:
        super().__init__(name="rss-sampler", daemon=True)
        self._peak = resident_bytes()
        self._done = threading.Event()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._done.wait(0.002):
            self._peak = max(self._peak, resident_bytes())

    def stop(self) -> int:
        """End the thread. Returns the peak in bytes."""
        self._done.set()
        self.join()
        return max(self._peak, resident_bytes())
