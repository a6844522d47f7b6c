"""A loaded model that runs steps over a paged cache, with all that is known of it.

Station: made by `torch_loading`; `torch_backend` runs steps with it, and `torch_memory` the worst one. It holds no
memory for K/V: a cache is each call's argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from executor_service.backends.base import (
    STATE,
    AdapterError,
    KvGroupSpec,
    ModelInfo,
    RowFailure,
    StepBatch,
    StepResult,
)
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.fp8 import LayerCodecs
from executor_service.kernels.paged_kernels import PagedKernels
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.layer_groups import KvShape, LayerGroups
from executor_service.lora import LoraAdapters
from executor_service.model_loader import LoadedModel
from executor_service.model_runner import ModelRunner

__all__ = ["MAX_LOGPROBS", "PagedModel"]

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class PagedModel:
    """A model that runs steps over a paged cache, and what its cache has to be.

    Attributes:
        as_computed: the layout with K/V in the type that is computed in: `layout`, but where it is in eight bits.
        kv_cache_dtype: the type K/V is stored in, by name.
        limits: what the kernels gather at once, which the worst step has to reach.
        codecs: of each layer, where K/V is stored in eight bits; else none.
        adapters: None where the backend has room for none.
        fused_layers, packed_layers, stacked_layers: how many were replaced, or made one call, for the log.
    """

    loaded: LoadedModel
    layout: KvLayout
    as_computed: KvLayout
    groups: LayerGroups
    kv_cache_dtype: str
    kernels: PagedKernels
    limits: AttentionLimits
    runner: ModelRunner
    codecs: Sequence[LayerCodecs]
    adapters: LoraAdapters | None
    fused_layers: int
    packed_layers: int
    stacked_layers: int

    def run(self, batch: StepBatch, cache: PagedKvCache) -> StepResult:
        """Run a step, its rows' adapters at work. Raises BackendError, and RuntimeError where torch fails."""
        with self._adapters_of(batch):
            return self.runner.run(batch, cache)

    def follow(self, batch: StepBatch, cache: PagedKvCache) -> list[RowFailure]:
        """Run a step without sampling, see `ModelRunner.follow`; else as `run`."""
        with self._adapters_of(batch):
            return self.runner.follow(batch, cache)

    def forward(self, batch: StepBatch, cache: PagedKvCache) -> torch.Tensor:
        """Logits of the sampling rows, (S, V), instead of their tokens; else as `run`."""
        with self._adapters_of(batch):
            return self.runner.forward(batch, cache)

    def require_adapters(self) -> LoraAdapters:
        """The adapters. Raises AdapterError if there is room for none."""
        if self.adapters is None:
            raise AdapterError("ADAPTERS_NOT_SUPPORTED", "expected an executor with --max-loras above 0, got 0")
        return self.adapters

    def kv_groups(self) -> tuple[KvGroupSpec, ...]:
        """The KV groups as the manager is told of them."""
        layout, groups = self.layout, self.groups
        alike = KvShape(layout.num_kv_heads, layout.head_dim)
        specs = []
        for index, (window, size) in enumerate(zip(groups.windows, self.group_block_sizes, strict=True)):
            heads, head_dim = groups.shapes[index] if groups.shapes else alike
            specs.append(
                KvGroupSpec(
                    num_layers=groups.num_layers(index),
                    num_kv_heads=heads if window != STATE else 0,
                    head_dim=head_dim if window != STATE else 0,
                    bytes_per_block=layout.bytes_per_block,
                    window=window,
                    block_size=0 if size == layout.block_size else size,
                )
            )
        return tuple(specs)

    @property
    def group_block_sizes(self) -> tuple[int, ...]:
        """Tokens per block of each KV group."""
        return self.groups.block_sizes(self.layout.block_size)

    def info(self, device: torch.device, max_adapters: int) -> ModelInfo:
        """What the manager is told of the model."""
        loaded = self.loaded
        return ModelInfo(
            model_name=loaded.name,
            model_fingerprint=loaded.fingerprint,
            device=str(device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            kv_cache_dtype=self.kv_cache_dtype,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            block_size=self.layout.block_size,
            kv_groups=self.kv_groups(),
            max_logprobs=min(MAX_LOGPROBS, loaded.vocab_size),
            max_adapters=max_adapters,
            tokenizer_files=loaded.tokenizer_files,
        )

    def _adapters_of(self, batch: StepBatch) -> AbstractContextManager[None]:
        """While this is open, the model computes the tokens of the batch with its rows' adapters."""
        return nullcontext() if batch.adapter_ids is None else self.require_adapters().step(batch)
