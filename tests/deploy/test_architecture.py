"""ARCHITECTURE.md is the map of the code: it has a place for every module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules(package: str) -> set[str]:
    """Paths within the package, without suffix."""
    paths = (ROOT / package).rglob("*.py")
    return {str(path.relative_to(ROOT / package).with_suffix("")) for path in paths if path.name != "__init__.py"}


def named(text: str, package: str) -> set[str]:
    """What the package's section names: paths within the package, and names alone, which are of the item's folder.

    An item is of the folder it begins with, such as cli/, those below it too; or of the package itself.
    """
    _, found, section = text.partition(f"\n## {package}")
    assert found, f"no section for {package}"
    section = section.partition("\n## ")[0]
    names: set[str] = set()
    for item in re.split(r"\n(?=\* )", section):
        folder = re.match(r"\* `(\w+/)`", item)
        for span in re.findall(r"`([\w/]+)`", item):
            names.add(span if "/" in span or not folder else folder[1] + span)
    return names


@pytest.mark.parametrize("package", ["kvmanager_service", "executor_service", "client/kvplane_client"])
def test_architecture_every_module_is_named_in_its_place(package: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert modules(package), f"expected modules in {package}, got none"
    assert modules(package) - named(text, package) == set()


def test_architecture_module_that_only_another_folder_has_is_missed() -> None:
    text = "\n## p, in order\n\n* `a`, `sub/c` — x.\n* `sub/` — `b`.\n  * `d`\n\n## q\n\n* `e`\n"
    assert {"a", "sub/b", "sub/c", "sub/d"} <= named(text, "p")
    assert not {"sub/a", "c", "sub/e", "e"} & named(text, "p")
