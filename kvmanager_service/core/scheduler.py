"""Who computes what in the next step, and what follows from a step's result.

Station: called by `StepLoop` (live), by the simulation and by replay. It decides; `KVCacheManager` keeps the blocks,
`RequestBook` where requests stand, `StepPlan` the step in the making, `TagOutbox` what the executor is to be told of
blocks, `Suspects` who may be what breaks it.

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

from kvmanager_service.core.errors import BadResultError, CoreError, PoolInUseError
from kvmanager_service.core.kv_cache_coordinator import KVCache
from kvmanager_service.core.pinned_prefixes import PinnedPrefixes
from kvmanager_service.core.pool_limit import has_outgrown, outgrown_error, require_fit
from kvmanager_service.core.request import (
    TOKEN_BYTES,
    FinishReason,
    NewRequest,
    Request,
    RequestOutput,
    RequestStatus,
)
from kvmanager_service.core.request_book import RequestBook
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import ScheduledRow, SchedulerStats, Step, StepResult, check_result
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.suspects import Suspects
from kvmanager_service.core.tag_outbox import TagOutbox

_RUNNING: Final = RequestStatus.RUNNING
"""Looked up once: an enum's member is looked up by name each time, and this one is compared for every row."""


class Scheduler:
    """Continuous batching over one block pool.

    Args:
        config: the limits.
        kv: the block tables; replaced as a whole by `replace_cache`.

    Invariants:
        Outputs are taken by `take_outputs`, each once. Whenever something can run and fewer than max_outstanding steps
        are out, `schedule` returns a step or ends a request with an error.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCache) -> None:
        self.config = config
        self.kv = kv
        self.stats = SchedulerStats()
        self.book = RequestBook(config)
        self.requests = self.book.requests
        self.waiting = self.book.waiting
        self.running = self.book.running
        self.outstanding: deque[Step] = deque()
        self.pins = PinnedPrefixes(config.max_pinned_fraction)
        self.pins.attach(kv)
        self._suspects = Suspects()
        self._tags = TagOutbox(kv.pool)
        self._next_step_id = 1

    # --- requests come and go -------------------------------------------------------------------------------------

    def add_request(self, new: NewRequest) -> Request:
        """Accept a request.

        Raises:
            DuplicateRequestError: the id is waiting or running.
            QueueFullError: max_waiting requests wait.
            InvalidRequestError: the known sequence and one more token can never fit the pool, or what is said of an
                adapter or of spans of the prompt cannot be.
        """
        request = self.book.new_request(new)
        require_fit(self.kv, request)
        self.book.add(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request, wherever it stands; its blocks are free when this returns.

        Raises:
            UnknownRequestError: it is neither waiting nor running.
        """
        self._finish(self.book.known(request_id), FinishReason.ABORT)

    def finish(self, request_id: str) -> None:
        """A stop string was found in a request's text: end it. No output follows; the caller has the last one.

        One that has ended otherwise in the same step has ended by this.
        """
        request = self.requests.get(request_id)
        if request is None:
            self.book.restate(request_id, FinishReason.STOP)
        else:
            self._end(request, FinishReason.STOP, RequestOutput(request_id, []))

    def fail(self, request_id: str, error: CoreError) -> None:
        """End a request with an error from outside the core. Raises UnknownRequestError."""
        self._finish(self.book.known(request_id), FinishReason.ERROR, error=error)

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
        and blocks last. A running request that finds no block preempts others by the policy, or yields itself.

        Returns:
            The step, or None when there is nothing to compute now. Call `take_outputs` in either case. When no request
            is left, a step without rows takes along the tags that no other step would.
        """
        if len(self.outstanding) >= self.config.max_outstanding or (self._suspects and self.outstanding):
            return None
        previous = self.outstanding[-1] if self.outstanding else None
        plan = StepPlan(self._next_step_id, previous, self.kv, self.config)
        if not (self._suspects and self._plan_suspect(plan)):
            preempted = self._plan_running(plan)
            # Whoever was preempted would be the first to come back; it may if nothing else brings about another call.
            if not preempted or not (plan.rows or self.outstanding):
                self._plan_waiting(plan)
        if not plan.rows and (self.has_work or not self._tags):
            return None
        step = plan.make_step(self._tags.take())
        self._next_step_id += 1
        self.outstanding.append(step)
        return step

    def _plan_suspect(self, plan: StepPlan) -> bool:
        """Let a suspect compute alone, no step before or behind, so that a failure is nobody else's.

        Returns:
            False while too few blocks are free for it.
        """
        request = self._suspects.first()
        if request.status is not _RUNNING:
            has_blocks = self._admit(request, 0)
        else:
            has_blocks = self.kv.allocate_slots(request, request.num_tokens)
        if has_blocks:
            plan.claim(plan.add(request, plan.chunk(request)))
        return has_blocks

    def _plan_running(self, plan: StepPlan) -> bool:
        """Give rows to running requests. Returns whether anybody was preempted."""
        preempted = False
        for request in list(self.running.values()):
            if plan.budget == 0:
                break
            if request.status is not _RUNNING:
                continue  # sacrificed for a request before it
            num_tokens = plan.chunk(request)
            if num_tokens == 0:
                continue
            while not self.kv.allocate_slots(request, request.num_computed_tokens + num_tokens):
                if len(self.running) == 1:
                    # It needs more than the whole pool. If a token of it is on its way, that may end it.
                    if not request.num_pending_tokens:
                        if self.pins.make_room(request, request.num_computed_tokens + num_tokens):
                            continue
                        self._fail_outgrown(request)
                    break
                victim = self._choose_victim(request)
                preempted = True
                plan.drop(victim)
                self._preempt(victim)
                self.stats.preemptions += 1
                if victim is request:
                    break
            else:
                plan.add(request, num_tokens)
        for row in plan.rows:
            plan.claim(row)
        return preempted

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Admit waiting requests and give them rows."""
        watermark_blocks = int(self.config.watermark * self.kv.pool.num_usable_blocks)
        while plan.budget > 0 and len(self.waiting) and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            if has_outgrown(self.kv, request):
                self._fail_outgrown(request)
            elif self._admit(request, watermark_blocks if self.running else 0) or (
                not self.running and self.pins.make_room(request, request.num_tokens) and self._admit(request, 0)
            ):
                plan.claim(plan.add(request, plan.chunk(request)))
            else:
                break

    def _admit(self, request: Request, reserve: int) -> bool:
        """Let a waiting request run if its blocks leave `reserve` blocks free."""
        if not self.kv.allocate_sequence(request, reserve):
            return False
        self.book.start(request)
        if not request.was_admitted:
            request.was_admitted = True
            self.waiting.charge_input(request)
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            if self.kv.enable_caching:
                self.stats.prefix_queries += request.num_prompt_tokens
                self.stats.prefix_hits += request.num_cached_tokens
        return True

    # --- blocks run short -----------------------------------------------------------------------------------------

    def _choose_victim(self, request: Request) -> Request:
        """Whom to preempt for request, maybe itself: the first in the policy's order whose blocks come free."""
        victims = self.waiting.victims(list(self.running.values()))
        return next(victim for victim in victims if victim is request or self.kv.frees_a_block(victim))

    def _fail_outgrown(self, request: Request) -> None:
        self._finish(request, FinishReason.ERROR, error=outgrown_error(self.kv, request))

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it recomputes what the prefix cache will not give back."""
        self.kv.free(request)
        self.book.preempt(request)

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
            self._distrust(step.rows[index], step.step_id)
        self._tags.committed(self.kv.pool.commit_step(step.step_id))
        self.pins.hold()
        self.stats.steps += 1
        self.stats.tokens_computed += step.num_tokens
        token_bytes = array("i", result.sampled).tobytes()
        is_metered = self.waiting.is_metered
        for index, row in enumerate(step.rows):
            request = row.request
            if request.status is not _RUNNING or request.incarnation != row.incarnation:
                continue  # it ended or was preempted while the step was out
            error = result.errors.get(index)
            if error is not None:
                self._finish(request, FinishReason.ERROR, error=error)
                continue
            if request.failed_steps:
                self._suspects.clear(row)
            sample = row.sample_index
            if sample >= 0:
                if is_metered:
                    self.waiting.charge_token(request)
                self._append(request, token_bytes[sample * TOKEN_BYTES : (sample + 1) * TOKEN_BYTES], sample, result)

    def _distrust(self, row: ScheduledRow, step_id: int) -> None:
        """A row failed: un-hash what it filled or read, and schedule anew whoever relies on it.

        That may be the request itself, when it was preempted and admitted again since.
        """
        request = row.request
        is_current = request.status is _RUNNING and request.incarnation == row.incarnation
        distrusted = self.kv.distrust(request, step_id, with_table=is_current)
        self._tags.forgotten(distrusted)
        self.pins.distrusted()
        for other in reversed(list(self.running.values())):
            if not (is_current and other is request) and self.kv.relies_on(other, distrusted):
                self._preempt(other)
                self.stats.reschedules += 1

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
            self._end(request, FinishReason.STOP, output)
        elif request.num_tokens >= request.max_total_tokens:
            self._end(request, FinishReason.LENGTH, output)

    # --- a step, or the executor, is lost -------------------------------------------------------------------------

    def lose_steps(self) -> None:
        """Every outstanding step is lost: un-hash what they would have filled, schedule running requests anew.

        A request that was in the first lost step too often, and never got over it, ends with an error; see `suspects`.
        """
        lost = list(self.outstanding)
        self.outstanding.clear()
        self.stats.steps_failed += len(lost)
        self._tags.lost(lost)
        self.kv.pool.forget_provisional()
        for request in reversed(list(self.running.values())):
            self._preempt(request)
            self.stats.reschedules += 1
        for request, error in self._suspects.blame(lost[0].rows if lost else []):
            self._finish(request, FinishReason.ERROR, error=error)

    def replace_cache(self, kv: KVCache) -> None:
        """The executor's cache is gone or another one: schedule everything anew on `kv`, end what can never fit it."""
        self.lose_steps()
        self.stats.blocks_evicted += self.kv.pool.num_evictions
        self.kv = kv
        self._tags = TagOutbox(kv.pool)
        self.pins.attach(kv)
        for request in list(self.requests.values()):
            request.block_hashes = []
            request.contents = []
            if has_outgrown(kv, request):
                self._fail_outgrown(request)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block. Returns how many. Raises PoolInUseError while a request holds blocks."""
        if self.running:
            raise PoolInUseError(
                "POOL_IN_USE",
                f"expected no running request, got {len(self.running)}; wait for them to finish or abort them",
                requests_running=len(self.running),
            )
        self.pins.forget()
        forgotten = self.kv.pool.reset_prefix_cache()
        self._tags.forgotten(forgotten)
        return len(forgotten)

    # --- the end of a request -------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason, *, error: CoreError | None = None) -> None:
        self._end(request, reason, self.book.emit(request, [], error))

    def _end(self, request: Request, reason: FinishReason, output: RequestOutput) -> None:
        request.last_block_id_bytes = bytes(request.block_id_bytes)
        self.kv.free(request)
        request.drop_tokens()
        self._suspects.forget(request)
        self.book.end(request, reason, output)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check every invariant of scheduler and pool. Raises AssertionError."""
        self.kv.check_integrity(self.running.values(), self.pins.tables())
        self.book.check_integrity()
        for request in self.running.values():
            assert request.num_computed_tokens <= request.num_tokens + request.num_pending_tokens, f"{request!r}"
            pending = sum(
                row.request is request and row.incarnation == request.incarnation and row.sample_index >= 0
                for step in self.outstanding
                for row in step.rows
            )
            assert pending == request.num_pending_tokens, f"{request!r} has {pending} samples outstanding"
