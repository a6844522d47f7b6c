"""An adapter's matrices, shared out among ranks as the layers are that they are for.

Station: `sharding` notes how it cut each layer; `lora` cuts an adapter's matrices alike, and `backend` sends each rank
its part. It knows matrices; it knows no model.

    layer cut by outputs    A whole, B by its rows: each rank adds to its own outputs
    layer cut by inputs     A by its columns, B whole: what each rank adds is a part of the sum that the ranks make
    layer left whole        both whole, in every rank

So an adapter costs no exchange of its own: x A^T B^T = Σ_ranks x_rank A_rank^T B^T, and the layer adds up anyway.

Source: Sheng et al. 2023 (S-LoRA), where the small products are cut otherwise and add exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import safetensors.torch
import torch

from executor_service.lora_files import LoraMatrices

__all__ = ["AdapterPart", "LayerCut", "part_of", "part_range"]


@dataclass(frozen=True)
class LayerCut:
    """How the ranks share a linear layer.

    Attributes:
        by_outputs: else by inputs.
        blocks: what lies side by side in these, in order: how many, and whether each rank has a part of them or all.
    """

    by_outputs: bool
    blocks: tuple[tuple[int, bool], ...]

    @classmethod
    def evenly(cls, number: int, *, by_outputs: bool) -> LayerCut:
        """Of so many outputs, or inputs, each rank has the next part."""
        return cls(by_outputs, ((number, True),))

    @property
    def number(self) -> int:
        """How many outputs, or inputs, the whole layer has."""
        return sum(number for number, _ in self.blocks)

    def number_of(self, rank: int, size: int) -> int:
        """How many of them a rank has."""
        return sum(len(part_range(number, rank, size)) if is_shared else number for number, is_shared in self.blocks)

    def take(self, values: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
        """What a rank has of values that lie so along a dimension; a view where they lie side by side."""
        parts = []
        for (number, is_shared), block in zip(self.blocks, values.split([n for n, _ in self.blocks], dim), strict=True):
            part = part_range(number, rank, size) if is_shared else range(number)
            parts.append(block.narrow(dim, part.start, len(part)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def part_range(number: int, rank: int, size: int) -> range:
    """Which of so many a rank has; parts differ by one at most."""
    return range(rank * number // size, (rank + 1) * number // size)


def part_of(matrices: LoraMatrices, cut: LayerCut | None, rank: int, size: int) -> LoraMatrices:
    """A rank's part; None for a layer that every rank has whole."""
    if cut is None:
        return matrices
    if cut.by_outputs:
        return replace(matrices, b=cut.take(matrices.b, 0, rank, size))
    return replace(matrices, a=cut.take(matrices.a, 1, rank, size))


@dataclass(frozen=True)
class AdapterPart:
    """What one rank has of an adapter, on its way to it: bytes, since tensors do not pickle without shared memory.

    Attributes:
        data: safetensors, by the layer's name and the matrix's.
        scales: by the layer's name.
    """

    data: bytes
    scales: Mapping[str, float]

    @classmethod
    def of(cls, matrices: Mapping[str, LoraMatrices], dtype: torch.dtype) -> AdapterPart:
        """Pack a rank's matrices, in the type that ranks compute with."""
        tensors = {
            f"{name}.{which}": matrix.to("cpu", dtype).contiguous()
            for name, one in matrices.items()
            for which, matrix in (("a", one.a), ("b", one.b))
        }
        return cls(safetensors.torch.save(tensors), {name: one.scale for name, one in matrices.items()})

    def matrices(self) -> dict[str, LoraMatrices]:
        """What was packed. Raises SafetensorError, KeyError where it is something else."""
        tensors = safetensors.torch.load(self.data)
        return {
            name: LoraMatrices(tensors[f"{name}.a"], tensors[f"{name}.b"], scale) for name, scale in self.scales.items()
        }
