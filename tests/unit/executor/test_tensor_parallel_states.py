"""Models with states cut into parts that exchange: the logits of the whole, with adapters and K/V in eight bits, too.

Ranks are threads of one process, each with a backend of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from executor_service.backends.base import BackendError, ModelInfo
from executor_service.backends.registry import create_backend
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.config import ExecutorConfig
from executor_service.model_runner import ATTENTION_NAME
from executor_service.tensor_parallel.sharding import ModelShard
from tests.unit.executor.lora_builder import peft_logits, save_adapter
from tests.unit.executor.step_builder import Row, build_step, prompt_of, save_tiny_model, tiny_config
from tests.unit.executor.test_tensor_parallel_sharding import Meeting, ThreadExchange, lone_shard

_T = TypeVar("_T")

NUM_BLOCKS = 200
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}
HEADS = {"num_key_value_heads": 2}
DENSE = HEADS | {"num_local_experts": 0}
MODELS: Mapping[str, tuple[int, str, Mapping[str, Any]]] = {
    "bamba": (2, "bamba", HEADS),
    "bamba with biases and one group": (
        2, "bamba", HEADS | {"mamba_n_groups": 1, "mamba_proj_bias": True, "mamba_conv_bias": True},
    ),
    "granite": (2, "granitemoehybrid", DENSE | {"mamba_conv_bias": False}),
    "granite in four, tied": (
        4,
        "granitemoehybrid",
        DENSE | {"num_attention_heads": 8, "num_key_value_heads": 4, "mamba_n_groups": 1, "tie_word_embeddings": True},
    ),
}  # fmt: skip
PROMPTS = [prompt_of(length, length) for length in (1, 9, 40, 33)]


class Ranks:
    """Backends that are one model's ranks; what is done is done in all of them, and rank 0's result is the group's."""

    def __init__(self, folder: Path, size: int, **changes: object) -> None:
        values: dict[str, Any] = {
            "model": str(folder), "device": "cpu", "dtype": "float32", "block_size": 4, "state_interval": 4,
            "max_model_len": 128, "num_blocks_override": NUM_BLOCKS,
        }  # fmt: skip
        meeting = Meeting(size)
        self.backends = [TorchBackend(TorchBackendConfig(**(values | changes))) for _ in range(size)]
        for rank, backend in enumerate(self.backends):
            backend.join(ModelShard(ThreadExchange(rank, meeting)))
        self.infos: list[ModelInfo] = self.each(TorchBackend.load)
        self.block_size = self.infos[0].block_size
        self.each(lambda backend: backend.initialize_kv_cache(NUM_BLOCKS))

    def each(self, call: Callable[[TorchBackend], _T]) -> list[_T]:
        with ThreadPoolExecutor(len(self.backends)) as threads:
            return list(threads.map(call, self.backends))

    def load_adapter(self, adapter_id: int, source: Path) -> None:
        content, parts = self.backends[0].read_adapter_parts(str(source))
        self.backends[0].load_adapter(adapter_id, content)
        for backend, part in zip(self.backends[1:], parts, strict=True):
            backend.load_adapter_part(adapter_id, part)

    def run(self, sequences: Sequence[Sequence[int]], adapter_ids: Sequence[int]) -> list[torch.Tensor]:
        """Logits after each chunk's last token, of each sequence: all together, in chunks of any length."""
        rng = np.random.default_rng(7)
        free = rng.permutation(np.arange(1, NUM_BLOCKS)).tolist()
        groups = range(len(self.infos[0].kv_groups))
        tables = [[[free.pop() for _ in range(-(-len(s) // self.block_size))] for _ in groups] for s in sequences]
        done, found = [0] * len(sequences), [torch.empty(0)] * len(sequences)
        while any(place < len(tokens) for place, tokens in zip(done, sequences, strict=True)):
            going = [row for row, tokens in enumerate(sequences) if done[row] < len(tokens)]
            stops = {row: min(len(sequences[row]), done[row] + int(rng.choice([1, 2, 7, 25]))) for row in going}
            rows = [
                Row(sequences[row][done[row] : stops[row]], done[row], tables[row][0], more_blocks=tables[row][1:])
                for row in going
            ]
            ids = np.array([adapter_ids[row] for row in going], dtype=np.int32)
            step = replace(build_step(rows, self.block_size), adapter_ids=ids if ids.any() else None)
            logits = self.each(lambda backend, step=step: backend.forward(step))[0]  # type: ignore[misc]
            for place, row in enumerate(going):
                found[row], done[row] = logits[place], stops[row]
        return found


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    size, kind, changes = MODELS[request.param]
    return save_tiny_model(tmp_path_factory.mktemp(kind) / "model", kind, **changes), size, kind


def test_ranks_of_a_model_with_states_give_the_logits_of_the_whole_with_adapters_and_without(
    model: tuple[Path, int, str], tmp_path: Path
) -> None:
    folder, size, kind = model
    mlp = ["gate_proj", "down_proj"] if kind == "bamba" else ["input_linear", "output_linear"]
    adapters = [
        save_adapter(tmp_path / "all", folder, 1, target_modules=["in_proj", "out_proj", "q_proj", "o_proj", *mlp]),
        save_adapter(tmp_path / "mixers", folder, 2, r=2, target_modules=["in_proj", "out_proj"]),
    ]
    ranks = Ranks(folder, size, max_loras=2, max_lora_rank=4)
    for adapter_id, source in enumerate(adapters, start=1):
        ranks.load_adapter(adapter_id, source)
    sources = [None, *adapters]
    adapter_ids = [1, 0, 2, 1]
    for ids in ([0] * len(PROMPTS), adapter_ids):
        got = ranks.run(PROMPTS, ids)
        for prompt, one, logits in zip(PROMPTS, ids, got, strict=True):
            expected = peft_logits(folder, sources[one], prompt)
            assert expected.abs().max() > 1, "logits that differ"
            torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_ranks_of_a_model_with_states_hold_parts_of_weights_states_and_kv(model: tuple[Path, int, str]) -> None:
    folder, size, _ = model
    whole = TorchBackend(TorchBackendConfig(str(folder), device="cpu", dtype="float32", native_kernels=False))
    info, ranks = whole.load(), Ranks(folder, size, native_kernels=False)
    for own in ranks.infos:
        assert [(group.window, group.num_layers) for group in own.kv_groups] == [
            (group.window, group.num_layers) for group in info.kv_groups
        ]
        assert own.kv_groups[0].num_kv_heads * size == info.kv_groups[0].num_kv_heads
    layouts = [backend._ready().runner._states.layout for backend in (whole, *ranks.backends)]  # type: ignore[union-attr]
    conv, sums = layouts[0].parts
    for layout in layouts[1:]:
        assert layout.parts[1].num_bytes * size == sums.num_bytes
        assert layout.parts[0].num_bytes < conv.num_bytes
    mixer = whole._ready().loaded.model.model.layers[0].mamba
    for backend in ranks.backends:
        own_mixer = backend._ready().loaded.model.model.layers[0].mamba
        assert own_mixer.in_proj.out_features < mixer.in_proj.out_features
        assert own_mixer.out_proj.linear.in_features * size == mixer.out_proj.in_features


@pytest.mark.parametrize("model", ["bamba"], indirect=True)
def test_ranks_of_a_model_with_states_in_fp8_give_the_logits_of_one_process(model: tuple[Path, int, str]) -> None:
    folder, size, _ = model
    ranks, alone = Ranks(folder, size, kv_cache_dtype="fp8"), Ranks(folder, 1, kv_cache_dtype="fp8")
    assert {info.model_fingerprint for info in ranks.infos} == {alone.infos[0].model_fingerprint}, "the same scales"
    assert {info.block_size for info in ranks.infos} == {alone.block_size}
    rounded = 0.0
    for got, expected, prompt in zip(*(one.run(PROMPTS, [0] * 4) for one in (ranks, alone)), PROMPTS, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0.05)
        rounded = max(rounded, (got - peft_logits(folder, None, prompt)).abs().max().item())
    assert rounded > 0.15, "the tolerance says something"


def test_execute_states_on_two_ranks_equals_one_process(tmp_path: Path) -> None:
    """The second rank is a real process here, and exchanges are gloo's: steps, copies, and what a manager is told."""
    folder = save_tiny_model(tmp_path / "model", "bamba", **HEADS)
    values: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "block_size": 4, "state_interval": 4,
        "memory_limit": "6GiB", "num_threads": 2, "max_model_len": 128,
    }  # fmt: skip
    whole, ranks = (create_backend(ExecutorConfig(**values, tensor_parallel_size=size)) for size in (1, 2))
    try:
        info = whole.load()
        assert ranks.load() == replace(info, tensor_parallel_size=2)
        for backend in (whole, ranks):
            backend.profile_memory(64, 8)
            backend.initialize_kv_cache(40)
        prompt, tables = prompt_of(30, 1), [list(range(1 + 8 * group, 9 + 8 * group)) for group in range(3)]
        token = []
        for start, end in ((0, 7), (7, 29), (29, 30)):
            step = build_step([Row(prompt[start:end], start, tables[0], more_blocks=tables[1:])], info.block_size)
            token = [backend.execute(step).sampled_token_ids.tolist() for backend in (whole, ranks)]
            assert token[0] == token[1]
        with torch.inference_mode():
            assert token[0] == [int(peft_logits(folder, None, prompt).argmax())]
    finally:
        ranks.close()
        whole.close()


def no_weights(kind: str, **changes: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
        tiny_config(kind, **changes), attn_implementation=ATTENTION_NAME
    )


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bamba", HEADS | {"mamba_n_groups": 3, "mamba_n_heads": 6, "mamba_d_head": 32}, "of several groups the 3,"),
        ("bamba", HEADS | {"mamba_n_groups": 1, "mamba_n_heads": 3, "mamba_d_head": 64}, "3 heads of .*0.mamba, and"),
        ("granitemoehybrid", DENSE | {"shared_intermediate_size": 63}, "63 neurons of model.layers.0.shared_mlp"),
    ],
    ids=["groups", "heads", "neurons"],
)  # fmt: skip
def test_take_states_that_do_not_divide_are_refused_by_name(
    kind: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(BackendError, match=message) as no:
        lone_shard(2).take(no_weights(kind, **changes))
    assert no.value.reason == "BAD_TENSOR_PARALLEL_SIZE"


@pytest.mark.parametrize(("groups", "over"), [(2, 192), (1, 96)])
def test_take_states_whose_norm_is_not_over_each_group_are_refused_by_name(groups: int, over: int) -> None:
    """As where a model's code has no such norm, or another release's has groups of its own."""
    model = no_weights("bamba", **HEADS, mamba_n_groups=groups)
    norm = model.model.layers[0].mamba.norm
    assert norm.group_size * groups == 192
    if groups > 1:
        del norm.group_size
    else:
        norm.group_size = over
    with pytest.raises(BackendError, match=rf"model.layers.0.mamba, BambaRMSNormGated, .* got one over {over}") as no:
        lone_shard(2).take(model)
    assert no.value.reason == "TENSOR_PARALLEL_NOT_SUPPORTED"


@pytest.mark.parametrize(
    ("kind", "reason", "message"),
    [
        ("granitemoehybrid", "TENSOR_PARALLEL_NOT_SUPPORTED", r"got experts for model\.layers\.0\.block_sparse_moe"),
        ("jamba", "MODEL_NOT_SUPPORTED", "or one of bamba, granitemoehybrid, got jamba, whose plan"),
        ("qwen3_next", "MODEL_NOT_SUPPORTED", "got qwen3_next, whose plan in transformers leaves such layers whole"),
    ],
)
def test_take_models_with_states_that_have_no_plan_are_refused_by_name(kind: str, reason: str, message: str) -> None:
    with pytest.raises(BackendError, match=message) as no:
        lone_shard(2).take(no_weights(kind, num_key_value_heads=2))
    assert no.value.reason == reason
