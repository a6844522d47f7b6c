"""``kvplane plan`` on models with windows, experts and parts, held to the executor, the manager and transformers.

The configurations are those that the models were published with, without what `plan` does not read.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from kvplane_client.cli.capacity import ModelShape, PlanError, group_layers, plan_capacity
from kvplane_client.cli.main import app
from kvplane_client.cli.model_layers import DEFAULTS, UNGATED, WINDOW_RULES
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

from executor_service import layer_groups as executor
from executor_service.backends.base import STATE, KvGroupSpec
from executor_service.kv_cache import KvLayout
from executor_service.model_loader import resolve_max_model_len
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow

GIB = 1024**3
CHUNK = 2048

GEMMA_3_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "num_hidden_layers": 26, "hidden_size": 1152, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262_144,
    "max_position_embeddings": 32_768, "sliding_window": 512, "sliding_window_pattern": 6,
}  # fmt: skip
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16},
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10_240,
        "sliding_window": 1024,
    },
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 32_000, "max_position_embeddings": 32_768,
    "sliding_window": 4096, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL_8X7B = MISTRAL_7B | {
    "model_type": "mixtral", "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02, "output_router_logits": False,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "vocab_size": 151_936, "max_position_embeddings": 40_960, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip


LLAMA_4_SCOUT: dict[str, Any] = {
    "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
    "vocab_size": 202_048, "max_position_embeddings": 10_485_760, "attention_chunk_size": 8192, "no_rope_layers": [],
    "interleave_moe_layer_step": 1, "moe_layers": list(range(48)), "num_local_experts": 16, "num_experts_per_tok": 1,
    "use_qk_norm": True, "tie_word_embeddings": False,
}  # fmt: skip


def test_command_json_names_chunks_as_a_replay_reads_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_4_SCOUT))
    shown = CliRunner().invoke(app, ["plan", str(tmp_path), "--memory", "400GiB", "--json"])
    groups = json.loads(shown.stdout)["kv_cache"]["groups"]
    assert {(group["type"], group.get("chunk")) for group in groups} == {
        ("full_attention", None),
        ("chunked_local", 8192),
    }


def manager_group(window: int) -> KVGroup:
    """The core's for the executor's window."""
    if window == STATE:
        return RecurrentState(16)
    if window < 0:
        return ChunkedLocal(16, -window)
    return SlidingWindow(16, window) if window else FullAttention(16)


def shape_of(config: dict[str, Any], **changed: Any) -> ModelShape:
    return ModelShape.from_config(config | changed, "config.json")


def transformers_config(config: dict[str, Any]) -> Any:
    return CONFIG_MAPPING[config["model_type"]](**{key: value for key, value in config.items() if key != "model_type"})


@pytest.mark.parametrize("config", [GEMMA_3_1B, MISTRAL_7B, LLAMA_4_SCOUT], ids=["gemma-3-1b", "mistral-7b", "scout"])
@pytest.mark.parametrize("context_len", [100, 3000, 32_768])
def test_plan_blocks_and_users_are_those_of_the_executor_and_the_manager(
    config: dict[str, Any], context_len: int
) -> None:
    capacity = plan_capacity(
        shape_of(config), total_bytes=640 * GIB, utilization=0.9, dtype="bfloat16", kv_dtype="auto",
        overhead_bytes=2 * GIB, block_size=16, context_len=context_len, longest_chunk=CHUNK,
    )  # fmt: skip
    windows = executor.layer_windows(transformers_config(config))
    groups = executor.group_layers(windows)
    head_dim = config.get("head_dim", 128)
    layout = KvLayout(groups.num_pages, config["num_key_value_heads"], head_dim, 16, torch.bfloat16)
    num_blocks = capacity.kv_bytes // layout.bytes_per_block
    specs = [KvGroupSpec(groups.num_layers(i), 1, 1, 1, window) for i, window in enumerate(groups.windows)]
    of_a_user = sum(spec.most_blocks(context_len, 16, CHUNK) for spec in specs)
    manager = KVCacheCoordinator(
        2,
        [manager_group(window) for window in groups.windows],
        longest_chunk=CHUNK,
    )
    assert capacity.bytes_per_block == layout.bytes_per_block
    assert (capacity.num_blocks, capacity.num_groups) == (num_blocks, len(specs))
    assert capacity.blocks_per_user == of_a_user == manager.num_blocks_for(context_len)
    assert capacity.num_users == (num_blocks - 1) // of_a_user > 0


def test_plan_gemma_3_1b_has_seven_groups_and_holds_more_users_than_with_full_attention_alone() -> None:
    """By hand: blocks of 4 layers; 2,048 full ones a user, and 6 times ceil(2,558 / 16) + 1 of the windows."""
    options: dict[str, Any] = {
        "total_bytes": 80 * GIB, "utilization": 1.0, "dtype": "bfloat16", "kv_dtype": "auto", "overhead_bytes": 0,
        "block_size": 16, "context_len": 32_768, "weights_bytes": 0,
    }  # fmt: skip
    capacity = plan_capacity(shape_of(GEMMA_3_1B), **options)
    assert (capacity.bytes_per_block, capacity.bytes_per_token) == (4 * 16 * 1024, 26 * 1024)
    assert (capacity.num_groups, capacity.blocks_per_user) == (7, 2048 + 6 * 161)
    assert capacity.num_users == (80 * GIB // 65_536 - 1) // 3014 == 434
    full = plan_capacity(shape_of(GEMMA_3_1B, layer_types=["full_attention"] * 26), **options)
    assert full.num_users == (80 * GIB // (26 * 16 * 1024) - 1) // 2048 == 98
    decoding = plan_capacity(shape_of(GEMMA_3_1B), **options, longest_chunk=1)
    assert decoding.blocks_per_user == 2048 + 6 * 33


def test_plan_chunks_are_of_layer_types_or_of_layers_with_rotary_positions() -> None:
    few = {"num_hidden_layers": 4}
    assert shape_of(LLAMA_4_SCOUT, **few).windows == (-8192, -8192, -8192, 0)
    assert shape_of(LLAMA_4_SCOUT, **few, no_rope_layers=[1, 0, 1, 1]).windows == (-8192, 0, -8192, -8192)
    types = ["full_attention", "chunked_attention"] * 2
    assert shape_of(LLAMA_4_SCOUT, **few, layer_types=types, attention_chunk_size=64).windows == (0, -64, 0, -64)
    assert shape_of(LLAMA_4_SCOUT, attention_chunk_size=None).windows == ()


def test_plan_window_as_long_as_the_model_is_none() -> None:
    """The executor's rule; a block then is of all layers."""
    shape = shape_of(GEMMA_3_1B, max_position_embeddings=512)
    capacity = plan_capacity(
        shape, total_bytes=8 * GIB, utilization=0.9, dtype="bfloat16", kv_dtype="auto", overhead_bytes=0, block_size=16,
        context_len=512,
    )  # fmt: skip
    assert (capacity.num_groups, capacity.bytes_per_block, capacity.blocks_per_user) == (1, 26 * 16 * 1024, 32)


@pytest.mark.parametrize("seed", range(20))
def test_group_layers_are_the_executors(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        windows = [draw.choice([0, 0, 64, 512, -1, -64, -1024]) for _ in range(draw.randint(1, 60))]
        theirs = executor.group_layers(windows)
        expected = [(theirs.num_layers(group), window) for group, window in enumerate(theirs.windows)]
        assert [(group.num_layers, group.window) for group in group_layers(windows)] == expected, windows


@pytest.mark.parametrize("window", [0, 1, 2, 16, 17, 100, -1, -2, -16, -17, -100])
@pytest.mark.parametrize("chunk", [1, 16, 50])
def test_most_blocks_are_those_of_the_executor_and_the_manager(window: int, chunk: int) -> None:
    (ours,) = group_layers([window])
    manager = manager_group(window)
    for num_tokens in (1, 16, 17, 60, 300):
        theirs = KvGroupSpec(1, 1, 1, 1, window).most_blocks(num_tokens, 16, chunk)
        assert ours.most_blocks(num_tokens, 16, chunk) == theirs == manager.most_blocks(num_tokens, chunk)


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    for key, value in DEFAULTS[model_type].items():
        if key == "sliding_window_pattern":
            assert [kind == "full_attention" for kind in config.layer_types[:12]].index(True) == value - 1
        elif model_type == "gemma4_text" and key in ("head_dim", "global_head_dim"):
            kind = "full_attention" if key == "global_head_dim" else "sliding_attention"
            assert config.per_layer_config[kind].head_dim == value
        else:
            assert getattr(config, key) == value, key


@pytest.mark.parametrize("model_type", sorted(WINDOW_RULES))
def test_window_rules_are_those_of_transformers(model_type: str) -> None:
    values = {"num_hidden_layers": 30, "sliding_window": 96}
    if "use_sliding_window" in DEFAULTS.get(model_type, {}):
        values["use_sliding_window"] = True
    shape = shape_of(MISTRAL_7B, model_type=model_type, **values)
    assert list(shape.windows) == executor.layer_windows(CONFIG_MAPPING[model_type](**values))


def test_plan_windows_follow_layer_types_and_a_window_that_is_off_is_none() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    shape = shape_of(MISTRAL_7B, num_hidden_layers=3, layer_types=types, model_type="new")
    assert shape.windows == (0, 4096, 4096)
    assert shape_of(MISTRAL_7B, sliding_window=None).windows == ()
    assert shape_of(MISTRAL_7B, model_type="qwen2").windows == ()
    assert shape_of(MISTRAL_7B, model_type="new", use_sliding_window=False).windows == ()
    without = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert shape_of(without).windows == (4096,) * 32


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (MISTRAL_7B, 7.24),
        (MIXTRAL_8X7B, 46.70),
        (QWEN3_30B_A3B, 30.53),
        (GEMMA_3_1B, 1.00),
        (LLAMA_4_SCOUT, 107.77),
    ],
    ids=["mistral-7b", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-3-1b", "llama-4-scout"],
)
def test_plan_parameters_are_the_published_ones(config: dict[str, Any], billions: float) -> None:
    assert round(shape_of(config).num_parameters / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
        ("qwen2_moe", {"mlp_only_layers": [0]}),
        ("glm4_moe", {"first_k_dense_replace": 1}),
        ("dots1", {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 2}),
        (
            "exaone_moe",
            {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "layer_types": ["full_attention"] * 4},
        ),
        ("olmoe", {}),
        ("gpt_oss", {}),
        ("granitemoeshared", {"shared_intermediate_size": 1024}),
        ("phimoe", {}),
        ("llama4_text", {"interleave_moe_layer_step": 2}),
        ("llama4_text", {"moe_layers": [0, 1, 3]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plan_parameters_of_mixtures_are_those_that_transformers_makes(model_type: str, values: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[model_type](num_hidden_layers=4, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    written = json.loads(config.to_json_string(use_diff=False))
    assert ModelShape.from_config(written, model_type).num_parameters == pytest.approx(model.num_parameters(), rel=1e-3)


@pytest.mark.parametrize("model_type", UNGATED)
def test_plan_parameters_of_networks_without_a_gate_are_those_that_transformers_makes(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](num_hidden_layers=4, num_key_value_heads=8, num_attention_heads=8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    written = json.loads(config.to_json_string(use_diff=False))
    assert ModelShape.from_config(written, model_type).num_parameters == pytest.approx(model.num_parameters(), rel=0.02)


LONG_ROPE: dict[str, Any] = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.mark.parametrize(
    ("model_type", "values", "longest"),
    [
        ("phi3", {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", **LONG_ROPE}}, 4096),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **LONG_ROPE}},
            4096,
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 131_072),
        ("llama", {}, 131_072),
    ],
)
def test_plan_longest_sequence_is_the_executors(model_type: str, values: dict[str, Any], longest: int) -> None:
    written = (
        MISTRAL_7B | {"model_type": model_type, "sliding_window": None, "max_position_embeddings": 131_072} | values
    )
    config = transformers_config(json.loads(json.dumps(written)))
    assert shape_of(written).max_model_len == resolve_max_model_len(config, None) == longest


def test_plan_nested_config_is_the_decoders_with_what_its_class_knows() -> None:
    shape = shape_of(GEMMA_3_4B)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.max_model_len) == (8, 4, 256, 131_072)
    assert shape.windows == tuple(
        executor.layer_windows(CONFIG_MAPPING["gemma3"](text_config=GEMMA_3_4B["text_config"]))
    )
    assert (shape.tied, shape.vocab_size) == (True, 262_208)
    assert round(shape.num_parameters / 1e9, 2) == 3.88
    whole = {"model_type": "mistral3", "tie_word_embeddings": True, "text_config": {**MISTRAL_7B}}
    assert shape_of(whole).tied is False
    del whole["text_config"]["tie_word_embeddings"]
    assert shape_of(whole).tied is True


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIXTRAL_8X7B | {"moe_num_experts": 8}, "got moe_num_experts 8"),
        (MIXTRAL_8X7B | {"num_zero_experts": 2}, "got num_zero_experts 2"),
        (MIXTRAL_8X7B | {"num_experts": 4}, "got {'num_local_experts': 8, 'num_experts': 4}"),
        (MIXTRAL_8X7B | {"num_local_experts": "8"}, "expected num_local_experts to be a positive integer, got '8'"),
        (MIXTRAL_8X7B | {"num_dense_layers": 2}, "got num_dense_layers 2"),
        (MIXTRAL_8X7B | {"first_k_dense_replace": -1}, "got first_k_dense_replace -1"),
        (QWEN3_30B_A3B | {"mlp_only_layers": "0"}, "got mlp_only_layers '0'"),
        (QWEN3_30B_A3B | {"moe_layer_freq": [0, 1]}, r"expected moe_layer_freq to be a positive integer, got [0, 1]"),
        (QWEN3_30B_A3B | {"mlp_layer_types": ["sparse"]}, "got mlp_layer_types ['sparse']"),
        (QWEN3_30B_A3B | {"kv_lora_rank": 512}, "got kv_lora_rank 512"),
        (GEMMA_3_1B | {"hidden_size_per_layer_input": 256}, "got hidden_size_per_layer_input 256"),
        (MISTRAL_7B | {"layer_types": ["chunked_attention"] * 32}, "got layer_types ['chunked_attention', "),
        (MISTRAL_7B | {"attention_chunk_size": 64}, "got attention_chunk_size 64"),
        (LLAMA_4_SCOUT | {"no_rope_layers": [1, 0]}, "expected 48 of 0 or 1, got no_rope_layers [1, 0]"),
        (
            LLAMA_4_SCOUT | {"layer_types": ["chunked_attention"] * 48, "attention_chunk_size": None},
            "expected chunks of chunked_attention, got attention_chunk_size 0",
        ),
        (MISTRAL_7B | {"layer_types": ["full_attention"] * 31}, "expected 32 of full_attention or sliding_attention"),
        (GEMMA_3_1B | {"layer_types": ["sliding_attention"] * 26, "sliding_window": None}, "got sliding_window None"),
        (MISTRAL_7B | {"model_type": "new"}, "expected layer_types to say which layers have the sliding_window"),
        (MISTRAL_7B | {"sliding_window": -1}, "expected sliding_window to be a positive integer, got -1"),
        ({"text_config": {"hidden_size": 8}}, "config.json, text_config: expected num_hidden_layers to be"),
        (LLAMA_4_SCOUT | {"attention_chunk_size": 1}, "chunks of at least 2 tokens, got attention_chunk_size 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_plan_what_is_not_understood_is_refused_by_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        shape_of(config)
    assert message in str(caught.value)


def test_command_shows_groups_and_takes_the_managers_longest_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_1B))
    arguments = ["plan", str(tmp_path), "--memory", "80GiB", "--utilization", "1", "--overhead", "0", "--weights", "0"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.stderr
    assert "7 of layers" in shown.stdout
    assert "434 at once with 32,768 tokens each" in shown.stdout
    chunked = CliRunner().invoke(app, [*arguments, "--max-num-batched-tokens", "1", "--json"])
    assert json.loads(chunked.stdout)["capacity"]["blocks_per_user"] == 2048 + 6 * 33
