"""Paged attention in plain torch, for CPU and CUDA.

Station: called once per layer by `model_runner`'s attention function, through `paged_kernels`, with the plan that
`attention_plan` made of the step. The oracle is `reference`.

How: K/V of all tokens are written to their slots first. Decode rows are gathered group by group; the query heads that
share a KV head act as the query length, so K/V are never repeated for grouped-query attention. Prefill rows run one by
one.

K/V stored in eight bits are read back before they attend, and this step's own like all others: attention sees what the
cache holds and nothing finer. So a token's K/V are the same whether they were computed in this step, in an earlier
chunk, by another request, or before a preemption.

Memory: one gather holds at most `AttentionLimits.gather_tokens` tokens, or one row; one mask at most `mask_elements`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from executor_service.backends.base import Int32, chunk_size
from executor_service.kernels.attention_plan import (
    AttentionLimits,
    AttentionPlan,
    DecodeGroup,
    GatherWorkspace,
    plan_attention,
)
from executor_service.kernels.block_copy import copy_within
from executor_service.kernels.fp8 import PLAIN, Fp8Codec, LayerCodecs
from executor_service.kernels.paged_kernels import GroupStep, PagedKernels, StepAttention
from executor_service.profile_batch import reserved_index_bytes


class TorchStep(StepAttention):
    """One step's plan for a KV group, and `paged_attention` on it."""

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
        codecs: LayerCodecs = PLAIN,
    ) -> torch.Tensor:
        """Write, then attend; see the base class."""
        return paged_attention(query, key, value, keys, values, plan=self._plan, scaling=scaling, codecs=codecs)


class TorchKernels(PagedKernels):
    """Plain torch as kernels. Args: limits: bounds of the workspace."""

    def __init__(self, limits: AttentionLimits) -> None:
        self._limits = limits

    def plan(
        self,
        query_indptr: Int32,
        seq_lens: Int32,
        groups: Sequence[GroupStep],
        *,
        device: torch.device,
    ) -> Sequence[TorchStep]:
        """Make the step's index tensors; see the base class."""
        workspace = GatherWorkspace()
        return [
            TorchStep(
                plan_attention(
                    query_indptr,
                    seq_lens,
                    group.tables,
                    group.slot_mapping,
                    block_size=group.block_size,
                    limits=self._limits,
                    device=device,
                    window=group.window,
                    workspace=workspace,
                )
            )
            for group in groups
        ]

    def copy_within(
        self, layers: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, chunk: int
    ) -> None:
        """Copy blocks within the cache; see the base class."""
        copy_within(layers, source, target, chunk=chunk)

    def reserved_bytes(self, max_num_seqs: int, max_model_len: int, windows: Sequence[int]) -> int:
        """The index tensors of decode rows."""
        return reserved_index_bytes(max_num_seqs, max_model_len, self._limits, windows)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    plan: AttentionPlan,
    scaling: float,
    codecs: LayerCodecs = PLAIN,
) -> torch.Tensor:
    """Write this step's K/V of one layer, then attend: softmax(scaling * q k^T) v, causal, over each row's blocks.

    With a window in the plan a token sees the last `plan.window` tokens only, itself included; with chunks those of its
    own up to itself.

    Args:
        query: queries of all tokens.
        key: keys of all tokens.
        value: values of all tokens.
        keys: the layer's key cache, changed in place.
        values: the layer's value cache, changed in place.
        plan: the step's plan.
        scaling: factor on the scores.
        codecs: how the layer's K and V are stored.

    Shape:
        query: (T, H_q, D); key, value: (T, H_kv, D); keys, values: (num_slots, H_kv * D), bytes where there are codecs;
        returns (T, H_q, D).
    """
    layer = _Layer(keys, values, codecs, plan)
    new_k, new_v = layer.write(key, value)
    kv_heads, dim = key.shape[1:]
    if len(plan.decode) == 1 and not plan.prefill:
        # One group keeps the rows' own order: nothing to permute.
        return _attend_decode(query, layer, plan.decode[0], kv_heads=kv_heads, scaling=scaling)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.decode:
        rows = query.index_select(0, group.tokens)
        out.index_copy_(0, group.tokens, _attend_decode(rows, layer, group, kv_heads=kv_heads, scaling=scaling))
    for row in plan.prefill:
        own = slice(row.start, row.end)
        row_k, row_v = new_k[own], new_v[own]
        if row.slots is not None:
            row_k, row_v = layer.read(row.slots, query.dtype)
        shape = (row.context - row.first, kv_heads, dim)
        row_k, row_v = row_k.view(shape), row_v.view(shape)
        out[own] = _attend_prefill(query[own], row_k, row_v, plan.limits, scaling, window=plan.window)
    return out


class _Layer:
    """One layer's cache as a step writes and reads it."""

    __slots__ = ("_k_codec", "_keys", "_v_codec", "_values", "plan")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, codecs: LayerCodecs, plan: AttentionPlan) -> None:
        self._keys, self._values = keys, values
        self._k_codec, self._v_codec = codecs
        self.plan = plan

    def write(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store this step's tokens. Shape: both (T, H_kv, D); returns what attention may see of them, (T, H_kv * D)."""
        new_k = self._write(key.reshape(len(key), -1), self._keys, self._k_codec)
        return new_k, self._write(value.reshape(len(value), -1), self._values, self._v_codec)

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these slots, in a workspace that the next read takes again. Shape: (N,); returns (N, H_kv * D)."""
        return (
            self._read("keys", slots, dtype, self._keys, self._k_codec),
            self._read("values", slots, dtype, self._values, self._v_codec),
        )

    def _write(self, states: torch.Tensor, cache: torch.Tensor, codec: Fp8Codec | None) -> torch.Tensor:
        if codec is None:
            cache.index_copy_(0, self.plan.write_slots, states)
            return states
        stored = codec.encode(states)
        cache.index_copy_(0, self.plan.write_slots, stored)
        # Only rows without a context see it from here.
        return codec.decode(stored, torch.empty_like(states)) if self.plan.prefill else states

    def _read(
        self, name: str, slots: torch.Tensor, dtype: torch.dtype, cache: torch.Tensor, codec: Fp8Codec | None
    ) -> torch.Tensor:
        rows, width, take = len(slots), cache.shape[1], self.plan.workspace.take
        if codec is None:
            return torch.index_select(cache, 0, slots, out=take(name, rows, width, cache))
        stored = torch.index_select(cache, 0, slots, out=take("stored", rows, width, cache))
        index = take("pairs", rows, width // 2, cache, torch.int32) if cache.device.type == "cpu" else None
        return codec.decode(stored, take(name, rows, width, cache, dtype), index)


def _attend_decode(
    query: torch.Tensor, layer: _Layer, group: DecodeGroup, *, kv_heads: int, scaling: float
) -> torch.Tensor:
    """Attention of one query token per row. Shape: query (B, H_q, D), returns the same."""
    batch, heads, dim = query.shape
    shape = (batch, group.width, kv_heads, dim)
    flat_k, flat_v = layer.read(group.slots(layer.plan.block_size), query.dtype)
    gathered_k, gathered_v = flat_k.view(shape).transpose(1, 2), flat_v.view(shape).transpose(1, 2)
    # The query heads that share a KV head stand where query tokens would: no repeated K/V.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    out = scaled_dot_product_attention(grouped, gathered_k, gathered_v, attn_mask=group.mask, scale=scaling)
    return out.reshape(batch, heads, dim)


def _attend_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    limits: AttentionLimits,
    scaling: float,
    *,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of one row, its last token at the end of the context, which begins where its first token's does.

    With chunks that is where one begins.

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
    if context == length and (not window or context <= abs(window)):
        out = scaled_dot_product_attention(head_q, head_k, head_v, is_causal=True, scale=scaling)
        return out.permute(2, 0, 1, 3).reshape(length, heads, dim)
    # is_causal aligns the first query with the first key, which is wrong behind a context, and knows no window: masks,
    # part by part, over the keys that any query of the part sees.
    parts = []
    chunk, size = limits.query_chunk(context), chunk_size(window)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        seen = context - length + end
        begin = context - length + start
        first = begin - begin % size if size else max(0, begin - window + 1) if window else 0
        diagonal = seen - first - (end - start)  # the first query's own key
        mask = torch.ones(end - start, seen - first, dtype=torch.bool, device=query.device).tril_(diagonal)
        if size:  # the context begins with a chunk
            own = torch.arange(begin, seen, device=query.device) // size * size
            mask &= torch.arange(first, seen, device=query.device) >= own[:, None]
        elif window:
            mask.triu_(diagonal - window + 1)
        part_q, part_k, part_v = head_q[:, :, start:end], head_k[:, :, first:seen], head_v[:, :, first:seen]
        parts.append(scaled_dot_product_attention(part_q, part_k, part_v, attn_mask=mask, scale=scaling))
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(length, heads, dim)
