"""K and V stored in eight bits: how a value is written and what is read back, the same for every kernel.

Station: a `PagedKvCache` of such a type has one pair of codecs for each layer; `torch_paged` encodes what it writes and
decodes what it gathered. The oracle is `reference.write_kv` and `reference.paged_attention` with scales.

    stored = fp8(clamp(x / scale, -max, max))        computed in float32, rounded to nearest even
    read   = float32(stored) * scale                 then rounded to the type that the model computes in

Infinity is stored as the largest value, like everything out of range; NaN stays NaN.

How: few CPUs have instructions for these types, and torch's conversion of fp8_e4m3 computes each value by itself. So on
a CPU two neighbours are read at once, as an index into a table of all 65,536 pairs, whose entries are scaled already:
ten times as fast for fp8_e4m3, three times for fp8_e5m2 (1.6 million values to bfloat16, two cores with AVX-512: 6.2,
1.8 and 0.6 ms). On CUDA the conversion is a kernel that costs what its memory traffic costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

FP8_TYPES: Final = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By the names of `--kv-cache-dtype`; "fp8" is fp8_e4m3. Largest values: 448 and 57,344."""

# The integer that two values of this many bytes are together.
_PAIR_TYPES = {2: torch.int32, 4: torch.int64}


class Fp8Codec:
    """One scale of one type.

    Args:
        dtype: a value of FP8_TYPES.
        scale: what a stored 1 stands for; above 0.

    Attributes:
        max: the largest number the type holds.
    """

    __slots__ = ("_tables", "dtype", "max", "scale")

    def __init__(self, dtype: torch.dtype, scale: float) -> None:
        self.dtype = dtype
        self.scale = scale
        self.max = torch.finfo(dtype).max
        self._tables: dict[torch.dtype, torch.Tensor] = {}

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """What is stored. Shape: any; returns the same, as bytes (uint8), since torch indexes no fp8 on a CPU."""
        scaled = states.float().div(self.scale).clamp_(-self.max, self.max)
        return scaled.to(self.dtype).view(torch.uint8)

    def decode(self, stored: torch.Tensor, out: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        """What stored bytes stand for.

        Args:
            stored: contiguous bytes.
            out: where it goes, contiguous, in the type that the model computes in.
            index: workspace, contiguous; None makes one. Only a CPU takes it.

        Shape:
            stored, out: (N, W), W even on a CPU or it is slow; index: (N, W // 2) int32. Returns out.
        """
        if stored.device.type != "cpu" or stored.shape[-1] % 2:
            return out.copy_(stored.view(self.dtype)).mul_(self.scale)
        pairs = stored.view(torch.int16)
        index = torch.empty(pairs.shape, dtype=torch.int32) if index is None else index
        index.copy_(pairs).bitwise_and_(0xFFFF)
        table = self._table(out.dtype)
        torch.index_select(table, 0, index.view(-1), out=out.view(table.dtype).view(-1))
        return out

    def _table(self, dtype: torch.dtype) -> torch.Tensor:
        """Both values of every pair of bytes, as one integer. Shape: (65536,)."""
        table = self._tables.get(dtype)
        if table is None:
            values = torch.arange(256, dtype=torch.uint8).view(self.dtype).to(dtype).mul_(self.scale)
            pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).long()
            table = self._tables[dtype] = values[pairs].view(_PAIR_TYPES[dtype.itemsize])
        return table


class LayerCodecs(NamedTuple):
    """How one layer's K and V are stored; None: as they are."""

    keys: Fp8Codec | None
    values: Fp8Codec | None


PLAIN: Final = LayerCodecs(None, None)


def layer_codecs(dtype: torch.dtype, k_scales: Sequence[float], v_scales: Sequence[float]) -> list[LayerCodecs]:
    """The codecs of every layer; where scales are equal they share one, and its tables. Shape: both (num_layers,)."""
    known = {scale: Fp8Codec(dtype, scale) for scale in {*k_scales, *v_scales}}
    return [LayerCodecs(known[k], known[v]) for k, v in zip(k_scales, v_scales, strict=True)]
