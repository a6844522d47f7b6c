"""What is left out of the executor's log."""

import logging
import sys

import pytest

from executor_service.logging import _is_of_interest


@pytest.mark.parametrize(("name", "shown"), [("ExecuteBatchError", False), ("ValueError", True)])
def test_logging_only_a_write_to_a_manager_that_went_away_is_left_out(name, shown):
    kind = type(name, (Exception,), {})
    try:
        raise kind("failed")
    except kind:
        record = logging.LogRecord("grpc", logging.ERROR, __file__, 1, "raised in core", None, sys.exc_info())
    assert _is_of_interest(record) is shown
