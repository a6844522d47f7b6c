"""The executor process: `python -m executor_service --help`.

Exit status: 0 after SIGTERM or SIGINT, 1 when the address is taken, a library is missing, the model cannot be loaded or
does not fit into the memory, 2 for a bad value, also one that the backend or the machine refuses. With
--exit-with-parent 1 at the end of standard input.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import structlog

from executor_service.config import parse_config
from executor_service.logging import configure_logging
from executor_service.parent_watch import exit_with_parent


def main() -> None:
    """Run the executor and end the process with its status."""
    started = time.monotonic()
    config = parse_config(sys.argv[1:])
    if config.exit_with_parent:
        exit_with_parent()
    configure_logging(config.log_level, config.log_format, executor_id=config.executor_id)
    try:
        # Only now: gRPC reads how much its core may write when it is imported. And --help need not wait for it.
        from executor_service.server import serve_until_signal  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("executor_service"):
            raise
        # What the manager and the client are installed with is not enough for an executor.
        advice = "pip install 'kvplane[executor]', or 'kvplane[sim]' for --backend sim alone"
        message = f"expected the libraries of an executor, got no {error.name}; {advice}"
        structlog.get_logger("executor_service").error("library_missing", error=message)
        sys.exit(1)
    status = asyncio.run(serve_until_signal(config, started))
    sys.stdout.flush()
    sys.stderr.flush()
    # A stop while weights load leaves the compute thread inside the backend: the interpreter's own end would pull the
    # modules away under it.
    os._exit(status)


if __name__ == "__main__":
    main()
