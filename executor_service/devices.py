"""Where a model computes.

Station: called by `backends.torch_backend` with what the user asked for.
"""

from __future__ import annotations

import torch

from executor_service.backends.base import BackendError


def resolve_device(name: str) -> torch.device:
    """The device that "auto", "cpu", "cuda" or "cuda:N" means here.

    Raises:
        BackendError: another name, or a CUDA device that is not there.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise BackendError("BAD_DEVICE", f"expected device auto, cpu, cuda or cuda:N, got {name!r}", device=name)
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        raise BackendError(
            "BAD_DEVICE",
            f"expected one of {torch.cuda.device_count()} CUDA devices, got {name!r}; use --device cpu without a GPU",
            device=name,
        )
    return torch.device(f"cuda:{int(index or 0)}")
