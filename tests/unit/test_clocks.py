"""Leases, ages and durations go by clocks that nobody sets: a wall clock that is set back must not stop any of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
ALLOWED = {
    "kvmanager_service/text/chat_template.py": "a template may ask for today's date",
}


def wall_clocks_of(source: str) -> Iterator[str]:
    """Where a module reads, or hands on, a clock that can be set."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            read = {name for module, name in WALL_CLOCKS if module == node.module} & {one.name for one in node.names}
            yield from (f"line {node.lineno}: from {node.module} import {name}" for name in sorted(read))
        elif isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if (owner, node.attr) in WALL_CLOCKS:
                yield f"line {node.lineno}: {owner}.{node.attr}"


@pytest.mark.parametrize("service", ["kvmanager_service", "executor_service"])
def test_clocks_of_a_service_cannot_be_set(service: str) -> None:
    found = {}
    for path in sorted((ROOT / service).rglob("*.py")):
        if reads := list(wall_clocks_of(path.read_text(encoding="utf-8"))):
            found[str(path.relative_to(ROOT))] = reads
    assert {path: reads for path, reads in found.items() if path not in ALLOWED} == {}
    assert {path for path in ALLOWED if path.startswith(service)} <= found.keys(), "what is allowed is gone"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "from time import time_ns",
        "import datetime\ndatetime.datetime.now()",
        "f(time.time)",
    ],
)
def test_wall_clock_is_found_however_it_is_read(source: str) -> None:
    assert list(wall_clocks_of(source))


def test_monotonic_clock_is_none_of_them() -> None:
    assert not list(wall_clocks_of("import time\ntime.monotonic() + time.perf_counter()"))
