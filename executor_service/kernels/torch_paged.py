"""Paged attention in plain torch, for CPU and CUDA.

Station: called once per layer by `model_runner`'s attention function, through `paged_kernels`, with the plan that
`attention_plan` made of the step. The oracle is `reference`.

How: K/V of all tokens are written to their slots first. Decode rows are gathered group by group; the query heads that
share a KV head act as the query length, so K/V are never repeated for grouped-query attention. Prefill rows run one by
one.

Memory: one gather holds at most `AttentionLimits.gather_tokens` tokens, or one row; one mask at most `mask_elements`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from executor_service.backends.base import GroupTables, Int32
from executor_service.kernels.attention_plan import AttentionLimits, AttentionPlan, DecodeGroup, plan_attention
from executor_service.kernels.block_copy import copy_within
from executor_service.kernels.paged_kernels import PagedKernels, StepAttention
from executor_service.profile_batch import reserved_index_bytes


class TorchStep(StepAttention):
    """One step's plan, and `paged_attention` on it."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
    ) -> torch.Tensor:
        """Write, then attend; see the base class."""
        return paged_attention(query, key, value, keys, values, plan=self._plan, scaling=scaling)


class TorchKernels(PagedKernels):
    """Plain torch as kernels. Args: limits: bounds of the workspace."""

    def __init__(self, limits: AttentionLimits) -> None:
        self._limits = limits

    def plan(
        self,
        query_indptr: Int32,
        seq_lens: Int32,
        tables: GroupTables,
        slot_mapping: npt.NDArray[np.int64],
        *,
        block_size: int,
        device: torch.device,
    ) -> TorchStep:
        """Make the step's index tensors; see the base class."""
        made = plan_attention(
            query_indptr, seq_lens, tables, slot_mapping, block_size=block_size, limits=self._limits, device=device
        )
        return TorchStep(made)

    def copy_within(
        self, layers: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, chunk: int
    ) -> None:
        """Copy blocks within the cache; see the base class."""
        copy_within(layers, source, target, chunk=chunk)

    def reserved_bytes(self, max_num_seqs: int, max_model_len: int) -> int:
        """The index tensors of decode rows."""
        return reserved_index_bytes(max_num_seqs, max_model_len, self._limits)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    plan: AttentionPlan,
    scaling: float,
) -> torch.Tensor:
    """Write this step's K/V of one layer, then attend: softmax(scaling * q k^T) v, causal, over each row's blocks.

    Args:
        query: queries of all tokens.
        key: keys of all tokens.
        value: values of all tokens.
        keys: the layer's key cache, changed in place.
        values: the layer's value cache, changed in place.
        plan: the step's plan.
        scaling: factor on the scores.

    Shape:
        query: (T, H_q, D); key, value: (T, H_kv, D); keys, values: (num_slots, H_kv * D); returns (T, H_q, D).
    """
    num_tokens, _, dim = query.shape
    keys.index_copy_(0, plan.write_slots, key.reshape(num_tokens, -1))
    values.index_copy_(0, plan.write_slots, value.reshape(num_tokens, -1))
    kv_heads = key.shape[1]
    if len(plan.decode) == 1 and not plan.prefill:
        # One group keeps the rows' own order: nothing to permute.
        return _attend_decode(query, keys, values, plan.decode[0], plan=plan, kv_heads=kv_heads, scaling=scaling)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.decode:
        rows = query.index_select(0, group.tokens)
        result = _attend_decode(rows, keys, values, group, plan=plan, kv_heads=kv_heads, scaling=scaling)
        out.index_copy_(0, group.tokens, result)
    for row in plan.prefill:
        own = slice(row.start, row.end)
        row_k, row_v = key[own], value[own]
        if row.slots is not None:
            row_k = keys.index_select(0, row.slots).view(row.context, kv_heads, dim)
            row_v = values.index_select(0, row.slots).view(row.context, kv_heads, dim)
        out[own] = _attend_prefill(query[own], row_k, row_v, plan.limits, scaling)
    return out


def _attend_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: DecodeGroup,
    *,
    plan: AttentionPlan,
    kv_heads: int,
    scaling: float,
) -> torch.Tensor:
    """Attention of one query token per row. Shape: query (B, H_q, D), returns the same."""
    batch, heads, dim = query.shape
    slots = group.slots(plan.block_size)
    shape = (batch, group.width, kv_heads, dim)
    flat_k, flat_v = plan.workspace.take(len(slots), keys)
    gathered_k = torch.index_select(keys, 0, slots, out=flat_k).view(shape).transpose(1, 2)
    gathered_v = torch.index_select(values, 0, slots, out=flat_v).view(shape).transpose(1, 2)
    # The query heads that share a KV head stand where query tokens would: no repeated K/V.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    out = scaled_dot_product_attention(grouped, gathered_k, gathered_v, attn_mask=group.mask, scale=scaling)
    return out.reshape(batch, heads, dim)


def _attend_prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, limits: AttentionLimits, scaling: float
) -> torch.Tensor:
    """Causal attention of one row, its last token at the end of the context.

    Shape:
        query: (t, H_q, D); key, value: (context, H_kv, D); returns (t, H_q, D).
    """
    length, heads, dim = query.shape
    context, kv_heads, _ = key.shape
    # KV heads as batch, the query heads of a group as heads over a K/V expanded with stride 0: no repeated K/V.
    shape = (kv_heads, heads // kv_heads, context, dim)
    head_k = key.transpose(0, 1).unsqueeze(1).expand(shape)
    head_v = value.transpose(0, 1).unsqueeze(1).expand(shape)
    head_q = query.view(length, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    if context == length:
        out = scaled_dot_product_attention(head_q, head_k, head_v, is_causal=True, scale=scaling)
        return out.permute(2, 0, 1, 3).reshape(length, heads, dim)
    # is_causal aligns the first query with the first key, which is wrong behind a context: masks, chunk by chunk.
    parts = []
    chunk = limits.query_chunk(context)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        seen = context - length + end
        mask = torch.ones(end - start, seen, dtype=torch.bool, device=query.device).tril_(seen - (end - start))
        part_q, part_k, part_v = head_q[:, :, start:end], head_k[:, :, :seen], head_v[:, :, :seen]
        parts.append(scaled_dot_product_attention(part_q, part_k, part_v, attn_mask=mask, scale=scaling))
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(length, heads, dim)
