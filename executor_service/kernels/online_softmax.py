"""The loop that decode and prefill share: attention of one tile of queries over a run of positions, in one pass.

Station: inlined by Triton into `paged_decode` and `paged_prefill`. It reads K/V through a block table and keeps, for
every query, the largest score so far, the sum of weights relative to it, and the weighted sum of values.

Formula, over tiles of keys, in base 2 (log2(e) is part of the factor on the scores):
    m' = max(m, max_n s_n);  l' = l 2^(m - m') + sum_n 2^(s_n - m');  a' = a 2^(m - m') + sum_n 2^(s_n - m') v_n

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao, "FlashAttention-2" (2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Scores:
    """What a layer makes of queries and stored K/V: softmax(cap(scaling * q k^T)) v.

    Attributes:
        scaling: factor on the scores.
        window: a query sees this many positions, its own included; below 0, the size of chunks negated: it sees those
            of its own chunk. None means all.
        softcap: scores become softcap * tanh(score / softcap); None leaves them.
        k_scale: what a stored 1.0 of a key stands for.
        v_scale: the same for values.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def constants(self) -> dict[str, bool]:
        """What kernels are specialised for."""
        in_chunks = self.window is not None and self.window < 0
        return {"HAS_WINDOW": self.window is not None, "IN_CHUNKS": in_chunks}

    @property
    def factors(self) -> tuple[float, float]:
        """`scale` and `softcap` of `attend`: as few operations on a score as there can be, the base of 2 included."""
        scale = self.scaling * self.k_scale * math.log2(math.e)
        if self.softcap is None:
            return scale, 0.0
        return 2 * scale / self.softcap, self.softcap * math.log2(math.e)


@triton.jit
def factors_of_rows(states, keys, scale):  # type: ignore[no-untyped-def]
    """Queries in the type to multiply in, and the factor on the scores of each: (M, BLOCK_D) and (M, 1).

    Over a cache of 8-bit floats that is float16: it holds all of their numbers, and two of them become it in one
    instruction, where bfloat16 takes three more. Its range is narrower than a query's: each is multiplied by the power
    of two that puts its largest number into [256, 512), which rounds nothing, and the row's factor makes up for it.
    """
    if keys.dtype.element_ty.primitive_bitwidth == 8 and states.dtype == tl.bfloat16:
        wide = states.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # its exponent alone
        return (wide * (256.0 / power)[:, None]).to(tl.float16), (power * (scale / 256.0))[:, None]
    else:  # noqa: RET505 - one of them is compiled
        return states, tl.full((states.shape[0], 1), scale, tl.float32)


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    acc,
    row_max,
    row_sum,
    query,
    query_positions,
    keys,
    values,
    table,
    start,
    end,
    scale,
    softcap,
    window,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Go on over positions start to end.

    Args:
        acc: (M, BLOCK_D) float32, weighted sum of values; comes back updated, like the two that follow.
        row_max: (M,) float32, largest score.
        row_sum: (M,) float32, sum of weights.
        query: (M, BLOCK_D) in the type to multiply in, 0 beyond HEAD_DIM.
        query_positions: (M,) int32, read if CAUSAL or HAS_WINDOW.
        keys: pointer to slot 0 of one head.
        values: the same.
        table: pointer to the row's first block id.
        start: first position, the same for all queries.
        end: one past the last.
        scale: (M, 1) float32, factor on q k^T: that of `Scores.factors`, and the query's own.
        softcap: bound of the scores, of the same.
        window: a query sees this many positions, its own included, if HAS_WINDOW; or the size of chunks, if IN_CHUNKS.
        slot_stride: elements from one slot to the next.
        HEAD_DIM: elements of a head.
        BLOCK_SIZE: tokens per block.
        BLOCK_N: keys at a time.
        BLOCK_D: HEAD_DIM up to a power of two.
        CAUSAL: a query sees no position after its own; else all of start to end.
        BOUNDED: the last tile may reach past `end`; what lies there is not read.
        HAS_WINDOW: whether there is a window, or chunks.
        IN_CHUNKS: whether a query sees those of its own chunk; chunks begin at the multiples of `window`.
        HAS_SOFTCAP: whether there is a soft cap.

    Masked keys and values are never read, so what unused slots hold, NaN included, can not reach a result.
    """
    dims = tl.arange(0, BLOCK_D)
    offsets = tl.arange(0, BLOCK_N)
    oldest = query_positions - window + 1
    if IN_CHUNKS:
        oldest = query_positions - query_positions % window
    for first in range(start, end, BLOCK_N):
        positions = first + offsets
        if BOUNDED:
            inside = positions < end
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=inside, other=0)
        else:
            inside = positions >= 0
            blocks = tl.load(table + positions // BLOCK_SIZE)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        key_places = keys + slots[None, :] * slot_stride + dims[:, None]
        value_places = values + slots[:, None] * slot_stride + dims[None, :]
        if BLOCK_D != HEAD_DIM:
            key = tl.load(key_places, mask=inside[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
            value = tl.load(value_places, mask=inside[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
        elif BOUNDED:
            key = tl.load(key_places, mask=inside[None, :], other=0.0)
            value = tl.load(value_places, mask=inside[:, None], other=0.0)
        else:
            key = tl.load(key_places)
            value = tl.load(value_places)
        if value.dtype.primitive_bitwidth == 8:
            # Converted as they lie: a matrix operand of bytes would be put together byte by byte.
            value = tl.trans(tl.trans(value).to(query.dtype))
        # "ieee" keeps float32 exact; without effect on narrower types.
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # The hyperbolic tangent by the one function that every target has. Absolute error about 1e-7 of the bound.
            scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores))
        if CAUSAL or BOUNDED or HAS_WINDOW:
            seen = inside[None, :]
            if CAUSAL:
                seen &= positions[None, :] <= query_positions[:, None]
            if HAS_WINDOW:
                seen &= positions[None, :] >= oldest[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A query that has seen no key yet has a largest score of -inf, and -inf - -inf is NaN.
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(row_max - pivot)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum
