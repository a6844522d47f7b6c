"""How many blocks and how many users a memory holds: arithmetic on a model's configuration, nothing measured.

Station: called by ``kvplane plan``. The executor measures the same terms of a loaded model at its start; this says
beforehand about what it will find.

    bytes per block = 2 (K and V) * layers * KV heads * head size * block size * bytes of a KV value
    blocks          = (utilization * memory - weights - overhead) // bytes per block
    users           = (blocks - 1, the null block) // blocks of one context
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "DTYPE_BYTES",
    "KV_DTYPE_BYTES",
    "PRESETS",
    "Capacity",
    "ModelShape",
    "PlanError",
    "load_shape",
    "plan_capacity",
]

# Types of models some of whose layers keep a state in place of K/V; those without any attention lack its fields.
_WITH_STATES = ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "qwen3_next", "zamba2")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
# An executor stores K and V in either kind of fp8; which of them changes no size.
KV_DTYPE_BYTES = DTYPE_BYTES | {"fp8_e4m3": 1, "fp8_e5m2": 1}


class PlanError(Exception):
    """The model or the memory can not be planned with. The message says expected, got and what to do."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides a decoder's memory, as its config.json says.

    Attributes:
        num_layers: Layers; each has K and V of every token.
        hidden_size: Width of a token between layers.
        num_heads: Query heads.
        num_kv_heads: Heads that K and V have.
        head_dim: Width of a head.
        intermediate_size: Width of the gated feed-forward network.
        vocab_size: Tokens of the vocabulary.
        tied: Whether the output layer is the embedding.
        max_model_len: Longest sequence.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    max_model_len: int

    @property
    def num_parameters(self) -> int:
        """Weights of a decoder of the Llama family; its norms, which are below a thousandth, are counted too."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        layers = self.num_layers * (attention + feed_forward + 2 * self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return layers + embeddings + self.hidden_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        """Reads the configuration that transformers keeps beside weights.

        Args:
            config: The JSON object.
            where: What errors call it.

        Raises:
            PlanError: A field is missing or no positive integer, or there are layers without K and V.
        """
        kind = config.get("model_type")
        if kind in _WITH_STATES:
            raise PlanError(
                f"{where}: expected K and V in every layer, got model_type {kind!r}, of which layers keep a state; "
                "start its executor, which measures"
            )

        def number(name: str, default: int | None = None) -> int:
            value = config.get(name)
            if value is None:
                value = default
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{where}: expected {name} to be a positive integer, got {value!r}; name a decoder's")
            return value

        heads = number("num_attention_heads")
        hidden = number("hidden_size")
        return cls(
            num_layers=number("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", hidden // heads),
            intermediate_size=number("intermediate_size"),
            vocab_size=number("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_model_len=number("max_position_embeddings"),
        )


# Source: the models' own config.json.
PRESETS = {
    "llama-3-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128_256, False, 8192),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128_256, False, 131_072),
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072, 151_936, True, 40_960),
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49_152, True, 8192),
}


def load_shape(model: str) -> ModelShape:
    """Finds a model's shape.

    Args:
        model: A name in PRESETS, a config.json, or the folder it lies in.

    Raises:
        PlanError: There is none, or it can not be read.
    """
    preset = PRESETS.get(model.lower())
    if preset is not None:
        return preset
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(PRESETS)
        raise PlanError(f"expected one of {names}, or a config.json; {path}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{path}: expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return ModelShape.from_config(config, str(path))


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits. Units: bytes, unless the name says otherwise.

    Attributes:
        total_bytes: The memory.
        usable_bytes: Utilization times that.
        weights_bytes: Taken by weights.
        overhead_bytes: Taken by activations and the runtime.
        kv_bytes: Left for K and V, at least 0.
        bytes_per_token: K and V of one token.
        bytes_per_block: K and V of one block.
        num_blocks: Blocks that fit, the null block included.
        block_size: Tokens per block.
        num_tokens: Tokens that the usable blocks hold.
        context_len: Tokens of one user.
        blocks_per_user: Blocks of one user.
        num_users: Users at once, each with a context of their own.
    """

    total_bytes: int
    usable_bytes: int
    weights_bytes: int
    overhead_bytes: int
    kv_bytes: int
    bytes_per_token: int
    bytes_per_block: int
    num_blocks: int
    block_size: int
    num_tokens: int
    context_len: int
    blocks_per_user: int
    num_users: int


def plan_capacity(
    shape: ModelShape,
    *,
    total_bytes: int,
    utilization: float,
    dtype: str,
    kv_dtype: str,
    overhead_bytes: int,
    block_size: int,
    context_len: int,
    weights_bytes: int | None = None,
) -> Capacity:
    """Reckons what fits.

    Args:
        shape: The model's.
        total_bytes: Memory of the device.
        utilization: Share of it that may be used, in (0, 1].
        dtype: What weights are kept in; a key of DTYPE_BYTES.
        kv_dtype: What K and V are kept in: a key of KV_DTYPE_BYTES, or "auto", which is dtype.
        overhead_bytes: Activations at the largest step, and the runtime.
        block_size: Tokens per block.
        context_len: Tokens of one user's sequence.
        weights_bytes: What weights take; None reckons it from the shape.
    """
    if weights_bytes is None:
        weights_bytes = shape.num_parameters * DTYPE_BYTES[dtype]
    kv_value_bytes = KV_DTYPE_BYTES[dtype if kv_dtype == "auto" else kv_dtype]
    bytes_per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * kv_value_bytes
    usable_bytes = math.floor(total_bytes * utilization)
    kv_bytes = max(0, usable_bytes - weights_bytes - overhead_bytes)
    num_blocks = kv_bytes // (bytes_per_token * block_size)
    usable_blocks = max(0, num_blocks - 1)
    blocks_per_user = -(-context_len // block_size)
    return Capacity(
        total_bytes=total_bytes,
        usable_bytes=usable_bytes,
        weights_bytes=weights_bytes,
        overhead_bytes=overhead_bytes,
        kv_bytes=kv_bytes,
        bytes_per_token=bytes_per_token,
        bytes_per_block=bytes_per_token * block_size,
        num_blocks=num_blocks,
        block_size=block_size,
        num_tokens=usable_blocks * block_size,
        context_len=context_len,
        blocks_per_user=blocks_per_user,
        num_users=usable_blocks // blocks_per_user,
    )
