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

__all__ = ["ComputeThread"]

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

        def job() -> None:
            if future.cancelled():
                return
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001 - handed to the caller, who maps it
                self.post(_settle, future, None, error)
            else:
                self.post(_settle, future, result, None)

        self.submit(job)
        return await future

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback in the event loop, from the compute thread."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            _log.warning("result_dropped", why="the event loop is closed")

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


def _settle(future: asyncio.Future[_T], result: _T, error: Exception | None) -> None:
    """Give a future its result, unless its caller went away."""
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
