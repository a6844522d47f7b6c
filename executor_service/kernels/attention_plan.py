"""The index tensors that paged attention needs, made once per step and used by every layer.

Station: `plan_attention` is called by `model_runner` with a step's block tables; `torch_paged` reads the plan.

How: rows with one query token (decode) are put together with rows of similar length, so that little is padded; rows
with more tokens (prefill) stand alone. Padding names the row's own last slot, which always holds good K/V: what unused
slots hold, NaN included, can not reach a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor_service.backends.base import GroupTables, Int32, first_read

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionLimits:
    """Bounds of the workspace.

    Units:
        gather_tokens: tokens gathered at once; mask_elements: query tokens times context; index_elements: slot
        indices kept for all layers of a step, beyond which they are made anew in each layer.
    """

    gather_tokens: int
    mask_elements: int = 4 * 1024 * 1024
    index_elements: int = 4 * 1024 * 1024

    def query_chunk(self, context: int) -> int:
        """Query tokens of a prefill row with this context that attend at once."""
        return max(16, min(512, self.mask_elements // context))


@dataclass(frozen=True)
class DecodeGroup:
    """Rows with one query token each, of similar length.

    Shape:
        tokens: (B,) their indices in the step; lens: (B,) how many positions each reads, the last ones; mask:
        (B, 1, 1, L) or None when all read L; kept_slots: (B * L,), or None when over the limit and made per layer from
        tables (B, blocks), lens, and starts (B,), the first position that each reads, None for 0.
    """

    tokens: torch.Tensor
    width: int
    tables: Int32
    lens: Int64
    kept_slots: torch.Tensor | None
    mask: torch.Tensor | None
    starts: Int64 | None = None

    def slots(self, block_size: int) -> torch.Tensor:
        """Slots of every row's positions, kept or made now. Shape: (B * L,)."""
        if self.kept_slots is not None:
            return self.kept_slots
        slots = slots_of(self.tables, self.lens, self.width, block_size, self.starts)
        return torch.from_numpy(slots).to(self.tokens.device)


@dataclass(frozen=True)
class PrefillRow:
    """One row with several query tokens.

    Shape:
        tokens `start` to `end` of the step are positions `context - (end - start)` to `context`, and read from position
        `first` on; slots: (context - first,), or None when the row has nothing but this step's tokens.
    """

    start: int
    end: int
    context: int
    slots: torch.Tensor | None
    first: int = 0


class GatherWorkspace:
    """Where a group's K and V are gathered: the same buffers for all groups and layers of a step, whatever their heads.

    Made anew for each gather, memory of this size would be mapped and faulted in each time.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(
        self, name: str, rows: int, width: int, like: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The buffer of this name, where `like` is and of its type unless one is said; what it held is lost.

        Shape:
            returns (rows, width); a name has one type.
        """
        size = rows * width
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = like.new_empty(size, dtype=dtype)
        return buffer[:size].view(rows, width)


@dataclass(frozen=True)
class AttentionPlan:
    """All that attention needs of one step, the same for every layer of a KV group.

    Shape:
        write_slots: (T,).

    Units:
        window: tokens that a token reads, itself included; 0 for all, `chunks_of` for those of its chunk.
    """

    write_slots: torch.Tensor
    decode: list[DecodeGroup]
    prefill: list[PrefillRow]
    block_size: int
    limits: AttentionLimits
    workspace: GatherWorkspace
    window: int = 0


def plan_attention(
    query_indptr: Int32,
    seq_lens: Int32,
    tables: GroupTables,
    slot_mapping: Int64,
    *,
    block_size: int,
    limits: AttentionLimits,
    device: torch.device,
    window: int = 0,
    workspace: GatherWorkspace | None = None,
) -> AttentionPlan:
    """Turn a step's block tables of one KV group into index tensors.

    Args:
        query_indptr: row r has tokens query_indptr[r] to query_indptr[r + 1].
        seq_lens: sequence lengths after this step.
        tables: block tables of the rows.
        slot_mapping: slot of every token of the step.
        block_size: tokens per block.
        limits: bounds of the workspace.
        device: where the index tensors live.
        window: tokens that a token reads, itself included; 0 for all, `chunks_of` for those of its chunk.
        workspace: that of the step's other groups; None makes one.

    Shape:
        query_indptr: (R + 1,); seq_lens: (R,); slot_mapping: (T,).
    """
    query_lens = np.diff(query_indptr)
    budget = limits.index_elements
    decode: list[DecodeGroup] = []
    read_lens = seq_lens - first_read(seq_lens - np.int32(1), window)
    for rows in _similar_rows(np.flatnonzero(query_lens == 1), read_lens, limits.gather_tokens):
        group = _decode_group(
            rows,
            query_indptr,
            read_lens,
            tables,
            starts=(seq_lens[rows] - read_lens[rows]).astype(np.int64) if window else None,
            block_size=block_size,
            index_budget=budget,
            device=device,
        )
        budget -= 0 if group.kept_slots is None else len(group.kept_slots)
        decode.append(group)
    prefill = []
    firsts = first_read(seq_lens - query_lens, window)
    for row in np.flatnonzero(query_lens > 1):
        context, length = int(seq_lens[row]), int(query_lens[row])
        first = int(firsts[row])
        slots = None
        if context > length:
            table, lens = _row_tables(np.array([row]), tables), np.array([context - first])
            starts = np.array([first]) if window else None
            slots = torch.from_numpy(slots_of(table, lens, context - first, block_size, starts)).to(device)
        prefill.append(PrefillRow(int(query_indptr[row]), int(query_indptr[row + 1]), context, slots, first))
    write_slots = torch.from_numpy(np.array(slot_mapping, dtype=np.int64)).to(device)
    return AttentionPlan(write_slots, decode, prefill, block_size, limits, workspace or GatherWorkspace(), window)


def _similar_rows(rows: Int64, seq_lens: Int32, gather_tokens: int) -> Iterator[Int64]:
    """Split rows into groups of similar length that fit one gather; a single group keeps its order."""
    if not len(rows):
        return
    by_length = rows[np.argsort(-seq_lens[rows], kind="stable")]
    lens = seq_lens[by_length]
    bounds = [0]
    for index, length in enumerate(lens):
        longest = int(lens[bounds[-1]])
        too_short = length < longest - max(64, longest // 4)
        too_many = index > bounds[-1] and (index - bounds[-1] + 1) * longest > gather_tokens
        if too_short or too_many:
            bounds.append(index)
    if len(bounds) == 1:
        yield rows
        return
    for start, end in zip(bounds, [*bounds[1:], len(rows)], strict=True):
        yield by_length[start:end]


def _decode_group(
    rows: Int64,
    query_indptr: Int32,
    read_lens: Int32,
    tables: GroupTables,
    *,
    starts: Int64 | None,
    block_size: int,
    index_budget: int,
    device: torch.device,
) -> DecodeGroup:
    """Index tensors of one group of decode rows."""
    lens = read_lens[rows].astype(np.int64)
    width = int(lens.max())
    padded = _row_tables(rows, tables)
    slots = None
    if len(rows) * width <= index_budget:
        slots = torch.from_numpy(slots_of(padded, lens, width, block_size, starts)).to(device)
    mask = None
    if int(lens.min()) != width:
        mask = torch.from_numpy(np.arange(width) < lens[:, None]).view(len(rows), 1, 1, width).to(device)
    tokens = torch.from_numpy(query_indptr[rows].astype(np.int64)).to(device)
    return DecodeGroup(tokens, width, padded, lens, slots, mask, starts)


def _row_tables(rows: Int64, tables: GroupTables) -> Int32:
    """Block tables of some rows, padded with 0. Shape: (B, most blocks of a row)."""
    starts = tables.block_indptr[rows]
    counts = tables.block_indptr[rows + 1] - starts
    columns = np.arange(int(counts.max()))
    used = columns < counts[:, None]
    padded = np.zeros(used.shape, dtype=np.int32)
    padded[used] = tables.block_ids[(starts[:, None] + columns)[used]]
    return padded


def slots_of(tables: Int32, lens: Int64, width: int, block_size: int, starts: Int64 | None = None) -> Int64:
    """Slots of `lens` positions of every row from `starts`, or 0, on; those past the end name the row's last slot.

    Shape:
        tables: (B, blocks); lens, starts: (B,); returns (B * width,).
    """
    if starts is not None:
        positions = starts[:, None] + np.minimum(np.arange(width), lens[:, None] - 1)
        blocks = np.take_along_axis(tables, positions // block_size, axis=1).astype(np.int64)
        return (blocks * block_size + positions % block_size).reshape(-1)
    every = (tables.astype(np.int64)[:, :, None] * block_size + np.arange(block_size)).reshape(len(lens), -1)[:, :width]
    last = every[np.arange(len(lens)), lens - 1]
    return np.where(np.arange(width) < lens[:, None], every, last[:, None]).reshape(-1)
