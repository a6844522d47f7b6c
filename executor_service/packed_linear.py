"""Linear layers whose weights are laid out once, instead of in every call.

Station: `backends.torch_loading` calls `pack_linear_layers` after loading, on CPU. Model code stays as it is: only
modules of exactly `torch.nn.Linear` are replaced, and only when the model runs with their weights out of its sight.
`fused_layers` makes one of several that have the same input.

Why: a decode step is bound by reading weights; in the plain layout the matrix product reads them up to twice as slowly.
The layout is oneDNN's own, or that of `native.ops` where there is a compiler and a CPU with products of bfloat16, which
reads faster yet. Results in bfloat16 are the same, but for the order of sums, as are those in float32.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence

import torch
from torch import nn

from executor_service.native.ops import NativeOps

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
    """y = x W^T + b, with W dense at first and in another layout after `pack`.

    It has no `weight`, so that model code which would read it fails at once rather than reading a wrong one.

    Args:
        linears: the layer it stands for, or several of one input, whose outputs then lie side by side.
        native: kernels with a layout of their own, for weights that they take; None is oneDNN for all.

    Attributes:
        is_joined: whether it stands for several layers.
    """

    def __init__(self, *linears: nn.Linear, native: NativeOps | None = None) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.bias = _joined_bias(linears)
        self._linears: list[nn.Linear] = list(linears)  # in a list: no submodule, no parameter of this module
        self._native = native if native is not None and native.packs(linears[0].weight) else None
        self._packed: torch.Tensor | None = None
        self.is_joined = len(linears) > 1

    @property
    def is_native(self) -> bool:
        """Whether the layout is that of the compiled kernels."""
        return self._native is not None

    @property
    def packed(self) -> torch.Tensor:
        """The weights as `pack` laid them out. Shape: that of the layout."""
        assert self._packed is not None
        return self._packed

    def pack(self) -> None:
        """Lay the weights out and let go of the dense ones."""
        weights = [linear.weight.detach() for linear in self._linears]
        self._linears.clear()
        if self._native is not None:
            self._packed = self._native.pack(weights)
        else:
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def unpacked(self) -> nn.Linear:
        """The layer this one stands for; only before `pack`, and where it is one."""
        (linear,) = self._linears
        return linear

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Shape: (..., in_features) to (..., out_features)."""
        if self._packed is None:
            return torch.cat([linear(states) for linear in self._linears], dim=-1)
        flat = states.reshape(-1, self.in_features)
        if self._native is not None:
            out = self._native.linear(flat.contiguous(), self._packed, self.bias, self.out_features)
            return out.view(*states.shape[:-1], self.out_features)
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


def can_pack(linear: nn.Module) -> bool:
    """Whether a module is a linear layer that can be packed."""
    if type(linear) is not nn.Linear or linear.weight.dtype not in _PACKABLE or linear.weight.device.type != "cpu":
        return False
    return linear.bias is None or linear.bias.dtype == linear.weight.dtype


def pack_linear_layers(model: nn.Module, check: Callable[[], object], native: NativeOps | None = None) -> int:
    """Pack every linear layer of a model on CPU, and let those that are `PackedLinear` already as they are.

    Args:
        model: changed in place.
        check: runs the model once; it raises AttributeError where model code reads a linear layer's weight itself.
        native: as `PackedLinear` takes it.

    Returns:
        How many layers are packed; 0 where this torch, machine, type or model can not.
    """
    if not packing_works():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if can_pack(child)
    ]
    if not found:
        return 0
    replaced = [(parent, name, PackedLinear(linear, native=native)) for parent, name, linear in found]
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
        if isinstance(module, PackedLinear) and not module.is_native:  # which keeps nothing
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


def _joined_bias(linears: Sequence[nn.Linear]) -> nn.Parameter | None:
    """The bias of layers side by side: one layer's own, or a copy of all, 0 for a layer that has none."""
    if len(linears) == 1 or all(linear.bias is None for linear in linears):
        return linears[0].bias
    parts = [linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
    return nn.Parameter(torch.cat(parts), requires_grad=False)


def packing_works() -> bool:
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
