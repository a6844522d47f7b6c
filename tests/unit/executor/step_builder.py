"""Builds StepBatch objects from plain lists, and tiny models to run them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from executor_service.backends.base import (
    GroupTables,
    LogitBias,
    PenaltyHistory,
    SamplingBatch,
    StepBatch,
    TokenSampling,
)

GREEDY = TokenSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=LogitBias.of({}),
    suppressed_token_ids=(),
    num_logprobs=-1,
)
VOCAB_SIZE = 199


def sampling(**changes: object) -> TokenSampling:
    """Greedy parameters with changes; a logit_bias may be a mapping."""
    if isinstance(changes.get("logit_bias"), Mapping):
        changes["logit_bias"] = LogitBias.of(changes["logit_bias"])  # type: ignore[arg-type]
    return replace(GREEDY, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sample:
    """How one more token is drawn from a row."""

    params: TokenSampling = GREEDY
    seed: int = 0
    history: PenaltyHistory | None = None


@dataclass(frozen=True)
class Row:
    """One row of a step: `tokens` stand at positions `start`...; `blocks` hold the whole sequence up to their end.

    If it samples, `forks` are drawn beside its own. `more_blocks` are its tables in further KV groups.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    params: TokenSampling | None = GREEDY
    seed: int = 0
    history: PenaltyHistory | None = None
    forks: Sequence[Sample] = ()
    more_blocks: Sequence[Sequence[int]] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def build_step(rows: Sequence[Row], block_size: int, step_id: int = 1) -> StepBatch:
    """A step of these rows, every array read-only as the shell makes them."""
    positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
    groups = [
        _group([[row.blocks, *row.more_blocks][group] for row in rows], rows, block_size) for group in _groups(rows)
    ]
    return StepBatch(
        step_id=step_id,
        query_indptr=_int32([0, *np.cumsum([len(row.tokens) for row in rows])]),
        token_ids=_int32([token for row in rows for token in row.tokens]),
        positions=_int32(positions),
        seq_lens=_int32([row.end for row in rows]),
        tables=[tables for tables, _ in groups],
        slot_mappings=[slots for _, slots in groups],
        sampling=_sampling(rows),
    )


def _groups(rows: Sequence[Row]) -> range:
    return range(1 + len(rows[0].more_blocks))


def _group(tables: Sequence[Sequence[int]], rows: Sequence[Row], block_size: int) -> tuple[GroupTables, np.ndarray]:  # type: ignore[type-arg]
    """One KV group's tables and slots."""
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, row in zip(tables, rows, strict=True)
        for position in range(row.start, row.end)
    ]
    counts = [-(-row.end // block_size) for row in rows]
    csr = GroupTables(
        block_indptr=_int32([0, *np.cumsum(counts)]),
        block_ids=_int32([b for table, count in zip(tables, counts, strict=True) for b in table[:count]]),
        last_block_len=_int32([row.end - (count - 1) * block_size for row, count in zip(rows, counts, strict=True)]),
    )
    return csr, _frozen(np.array(slots, dtype=np.int64))


def _sampling(rows: Sequence[Row]) -> SamplingBatch | None:
    chosen = [
        (index, one)
        for index, row in enumerate(rows)
        if row.params is not None
        for one in (Sample(row.params, row.seed, row.history), *row.forks)
    ]
    if not chosen:
        return None
    histories: Mapping[int, PenaltyHistory] = {
        place: one.history for place, (_, one) in enumerate(chosen) if one.history is not None
    }
    return sampling_batch(
        [one.params for _, one in chosen],
        seeds=[one.seed for _, one in chosen],
        positions=[rows[index].end for index, _ in chosen],
        histories=histories,
        rows=[index for index, _ in chosen],
    )


def sampling_batch(
    params: Sequence[TokenSampling],
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    histories: Mapping[int, PenaltyHistory] | None = None,
    rows: Sequence[int] | None = None,
) -> SamplingBatch:
    """A sampling batch with one parameter set per row."""
    size = len(params)
    return SamplingBatch(
        rows=_int32(rows if rows is not None else range(size)),
        params=list(params),
        params_index=_int32(range(size)),
        seeds=_frozen(np.array(seeds if seeds is not None else [0] * size, dtype=np.uint64)),
        positions=_int32(positions if positions is not None else [1] * size),
        histories=histories or {},
    )


_SLIDING, _FULL = "sliding_attention", "full_attention"
_MORE: dict[str, dict[str, object]] = {
    "llama4": {
        "num_hidden_layers": 5, "attention_chunk_size": 20, "no_rope_layers": [1, 1, 0, 1, 0],
        "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "num_local_experts": 4, "floor_scale": 16,
        "attn_scale": 0.3,
    },
    "gemma3n": {
        "num_hidden_layers": 7, "num_kv_shared_layers": 3, "sliding_window": 20,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING],
        "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, *[0.0] * 6], "tie_word_embeddings": False,
        "pad_token_id": 0,
    },
    "gemma4": {
        "num_hidden_layers": 7, "num_kv_shared_layers": 2, "sliding_window": 20, "global_head_dim": 32,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
        "attention_k_eq_v": True, "num_global_key_value_heads": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, "tie_word_embeddings": False,
        "pad_token_id": 0,
    },
}  # fmt: skip


def tiny_config(kind: str, **changes: object) -> PreTrainedConfig:
    """A configuration small enough to run in milliseconds, of a type that transformers names so.

    "llama", "qwen2" and "qwen3" attend to all tokens; "mistral" has a window of 20 tokens in all layers, "gemma3" in
    five of seven. "gemma3n" has it in four of seven, of which the last three read the K/V of earlier ones. "gemma4" has
    it in four of seven, too, and in the other three twice as much K/V of a token; the last two read earlier ones.
    "llama4" is a mixture of experts in every second layer, and attends within chunks of 20 tokens in three of five; its
    full attention has a temperature that grows every 16 tokens. "mamba" and "mamba2" keep a state in every layer;
    "bamba", "granitemoehybrid", "jamba" and "qwen3_next" do in three of four or five, and attend in the others.
    """
    values: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "eos_token_id": 3,
        "bos_token_id": 1,
        "pad_token_id": None,
        "initializer_range": 0.4,
    }
    if kind == "qwen3":
        values |= {"head_dim": 20}  # not hidden_size / heads, which Qwen3 allows
    if kind == "mistral":
        values |= {"sliding_window": 20}
    if kind == "gemma3":
        sliding, full = "sliding_attention", "full_attention"
        values |= {
            "sliding_window": 20,
            "layer_types": [sliding, sliding, full, sliding, sliding, sliding, full],
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,  # else the likeliest token is the one before, whatever attention says
        }
    full, linear = "full_attention", "linear_attention"
    if kind == "mamba2":
        values |= {"num_heads": 8, "state_size": 4, "n_groups": 2, "chunk_size": 8}
        values |= {"head_dim": 2 * values["hidden_size"] // 8, "tie_word_embeddings": False}  # type: ignore[operator]
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
            del values[name]
    if kind == "mamba":
        values |= {"state_size": 4, "tie_word_embeddings": False}
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
            del values[name]
        del values["head_dim"]
    if kind == "jamba":
        values |= {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 4}
        values |= {"num_experts": 4, "num_key_value_heads": 3, "use_mamba_kernels": False}
    if kind in ("bamba", "granitemoehybrid"):
        values |= {"mamba_n_heads": 8, "mamba_d_state": 4, "mamba_n_groups": 2, "mamba_chunk_size": 8}
        values |= {"num_hidden_layers": 5, "mamba_d_head": 24, "num_key_value_heads": 3}
    if kind == "bamba":
        values |= {"attn_layer_indices": [1, 4]}
    if kind == "granitemoehybrid":
        values |= {
            "layer_types": [linear, full, linear, linear, full],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }
        values |= {"shared_intermediate_size": 64, "attention_multiplier": 0.25}
    if kind == "qwen3_next":
        # With weights as large as the others' its two forms of the delta rule differ in the second digit.
        values |= {"num_hidden_layers": 4, "layer_types": [linear, linear, linear, full], "initializer_range": 0.15}
        values |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
        values |= {"linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 4}
        values |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    kinds: dict[str, type[PreTrainedConfig]] = {
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "mistral": MistralConfig,
        "gemma3": Gemma3TextConfig,
        "gemma3n": Gemma3nTextConfig,
        "gemma4": Gemma4TextConfig,
        "llama4": Llama4TextConfig,
        "jamba": JambaConfig,
        "mamba": MambaConfig,
        "mamba2": Mamba2Config,
        "bamba": BambaConfig,
        "granitemoehybrid": GraniteMoeHybridConfig,
        "qwen3_next": Qwen3NextConfig,
    }
    return kinds[kind](**(values | _MORE.get(kind, {}) | changes))


def save_tiny_model(folder: Path, kind: str, **changes: object) -> Path:
    """A seeded random model in float32, as a safetensors folder."""
    torch.manual_seed(20_240_613)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def reference_tokens(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of transformers' own generate, eager attention, no early end."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def prompt_of(length: int, seed: int) -> list[int]:
    """Random prompt tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(4, VOCAB_SIZE, length)]


def _int32(values: Sequence[int] | range | np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return _frozen(np.array(values, dtype=np.int32))


def _frozen(array: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    array.flags.writeable = False
    return array
