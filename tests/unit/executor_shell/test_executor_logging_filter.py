"""What is left out of the executor's log."""

import logging

import pytest

from executor_service.logging import _is_of_interest


@pytest.mark.parametrize(("name", "shown"), [("ExecuteBatchError", False), ("ValueError", True)])
def test_logging_only_a_write_to_a_manager_that_went_away_is_left_out(name, shown):
    kind = type(name, (Exception,), {})
    record = logging.LogRecord("grpc", logging.ERROR, __file__, 1, "in core", None, (kind, kind("failed"), None))
    assert _is_of_interest(record) is shown
