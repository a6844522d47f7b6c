"""What every run of the tests says of itself, and makes sure of."""

from __future__ import annotations

import gc
import os
import signal

import hypothesis
import pytest

from kvmanager_service.core import is_compiled

# Before anything imports Triton, which transformers does: its kernels run in the interpreter, here and in every process
# that a test starts. Those that compile them instead say so in their environment.
os.environ["TRITON_INTERPRET"] = "1"

# A run that a script has put into the background ignores an interrupt, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Hypothesis fails an example that takes 0.2 s, and examples that are slow to draw; tests here assert no times, on a
# busy machine least of all.
hypothesis.settings.register_profile(
    "unhurried", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")


def pytest_report_header() -> str:
    return f"core: {'compiled by mypyc' if is_compiled() else 'pure Python'}"


def pytest_sessionstart() -> None:
    """A run that is meant for the compiled core must not pass on the other one."""
    if (os.environ.get("KVPLANE_CORE") == "compiled") != is_compiled():
        pytest.exit(f"KVPLANE_CORE={os.environ.get('KVPLANE_CORE')!r}, but compiled: {is_compiled()}", returncode=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests on real weights begin, for they take longest: of several workers none is left alone with one."""
    on_weights = {item.path for item in items if item.get_closest_marker("model") is not None}
    items.sort(key=lambda item: item.path not in on_weights)


def pytest_collection_finish() -> None:
    """Keep modules and tests from the garbage collector: with torch among them a walk over all takes 0.4 s."""
    gc.collect()
    gc.freeze()
