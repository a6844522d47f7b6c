"""What holds of the compiled core alone; `make test-compiled` runs it."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABCMeta

import pytest

import kvmanager_service.core
from kvmanager_service.core import is_compiled


@pytest.mark.skipif(not is_compiled(), reason="the core is not compiled here: make test-compiled")
def test_compiled_modules_define_no_class_that_is_unsafe_to_reference_weakly() -> None:
    """mypyc gives exceptions and ABCs a place for weak references, and does not clear them when an instance dies."""
    compiled = 0
    for found in pkgutil.iter_modules(kvmanager_service.core.__path__):
        module = importlib.import_module(f"kvmanager_service.core.{found.name}")
        if str(module.__file__).endswith(".py"):
            continue
        compiled += 1
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                assert not issubclass(value, BaseException), f"{value} is compiled"
                assert not isinstance(value, ABCMeta), f"{value} is compiled"
    assert compiled > 10
