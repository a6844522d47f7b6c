"""The command from a trace's file to its document: each format, the options of order and eviction, and progress."""

from __future__ import annotations

import csv
import datetime
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmanager_service.replay.command import main
from kvmanager_service.replay.kv_geometry import MAX_BLOCKS

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
    "2023-11-16 18:15:51.2224670,879,55",
    "2023-11-16 18:15:51.2224670,91,0",
)
ONE_SECOND_A_STEP = (
    "--step-us", "1e6", "--prefill-token-us", "0", "--decode-row-us", "0", "--context-token-us", "0",
    "--attention-pair-us", "0", "--no-queue-ahead",
)  # fmt: skip


def written(folder: Path, *records: object) -> Path:
    path = folder / "trace"
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in records))
    return path


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([*map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


# --- Azure's format ---------------------------------------------------------------------------------------------------


def test_azure_file_is_replayed_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a second a step the first has its 44 tokens by 44 s; the others join it where steps end."""
    found = replayed(capsys, written(tmp_path, *AZURE), "--num-blocks", 400, *ONE_SECOND_A_STEP)
    assert found["requests"] == {"replayed": 4, "refused": 0, "failed": 0}
    assert found["output_tokens"] == 44 + 109 + 55 + 1
    cache = found["prefix_cache"]
    assert (cache["prompt_tokens"], cache["hit_tokens"]) == (374 + 396 + 879 + 91, 0)
    assert cache["prompt_blocks"] == 24 + 25 + 55 + 6
    # Arrivals at 0, 4.31 and twice 4.54 s: all start with the step at 5 s.
    assert found["queue_time_s"]["max"] == pytest.approx(5 - 4.314579, abs=1e-5)
    assert found["ttft_s"]["max"] == pytest.approx(6 - 4.314579, abs=1e-5)
    assert found["makespan_s"] == pytest.approx(5 + 109)
    assert "tenants" not in found


def test_azure_file_read_as_another_format_is_an_error_of_its_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path, *AZURE)
    assert main([str(trace), "--format", "mooncake", "--num-blocks", "9", "--json"]) == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert (error["reason"], error["metadata"]["line"], error["metadata"]["expected"]) == (
        "BAD_TRACE", 1, "a JSON object",
    )  # fmt: skip


def test_public_azure_trace_is_replayed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """The beginning of AzureLLMInferenceDataset2023, against what `csv` alone says is in it."""
    folder = os.environ.get("KVPLANE_TRACES")
    if not folder:
        pytest.skip("KVPLANE_TRACES is not set: no folder of public traces")
    trace, limit = Path(folder) / "azure_llm_inference_2023_conv.csv", 600
    with trace.open(encoding="utf-8", newline="") as file:
        rows = [row for _, row in zip(range(limit), csv.DictReader(file), strict=False)]
    first, last = (datetime.datetime.fromisoformat(rows[place]["TIMESTAMP"]) for place in (0, -1))
    found = replayed(capsys, trace, "--limit", limit, "--num-blocks", 29_696)
    assert found["requests"] == {"replayed": limit, "refused": 0, "failed": 0}
    assert found["output_tokens"] == sum(int(row["GeneratedTokens"]) for row in rows)
    assert found["prefix_cache"]["prompt_tokens"] == sum(int(row["ContextTokens"]) for row in rows)
    assert found["prefix_cache"]["hit_tokens"] == 0
    assert found["makespan_s"] > (last - first).total_seconds()


# --- order and eviction -----------------------------------------------------------------------------------------------


def test_priority_policy_serves_by_the_traces_priorities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        {"arrival": 0.0, "prompt_length": 8, "output_length": 4, "priority": priority, "tenant": str(priority)}
        for priority in (3, 2, 1, -1)
    ]
    trace = written(tmp_path, *records)
    orders = {}
    for policy in ("fcfs", "priority"):
        arguments = (trace, "--num-blocks", 40, "--max-num-seqs", 1, "--policy", policy, *ONE_SECOND_A_STEP)
        tenants = replayed(capsys, *arguments)["tenants"]
        orders[policy] = sorted(tenants, key=lambda name, found=tenants: found[name]["queue_time_s"]["max"])
    assert orders == {"fcfs": ["3", "2", "1", "-1"], "priority": ["-1", "1", "2", "3"]}


def eviction_trace(folder: Path, **asked: object) -> Path:
    """One prompt, twice; then, in a pool of 8 blocks, others that fill it; then the first again."""
    wanted = {"prompt_length": 17, "prefix": [["wanted", 16]], "output_length": 1}
    other = {"prompt_length": 17, "output_length": 1}
    return written(
        folder,
        wanted | {"arrival": 0.0} | asked,
        wanted | {"arrival": 10.0} | asked,
        *(other | {"arrival": 20.0 + 10.0 * index} for index in range(4)),
        wanted | {"arrival": 100.0},
    )


@pytest.mark.parametrize(
    ("policy", "asked", "num_hits"),
    [
        ("lru", {}, 16),
        ("fifo", {}, 16),
        ("lfu", {}, 32),
        ("priority", {}, 16),
        ("priority", {"retention_priority": 50}, 32),
        ("priority", {"retention": [[0, 16, 50]]}, 32),
        ("priority", {"retention": [[0, 16, 50, 30]]}, 16),
        ("priority", {"retention": [[0, 16, 50, 200]]}, 32),
        ("lru", {"retention_priority": 50}, 16),
    ],
)
def test_eviction_policy_decides_what_is_found_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, asked: dict[str, object], num_hits: int
) -> None:
    """Used twice, or asked to be kept for long enough, it survives; otherwise the others took its blocks."""
    pool = ("--num-blocks", 14, "--block-size", 4, "--eviction-policy", policy)
    assert replayed(capsys, eviction_trace(tmp_path, **asked), *pool)["prefix_cache"]["hit_tokens"] == num_hits


def test_long_prefill_threshold_lets_others_run_beside_a_long_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, short = {"prompt_length": 64, "output_length": 1}, {"prompt_length": 8, "output_length": 1}
    trace = written(tmp_path, long | {"arrival": 0.0, "tenant": "l"}, short | {"arrival": 0.0, "tenant": "s"})
    arguments = (trace, "--num-blocks", 40, "--max-num-batched-tokens", 16, "--max-num-seqs", 4, *ONE_SECOND_A_STEP)
    firsts = [
        replayed(capsys, *arguments, "--long-prefill-token-threshold", threshold)["tenants"]["s"]["ttft_s"]["max"]
        for threshold in (0, 8)
    ]
    assert firsts == [5.0, 1.0]


# --- progress ---------------------------------------------------------------------------------------------------------


def test_pool_that_a_replay_can_not_make_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many blocks as a trace could use, or a file says, are bounded as those of the flag are."""
    long = {"arrival": 0, "prompt_length": 1 << 24, "output_length": 1 << 24}
    trace = tmp_path / "long.jsonl"
    trace.write_text(3 * f"{json.dumps(long)}\n")
    assert main([str(trace), "--num-blocks", "0", "--block-size", "1"]) == 1
    assert f"could use at most {MAX_BLOCKS} blocks, got {2 + 3 * (1 << 25)}" in capsys.readouterr().err
    known = tmp_path / "kv.json"
    groups = [{"type": "full_attention", "num_layers": 1}]
    known.write_text(json.dumps({"kv_cache": {"num_blocks": MAX_BLOCKS + 1, "block_size": 16, "groups": groups}}))
    assert main([str(trace), "--kv-cache", str(known)]) == 1
    assert f"num_blocks: an integer in 2 to {MAX_BLOCKS}, got {MAX_BLOCKS + 1}" in capsys.readouterr().err


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: what reads, and what a process writes to."""
    reader, writer = pty.openpty()
    yield reader, writer
    os.close(reader)


def run_module(trace: Path, stderr: int, *more: str) -> str:
    """Run the command with its errors, and its progress, on a file descriptor; returns its output."""
    command = [sys.executable, "-m", "kvmanager_service.replay", str(trace), "--num-blocks", "400", *more]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True, timeout=120, check=True
    )
    return done.stdout


@pytest.mark.parametrize("more", [(), ("--json",), ("--one-at-a-time",)])
def test_progress_is_shown_on_a_terminal(tmp_path: Path, terminal: tuple[int, int], more: tuple[str, ...]) -> None:
    reader, writer = terminal
    try:
        output = run_module(written(tmp_path, *AZURE), writer, *more)
    finally:
        os.close(writer)
    shown = b""
    while chunk := _read(reader):
        shown += chunk
    assert b"replaying" in shown
    assert b"100%" in shown
    assert "replaying" not in output


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 4096)
    except OSError:  # EIO: nobody has the other end any more, and all is read
        return b""


def test_progress_is_not_shown_in_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "errors"
    with path.open("wb") as errors:
        run_module(written(tmp_path, *AZURE), errors.fileno())
    assert path.read_bytes() == b""
