"""The executor process: `python -m executor_service --help`.

Exit status: 0 after SIGTERM or SIGINT, 1 when the address is taken, the model cannot be loaded or does
not fit into the memory, 2 for a bad value. With --exit-with-parent 1 at the end of standard input.
"""

from __future__ import annotations

import asyncio
import os
import sys

from executor_service.config import parse_config
from executor_service.logging import configure_logging
from executor_service.parent_watch import exit_with_parent


def main() -> None:
    """Run the executor and end the process with its status."""
    config = parse_config(sys.argv[1:])
    if config.exit_with_parent:
        exit_with_parent()
    configure_logging(config.log_level, config.log_format, executor_id=config.executor_id)
    # Only now: gRPC reads how much its core may write when it is imported. And --help need not wait for it.
    from executor_service.server import serve_until_signal  # noqa: PLC0415

    status = asyncio.run(serve_until_signal(config))
    sys.stdout.flush()
    sys.stderr.flush()
    # A stop while weights load leaves the compute thread inside the backend: the interpreter's own end would pull the
    # modules away under it.
    os._exit(status)


if __name__ == "__main__":
    main()
