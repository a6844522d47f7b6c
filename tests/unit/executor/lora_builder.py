"""Random LoRA adapters as peft saves them, and what peft itself makes of a prompt with one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from executor_service.backends.base import Backend
from tests.unit.executor.step_builder import Row, build_step

BLOCK_SIZE, COUNT = 16, 12
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LAYERS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def _base(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


@contextmanager
def _peft_of_today() -> Iterator[None]:
    """peft still asks transformers for a property by its old name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def save_adapter(folder: Path, model: Path, seed: int, **settings: object) -> Path:
    """A seeded random adapter that changes what the model says, as a folder; of rank 4 on all layers if not said."""
    torch.manual_seed(seed)
    values: dict[str, object] = {"r": 4, "lora_alpha": 8, "target_modules": list(ALL_LAYERS)} | settings
    with _peft_of_today():
        adapted = get_peft_model(_base(model), LoraConfig(**values))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:  # peft starts with B = 0, which changes nothing
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder, save_embedding_layers=False)  # of an embedding it would save all, with a warning
    return folder


@torch.inference_mode()
def peft_logits(model: Path, adapter: Path | None, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after the last of these tokens, by peft's own forward pass, or transformers'. Shape: (V,)."""
    base = _base(model)
    with _peft_of_today():
        runs = base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()
    return runs(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]  # type: ignore[no-any-return]


def peft_tokens(model: Path, adapter: Path | None, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of peft's own generate, eager attention, no early end; without an adapter transformers'."""
    base = _base(model)
    with _peft_of_today():
        runs = base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()
    ids = torch.tensor([list(prompt)])
    out = runs.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def generate(made: Backend, prompts: Sequence[Sequence[int]], adapter_ids: Sequence[int]) -> list[list[int]]:
    """Greedy tokens of all prompts at once: one step of prefill, then decode. Up to 64 tokens of each."""
    known = [list(prompt) for prompt in prompts]
    done = [0] * len(known)
    blocks = [list(range(1 + 4 * row, 5 + 4 * row)) for row in range(len(known))]
    for _ in range(COUNT):
        rows = [Row(tokens[start:], start, table) for tokens, start, table in zip(known, done, blocks, strict=True)]
        step = replace(build_step(rows, BLOCK_SIZE), adapter_ids=np.array(adapter_ids, dtype=np.int32))
        sampled = made.execute(step).sampled_token_ids.tolist()
        done = [len(tokens) for tokens in known]
        for tokens, token in zip(known, sampled, strict=True):
            tokens.append(token)
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]
