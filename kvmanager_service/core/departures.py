"""How a request that runs leaves: for a while, when it is preempted, or for good, when it ends.

Station: owned by `Scheduler`, and asked by its `StepPlanner`, too. It tells whoever keeps something of the request:
`Residency` of its blocks, `RequestBook` where it stands, `Suspects` what it is blamed for. It decides nothing.
"""

from __future__ import annotations

from kvmanager_service.core.errors import CoreError
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.pool_limit import outgrown_error
from kvmanager_service.core.request import FinishReason, Request, RequestOutput
from kvmanager_service.core.request_book import RequestBook
from kvmanager_service.core.residency import Residency
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.suspects import Suspects


class Departures:
    """Preempts and ends requests.

    Args:
        book: where requests stand.
        residency: what of them is on the device and on the host.
        suspects: who may be what breaks the executor.
    """

    __slots__ = ("_book", "_residency", "_suspects")

    def __init__(self, book: RequestBook, residency: Residency, suspects: Suspects) -> None:
        self._book = book
        self._residency = residency
        self._suspects = suspects

    def preempt(self, request: Request, plan: StepPlan | None = None) -> None:
        """Take a running request's blocks; it recomputes what neither the prefix cache nor the host gives back.

        Args:
            request: a running one.
            plan: the step in the making, which may order copies of its blocks to the host; None where there is none.
        """
        keeps_samples = self._residency.leave(request, plan)
        self._book.preempt(request, keeps_samples=keeps_samples)

    def finish(self, request: Request, reason: FinishReason, *, error: CoreError | None = None) -> None:
        """End a request, and those that were to be forked from it: until then they are one."""
        for follower in list(request.followers):
            self.finish(follower, reason, error=error)
        self.end(request, reason, self._book.emit(request, [], error))

    def end(self, request: Request, reason: FinishReason, output: RequestOutput) -> None:
        """End one request alone, with this as its last output."""
        tables = request.tables  # of several KV groups: the first is shown
        request.last_block_id_bytes = bytes(tables[0].block_id_bytes if tables else request.block_id_bytes)
        self._residency.end(request)
        request.drop_tokens()
        self._suspects.forget(request)
        self._book.end(request, reason, output)

    def fail_outgrown(self, kv: KVCache, request: Request) -> None:
        """End a request that can never fit the pool."""
        self.finish(request, FinishReason.ERROR, error=outgrown_error(kv, request))
