"""The one thread in which a backend runs.

Station: `step_runner` submits steps, `servicer` and `server` await calls. What touches the backend, the cache or the
tags goes through here, in order, so none of it needs a lock, and the event loop stays free for health checks.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import structlog

__all__ = ["ComputeThread", "in_daemon_thread"]

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class ComputeThread:
    """Runs jobs one at a time, in the order submitted.

    Must be created in a running event loop: results return to it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a stop while weights load does not hold the process for minutes.
        self._thread = threading.Thread(target=self._run, name="kvplane-compute", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job that reports its own result and errors."""
        self._jobs.put(job)

    async def call(self, function: Callable[..., _T], *args: object) -> _T:
        """Run a function in the thread and return its result, or raise what it raised.

        A caller that is cancelled does not stop a function that runs; a queued one is skipped.
        """
        future: asyncio.Future[_T] = self._loop.create_future()
        self.submit(lambda: _settle_with(future, function, *args))
        return await future

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback in the event loop, from the compute thread."""
        _post(self._loop, callback, *args)

    async def stop(self, timeout_s: float) -> bool:
        """Let the queued jobs finish and end the thread.

        Returns:
            False when the job in hand takes longer than `timeout_s`; the thread is then left behind.
        """
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 - logged
                # A job reports its own errors: this is a mistake of ours, and must not end the thread.
                _log.exception("compute_job_failed")


async def in_daemon_thread(function: Callable[..., _T], *args: object) -> _T:
    """Run a function in a thread of its own, which does not hold the process when it ends, and return its result."""
    future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
    threading.Thread(target=_settle_with, args=(future, function, *args), daemon=True).start()
    return await future


def _settle_with(future: asyncio.Future[_T], function: Callable[..., _T], *args: object) -> None:
    """Call a function, from any thread, for a future of a loop."""
    if future.cancelled():
        return
    loop = future.get_loop()
    try:
        result = function(*args)
    except Exception as error:  # noqa: BLE001 - handed to the caller, who maps it
        _post(loop, _settle, future, None, error)
    else:
        _post(loop, _settle, future, result, None)


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Run a callback in an event loop, from another thread."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        _log.warning("result_dropped", why="the event loop is closed")


def _settle(future: asyncio.Future[_T], result: _T, error: Exception | None) -> None:
    """Give a future its result, unless its caller went away."""
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
