"""Forks that wait for a place to run, and hold meanwhile what they share: so nothing of it is computed again.

Station: owned by `Residency`. Whoever waits stands in the queue, fork or not; here is only noted which of those who
wait have a table. It holds what is computed of the parent's tokens when the fork comes, the parent's end included.

    fork ─▶ held ─admit: a place is free, and blocks for the rest▶ on the device
              └── let go: its blocks are needed, in doubt or lost ─▶ it waits as any request, for what the cache has

Whoever runs comes before whoever waits. So a fork lets go before a running request is preempted, and where nobody runs
before the next one would not: as `victims` says, those that help and no others, the latest arrival first.
"""

from __future__ import annotations

from kvmanager_service.core.request import Request, RequestStatus


class ForkHolds:
    """Waiting forks that hold blocks."""

    __slots__ = ("_forks",)

    def __init__(self) -> None:
        self._forks: dict[int, Request] = {}  # by arrival_seq, which only grows

    def __len__(self) -> int:
        return len(self._forks)

    def __contains__(self, request: Request) -> bool:
        return request.arrival_seq in self._forks

    def add(self, fork: Request) -> None:
        """A fork that waits has got a table."""
        self._forks[fork.arrival_seq] = fork

    def discard(self, request: Request) -> None:
        """It waits no more, or its table was taken; it need not be a fork."""
        self._forks.pop(request.arrival_seq, None)

    def newest_first(self) -> list[Request]:
        """In the order in which they let go."""
        return list(reversed(self._forks.values()))

    def check_integrity(self) -> None:
        """Check that all of them wait and hold something. Raises AssertionError."""
        for fork in self._forks.values():
            assert fork.status is RequestStatus.WAITING, f"{fork!r} is thought to wait"
            assert fork.blocks or fork.tables, f"{fork!r} is thought to hold blocks"
