"""``kvplane replay`` in a process of its own: arguments, output and exit codes are those of the manager's module."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRACE = [
    {"timestamp": 1000 * index, "input_length": 1030, "output_length": 3, "hash_ids": [0, index, 9]}
    for index in range(4)
]


def kvplane(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvplane_client.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, input=stdin)


def replay(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return kvplane("replay", *arguments, stdin=stdin)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in TRACE))
    return path


@pytest.mark.parametrize(("name", "begins_with"), [("plot.svg", b"<?xml"), ("plot.png", b"\x89PNG")])
def test_replay_prints_json_and_draws_a_plot(trace: Path, tmp_path: Path, name: str, begins_with: bytes) -> None:
    plot = tmp_path / name
    done = replay(trace, "--num-blocks", 0, "--block-size", 512, "--json", "--plot", plot)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["requests"] == {"replayed": 4, "refused": 0, "failed": 0}
    assert document["prefix_cache"]["hit_blocks"] == 3
    assert document["prefix_cache"]["hit_tokens"] == 3 * 512
    assert document["output_tokens"] == 12
    assert document["settings"]["num_blocks"] == 2 + 4 * 3
    assert plot.read_bytes().startswith(begins_with)


def test_replay_one_at_a_time_prints_a_table_without_times(trace: Path) -> None:
    arguments = (trace, "--num-blocks", 40, "--block-size", 512, "--one-at-a-time", "--whole-blocks")
    done = replay(*arguments, "--eviction-policy", "lfu")
    assert done.returncode == 0, done.stderr
    assert "0.2500  (3 of 12)" in done.stdout
    assert "makespan" not in done.stdout


def test_replay_takes_what_a_plan_of_a_model_with_windows_printed(trace: Path, tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 100,
        "max_position_embeddings": 4096, "sliding_window": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = kvplane("plan", tmp_path, "--memory", "64MiB", "--overhead", 0, "--json")
    assert planned.returncode == 0, planned.stderr
    kv_cache = json.loads(planned.stdout)["kv_cache"]
    done = replay(trace, "--kv-cache", "-", "--json", stdin=planned.stdout)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["settings"]["num_blocks"] == kv_cache["num_blocks"] > 1000
    assert document["settings"]["kv_groups"] == "full,5xwindow:64"
    assert document["requests"] == {"replayed": 4, "refused": 0, "failed": 0}
    assert document["prefix_cache"]["hit_tokens"] == 3 * 512


def test_replay_takes_what_a_plan_of_a_model_with_states_printed(trace: Path, tmp_path: Path) -> None:
    config = {
        "model_type": "bamba", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 4096,
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = kvplane("plan", tmp_path, "--memory", "64MiB", "--overhead", 0, "--json")
    assert planned.returncode == 0, planned.stderr
    kv_cache = json.loads(planned.stdout)["kv_cache"]
    done = replay(trace, "--kv-cache", "-", "--json", stdin=planned.stdout)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["settings"]["num_blocks"] == kv_cache["num_blocks"] > 100
    assert (document["settings"]["block_size"], document["settings"]["kv_groups"]) == (512, "full,3xstate")
    assert document["requests"] == {"replayed": 4, "refused": 0, "failed": 0}
    assert document["prefix_cache"]["hit_tokens"] == 3 * 512


def test_replay_bad_line_exits_1_and_says_where(trace: Path) -> None:
    trace.write_text(trace.read_text() + "{}\n")
    plain, as_json = replay(trace, "--num-blocks", 40), replay(trace, "--num-blocks", 40, "--json")
    assert (plain.returncode, as_json.returncode) == (1, 1)
    assert "line 5: expected hash_ids: a list, got nothing" in plain.stderr
    error = json.loads(as_json.stderr)["error"]
    assert (error["reason"], error["metadata"]["line"]) == ("BAD_TRACE", 5)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--num-blocks", "-1"), 2, "expected an integer of at least 0 and at most 67108864, got '-1'"),
        (("--num-blocks", "9", "--eviction-policy", "mru"), 2, "invalid choice"),
        (("--num-blocks", "9", "--max-num-seqs", "4096"), 2, "expected at most --max-num-batched-tokens"),
        (("--num-blocks", "67108865"), 2, "at most 67108864, got '67108865'"),
        (("--num-blocks", "9", "--num-host-blocks", "99999999999"), 2, "at most 67108864, got '99999999999'"),
        (("--num-blocks", "1"), 2, "expected 0, or at least 2"),
        ((), 2, "expected --num-blocks, or --kv-cache to take them from, got neither"),
        (("--num-blocks", "9", "--kv-groups", "mamba"), 2, "with @B for blocks of B tokens, got 'mamba'"),
        (("--num-blocks", "9", "--tenants", "1"), 2, "expected 2 to 1000 shares of at least 1, such as 3,1, got '1'"),
        (("--kv-cache", "/nowhere/kv.json"), 1, "/nowhere/kv.json"),
        (("--kv-cache", "-"), 1, "kvplane plan MODEL --memory SIZE --json"),
        (("--num-blocks", "9", "--plot", "/nowhere/plot.svg"), 1, "/nowhere/plot.svg"),
        (("--num-blocks", "9", "--plot", "plot.pdf"), 2, "expected a file that ends with .svg or .png, got 'plot.pdf'"),
        (("--num-blocks", "9", "--plot", "plot"), 2, "expected a file that ends with .svg or .png, got 'plot'"),
    ],
)
def test_replay_wrong_usage_says_what_is_expected(
    trace: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = replay(trace, *arguments)
    assert done.returncode == code
    assert message in done.stderr


def test_replay_help_is_the_modules() -> None:
    done = replay("--help")
    assert done.returncode == 0
    assert "--one-at-a-time" in done.stdout
