"""Attention of rows with one query token, each row's context split over several programs.

Station: launched by `triton_paged` in every layer for the rows of `DecodeRows`. The oracle is
`reference.paged_attention`.

How: a program takes one split of one row's context, and one KV head with all query heads that share it, so K/V are
read once. Where any row has more than one split, each split leaves its weighted mean of values and the log of its sum
of weights; `reduce_splits_kernel` puts them together. Memory traffic is K/V once, and a few per cent for the splits.

Splits are cut by the host, who knows all lengths, or by the programs themselves: so many for each row, whatever its
length, where a launch is recorded once and replayed over other rows.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.kernels.launch_shapes import MIN_SPLIT, Tile
from executor_service.kernels.online_softmax import Scores, attend, factors_of_rows


@triton.jit
def own_split_len(length, per_row, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions of each of per_row splits that a row of this length is cut into: whole tiles, LEAST at least."""
    share = tl.maximum((length + per_row - 1) // per_row, LEAST)
    return (share + BLOCK_N - 1) // BLOCK_N * BLOCK_N


@triton.jit
def first_seen(length, window, IN_CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first position that the last token of a row of this length sees; 0 for a row of none."""
    if IN_CHUNKS:
        return tl.maximum(length - 1, 0) // window * window
    return tl.maximum(length - window, 0)


@triton.jit(
    do_not_specialize=["split_len", "per_row", "window"],
    do_not_specialize_on_alignment=[
        "split_rows",
        "split_numbers",
        "query_indptr",
        "seq_lens",
        "block_indptr",
        "block_ids",
    ],
)
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    out,
    partial,
    partial_log_sum,
    query,
    keys,
    values,
    split_rows,
    split_numbers,
    query_indptr,
    seq_lens,
    block_indptr,
    block_ids,
    scale,
    v_scale,
    softcap,
    window,
    split_len,
    per_row,
    query_token_stride,
    query_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    CUT_HERE: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One split of one row and KV head, heads side by side as in memory. Grid: (splits * H_kv,)."""
    split = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    if CUT_HERE:
        row = split // per_row
        number = split % per_row
    else:
        row = tl.load(split_rows + split)
        number = tl.load(split_numbers + split)
    seq_len = tl.load(seq_lens + row)
    first = 0
    if HAS_WINDOW:
        first = first_seen(seq_len, window, IN_CHUNKS)
    if CUT_HERE:
        split_len = own_split_len(seq_len - first, per_row, BLOCK_N, LEAST)
    start = first + number * split_len
    if CUT_HERE:  # noqa: SIM102 - known when it is compiled, unlike what follows
        if start >= seq_len:
            return
    token = tl.load(query_indptr + row).to(tl.int64)
    members = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + members
    mask = (members[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    places = query + token * query_token_stride + heads.to(tl.int64)[:, None] * query_head_stride + dims[None, :]
    acc = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_G,), dtype=tl.float32)
    states, scale = factors_of_rows(tl.load(places, mask=mask, other=0.0), keys, scale)
    # The one query is the last position, and a split begins inside the window: nothing to mask but the end.
    acc, row_max, row_sum = attend(
        acc,
        row_max,
        row_sum,
        states,
        members,
        keys + kv_head * HEAD_DIM,
        values + kv_head * HEAD_DIM,
        block_ids + tl.load(block_indptr + row),
        start,
        tl.minimum(start + split_len, seq_len),
        scale,
        softcap,
        window,
        NUM_KV_HEADS * HEAD_DIM,
        HEAD_DIM=HEAD_DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
        CAUSAL=False,
        BOUNDED=True,
        HAS_WINDOW=False,
        IN_CHUNKS=False,
        HAS_SOFTCAP=HAS_SOFTCAP,
    )
    num_heads = NUM_KV_HEADS * GROUP
    if SPLIT:
        # Scores that are all -inf weigh nothing, here and in the sum over splits.
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        log_sum = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum))
        parts = split.to(tl.int64) * num_heads + heads
        tl.store(partial + parts[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)
        tl.store(partial_log_sum + parts, log_sum, mask=members < GROUP)
    else:
        acc = acc / row_sum[:, None] * v_scale
        target = out + (token * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["split_len", "per_row", "window"],
    do_not_specialize_on_alignment=["rows", "split_indptr", "query_indptr", "seq_lens"],
)
def reduce_splits_kernel(  # type: ignore[no-untyped-def]
    out,
    partial,
    partial_log_sum,
    rows,
    split_indptr,
    query_indptr,
    seq_lens,
    v_scale,
    window,
    split_len,
    per_row,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CUT_HERE: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
):
    """The splits of one row and query head put together. Grid: (rows, H_q)."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    if CUT_HERE:
        row = place
        first_split = place.to(tl.int64) * per_row
    else:
        row = tl.load(rows + place)
        first_split = tl.load(split_indptr + place).to(tl.int64)
    length = tl.load(seq_lens + row)
    if HAS_WINDOW:
        length -= first_seen(length, window, IN_CHUNKS)
    if CUT_HERE:
        if length == 0:
            return
        split_len = own_split_len(length, per_row, BLOCK_N, LEAST)
    num_splits = (length + split_len - 1) // split_len
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    # A maximum over one value is kept as a vector of one: Triton's loops carry tensors of one type.
    pivot_before = tl.full((1,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        splits = first + tl.arange(0, BLOCK_S)
        real = splits < num_splits
        parts = (first_split + splits) * NUM_HEADS + head
        log_sums = tl.load(partial_log_sum + parts, mask=real, other=float("-inf"))
        mask = real[:, None] & (dims[None, :] < HEAD_DIM)
        means = tl.load(partial + parts[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        largest = tl.maximum(pivot_before, tl.max(log_sums, 0))
        pivot = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(log_sums - pivot)
        decay = tl.exp2(pivot_before - pivot)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * means, 0)
        pivot_before = largest
    token = tl.load(query_indptr + row).to(tl.int64)
    target = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(target, (acc / total * v_scale).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a step with one query token, cut into splits; see `launch_shapes.DecodeSplits`.

    Units:
        block_size: tokens per block; split_len: positions of one split.

    Shape:
        rows: (B,), split_indptr: (B + 1,), split_rows, split_numbers: (S,), query_indptr: (R + 1,), seq_lens: (R,),
        block_indptr: (R + 1,), block_ids: (block_indptr[R],) or longer; all int32.

    With `splits_per_row` above 0 they are all rows of the step, each cut into so many splits by the kernels, and the
    five that say how rows are cut mean nothing. A row of length 0 is none: nothing is written of it, or NaN.
    """

    rows: torch.Tensor
    split_indptr: torch.Tensor
    split_rows: torch.Tensor
    split_numbers: torch.Tensor
    query_indptr: torch.Tensor
    seq_lens: torch.Tensor
    block_indptr: torch.Tensor
    block_ids: torch.Tensor
    block_size: int
    split_len: int
    splits_per_row: int = 0

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.seq_lens if self.splits_per_row else self.rows)

    @property
    def num_splits(self) -> int:
        """S, over all rows."""
        return self.splits_per_row * len(self.seq_lens) or len(self.split_rows)


def reduce_block(cut_here: bool) -> int:
    """Splits that `reduce_splits_kernel` loads at once: fewer where it works out their lengths itself, in registers."""
    return 8 if cut_here else 16


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    step: DecodeRows,
    *,
    tile: Tile,
    scores: Scores,
) -> None:
    """Attend: softmax(cap(scaling * q k^T)) v over each row's blocks, for rows with one query token.

    Args:
        query: queries of all tokens; the last dimension contiguous, the others as they come.
        keys: the layer's key cache, with this step's keys written.
        values: the layer's value cache.
        out: result, changed at the tokens of these rows only.
        step: the rows.
        tile: sizes of a program.
        scores: what is made of queries and keys.

    Shape:
        query: (T, H_q, D); keys, values: (num_slots, H_kv * D); out: (T, H_q, D), contiguous.
    """
    _, num_heads, head_dim = query.shape
    kv_heads = keys.shape[1] // head_dim
    num_splits, cut_here = step.num_splits, step.splits_per_row > 0
    query = query if query.stride(-1) == 1 else query.contiguous()
    scale, softcap = scores.factors
    is_split = num_splits > step.num_rows
    partial = log_sums = out
    if is_split:
        shape = (num_splits, num_heads)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
        log_sums = torch.empty(shape, dtype=torch.float32, device=query.device)
    block_d = triton.next_power_of_2(head_dim)
    paged_decode_kernel[(num_splits * kv_heads,)](
        out,
        partial,
        log_sums,
        query,
        keys,
        values,
        step.split_rows,
        step.split_numbers,
        step.query_indptr,
        step.seq_lens,
        step.block_indptr,
        step.block_ids,
        scale,
        float(scores.v_scale),
        softcap,
        abs(scores.window or 0),
        step.split_len,
        step.splits_per_row,
        query.stride(0),
        query.stride(1),
        NUM_KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=step.block_size,
        BLOCK_G=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        SPLIT=is_split,
        CUT_HERE=cut_here,
        LEAST=MIN_SPLIT,
        **scores.constants,
        HAS_SOFTCAP=scores.softcap is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if is_split:
        reduce_splits_kernel[(step.num_rows, num_heads)](
            out,
            partial,
            log_sums,
            step.rows,
            step.split_indptr,
            step.query_indptr,
            step.seq_lens,
            float(scores.v_scale),
            abs(scores.window or 0),
            step.split_len,
            step.splits_per_row,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_S=reduce_block(cut_here),
            BLOCK_N=tile.block_n,
            BLOCK_D=block_d,
            CUT_HERE=cut_here,
            LEAST=MIN_SPLIT,
            **scores.constants,
            num_warps=4,
            num_stages=2,
        )
