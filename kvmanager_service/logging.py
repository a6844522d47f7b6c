"""Logs: an event name and key-values, to standard error.

Station: called once by `__main__`. Events never carry prompts, texts or token ids; what happens every step is a metric.
"""

from __future__ import annotations

import logging
import sys

import structlog

from kvmanager_service.config import ManagerConfig

__all__ = ["configure_logging"]


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
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
