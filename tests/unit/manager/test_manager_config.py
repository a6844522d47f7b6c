"""Settings: flag over environment over default; bad values teach."""

from __future__ import annotations

import pytest

from kvmanager_service.config import ENV_PREFIX, ConfigError, ManagerConfig, load_config
from kvmanager_service.core.eviction_policies import EVICTION_POLICIES


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ManagerConfig.model_fields:
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)


def test_config_nothing_given_is_default() -> None:
    config = load_config([])
    assert (config.host, config.port, config.policy, config.eviction_policy) == ("127.0.0.1", 50051, "fcfs", "lru")
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.max_waiting) == (2048, 256, 1000)
    assert (config.enable_prefix_caching, config.queue_ahead) == (True, True)
    assert (config.watermark, config.lease_ms, config.executor_timeout_s) == (0.01, 10_000, 60.0)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_config_eviction_policy_takes_every_one_of_the_core(name: str) -> None:
    assert load_config(["--eviction-policy", name]).eviction_policy == name


def test_config_environment_twin_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLANE_MANAGER_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("KVPLANE_MANAGER_QUEUE_AHEAD", "false")
    config = load_config([])
    assert (config.max_num_seqs, config.queue_ahead) == (7, False)


def test_config_flag_beats_environment_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLANE_MANAGER_PORT", "1")
    monkeypatch.setenv("KVPLANE_MANAGER_QUEUE_AHEAD", "false")
    config = load_config(["--port", "2", "--queue-ahead"])
    assert (config.port, config.queue_ahead) == (2, True)


@pytest.mark.parametrize("seconds", ["0", "1", "300"])
def test_config_step_timeout_is_none_or_a_second_at_least(seconds: str) -> None:
    assert load_config(["--step-timeout-s", seconds]).step_timeout_s == float(seconds)


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config([]).port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "expected", "got"),
    [
        (["--port", "99999"], "less than or equal to 65535", "'99999'"),
        (["--port", "x"], "valid integer", "'x'"),
        (["--policy", "lifo"], "'fcfs', 'priority' or 'fair'", "'lifo'"),
        (["--eviction-policy", "mru"], "'lru', 'lfu', 'fifo' or 'priority'", "'mru'"),
        (["--watermark", "1"], "less than 1", "'1'"),
        (["--watermark", "nan"], "less than 1", "'nan'"),
        (["--drain-timeout-s", "inf"], "finite number", "'inf'"),
        (["--step-timeout-s", "0.001"], "--step-timeout-s: expected 0 for no limit, or at least 1 s", "'0.001'"),
        (["--step-timeout-s", "-1"], "greater than or equal to 0", "'-1'"),
        (["--fair-output-weight", "0"], "greater than 0", "'0'"),
        (["--fair-cached-weight", "2"], "fair_cached_weight at most fair_input_weight (1.0)", "2"),
        (["--max-num-seqs", "4096"], "max_num_seqs at most max_num_batched_tokens (2048)", "4096"),
    ],
)
def test_config_bad_flag_says_where_expected_and_got(arguments: list[str], expected: str, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    message = str(caught.value)
    assert expected in message
    assert f"got {got}" in message


def test_config_bad_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLANE_MANAGER_PORT", "tcp://10.0.0.1:50051")
    with pytest.raises(ConfigError, match=r"^KVPLANE_MANAGER_PORT in the environment: expected a valid integer"):
        load_config([])


def test_config_unknown_flag_points_to_help() -> None:
    with pytest.raises(ConfigError, match="--help"):
        load_config(["--max-seqs", "1"])


def test_config_help_names_every_flag_twin_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, info in ManagerConfig.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        default = "none" if info.default == "" else info.default
        assert f"Default: {default}. [{ENV_PREFIX}{name.upper()}]" in text
