"""Logging of the executor process: structlog events on stderr, for people or as JSON lines.

Station: called once by `__main__`. Library loggers and Python's warnings pass the same formatter, so that a log
collector sees one format; transformers, which keeps a handler of its own, is told so by `model_loader`. Events never
carry prompts or token ids.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

__all__ = ["LogFormat", "configure_logging"]

LogFormat = Literal["console", "json"]


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Whether a record says more than that a manager went away while a result was being written to it.

    grpc.aio logs that with a traceback, as an error; to us it is an ordinary end of a stream.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"


def configure_logging(level: str, log_format: LogFormat, **bound: str) -> None:
    """Send structlog's and the standard library's records to stderr in one format.

    Args:
        level: name of the lowest level shown, such as "INFO".
        log_format: "console" for people, "json" for one JSON object a line.
        bound: values that every structlog event carries, such as executor_id.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            _adder(bound),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    if log_format == "json":
        # gRPC's core writes to stderr in a format of its own; what it says reaches us as exceptions and statuses too.
        # It reads this when it is imported, so call this first.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        # Progress bars, likewise: of downloads, and of transformers, which asks huggingface_hub.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.captureWarnings(capture=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(log_format)],
        )
    )
    handler.addFilter(_is_of_interest)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _adder(bound: dict[str, str]) -> Processor:
    """Return a processor that adds fixed values. Context variables do not reach the compute thread; this does."""

    def add(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        for name, value in bound.items():
            event.setdefault(name, value)
        return event

    return add


def _renderers(log_format: LogFormat) -> list[Processor]:
    """Return the last processors: a line for people, or a JSON object."""
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Plain tracebacks: the rich ones print local variables, and locals hold prompts.
    return [
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    ]
