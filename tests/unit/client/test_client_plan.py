"""``kvplane plan``: the seed's example, parameter counts known from the models, and what is refused."""

import json
from pathlib import Path

import pytest
import typer
from kvplane_client.cli.capacity import PRESETS, Capacity, PlanError, load_shape, plan_capacity
from kvplane_client.cli.main import app
from kvplane_client.cli.values import parse_size
from typer.testing import CliRunner

GIB = 1024**3


def h100(kv_dtype: str = "auto", **changed: int) -> Capacity:
    """Llama-3-8B on 80 GiB, of which weights take 16 and activations and runtime 6."""
    values = {"total_bytes": 80 * GIB, "weights_bytes": 16 * GIB, "overhead_bytes": 6 * GIB, "context_len": 8192}
    return plan_capacity(
        PRESETS["llama-3-8b"], utilization=1.0, dtype="bfloat16", kv_dtype=kv_dtype, block_size=16, **values | changed
    )


def test_plan_seed_h100_example_has_29696_blocks_and_twice_as_many_in_fp8() -> None:
    assert (h100().bytes_per_token, h100().bytes_per_block, h100().num_blocks) == (128 * 1024, 2 * 1024**2, 29_696)
    assert h100("fp8").num_blocks == h100("fp8_e4m3").num_blocks == h100("fp8_e5m2").num_blocks == 59_392


def test_plan_users_are_those_whose_contexts_fit_without_the_null_block() -> None:
    assert h100().num_users == 29_695 // 512 == 57
    assert h100(context_len=16 * 29_695).num_users == 1
    assert h100(context_len=16 * 29_695 + 1).num_users == 0
    assert h100(context_len=1).num_users == 29_695


def test_plan_memory_that_weights_fill_holds_nothing() -> None:
    full = h100(total_bytes=20 * GIB)
    assert (full.kv_bytes, full.num_blocks, full.num_tokens, full.num_users) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("llama-3-8b", 8_030_261_248), ("llama-3.1-70b", 70_553_706_496), ("smollm2-135m", 134_515_008)],
)
def test_plan_parameters_of_presets_are_the_models(preset: str, parameters: int) -> None:
    assert PRESETS[preset].num_parameters == parameters


def test_load_shape_reads_a_config_and_fills_in_what_older_ones_leave_out(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 100, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_shape(str(tmp_path))
    assert (shape.num_kv_heads, shape.head_dim, shape.tied) == (4, 16, False)
    assert load_shape(str(tmp_path / "config.json")) == shape


def _config(**changes: object) -> str:
    known = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 100, "max_position_embeddings": 512,
    }  # fmt: skip
    return json.dumps(known | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ("[]", "expected a JSON object, got list"),
        ("{}", "expected hidden_size to be a positive integer, got None"),
        ("[" * 200_000, "expected JSON"),
        (_config(num_hidden_layers=10**14), f"expected num_hidden_layers to be at most 10000, got {10**14}"),
        (_config(vocab_size=2**31), "expected vocab_size to be at most 2147483647, got 2147483648"),
        (_config(tie_word_embeddings="no"), "expected tie_word_embeddings to be true or false, got 'no'"),
        ('{"hidden_size": "4"}', "expected hidden_size to be a positive integer, got '4'"),
        ('{"model_type": "bamba"}', "expected hidden_size to be a positive integer, got None"),
    ],
)
def test_load_shape_bad_config_says_expected_and_got(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError) as caught:
        load_shape(str(tmp_path))
    assert message in str(caught.value)


def test_parse_size_knows_binary_and_decimal_units() -> None:
    sizes = [parse_size(text) for text in ("80GiB", "80g", "1GB", "1.5k", "1048576", "2 MB")]
    assert sizes == [80 * GIB, 80 * GIB, 10**9, 1536, 1_048_576, 2_000_000]


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1XB", "5iB"])
def test_parse_size_what_is_none_raises(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size"):
        parse_size(text)


def test_command_prints_a_table_and_json() -> None:
    arguments = [
        "plan",
        "llama-3-8b",
        "--memory",
        "80GiB",
        "--utilization",
        "1",
        "--weights",
        "16GiB",
        "--overhead",
        "6GiB",
    ]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "29,696" in shown.stdout
    for flag in (["--kv-dtype", "fp8"], ["--kv-cache-dtype", "fp8_e5m2"]):
        document = json.loads(CliRunner().invoke(app, [*arguments, *flag, "--json"]).stdout)
        assert document["capacity"]["num_blocks"] == 59_392
    assert document["model"]["num_layers"] == 32


def test_command_json_has_the_kv_cache_that_a_replay_takes(tmp_path: Path) -> None:
    one = json.loads(CliRunner().invoke(app, ["plan", "smollm2-135m", "--memory", "4GiB", "--json"]).stdout)
    assert one["kv_cache"] == {
        "num_blocks": one["capacity"]["num_blocks"],
        "block_size": 16,
        "groups": [{"type": "full_attention", "num_layers": 30}],
    }
    config = {
        "model_type": "gemma3_text", "num_hidden_layers": 7, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 512, "sliding_window": 32,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", str(tmp_path), "--memory", "1GiB", "--overhead", "0", "--block-size", "8", "--json"]
    groups = json.loads(CliRunner().invoke(app, arguments).stdout)["kv_cache"]["groups"]
    assert groups[0] == {"type": "full_attention", "num_layers": 1}
    assert sum(group["num_layers"] for group in groups) == 7
    assert {group.get("window") for group in groups[1:]} == {32}


def test_command_default_overhead_is_2_gib_and_unknown_model_or_dtype_is_an_error() -> None:
    document = json.loads(CliRunner().invoke(app, ["plan", "smollm2-135m", "--memory", "4GiB", "--json"]).stdout)
    assert document["capacity"]["overhead_bytes"] == 2 * GIB
    unknown = CliRunner().invoke(app, ["plan", "gpt-9", "--memory", "4GiB"])
    assert unknown.exit_code == 1
    assert "expected one of llama-3-8b" in unknown.stderr
    assert CliRunner().invoke(app, ["plan", "smollm2-135m", "--memory", "4GiB", "--dtype", "int3"]).exit_code == 2


@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_plan_in_which_not_one_user_fits_is_shown_and_exits_with_1(mode: list[str]) -> None:
    none_fits = CliRunner().invoke(app, ["plan", "llama-3-8b", "--memory", "8GiB", *mode], env={"COLUMNS": "200"})
    assert none_fits.exit_code == 1
    assert ('"num_users": 0' if mode else "not one fits") in none_fits.stdout
    assert CliRunner().invoke(app, ["plan", "llama-3-8b", "--memory", "80GiB", *mode]).exit_code == 0


def test_plan_of_more_blocks_than_ids_is_refused() -> None:
    refused = CliRunner().invoke(app, ["plan", "smollm2-135m", "--memory", "999999999TiB", "--block-size", "1"])
    assert refused.exit_code == 1
    assert "expected at most 2147483647 blocks" in " ".join(refused.stderr.split())
