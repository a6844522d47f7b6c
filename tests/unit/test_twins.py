"""Modules that both services have, since neither may import the other: what is mended in one is mended in the other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import executor_service
import kvmanager_service

EXECUTOR, MANAGER = (Path(package.__path__[0]) for package in (executor_service, kvmanager_service))
OWN_NAMES = {
    "parent_watch.py": [],
    "malformed_requests.py": [  # each raises an error of its own tree
        (
            "from executor_service.errors import MalformedMessageError, abort_with\n",
            "from kvmanager_service.core.errors import InvalidRequestError\n"
            "from kvmanager_service.errors import abort_with\n",
        ),
        ("MalformedMessageError", "InvalidRequestError"),
    ],
}
"""The twins: for each what differs, the executor's text and the manager's."""


def of_manager(text: str, differences: list[tuple[str, str]]) -> str:
    """Turn the executor's text of a module into the manager's."""
    for executors, managers in differences:
        assert executors in text
        text = text.replace(executors, managers)
    return text


@pytest.mark.parametrize("name", OWN_NAMES)
def test_twins_differ_in_nothing_but_their_own_names(name: str) -> None:
    expected = of_manager((EXECUTOR / name).read_text(), OWN_NAMES[name])
    assert (MANAGER / name).read_text() == expected, f"{name} of one service was changed and not the other's"


def test_twins_are_all_modules_that_the_services_have_in_common_word_for_word() -> None:
    """A new copy is found by a class or function, of ten lines or more, that is the same in both."""

    def bodies(folder: Path) -> dict[str, str]:
        found = {}
        for path in folder.rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.unparse(node)
                    if text.count("\n") >= 10:
                        found[text] = path.name
        return found

    executors, managers = bodies(EXECUTOR), bodies(MANAGER)
    copied = {executors[text] for text in executors.keys() & managers.keys()}
    assert "parent_watch.py" in copied, "it is looked for in vain"
    assert copied <= set(OWN_NAMES)
