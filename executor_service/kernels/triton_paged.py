"""Paged attention by the Triton kernels of this package, on CUDA or ROCm; on a CPU in Triton's interpreter, for tests.

Station: built by `backends.triton_backend`; called through `paged_kernels`. The oracle is `reference`.

How: once a step the rows' tables go to the device as they came, and rows are cut into programs: those with one query
token into splits of their context, those with more into runs of queries. A layer is then two to four launches: write
K/V, decode (and its reduction), prefill. Of a step that is recorded to be replayed (`decode_graphs`), the kernels cut
rows themselves.

Memory: `paged_decode`'s splits, bounded by `launch_shapes.most_splits`, and the step's tables.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
import triton

from executor_service.backends.base import BackendError, Int32, first_read
from executor_service.devices import upload
from executor_service.kernels.copy_blocks import copy_blocks, layer_addresses
from executor_service.kernels.fp8 import PLAIN, LayerCodecs
from executor_service.kernels.launch_shapes import (
    MAX_HEAD_DIM,
    PROGRAMS_PER_PROCESSOR,
    Target,
    decode_splits,
    decode_tile,
    most_splits,
    prefill_runs,
    prefill_tile,
    split_length,
    splits_per_row,
)
from executor_service.kernels.online_softmax import Scores
from executor_service.kernels.paged_decode import DecodeRows, paged_decode, paged_decode_kernel
from executor_service.kernels.paged_kernels import DeviceTables, GroupStep, PagedKernels, StepAttention
from executor_service.kernels.paged_prefill import PrefillTiles, paged_prefill
from executor_service.kernels.write_kv import write_kv

# The interpreter's programs run one after the other: as few as there can be, and yet more than one split.
_INTERPRETED_PROGRAMS = 4
_INTERPRETED_BLOCK_T = 256
# Major compute capabilities of `Target.HOPPER`: 12.x, Blackwell too, is built like 8.x.
_HOPPER_AND_LIKE = (9, 10)


class TritonAttention(StepAttention):
    """Attention of one step over tables that are on the device; subclasses say how its rows are cut into programs.

    Args:
        target: what the kernels run on.
        tables: the step's rows.
        window: as in `GroupStep`.
    """

    def __init__(self, target: Target, tables: DeviceTables, window: int) -> None:
        self._target = target
        self._tables = tables
        self._window = window or None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        codecs: LayerCodecs = PLAIN,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write, then attend; see the base class.

        Args:
            query: as there, like the six that follow.
            key: as there.
            value: as there.
            keys: as there.
            values: as there.
            scaling: as there.
            codecs: as there.
            softcap: scores become softcap * tanh(score / softcap); None leaves them.
        """
        k_scale = v_scale = 1.0
        if codecs.keys is not None and codecs.values is not None:
            # The kernels convert; the codecs only say how.
            k_scale, v_scale = codecs.keys.scale, codecs.values.scale
            keys, values = keys.view(codecs.keys.dtype), values.view(codecs.values.dtype)
        _, num_heads, head_dim = query.shape
        shape = {"head_dim": head_dim, "group": num_heads // key.shape[1], "itemsize": query.itemsize}
        block_t = _INTERPRETED_BLOCK_T if self._target is Target.INTERPRETER else 16
        slots = self._tables.slots
        write_kv(key, value, keys, values, slots, k_scale=k_scale, v_scale=v_scale, block_t=block_t)
        scores = Scores(scaling, self._window, softcap, k_scale, v_scale)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        tile = decode_tile(self._target, **shape)
        rows = self._decode_rows(key.shape[1], tile.block_n)
        if rows is not None:
            paged_decode(query, keys, values, out, rows, tile=tile, scores=scores)
        tile = prefill_tile(self._target, **shape)
        tiles = self._prefill_tiles(tile.block_m // shape["group"])
        if tiles is not None:
            paged_prefill(query, keys, values, out, tiles, tile=tile, scores=scores)
        return out

    @abstractmethod
    def _decode_rows(self, kv_heads: int, block_n: int) -> DecodeRows | None:
        """The rows with one query token, cut into splits for layers with so many KV heads; None: there are none."""

    @abstractmethod
    def _prefill_tiles(self, run: int) -> PrefillTiles | None:
        """The other rows, cut into runs of so many query tokens; None: there are none."""


class TritonStep(TritonAttention):
    """One step as the host knows it.

    Args:
        target: what the kernels run on.
        programs: how many programs decode is cut into.
        query_indptr, seq_lens, group, device: as in `PagedKernels.plan`, of one KV group.

    Layers may differ in heads: what depends on them is laid out when a layer first asks.
    """

    def __init__(
        self,
        target: Target,
        programs: int,
        *,
        query_indptr: Int32,
        seq_lens: Int32,
        group: GroupStep,
        device: torch.device,
    ) -> None:
        self._programs = programs
        self._device = device
        self._host_query_indptr = query_indptr
        self._host_seq_lens = seq_lens
        # One transfer for all, not four.
        columns = self._upload(query_indptr, seq_lens, group.tables.block_indptr, group.tables.block_ids)
        tables = DeviceTables(*columns, slots=upload(group.slot_mapping, device), block_size=group.block_size)
        super().__init__(target, tables, group.window)
        query_lens = np.diff(query_indptr)
        self._rows = np.flatnonzero(query_lens == 1).astype(np.int32)
        self._has_prefill = len(self._rows) < len(query_lens)
        self._decode: dict[tuple[int, int], DecodeRows] = {}
        self._prefill: dict[int, PrefillTiles] = {}

    def _decode_rows(self, kv_heads: int, block_n: int) -> DecodeRows | None:
        if not len(self._rows):
            return None
        known = self._decode.get((kv_heads, block_n))
        if known is None:
            lengths = self._host_seq_lens[self._rows]
            lengths = lengths - first_read(lengths - np.int32(1), self._window or 0)
            split_len = split_length(lengths, kv_heads=kv_heads, block_n=block_n, programs=self._programs)
            splits = decode_splits(self._rows, lengths, split_len)
            known = self._decode[kv_heads, block_n] = DecodeRows(
                *self._upload(splits.rows, splits.indptr, splits.split_rows, splits.split_numbers),
                query_indptr=self._tables.query_indptr,
                seq_lens=self._tables.seq_lens,
                block_indptr=self._tables.block_indptr,
                block_ids=self._tables.block_ids,
                block_size=self._tables.block_size,
                split_len=split_len,
            )
        return known

    def _prefill_tiles(self, run: int) -> PrefillTiles | None:
        if not self._has_prefill:
            return None
        known = self._prefill.get(run)
        if known is None:
            known = self._prefill[run] = PrefillTiles(
                *self._upload(*prefill_runs(self._host_query_indptr, self._host_seq_lens, run)),
                query_indptr=self._tables.query_indptr,
                seq_lens=self._tables.seq_lens,
                block_indptr=self._tables.block_indptr,
                block_ids=self._tables.block_ids,
                block_size=self._tables.block_size,
            )
        return known

    def _upload(self, *columns: Int32) -> Sequence[torch.Tensor]:
        """Columns on the device, in one piece."""
        return upload(np.concatenate(columns), self._device).split([len(column) for column in columns])


class TritonDecode(TritonAttention):
    """A decode step whose tables change under it: its launches depend on nothing but the number of rows.

    Args:
        target: what the kernels run on.
        programs: how many programs decode is cut into.
        tables: the rows, one query token each.
        window: as in `GroupStep`.
    """

    def __init__(self, target: Target, programs: int, tables: DeviceTables, window: int) -> None:
        super().__init__(target, tables, window)
        self._programs = programs

    def _decode_rows(self, kv_heads: int, block_n: int) -> DecodeRows:
        del block_n
        tables = self._tables
        none = tables.seq_lens[:0]
        return DecodeRows(
            rows=none,
            split_indptr=none,
            split_rows=none,
            split_numbers=none,
            query_indptr=tables.query_indptr,
            seq_lens=tables.seq_lens,
            block_indptr=tables.block_indptr,
            block_ids=tables.block_ids,
            block_size=tables.block_size,
            split_len=0,
            splits_per_row=splits_per_row(len(tables.seq_lens), kv_heads=kv_heads, programs=self._programs),
        )

    def _prefill_tiles(self, run: int) -> None:
        del run


class TritonKernels(PagedKernels):
    """The kernels for one model on one device.

    Args:
        device: where the cache lies.
        dtype: the type that the model computes in.
        kv_dtype: the cache's type.
        num_heads: query heads of a layer, the most of any.
        num_kv_heads: KV heads of a layer, the fewest of any.
        head_dim: elements of a head, the most of any layer.

    Raises:
        BackendError: the kernels do not run there, or not with these types or heads.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self._target = _target(device)
        _require_types(self._target, device, dtype, kv_dtype)
        if head_dim > MAX_HEAD_DIM:
            raise BackendError(
                "MODEL_NOT_SUPPORTED",
                f"expected heads of at most {MAX_HEAD_DIM} elements for the triton backend, got {head_dim}; "
                "use --backend torch",
                head_dim=head_dim,
            )
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._programs = _INTERPRETED_PROGRAMS
        if device.type == "cuda":
            processors = int(torch.cuda.get_device_properties(device).multi_processor_count)
            self._programs = PROGRAMS_PER_PROCESSOR * processors

    def plan(
        self,
        query_indptr: Int32,
        seq_lens: Int32,
        groups: Sequence[GroupStep],
        *,
        device: torch.device,
    ) -> Sequence[TritonStep]:
        """Put the step's tables on the device; see the base class."""
        return [
            TritonStep(
                self._target,
                self._programs,
                query_indptr=query_indptr,
                seq_lens=seq_lens,
                group=group,
                device=device,
            )
            for group in groups
        ]

    @property
    def can_record(self) -> bool:
        """They can: see `TritonDecode`."""
        return True

    def plan_decode(self, groups: Sequence[DeviceTables], windows: Sequence[int]) -> Sequence[TritonDecode]:
        """Attention of decode steps that can be recorded; see the base class."""
        return [
            TritonDecode(self._target, self._programs, tables, window)
            for tables, window in zip(groups, windows, strict=True)
        ]

    def copy_within(
        self, layers: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, chunk: int
    ) -> None:
        """Copy blocks within the cache, all at once: they take no workspace, so `chunk` is of no use here."""
        del chunk
        copy_blocks(layers, layer_addresses(layers), source, target)

    def reserved_bytes(self, max_num_seqs: int, max_model_len: int, windows: Sequence[int]) -> int:
        """The splits' partial results of one layer, and two copies of the largest table of each KV group."""
        splits = most_splits(max_num_seqs, kv_heads=self._num_kv_heads, programs=self._programs)
        return splits * self._num_heads * (self._head_dim + 1) * 4 + 2 * len(windows) * max_num_seqs * max_model_len * 4


def _target(device: torch.device) -> Target:
    """What kernels for this device are compiled for.

    Raises:
        BackendError: a CPU, and the kernels are not interpreted.
    """
    if not isinstance(paged_decode_kernel, triton.JITFunction):
        return Target.INTERPRETER
    if device.type != "cuda":
        raise BackendError(
            "BAD_DEVICE",
            f"expected a GPU for the triton backend, got device {device}; use --backend torch on a CPU "
            "(TRITON_INTERPRET=1 in the environment has its kernels interpreted there, for tests: correct and slow)",
            device=str(device),
        )
    if torch.version.hip is not None:
        return Target.HIP
    return Target.HOPPER if torch.cuda.get_device_capability(device)[0] in _HOPPER_AND_LIKE else Target.CUDA


def _require_types(target: Target, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Refuse types that the target computes wrongly, or not at all."""
    if target is Target.INTERPRETER and torch.bfloat16 in (dtype, kv_dtype):
        raise BackendError(
            "BAD_CONFIG",
            "expected float32 or float16 in Triton's interpreter, which computes bfloat16 wrongly, got bfloat16; "
            "set --dtype float32",
            dtype=str(dtype),
        )
    if target is Target.INTERPRETER and kv_dtype.itemsize == 1:
        raise BackendError(
            "BAD_CONFIG",
            "expected K/V as they are in Triton's interpreter, which rounds to 8-bit floats wrongly, got "
            f"{kv_dtype}; set --kv-cache-dtype auto",
            kv_cache_dtype=str(kv_dtype),
        )
    if target is not Target.CUDA:
        return
    capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if capability < (8, 0):
        raise BackendError(
            "BAD_DEVICE",
            f"expected a GPU of compute capability 8.0 at least for the triton backend, got {name}; "
            "use --backend torch",
            device=str(device),
        )
    if kv_dtype is torch.float8_e4m3fn and capability < (8, 9):
        raise BackendError(
            "BAD_CONFIG",
            f"expected a GPU of compute capability 8.9 for fp8_e4m3, got {name}; set --kv-cache-dtype auto or fp8_e5m2",
            kv_cache_dtype=str(kv_dtype),
        )
