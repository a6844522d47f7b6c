"""Fixtures of the tests on real processes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
        # A cluster may be shared by the tests of a module or session.
        item.session.stash[_FAILED] = True
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the tests on a model have counted, such as ties: of a test that passes, pytest shows nothing else."""
    counted = [report for report in terminalreporter.stats.get("passed", []) if "model" in report.keywords]
    for report in counted:
        if said := report.capstdout.strip():
            terminalreporter.write_line(f"{report.nodeid.rpartition('/')[2]}: {'; '.join(said.splitlines())}")


def finish(cluster: Cluster, *, failed: bool) -> None:
    """End a cluster: after a failure its logs are shown, else they are checked."""
    try:
        if failed:
            cluster.show_logs()
        else:
            cluster.check_logs()
    finally:
        cluster.close()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of one test; it starts empty."""
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        finish(made, failed=request.node.stash.get(_FAILED, False))


@pytest.fixture(scope="module")
def shared_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that the tests of a module share; each must leave it as it found it."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield made
    finally:
        finish(made, failed=request.session.stash.get(_FAILED, False))
