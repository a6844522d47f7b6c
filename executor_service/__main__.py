"""The executor process: `python -m executor_service --help`.

Exit status: 0 after SIGTERM or SIGINT, 1 when the address is taken or the model cannot be loaded, 2 for a bad value.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import structlog

from executor_service.backends.base import BackendError
from executor_service.config import ExecutorConfig, parse_config
from executor_service.logging import configure_logging
from executor_service.server import BindError, ExecutorServer

_log = structlog.get_logger(__name__)


async def _serve(config: ExecutorConfig) -> int:
    """Run one executor until a signal; returns the exit status."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    try:
        server = ExecutorServer(config)
    except BackendError as error:
        _log.error("backend_unavailable", reason=error.reason, error=str(error))
        return 1
    stopped, loading = asyncio.create_task(stop.wait()), None
    try:
        await server.start()
        loading = asyncio.create_task(server.load())
        await asyncio.wait([loading, stopped], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading
            await stopped
    except BindError as error:
        _log.error("executor_bind_failed", error=str(error))
        return 1
    except BackendError as error:
        _log.error("executor_load_failed", reason=error.reason, error=str(error), **error.metadata)
        return 1
    except Exception:  # noqa: BLE001 - ends the process, with its traceback in the log
        _log.exception("executor_load_failed")
        return 1
    finally:
        for task in (loading, stopped):
            if task is not None:
                task.cancel()
        await server.stop()
    return 0


def main() -> None:
    """Run the executor and end the process with its status."""
    config = parse_config(sys.argv[1:])
    configure_logging(config.log_level, config.log_format, executor_id=config.executor_id)
    status = asyncio.run(_serve(config))
    sys.stdout.flush()
    sys.stderr.flush()
    # A stop while weights load leaves the compute thread inside the backend: the interpreter's own end would pull the
    # modules away under it.
    os._exit(status)


if __name__ == "__main__":
    main()
