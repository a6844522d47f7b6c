"""Puts right how Triton's interpreter converts to 8-bit floats and bfloat16: it drops carries, saturates wrongly, and
truncates (Triton 3.8). With that a kernel that does nothing but convert bfloat16 is interpreted rightly.

For tests only: the compiled kernels use the hardware's conversion, which rounds to nearest even, as torch does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@contextmanager
def exact_casts() -> Iterator[None]:
    """While it lasts, conversions between these types are torch's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", _convert)
        yield


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode: object) -> np.ndarray:  # type: ignore[type-arg]
    """Bits of the target type. `data` holds numbers, or bits where NumPy has no such type."""
    del rounding_mode  # the kernels ask for nearest even only
    bits = np.ascontiguousarray(data).view(_BITS[_TORCH[source].itemsize])
    signed = torch.from_numpy(bits.view(bits.dtype.name.removeprefix("u")).copy())
    out = signed.view(_TORCH[source]).to(_TORCH[target])
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.itemsize]
    return out.view(raw).numpy().view(_BITS[out.itemsize])
