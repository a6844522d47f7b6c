"""Small random models, written for executors to serve, and the kit's own arithmetic on them.

Station: the command writes a model with `write_model`; `judges.ModelJudge` computes it with `ReferenceModel`. A Llama
decoder in safetensors files as transformers names them, plain enough for any executor to read; with windows a Ministral
one, which is the same but that some layers read the last tokens only. The arithmetic is float64 over the whole sequence
at once, without a cache, a block or a batch. Needs NumPy and safetensors (the extra `conformance`), never torch.

Source: the architecture is that of Touvron et al., "LLaMA", 2023 (RMSNorm, rotary embeddings, SwiGLU), with grouped
heads as in Ainslie et al., "GQA", 2023; windows as in Beltagy et al., "Longformer", 2020. The tensors' names and the
rotary layout (halves, not pairs) are those of transformers' `LlamaForCausalLM` and `MinistralForCausalLM`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kvplane_client.conformance.outcome import UnusableError
from kvplane_client.conformance.reference_adapter import adapter_deltas

__all__ = ["ReferenceModel", "write_model"]

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_WINDOWED_LAYERS = [_SLIDING, _SLIDING, _FULL] * 2
# What a model must have for the arithmetic below to be its own; a key that is absent counts as this.
_MODEL_TYPES = ("llama", "ministral")
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
}

Float64 = npt.NDArray[np.float64]


def write_model(folder: Path, seed: int, window: int = 0) -> None:
    """Writes config.json and model.safetensors, the same bytes for the same seed and window.

    Args:
        folder: Is made where it is not there.
        seed: In [0, 2**32).
        window: In tokens. 0: 3 layers of full attention. Else 6 layers, of which two read that many tokens before each
            that reads all.

    Raises:
        OSError: It cannot be written.
    """
    # The old generator, since its stream is frozen for good. Weights so large that a wrong context shows in the output.
    draw = np.random.RandomState(seed)
    config: dict[str, object] = dict(_CONFIG)
    if window:
        config |= {
            "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": window,
            "layer_types": _WINDOWED_LAYERS, "num_hidden_layers": len(_WINDOWED_LAYERS),
        }  # fmt: skip
    hidden, inner, vocab = (int(str(_CONFIG[key])) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads, head_dim = (
        int(str(_CONFIG[key])) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        values: Float64 = draw.standard_normal((rows, columns)) * gain / np.sqrt(columns)
        return values.astype(np.float32)

    def scale() -> npt.NDArray[np.float32]:
        return (1 + 0.1 * draw.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, np.sqrt(hidden))}
    for layer in range(int(str(config["num_hidden_layers"]))):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": scale(),
            f"{name}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden, 1.5),
            f"{name}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden, 1.5),
            f"{name}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden, 1.5),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim, 1.5),
            f"{name}.post_attention_layernorm.weight": scale(),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    tensors |= {"model.norm.weight": scale(), "lm_head.weight": matrix(vocab, hidden, 2.5)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class ReferenceModel:
    """A Llama or Ministral decoder in NumPy.

    Args:
        folder: With config.json and model.safetensors.

    Raises:
        UnusableError: It is no such folder, or a model that the kit cannot compute.
    """

    def __init__(self, folder: Path) -> None:
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text())
            weights = load_file(folder / "model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise UnusableError(f"expected a folder that --write-model has made, got {folder}: {error}") from error
        if config.get("model_type", "llama") not in _MODEL_TYPES:
            expected = " or ".join(_MODEL_TYPES)
            raise UnusableError(
                f"{folder}: expected model_type {expected}, got {config['model_type']!r}; the kit computes no other"
            )
        for key, value in _REQUIRED.items():
            if config.get(key, value) != value:
                raise UnusableError(
                    f"{folder}: expected {key} {value!r}, got {config[key]!r}; the kit computes no other"
                )
        try:
            self._weights: dict[str, Float64] = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
            self.vocab_size = int(config["vocab_size"])
            self._windows = _windows(config)
            self._heads = int(config["num_attention_heads"])
            self._kv_heads = int(config["num_key_value_heads"])
            self._head_dim = int(config.get("head_dim") or config["hidden_size"] // self._heads)
            self._epsilon = float(config["rms_norm_eps"])
            self._theta = float(config.get("rope_theta", 10000.0))
            head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
            self._head = self._weights[head]
            self._adapted: dict[Path, ReferenceModel] = {}
        except (KeyError, TypeError, ValueError) as error:
            message = f"{folder}: expected the configuration of a Llama or Ministral decoder, got {error!r}"
            raise UnusableError(message) from error

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the layers that adapters may be for, by name."""
        names = [name.removesuffix(".weight") for name in self._weights if name.endswith("_proj.weight")]
        return {
            name: (self._weights[f"{name}.weight"].shape[0], self._weights[f"{name}.weight"].shape[1]) for name in names
        }

    def adapted(self, adapter: Path) -> ReferenceModel:
        """The model with an adapter's matrices added to its weights; read once.

        Raises:
            UnusableError: It is no folder of an adapter for the model.
        """
        if adapter not in self._adapted:
            model = copy.copy(self)
            try:
                weights = {f"{name}.weight": delta for name, delta in adapter_deltas(adapter).items()}
                added = {name: self._weights[name] + delta for name, delta in weights.items()}
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                message = (
                    f"--adapter: with --model expected folders that the kit can read, too, got {adapter}: {error!r}"
                )
                raise UnusableError(message) from error
            model._weights = self._weights | added
            self._adapted[adapter] = model
        return self._adapted[adapter]

    def logprobs(self, sequence: Sequence[int], adapter: Path | None = None) -> list[list[float]]:
        """Computes what comes after every beginning of a sequence.

        Args:
            sequence: Its tokens.
            adapter: The folder of a LoRA adapter that all of them are computed with.

        Shape:
            sequence: (T,); returns (T, V) natural log probabilities.
        """
        if adapter is not None:
            return self.adapted(adapter).logprobs(sequence)
        hidden = self._weights["model.embed_tokens.weight"][np.array(sequence)]
        cosine, sine = self._rotation(len(sequence))
        for layer, window in enumerate(self._windows):
            name = f"model.layers.{layer}"
            normed = self._normed(hidden, f"{name}.input_layernorm.weight")
            hidden = hidden + self._attention(normed, f"{name}.self_attn", cosine, sine, window)
            normed = self._normed(hidden, f"{name}.post_attention_layernorm.weight")
            hidden = hidden + self._feed_forward(normed, f"{name}.mlp")
        logits = self._normed(hidden, "model.norm.weight") @ self._head.T
        logits -= logits.max(axis=-1, keepdims=True)
        logprobs: list[list[float]] = (logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))).tolist()
        return logprobs

    def _rotation(self, length: int) -> tuple[Float64, Float64]:
        """Cosine and sine of each position's angles. Shape: (T, 1, D), its halves equal."""
        frequencies = self._theta ** (-np.arange(0, self._head_dim, 2) / self._head_dim)
        angles = np.tile(np.arange(length)[:, None] * frequencies, 2)[:, None, :]
        return np.cos(angles), np.sin(angles)

    def _normed(self, hidden: Float64, weight: str) -> Float64:
        """RMSNorm. Shape: (T, H)."""
        root = np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + self._epsilon)
        normed: Float64 = hidden / root * self._weights[weight]
        return normed

    def _attention(self, hidden: Float64, name: str, cosine: Float64, sine: Float64, window: int) -> Float64:
        """Causal attention with grouped heads: softmax(Q K^T / sqrt(D)) V, over the last `window` tokens if not 0.

        Shape: (T, H).
        """
        length = len(hidden)

        def projected(part: str, heads: int) -> Float64:
            product: Float64 = hidden @ self._weights[f"{name}.{part}_proj.weight"].T
            return product.reshape(length, heads, self._head_dim)

        def rotated(states: Float64) -> Float64:
            first, second = np.split(states, 2, axis=-1)
            return states * cosine + np.concatenate([-second, first], axis=-1) * sine

        group = self._heads // self._kv_heads
        query = rotated(projected("q", self._heads))
        key = np.repeat(rotated(projected("k", self._kv_heads)), group, axis=1)
        value = np.repeat(projected("v", self._kv_heads), group, axis=1)
        scores = np.einsum("thd,shd->hts", query, key) / np.sqrt(self._head_dim)
        distance = np.arange(length)[:, None] - np.arange(length)
        scores[:, (distance < 0) | (distance >= (window or length))] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("hts,shd->thd", weights, value).reshape(length, -1)
        attended: Float64 = mixed @ self._weights[f"{name}.o_proj.weight"].T
        return attended

    def _feed_forward(self, hidden: Float64, name: str) -> Float64:
        """SwiGLU: down(silu(gate(x)) * up(x)). Shape: (T, H)."""
        gate = hidden @ self._weights[f"{name}.gate_proj.weight"].T
        up = hidden @ self._weights[f"{name}.up_proj.weight"].T
        forwarded: Float64 = (gate / (1 + np.exp(-gate)) * up) @ self._weights[f"{name}.down_proj.weight"].T
        return forwarded


def _windows(config: dict[str, Any]) -> list[int]:
    """Tokens that each layer reads, 0 for all.

    Raises:
        KeyError, TypeError, ValueError: The configuration lacks what this depends on, or has another kind of layer.
    """
    count = int(config["num_hidden_layers"])
    if config.get("model_type", "llama") == "llama":
        return [0] * count
    kinds = config["layer_types"]
    if len(kinds) != count or not set(kinds) <= {_FULL, _SLIDING}:
        raise ValueError(f"layer_types: expected {count} of {_FULL} and {_SLIDING}, got {kinds}")
    return [int(config["sliding_window"]) if kind == _SLIDING else 0 for kind in kinds]
