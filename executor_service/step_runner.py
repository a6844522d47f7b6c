"""Runs the steps of the one current `Execute` stream.

Station: `servicer` opens a `StepStream` for each call and pumps it; steps pass through `compute_thread` to
`kv_session`. Knows order, epochs and streams; knows nothing of arrays.

Life of a step:
    1. The stream's reader task takes it off the wire when one of `MAX_QUEUED_STEPS` places is free (else it does not
       read, and gRPC's flow control holds the sender back) and checks its arrays, while the step before computes.
    2. It lies in the compute thread's queue.
    3. The compute thread takes it up: dropped if its stream was closed, as by one that took over; else epoch, order and
       feeds are checked, and it runs.
    4. One wake-up hands the outcome to the event loop, and the compute thread is at the next step at once: between two
       steps it does only what the second one needs. The loop builds the response and sends it; the place is free again.

Invariants:
    A step runs only if every step before it on its stream was computed without a failure. A stream takes over with its
    first step, once that is found fit to run, or at once when its caller knows the epoch, and ends those opened before
    it: no step of theirs is taken up any more. One that says nothing, or what cannot be run, disturbs nobody. Compute
    never runs on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import structlog
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.base import Int32
from executor_service.compute_thread import ComputeThread
from executor_service.errors import (
    ExecutorError,
    FailedPreconditionError,
    InternalError,
    InvalidFieldError,
    NotServingError,
    StaleError,
    as_executor_error,
)
from executor_service.input_batch import ParsedStep, parse_step
from executor_service.kv_session import KvSession, StepOutcome
from executor_service.step_response import build_response

__all__ = ["MAX_QUEUED_STEPS", "StepRunner", "StepStream"]

MAX_QUEUED_STEPS = 4

_log = structlog.get_logger(__name__)
_NO_TOKENS: Int32 = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class _QueuedStep:
    """A step read off the wire. Either `parsed`, or `error`, or neither when its epoch was not current then."""

    request: pb.ExecuteRequest
    parsed: ParsedStep | None
    error: ExecutorError | None
    read_ns: int


@dataclass(slots=True)
class _FinishedStep:
    """A step that ran, before its response is built.

    Units:
        compute_us, queue_us: microseconds.
    """

    step_id: int
    kv_epoch: int
    outcome: StepOutcome
    compute_us: int
    queue_us: int

    def response(self) -> pb.ExecuteResponse:
        """Pack the outcome for the wire.

        Raises:
            ExecutorError: the backend's result does not fit the step, so that nothing can be said of it.
        """
        try:
            return build_response(
                self.step_id, self.kv_epoch, self.outcome, compute_us=self.compute_us, queue_us=self.queue_us
            )
        except Exception as error:
            raise _of_step(self.step_id, error) from error


class StepStream:
    """One `Execute` call.

    Args:
        submit: queues a step, or None for the end of the stream, for the compute thread.

    Ownership:
        last_step_id and last_sampled belong to the compute thread once a step is queued. `closed` is set by either
        thread and never cleared.
    """

    def __init__(self, submit: Callable[[StepStream, pb.ExecuteRequest | None], None]) -> None:
        self._submit = submit
        self._places = asyncio.Semaphore(MAX_QUEUED_STEPS)
        self._outbox: asyncio.Queue[_FinishedStep | ExecutorError | None] = asyncio.Queue()
        self.closed = False
        self.last_step_id = 0
        self.last_sampled = _NO_TOKENS

    def deliver(self, outcome: _FinishedStep | ExecutorError | None) -> None:
        """Hand over a step that ran, the error that ends the stream, or None for its good end. Event loop only."""
        self._outbox.put_nowait(outcome)

    async def pump(
        self, requests: AsyncIterator[pb.ExecuteRequest], write: Callable[[pb.ExecuteResponse], Awaitable[None]]
    ) -> None:
        """Read steps and write responses until the client has closed its side and all its steps are answered.

        Raises:
            ExecutorError: the stream ends with this status.
        """
        reader = asyncio.create_task(self._read(requests))
        try:
            while (outcome := await self._outbox.get()) is not None:
                if isinstance(outcome, ExecutorError):
                    raise outcome
                await write(outcome.response())
                self._places.release()
        finally:
            # Whatever ended the stream, the client's cancellation too: what is queued must not run.
            self.closed = True
            reader.cancel()
            await asyncio.wait([reader])

    async def _read(self, requests: AsyncIterator[pb.ExecuteRequest]) -> None:
        try:
            await self._places.acquire()
            async for request in requests:
                self._submit(self, request)
                await self._places.acquire()
            self._submit(self, None)
        except Exception as error:  # noqa: BLE001 - told to the client by pump
            self.deliver(as_executor_error(error))


class StepRunner:
    """Gives the compute thread to one stream at a time.

    Args:
        session: what runs a step.
        thread: where it runs.
    """

    def __init__(self, session: KvSession, thread: ComputeThread) -> None:
        self._session = session
        self._thread = thread
        self._open: list[StepStream] = []
        self._current: StepStream | None = None
        self._stopping = False

    @contextmanager
    def open_stream(self, kv_epoch: int = 0) -> Iterator[StepStream]:
        """Start a stream. It ends those opened before it, with ABORTED, once it has a first step to run.

        Args:
            kv_epoch: what the caller holds for the current content; if it is, the stream takes over at once.

        Raises:
            NotServingError: the executor is stopping.
        """
        if self._stopping:
            raise _stopping()
        stream = StepStream(self._submit)
        self._open.append(stream)
        cache = self._session.cache
        if cache is not None and kv_epoch == cache.limits.kv_epoch:
            self._make_current(stream)
        try:
            yield stream
        finally:
            self._open.remove(stream)

    def stop(self) -> None:
        """End all streams once the running step is answered; what is queued does not run."""
        self._stopping = True
        for stream in self._open:
            self._end(stream, _stopping())

    def _end(self, stream: StepStream, error: ExecutorError) -> None:
        """Close a stream, and tell it so behind the response of the step that may be running."""
        stream.closed = True
        self._thread.submit(functools.partial(self._thread.post, stream.deliver, error))

    def _submit(self, stream: StepStream, request: pb.ExecuteRequest | None) -> None:
        """Queue a step, its arrays checked; None marks the end of the stream. Raises as `_take_over`."""
        if request is None:
            self._thread.submit(functools.partial(self._finish, stream))
            return
        if stream.closed:
            return  # it ends, and the error that says why is under way
        step = self._parsed(request, time.perf_counter_ns())
        if stream is not self._current:
            self._take_over(stream, step)
        self._thread.submit(functools.partial(self._take_up, stream, step))

    def _take_over(self, stream: StepStream, first: _QueuedStep) -> None:
        """Make a stream the current one.

        Raises:
            ExecutorError: its first step cannot be run, so that all stays as it was.
        """
        try:
            self._require_fit(stream, first)
        except Exception as error:
            raise _of_step(first.request.step_id, error) from error
        self._make_current(stream)

    def _make_current(self, stream: StepStream) -> None:
        self._current = stream
        for earlier in itertools.takewhile(lambda one: one is not stream, self._open):
            self._end(earlier, StaleError("STREAM_SUPERSEDED", "another Execute stream has taken over"))

    def _parsed(self, request: pb.ExecuteRequest, read_ns: int) -> _QueuedStep:
        """Check a step's arrays if it speaks of the current content; an error waits for the step's turn."""
        cache = self._session.cache
        if cache is None or cache.limits.kv_epoch != request.kv_epoch:
            return _QueuedStep(request, None, None, read_ns)
        try:
            return _QueuedStep(request, parse_step(request, cache.limits), None, read_ns)
        except Exception as error:  # noqa: BLE001 - raised when the step is taken up
            return _QueuedStep(request, None, as_executor_error(error), read_ns)

    def _finish(self, stream: StepStream) -> None:
        """End a stream well, its steps all answered; one that was closed gets an error, and must not look complete."""
        if not stream.closed:
            self._thread.post(stream.deliver, None)

    def _take_up(self, stream: StepStream, step: _QueuedStep) -> None:
        """Run a step in the compute thread, unless its stream is over."""
        if stream.closed:
            return
        outcome: _FinishedStep | ExecutorError
        try:
            outcome = self._run(stream, step)
        except Exception as error:  # noqa: BLE001 - ends the stream with a status
            stream.closed = True
            outcome = _of_step(step.request.step_id, error)
        self._thread.post(stream.deliver, outcome)

    def _run(self, stream: StepStream, step: _QueuedStep) -> _FinishedStep:
        taken_ns = time.perf_counter_ns()
        request = step.request
        parsed = self._require_fit(stream, step)
        outcome = self._session.run(request.step_id, parsed, stream.last_sampled)
        stream.last_step_id, stream.last_sampled = request.step_id, outcome.sampled_token_ids
        return _FinishedStep(
            request.step_id,
            request.kv_epoch,
            outcome,
            compute_us=(time.perf_counter_ns() - taken_ns) // 1000,
            queue_us=(taken_ns - step.read_ns) // 1000,
        )

    def _require_fit(self, stream: StepStream, step: _QueuedStep) -> ParsedStep:
        """Return a step's arrays if it is one to run next.

        Raises:
            ExecutorError: there is no cache or another, its id does not grow, an array is wrong, an adapter is not
                loaded, or a feed is not kept.
        """
        request = step.request
        limits = self._session.require_cache(request.kv_epoch).limits
        _check_order(stream, request)
        if step.error is not None:
            raise step.error
        parsed = step.parsed or parse_step(request, limits)
        self._session.adapters.require_loaded(parsed.adapter_ids)
        _check_feeds(stream, request, parsed)
        return parsed


def _of_step(step_id: int, error: Exception) -> ExecutorError:
    """Make any error one that names the step."""
    named = as_executor_error(error)
    named.metadata["step_id"] = str(step_id)
    if isinstance(named, InternalError):
        _log.error("step_failed", step_id=step_id, reason=named.reason, error=str(named))
    return named


def _check_order(stream: StepStream, request: pb.ExecuteRequest) -> None:
    """Check that step ids grow."""
    if request.step_id < 1:
        raise InvalidFieldError("step_id", "at least 1", request.step_id)
    if request.step_id <= stream.last_step_id:
        raise StaleError(
            "STALE_STEP",
            f"step_id: expected more than {stream.last_step_id}, the step before on this stream, got {request.step_id}",
            expected=f"more than {stream.last_step_id}",
            got=request.step_id,
        )


def _check_feeds(stream: StepStream, request: pb.ExecuteRequest, parsed: ParsedStep) -> None:
    """Check that the step whose tokens are fed is the one whose tokens are kept."""
    named = request.feeds_from_step_id
    if (named or len(parsed.fed_rows)) and (named != stream.last_step_id or not named):
        raise FailedPreconditionError(
            "FEED_NOT_KEPT",
            f"feeds_from_step_id: expected {stream.last_step_id}, the step before on this stream, got {named}",
            expected=stream.last_step_id,
            got=named,
        )


def _stopping() -> NotServingError:
    return NotServingError("EXECUTOR_STOPPING", "the executor is stopping; use another, or wait for its restart")
