"""What a failure says of the contract stands in the contract, at the place that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from kvplane_client.conformance.cases import all_cases

ROOT = Path(__file__).parents[2]
PROTOS = ("kvplane/executor/v1/executor_service.proto", "kvplane/common/v1/common.proto")
KIT = ROOT / "client" / "kvplane_client" / "conformance"
QUOTE = re.compile(r"[A-Z][A-Za-z0-9]+(\.[A-Za-z0-9_]+)?: [\S ]+")
DECLARED = re.compile(r"(?:message|service|enum|rpc) (\w+)|(?:[\w.<>, ]+ )?(\w+) = \d+;")


def comments() -> dict[str, str]:
    """What is said of each message, service, enum, field, value and method."""
    found: dict[str, str] = {}
    for name in PROTOS:
        outer, said = "", []
        for line in (ROOT / "proto" / name).read_text().splitlines():
            text = line.strip()
            if text.startswith("//"):
                said.append(text.removeprefix("//").strip())
                continue
            match = DECLARED.match(text)
            if match:
                declared = match[1] or match[2]
                is_outer = not line.startswith(" ")
                outer = declared if is_outer else outer
                found[declared if is_outer else f"{outer}.{declared}"] = " ".join(said)
            said = []
    return found


def quotes() -> set[str]:
    """Every sentence of the kit's sources that looks like one of the contract."""
    found = {case.contract for case in all_cases()}
    for path in KIT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and QUOTE.fullmatch(node.value):
                found.add(node.value)
    return found


SAID = comments()


@pytest.mark.parametrize("quote", sorted(quotes()))
def test_contract_quoted_sentence_stands_where_it_is_said_to(quote):
    place, _, sentence = quote.partition(": ")
    assert place in SAID
    assert sentence in SAID[place]


def test_contract_comments_are_found_at_all():
    assert SAID["ExecuteRequest.kv_epoch"].endswith("Another than the executor's gets ABORTED.")
    assert SAID["CopyDirection"].startswith("CopyDirection is between")
    assert len(quotes()) > 60
