"""Where each request stands, and what its client has not been told yet.

Station: owned by `Scheduler`, which decides; the book only keeps. It knows no block.

    add ─▶ waiting ─start▶ running ─▶ end
              ▲               │
              └── preempt ◀───┘        (end may come from waiting, too)

Of a request with branches one sequence, the leader, stands in the queue; its followers run from where it is forked.
Branches that have output already, of an earlier stream, stand in the queue each for itself, as preempted ones do.
"""

from __future__ import annotations

from collections import deque

from kvmanager_service.core.errors import (
    CoreError,
    DuplicateRequestError,
    InvalidRequestError,
    QueueFullError,
    UnknownRequestError,
)
from kvmanager_service.core.extra_keys import check_extra_keys
from kvmanager_service.core.fork_holds import ForkHolds
from kvmanager_service.core.policies import make_queue
from kvmanager_service.core.request import FinishReason, NewRequest, Request, RequestOutput, RequestStatus
from kvmanager_service.core.retention import check_ranges
from kvmanager_service.core.scheduler_config import SchedulerConfig

KEPT_FINISHED = 256
"""How many ended requests are kept, for those who want to look at them."""


class Family:
    """The sequences of one request that have not ended.

    Attributes:
        members: by their own ids.
        num_cached_tokens: what the first of them that was admitted found of the prompt in the cache: what the request
            is told, whichever output asks; -1 before.
    """

    __slots__ = ("members", "num_cached_tokens")

    def __init__(self) -> None:
        self.members: dict[str, Request] = {}
        self.num_cached_tokens = -1


class RequestBook:
    """All requests that have not ended, and the last that have.

    Attributes:
        requests: waiting and running ones, by id, oldest arrival first.
        waiting: in the order the policy admits them.
        running: by id, in order of admission.
        finished: ended ones, oldest first.
        num_finished: how many have ended, by finish reason.
        families: by the id of a request with branches, its sequences that have not ended.
        num_followers: sequences that are not forked from their leaders yet.

    Invariants:
        A request is in `waiting`, in `running` or a follower, or has ended, never two of these. Running requests and
        their followers are at most max_num_seqs.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = make_queue(config.policy, config.fair_weights)
        self.running: dict[str, Request] = {}
        self.finished: deque[Request] = deque(maxlen=KEPT_FINISHED)
        self.num_finished: dict[str, int] = {}
        self.families: dict[str, Family] = {}
        self.num_followers = 0
        self._num_reserved = 0
        self._max_num_seqs = config.max_num_seqs
        self._max_waiting = config.max_waiting
        self._num_new = 0
        self._outputs: list[RequestOutput] = []
        self._next_arrival_seq = 0

    def check_queue(self, num_sequences: int = 1) -> None:
        """Raise QueueFullError unless so many more sequences may wait.

        At most max_waiting do that never ran. Who was preempted does not count; followers count as their leader does,
        and not once that runs, for then it is places to run that are kept for them.
        """
        if self._num_new + num_sequences > self._max_waiting:
            raise QueueFullError(
                "QUEUE_FULL",
                f"expected at most {self._max_waiting} waiting requests, got {self._num_new} and {num_sequences} more; "
                "back off and try again",
                max_waiting=self._max_waiting,
            )

    def new_requests(self, new: NewRequest) -> list[Request]:
        """Make a request that may be added: what stands in the queue of it, the request itself first or its leader.

        Raises:
            DuplicateRequestError, QueueFullError, InvalidRequestError: as `Scheduler.add_request` does.
        """
        self._check_ids(new)
        num_sequences = 1 + len(new.branches)
        for name, most in (("max_num_seqs", self._max_num_seqs), ("max_waiting", self._max_waiting)):
            if num_sequences > most:
                raise InvalidRequestError(
                    "INVALID_PARAMETER",
                    f"n: expected at most {name} ({most}), got {num_sequences}; ask for fewer",
                    field="n",
                )
        self.check_queue(num_sequences)
        request = Request(new, self._next_arrival_seq)
        check_extra_keys(new.lora, new.spans, request.num_prompt_tokens)
        check_ranges(new.retention, request.num_prompt_tokens)
        requests = [request]
        leader = None if new.resumed else request
        for index, branch in enumerate(new.branches, start=1):
            member = Request(new, self._next_arrival_seq + index, branch)
            if branch.resumed or leader is None:
                requests.append(member)
                leader = leader or (None if branch.resumed else member)
            else:
                member.leader = leader
                leader.followers.append(member)
        return requests

    def _check_ids(self, new: NewRequest) -> None:
        """Raise DuplicateRequestError when one of the request's ids is in use, or was given twice."""
        seen: set[str] = set()
        ids = [new.request_id, *(branch.request_id for branch in new.branches)]
        if new.family_id and new.family_id != new.request_id:
            ids.append(new.family_id)
        for request_id in ids:
            if request_id in self.requests or request_id in self.families or request_id in seen:
                raise DuplicateRequestError(
                    "REQUEST_ID_IN_USE",
                    f"expected a request_id that is not in use, got {request_id!r}; choose another or leave it empty",
                    request_id=request_id,
                )
            seen.add(request_id)

    def add(self, request: Request) -> None:
        """One of what `new_requests` made waits, and its followers with it."""
        members = [request, *request.followers]
        self._next_arrival_seq += len(members)
        self._num_new += len(members)
        for member in members:
            self.requests[member.request_id] = member
        if request.family_id:
            family = self.families.setdefault(request.family_id, Family())
            family.members.update({member.request_id: member for member in members})
            self.num_followers += len(request.followers)
        self.waiting.add(request)
        for follower in request.followers:
            self.waiting.joined(follower)

    def known(self, request_id: str) -> Request:
        """The waiting or running request of that id. Raises UnknownRequestError."""
        request = self.requests.get(request_id)
        if request is None:
            raise _not_found(request_id)
        return request

    def members(self, request_id: str, tenant: str | None = None) -> list[Request]:
        """All sequences of a waiting or running request, or one of them by its own id. Raises UnknownRequestError.

        So it does when the request is not of the tenant that is named: nobody learns which ids others use.
        """
        family = self.families.get(request_id)
        members = [self.known(request_id)] if family is None else list(family.members.values())
        if tenant is not None and members[0].tenant != tenant:
            raise _not_found(request_id)
        return members

    def has_room(self, request: Request) -> bool:
        """Whether a waiting request may run: there is a place for it, and one for each that will be forked from it."""
        return len(self.running) + self._num_reserved + 1 + len(request.followers) <= self._max_num_seqs

    def fork(self, follower: Request) -> None:
        """A follower runs."""
        self._part(follower)
        follower.status = RequestStatus.RUNNING
        self.running[follower.request_id] = follower

    def _part(self, follower: Request) -> None:
        """A follower is one no more: it runs, or has ended."""
        leader = follower.leader
        assert leader is not None
        leader.followers.remove(follower)
        follower.leader = None
        self.num_followers -= 1
        self._num_reserved -= leader.status is RequestStatus.RUNNING
        self._num_new -= leader.status is RequestStatus.WAITING

    def start(self, request: Request) -> None:
        """A waiting request runs."""
        self.waiting.remove(request)
        self._num_reserved += len(request.followers)
        if request.status is RequestStatus.WAITING:
            self._num_new -= 1 + len(request.followers)
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request

    def admitted(self, request: Request) -> int:
        """A request runs for the first time; its table holds what was there of it: so many tokens of its prompt."""
        request.was_admitted = True
        self.waiting.charge_input(request)
        num_found = min(request.num_computed_tokens, request.num_prompt_tokens)
        request.num_cached_tokens = num_found
        family = self.families.get(request.family_id)
        if family is not None:
            if family.num_cached_tokens < 0:
                family.num_cached_tokens = num_found
            request.num_cached_tokens = family.num_cached_tokens
        return num_found

    def preempt(self, request: Request, *, keeps_samples: bool = False) -> None:
        """A running request waits again, in a new incarnation.

        Args:
            request: which.
            keeps_samples: whether what is being sampled for it is for it all the same.
        """
        request.status = RequestStatus.PREEMPTED
        if keeps_samples:
            request.awaited_incarnation = request.incarnation
        else:
            request.num_pending_tokens = 0
        request.last_sample_index = -1
        request.incarnation += 1
        request.num_preemptions += 1
        self._num_reserved -= len(request.followers)
        del self.running[request.request_id]
        self.waiting.requeue(request)

    def end(self, request: Request, reason: FinishReason, output: RequestOutput) -> None:
        """A request without followers has ended, and `output` is the last of it."""
        assert not request.followers, f"{request!r} leaves followers behind"
        output.finish_reason = reason
        self._count_end(request, reason)
        del self.requests[request.request_id]
        if request.family_id:
            members = self.families[request.family_id].members
            del members[request.request_id]
            if not members:
                del self.families[request.family_id]
        if request.status is RequestStatus.RUNNING:
            del self.running[request.request_id]
        elif request.leader is not None:
            self._part(request)
        else:
            self._num_new -= request.status is RequestStatus.WAITING
            self.waiting.remove(request)
        self.waiting.ended(request)
        request.status = RequestStatus.FINISHED
        self.finished.append(request)

    def restate(self, request_id: str, reason: FinishReason) -> None:
        """The request of that id which ended last has ended for another reason; one that is not kept is ignored."""
        for request in reversed(self.finished):
            if request.request_id == request_id:
                self._count_end(request, reason)
                return

    def _count_end(self, request: Request, reason: FinishReason) -> None:
        counts = self.num_finished
        if request.finish_reason is not None:
            counts[request.finish_reason.value] -= 1
        request.finish_reason = reason
        counts[reason.value] = counts.get(reason.value, 0) + 1

    def emit(self, request: Request, token_ids: list[int], error: CoreError | None = None) -> RequestOutput:
        """Note what its client must be told; the output may still be completed until it is taken."""
        output = RequestOutput(request.request_id, token_ids, num_cached_tokens=request.num_cached_tokens, error=error)
        self._outputs.append(output)
        return output

    def take_outputs(self) -> list[RequestOutput]:
        """Everything emitted since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def check_integrity(self, holds: ForkHolds) -> None:
        """Check that every request stands in exactly one place, given who waits and holds blocks.

        Raises:
            AssertionError: an invariant does not hold.
        """
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting)
        followers = [follower for request in self.requests.values() for follower in request.followers]
        assert len(followers) == self.num_followers
        assert len(self.requests) == len(self.running) + len(waiting) + len(followers), "one stands nowhere, or twice"
        reserved = sum(len(request.followers) for request in self.running.values())
        assert reserved == self._num_reserved, f"{reserved} followers of running requests, counted {self._num_reserved}"
        for follower in followers:
            assert follower.leader is not None, f"{follower!r} follows nobody"
            assert follower.leader.request_id in self.requests, f"{follower!r} follows one that has ended"
            has_blocks = bool(follower.blocks or follower.tables)
            assert not has_blocks, f"{follower!r} is not forked yet and holds blocks"
        listed = {request_id: one for family in self.families.values() for request_id, one in family.members.items()}
        assert listed == {request_id: one for request_id, one in self.requests.items() if one.family_id}
        never_ran = [request for request in waiting if request.status is RequestStatus.WAITING]
        assert self._num_new == sum(1 + len(request.followers) for request in never_ran), "a new one is miscounted"
        for request in waiting:
            has_blocks = bool(request.blocks or request.tables)
            assert has_blocks == (request in holds), f"{request!r} waits and holds blocks, or is thought to"
        for request in self.running.values():
            assert request.status is RequestStatus.RUNNING, f"{request!r} is in running"


def _not_found(request_id: str) -> UnknownRequestError:
    return UnknownRequestError(
        "REQUEST_NOT_FOUND",
        f"expected the id of a waiting or running request, got {request_id!r}; it may have finished",
        request_id=request_id,
    )
