"""Requests come, steps go out, and what follows from the steps' results.

Station: called by `StepLoop` (live), by the simulation and by replay. It takes requests in, has `StepPlanner` fill the
next step's `StepPlan`, and draws what follows from its result; `Departures` is how requests leave. `RequestBook` keeps
where requests stand, `Residency` what of them is on the device and on the host, `Suspects` who may be what breaks the
executor. `branches` is about requests that go on from another's tokens.

    add_request ─▶ waiting ─schedule: admit▶ running ─update: token▶ … ─update: stop▶ finished
                      ▲                         │
                      └──── preempt ◀───────────┘

A request has no phases beyond that: it has tokens, known or being sampled, and it has computed some of them. A step
computes the next ones. Prefill, chunked prefill, decode and recomputation are all this one thing.

Up to `max_outstanding` steps may be without a result. A request whose token is being sampled by an outstanding step is
scheduled again at once: its row names that sample as input (`feeds_from`).
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final

from kvmanager_service.core import branches
from kvmanager_service.core.departures import Departures
from kvmanager_service.core.errors import BadResultError, CoreError, PoolInUseError
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.pool_limit import has_outgrown, require_fit
from kvmanager_service.core.request import (
    TOKEN_BYTES,
    FinishReason,
    NewRequest,
    Request,
    RequestOutput,
    RequestStatus,
)
from kvmanager_service.core.request_book import RequestBook
from kvmanager_service.core.residency import Residency
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import Branch, ScheduledRow, SchedulerStats, Step, StepResult, check_result
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.step_planner import StepPlanner
from kvmanager_service.core.suspects import Suspects
from kvmanager_service.core.swap_space import SwapSpace

_FINISHED: Final = RequestStatus.FINISHED
_RUNNING: Final = RequestStatus.RUNNING
"""Looked up once: an enum's member is looked up by name each time, and this one is compared for every row."""


class Scheduler:
    """Continuous batching over one block pool.

    Args:
        config: the limits.
        kv: the block tables; replaced as a whole by `replace_cache`.
        num_host_blocks: blocks in the executor's host memory; without them preempted requests compute again.

    Attributes:
        kv: the block tables.
        pins: what stays in the cache.
        outstanding: the steps without a result, oldest first.

    Invariants:
        Outputs are taken by `take_outputs`, each once. Whenever something can run and fewer than max_outstanding steps
        are out, `schedule` returns a step or ends a request with an error.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCache, num_host_blocks: int = 0) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self.book = RequestBook(config)
        self.requests = self.book.requests
        self.waiting = self.book.waiting
        self.running = self.book.running
        self.outstanding: deque[Step] = deque()
        self.residency = Residency(config, kv, num_host_blocks, self.stats)
        self.kv = self.residency.kv
        self.pins = self.residency.pins
        self._suspects = Suspects()
        self._departures = Departures(self.book, self.residency, self._suspects)
        self._planner = StepPlanner(
            config,
            self.book,
            self.residency,
            departures=self._departures,
            suspects=self._suspects,
            stats=self.stats,
        )
        self._next_step_id = 1

    @property
    def swap_space(self) -> SwapSpace | None:
        """What is in host memory; None where nothing can be."""
        return self.residency.swap_space

    # --- requests come and go -------------------------------------------------------------------------------------

    def add_request(self, new: NewRequest) -> Request:
        """Accept a request, and what branches of it stand in the queue for themselves.

        One that branches off from another (`NewRequest.fork_of`) shares what is computed of the other's tokens, and
        acknowledged: that is not computed again. It waits as any request, if only for the next step, and holds that
        meanwhile; see `ForkHolds`.

        Raises:
            DuplicateRequestError: the id is waiting or running.
            QueueFullError: max_waiting requests wait.
            InvalidRequestError: the known sequence and one more token can never fit the pool, there are more branches
                than may run or wait together, what is said of an adapter or of spans of the prompt cannot be, or it
            branches off from a request with other tokens.
        """
        requests = self.book.new_requests(new)
        for request in requests:
            require_fit(self.kv, request)
        request, parent = requests[0], self._parent_of(new)
        if parent is not None:
            branches.require_fork(parent, request)
        for one in requests:
            self.book.add(one)
        if parent is not None and branches.fork(self.kv, parent, request, self.outstanding):
            self.residency.forks.add(request)
        return request

    def _parent_of(self, new: NewRequest) -> Request | None:
        """The request that a new one branches off from. One that has ended is none, nor is another tenant's."""
        parent = self.requests.get(new.fork_of)
        return parent if parent is not None and parent.tenant == new.tenant else None

    def abort(self, request_id: str, tenant: str | None = None) -> None:
        """End a request with all its branches, or one branch, wherever it stands; its blocks are free on return.

        Args:
            request_id: which.
            tenant: whose it must be; None means anybody's.

        Raises:
            UnknownRequestError: it is neither waiting nor running, or another tenant's.
        """
        for request in self.book.members(request_id, tenant):
            if request.status is not _FINISHED:
                self._departures.finish(request, FinishReason.ABORT)

    def finish(self, request_id: str) -> None:
        """A stop string was found in a request's text: end it. No output follows; the caller has the last one.

        One that has ended otherwise in the same step has ended by this.
        """
        request = self.requests.get(request_id)
        if request is None:
            self.book.restate(request_id, FinishReason.STOP)
        else:
            self._departures.end(request, FinishReason.STOP, RequestOutput(request_id, []))

    def fail(self, request_id: str, error: CoreError) -> None:
        """End a request with an error from outside the core. Raises UnknownRequestError."""
        self._departures.finish(self.book.known(request_id), FinishReason.ERROR, error=error)

    def take_outputs(self) -> list[RequestOutput]:
        """Everything that happened to requests since the last call, in order."""
        return self.book.take_outputs()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    # --- a step is decided ----------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Decide the next step.

        Running requests come first, in order of admission; then waiting ones are admitted while budget, sequence slots
        and blocks last. A running request that finds no block preempts others by the policy, if those behind it free
        enough, or yields itself.

        Returns:
            The step, or None when there is nothing to compute now. Call `take_outputs` in either case. When no request
            is left, a step without rows takes along the tags that no other step would; when all that can run waits for
            blocks on their way to the host, one without rows orders the copies.
        """
        if len(self.outstanding) >= self.config.max_outstanding or (self._suspects and self.outstanding):
            return None
        previous = self.outstanding[-1] if self.outstanding else None
        planner = self._planner
        plan = StepPlan(self._next_step_id, previous, self.kv, self.config)
        if not (self._suspects and planner.plan_suspect(plan)):
            is_short = planner.plan_running(plan)
            # Whoever was preempted would be the first to come back; it may if nothing else brings about another call.
            if not is_short or not (plan.rows or plan.copies or self.outstanding):
                planner.plan_waiting(plan)
        if not (plan.rows or plan.copies) and (self.has_work or not self.residency.tags):
            return None
        if self.book.num_followers:
            branches.fork_followers(plan, self.kv, self.book)
        step = plan.make_step(self.residency.tags.take())
        self._next_step_id += 1
        self.outstanding.append(step)
        return step

    # --- a step comes back ----------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> None:
        """Take the oldest outstanding step's result: commit what it computed, append what it sampled, stop who is done.

        Raises:
            BadResultError: the result is not of the oldest outstanding step, or its columns do not fit the step.
        """
        if not self.outstanding:
            raise BadResultError(f"expected no result at all, got the result of step {result.step_id}")
        step = self.outstanding[0]
        check_result(step, result)
        self.outstanding.popleft()
        for index in result.errors:
            self._distrust(step.rows[index], step)
        self.residency.acknowledged(step, result)
        self.stats.steps += 1
        self.stats.tokens_computed += step.num_tokens
        token_bytes = array("i", result.sampled).tobytes()
        is_metered = self.waiting.is_metered
        for index, row in enumerate(step.rows):
            request = row.request
            is_current = request.status is _RUNNING and request.incarnation == row.incarnation
            if not is_current and not branches.takes_samples(request, row.incarnation):
                continue  # it ended or was preempted while the step was out
            error = result.errors.get(index)
            if error is not None:
                self._departures.finish(request, FinishReason.ERROR, error=error)
                continue
            if request.failed_steps:
                self._suspects.clear(row)
            sample = row.sample_index
            if sample >= 0:
                if is_metered:
                    self.waiting.charge_token(request)
                self._append(request, token_bytes[sample * TOKEN_BYTES : (sample + 1) * TOKEN_BYTES], sample, result)
        for branch in step.branches:
            if branches.takes_samples(branch.request, branch.incarnation):
                self._take_branch(branch, result)

    def _take_branch(self, branch: Branch, result: StepResult) -> None:
        """What a row has sampled for a branch, or how it failed, is the branch's."""
        request, sample = branch.request, branch.sample_index
        error = result.errors.get(branch.row_index)
        if error is not None:
            self._departures.finish(request, FinishReason.ERROR, error=error)
            return
        if self.waiting.is_metered:
            self.waiting.charge_token(request)
        self._append(request, result.sampled[sample].to_bytes(TOKEN_BYTES, "little", signed=True), sample, result)

    def _distrust(self, row: ScheduledRow, step: Step) -> None:
        """A row failed: un-hash what it filled or read, and schedule anew whoever relies on it.

        That may be the request itself, when it was preempted and admitted again since. Branches rely on the rows before
        them, though no block that they share need have content; those of the failed row itself end with it.
        """
        failed, forked = branches.sampled_for(row), branches.forked_from(row, self.outstanding)
        distrusted = self.residency.distrust(row, step.step_id, failed, forked)
        for other in reversed(list(self.running.values())):
            if other not in failed and (other in forked or self.kv.relies_on(other, distrusted)):
                self._reschedule(other)

    def _append(self, request: Request, token: bytes, sample: int, result: StepResult) -> None:
        """A token of a request became known; it may be its last."""
        request.num_pending_tokens -= 1
        request.append_token(token)
        self.stats.tokens_generated += 1
        if request.last_step_id > result.step_id:  # the token may complete a block that a later step is filling
            self.kv.cache_blocks(request, request.last_step_id)
        token_id = result.sampled[sample]
        output = self.book.emit(request, [token_id])
        logprobs = result.logprobs.get(sample)
        if logprobs is not None:
            output.logprobs.append(logprobs)
        if token_id in request.stop_token_ids and request.num_output_tokens > request.min_tokens:
            output.stop_token_id = token_id
            self._departures.end(request, FinishReason.STOP, output)
        elif request.num_tokens >= request.max_total_tokens:
            self._departures.end(request, FinishReason.LENGTH, output)

    # --- a step, or the executor, is lost -------------------------------------------------------------------------

    def lose_steps(self, *, blame: bool = True) -> None:
        """Every outstanding step is lost: un-hash what they would have filled, schedule running requests anew.

        A request that was in the first lost step too often, and never got over it, ends with an error; see `suspects`.

        Args:
            blame: whether the first lost step's rows may be why.
        """
        lost = list(self.outstanding)
        self.outstanding.clear()
        self.stats.steps_failed += len(lost)
        self.residency.lose(lost)
        for request in reversed(list(self.running.values())):
            self._reschedule(request)
        for request, error in self._suspects.blame(lost[0].rows if lost and blame else []):
            for twin in branches.twins(request, self.book) if request.status is not _FINISHED else ():
                self._departures.finish(twin, FinishReason.ERROR, error=error)

    def _reschedule(self, request: Request) -> None:
        """What a running request has computed is in doubt, or lost: it waits, to be scheduled anew."""
        self._departures.preempt(request)
        self.stats.reschedules += 1

    def replace_cache(self, kv: KVCache, num_host_blocks: int = 0) -> None:
        """The executor's cache is gone or another one: schedule everything anew on `kv`, end what can never fit it."""
        self.lose_steps()
        self.residency.replace(kv, num_host_blocks)
        self.kv = self._planner.kv = kv
        for request in list(self.requests.values()):
            request.drop_hashes()
            request.contents = []
            if request.status is not _FINISHED and has_outgrown(kv, request):
                self._departures.fail_outgrown(kv, request)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block, and what was swapped out. Returns how many blocks were cached.

        Raises:
            PoolInUseError: a request runs.
        """
        if self.running:
            raise PoolInUseError(
                "POOL_IN_USE",
                f"expected no running request, got {len(self.running)}; wait for them to finish or abort them",
                requests_running=len(self.running),
            )
        return self.residency.reset()

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check every invariant of scheduler and pool. Raises AssertionError."""
        assert self.kv is self.residency.kv is self._planner.kv
        self.residency.check_integrity(self.running.values(), self.outstanding)
        self.book.check_integrity(self.residency.forks)
        for request in self.requests.values():
            assert request.num_computed_tokens <= request.num_tokens + request.num_pending_tokens, f"{request!r}"
            pending = sum(
                row.request is request and branches.takes_samples(request, row.incarnation) and row.sample_index >= 0
                for step in self.outstanding
                for row in step.rows
            ) + sum(
                branch.request is request and branches.takes_samples(request, branch.incarnation)
                for step in self.outstanding
                for branch in step.branches
            )
            assert pending == request.num_pending_tokens, f"{request!r} has {pending} samples outstanding"
