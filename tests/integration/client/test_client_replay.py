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


def replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvplane_client.cli", "replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


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
        (("--num-blocks", "-1"), 2, "expected an integer of at least 0, got '-1'"),
        (("--num-blocks", "9", "--eviction-policy", "mru"), 2, "invalid choice"),
        (("--num-blocks", "9", "--max-num-seqs", "4096"), 2, "expected at most --max-num-batched-tokens"),
        (("--num-blocks", "1"), 2, "expected 0, or at least 2"),
        ((), 2, "--num-blocks"),
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
