"""Weights of a decoder that are none of the Llama family's: what some types of models have beside.

Station: called by ``capacity``, which counts the rest. It knows JSON objects and numbers of weights. As in
``model_layers``, tests hold it to transformers' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvplane_client.cli.model_layers import kv_shapes, layer_windows, positive

__all__ = ["other_weights"]

Config = Mapping[str, Any]


def _query_gates(config: Config, num_attending: int, where: str) -> int:
    """Qwen3-Next's: a gate as wide as the queries, and a norm each of queries and keys."""
    heads, width = positive(config, "num_attention_heads", where), positive(config, "head_dim", where)
    return num_attending * (positive(config, "hidden_size", where) * heads * width + 2 * width)


def _gemma3n(config: Config, num_attending: int, where: str) -> int:
    """Gemma 3n's: several streams between layers (AltUp), low-rank shortcuts (Laurel), and an embedding per layer.

    Source: transformers' Gemma3nTextModel. Layers without K/V of their own have no projections for it.
    """
    hidden, head_dim = positive(config, "hidden_size", where), positive(config, "head_dim", where)
    streams, rank = positive(config, "altup_num_inputs", where), positive(config, "laurel_rank", where)
    width, words = (positive(config, f"{key}_size_per_layer_input", where) for key in ("hidden", "vocab"))
    shared = config.get("num_kv_shared_layers") or 0
    norms = 2 * hidden + head_dim  # beside two of every decoder; that of queries
    altup = hidden * (streams + 2) + streams**2 + streams**3  # router, its norm, a scale; corrections, predictions
    laurel = hidden * (2 * rank + 1)
    embedded = hidden * (2 * width + 1)
    layers = num_attending * (norms + altup + laurel + embedded) + (num_attending - shared) * head_dim
    projections = 2 * hidden * head_dim * positive(config, "num_key_value_heads", where)
    whole = num_attending * width * (words + hidden) + width + 2 * (streams - 1) * hidden**2
    return layers - shared * projections + whole


def _gemma4(config: Config, num_attending: int, where: str) -> int:
    """Gemma 4's: more norms, an embedding per layer, and networks twice as wide in layers that read others' K/V.

    Source: transformers' Gemma4TextModel. Such layers have no projections for K/V, and full ones, where K and V are
    one, have one.
    """
    hidden = positive(config, "hidden_size", where)
    windows = layer_windows(config, where)
    alike = positive(config, "num_key_value_heads", where), positive(config, "head_dim", where)
    shapes = kv_shapes(config, windows, where) or (alike,) * num_attending
    first_shared = num_attending - (config.get("num_kv_shared_layers") or 0)
    wider = 3 * hidden * positive(config, "intermediate_size", where) if config.get("use_double_wide_mlp") else 0
    total = 0
    for layer, (heads, head_dim) in enumerate(shapes):
        total += 2 * hidden + head_dim  # beside two norms of every decoder; that of queries
        if layer >= first_shared:
            total += wider - 2 * hidden * heads * head_dim
        else:
            total += head_dim
            total -= hidden * heads * head_dim if config.get("attention_k_eq_v") and not windows[layer] else 0
    if config.get("enable_moe_block"):
        total += num_attending * (4 * hidden + positive(config, "num_experts", where))
    if config.get("hidden_size_per_layer_input"):
        width, words = (positive(config, f"{key}_size_per_layer_input", where) for key in ("hidden", "vocab"))
        total += num_attending * (hidden * (2 * width + 1) + width * (words + hidden)) + width
    return total


_OTHERS: dict[str, Callable[[Config, int, str], int]] = {
    "gemma3n_text": _gemma3n, "gemma4_text": _gemma4, "qwen3_next": _query_gates,
}  # fmt: skip


def other_weights(config: Config, num_attending: int, where: str) -> int:
    """Weights that neither attention, states, networks, two norms a layer nor embeddings account for.

    K/V projections that layers lack are taken off.

    Args:
        config: Of ``decoder_config``.
        num_attending: Layers that attend.
        where: What errors call it.

    Raises:
        PlanError: A size is missing or no positive integer.
    """
    count = _OTHERS.get(str(config["model_type"]))
    return count(config, num_attending, where) if count else 0
