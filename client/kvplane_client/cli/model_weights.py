"""Weights of a decoder that are none of the Llama family's: what some types of models have beside.

Station: called by ``capacity``, which counts the rest. It knows JSON objects and numbers of weights. As in
``model_layers``, tests hold it to transformers' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvplane_client.cli.model_layers import positive

__all__ = ["other_weights"]

Config = Mapping[str, Any]


def _query_gates(config: Config, num_attending: int, where: str) -> int:
    """Qwen3-Next's: a gate as wide as the queries, and a norm each of queries and keys."""
    heads, width = positive(config, "num_attention_heads", where), positive(config, "head_dim", where)
    return num_attending * (positive(config, "hidden_size", where) * heads * width + 2 * width)


_OTHERS: dict[str, Callable[[Config, int, str], int]] = {"qwen3_next": _query_gates}


def other_weights(config: Config, num_attending: int, where: str) -> int:
    """Weights that neither attention, states, networks, two norms a layer nor embeddings account for.

    Args:
        config: Of ``decoder_config``.
        num_attending: Layers that attend.
        where: What errors call it.

    Raises:
        PlanError: A size is missing or no positive integer.
    """
    count = _OTHERS.get(str(config["model_type"]))
    return count(config, num_attending, where) if count else 0
