"""A complete backend: a Llama decoder in NumPy over a paged KV cache. Plain, slow, and meant to be read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from executor_service.backends import base

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class NumpyBackendConfig:
    """What the backend is told: fields named like those of the executor's configuration get its values."""

    model: str
    model_name: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks_override: int | None = None
    memory_limit: int | None = None
    swap_space: int = 0


class NumpyBackend(base.Backend):
    """Runs Llama models of float32 safetensors."""

    def __init__(self, config: NumpyBackendConfig) -> None:
        self.config = config

    def load(self) -> base.ModelInfo:
        """Read config.json and model.safetensors, and say what there is."""
        folder = Path(self.config.model)
        try:
            self.model = json.loads((folder / "config.json").read_text())
            self.weights = load_file(folder / "model.safetensors")
        except (OSError, ValueError) as error:
            message = f"model: expected a folder with config.json and model.safetensors, got {folder}: {error}"
            raise base.BackendError("MODEL_NOT_READABLE", message, model=folder) from error
        self.heads, self.kv_heads = self.model["num_attention_heads"], self.model["num_key_value_heads"]
        self.head_dim = self.model["head_dim"]
        self.block_shape = (2, self.config.block_size, self.kv_heads, self.head_dim)
        self.layers = self.model["num_hidden_layers"]
        self.max_model_len = self.config.max_model_len or self.model["max_position_embeddings"]
        self.block_bytes = self.layers * int(np.prod(self.block_shape)) * 4
        digest = hashlib.sha256(b"".join(self.weights[name].tobytes() for name in sorted(self.weights)))
        return base.ModelInfo(
            model_name=self.config.model_name or folder.name,
            model_fingerprint=digest.hexdigest()[:32],
            device="cpu",
            dtype="float32",
            kv_cache_dtype="float32",
            vocab_size=self.model["vocab_size"],
            max_model_len=self.max_model_len,
            eos_token_ids=(self.model["eos_token_id"],),
            block_size=self.config.block_size,
            kv_groups=(base.KvGroupSpec(self.layers, self.kv_heads, self.head_dim, self.block_bytes),),
            max_logprobs=min(20, self.model["vocab_size"]),
        )

    def profile_memory(self, max_num_batched_tokens: int, max_num_seqs: int) -> base.MemoryProfile:
        """Count what fits: this backend reckons where `torch` measures, so it states its peak as an estimate."""
        weights = sum(tensor.nbytes for tensor in self.weights.values())
        width = 4 * self.model["hidden_size"] + 3 * self.model["intermediate_size"]
        peak = weights + 4 * (max_num_batched_tokens * width + 3 * max_num_seqs * self.model["vocab_size"])
        host_blocks = self.config.swap_space // self.block_bytes
        total = self.config.memory_limit or 2**30
        available = max(0, total - peak - host_blocks * self.block_bytes)
        override = self.config.num_blocks_override
        num_blocks = available // self.block_bytes if override is None else override
        if (num_blocks - 1) * self.config.block_size < self.max_model_len:
            message = f"expected room for {self.max_model_len} tokens, got {num_blocks} blocks; raise memory_limit"
            raise base.NotEnoughMemoryError("NOT_ENOUGH_KV_MEMORY", message, num_blocks=num_blocks)
        return base.MemoryProfile(
            total_bytes=total, utilization=1.0, weights_bytes=weights, peak_bytes=peak, available_bytes=available,
            bytes_per_block=self.block_bytes, num_blocks=num_blocks, overridden=override is not None,
            num_host_blocks=host_blocks,
        )  # fmt: skip

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate. Shape of either: (layers, blocks, K and V, block_size, kv_heads, head_dim)."""
        self.cache = np.zeros((self.layers, num_blocks, *self.block_shape), dtype=np.float32)
        self.host = np.zeros((self.layers, num_host_blocks, *self.block_shape), dtype=np.float32)

    def copy_blocks(self, copies: Sequence[base.BlockCopies]) -> None:
        """Copy whole blocks of all layers; within one entry the order does not matter."""
        for run in copies:
            source = self.host if run.direction is base.CopyDirection.HOST_TO_DEVICE else self.cache
            target = self.host if run.direction is base.CopyDirection.DEVICE_TO_HOST else self.cache
            target[:, run.target_ids] = source[:, run.source_ids]

    def execute(self, batch: base.StepBatch) -> base.StepResult:
        """Run all layers over all tokens of the step, then draw from the logits of the rows that sample."""
        hidden = self.weights["model.embed_tokens.weight"][batch.token_ids]
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            hidden = hidden + self._attention(normed, layer, batch)
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate = self._linear(normed, f"{name}.mlp.gate_proj")
            gate = gate / (1 + np.exp(-gate)) * self._linear(normed, f"{name}.mlp.up_proj")
            hidden = hidden + self._linear(gate, f"{name}.mlp.down_proj")
        finite = np.logical_and.reduceat(np.isfinite(hidden).all(axis=-1), batch.query_indptr[:-1])
        failed = {int(row): "NON_FINITE_KV" for row in np.flatnonzero(~finite)}
        tokens, logprobs = self._sampled(hidden, batch, failed)
        failures = [base.RowFailure(row, reason, f"row {row} has computed no number") for row, reason in failed.items()]
        return base.StepResult(tokens, logprobs, failures)

    def _sampled(
        self, hidden: Array, batch: base.StepBatch, failed: dict[int, str]
    ) -> tuple[npt.NDArray[np.int32], dict[int, base.RowLogprobs]]:
        """Draw a token for each sample; rows that have none to draw are added to those that failed."""
        if (sampling := batch.sampling) is None:
            return np.empty(0, dtype=np.int32), {}
        last = hidden[batch.query_indptr[sampling.rows + 1] - 1]
        logits = self._linear(self._norm(last, "model.norm"), "lm_head")
        tokens, logprobs = np.full(len(logits), -1, dtype=np.int32), {}
        for sample, row in enumerate(logits):
            params = sampling.params[sampling.params_index[sample]]
            noise = np.random.default_rng([int(sampling.seeds[sample]), int(sampling.positions[sample])]).random()
            token = draw(row, params, sampling.histories.get(sample), noise) if np.isfinite(row).all() else -1
            tokens[sample] = token
            if token < 0:
                failed[int(sampling.rows[sample])] = "NON_FINITE_LOGITS"
            elif params.num_logprobs >= 0:
                every = row - row.max() - np.log(np.exp(row - row.max()).sum())
                ids = np.array([token, *np.argsort(-row, kind="stable")[: params.num_logprobs]], dtype=np.int32)
                logprobs[sample] = base.RowLogprobs(ids, every[ids])
        return tokens, logprobs

    def _attention(self, hidden: Array, layer: int, batch: base.StepBatch) -> Array:
        """Write K and V of every row into its slots; only then let each row read its table."""
        name = f"model.layers.{layer}.self_attn"
        query, key, value = (
            self._linear(hidden, f"{name}.{part}_proj").reshape(len(hidden), -1, self.head_dim) for part in "qkv"
        )
        query, key = self._rotated(query, batch.positions), self._rotated(key, batch.positions)
        blocks, offsets = np.divmod(batch.slot_mappings[0], self.config.block_size)
        self.cache[layer, blocks, 0, offsets], self.cache[layer, blocks, 1, offsets] = key, value
        output, table = np.empty_like(query), batch.tables[0]
        for row in range(batch.num_rows):
            rows = slice(*batch.query_indptr[row : row + 2])
            ids = table.block_ids[slice(*table.block_indptr[row : row + 2])]
            # (blocks, 2, block_size, ...) to (2, tokens, kv_heads, head_dim), cut where the sequence ends.
            stored = np.moveaxis(self.cache[layer, ids], 1, 0).reshape(2, -1, self.kv_heads, self.head_dim)
            keys, values = np.repeat(stored[:, : batch.seq_lens[row]], self.heads // self.kv_heads, axis=2)
            scores = np.einsum("thd,shd->hts", query[rows], keys) / np.sqrt(np.float32(self.head_dim))
            scores[:, np.arange(len(keys)) > batch.positions[rows, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            output[rows] = np.einsum("hts,shd->thd", weights / weights.sum(axis=-1, keepdims=True), values)
        return self._linear(output.reshape(len(hidden), -1), f"{name}.o_proj")

    def _rotated(self, states: Array, positions: npt.NDArray[np.int32]) -> Array:
        """Rotary embedding, halves rotated against each other."""
        frequencies = self.model.get("rope_theta", 10000.0) ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = (positions[:, None] * frequencies)[:, None, :]
        cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = np.split(states, 2, axis=-1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def _norm(self, hidden: Array, name: str) -> Array:
        square = np.square(hidden).mean(axis=-1, keepdims=True) + np.float32(self.model["rms_norm_eps"])
        return hidden / np.sqrt(square) * self.weights[f"{name}.weight"]

    def _linear(self, hidden: Array, name: str) -> Array:
        return hidden @ self.weights[f"{name}.weight"].T


def draw(logits: Array, params: base.TokenSampling, history: base.PenaltyHistory | None, noise: float) -> int:
    """Choose a token in the order that the contract gives; -1 where none is left. noise: in [0, 1)."""
    logits = logits.astype(np.float64)
    if history is not None:
        seen, counts = np.unique(history.token_ids, return_counts=True)
        strength = params.repetition_penalty
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / strength, logits[seen] * strength)
        seen, counts = np.unique(history.token_ids[history.prompt_len :], return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * counts
    logits[params.logit_bias.token_ids] += params.logit_bias.values
    logits[list(params.suppressed_token_ids)] = -np.inf
    order = np.argsort(-logits, kind="stable")
    if np.isneginf(logits[order[0]]):
        return -1
    if params.temperature == 0:
        return int(order[0])
    order = order[: params.top_k or len(order)]
    weights = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    kept = (np.cumsum(weights) - weights < params.top_p * weights.sum()) & (weights >= params.min_p * weights[0])
    cumulative = np.cumsum(weights[kept])
    return int(order[kept][np.searchsorted(cumulative, noise * cumulative[-1], side="right")])
