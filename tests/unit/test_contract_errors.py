"""The contract's table of errors has every reason that the services give, with its code; and each tree every class."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import executor_service
import kvmanager_service
from executor_service import errors as executor_errors
from executor_service.backends.base import AdapterError, NotEnoughMemoryError
from kvmanager_service import errors as manager_errors
from kvmanager_service.core import errors as core_errors
from kvmanager_service.engine_api import ManagerState
from kvmanager_service.executor_checks import ExecutorUnfitError

CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"
REASON = re.compile(r"`([A-Z_]+)`")


def codes_of_the_table() -> dict[str, set[str]]:
    """Return the codes of each reason in the table."""
    section = CONTRACT.read_text().split("\n## Errors\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    codes: dict[str, set[str]] = {}
    for _, reasons, code, _ in rows[2:]:
        for reason in REASON.findall(reasons):
            codes.setdefault(reason, set()).add(code.split()[0].strip(","))
    return codes


def raised(package: Path, kinds: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Every reason that the source makes an error of these kinds with, and its code, which `kinds` has."""
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
                reason = node.args[0]
                if isinstance(reason, ast.Constant) and isinstance(reason.value, str):
                    yield reason.value, kinds[node.func.id]


def reasons() -> set[tuple[str, str]]:
    """Every reason with its code."""
    of_manager = {kind.__name__: rule.code.name for kind, rule in manager_errors.RULES.items()}
    of_manager[ExecutorUnfitError.__name__] = of_manager["ExecutorRejectedError"]  # what the executor is told
    kinds = [kind for kind in vars(executor_errors).values() if inspect.isclass(kind)]
    of_executor = {kind.__name__: kind.code.name for kind in kinds if issubclass(kind, executor_errors.ExecutorError)}
    of_executor[AdapterError.__name__] = executor_errors.RefusedAdapterError.code.name
    of_executor[NotEnoughMemoryError.__name__] = executor_errors.FailedPreconditionError.code.name
    invalid_field = of_executor.pop(executor_errors.InvalidFieldError.__name__)  # it is made with the field's name
    found = {("INVALID_FIELD", invalid_field)}
    found |= set(raised(Path(kvmanager_service.__path__[0]), of_manager))
    found |= set(raised(Path(executor_service.__path__[0]), of_executor))
    found |= {(state.name, "UNAVAILABLE") for state in ManagerState if state is not ManagerState.SERVING}
    return found


@pytest.mark.parametrize(("reason", "code"), sorted(reasons()))
def test_error_table_has_each_reason_with_its_code(reason: str, code: str) -> None:
    assert code in codes_of_the_table().get(reason, set()), f"{CONTRACT.name} has no row for {reason}, {code}"


def test_error_table_is_read_and_has_many_reasons() -> None:
    assert {"STALE_BATCH", "TOO_MANY_POOLS", "PIN_LIMIT", "MODEL_MISMATCH"} <= {reason for reason, _ in reasons()}
    assert codes_of_the_table()["STALE_BATCH"] == {"ABORTED"}


@pytest.mark.parametrize(
    ("module", "root"),
    [
        (manager_errors, core_errors.CoreError),
        (core_errors, core_errors.CoreError),
        (executor_errors, executor_errors.ExecutorError),
    ],
)
def test_tree_in_the_docstring_has_every_class(module: object, root: type[Exception]) -> None:
    own = [name for name, kind in vars(module).items() if inspect.isclass(kind) and kind.__module__ == module.__name__]  # type: ignore[attr-defined]
    tree = module.__doc__ or ""
    assert [name for name in own if issubclass(getattr(module, name), root) and name not in tree] == []
