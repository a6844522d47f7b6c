"""A model cut into parts that exchange gives the logits of the whole: ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedModel

from executor_service.backends.base import BackendError
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.torch_paged import TorchKernels
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.layer_groups import group_layers
from executor_service.model_loader import load_model
from executor_service.model_runner import ATTENTION_NAME, ModelRunner, probe
from executor_service.tensor_parallel.sharding import GatheredHead, ModelShard, PartialLinear
from tests.unit.executor.step_builder import VOCAB_SIZE, Row, build_step, prompt_of, save_tiny_model, tiny_config

CPU = torch.device("cpu")
BLOCK_SIZE = 8
PROMPTS = [prompt_of(21, 1), prompt_of(9, 2), prompt_of(1, 3)]


class Meeting:
    """What ranks that are threads exchange over."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadExchange:
    """One thread's end of a Meeting; an `Exchange`."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    def meet(self) -> None:
        self._meeting.barrier.wait()

    def add(self, partial: torch.Tensor) -> None:
        partial.copy_(torch.stack(self._all(partial)).sum(dim=0))

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = self._all(part)
        return parts if self.rank == 0 else []

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(values)).amax(dim=0)

    def _all(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.values[self.rank] = own.clone()
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values


def lone_shard(size: int) -> ModelShard:
    """The first of so many ranks, for what is refused before anything is exchanged."""
    return ModelShard(ThreadExchange(0, Meeting(size)))


def logits_of(folder: Path, take_part: Callable[[PreTrainedModel], None] | None) -> tuple[torch.Tensor, int, int]:
    """Logits of a step after one that fed the prompts' beginnings, K/V heads per layer, and bytes of the weights."""
    model = load_model(str(folder), device=CPU, dtype="float32", take_part=take_part).model
    windows, (shape, *_) = probe(model, VOCAB_SIZE)
    groups = group_layers(windows)
    runner = ModelRunner(model, TorchKernels(AttentionLimits(gather_tokens=1 << 16)), groups)
    cache = PagedKvCache(KvLayout(groups.num_pages, *shape, BLOCK_SIZE, torch.float32), 60, CPU)
    tables = iter(range(1, 60))

    def blocks() -> list[list[int]]:
        return [[next(tables) for _ in range(3)] for _ in groups.windows]

    rows = [(prompt, blocks()) for prompt in PROMPTS]
    first = [Row(p[: len(p) // 2], 0, b[0], None, more_blocks=b[1:]) for p, b in rows if len(p) > 1]
    runner.forward(build_step(first, BLOCK_SIZE), cache)
    second = [Row(p[len(p) // 2 :], len(p) // 2, b[0], more_blocks=b[1:]) for p, b in rows]
    return (
        runner.forward(build_step(second, BLOCK_SIZE, 2), cache),
        shape.num_kv_heads,
        sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values()),
    )


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {}),
        ("gemma3", {}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    ],
    ids=["llama", "llama with biases, tied", "qwen2", "qwen3", "mistral", "gemma3", "llama in four"],
)
def test_ranks_together_give_the_logits_of_the_whole_and_hold_parts(
    tmp_path: Path, kind: str, changes: dict[str, object]
) -> None:
    folder = save_tiny_model(tmp_path, kind, **changes)
    size = 4 if changes.get("num_key_value_heads") == 4 else 2
    whole, kv_heads, weights = logits_of(folder, None)
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        exchanges = [ThreadExchange(rank, meeting) for rank in range(size)]
        parts = list(threads.map(lambda exchange: logits_of(folder, ModelShard(exchange).take), exchanges))
    torch.testing.assert_close(parts[0][0], whole, rtol=1e-4, atol=1e-4)
    assert (parts[0][0].argmax(-1) == whole.argmax(-1)).all()
    assert whole.abs().max() > 1, "logits that differ"
    for logits, own_kv_heads, own_weights in parts:
        assert logits.shape == whole.shape
        assert own_kv_heads * size == kv_heads
        assert own_weights < weights * 0.8  # the rest is embeddings, which are in every rank


def test_take_model_with_sparse_activations_is_refused() -> None:
    """Gemma 3n keeps the largest of all activations of a layer, which no rank has."""
    model = AutoModelForCausalLM.from_config(tiny_config("gemma3n"))
    with pytest.raises(BackendError, match=r"without activation_sparsity_pattern .* got gemma3n_text") as caught:
        lone_shard(2).take(model)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


def test_take_model_whose_layers_have_heads_of_their_own_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("gemma4"))
    with pytest.raises(
        BackendError, match="layers of one configuration, got per_layer_config in gemma4_text"
    ) as caught:
        lone_shard(2).take(model)
    assert caught.value.reason == "TENSOR_PARALLEL_NOT_SUPPORTED"


def test_require_kv_heads_of_unequal_layers_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(BackendError, match="K/V of one shape for a --tensor-parallel-size of 2, got 2 shapes in llama"):
        lone_shard(2).require_kv_heads(model, [1, 2])


def test_partial_linear_adds_its_bias_once() -> None:
    linear = nn.Linear(6, 5)
    states = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0))
    meeting = Meeting(2)

    def of_rank(rank: int) -> torch.Tensor:
        cut = nn.Linear(3, 5, bias=False)
        columns = slice(rank * 3, rank * 3 + 3)
        cut.weight = nn.Parameter(linear.weight[:, columns])
        with torch.no_grad():
            return PartialLinear(cut, linear.bias, ThreadExchange(rank, meeting))(states[..., columns])  # type: ignore[no-any-return]

    with ThreadPoolExecutor(2) as threads:
        sums = list(threads.map(of_rank, range(2)))
    torch.testing.assert_close(sums[0], linear(states).detach())
    assert torch.equal(sums[0], sums[1])


def test_gathered_head_uneven_vocabulary_is_whole_in_rank_0_and_costs_nothing_without_samples() -> None:
    linear = nn.Linear(4, 7, bias=False)
    states = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(0))
    meeting = Meeting(3)

    def of_rank(rank: int) -> torch.Tensor:
        rows = range(rank * 7 // 3, (rank + 1) * 7 // 3)
        cut = nn.Linear(4, len(rows), bias=False)
        cut.weight = nn.Parameter(linear.weight[rows.start : rows.stop])
        with torch.no_grad():
            return GatheredHead(cut, 7, ThreadExchange(rank, meeting))(states)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(3) as threads:
        logits = list(threads.map(of_rank, range(3)))
    torch.testing.assert_close(logits[0], linear(states).detach())
    assert [tuple(one.shape) for one in logits[1:]] == [(1, 2, 7)] * 2
    alone = GatheredHead(linear, 7, ThreadExchange(0, Meeting(3)))
    assert alone(states[:, :0]).shape == (1, 0, 7)


@pytest.mark.parametrize(("size", "sizes"), [(3, "1, 2"), (4, "1, 2")])
def test_take_heads_that_do_not_divide_are_refused_with_the_sizes_that_do(size: int, sizes: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=ATTENTION_NAME)
    with pytest.raises(BackendError, match=rf"2 K/V heads and 6 attention heads .*, that is {sizes}, got {size}") as no:
        lone_shard(size).take(model)
    assert no.value.reason == "BAD_TENSOR_PARALLEL_SIZE"


def test_take_neurons_that_do_not_divide_are_refused_by_name() -> None:
    config = tiny_config("llama", intermediate_size=95)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with pytest.raises(BackendError, match=r"the 95 outputs of model\.layers\.0\.mlp\.gate_proj") as no:
        lone_shard(2).take(model)
    assert no.value.reason == "BAD_TENSOR_PARALLEL_SIZE"


def test_require_kv_heads_attention_that_the_plan_leaves_whole_is_refused(tmp_path: Path) -> None:
    """Phi-3 computes Q, K and V in one layer, which transformers' plan does not cut."""
    values = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(Phi3Config(**values), attn_implementation=ATTENTION_NAME)
    _, shapes = probe(model, VOCAB_SIZE)
    with pytest.raises(BackendError, match="phi3 to give each of 2 ranks 1 of 2 K/V heads, got 2 in each") as no:
        lone_shard(2).require_kv_heads(model, [shapes[0].num_kv_heads])
    assert no.value.reason == "TENSOR_PARALLEL_NOT_SUPPORTED"


def test_take_model_without_a_plan_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=ATTENTION_NAME)
    model._tp_plan = {}
    with pytest.raises(BackendError, match="expected a tensor-parallel plan in transformers for llama, got none") as no:
        lone_shard(2).take(model)
    assert no.value.reason == "TENSOR_PARALLEL_NOT_SUPPORTED"


def test_take_style_that_is_not_known_is_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=ATTENTION_NAME)
    model._tp_plan["model.layers.*.mlp.up_proj"] = "packed_colwise"
    with pytest.raises(BackendError, match=r"got packed_colwise for model\.layers\.0\.mlp\.up_proj") as no:
        lone_shard(2).take(model)
    assert no.value.reason == "TENSOR_PARALLEL_NOT_SUPPORTED"
