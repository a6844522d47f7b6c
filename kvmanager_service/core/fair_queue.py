"""Fair scheduling between tenants: the virtual token counter.

Station: one of the policies of `policies`; the scheduler tells it what was served, beside what every queue is told.

Each tenant has a counter of the service it got: weighted input and output tokens. The tenant with the lowest counter is
next. A tenant that comes back is lifted to the lowest counter of those that wait, so that what it did not use while it
was away is no credit. Input is charged when a request is admitted for the first time, output as it becomes known.
Recomputation is charged to nobody: a preemption is the scheduler's choice.

With U = max(input weight × longest prompt, output weight × tokens that one running batch can hold), the counters of
tenants that wait differ by U at most, and the service of two tenants that wait all the time by 2U at most, however
long that is.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (algorithm 2, theorem 4.4). That tokens
found in the prefix cache may cost less is ours, after Cao et al., "Locality-aware Fair Scheduling in LLM Serving",
2025; so is what a preempted request and a forgotten tenant get.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager_service.core.arrival_line import ArrivalLine
from kvmanager_service.core.request import Request
from kvmanager_service.core.request_queue import RequestQueue

KEPT_IDLE_TENANTS = 4096
"""Tenants without requests whose counters are kept. Of more, whoever was away longest is forgotten, and is lifted like
a new one when it comes back: it gains U at most, since nobody is that far above the lowest counter."""

_HEAP_SLACK = 64


@dataclass(frozen=True, slots=True)
class FairWeights:
    """What a token counts.

    Attributes:
        input: a prompt token, or a resumed one, that is computed; above 0.
        output: a generated token; above 0. More than `input`: it takes a step of its own, while a prompt's share one.
        cached: a prompt token found in the prefix cache, from 0 to `input`. At 0 a tenant pays for what the executor
            computes for it, so that sharing a prefix is worth while. At `input` what one tenant gets does not depend on
            what the cache happens to hold.
    """

    input: float = 1.0
    output: float = 2.0
    cached: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("input", self.input), ("output", self.output)):
            if not 0.0 < value < float("inf"):
                raise ValueError(f"expected a finite {name} weight above 0, got {value}")
        if not 0.0 <= self.cached <= self.input:
            raise ValueError(f"expected a cached weight from 0 to the input weight ({self.input}), got {self.cached}")


DEFAULT_WEIGHTS: Final = FairWeights()


class TenantAccount:
    """One tenant.

    Attributes:
        served: the counter; it only grows.
        num_open: its requests that have not ended.
        waiting: those of them that wait, in the order they are admitted.
        entry: names its live entry in the heap; 0 when nothing waits.
    """

    __slots__ = ("entry", "num_open", "served", "tenant", "waiting")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.served = 0.0
        self.num_open = 0
        self.waiting = ArrivalLine()
        self.entry = 0


class FairQueue(RequestQueue):
    """The tenant with the lowest counter first, first come first served within it; victims in the opposite order.

    A heap holds one live entry for each tenant with waiting requests. Counters grow behind the heap's back; an entry is
    brought up to date when it comes to the top, at most once for each time its tenant was charged. So every operation
    is O(log tenants), taken over many.

    Args:
        weights: what a token counts.
        kept_idle: how many tenants without requests are remembered.
    """

    def __init__(self, weights: FairWeights = DEFAULT_WEIGHTS, kept_idle: int = KEPT_IDLE_TENANTS) -> None:
        self._weights = weights
        self._kept_idle = kept_idle
        self._accounts: dict[str, TenantAccount] = {}
        self._idle: OrderedDict[str, TenantAccount] = OrderedDict()
        self._heap: list[tuple[float, int, TenantAccount]] = []
        self._num_backlogged = 0
        self._last_left = TenantAccount("")
        self._next_entry = 1
        self._length = 0

    # --- waiting --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue at the end of its tenant's requests."""
        account = self._open(request.tenant)
        self._enter(account)
        account.waiting.add(request)
        self._length += 1

    def joined(self, request: Request) -> None:
        """Its tenant has one more request, and nothing more to wait for."""
        self._open(request.tenant)

    def _open(self, tenant: str) -> TenantAccount:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = TenantAccount(tenant)
        elif not account.num_open:
            del self._idle[tenant]
        account.num_open += 1
        return account

    def requeue(self, request: Request) -> None:
        """Queue among its tenant's requests by arrival, before those that never ran."""
        account = self._accounts[request.tenant]
        self._enter(account)
        account.waiting.requeue(request)
        self._length += 1

    def peek(self) -> Request:
        """The first request of the tenant with the lowest counter."""
        account = self._lowest()
        assert account is not None, "the queue is empty"
        return account.waiting.first()

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        account = self._accounts[request.tenant]
        account.waiting.remove(request)
        self._length -= 1
        if account.waiting:
            return
        account.entry = 0
        self._last_left = account
        self._num_backlogged -= 1
        if len(self._heap) > 2 * self._num_backlogged + _HEAP_SLACK:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].entry]
            heapq.heapify(self._heap)

    def _enter(self, account: TenantAccount) -> None:
        """A request of this tenant is about to wait; if it is the only one, the tenant is lifted."""
        if account.waiting:
            return
        account.served = max(account.served, self._floor())
        self._num_backlogged += 1
        heapq.heappush(self._heap, self._new_entry(account))

    def _floor(self) -> float:
        """What a tenant is lifted to: the lowest counter of those that wait; without any, that of the last that did.

        It never falls, so a counter below it need not be remembered.
        """
        lowest = self._lowest()
        return self._last_left.served if lowest is None else lowest.served

    def _lowest(self) -> TenantAccount | None:
        """The waiting tenant with the lowest counter; of equal ones, whoever came to that counter first."""
        heap = self._heap
        while heap:
            served, entry, account = heap[0]
            if entry != account.entry:
                heapq.heappop(heap)  # left behind: nothing of it waits, or it left and came back
            elif served != account.served:
                heapq.heapreplace(heap, self._new_entry(account))
            else:
                return account
        return None

    def _new_entry(self, account: TenantAccount) -> tuple[float, int, TenantAccount]:
        account.entry = self._next_entry
        self._next_entry += 1
        return account.served, account.entry, account

    # --- service --------------------------------------------------------------------------------------------------

    @property
    def is_metered(self) -> bool:
        """Yes: every token counts."""
        return True

    def charge_input(self, request: Request) -> None:
        """Charge the known sequence of a request; what it has computed already came from the cache."""
        cached = request.num_computed_tokens
        weights = self._weights
        self._accounts[request.tenant].served += weights.input * (request.num_tokens - cached) + weights.cached * cached

    def charge_token(self, request: Request) -> None:
        """Charge one output token."""
        self._accounts[request.tenant].served += self._weights.output

    def served(self, tenant: str) -> float:
        """The tenant's counter; 0 for one that is not known."""
        account = self._accounts.get(tenant)
        return 0.0 if account is None else account.served

    def ended(self, request: Request) -> None:
        """A request has ended. Tenants without any are forgotten, longest away first, while that changes nothing."""
        account = self._accounts[request.tenant]
        account.num_open -= 1
        if account.num_open:
            return
        self._idle[request.tenant] = account
        floor = self._floor()
        while self._idle:
            longest_away = next(iter(self._idle.values()))
            if longest_away.served > floor and len(self._idle) <= self._kept_idle:
                break
            del self._idle[longest_away.tenant]
            del self._accounts[longest_away.tenant]

    # --- blocks run short -----------------------------------------------------------------------------------------

    def victims(self, running: Sequence[Request]) -> Iterator[Request]:
        """Of the tenant with the highest counter first, and the latest arrival of it."""
        accounts = self._accounts
        return iter(
            sorted(running, key=lambda request: (accounts[request.tenant].served, request.arrival_seq), reverse=True)
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        waiting = [account for account in self._accounts.values() if account.waiting]
        waiting.sort(key=lambda account: (account.served, account.entry))
        return iter([request for account in waiting for request in account.waiting])
