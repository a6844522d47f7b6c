"""What `kvplane up` shows of its children's logs."""

from __future__ import annotations

import io
import json

import pytest
from kvplane_client.cli.up_view import UpView
from rich.console import Console

ERROR = "one sequence needs [513] blocks; give it more memory with --memory-limit, " + "or shorten sequences " * 20


def line(level: str, **values: object) -> str:
    return json.dumps({"event": "memory_not_enough", "level": level} | values)


def test_error_is_shown_whole_and_other_lines_are_not() -> None:
    out = io.StringIO()
    view = UpView("localhost:50051", Console(file=out, width=80), as_json=False)
    for text in (line("info", error="no"), line("error"), "plain text", "[1]", line("error", error=ERROR)):
        view.error("executor", text)
    assert out.getvalue() == f"executor: {ERROR}\n"


def test_error_for_scripts_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    UpView("localhost:50051", Console(file=io.StringIO()), as_json=True).error("executor", line("error", error=ERROR))
    assert json.loads(capsys.readouterr().out) == {"event": "error", "child": "executor", "error": ERROR}
