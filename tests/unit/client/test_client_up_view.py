"""What `kvplane up` shows of its children's logs, and when the server is ready."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from kvplane_client import Model
from kvplane_client.cli.child_process import ChildProcess, ChildSpec
from kvplane_client.cli.up_view import UpView
from rich.console import Console

ERROR = "one sequence needs [513] blocks; give it more memory with --memory-limit, " + "or shorten sequences " * 20
MODEL = Model("tiny", 128, 256, (2,), 5, True, True, "float32")
PROFILE = json.dumps(
    {
        "event": "memory_profile", "level": "info", "num_blocks": 4096, "bytes_per_block": 2**18, "block_size": 16,
        "max_num_batched_tokens": 2048,
    }
)  # fmt: skip


def line(level: str, **values: object) -> str:
    return json.dumps({"event": "memory_not_enough", "level": level} | values)


class Shown:
    """A view, what it has shown, and two children whose logs can be written."""

    def __init__(self, *, as_json: bool = False, verbose: bool = False, network: str | None = None) -> None:
        self.out = io.StringIO()
        console = Console(file=self.out, width=80)
        self.view = UpView("localhost:50051", network, console, as_json=as_json, verbose=verbose)
        self.children = {
            name: ChildProcess(
                ChildSpec(name, [], Path(f"/logs/{name}.log")), lambda text, name=name: self.view.line(name, text)
            )
            for name in ("manager", "executor")
        }

    def log(self, child: str, text: str) -> None:
        self.children[child]._take(text)

    @property
    def text(self) -> str:
        return self.out.getvalue()


def test_error_is_shown_whole_on_one_line_and_other_lines_are_not() -> None:
    shown = Shown()
    for text in (line("info", error="no"), line("error"), "plain text", "[1]", line("error", error=ERROR + "\n more")):
        shown.log("executor", text)
    assert shown.text == f"error: executor: {' '.join(ERROR.split())} more\n"


def test_error_for_scripts_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    Shown(as_json=True).log("executor", line("error", error="no [513]"))
    assert json.loads(capsys.readouterr().out) == {"event": "error", "child": "executor", "error": "no [513]"}


def test_end_after_an_error_that_was_shown_does_not_repeat_it() -> None:
    shown = Shown()
    shown.log("executor", line("error", error="no such model"))
    shown.log("executor", line("info"))
    shown.view.loading(shown.children["manager"], shown.children["executor"], "no executor is ready yet")
    shown.view.died(shown.children["executor"])
    assert shown.text.splitlines() == [
        "error: executor: no such model",
        "the executor has ended (exit code None); the whole log: /logs/executor.log",
    ]


def test_end_long_after_an_error_shows_the_last_lines() -> None:
    shown = Shown()
    shown.log("executor", line("error", error="a step failed"))
    for number in range(20):
        shown.log("executor", f"line {number}")
    shown.view.died(shown.children["executor"])
    assert shown.text.splitlines()[1:] == [
        "the executor has ended (exit code None); its last lines:",
        *(f"  line {number}" for number in range(20)),
        "the whole log: /logs/executor.log",
    ]


def test_end_with_verbose_repeats_nothing() -> None:
    shown = Shown(verbose=True)
    shown.log("manager", "Traceback")
    shown.view.died(shown.children["manager"])
    assert shown.text.count("Traceback") == 1


def test_ready_says_what_memory_is_taken_and_which_flags_change_it() -> None:
    shown = Shown()
    shown.log("executor", PROFILE)
    shown.view.ready(MODEL, shown.children["manager"], shown.children["executor"])
    assert "1.0 GiB of KV cache, 4096 blocks of 16 tokens; --memory-limit SIZE takes less" in shown.text
    assert "steps of 2048 tokens at most: --max-num-batched-tokens N" in shown.text
    assert "other machines" not in shown.text


def test_ready_says_what_the_start_took_its_time_for(capsys: pytest.CaptureFixture[str]) -> None:
    plain, as_json = Shown(), Shown(as_json=True)
    for shown in (plain, as_json):
        shown.log(
            "executor", '{"event": "startup", "libraries": 4.25, "model": 1.5, "memory_profile": 3, "other": "x"}'
        )
        shown.view.ready(MODEL, shown.children["manager"], shown.children["executor"])
    assert "libraries 4.2 s, model 1.5 s, memory profile 3.0 s\n" in plain.text
    document = json.loads(capsys.readouterr().out)
    assert document["executor_seconds"] == {"libraries": 4.25, "model": 1.5, "memory_profile": 3}


def test_ready_without_a_measurement_says_nothing_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    plain, as_json = Shown(), Shown(as_json=True)
    for shown in (plain, as_json):
        shown.view.ready(MODEL, shown.children["manager"], shown.children["executor"])
    assert "KV cache" not in plain.text
    document = json.loads(capsys.readouterr().out)
    assert (document["kv_bytes"], document["network_address"]) == (None, None)


def test_ready_on_every_interface_says_what_other_machines_use(capsys: pytest.CaptureFixture[str]) -> None:
    plain, as_json = Shown(network="10.0.0.7:50051"), Shown(as_json=True, network="10.0.0.7:50051")
    as_json.log("executor", PROFILE)
    for shown in (plain, as_json):
        shown.view.ready(MODEL, shown.children["manager"], shown.children["executor"])
    assert "ready on localhost:50051" in plain.text
    assert "kvplane stats --server 10.0.0.7:50051 on other machines" in plain.text
    document = json.loads(capsys.readouterr().out)
    assert (document["network_address"], document["kv_bytes"]) == ("10.0.0.7:50051", 2**30)
