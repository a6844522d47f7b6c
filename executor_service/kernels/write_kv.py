"""Stores a step's K and V in their slots, quantised where the cache is of 8-bit floats.

Station: launched by `triton_paged` in every layer before it attends. The oracle is `reference.write_kv`.

Formula: cache[slot] = convert(clamp(x / scale, -limit, limit)), with limit the largest finite number of the cache's
type; in a cache of the model's own type, x itself, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def write_kv_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    slots,
    k_scale,
    v_scale,
    num_tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    slot_stride,
    LIMIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """One program stores BLOCK_T tokens of one KV head. Grid: (token tiles, H_kv)."""
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims = tl.arange(0, BLOCK_D)
    real = tokens < num_tokens
    slot = tl.load(slots + tokens, mask=real, other=-1)
    mask = (slot >= 0)[:, None] & (dims[None, :] < HEAD_DIM)
    rows = tokens[:, None].to(tl.int64)
    places = slot[:, None] * slot_stride + head * HEAD_DIM + dims[None, :]
    k = tl.load(key + rows * key_token_stride + head * key_head_stride + dims[None, :], mask=mask)
    v = tl.load(value + rows * value_token_stride + head * value_head_stride + dims[None, :], mask=mask)
    if QUANTISE:
        # NaN passes: a row whose K/V is not finite must be found out, not stored as a number.
        k = tl.clamp(k.to(tl.float32) / k_scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        v = tl.clamp(v.to(tl.float32) / v_scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        k = k.to(keys.dtype.element_ty)
        v = v.to(values.dtype.element_ty)
    tl.store(keys + places, k, mask=mask)
    tl.store(values + places, v, mask=mask)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    block_t: int = 16,
) -> None:
    """Store K and V of every token in its slot.

    Args:
        key: keys of all tokens of the step; the last dimension contiguous, the others as they come.
        value: values of all tokens of the step, likewise.
        keys: the layer's key cache, changed in place; of the type of `key`, or of 8-bit floats.
        values: the layer's value cache, changed in place.
        slots: block_id * block_size + offset of every token, none twice; -1 for a token that is not stored.
        k_scale: what a stored 1.0 stands for, in a cache of 8-bit floats; 1.0 in others.
        v_scale: the same for values.
        block_t: tokens per program.

    Shape:
        key, value: (T, H_kv, D); keys, values: (num_slots, H_kv * D); slots: (T,) int64.

    Raises:
        ValueError: the cache is of another type than `key`, and not of 8-bit floats.
    """
    num_tokens, num_heads, head_dim = key.shape
    quantise = keys.dtype in FP8_TYPES
    if not quantise and keys.dtype != key.dtype:
        raise ValueError(f"expected a cache of {key.dtype} or of {FP8_TYPES}, got {keys.dtype}")
    key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (key, value))
    write_kv_kernel[(triton.cdiv(num_tokens, block_t), num_heads)](
        key,
        value,
        keys,
        values,
        slots,
        float(k_scale),
        float(v_scale),
        num_tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        keys.stride(0),
        LIMIT=torch.finfo(keys.dtype).max if quantise else 0.0,
        HEAD_DIM=head_dim,
        BLOCK_T=block_t,
        BLOCK_D=triton.next_power_of_2(head_dim),
        QUANTISE=quantise,
        num_warps=4,
    )
