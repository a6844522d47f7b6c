"""Causal attention of rows with several query tokens, over their blocks: prefix and this step's own tokens alike.

Station: launched by `triton_paged` in every layer for the tiles of `PrefillTiles`. The oracle is
`reference.paged_attention`.

How: a program takes a run of a row's query tokens with all query heads that share one KV head, so that K/V are read
once for all of them; query m of its tile is head m % GROUP of token m // GROUP. Positions that all of its queries see
go without a mask; those at the diagonal, and all where there is a window or chunks, with one. Which program has which
row is laid out by the host, longest first, so ragged rows cost no idle programs.

Source: Dao, "FlashAttention-2" (2023); packing the heads of a group: Kwon et al., vLLM's unified attention (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from executor_service.kernels.launch_shapes import Tile
from executor_service.kernels.online_softmax import Scores, attend, factors_of_rows


@triton.jit
def tile_elements(  # type: ignore[no-untyped-def]
    first_token,
    query_len,
    kv_head,
    start,
    token_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Offsets of a tile's rows in queries or results, int64, and which of them are real. Both (BLOCK_M, BLOCK_D)."""
    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    places = start + members // GROUP
    real = (members < BLOCK_M // GROUP * GROUP) & (places < query_len)
    tokens = (first_token + places).to(tl.int64) * token_stride
    heads = (kv_head * GROUP + members % GROUP).to(tl.int64) * head_stride
    return (tokens + heads)[:, None] + dims[None, :], real[:, None] & (dims[None, :] < HEAD_DIM)


@triton.jit
def tile_bounds(  # type: ignore[no-untyped-def]
    first_query,
    window,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
):
    """The first position that any query from this position on sees, and the first that not all of them see.

    Both are multiples of BLOCK_N; where there is a window they are equal: all has a mask.
    """
    if not HAS_WINDOW:
        return 0, (first_query + 1) // BLOCK_N * BLOCK_N
    if IN_CHUNKS:  # noqa: SIM108 - one of them is compiled
        first = first_query // window * window
    else:
        first = tl.maximum(first_query - window + 1, 0)
    first = first // BLOCK_N * BLOCK_N
    return first, first


@triton.jit
def attend_run(  # type: ignore[no-untyped-def]
    states,
    query_positions,
    keys,
    values,
    table,
    first,
    seen_by_all,
    end,
    scale,
    softcap,
    window,
    slot_stride: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """What `attend` makes of a tile: of the positions that all of its queries see without a mask, then of the others.

    Returns the weighted sums of values and the sums of weights.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if not HAS_WINDOW:
        acc, row_max, row_sum = attend(
            acc,
            row_max,
            row_sum,
            states,
            query_positions,
            keys,
            values,
            table,
            first,
            seen_by_all,
            scale,
            softcap,
            window,
            slot_stride,
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
            CAUSAL=False,
            BOUNDED=False,
            HAS_WINDOW=False,
            IN_CHUNKS=False,
            HAS_SOFTCAP=HAS_SOFTCAP,
        )
    acc, row_max, row_sum = attend(
        acc,
        row_max,
        row_sum,
        states,
        query_positions,
        keys,
        values,
        table,
        seen_by_all,
        end,
        scale,
        softcap,
        window,
        slot_stride,
        HEAD_DIM=HEAD_DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_N=BLOCK_N,
        BLOCK_D=BLOCK_D,
        CAUSAL=True,
        BOUNDED=True,
        HAS_WINDOW=HAS_WINDOW,
        IN_CHUNKS=IN_CHUNKS,
        HAS_SOFTCAP=HAS_SOFTCAP,
    )
    return acc, row_sum


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=[
        "tile_rows",
        "tile_starts",
        "query_indptr",
        "seq_lens",
        "block_indptr",
        "block_ids",
    ],
)
def paged_prefill_kernel(  # type: ignore[no-untyped-def]
    out,
    query,
    keys,
    values,
    tile_rows,
    tile_starts,
    query_indptr,
    seq_lens,
    block_indptr,
    block_ids,
    scale,
    v_scale,
    softcap,
    window,
    query_token_stride,
    query_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """BLOCK_M // GROUP query tokens of one row and KV head, heads side by side as in memory. Grid: (tiles * H_kv,)."""
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row = tl.load(tile_rows + tile)
    first_token = tl.load(query_indptr + row)
    query_len = tl.load(query_indptr + row + 1) - first_token
    context = tl.load(seq_lens + row) - query_len
    start = tl.load(tile_starts + tile)
    offsets, mask = tile_elements(
        first_token,
        query_len,
        kv_head,
        start,
        query_token_stride,
        query_head_stride,
        GROUP,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_D,
    )
    states, scale = factors_of_rows(tl.load(query + offsets, mask=mask, other=0.0), keys, scale)
    query_positions = context + start + tl.arange(0, BLOCK_M) // GROUP
    first, seen_by_all = tile_bounds(context + start, window, BLOCK_N, HAS_WINDOW, IN_CHUNKS)
    end = context + tl.minimum(start + BLOCK_M // GROUP, query_len)
    table = block_ids + tl.load(block_indptr + row)
    acc, row_sum = attend_run(
        states,
        query_positions,
        keys + kv_head * HEAD_DIM,
        values + kv_head * HEAD_DIM,
        table,
        first,
        seen_by_all,
        end,
        scale,
        softcap,
        window,
        NUM_KV_HEADS * HEAD_DIM,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        HAS_WINDOW,
        IN_CHUNKS,
        HAS_SOFTCAP,
    )
    acc = acc / row_sum[:, None] * v_scale
    # Read again, which a compiler may not undo: offsets that were known would be kept in registers over both loops.
    offsets, mask = tile_elements(
        first_token,
        query_len,
        kv_head,
        tl.load(tile_starts + tile, volatile=True),
        NUM_KV_HEADS * GROUP * HEAD_DIM,
        HEAD_DIM,
        GROUP,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_D,
    )
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class PrefillTiles:
    """The rows of a step with several query tokens, cut into runs of `tile.block_m // group` of them.

    Shape:
        rows: (N,) int32, the row of each run; starts: (N,) int32, its first query token within the row; the others as
        in `DecodeRows`.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    query_indptr: torch.Tensor
    seq_lens: torch.Tensor
    block_indptr: torch.Tensor
    block_ids: torch.Tensor
    block_size: int


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    step: PrefillTiles,
    *,
    tile: Tile,
    scores: Scores,
) -> None:
    """Attend, causally: softmax(cap(scaling * q k^T)) v over each row's blocks, for rows with several query tokens.

    Args:
        query: queries of all tokens; the last dimension contiguous, the others as they come.
        keys: the layer's key cache, with this step's keys written.
        values: the layer's value cache.
        out: result, changed at the tokens of these rows only.
        step: the rows' runs.
        tile: sizes of a program; the same that the runs were cut for.
        scores: what is made of queries and keys.

    Shape:
        query: (T, H_q, D); keys, values: (num_slots, H_kv * D); out: (T, H_q, D), contiguous.
    """
    _, num_heads, head_dim = query.shape
    kv_heads = keys.shape[1] // head_dim
    query = query if query.stride(-1) == 1 else query.contiguous()
    scale, softcap = scores.factors
    paged_prefill_kernel[(len(step.rows) * kv_heads,)](
        out,
        query,
        keys,
        values,
        step.rows,
        step.starts,
        step.query_indptr,
        step.seq_lens,
        step.block_indptr,
        step.block_ids,
        scale,
        float(scores.v_scale),
        softcap,
        abs(scores.window or 0),
        query.stride(0),
        query.stride(1),
        NUM_KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=step.block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        **scores.constants,
        HAS_SOFTCAP=scores.softcap is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
