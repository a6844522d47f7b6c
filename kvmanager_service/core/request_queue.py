"""Waiting requests, in the order a policy admits them.

Station: owned by `Scheduler`; `policies` makes one. A policy is one small class; the scheduler asks it three things:
who is next, who is sacrificed, where a preempted request goes. What was served, and who has ended, it is told.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from kvmanager_service.core.arrival_line import ArrivalLine
from kvmanager_service.core.request import Request


class RequestQueue:
    """The waiting requests of one policy; abstract. All operations are O(log n) or better, taken over many of them.

    No `ABC`, for the reason that `KVGroup` gives.
    """

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request waits."""

    def joined(self, request: Request) -> None:
        """A request was accepted that does not wait in the queue yet; it may be requeued, and will end."""

    @abstractmethod
    def requeue(self, request: Request) -> None:
        """A preempted request waits again; it goes before those that never ran, where the policy lets it."""

    @abstractmethod
    def peek(self) -> Request:
        """The request to admit next; the queue is not empty."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A request is admitted or has ended; it is in the queue."""

    @abstractmethod
    def victims(self, running: Sequence[Request]) -> Iterator[Request]:
        """Running requests in the order they are sacrificed. `running` is in order of admission."""

    @property
    def is_metered(self) -> bool:
        """Whether `charge_token` wants to be called for every output token."""
        return False

    def charge_input(self, request: Request) -> None:
        """A request was admitted for the first time; its table holds what the prefix cache had of it."""

    def charge_token(self, request: Request) -> None:
        """An output token of a request became known. Only called where `is_metered`."""

    def ended(self, request: Request) -> None:
        """A request has ended, and is not in the queue."""

    def served(self, tenant: str) -> float:
        """How much service a tenant got, where that is counted: 0 elsewhere."""
        return 0.0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue(RequestQueue):
    """First come, first served; the latest arrival is sacrificed first."""

    def __init__(self) -> None:
        self._line = ArrivalLine()

    def add(self, request: Request) -> None:
        """Queue at the end."""
        self._line.add(request)

    def requeue(self, request: Request) -> None:
        """Queue by arrival, before those that never ran."""
        self._line.requeue(request)

    def peek(self) -> Request:
        """The request at the front."""
        return self._line.first()

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._line.remove(request)

    def victims(self, running: Sequence[Request]) -> Iterator[Request]:
        """The latest arrival first."""
        return iter(sorted(running, key=lambda request: request.arrival_seq, reverse=True))

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._line)


class PriorityQueue(RequestQueue):
    """The lowest priority value first, then the earliest arrival; victims in the opposite order."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        self._requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Queue by priority, then arrival."""
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (request.priority, request.arrival_seq, request.request_id))

    def requeue(self, request: Request) -> None:
        """Queue by priority, then arrival: it arrived before those that never ran."""
        self.add(request)

    def peek(self) -> Request:
        """The lowest priority value, then the earliest arrival."""
        while True:
            _, arrival_seq, request_id = self._heap[0]
            request = self._requests.get(request_id)
            if request is not None and request.arrival_seq == arrival_seq:
                return request
            heapq.heappop(self._heap)  # left behind by remove()

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [(kept.priority, kept.arrival_seq, kept.request_id) for kept in self._requests.values()]
            heapq.heapify(self._heap)

    def victims(self, running: Sequence[Request]) -> Iterator[Request]:
        """The highest priority value first, then the latest arrival."""
        return iter(sorted(running, key=lambda request: (request.priority, request.arrival_seq), reverse=True))

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=lambda request: (request.priority, request.arrival_seq)))
