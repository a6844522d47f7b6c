"""Who computes what in the next step, and what follows from a step's result.

Station: called by `EngineLoop` (live), by the simulation and by replay; calls `KVCacheManager` for blocks and
`RequestBook` for where requests stand.

    add_request ─▶ waiting ─schedule: admit▶ running ─update: token▶ … ─update: stop▶ finished
                      ▲                         │
                      └──── preempt ◀───────────┘

A request has no phases beyond that: it has tokens, known or being sampled, and it has computed some of them. A step
computes the next ones. Prefill, chunked prefill, decode and recomputation are all this one thing.

Up to `max_outstanding` steps may be without a result. A request whose token is being sampled by an outstanding step is
scheduled again at once: its row names that sample as input (`feeds_from`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.errors import (
    CoreError,
    InvalidRequestError,
    PoolExhaustedError,
    PoolInUseError,
    RowFailedError,
)
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import FinishReason, NewRequest, Request, RequestOutput, RequestStatus
from kvmanager_service.core.request_book import RequestBook
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import BadResultError, ScheduledRow, SchedulerStats, Step, StepResult, check_result

MAX_FAILED_STEPS = 3
"""A request that was in the first lost step this many times, and never got over it in between, is ended: it may be what
breaks the executor."""


class Scheduler:
    """Continuous batching over one block pool.

    Args:
        config: the limits.
        kv: the block tables; replaced as a whole by `replace_cache`.

    Invariants:
        Outputs are taken by `take_outputs`, each once. Whenever something can run and fewer than max_outstanding steps
        are out, `schedule` returns a step or ends a request with an error.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.stats = SchedulerStats()
        self.book = RequestBook(config)
        self.requests = self.book.requests
        self.waiting = self.book.waiting
        self.running = self.book.running
        self.outstanding: deque[Step] = deque()
        self._suspects: dict[str, Request] = {}
        self._tags: list[tuple[int, BlockContent | None]] = []
        self._next_step_id = 1

    # --- requests come and go -------------------------------------------------------------------------------------

    def add_request(self, new: NewRequest) -> Request:
        """Accept a request.

        Raises:
            DuplicateRequestError: the id is waiting or running.
            QueueFullError: max_waiting requests wait.
            InvalidRequestError: the known sequence and one more token can never fit the pool.
        """
        request = self.book.new_request(new)
        self._check_can_ever_fit(request)
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
            self._end(request, FinishReason.STOP, RequestOutput(request_id, [], []))

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
        if len(self.outstanding) >= self.config.max_outstanding:
            return None
        if self._suspects:
            if self.outstanding:
                return None
            if self._start_suspect():
                return self._schedule_suspect()
        rows: dict[str, ScheduledRow] = {}
        step_id = self._next_step_id
        budget, preempted = self._schedule_running(rows, self.config.max_num_batched_tokens)
        for row in rows.values():
            self._claim(row, step_id)
        # Whoever was preempted would be the first to come back. If nothing else will bring about another call, it may.
        if not preempted or not (rows or self.outstanding):
            self._admit_waiting(rows, budget, step_id)
        if not rows and (self.has_work or not self._tags):
            return None
        return self._make_step(step_id, list(rows.values()))

    def _start_suspect(self) -> bool:
        """Give blocks to the next request that may be what breaks the executor. False while too few are free."""
        request = next(iter(self._suspects.values()))
        if request.status is RequestStatus.RUNNING:
            return self.kv.allocate_slots(request, request.num_tokens)
        if not self.kv.allocate_slots(request, request.num_tokens, self.kv.get_computed_blocks(request)):
            return False
        self._start(request)
        return True

    def _schedule_suspect(self) -> Step:
        """Let it compute alone, no step before or behind, so that a failure is nobody else's."""
        request = next(iter(self._suspects.values()))
        row = self._row(request, self._chunk(request.num_schedulable_tokens, self.config.max_num_batched_tokens))
        self._claim(row, self._next_step_id)
        return self._make_step(self._next_step_id, [row])

    def _schedule_running(self, rows: dict[str, ScheduledRow], budget: int) -> tuple[int, bool]:
        """Fill rows from running requests. Returns what is left of the budget, and whether anybody was preempted."""
        preempted = False
        for request in list(self.running.values()):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # sacrificed for a request before it
            num_tokens = self._chunk(request.num_schedulable_tokens, budget)
            if num_tokens == 0:
                continue
            while not self.kv.allocate_slots(request, request.num_computed_tokens + num_tokens):
                victim = self._choose_victim(request)
                if victim is None:
                    self._wait_or_fail(request)
                    break
                preempted = True
                returned = rows.pop(victim.request_id, None)
                if returned is not None:
                    budget += returned.num_tokens
                self._preempt(victim)
                self.stats.preemptions += 1
                if victim is request:
                    break
            else:
                rows[request.request_id] = self._row(request, num_tokens)
                budget -= num_tokens
        return budget, preempted

    def _admit_waiting(self, rows: dict[str, ScheduledRow], budget: int, step_id: int) -> None:
        while budget > 0 and len(self.waiting) and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            if self._has_outgrown(request):
                self._fail_outgrown(request)
                continue
            hits = self.kv.get_computed_blocks(request)
            # The whole known sequence is taken at once: a resumed request that got only its first chunk's blocks would
            # be preempted again before it produced anything.
            needed = self.kv.num_blocks_for(request.num_tokens) - len(hits)
            if self.running and self.kv.num_free_after(hits) - needed < self._watermark_blocks:
                break
            if not self.kv.allocate_slots(request, request.num_tokens, hits):
                break
            self._start(request)
            row = self._row(request, self._chunk(request.num_schedulable_tokens, budget))
            rows[request.request_id] = row
            budget -= row.num_tokens
            self._claim(row, step_id)

    def _start(self, request: Request) -> None:
        self.book.start(request)
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.stats.prefix_queries += request.num_prompt_tokens
            self.stats.prefix_hits += request.num_cached_tokens

    def _chunk(self, num_schedulable: int, budget: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        return min(num_schedulable, budget, threshold) if threshold else min(num_schedulable, budget)

    def _row(self, request: Request, num_tokens: int) -> ScheduledRow:
        return ScheduledRow(request, request.num_computed_tokens, num_tokens, request.incarnation)

    def _claim(self, row: ScheduledRow, step_id: int) -> None:
        """The row is final: its tokens count as computed and its full blocks can be found, provisionally."""
        request = row.request
        if row.stop > request.num_tokens:
            assert self.outstanding
            assert request.last_step_id == self.outstanding[-1].step_id
            row.feeds_from = request.last_sample_index
        request.num_computed_tokens = row.stop
        request.last_step_id = step_id
        self.kv.cache_blocks(request, step_id)

    def _make_step(self, step_id: int, rows: list[ScheduledRow]) -> Step:
        num_samples = 0
        feeds_from_step_id = 0
        for row in rows:
            request = row.request
            if row.feeds_from >= 0:
                feeds_from_step_id = self.outstanding[-1].step_id
            request.last_sample_index = -1
            if row.stop == request.num_tokens + request.num_pending_tokens:
                row.sample_index = request.last_sample_index = num_samples
                num_samples += 1
                row.suppress_stop = request.num_output_tokens + request.num_pending_tokens < request.stop.min_tokens
                request.num_pending_tokens += 1
        step = Step(step_id, rows, num_samples, feeds_from_step_id, self._take_tags())
        self._next_step_id += 1
        self.outstanding.append(step)
        return step

    def _take_tags(self) -> list[tuple[int, BlockContent | None]]:
        blocks = self.kv.pool.blocks
        tags = [
            (block_id, content)
            for block_id, content in self._tags
            if blocks[block_id].content is content and not blocks[block_id].provisional_step
        ]
        self._tags = []
        return tags

    # --- blocks run short -----------------------------------------------------------------------------------------

    @property
    def _watermark_blocks(self) -> int:
        return int(self.config.watermark * self.kv.pool.num_usable_blocks)

    def _choose_victim(self, request: Request) -> Request | None:
        """Whom to preempt for request, maybe itself: the first in the policy's order whose blocks come free."""
        if len(self.running) == 1:
            return None
        for victim in self.waiting.victims(list(self.running.values())):
            if victim is request or self.kv.frees_a_block(victim):
                return victim
        return None

    def _wait_or_fail(self, request: Request) -> None:
        """The only running request needs more than the whole pool. If a token of it is on its way, that may end it."""
        assert len(self.running) == 1
        if not request.num_pending_tokens:
            self._fail_outgrown(request)

    def _has_outgrown(self, request: Request) -> bool:
        """Whether not even the known sequence fits the pool. One that just fits can still produce its last token."""
        return self.kv.num_blocks_for(request.num_tokens) > self.kv.pool.num_usable_blocks

    def _fail_outgrown(self, request: Request) -> None:
        pool_tokens = self.kv.pool.num_usable_blocks * self.kv.block_size
        error = PoolExhaustedError(
            "POOL_EXHAUSTED",
            f"expected a sequence of at most {pool_tokens} tokens ({self.kv.pool.num_usable_blocks} blocks of "
            f"{self.kv.block_size}), got one that needs token {pool_tokens + 1} after {request.num_output_tokens} "
            "output tokens; lower max_tokens, or give the executor more memory for KV",
            pool_tokens=pool_tokens,
            num_output_tokens=request.num_output_tokens,
        )
        self._finish(request, FinishReason.ERROR, error=error)

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it recomputes what the prefix cache will not give back."""
        self.kv.free(request)
        self.book.preempt(request)

    def _check_can_ever_fit(self, request: Request) -> None:
        usable = self.kv.pool.num_usable_blocks
        if self.kv.num_blocks_for(request.num_tokens + 1) > usable:
            pool_tokens = usable * self.kv.block_size
            raise InvalidRequestError(
                "PROMPT_TOO_LONG",
                f"expected a prompt of at most {pool_tokens - 1} tokens, so that it and one more fit the KV pool, got "
                f"{request.num_tokens}; shorten it, or give the executor more memory for KV",
                pool_tokens=pool_tokens,
                prompt_tokens=request.num_tokens,
            )

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
        committed = self.kv.pool.commit_step(step.step_id)
        self._tags += [(block.block_id, content) for block in committed if (content := block.content) is not None]
        self.stats.steps += 1
        for index, row in enumerate(step.rows):
            self.stats.tokens_computed += row.num_tokens
            request = row.request
            if request.status is not RequestStatus.RUNNING or request.incarnation != row.incarnation:
                continue  # it ended or was preempted while the step was out
            error = result.errors.get(index)
            if error is not None:
                self._finish(request, FinishReason.ERROR, error=error)
                continue
            if request.failed_steps and row.stop >= request.failed_at:
                request.failed_steps = 0
                self._suspects.pop(request.request_id, None)
            if row.sample_index >= 0:
                self._append(request, row.sample_index, result)

    def _distrust(self, row: ScheduledRow, step_id: int) -> None:
        """A row failed: un-hash what it filled or read, and schedule anew whoever relies on it.

        That may be the request itself, when it was preempted and admitted again since.
        """
        request = row.request
        is_current = request.status is RequestStatus.RUNNING and request.incarnation == row.incarnation
        distrusted = self.kv.distrust(request, step_id, with_table=is_current)
        self._tags += [(block.block_id, None) for block in distrusted]
        for other in reversed(list(self.running.values())):
            if not (is_current and other is request) and not distrusted.isdisjoint(other.blocks):
                self._preempt(other)
                self.stats.reschedules += 1

    def _append(self, request: Request, sample_index: int, result: StepResult) -> None:
        token_id = result.sampled[sample_index]
        request.num_pending_tokens -= 1
        request.append_token(token_id)
        self.stats.tokens_generated += 1
        if request.last_step_id > result.step_id:  # the token may complete a block that a later step is filling
            self.kv.cache_blocks(request, request.last_step_id)
        output = self.book.emit(request, [token_id])
        logprobs = result.logprobs.get(sample_index)
        if logprobs is not None:
            output.logprobs.append(logprobs)
        if token_id in request.stop.stop_token_ids and request.num_output_tokens > request.stop.min_tokens:
            output.stop_token_id = token_id
            self._end(request, FinishReason.STOP, output)
        elif request.num_tokens >= request.max_total_tokens:
            self._end(request, FinishReason.LENGTH, output)

    # --- a step, or the executor, is lost -------------------------------------------------------------------------

    def lose_steps(self) -> None:
        """Every outstanding step is lost: un-hash what they would have filled, schedule running requests anew.

        A request that was in the first lost step MAX_FAILED_STEPS times, and never got over it, ends with an error.
        Before the last of these times it is put into a step of its own, so that no other pays for it.
        """
        lost = list(self.outstanding)
        self.outstanding.clear()
        self.stats.steps_failed += len(lost)
        self._tags = [tag for step in lost for tag in step.tags] + self._tags  # the executor may not have stored them
        self.kv.pool.forget_provisional()
        suspects = lost[0].rows if lost else []
        self._requeue_running()
        for row in suspects:
            request = row.request
            request.failed_steps += 1
            request.failed_at = row.stop
            if request.status is RequestStatus.FINISHED:
                continue
            if request.failed_steps == MAX_FAILED_STEPS - 1:
                self._suspects[request.request_id] = request
            if request.failed_steps >= MAX_FAILED_STEPS:
                error = RowFailedError(
                    "STEP_FAILED",
                    f"expected a step with this request to succeed, got {request.failed_steps} failures in a row; the "
                    "executor's log says why",
                    failed_steps=request.failed_steps,
                )
                self._finish(request, FinishReason.ERROR, error=error)

    def replace_cache(self, kv: KVCacheManager) -> None:
        """The executor's cache is gone or another one: schedule everything anew on `kv`, end what can never fit it."""
        self.lose_steps()
        self.stats.blocks_evicted += self.kv.pool.num_evictions
        self.kv = kv
        self._tags = []
        for request in list(self.requests.values()):
            request.block_hashes = []
            if self._has_outgrown(request):
                self._fail_outgrown(request)

    def _requeue_running(self) -> None:
        for request in reversed(list(self.running.values())):
            self._preempt(request)
            self.stats.reschedules += 1

    def reset_prefix_cache(self) -> int:
        """Forget every cached block. Returns how many. Raises PoolInUseError while a request holds blocks."""
        if self.running:
            raise PoolInUseError(
                "POOL_IN_USE",
                f"expected no running request, got {len(self.running)}; wait for them to finish or abort them",
                requests_running=len(self.running),
            )
        forgotten = self.kv.pool.reset_prefix_cache()
        self._tags += [(block.block_id, None) for block in forgotten]
        return len(forgotten)

    # --- the end of a request -------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason, *, error: CoreError | None = None) -> None:
        self._end(request, reason, self.book.emit(request, [], error))

    def _end(self, request: Request, reason: FinishReason, output: RequestOutput) -> None:
        request.last_block_id_bytes = bytes(request.block_id_bytes)
        self.kv.free(request)
        request.drop_tokens()
        self._suspects.pop(request.request_id, None)
        self.book.end(request, reason, output)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check every invariant of scheduler and pool. Raises AssertionError."""
        self.kv.check_integrity(self.running.values())
        self.book.check_integrity()
        for request in self.running.values():
            assert request.num_computed_tokens <= request.num_tokens + request.num_pending_tokens, f"{request!r}"
            pending = sum(
                row.request is request and row.incarnation == request.incarnation and row.sample_index >= 0
                for step in self.outstanding
                for row in step.rows
            )
            assert pending == request.num_pending_tokens, f"{request!r} has {pending} samples outstanding"

    def iter_requests(self) -> Iterator[Request]:
        """Running and waiting requests, oldest arrival first."""
        return iter(sorted(self.requests.values(), key=lambda request: request.arrival_seq))
