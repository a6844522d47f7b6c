"""A whole model with random weights: steps that decode, computed kernel by kernel and replayed from CUDA graphs.

Everything takes a device and a recorder, so that tests run all of it on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.steps import BLOCK_SIZE, GREEDY
from executor_service.backends.base import GroupTables, Int32, SamplingBatch, StepBatch
from executor_service.decode_graphs import Recorder
from executor_service.kernels.triton_paged import TritonKernels
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.layer_groups import LayerGroups
from executor_service.model_runner import ATTENTION_NAME, ModelRunner


@dataclass(frozen=True)
class Load:
    """Rows that decode together. Units: context: tokens before the first of `steps` steps."""

    rows: int
    context: int
    steps: int


@dataclass(frozen=True)
class ModelPoint:
    """Output tokens per second of one load, and the share of tokens that are the same either way."""

    rows: int
    context: int
    eager: float
    graphs: float
    same_tokens: float


LOADS = (Load(1, 1024, 64), Load(8, 1024, 64), Load(32, 1024, 64), Load(128, 1024, 32), Load(256, 512, 32))


def random_llama(device: torch.device, dtype: torch.dtype, **changes: int) -> PreTrainedModel:
    """A Llama of a billion parameters (the shape of Llama 3.2 1B), weights drawn at random from one seed."""
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**(sizes | changes)), dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    return model.eval().requires_grad_(requires_grad=False)


def measure_model(model: PreTrainedModel, loads: tuple[Load, ...], record: Recorder) -> Iterator[ModelPoint]:
    """Each load twice, over the same cache: computed, then replayed.

    A difference in the order of sums may turn a near tie between random logits, so tokens are counted, not asserted.
    """
    config, device = model.config, torch.device(model.device)
    layers, heads, head_dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    kernels = TritonKernels(
        device,
        dtype=model.dtype,
        kv_dtype=model.dtype,
        num_heads=config.num_attention_heads,
        num_kv_heads=heads,
        head_dim=head_dim,
    )
    runner = ModelRunner(model, kernels, LayerGroups((0,), (0,) * layers, tuple(range(layers))))
    longest = max(load.context + load.steps for load in loads)
    num_blocks = 1 + max(load.rows * -(-(load.context + load.steps) // BLOCK_SIZE) for load in loads)
    cache = PagedKvCache(KvLayout(layers, heads, head_dim, BLOCK_SIZE, model.dtype), num_blocks, device)
    sizes = sorted({load.rows for load in loads})
    graphs = runner.record_graphs(cache, sizes, vocab_size=config.vocab_size, max_model_len=longest, record=record)
    for load in loads:
        eager, tokens = _decode(runner, cache, load)
        runner.use_graphs(graphs)
        replayed, others = _decode(runner, cache, load)
        runner.use_graphs(None)
        yield ModelPoint(load.rows, load.context, eager, replayed, float((tokens == others).mean()))


def _decode(runner: ModelRunner, cache: PagedKvCache, load: Load) -> tuple[float, Int32]:
    """Output tokens per second, sampling included, and the tokens. Shape: (steps, rows)."""
    with torch.inference_mode():
        generator = torch.Generator(device=cache.layers[0].device).manual_seed(0)
        for layer in cache.layers:
            layer.normal_(generator=generator)
    fed = np.arange(load.rows, dtype=np.int32)
    tokens = [fed := runner.run(_step(load, fed, 0), cache).sampled_token_ids]  # compiles what it needs
    start = time.perf_counter()
    for place in range(1, load.steps):
        fed = runner.run(_step(load, fed, place), cache).sampled_token_ids
        tokens.append(fed)
    seconds = time.perf_counter() - start
    return load.rows * (load.steps - 1) / seconds, np.stack(tokens)


def _step(load: Load, fed: Int32, place: int) -> StepBatch:
    """One token for every row, after `place` others. Each row has its own blocks, side by side."""
    rows, position = load.rows, load.context + place
    per_row = -(-(load.context + load.steps) // BLOCK_SIZE)
    count = position // BLOCK_SIZE + 1
    blocks = 1 + np.arange(rows, dtype=np.int32)[:, None] * per_row + np.arange(count, dtype=np.int32)
    slots = blocks[:, -1].astype(np.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    each = np.arange(rows, dtype=np.int32)
    whole = np.full(rows, position + 1, dtype=np.int32)
    last = np.full(rows, position % BLOCK_SIZE + 1, dtype=np.int32)
    return StepBatch(
        step_id=place + 1,
        query_indptr=np.arange(rows + 1, dtype=np.int32),
        token_ids=fed,
        positions=np.full(rows, position, dtype=np.int32),
        seq_lens=whole,
        tables=[GroupTables(np.arange(rows + 1, dtype=np.int32) * np.int32(count), blocks.reshape(-1), last)],
        slot_mappings=[slots],
        sampling=SamplingBatch(
            rows=each,
            params=[GREEDY],
            params_index=np.zeros(rows, dtype=np.int32),
            seeds=np.zeros(rows, dtype=np.uint64),
            positions=whole,
            histories={},
        ),
    )
