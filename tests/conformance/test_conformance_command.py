"""``kvplane conformance`` as a user and as CI meet it: exit codes, lines, JSON, JUnit, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import socket
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kvplane_client.cli.main import app
from kvplane_client.conformance.cases import all_cases
from typer.testing import CliRunner, Result

from executor_service.backends.sim_backend import SimBackend, SimBackendConfig
from executor_service.backends.sim_digest import expected_tokens
from executor_service.server import running_executor
from tests.conformance import broken_backends as backends
from tests.conformance.broken_adapters import FaultyAdapters
from tests.conformance.trial import BLOCK_SIZE, sim_config

COMMAND = [sys.executable, "-m", "kvplane_client.cli", "conformance"]
FAULT = "tables/stale_slots"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["conformance", *arguments], env={"COLUMNS": "100"})


async def run_on(backend, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, on an executor of this one."""
    async with running_executor(sim_config(), backend) as server:
        command = [*COMMAND, server.address, *arguments]
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, env=environment(), timeout=300, check=False
        )


def environment() -> dict[str, str]:
    """What the command needs to find what this process has found."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


async def test_conformance_command_good_executor_exits_0_with_a_line_for_each_case():
    result = await run_on(None, "-k", "tables/", "-k", "steps/no_rows")
    assert result.returncode == 0, result.stderr
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    wanted = [case.name for case in all_cases() if case.name.startswith("tables/") or case.name == "steps/no_rows"]
    assert [name for _, name, *_ in lines] == wanted
    assert {outcome for outcome, *_ in lines} == {"passed", "skipped"}
    assert "judged by the formula of the sim backend" in result.stderr


async def test_conformance_command_broken_executor_exits_1_and_says_which_sentence(tmp_path):
    report = tmp_path / "report.xml"
    result = await run_on(backends.ReadsWholeLastBlock(), "-k", "tables/", "--junit", str(report), "--json")
    assert result.returncode == 1
    document = json.loads(result.stdout)
    failed = {case["name"]: case for case in document["cases"] if case["outcome"] == "failed"}
    assert document["counts"]["failed"] == len(failed)
    assert document["executor"]["backend"] == "sim"
    assert failed[FAULT]["contract"].startswith("BlockTables.last_block_len: ")
    assert failed[FAULT]["expected"].startswith("after ")
    assert failed[FAULT]["got"].startswith("token ")
    suite = ElementTree.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures")) == (str(len(document["cases"])), str(len(failed)))
    found = {f"{case.get('classname')}/{case.get('name')}" for case in suite if case.find("failure") is not None}
    assert found == failed.keys()
    text = suite.find("testcase[@name='stale_slots']/failure").text
    assert f"breaks {failed[FAULT]['contract']}" in text


@pytest.mark.parametrize("named", [True, False])
async def test_conformance_command_tries_adapters_that_are_named(named):
    """Nothing is known of the model that this executor serves."""
    arguments = ["--adapter", "one", "--adapter", "another"] if named else []
    async with running_executor(sim_config(backend="other", max_loras=2), FaultyAdapters()) as server:
        command = [*COMMAND, server.address, "-k", "adapters/", "--json", *arguments]
        result = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, env=environment(), timeout=300, check=False
        )
    assert result.returncode == 0, result.stdout
    reasons = {case["name"]: case["reason"] for case in json.loads(result.stdout)["cases"] if case["reason"]}
    assert "adapters/none_where_none_fit" in reasons
    assert ("adapters/rows_with_and_without" in reasons) != named
    assert named == (len(reasons) == 1)
    assert named or "give --adapter" in reasons["adapters/rows_with_and_without"]


async def test_conformance_command_adapter_that_the_reference_cannot_read_exits_2(tmp_path):
    model = tmp_path / "tiny"
    assert run("--write-model", str(model)).exit_code == 0
    config = sim_config(backend="other", max_loras=2, sim_vocab_size=256)
    backend = SimBackend(SimBackendConfig(block_size=BLOCK_SIZE, sim_vocab_size=256, sim_num_blocks=80, max_loras=2))
    async with running_executor(config, backend) as server:
        arguments = [server.address, "--model", str(model), "--adapter", "one", "-k", "adapters/chunked"]
        result = await asyncio.to_thread(run, *arguments)
    assert result.exit_code == 2
    assert "--adapter: with --model expected folders" in " ".join(result.stderr.split())


def test_conformance_command_without_an_executor_exits_3():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = run(f"127.0.0.1:{port}")
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"no executor at 127.0.0.1:{port}" in result.stderr
    document = json.loads(run(f"127.0.0.1:{port}", "--json").stderr)
    assert document["error"]["code"] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "the executor's address"),
        (("localhost:1", "-k", "no such case"), "--list shows them"),
        (("localhost:1", "--model", "no-such-folder"), "--write-model has made"),
        (("localhost:1", "--timeout", "0"), "above 0"),
    ],
)
def test_conformance_command_wrong_usage_exits_2(arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


async def test_conformance_command_too_few_blocks_exits_2():
    async with running_executor(sim_config(sim_num_blocks=64)) as server:
        result = await asyncio.to_thread(run, server.address)
    assert result.exit_code == 2
    assert "expected at least 65 blocks" in result.stderr


def test_conformance_command_list_names_every_case():
    names = [line.split("\t")[0] for line in run("--list").stdout.splitlines()]
    assert names == [case.name for case in all_cases()]
    assert len(names) == len(set(names)) > 150
    listed = json.loads(run("--list", "--json", "-k", "feeds/").stdout)["cases"]
    assert [case["name"] for case in listed] == [name for name in names if name.startswith("feeds/")]


def test_conformance_command_write_model_writes_the_same_bytes_for_a_seed(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, ("5", "5", "6"), strict=True):
        assert run("--write-model", str(folder), "--seed", seed).exit_code == 0
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again != other
    assert json.loads((folders[0] / "config.json").read_text())["model_type"] == "llama"


def test_conformance_command_write_model_with_a_window_writes_layers_of_both_kinds(tmp_path):
    assert run("--write-model", str(tmp_path), "--window", "9").exit_code == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == ("ministral", 9)
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"] * 2


def test_conformance_kit_needs_neither_numpy_nor_torch_to_be_imported():
    code = (
        "import sys; import kvplane_client.cli.main; import kvplane_client.conformance.runner; "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'torch', 'safetensors')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_conformance_formula_is_that_of_the_sim_backends_oracle():
    from kvplane_client.conformance.sim_formula import next_token

    for length in (1, 2, 17, 64):
        prompt = [(7 * place + length) % 1000 for place in range(length)]
        assert [next_token(prompt, 1000)] == expected_tokens(prompt, 1, vocab_size=1000)


async def test_conformance_command_on_a_terminal_shows_failures_and_sums_by_topic():
    async with running_executor(sim_config(), backends.ReadsWholeLastBlock()) as server:
        shown = await asyncio.to_thread(on_terminal, server.address, "-k", "tables/stale", "-k", "tables/shuffled")
    assert "FAILED tables/stale_slots" in shown
    assert "breaks" in shown
    assert "1 passed, 1 failed, 0 skipped: sim executor at" in " ".join(shown.split())


def on_terminal(*arguments: str) -> str:
    """What a terminal of 160 columns is shown, without colours."""
    leader, follower = pty.openpty()
    terminal = environment() | {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    child = subprocess.Popen([*COMMAND, *arguments], stdout=follower, stderr=follower, env=terminal)
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    assert child.wait(timeout=120) == 1
    return shown.decode()


def test_conformance_docs_name_every_topic():
    text = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    topics = {case.name.partition("/")[0] for case in all_cases()}
    assert all(f"`{topic}`" in text for topic in topics)
