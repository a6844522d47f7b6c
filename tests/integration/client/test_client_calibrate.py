"""``kvplane calibrate`` in a process of its own, and the file it writes read by ``kvplane replay``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from executor_service.config import ExecutorConfig
from executor_service.server import running_executor

STEP_MS = 3.0
US_PER_TOKEN = 10.0
LIMITS = ("--max-num-batched-tokens", "128", "--max-num-seqs", "8", "--rounds", "1")
TRACE = {"arrival": 0.0, "prompt_length": 10, "output_length": 2}


def config() -> ExecutorConfig:
    return ExecutorConfig(
        backend="sim", port=0, sim_num_blocks=500, sim_step_ms=STEP_MS, sim_us_per_token=US_PER_TOKEN,
        sim_windows=(0, 64, -1),
    )  # fmt: skip


async def kvplane(*arguments: object) -> tuple[int, str, str]:
    command = (sys.executable, "-m", "kvplane_client.cli", *map(str, arguments))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_calibrate_writes_what_replay_reads_and_a_flag_wins_over_it(tmp_path: Path) -> None:
    cost, trace = tmp_path / "cost.json", tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(TRACE) + "\n")
    async with running_executor(config()) as executor:
        code, out, err = await kvplane("calibrate", executor.address, "-o", cost, *LIMITS)
    assert code == 0, err
    assert "1 row of 19 tokens to length 19" in out
    assert "--step-us " in out
    document = json.loads(cost.read_text())
    for step in document["steps"]:
        known = STEP_MS * 1000 + US_PER_TOKEN * (step["prefill_tokens"] + step["decode_rows"])
        assert step["measured_us"] >= known - 1, "a sim step takes at least that"
    code, out, err = await kvplane(
        "replay", trace, "--num-blocks", 9, "--cost-model", cost, "--decode-row-us", 7, "--json"
    )
    assert code == 0, err
    replayed = json.loads(out)
    used = {name: replayed["settings"][name] for name in document["cost_model"]}
    assert used == document["cost_model"] | {"decode_row_us": 7}
    assert replayed["settings"]["cost_model"] == str(cost)
    code, out, err = await kvplane("replay", trace, "--kv-cache", cost, "--cost-model", cost, "--json")
    assert code == 0, err
    settings = json.loads(out)["settings"]
    assert (settings["num_blocks"], settings["kv_groups"]) == (500, "full,window:64,state")
    assert settings["block_size"] == document["executor"]["block_size"]


async def test_calibrate_prints_one_json_document_and_its_errors_too() -> None:
    async with running_executor(config()) as executor:
        code, out, err = await kvplane("calibrate", executor.address, "--json", *LIMITS)
        assert code == 0, err
        document = json.loads(out)
        executor.session.initialize(40)
        code, out, err = await kvplane("calibrate", executor.address, "--json")
    assert set(document) == {"cost_model", "fit", "executor", "kv_cache", "settings", "steps"}
    assert document["executor"]["backend"] == "sim"
    assert (code, out) == (1, "")
    assert json.loads(err)["error"]["reason"] == "EXECUTOR_IN_USE"


async def test_calibrate_exit_codes_tell_wrong_usage_from_nobody_there(tmp_path: Path) -> None:
    cases = [
        (("localhost",), 2, "expected host:port"),
        (("localhost:1", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"), 2, "expected at most"),
        (("localhost:1", "-o", tmp_path / "no" / "cost.json"), 2, "a folder that exists"),
        (("127.0.0.1:1",), 3, "UNAVAILABLE"),
    ]
    for arguments, expected, message in cases:
        code, _, err = await kvplane("calibrate", *arguments)
        assert (code, message in err) == (expected, True), err


async def test_replay_with_a_bad_cost_model_exits_1_and_says_what_is_expected(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(TRACE) + "\n")
    code, _, err = await kvplane("replay", trace, "--num-blocks", 9, "--cost-model", trace, "--json")
    assert code == 1
    assert json.loads(err)["error"]["reason"] == "BAD_COST_MODEL"
    code, _, err = await kvplane("replay", trace, "--num-blocks", 9, "--cost-model", tmp_path / "none.json")
    assert code == 1
    assert "none.json" in err
