"""The event loop of the synchronous clients, and one client's calls on it.

Station: below `client`; it knows coroutines and nothing of what they do.

There is one loop for all clients, and it lives as long as the process. gRPC has one queue of events a process, which
every loop that uses gRPC serves: a loop that ends while another lives leaves events behind, and the other then fails
with "Event loop is closed".

Whoever waits may be interrupted anywhere (Ctrl-C), so nothing on its side needs to be whole: a coroutine is made by the
loop, never left unawaited by an interrupt before it was handed over, and the answer comes through a queue whose lock an
interrupt cannot leave locked, as it can that of a Future.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import warnings
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from kvplane_client.errors import FailedPreconditionError, RequestCancelledError

__all__ = ["Calls"]

END_TIMEOUT_S = 5.0
"""How long the end of the interpreter waits for calls to end; the thread is a daemon, and goes with the process."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Call(Generic[_T]):
    """A coroutine on its way: made, run and ended by the loop, given up by who waits for it."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self.make = make
        self.task: asyncio.Task[_T] | None = None
        self.ended: SimpleQueue[asyncio.Task[_T]] = SimpleQueue()
        self.given_up = False


class Calls:
    """Runs coroutines of one client on the loop of all; any thread may ask, of the process that made it."""

    def __init__(self) -> None:
        self._loop = _shared_loop()
        self._pid = os.getpid()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing may be asked any more. In a child of os.fork that is so at once: it has no thread to ask."""
        return self._closed or os.getpid() != self._pid

    def wait(self, function: Callable[_P, Coroutine[Any, Any, _T]], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs a coroutine function to its end; an exception that strikes here, such as KeyboardInterrupt, cancels it.

        Args:
            function: Called on the loop's thread.
            *args: Its arguments.
            **kwargs: And those by name.

        Raises:
            FailedPreconditionError: The client is closed, or another process's.
            RequestCancelledError: It was closed meanwhile.
        """
        if os.getpid() != self._pid:
            raise FailedPreconditionError(
                f"expected a client that this process ({os.getpid()}) made, got one of process {self._pid}, from before"
                " os.fork: make another in the child"
            )
        if self._closed:
            raise FailedPreconditionError("the client is closed: make another")
        call = _Call(functools.partial(function, *args, **kwargs))
        try:
            self._loop.call_soon_threadsafe(self._begin, call)
            task = call.ended.get()
        except BaseException:
            self._loop.call_soon_threadsafe(_give_up, call)
            raise
        if task.cancelled():
            raise RequestCancelledError("the client was closed during the call")
        return task.result()

    def close(self) -> None:
        """Ends whatever runs; nothing may be asked for any more. May be called any number of times."""
        if not self.closed:
            self.wait(self._cancel_others)
            self._closed = True

    def _begin(self, call: _Call[Any]) -> None:
        if call.given_up:
            return
        call.task = self._loop.create_task(_run(call.make))
        self._tasks.add(call.task)
        call.task.add_done_callback(functools.partial(self._end, call))

    def _end(self, call: _Call[Any], task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if call.given_up and not task.cancelled():
            task.exception()  # nobody is left to be told
        call.ended.put(task)

    async def _cancel_others(self) -> None:
        """Cancels what other threads wait for, and what an interrupt left behind, and waits for it."""
        others = self._tasks - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def _run(make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Makes the coroutine inside the task, so that whatever goes wrong with it is the task's result."""
    return await make()


def _give_up(call: _Call[Any]) -> None:
    call.given_up = True
    if call.task is not None:
        call.task.cancel()


class _Shared:
    """The loop, once there is one."""

    lock = threading.Lock()
    loop: asyncio.AbstractEventLoop | None = None
    pid = 0


def _shared_loop() -> asyncio.AbstractEventLoop:
    """Returns the loop of this process; it runs."""
    with _Shared.lock:
        if _Shared.loop is None or _Shared.pid != os.getpid():  # a fork has the loop, but not the thread
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="kvplane-client", daemon=True)
            thread.start()
            atexit.register(_end_loop, loop, thread, os.getpid())
            _Shared.loop, _Shared.pid = loop, os.getpid()
        return _Shared.loop


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    """Ends the loop before the interpreter ends, which would complain of gRPC's own tasks that are not done."""
    if os.getpid() != pid:
        return
    try:
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(END_TIMEOUT_S)
    except TimeoutError:
        message = f"kvplane: calls did not end within {END_TIMEOUT_S} s of the interpreter's end, and end with it"
        warnings.warn(message, ResourceWarning, stacklevel=1)
        return
    loop.call_soon_threadsafe(loop.stop)
    thread.join(END_TIMEOUT_S)
    if not thread.is_alive():
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _forget_loop() -> None:
    _Shared.lock = threading.Lock()
    _Shared.loop = None


os.register_at_fork(after_in_child=_forget_loop)
