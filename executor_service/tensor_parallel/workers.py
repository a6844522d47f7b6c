"""The worker processes, as rank 0 has them: started, called, watched, ended.

Station: owned by `backend.TensorParallelBackend`, whose calls it passes on; `worker` is the other end. All methods but
the watch run in the compute thread. A worker has one thread here that waits for its end and for nothing else, so that
a death is noticed at once and whatever rank 0 is doing.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import structlog

from executor_service.backends.base import BackendError
from executor_service.tensor_parallel.calls import Answer, RankConfig

__all__ = ["Workers"]

_STOP_S = 5.0
"""How long workers that are told to end may take for it."""
_CAUSE_S = 5.0
"""How long to wait for what a worker has to say, when an exchange with it has failed."""

_log = structlog.get_logger(__name__)


class _Worker:
    """One process and the socket to it."""

    def __init__(self, told: RankConfig) -> None:
        self.rank = told.rank
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "executor_service.tensor_parallel.worker", str(theirs.fileno())]
            # What is blocked in this thread stays so in the worker, from its first moment.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                # Its standard input is never written to: its end tells the worker of ours.
                self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    command, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(),)
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # A worker that has stopped reads nothing: then a long message must fail rather than wait for ever.
        whole = int(told.timeout_s)
        micro = int((told.timeout_s - whole) * 1e6)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, micro))
        self.connection = Connection(ours.detach())

    def is_told(self, timeout_s: float | None) -> bool:
        """Whether there is something to receive, the worker's end included; None waits for it."""
        return self.connection.poll(timeout_s)


class Workers:
    """Ranks 1 and up.

    Args:
        told: what each is told; rank 0 is not among them.
        on_lost: called, from any thread, when one has ended unasked or is given up: the group can do nothing any more.
    """

    def __init__(self, told: Sequence[RankConfig], on_lost: Callable[[BackendError], None]) -> None:
        self._size = told[0].size
        self._timeout_s = told[0].timeout_s
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._lost: BackendError | None = None
        self._closing = False
        self._workers: list[_Worker] = []
        for one in told:
            worker = _Worker(one)
            self._workers.append(worker)
            threading.Thread(target=self._watch, args=(worker,), name=f"rank-{one.rank}-watch", daemon=True).start()
            _log.info("rank_started", rank=one.rank, ranks=one.size, pid=worker.process.pid)
        for worker, one in zip(self._workers, told, strict=True):
            self._send(worker, one)

    def call(self, name: str, *arguments: object) -> None:
        """Have every worker do something; `answers` must follow.

        Raises:
            BackendError: one is lost.
        """
        self.call_each(name, [arguments] * len(self._workers))

    def call_each(self, name: str, arguments: Sequence[tuple[object, ...]]) -> None:
        """The same with arguments of its own for each worker, in order."""
        if self._lost is not None:
            raise self._lost
        for worker, its in zip(self._workers, arguments, strict=True):
            self._send(worker, (name, its))

    def answers(self, *, patiently: bool = False) -> list[Any]:
        """What the last call returned in each rank, in order. With `patiently` only their death ends the wait.

        Raises:
            BackendError: it failed in one of them, or one is lost.
        """
        answers = [self._receive(worker, None if patiently else self._timeout_s) for worker in self._workers]
        for worker, answer in zip(self._workers, answers, strict=True):
            if answer.failure is not None:
                raise answer.failure.error(worker.rank, self._size)
        return [answer.value for answer in answers]

    def cause(self, error: BackendError) -> BackendError:
        """Why rank 0's part of a call failed: a worker's failure or death, where there is one, else its own error."""
        for worker in self._workers:
            if not worker.is_told(_CAUSE_S):
                continue
            try:
                answer = self._receive(worker, 0.0)
            except BackendError as lost:
                return lost
            if answer.failure is not None:
                return answer.failure.error(worker.rank, self._size)
        return error

    def give_up(self, error: BackendError) -> None:
        """End all workers now, once: the group can do nothing any more, because of this."""
        with self._lock:
            if self._closing or self._lost is not None:
                return
            self._lost = error
        _log.error("rank_group_lost", ranks=self._size, reason=error.reason, error=str(error))
        for worker in self._workers:
            worker.process.kill()
        self._on_lost(error)

    def close(self) -> None:
        """End all workers: those that take calls by one, others by a signal."""
        with self._lock:
            self._closing = True
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has ended
                worker.connection.send(("close", ()))
        for worker in self._workers:
            try:
                worker.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.connection.close()
            assert worker.process.stdin is not None
            worker.process.stdin.close()

    def _send(self, worker: _Worker, message: object) -> None:
        try:
            worker.connection.send(message)
        except OSError as error:
            raise self._gone(worker, error) from error

    def _receive(self, worker: _Worker, timeout_s: float | None) -> Answer:
        try:
            if not worker.is_told(timeout_s):
                lost = BackendError(
                    "RANK_HANGS",
                    f"expected an answer of rank {worker.rank} of {self._size} (pid {worker.process.pid}) within"
                    f" {self._timeout_s} s, got none",
                    rank=worker.rank,
                )
                self.give_up(lost)
                raise lost
            answer: Answer = worker.connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone(worker, error) from error
        return answer

    def _gone(self, worker: _Worker, error: Exception) -> BackendError:
        """A worker's socket is at its end: so is the worker, or it does not read."""
        try:
            lost = self._ended(worker, worker.process.wait(_CAUSE_S))
        except subprocess.TimeoutExpired:
            lost = BackendError(
                "RANK_HANGS",
                f"rank {worker.rank} of {self._size} (pid {worker.process.pid}) takes no calls: {error!r}",
                rank=worker.rank,
            )
        self.give_up(lost)
        return lost

    def _watch(self, worker: _Worker) -> None:
        """In a thread of its own: the worker's end, unless it was asked for, is the group's."""
        status = worker.process.wait()
        self.give_up(self._ended(worker, status))

    def _ended(self, worker: _Worker, status: int) -> BackendError:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return BackendError(
            "RANK_LOST",
            f"rank {worker.rank} of {self._size} (pid {worker.process.pid}) {how}: its part of the weights and of every"
            " KV block is gone; start the executor anew",
            rank=worker.rank,
            status=status,
        )
