"""``kvplane plan`` on models that keep states or share K/V: each number held to the executor's, on the same file.

The executor loads a small random model of each type and measures; `plan` reads the config.json beside the weights.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kvplane_client.cli.capacity import Capacity, ModelShape, PlanError, load_shape, plan_capacity
from kvplane_client.cli.main import app
from kvplane_client.cli.model_states import STATE, STATE_MODELS
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

from executor_service import layer_groups as executor
from executor_service.backends import base
from executor_service.backends.base import ModelInfo
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_groups import FullAttention, KVGroup, RecurrentState, SlidingWindow
from kvmanager_service.replay.kv_geometry import make_groups, read_kv_cache
from tests.unit.executor.step_builder import save_tiny_model

GIB = 1024**3
MAX_MODEL_LEN = 256
# What each type's config can say otherwise: which layers attend, and what else changes sizes.
KINDS: dict[str, dict[str, Any]] = {
    "mamba": {"use_bias": True, "time_step_rank": 9},
    "mamba2": {"use_bias": True, "use_conv_bias": False},
    "bamba": {"mamba_proj_bias": True, "attn_layer_indices": [0]},
    "granitemoehybrid": {"num_local_experts": 0, "mamba_conv_bias": False},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 0, "num_experts": 1, "mamba_d_conv": 3},
    "qwen3_next": {"linear_value_head_dim": 24, "mlp_only_layers": [1]},
}
SHARING: dict[str, dict[str, Any]] = {
    "gemma3n": {"num_kv_shared_layers": 2, "altup_num_inputs": 3, "head_dim": 8},
    "gemma4": {
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 3, "head_dim": 32,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
    },
}  # fmt: skip
SAVED = [(kind, changes) for kind, other in (KINDS | SHARING).items() for changes in ({}, other)]
"""Each as the executor's own tests have it, and otherwise."""


def capacity_of(folder: Path, **changes: Any) -> Capacity:
    values: dict[str, Any] = {
        "total_bytes": GIB, "utilization": 0.9, "dtype": "float32", "kv_dtype": "auto", "overhead_bytes": GIB // 4,
        "block_size": 16, "context_len": MAX_MODEL_LEN, "longest_chunk": 100,
    }  # fmt: skip
    return plan_capacity(load_shape(str(folder)), **values | changes)


def executor_info(folder: Path, **changes: Any) -> ModelInfo:
    values: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "block_size": 16, "memory_limit": 8 * GIB,
        "max_model_len": MAX_MODEL_LEN,
    }  # fmt: skip
    return TorchBackend(TorchBackendConfig(**values | changes)).load()


def saved_numbers(folder: Path) -> int:
    """Numbers in the files of a model's weights, without a factor of a layer that is none."""
    with safe_open(folder / "model.safetensors", "pt") as weights:  # type: ignore[no-untyped-call]
        names = [name for name in weights.keys() if not name.endswith("layer_scalar")]  # noqa: SIM118
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in names)


def manager_group(window: int, block_size: int) -> KVGroup:
    if window == base.STATE:
        return RecurrentState(block_size)
    return SlidingWindow(block_size, window) if window else FullAttention(block_size)


def require_equal(capacity: Capacity, info: ModelInfo, longest_chunk: int) -> None:
    """The plan has the executor's blocks and groups, and as many users as the manager's books allow."""
    ours = [(group.num_layers, group.window, group.block_size) for group in capacity.groups]
    sizes = info.group_block_sizes
    assert ours == [(group.num_layers, group.window, size) for group, size in zip(info.kv_groups, sizes, strict=True)]
    largest = max(info.kv_groups, key=lambda group: group.num_layers)
    assert (capacity.block_size, capacity.bytes_per_block) == (info.block_size, largest.bytes_per_block)
    groups = [manager_group(group.window, size) for group, size in zip(info.kv_groups, sizes, strict=True)]
    manager = KVCacheCoordinator(2, groups, longest_chunk=longest_chunk)
    assert capacity.blocks_per_user == manager.num_blocks_for(capacity.context_len)
    assert capacity.num_users == (capacity.num_blocks - 1) // capacity.blocks_per_user > 0


def test_plan_knows_the_states_that_the_executor_runs() -> None:
    assert sorted(STATE_MODELS) == sorted(executor.STATE_MODELS) == sorted(KINDS)
    assert STATE == base.STATE


@pytest.fixture(scope="module", params=SAVED, ids=lambda param: "-".join([param[0], *param[1]]))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random model in float32."""
    kind, changes = request.param
    return save_tiny_model(tmp_path_factory.mktemp("state") / kind, kind, **changes)


@pytest.mark.parametrize(
    ("block_size", "interval", "dtype"), [(16, 1, "float32"), (1, 1, "bfloat16"), (8, 40, "bfloat16")]
)
def test_plan_blocks_and_users_are_the_executors(saved: Path, block_size: int, interval: int, dtype: str) -> None:
    info = executor_info(saved, block_size=block_size, state_interval=interval, dtype=dtype)
    for context_len in (1, 60, MAX_MODEL_LEN):
        capacity = capacity_of(
            saved, block_size=block_size, state_interval=interval, dtype=dtype, context_len=context_len
        )
        require_equal(capacity, info, 100)


@pytest.mark.parametrize(("interval", "dtype"), [(1, "float32"), (1, "bfloat16"), (40, "bfloat16")])
def test_plan_blocks_in_fp8_are_the_executors(saved: Path, interval: int, dtype: str) -> None:
    changes = {"state_interval": interval, "dtype": dtype}
    if STATE in load_shape(str(saved)).windows and not load_shape(str(saved)).num_attending:
        with pytest.raises(PlanError, match="got one whose layers keep states only"):
            capacity_of(saved, kv_dtype="fp8", **changes)
        with pytest.raises(base.BackendError, match="got one whose layers keep states only"):
            executor_info(saved, kv_cache_dtype="fp8", **changes)
        return
    require_equal(
        capacity_of(saved, kv_dtype="fp8", **changes), executor_info(saved, kv_cache_dtype="fp8", **changes), 100
    )


def test_plan_weights_are_those_that_are_saved(saved: Path) -> None:
    assert load_shape(str(saved)).num_parameters == saved_numbers(saved)
    assert capacity_of(saved).weights_bytes == 4 * saved_numbers(saved)


@pytest.mark.parametrize("model_type", [*STATE_MODELS, *executor.SHARING_MODELS])
def test_plan_weights_and_layers_of_a_config_that_leaves_out_what_the_class_knows(model_type: str) -> None:
    """Only what each published config.json has; the rest is the class's."""
    config = CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    needed = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "max_position_embeddings")
    written = {key: getattr(config, key) for key in (*needed, "num_attention_heads") if hasattr(config, key)}
    written = {} if model_type in executor.SHARING_MODELS else written
    shape = ModelShape.from_config(written | {"model_type": model_type}, model_type)
    assert shape.num_parameters == model.num_parameters()
    assert list(shape.windows) == executor.layer_windows(config)


BAMBA: dict[str, Any] = {
    "model_type": "bamba", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512, "mamba_n_heads": 8,
    "num_key_value_heads": None, "attn_layer_indices": [1],
}  # fmt: skip
GRANITE = BAMBA | {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba", "mamba"]}

JAMBA = BAMBA | {"model_type": "jamba"}
QWEN3_NEXT = BAMBA | {"model_type": "qwen3_next", "head_dim": 16}
GEMMA_3N: dict[str, Any] = {"model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 0}
MAMBA: dict[str, Any] = {"model_type": "mamba", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 100}
LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "intermediate_size_mlp": 128,
    "vocab_size": 100, "max_position_embeddings": 512, "attention_chunk_size": 64, "num_local_experts": 2,
}  # fmt: skip


def transformers_config(config: dict[str, Any]) -> Any:
    return CONFIG_MAPPING[config["model_type"]](**{key: value for key, value in config.items() if key != "model_type"})


def saved_config(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def shape_of(config: dict[str, Any]) -> ModelShape:
    return ModelShape.from_config(config, "config.json")


def test_plan_by_hand_bamba_has_blocks_that_a_state_fits_into() -> None:
    """By hand: 128 inner numbers and 2 groups' 512 of a kernel of 4, in bfloat16; 128 x 256 sums in float32."""
    capacity = plan_capacity(
        shape_of(BAMBA), total_bytes=GIB, utilization=1.0, dtype="bfloat16", kv_dtype="auto", overhead_bytes=0,
        block_size=16, context_len=512, state_interval=512, weights_bytes=0, longest_chunk=2048,
    )  # fmt: skip
    assert capacity.bytes_per_state == 640 * 4 * 2 + 128 * 256 * 4 == 136_192
    assert capacity.bytes_per_token == 2 * 4 * 16 * 2  # of the one layer that attends; heads of K are as many as of Q
    assert capacity.block_size == 544 >= 136_192 / 256
    assert [(group.num_layers, group.window) for group in capacity.groups] == [
        (1, 0),
        (1, STATE),
        (1, STATE),
        (1, STATE),
    ]
    # Of each group of states the one that a step of 2,048 tokens starts from, but no more than there are blocks.
    assert capacity.blocks_per_user == 1 + 3 * 1
    longer = plan_capacity(
        shape_of(BAMBA | {"max_position_embeddings": 1 << 20}), total_bytes=GIB, utilization=1.0, dtype="bfloat16",
        kv_dtype="auto", overhead_bytes=0, block_size=16, context_len=1 << 20, weights_bytes=0, longest_chunk=2048,
    )  # fmt: skip
    assert longer.blocks_per_user == -(-(1 << 20) // 544) + 3 * (-(-2048 // 544) + 1)


def test_plan_layers_of_older_names_are_those_of_newer_ones() -> None:
    older = shape_of(GRANITE)
    assert older == shape_of(
        GRANITE | {"layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]}
    )
    assert older.windows == (STATE, 0, STATE, STATE)
    every_third = shape_of(QWEN3_NEXT | {"full_attention_interval": 3})
    assert every_third.windows == (STATE, STATE, 0, STATE)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nemotron_h"}, "got model_type 'nemotron_h', of which layers keep another"),
        (BAMBA | {"mamba_d_state": 0}, "expected mamba_d_state to be a positive integer, got 0"),
        (BAMBA | {"mamba_n_heads": 7}, "got mamba_n_heads 7"),
        (BAMBA | {"mamba_d_head": 8}, "expected 128 numbers in heads of 8, got mamba_n_heads 8"),
        (BAMBA | {"attn_layer_indices": "1"}, "expected a list of layers, got attn_layer_indices '1'"),
        (BAMBA | {"time_step_limit": [0.001, 0.1]}, "got time_step_limit [0.001, 0.1]; no executor takes it"),
        (BAMBA | {"time_step_limit": [0.0]}, "expected the least and the largest time step, got time_step_limit [0.0]"),
        (GRANITE | {"layer_types": ["mamba", "conv"] * 2}, "expected 4 of full_attention or linear_attention, got"),
        (JAMBA | {"attn_layer_offset": 8}, "expected an offset below the period of 8, got attn_layer_offset 8"),
        (JAMBA | {"expert_layer_offset": 2}, "expected an offset below the period of 2, got expert_layer_offset 2"),
        (JAMBA | {"mamba_dt_rank": "full"}, "expected mamba_dt_rank to be a positive integer, got 'full'"),
        (GEMMA_3N | {"num_kv_shared_layers": 1}, "got num_kv_shared_layers 1"),
        (GEMMA_3N | {"num_kv_shared_layers": 5}, "for each kind of the 5 layers one that has K and V, got num_kv"),
        (GEMMA_3N | {"intermediate_size": [64, 64, 64, 64, 32]}, "one width in all layers, got intermediate_size [64"),
        (BAMBA | {"num_kv_shared_layers": 1}, "got num_kv_shared_layers 1"),
        (QWEN3_NEXT | {"linear_key_head_dim": "8"}, "expected linear_key_head_dim to be a positive integer, got '8'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_plan_states_that_are_not_understood_are_refused_by_their_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        shape_of(config)
    assert message in str(caught.value)


def test_plan_gemma_3n_keeps_k_and_v_of_the_layers_that_have_their_own() -> None:
    """E4B: 20 of 35 layers, each fifth of which is full. Five groups of four; what they share is in none."""
    shape = shape_of({"model_type": "gemma3n", "text_config": {"num_hidden_layers": 35}})
    capacity = plan_capacity(
        shape, total_bytes=80 * GIB, utilization=0.9, dtype="bfloat16", kv_dtype="auto", overhead_bytes=0,
        block_size=16, context_len=32_768, longest_chunk=2048,
    )  # fmt: skip
    assert [(group.num_layers, group.window) for group in capacity.groups] == [(4, 0), *[(4, 512)] * 4]
    assert capacity.bytes_per_token == 20 * 2 * 2 * 256 * 2
    assert capacity.blocks_per_user == 2048 + 4 * 161
    assert round(shape.num_parameters / 1e9, 2) == 6.84
    unshared = shape_of(GEMMA_3N | {"num_kv_shared_layers": 0})
    assert (unshared.num_kv_layers, unshared.num_shared_layers) == (5, 0)
    assert shape_of(GEMMA_3N | {"intermediate_size": [64] * 5}) == shape_of(GEMMA_3N | {"intermediate_size": 64})


GEMMA_4: dict[str, Any] = {"model_type": "gemma4_text", "num_hidden_layers": 12}


def test_plan_by_hand_gemma_4_has_blocks_of_32_tokens_where_layers_keep_half_as_much() -> None:
    """4 K/V heads of 256 in ten sliding layers, of 512 in two full ones, in bfloat16."""
    capacity = plan_capacity(
        shape_of(GEMMA_4), total_bytes=GIB, utilization=1.0, dtype="bfloat16", kv_dtype="auto", overhead_bytes=0,
        block_size=16, context_len=131_072, weights_bytes=0, longest_chunk=2048,
    )  # fmt: skip
    assert [(group.num_layers, group.window, group.block_size) for group in capacity.groups] == [
        (2, 0, 16),
        *[(2, 512, 32)] * 5,
    ]
    assert capacity.bytes_per_token == 2 * 8192 + 10 * 4096
    assert (capacity.block_size, capacity.bytes_per_block) == (16, 2 * 16 * 8192)
    assert capacity.num_blocks == GIB // (2 * 16 * 8192) == 4096
    assert capacity.blocks_per_user == 131_072 // 16 + 5 * (-(-(511 + 2047) // 32) + 1)
    assert capacity.num_tokens == 4095 // (2 + 5) * 32  # of 32 tokens two blocks of the full layers, one of each other
    halved = plan_capacity(
        shape_of(GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 2}), total_bytes=GIB,
        utilization=1.0, dtype="bfloat16", kv_dtype="fp8", overhead_bytes=0, block_size=16, context_len=1000,
        weights_bytes=0,
    )  # fmt: skip
    assert {group.block_size for group in halved.groups} == {16}
    assert halved.bytes_per_token == 12 * 2048


def test_plan_gemma_4_as_transformers_writes_it_is_what_was_published() -> None:
    published = GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 384}
    config = transformers_config(published)
    written = json.loads(config.to_json_string(use_diff=False))
    assert "global_head_dim" not in written
    assert shape_of(written).kv_shapes == shape_of(published).kv_shapes == (*[(4, 256)] * 5, (1, 384)) * 2
    assert shape_of(written).num_parameters == shape_of(published).num_parameters
    assert shape_of(GEMMA_4 | {"use_bidirectional_attention": "vision"}) == shape_of(GEMMA_4)


def test_command_of_unequal_blocks_shows_both_and_a_replay_takes_them(tmp_path: Path) -> None:
    arguments = ["plan", saved_config(tmp_path, GEMMA_4), "--memory", "64GiB", "--overhead", "0"]
    shown = CliRunner().invoke(app, arguments)
    assert f"{2 * 16 * 8192:,} bytes for 16 or 32 tokens" in shown.stdout
    done = CliRunner().invoke(app, [*arguments, "--json"])
    (tmp_path / "plan.json").write_text(done.stdout)
    geometry = read_kv_cache(tmp_path / "plan.json")
    assert [(group.kind, group.block_size) for group in geometry.groups] == [("full", 0), *[("window", 32)] * 5]
    manager = KVCacheCoordinator(
        geometry.num_blocks, make_groups(geometry.groups, geometry.block_size), longest_chunk=2048
    )
    capacity = json.loads(done.stdout)["capacity"]
    assert manager.num_blocks_for(capacity["context_len"]) == capacity["blocks_per_user"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "got use_bidirectional_attention 'all'"),
        ({"global_head_dim": 0}, "expected head_dim to be a positive integer, got 0"),
        ({"per_layer_config": {"0": {"head_dim": 8.5}}}, "expected head_dim to be a positive integer, got 8.5"),
        ({"per_layer_config": {"0": {"sliding_window": 8}}}, "by layer no more than num_key_value_heads and head_dim"),
        ({"per_layer_config": [1]}, "by layer no more than num_key_value_heads and head_dim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plan_layers_of_other_shapes_that_are_not_understood_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        shape_of(GEMMA_4 | changes)
    assert message in str(caught.value)


def test_plan_blocks_that_cannot_be_made_equal_are_refused_as_by_the_executor() -> None:
    shape = shape_of(GEMMA_4 | {"num_key_value_heads": 1, "head_dim": 1019, "global_head_dim": 1021})
    values: dict[str, Any] = {
        "total_bytes": GIB, "utilization": 1.0, "dtype": "bfloat16", "kv_dtype": "auto", "overhead_bytes": 0,
        "context_len": 100, "weights_bytes": 0,
    }  # fmt: skip
    assert plan_capacity(shape, block_size=16, **values).block_size == 1019
    with pytest.raises(PlanError, match="at most 4096 tokens, got 1019, 1021 numbers in K of a token"):
        plan_capacity(shape, block_size=4090, **values)


def test_plan_time_steps_without_a_limit_are_none_however_they_are_written() -> None:
    limits: list[Any] = [[0.0, math.inf], [0.0, {"__float__": "Infinity"}], None]
    assert {shape_of(BAMBA | {"time_step_limit": limit}) for limit in limits} == {shape_of(BAMBA)}


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        (BAMBA, ["--dtype", "fp8"], "expected a type of 16 or 32 bits, of weights or of K and V, for a model whose"),
        (MAMBA, ["--kv-dtype", "fp8"], "expected a model with layers that attend for K and V in fp8, got one whose"),
    ],
    ids=["weights", "no attention"],
)
def test_command_eight_bits_that_say_nothing_of_states_are_refused(
    tmp_path: Path, config: dict[str, Any], flags: list[str], message: str
) -> None:
    done = CliRunner().invoke(
        app, ["plan", saved_config(tmp_path, config), "--memory", "1GiB", "--context-len", "100", *flags]
    )
    assert done.exit_code == 1
    assert message in done.stderr
    both = CliRunner().invoke(
        app, ["plan", saved_config(tmp_path, BAMBA), "--memory", "64GiB", "--dtype", "fp8", "--kv-dtype", "bfloat16"]
    )
    assert both.exit_code == 0


def test_command_model_without_a_longest_sequence_needs_a_context(tmp_path: Path) -> None:
    arguments = ["plan", saved_config(tmp_path, MAMBA), "--memory", "1GiB", "--overhead", "0"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1
    assert "expected --context-len, since the model names no longest sequence" in refused.stderr
    shown = CliRunner().invoke(app, [*arguments, "--context-len", "100000", "--max-num-batched-tokens", "512"])
    assert shown.exit_code == 0, shown.stderr
    # 128 x 4 inputs in bfloat16 and 128 x 16 sums in float32, a block of 2 x 512 of which is rounded up.
    assert "9,216 bytes in each layer that keeps one" in shown.stdout
    assert f"{4 * 10_240:,} bytes for 512 tokens" in shown.stdout
    assert "100,000 tokens each" in shown.stdout


def test_command_json_of_every_kind_of_group_is_what_a_replay_takes(tmp_path: Path) -> None:
    for config, expected in (
        (BAMBA, ["full", "state", "state", "state"]),
        (LLAMA4, ["full", "chunk", "chunk", "chunk"]),
    ):
        arguments = ["plan", saved_config(tmp_path, config), "--memory", "1GiB", "--overhead", "0", "--json"]
        done = CliRunner().invoke(app, [*arguments, "--state-interval", "100"])
        assert done.exit_code == 0, done.stderr
        (tmp_path / "plan.json").write_text(done.stdout)
        geometry = read_kv_cache(tmp_path / "plan.json")
        capacity = json.loads(done.stdout)["capacity"]
        assert (geometry.num_blocks, geometry.block_size) == (capacity["num_blocks"], capacity["block_size"])
        assert [group.kind for group in geometry.groups] == expected
        groups = make_groups(geometry.groups, geometry.block_size)
        manager = KVCacheCoordinator(geometry.num_blocks, groups, longest_chunk=2048)
        assert manager.num_blocks_for(512) == capacity["blocks_per_user"]
