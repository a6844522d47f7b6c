"""A test that fails in a life says as much as `simulate` does: what was wrong, and a shortest schedule that fails."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.simulation.chaos import LifeFailedError
from tests.simulation.simulate import report

MAX_SECONDS = 20.0
"""For making a schedule shorter; the command in it leaves the shortest."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Called before fixtures are taken down, so that what a test has replaced of the core still is."""
    told = yield
    error = None if call.excinfo is None else call.excinfo.value
    if told.failed and isinstance(error, LifeFailedError):
        told.sections.append(("shortest schedule", report(error.chaos, error, MAX_SECONDS)))
    return told
