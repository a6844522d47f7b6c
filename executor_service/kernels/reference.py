"""The oracle of every paged kernel: plain loops in float64, one row and one head at a time.

Station: called by tests and by the conformance kit only. Slow on purpose; it shares no code with what it checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from executor_service.backends.base import CopyDirection


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scales: tuple[float, float] | None = None,
) -> None:
    """Store K and V of every token in its slot; with scales fp8(clamp(x / scale, -max, max)).

    Args:
        key: keys of all tokens of the step.
        value: values of all tokens of the step.
        cache: one layer's cache, changed in place.
        slots: block_id * block_size + offset of every token.
        scales: of K and of V, for a cache whose type is one of fp8.

    Shape:
        key, value: (T, H_kv, D); cache: (2, num_blocks, block_size, H_kv, D); slots: (T,).
    """
    block_size = cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        for part, states in enumerate((key[token], value[token])):
            if scales is not None:
                limit = torch.finfo(cache.dtype).max
                states = torch.clamp(states.float() / scales[part], -limit, limit)  # noqa: PLW2901
            cache[part, block, offset] = states.to(cache.dtype)


def copy_blocks(
    layers: Sequence[torch.Tensor], host: torch.Tensor, copies: Iterable[tuple[CopyDirection, int, int]]
) -> None:
    """Copy whole blocks, one after the other, one layer at a time.

    Args:
        layers: the cache's layers, changed in place.
        host: the host blocks, changed in place.
        copies: direction, source and target of each, in order.

    Shape:
        layers[l]: (2, num_blocks, block_size, H_kv, D); host: (num_host_blocks, num_layers, 2, block_size, H_kv, D).
    """
    for direction, source, target in copies:
        for index, layer in enumerate(layers):
            for part in range(2):
                if direction == CopyDirection.DEVICE_TO_DEVICE:
                    layer[part, target] = layer[part, source]
                elif direction == CopyDirection.DEVICE_TO_HOST:
                    host[target, index, part] = layer[part, source]
                else:
                    layer[part, target] = host[source, index, part]


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    *,
    query_lens: list[int],
    seq_lens: list[int],
    block_tables: list[list[int]],
    scaling: float,
    scales: tuple[float, float] = (1.0, 1.0),
    window: int = 0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of every row over its own blocks: softmax(cap(scaling * q k^T)) v.

    Args:
        query: queries of all rows, row after row.
        cache: one layer's cache, with this step's K/V written.
        query_lens: tokens of each row in this step.
        seq_lens: sequence length of each row after this step.
        block_tables: the blocks of each row, in the order of positions.
        scaling: factor on the scores.
        scales: what a stored 1 stands for, in K and in V.
        window: tokens that a token sees, itself included; 0 for all before it; below 0, the size of chunks negated:
            it sees those of its own chunk.
        softcap: scores become softcap * tanh(score / softcap); None leaves them.

    Shape:
        query: (T, H_q, D) with T = sum(query_lens); cache: (2, num_blocks, block_size, H_kv, D); returns (T, H_q, D).
    """
    _, _, block_size, num_kv_heads, _ = cache.shape
    group = query.shape[1] // num_kv_heads
    out = torch.empty_like(query)
    token = 0
    for query_len, seq_len, table in zip(query_lens, seq_lens, block_tables, strict=True):
        rows = [cache[:, table[pos // block_size], pos % block_size].double() for pos in range(seq_len)]
        keys = torch.stack([row[0] for row in rows]) * scales[0]
        values = torch.stack([row[1] for row in rows]) * scales[1]
        for position in range(seq_len - query_len, seq_len):
            first = max(0, position - window + 1) if window > 0 else 0
            if window < 0:
                first = position // -window * -window
            for head in range(query.shape[1]):
                seen_k = keys[first : position + 1, head // group]
                seen_v = values[first : position + 1, head // group]
                scores = scaling * (seen_k @ query[token, head].double())
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.softmax(scores, dim=0)
                out[token, head] = (weights @ seen_v).to(query.dtype)
            token += 1
    return out
