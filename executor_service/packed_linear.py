"""Linear layers whose weights oneDNN has laid out once, instead of in every call.

Station: `backends.torch_backend` calls `pack_linear_layers` after loading, on CPU. Model code stays as it is: only
modules of exactly `torch.nn.Linear` are replaced, and only when the model runs with their weights out of its sight.

Why: a decode step is bound by reading weights; in the plain layout the matrix product reads them up to twice as slowly.
Results in bfloat16 are the same bit for bit, in float32 the sums differ in their last bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from torch import nn

_PACKABLE = (torch.float32, torch.bfloat16)
# oneDNN keeps about 200 KB for every row count it has met with a weight's shape, for ever: rows are rounded up to few
# different counts, and more than this many are taken in portions.
_MOST_ROWS = 512


def padded_rows(rows: int) -> int:
    """The row count that `rows` are rounded up to: exact up to 8, then four counts per doubling."""
    if rows <= 8:
        return rows
    step = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


class PackedLinear(nn.Module):
    """y = x W^T + b, with W dense at first and in oneDNN's own layout after `pack`.

    It has no `weight`, so that model code which would read it fails at once rather than reading a wrong one.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._linear: list[nn.Linear] = [linear]  # in a list: no submodule, no parameter of this module
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Lay the weights out and let go of the dense ones."""
        weight = self._linear.pop().weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def unpacked(self) -> nn.Linear:
        """The layer this one stands for; only before `pack`."""
        return self._linear[0]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Shape: (..., in_features) to (..., out_features)."""
        if self._packed is None:
            return self._linear[0](states)  # type: ignore[no-any-return]
        flat = states.reshape(-1, self.in_features)
        rows = len(flat)
        if rows <= _MOST_ROWS and padded_rows(rows) == rows:
            return self._product(flat).view(*states.shape[:-1], self.out_features)
        out = torch.empty((rows, self.out_features), dtype=states.dtype)
        for start in range(0, rows, _MOST_ROWS):
            part = flat[start : start + _MOST_ROWS]
            missing = padded_rows(len(part)) - len(part)
            padded = nn.functional.pad(part, (0, 0, 0, missing)) if missing else part
            out[start : start + len(part)] = self._product(padded)[: len(part)]
        return out.view(*states.shape[:-1], self.out_features)

    def _product(self, flat: torch.Tensor) -> torch.Tensor:
        """Shape: (rows, in_features) to (rows, out_features)."""
        return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
            flat, self._packed, self.bias, "none", [], ""
        )


def pack_linear_layers(model: nn.Module, check: Callable[[], object]) -> int:
    """Pack every linear layer of a model on CPU.

    Args:
        model: changed in place.
        check: runs the model once; it raises AttributeError where model code reads a linear layer's weight itself.

    Returns:
        How many layers are packed; 0 where this torch, machine, type or model can not.
    """
    if not _can_pack():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype in _PACKABLE and child.weight.device.type == "cpu"
    ]
    if not found:
        return 0
    replaced = [(parent, name, PackedLinear(linear)) for parent, name, linear in found]
    for parent, name, packed in replaced:
        setattr(parent, name, packed)
    found.clear()  # else these references would keep every dense weight alive
    try:
        check()
    except AttributeError:
        for parent, name, packed in replaced:
            setattr(parent, name, packed.unpacked())
        return 0
    for _, _, packed in replaced:
        packed.pack()
    _leave_file_mapping(model)
    return len(replaced)


def warm_up(model: nn.Module, max_rows: int) -> None:
    """Meet every row count up to `max_rows` once per weight shape, so that a memory profile sees what oneDNN keeps."""
    layers = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            layers[module.in_features, module.out_features, module.bias is None] = module
    counts = sorted({padded_rows(rows) for rows in range(1, min(max_rows, _MOST_ROWS) + 1)})
    with torch.inference_mode():
        for layer in layers.values():
            for rows in counts:
                layer(torch.zeros((rows, layer.in_features), dtype=next(model.parameters()).dtype))


def _leave_file_mapping(model: nn.Module) -> None:
    """Copy the parameters that are left: one view of a mapped file keeps all of the file resident."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _can_pack() -> bool:
    """Whether this torch has oneDNN and its packing does what a linear layer does."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(48, 32).requires_grad_(requires_grad=False)
    states = torch.randn(1, 3, 48, generator=generator)
    packed = PackedLinear(linear)
    expected = linear(states)
    packed.pack()
    return bool(torch.allclose(packed(states), expected, atol=1e-5))
