"""A line of waiting requests: whoever was preempted before whoever never ran, and among either the earliest arrival.

Station: `FCFSQueue` is one, `FairQueue` has one for each tenant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from kvmanager_service.core.request import Request


class ArrivalLine:
    """Waiting requests, each once.

    All operations are O(1), but for those on preempted requests, which are O(log n) and the move of as many pointers as
    arrived before: none where they are preempted latest first and come back earliest first, as they mostly do.
    """

    __slots__ = ("_new", "_preempted")

    def __init__(self) -> None:
        # In the order they were added, which is that of their arrivals. Of a dict the first is slow to find once many
        # before it are gone.
        self._new: OrderedDict[str, Request] = OrderedDict()
        self._preempted: list[Request] = []  # the earliest arrival last

    def add(self, request: Request) -> None:
        """A new request, which arrived after all others, stands at the end."""
        self._new[request.request_id] = request

    def requeue(self, request: Request) -> None:
        """A preempted request stands before those that arrived later, and before all that never ran."""
        line = self._preempted
        if not line or request.arrival_seq < line[-1].arrival_seq:
            line.append(request)
        else:
            insort(line, request, key=_rank)

    def first(self) -> Request:
        """Who stands first; there is somebody."""
        return self._preempted[-1] if self._preempted else next(iter(self._new.values()))

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        line = self._preempted
        if line and line[-1] is request:
            line.pop()
        elif self._new.pop(request.request_id, None) is None:
            index = bisect_left(line, _rank(request), key=_rank)
            assert line[index] is request, f"{request!r} is not in the line"
            del line[index]

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    def __iter__(self) -> Iterator[Request]:
        yield from reversed(self._preempted)
        yield from self._new.values()


def _rank(request: Request) -> int:
    return -request.arrival_seq
