"""Where a model computes, and how arrays get there.

Station: called by `backends.torch_backend` with what the user asked for, and by whoever puts a step on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from executor_service.backends.base import SettingError

_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def resolve_device(name: str) -> torch.device:
    """The device that "auto", "cpu", "cuda" or "cuda:N" means here.

    Raises:
        BackendError: another name, or a CUDA device that is not there.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise SettingError("BAD_DEVICE", f"expected device auto, cpu, cuda or cuda:N, got {name!r}", device=name)
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        raise SettingError(
            "BAD_DEVICE",
            f"expected one of {torch.cuda.device_count()} CUDA devices, got {name!r}; use --device cpu without a GPU",
            device=name,
        )
    return torch.device(f"cuda:{int(index or 0)}")


def make_current(device: torch.device) -> None:
    """Have what this thread launches run there: Triton and CUDA graphs take the thread's device, not the tensors'."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def staged(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A copy of a host array, of a type in _TORCH_TYPES, on its way to the device: page-locked if that is a GPU.

    torch's allocator of such memory hands none of it out again before the copies that read it are done.
    """
    tensor = torch.empty(array.shape, dtype=_TORCH_TYPES[array.dtype], pin_memory=device.type == "cuda")
    tensor.numpy()[...] = array
    return tensor


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A copy of a host array, of a type in _TORCH_TYPES, on the device.

    The host does not wait for it: what is launched later on the same stream finds it there.
    """
    return staged(array, device).to(device, non_blocking=True)
