import pytest
from pydantic import ValidationError

from executor_service.config import ENV_PREFIX, ExecutorConfig, parse_config, parse_size


def test_precedence_flag_over_environment_over_default(monkeypatch):
    assert parse_config(["--backend", "sim"]).block_size == 16
    monkeypatch.setenv("KVPLANE_EXECUTOR_BLOCK_SIZE", "32")
    assert parse_config(["--backend", "sim"]).block_size == 32
    assert parse_config(["--backend", "sim", "--block-size", "8"]).block_size == 8


def test_config_is_frozen_and_every_field_documented():
    config = ExecutorConfig(backend="sim")
    with pytest.raises(ValidationError):
        config.port = 1
    assert all(field.description for field in ExecutorConfig.model_fields.values())


def test_executor_id_differs_between_runs():
    assert ExecutorConfig(backend="sim").executor_id != ExecutorConfig(backend="sim").executor_id


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5G", 3 << 29),
        ("64KiB", 65536),
        ("1048576", 1048576),
        ("10B", 10),
        ("1 TiB", 1 << 40),
    ],
)
def test_parse_size_units_give_bytes(text, size):
    assert parse_size(text) == size
    config = ExecutorConfig(backend="sim", memory_limit=text, swap_space=text)
    assert (config.memory_limit, config.swap_space) == (size, size)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], ["--port", "65535", "'70000'"]),
        (["--block-size", "x"], ["--block-size", "integer", "'x'"]),
        (["--memory-limit", "2Q"], ["--memory-limit", '"2GiB"', "'2Q'"]),
        (["--swap-space", "4gb"], ["--swap-space", '"2GiB"', "'4gb'"]),
        (["--swap-space", "-1"], ["--swap-space", "'-1'"]),
        (["--kv-cache-dtype", "fp4"], ["--kv-cache-dtype", "auto", "fp8", "fp8_e4m3", "fp8_e5m2", "'fp4'"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization", "1", "'1.5'"]),
        (["--advertise-address", "nowhere"], ["--advertise-address", "'nowhere'"]),
        (["--backend", "torch"], ["KVPLANE_EXECUTOR_MODEL", "folder"]),
        (["--sim-eos-token-ids", "1,a"], ["--sim-eos-token-ids", "whole numbers"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_bad_value_says_expected_got_and_exits_2(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(["--backend", "sim", *flags])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert all(part in shown for part in said), shown


def test_bad_environment_value_names_the_variable(monkeypatch, capsys):
    monkeypatch.setenv("KVPLANE_EXECUTOR_DTYPE", "fp4")
    with pytest.raises(SystemExit):
        parse_config(["--backend", "sim"])
    assert capsys.readouterr().err.startswith("KVPLANE_EXECUTOR_DTYPE: expected")


def test_help_names_flag_environment_and_default_of_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config(["--help"])
    assert ended.value.code == 0
    shown = "".join(capsys.readouterr().out.split())
    for name in ExecutorConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
        assert f"[env:{ENV_PREFIX}{name.upper()}]" in shown
    assert "[default:0.9]" in shown
    assert "--memory-limitSIZE" in shown


def test_empty_environment_value_counts_as_unset(monkeypatch):
    monkeypatch.setenv("KVPLANE_EXECUTOR_MAX_MODEL_LEN", "")
    assert parse_config(["--backend", "sim"]).max_model_len is None


def test_sim_eos_token_ids_from_environment(monkeypatch):
    monkeypatch.setenv("KVPLANE_EXECUTOR_SIM_EOS_TOKEN_IDS", "3, 5")
    assert parse_config(["--backend", "sim"]).sim_eos_token_ids == (3, 5)
