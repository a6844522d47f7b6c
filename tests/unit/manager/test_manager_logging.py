"""Logs are lines of key-values at the level that was asked for, and tracebacks show no locals."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvmanager_service.config import ManagerConfig
from kvmanager_service.logging import configure_logging


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.reset_defaults()


def fail(prompt: str) -> None:
    raise ValueError(len(prompt))


def test_logging_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ManagerConfig(log_format="json", log_level="info"))
    log = structlog.get_logger("x")
    log.debug("hidden")
    log.info("executor_registered", executor_id="e1")
    logging.getLogger("grpc").warning("from a dependency")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["event"], first["executor_id"], first["level"]) == ("executor_registered", "e1", "info")
    assert (second["event"], second["level"]) == ("from a dependency", "warning")


@pytest.mark.parametrize("form", ["json", "console"])
def test_logging_traceback_shows_no_locals(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(ManagerConfig(log_format=form))
    try:
        fail("".join(["sec", "ret"]))
    except ValueError:
        structlog.get_logger("x").exception("broken")
    text = capsys.readouterr().err
    assert "in fail" in text
    assert "secret" not in text
