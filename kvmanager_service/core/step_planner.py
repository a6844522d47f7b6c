"""Who computes what in the next step: those that run, in order of admission, then those that wait.

Station: owned by `Scheduler`, which makes a `StepPlan` and has it filled here. It admits by `Residency` and
`RequestBook`; whoever is in the way leaves by `Departures`, after `Victims` has said whether that helps. It knows no
result of any step.
"""

from __future__ import annotations

from typing import Final

from kvmanager_service.core.departures import Departures
from kvmanager_service.core.pool_limit import has_outgrown
from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.request_book import RequestBook
from kvmanager_service.core.residency import Residency
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import SchedulerStats
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.suspects import Suspects
from kvmanager_service.core.victims import Victims

_RUNNING: Final = RequestStatus.RUNNING
"""Looked up once: an enum's member is looked up by name each time, and this one is compared for every row."""


class StepPlanner:
    """Fills plans with rows.

    Args:
        config: the limits.
        book: where requests stand.
        residency: what of them is on the device and on the host.
        departures: how they leave.
        suspects: who must compute alone.
        stats: what is counted.

    Attributes:
        kv: the block tables; set anew when the residency's are replaced.
    """

    __slots__ = ("_book", "_config", "_departures", "_residency", "_stats", "_suspects", "kv", "running", "waiting")

    def __init__(
        self,
        config: SchedulerConfig,
        book: RequestBook,
        residency: Residency,
        *,
        departures: Departures,
        suspects: Suspects,
        stats: SchedulerStats,
    ) -> None:
        self.kv = residency.kv
        self.running = book.running
        self.waiting = book.waiting
        self._config = config
        self._book = book
        self._residency = residency
        self._departures = departures
        self._suspects = suspects
        self._stats = stats

    def plan_suspect(self, plan: StepPlan) -> bool:
        """Let a suspect compute alone, no step before or behind, so that a failure is nobody else's.

        Returns:
            False while too few blocks are free for it, though pins stand back where nobody runs.
        """
        request = self._suspects.first()
        if request.status is not _RUNNING:
            has_blocks = self._book.has_room(request) and self._admit(request, 0, plan)
        else:
            has_blocks = self.kv.allocate_slots(request, request.num_tokens)
        if has_blocks:
            plan.claim(plan.add(request, plan.chunk(request)))
        return has_blocks

    def plan_running(self, plan: StepPlan) -> bool:
        """Give rows to running requests. Returns whether blocks ran short: somebody was preempted, or awaits some."""
        is_short = False
        victims: Victims | None = None
        for request in list(self.running.values()):
            if plan.budget == 0:
                break
            if request.status is not _RUNNING:
                continue  # sacrificed for a request before it
            num_tokens = plan.chunk(request)
            if num_tokens == 0:
                continue
            stop = request.num_computed_tokens + num_tokens
            while not self.kv.allocate_slots(request, stop):
                is_alone = len(self.running) == 1
                if self._residency.awaits_host(request, stop, plan, is_alone=is_alone):
                    is_short = True
                    break
                if is_alone:
                    # Pins hold what it lacks, or it needs more than the whole pool. If a token of it is on its
                    # way, that may end it.
                    if not request.num_pending_tokens:
                        if self._residency.make_room(request, stop):
                            continue
                        self._departures.fail_outgrown(self.kv, request)
                    break
                is_short = True
                victims = victims or self._order_victims(plan)
                if not self._make_way(request, stop, victims, plan):
                    break
            else:
                plan.add(request, num_tokens)
        plan.claim_all()
        return is_short

    def plan_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests and give them rows."""
        watermark_blocks = int(self._config.watermark * self.kv.pool.num_usable_blocks)
        while plan.budget > 0 and len(self.waiting) and len(self.running) < self._config.max_num_seqs:
            request = self.waiting.peek()
            if not self._book.has_room(request):
                break
            if has_outgrown(self.kv, request):
                self._departures.fail_outgrown(self.kv, request)
            elif self._admit(request, watermark_blocks + len(request.followers), plan):
                plan.claim(plan.add(request, plan.chunk(request)))
            else:
                break

    def _admit(self, request: Request, reserve: int, plan: StepPlan) -> bool:
        """Let a waiting request run if its blocks leave `reserve` blocks free; forks that wait behind it stand back.

        Where nobody runs, nobody else needs them: then none are left free, and pins stand back, too.
        """
        residency = self._residency
        is_looked_up = self.kv.enable_caching and request not in residency.forks
        if self.running:
            is_admitted = residency.admit(request, reserve, plan) or (
                residency.make_room_among_forks(request, reserve) and residency.admit(request, reserve, plan)
            )
        else:
            is_admitted = residency.admit(request, 0, plan) or (
                residency.make_room(request, request.num_tokens) and residency.admit(request, 0, plan)
            )
        if not is_admitted:
            return False
        self._book.start(request)
        if not request.was_admitted:
            num_found = self._book.admitted(request)
            if is_looked_up:
                self._stats.prefix_queries += request.num_prompt_tokens
                self._stats.prefix_hits += num_found
        return True

    # --- blocks run short -----------------------------------------------------------------------------------------

    def _order_victims(self, plan: StepPlan) -> Victims:
        """All that run, in the order in which they give way, and before them forks that wait."""
        order = list(self.waiting.victims(list(self.running.values())))
        return Victims(order, self.kv, self._residency.leaving, self._residency.forks, plan)

    def _make_way(self, request: Request, num_tokens: int, victims: Victims, plan: StepPlan) -> bool:
        """Preempt others for a request's first num_tokens tokens, or itself. Returns whether it still runs."""
        chosen = victims.choose(request, self._residency.num_missing(request, num_tokens, plan))
        for victim in chosen or [request]:
            if victim.status is not _RUNNING:
                self._residency.let_go(victim)
                continue
            plan.drop(victim)
            self._departures.preempt(victim, plan)
            self._stats.preemptions += 1
        return bool(chosen)
