"""Whether tenants get what the policy `fair` promises, told from its counters and from what clients received.

Station: asked by `Checks` after every deed. It charges nothing itself: it has another book, of tokens that came out.
"""

from __future__ import annotations

from collections import Counter

from kvmanager_service.core.fair_queue import DEFAULT_WEIGHTS, FairQueue
from tests.simulation.deeds import Deeds


class Fairness:
    """The promises of `FairQueue`, as far as they can be seen from outside.

    Args:
        queue: the scheduler's; it stays when a cache is replaced.
        deeds: whose requests are whose.
    """

    def __init__(self, queue: FairQueue, deeds: Deeds) -> None:
        self._queue, self._deeds = queue, deeds
        self._backlogged: set[str] = set()
        self._open: set[str] = set()
        self._served: dict[str, float] = {}
        self._produced: Counter[str] = Counter()

    def check(self) -> None:
        """After a deed. Raises AssertionError."""
        queue, scheduler = self._queue, self._deeds.world.scheduler
        backlogged = {request.tenant for request in queue}
        opened = {request.tenant for request in scheduler.requests.values()}
        served = {tenant: queue.served(tenant) for tenant in opened}
        produced = self._count_produced()
        if backlogged:
            lowest = min(served[tenant] for tenant in backlogged)
            first = queue.peek().tenant
            assert served[first] == lowest, f"{first!r} is next with {served[first]}, and another has {lowest}"
        for tenant in opened & self._open:
            tokens = produced[tenant] - self._produced[tenant]
            charged = served[tenant] - self._served[tenant]
            assert charged >= tokens * DEFAULT_WEIGHTS.output, f"{tenant!r} got {tokens} tokens for {charged}"
        # One who waited before may have ended after another came, which then came to the lowest of both.
        floor = min((self._served[other] for other in self._backlogged), default=0.0)
        for tenant in backlogged - self._backlogged if self._backlogged & backlogged else ():
            assert served[tenant] >= floor, f"{tenant!r} came with {served[tenant]}: others that wait have {floor}"
        self._backlogged, self._open, self._served, self._produced = backlogged, opened, served, produced

    def _count_produced(self) -> Counter[str]:
        accepted = self._deeds.accepted
        produced: Counter[str] = Counter()
        for request_id, one in self._deeds.world.produced.items():
            produced[accepted[request_id].new.tenant] += len(one.token_ids)
        return produced
