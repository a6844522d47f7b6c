"""Whether whoever waits is passed by others. That all together get on does not tell: arrivals come to an end.

Station: asked by `Checks` after every deed, and by `World` after every call of `Scheduler.schedule`. Within one call
nobody is preempted behind an admission, so whoever waits when it returns did so when others were admitted.
"""

from __future__ import annotations

from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.suspects import MAX_FAILED_STEPS


class AdmissionOrder:
    """What the policies promise to those that wait, told from arrivals alone: it asks no queue who is next.

    * `fcfs`: nobody is admitted for the first time while an earlier arrival waits to be, or anyone who was preempted;
      and of those that were, nobody while an earlier arrival waits;
    * `fair`: the same between the requests of one tenant;
    * `priority`: nobody is admitted, for the first time or again, while one waits that has a lower value, or the same
      and arrived earlier.

    Exempt are:

    * followers: they stand in no queue, and run from where their leader, which stood there, has sampled;
    * a suspect that runs again, where that is checked: it computes alone, so that nobody else pays for what it breaks.

    Forks are not, for they wait as others do; nor is whoever finds its prefix in the cache, or waits for
    its blocks on their way to the host: those behind it wait, too.

    Args:
        scheduler: it stays when a cache is replaced.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._policy = scheduler.config.policy
        self._incarnations: dict[str, int] = {}
        self._followers: set[str] = set()

    def check(self) -> None:
        """Of all that were admitted since the last time. Raises AssertionError."""
        scheduler, before = self._scheduler, self._incarnations
        running = scheduler.running
        for request_id, admitted in running.items():
            if before.get(request_id) != admitted.incarnation and not self._is_exempt(admitted):
                for waiting in scheduler.waiting:
                    assert not self._is_passed(waiting, admitted), f"{waiting!r} was passed by {admitted!r}"
        self._incarnations = {request_id: request.incarnation for request_id, request in running.items()}
        self._followers = {one.request_id for one in scheduler.requests.values() if one.leader is not None}

    def _is_exempt(self, admitted: Request) -> bool:
        is_suspect = admitted.failed_steps >= MAX_FAILED_STEPS - 1
        return admitted.request_id in self._followers or (is_suspect and admitted.incarnation > 0)

    def _is_passed(self, waiting: Request, admitted: Request) -> bool:
        """Whether one that waits should have been admitted before another that was."""
        if self._policy == "priority":
            return (waiting.priority, waiting.arrival_seq) < (admitted.priority, admitted.arrival_seq)
        if self._policy == "fair" and waiting.tenant != admitted.tenant:
            return False  # of tenants, `Fairness` checks whose turn it is
        never_ran = waiting.status is not RequestStatus.PREEMPTED
        return (never_ran, waiting.arrival_seq) < (not admitted.incarnation, admitted.arrival_seq)
