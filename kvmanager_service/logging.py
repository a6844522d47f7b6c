"""Logs: an event name and key-values, to standard error.

Station: called once by `__main__`. Events never carry prompts, texts or token ids; what happens every step is a metric.
"""

from __future__ import annotations

import logging
import os
import sys

import structlog

from kvmanager_service.config import ManagerConfig

__all__ = ["configure_logging"]


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Whether a record says more than that a client went away while a message to it was being written.

    grpc.aio logs that with a traceback, as an error; to us it is an ordinary end of a call, which the call's done
    callback has dealt with.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"


def configure_logging(config: ManagerConfig) -> None:
    """Set up structlog, and send the standard library's warnings of our dependencies the same way.

    Args:
        config: says the least level and the form.
    """
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor
    if config.log_format == "json":
        # gRPC's core writes to stderr in a format of its own; what it says reaches us as exceptions and statuses too.
        # It reads this when it is imported, so call this first.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        renderer = structlog.processors.JSONRenderer()
        shared.append(structlog.processors.format_exc_info)
    else:
        # Plain tracebacks: the rich ones print local variables, and locals hold prompts.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    handler.addFilter(_is_of_interest)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
