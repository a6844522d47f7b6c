"""The compiled kernels as functions of tensors.

Station: made by `load_native_ops` once for a backend on CPU; `packed_linear`, `fused_layers` and `kernels.native_paged`
call it. What it stands for in torch is its oracle, on which it is tried before it is used.

A call is a few microseconds: addresses and sizes, no dispatcher and no tensor made but the result. Callers give what
the shapes say; whatever is not so would be memory read or written elsewhere: it raises ValueError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from executor_service.huge_pages import HugePageArena
from executor_service.layer_ops import LayerOps, TorchOps
from executor_service.native.library import NativeBuildError, native_library

__all__ = ["LANES", "NativeOps", "PagedRows", "load_native_ops"]

LANES = 16
"""A head's dimension has to be a multiple of it for `attend`."""

Columns = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
"""A table of addresses and sizes."""

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_log = structlog.get_logger(__name__)


class PagedRows:
    """Where the rows of a step lie in the cache, as addresses; it keeps what they point to.

    A window below 0 is the size of chunks, negated.

    Shape:
        query_indptr: (R + 1,); seq_lens: (R,); block_indptr: (R + 1,); block_ids: all int32 and contiguous.
    """

    __slots__ = ("addresses", "block_size", "kept", "num_rows", "window")

    def __init__(self, kept: Sequence[Any], block_size: int, window: int) -> None:
        self.kept = kept
        self.addresses = [array.ctypes.data for array in kept]
        self.num_rows = len(kept[1])
        self.block_size = block_size
        self.window = window


class NativeOps(LayerOps):
    """Kernels of one library.

    Args:
        path: the library.

    Attributes:
        linear_columns: outputs of a packed block of weights; 0 where this CPU has no products of bfloat16.

    Raises:
        OSError, AttributeError: it is no such library.
    """

    def __init__(self, path: Path) -> None:
        self._arena = HugePageArena()
        library = ctypes.CDLL(str(path))
        library.kvplane_linear_columns.restype = _INT
        self.linear_columns: int = library.kvplane_linear_columns()
        if self.linear_columns:
            self._pack = _function(library.kvplane_pack, _POINTER, _INT, _INT, _INT, _POINTER)
            self._linear = _function(library.kvplane_linear, *[_POINTER] * 3, *[_INT] * 3, _POINTER)
            self._layers = _function(
                library.kvplane_layers,
                *[_POINTER] * 2,
                _INT,
                *[_POINTER] * 2,
                _INT,
                *[_POINTER] * 2,
                _INT,
                _POINTER,
                _INT,
                *[_POINTER] * 2,
                _INT,
            )
            self._layers_workspace = library.kvplane_layers_workspace
            self._layers_workspace.argtypes = [_POINTER, _INT]
            self._layers_workspace.restype = _INT
        self._planned_tiles = library.kvplane_planned_tiles
        self._planned_tiles.argtypes = [*[_POINTER] * 4, *[_INT] * 6]
        self._planned_tiles.restype = _INT
        shapes: dict[str, list[Any]] = {
            "rms_norm": [*[_POINTER] * 3, _FLOAT, *[_INT] * 2, _POINTER],
            "rotary": [_POINTER, _INT, *[_POINTER] * 2, *[_INT] * 3],
            "silu_and_mul": [_POINTER, *[_INT] * 2, _POINTER],
            "write_kv": [*[_POINTER] * 2, *[_INT] * 2, _POINTER, *[_INT] * 2, *[_POINTER] * 2],
            "attend": [_POINTER, _INT, *[_POINTER] * 6, *[_INT] * 6, _FLOAT, _POINTER],
        }
        self._of_type = {
            dtype: {
                name: _function(getattr(library, f"kvplane_{name}_{suffix}"), *types) for name, types in shapes.items()
            }
            for dtype, suffix in _NAMES.items()
        }

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether there are kernels for this type."""
        return dtype in self._of_type

    def packs(self, weight: torch.Tensor) -> bool:
        """Whether `pack` takes such weights."""
        return bool(self.linear_columns) and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0

    def pack(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay weights out for `linear`, one after the other as one matrix. Shape: each (outputs, inputs)."""
        inputs = weights[0].shape[1]
        outputs = sum(len(weight) for weight in weights)
        blocks = -(-outputs // self.linear_columns)
        packed = self._arena.empty(blocks * self.linear_columns * inputs, torch.bfloat16).zero_()
        offset = 0
        for weight in weights:
            _require(self.packs(weight), "weights that packs() takes")
            dense = weight.contiguous()
            self._pack(dense.data_ptr(), len(dense), inputs, offset, packed.data_ptr())
            offset += len(dense)
        return packed

    def linear(
        self, states: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int
    ) -> torch.Tensor:
        """X W^T + b. Shape: states (T, inputs), contiguous; returns (T, outputs)."""
        rows, inputs = states.shape
        _require(states.is_contiguous() and states.dtype == torch.bfloat16, "contiguous states of bfloat16")
        out = states.new_empty((rows, outputs))
        self._linear(
            states.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows,
            outputs,
            inputs,
            out.data_ptr(),
        )
        return out

    def rms_norm(
        self, states: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the base class."""
        _require(states.is_contiguous() and weight.dtype == states.dtype, "contiguous states of the weight's type")
        _require(
            added is None or (added.is_contiguous() and added.shape == states.shape),
            "contiguous `added` of the states' shape",
        )
        out = torch.empty_like(states)
        width = states.shape[-1]
        self._of_type[states.dtype]["rms_norm"](
            states.data_ptr(),
            None if added is None else added.data_ptr(),
            weight.data_ptr(),
            eps,
            states.numel() // width,
            width,
            out.data_ptr(),
        )
        return out

    def rotate(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """See the base class."""
        tokens, heads, dim = states.shape
        _require(_heads_adjoin(states), "a token's heads side by side")
        _require(cos.is_contiguous() and sin.is_contiguous(), "contiguous cosines and sines")
        _require(cos.shape == sin.shape == (1, tokens, dim), "a cosine and a sine for each value of a head")
        _require(cos.dtype == sin.dtype == states.dtype, "cosines and sines of the states' type")
        self._of_type[states.dtype]["rotary"](
            states.data_ptr(), states.stride(0), cos.data_ptr(), sin.data_ptr(), tokens, heads, dim
        )

    def silu_and_mul(self, both: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        _require(both.is_contiguous(), "contiguous gates and ups")
        width = both.shape[-1] // 2
        out = both.new_empty((*both.shape[:-1], width))
        self._of_type[both.dtype]["silu_and_mul"](both.data_ptr(), both.numel() // (2 * width), width, out.data_ptr())
        return out

    def layers_workspace(self, sizes: Columns, tokens: int) -> int:
        """Elements of bfloat16 that `run_layers` needs. Shape: sizes (5,), as there."""
        return int(self._layers_workspace(sizes.ctypes.data, tokens))

    def run_layers(
        self,
        states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        sizes: Columns,
        layers: Columns,
        pages: Columns,
        groups: Columns,
        workspace: torch.Tensor,
        wanted: Columns | None = None,
    ) -> None:
        """A decoder's layers one after the other; `states` become what the last one returns.

        They do so for the tokens that are `wanted`, rising indices; None is all. Others' states may be anything then.

        Shape:
            states: (1, T, width); cos, sin: (1, T, D); bfloat16, contiguous. sizes: (5,); layers: (L, 17); pages:
            (L, 3); groups: (G, 8); int64, with the fields of `Sizes`, `Layer`, `Page` and `Group` in layers.h.
            workspace: `layers_workspace` elements of bfloat16 or more. wanted: (S,) int64.
        """
        tokens = states.shape[1]
        for tensor in (states, cos, sin, workspace):
            _require(tensor.dtype == torch.bfloat16 and tensor.is_contiguous(), "contiguous tensors of bfloat16")
        for table in (sizes, layers, pages, groups):
            _require(table.dtype == np.int64 and table.flags.c_contiguous, "contiguous tables of int64")
        shapes = (sizes.shape, layers.shape[1:], pages.shape, groups.shape[1:])
        _require(shapes == ((5,), (17,), (len(layers), 3), (8,)), "tables with the fields of layers.h")
        _require(states.shape[2] == sizes[0], "states as wide as the layers")
        _require(cos.shape == sin.shape == (1, tokens, sizes[3]), "a cosine and a sine for each value of a head")
        _require(workspace.numel() >= self.layers_workspace(sizes, tokens), "a workspace for all tokens")
        if wanted is not None:
            _require(wanted.dtype == np.int64 and wanted.flags.c_contiguous, "contiguous indices of int64")
            _require(bool(np.all(np.diff(wanted, prepend=-1, append=tokens) > 0)), "rising indices of tokens")
        self._layers(
            sizes.ctypes.data,
            layers.ctypes.data,
            len(layers),
            pages.ctypes.data,
            groups.ctypes.data,
            len(groups),
            cos.data_ptr(),
            sin.data_ptr(),
            tokens,
            None if wanted is None else wanted.ctypes.data,
            0 if wanted is None else len(wanted),
            states.data_ptr(),
            workspace.data_ptr(),
            torch.get_num_threads(),
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        slots: torch.Tensor,
        rows: PagedRows,
        scaling: float,
    ) -> torch.Tensor:
        """Write K/V, then attend; arguments as in `PagedKernels`. Shape: slots (T,) int64."""
        tokens, heads, dim = query.shape
        kv_heads = key.shape[1]
        width = kv_heads * dim
        for states in (query, key, value):
            _require(states.dtype == keys.dtype, "states of the cache's type")
            _require(_heads_adjoin(states), "a token's heads side by side")
        _require(key.shape == value.shape == (tokens, kv_heads, dim), "K and V of all tokens")
        _require(keys.is_contiguous() and values.is_contiguous(), "a contiguous cache")
        _require(keys.shape[1] == values.shape[1] == width, "a cache with rows of all KV heads")
        functions = self._of_type[keys.dtype]
        functions["write_kv"](
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
            slots.data_ptr(),
            tokens,
            width,
            keys.data_ptr(),
            values.data_ptr(),
        )
        out = query.new_empty((tokens, heads, dim))
        functions["attend"](
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            *rows.addresses,
            rows.block_size,
            rows.window,
            rows.num_rows,
            kv_heads,
            heads // kv_heads,
            dim,
            scaling,
            out.data_ptr(),
        )
        return out

    def planned_tiles(self, rows: PagedRows, *, kv_heads: int, share: int, threads: int) -> int:
        """Tiles of one head's K/V that such a step looks at, where tiles that rows share count once for each part.

        For who wants to know what a plan is worth: no step asks. `share` is query heads of a KV head.
        """
        return int(
            self._planned_tiles(*rows.addresses, rows.block_size, rows.window, rows.num_rows, kv_heads, share, threads)
        )


def load_native_ops(cache_dir: Callable[[], Path]) -> NativeOps | None:
    """The kernels of this machine, compiled now if need be; None, with a line in the log, where there are none.

    `cache_dir` may raise RuntimeError: a user without a home has none.
    """
    try:
        path = native_library(cache_dir())
        ops = NativeOps(path)
        _require_right(ops)
    except (NativeBuildError, OSError, AttributeError, RuntimeError) as error:
        _log.info("native_kernels_unavailable", why=str(error))
        return None
    _log.info("native_kernels_loaded", path=str(path), linear=bool(ops.linear_columns))
    return ops


def _require_right(ops: NativeOps) -> None:
    """Refuse kernels that do not compute what torch does: a compiler may be wrong, too. Raises NativeBuildError."""
    oracle = TorchOps()
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    states, weight = some(1, 3, 40), some(40)
    wrong = [
        name
        for name, got, expected in (
            ("rms_norm", ops.rms_norm(states.clone(), weight, 1e-5), oracle.rms_norm(states.clone(), weight, 1e-5)),
            ("silu_and_mul", ops.silu_and_mul(states), oracle.silu_and_mul(states)),
        )
        if not torch.allclose(got, expected, atol=1e-5)
    ]
    for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        if ops.takes(dtype):
            wrong += _wrong_in_attention(ops, oracle, dtype, atol)
    if ops.linear_columns:
        dense, few = some(40, 24).bfloat16(), some(3, 24).bfloat16()
        if not torch.allclose(ops.linear(few, ops.pack([dense]), None, 40), few @ dense.T, atol=1e-1):
            wrong.append("linear")
    if wrong:
        raise NativeBuildError(f"expected kernels that compute what torch does, got others in {', '.join(wrong)}")


def _wrong_in_attention(ops: NativeOps, oracle: TorchOps, dtype: torch.dtype, atol: float) -> list[str]:
    """Rotary positions, and one row of 7 tokens that reads back over a block of 5, a window of 6, and chunks of 4."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn((7, heads, 32), generator=generator).to(dtype) for heads in (4, 2, 2))
    angles = torch.randn((1, 7, 32), generator=generator)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    rotated, expected_rotated = query.clone(), query.clone()
    ops.rotate(rotated, cos, sin)
    oracle.rotate(expected_rotated, cos, sin)
    blocks, size = np.array([3, 1], np.int32), 5
    table = (np.array([0, 7], np.int32), np.array([7], np.int32), np.array([0, 2], np.int32), blocks)
    slots = torch.tensor([int(blocks[place // size]) * size + place % size for place in range(7)])
    keys, values = (torch.full((4 * size, 64), float("nan"), dtype=dtype) for _ in range(2))
    q, k, v = (states.float().transpose(0, 1) for states in (query, key, value))
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    place = torch.arange(7)
    behind = place[:, None] - place[None, :]
    wrong = [] if torch.allclose(rotated.float(), expected_rotated.float(), atol=atol) else [f"rotary of {dtype}"]
    for window, hidden in ((6, behind >= 6), (-4, place[:, None] // 4 != place[None, :] // 4)):
        rows = PagedRows(table, size, window)
        got = ops.attend(query, key, value, keys, values, slots=slots, rows=rows, scaling=0.2)
        scores = (q @ k.transpose(1, 2) * 0.2).masked_fill((behind < 0) | hidden, float("-inf"))
        expected = (scores.softmax(-1) @ v).transpose(0, 1)
        if not torch.allclose(got.float(), expected, atol=atol):
            wrong.append(f"attention of {dtype} with a window of {window}")
    return wrong


def _require(condition: bool, expected: str) -> None:
    """Refuse what would be read or written out of its place; no assert, which `python -O` leaves out."""
    if not condition:
        raise ValueError(f"expected {expected}")


def _heads_adjoin(states: torch.Tensor) -> bool:
    """Whether a token's heads lie side by side; the stride of a single head says nothing. Shape: (T, H, D)."""
    _, heads, dim = states.shape
    return states.stride(2) == 1 and (heads == 1 or states.stride(1) == dim)


def _function(function: Any, *types: Any) -> Any:
    """A function that returns nothing, with the types of its arguments."""
    function.restype = None
    function.argtypes = list(types)
    return function
