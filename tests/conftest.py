"""What every run of the tests says of itself, and makes sure of."""

from __future__ import annotations

import os

import pytest

from kvmanager_service.core import is_compiled

# Before anything imports Triton, which transformers does: its kernels run in the interpreter, here and in every process
# that a test starts. Those that compile them instead say so in their environment.
os.environ["TRITON_INTERPRET"] = "1"


def pytest_report_header() -> str:
    return f"core: {'compiled by mypyc' if is_compiled() else 'pure Python'}"


def pytest_sessionstart() -> None:
    """A run that is meant for the compiled core must not pass on the other one."""
    if (os.environ.get("KVPLANE_CORE") == "compiled") != is_compiled():
        pytest.exit(f"KVPLANE_CORE={os.environ.get('KVPLANE_CORE')!r}, but compiled: {is_compiled()}", returncode=2)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For several workers: what stays on one, and what begins first.

    A file's tests stay together, for they share fixtures. Those on real weights stay together, too: each of them takes
    all cores by itself, and much memory. They begin, since nothing else lasts as long.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        on_weights = item.get_closest_marker("model") is not None
        item.add_marker(pytest.mark.xdist_group("model" if on_weights else item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: item.get_closest_marker("model") is None)
