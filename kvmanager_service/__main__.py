"""`python -m kvmanager_service`: the manager's process.

Exit status: 0 after a stop, 2 for a bad setting. With --exit-with-parent 1 at the end of standard input.
"""

from __future__ import annotations

import asyncio
import sys

from kvmanager_service.config import ConfigError, load_config
from kvmanager_service.logging import configure_logging
from kvmanager_service.parent_watch import exit_with_parent


def main(arguments: list[str]) -> int:
    """Run the process and return its exit status."""
    try:
        config = load_config(arguments)
        if config.exit_with_parent:
            exit_with_parent()
        configure_logging(config)
        # Only now: gRPC reads how much its core may write when it is imported. And --help need not wait for it.
        from kvmanager_service.process import serve  # noqa: PLC0415

        asyncio.run(serve(config))
    except ConfigError as error:
        sys.stderr.write(f"kvmanager_service: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
