"""Where each request stands, and what its client has not been told yet.

Station: owned by `Scheduler`, which decides; the book only keeps. It knows no block.

    add ─▶ waiting ─start▶ running ─▶ end
              ▲               │
              └── preempt ◀───┘        (end may come from waiting, too)
"""

from __future__ import annotations

from collections import deque

from kvmanager_service.core.errors import CoreError, DuplicateRequestError, QueueFullError, UnknownRequestError
from kvmanager_service.core.extra_keys import check_extra_keys
from kvmanager_service.core.policies import make_queue
from kvmanager_service.core.request import FinishReason, NewRequest, Request, RequestOutput, RequestStatus
from kvmanager_service.core.retention import check_ranges
from kvmanager_service.core.scheduler_config import SchedulerConfig

KEPT_FINISHED = 256
"""How many ended requests are kept, for those who want to look at them."""


class RequestBook:
    """All requests that have not ended, and the last that have.

    Attributes:
        requests: waiting and running ones, by id, oldest arrival first.
        waiting: in the order the policy admits them.
        running: by id, in order of admission.
        finished: ended ones, oldest first.
        num_finished: how many have ended, by finish reason.

    Invariants:
        A request is in `waiting` or in `running` or has ended, never in two.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = make_queue(config.policy, config.fair_weights)
        self.running: dict[str, Request] = {}
        self.finished: deque[Request] = deque(maxlen=KEPT_FINISHED)
        self.num_finished: dict[str, int] = {}
        self._max_waiting = config.max_waiting
        self._num_requeued = 0
        self._outputs: list[RequestOutput] = []
        self._next_arrival_seq = 0

    def check_queue(self) -> None:
        """Raise QueueFullError when max_waiting requests wait; those that were preempted do not count."""
        if len(self.waiting) - self._num_requeued >= self._max_waiting:
            raise QueueFullError(
                "QUEUE_FULL",
                f"expected fewer than {self._max_waiting} waiting requests, got {len(self.waiting)}; "
                "back off and try again",
                max_waiting=self._max_waiting,
            )

    def new_request(self, new: NewRequest) -> Request:
        """Make a request that may be added. Raises DuplicateRequestError, QueueFullError, InvalidRequestError."""
        if new.request_id in self.requests:
            raise DuplicateRequestError(
                "REQUEST_ID_IN_USE",
                f"expected a request_id that is not in use, got {new.request_id!r}; choose another or leave it empty",
                request_id=new.request_id,
            )
        self.check_queue()
        request = Request(new, self._next_arrival_seq)
        check_extra_keys(new.lora, new.spans, request.num_prompt_tokens)
        check_ranges(new.retention, request.num_prompt_tokens)
        return request

    def add(self, request: Request) -> None:
        """A request made by `new_request` waits."""
        self._next_arrival_seq += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def known(self, request_id: str) -> Request:
        """The waiting or running request of that id. Raises UnknownRequestError."""
        request = self.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(
                "REQUEST_NOT_FOUND",
                f"expected the id of a waiting or running request, got {request_id!r}; it may have finished",
                request_id=request_id,
            )
        return request

    def start(self, request: Request) -> None:
        """A waiting request runs."""
        self.waiting.remove(request)
        self._num_requeued -= request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request

    def preempt(self, request: Request) -> None:
        """A running request waits again, in a new incarnation; what is being sampled for it is not for it any more."""
        request.status = RequestStatus.PREEMPTED
        request.num_pending_tokens = 0
        request.last_sample_index = -1
        request.incarnation += 1
        request.num_preemptions += 1
        del self.running[request.request_id]
        self.waiting.requeue(request)
        self._num_requeued += 1

    def end(self, request: Request, reason: FinishReason, output: RequestOutput) -> None:
        """A request has ended, and `output` is the last of it."""
        output.finish_reason = reason
        self._count_end(request, reason)
        del self.requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            del self.running[request.request_id]
        else:
            self._num_requeued -= request.status is RequestStatus.PREEMPTED
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

    def check_integrity(self) -> None:
        """Check that every request stands in exactly one place. Raises AssertionError."""
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting)
        assert len(self.requests) == len(self.running) + len(waiting), "a request is in no queue or in two"
        assert self._num_requeued == sum(request.status is RequestStatus.PREEMPTED for request in waiting)
        for request in waiting:
            assert not request.blocks, f"{request!r} waits and holds blocks"
        for request in self.running.values():
            assert request.status is RequestStatus.RUNNING, f"{request!r} is in running"
