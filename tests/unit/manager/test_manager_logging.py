"""What reaches the manager's log."""

from __future__ import annotations

import logging
import sys

import pytest

from kvmanager_service.logging import _is_of_interest


def record_of(error: Exception) -> logging.LogRecord:
    try:
        raise error
    except type(error):
        return logging.LogRecord("grpc", logging.ERROR, __file__, 1, "raised in core", None, sys.exc_info())


@pytest.mark.parametrize(("name", "shown"), [("ExecuteBatchError", False), ("ValueError", True)])
def test_logging_only_a_write_to_a_client_that_went_away_is_left_out(name: str, shown: bool) -> None:
    assert _is_of_interest(record_of(type(name, (Exception,), {})("failed"))) is shown


def test_logging_record_without_an_exception_is_shown() -> None:
    assert _is_of_interest(logging.LogRecord("x", logging.WARNING, __file__, 1, "plain", None, None))
