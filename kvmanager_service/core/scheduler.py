"""Who computes what in the next step, and what follows from a step's result.

Station: called by `EngineLoop` (live), by the simulation and by replay; calls `KVCacheManager` and a `RequestQueue`.

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
from dataclasses import dataclass

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.errors import (
    CoreError,
    DuplicateRequestError,
    InvalidRequestError,
    PoolExhaustedError,
    PoolInUseError,
    QueueFullError,
    RowFailedError,
    UnknownRequestError,
)
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import (
    FinishReason,
    NewRequest,
    Request,
    RequestOutput,
    RequestStatus,
)
from kvmanager_service.core.request_queue import POLICIES
from kvmanager_service.core.step import BadResultError, ScheduledRow, SchedulerStats, Step, StepResult

MAX_FAILED_STEPS = 3
"""A request that was in the first lost step this many times in a row is ended: it may be what breaks the executor."""

KEPT_FINISHED = 256
"""How many ended requests are kept, for those who want to look at them."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        policy: a name in `request_queue.POLICIES`.
        max_num_batched_tokens: most tokens computed in a step.
        max_num_seqs: most requests running.
        max_waiting: most requests waiting for their first admission; preempted ones may exceed it.
        long_prefill_token_threshold: most tokens of one request in a step; 0 is no limit.
        watermark: share of the pool that an admission must leave free while others run, in [0, 1).
        max_outstanding: most steps without a result: 2 keeps one queued ahead, 1 does not. Not more: a row can be fed
            by the step right before it only.
    """

    policy: str = "fcfs"
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_waiting: int = 1000
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    max_outstanding: int = 2

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"expected policy to be one of {', '.join(POLICIES)}, got {self.policy!r}")
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.max_outstanding not in (1, 2):
            raise ValueError(f"expected max_outstanding of 1 or 2, got {self.max_outstanding}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"expected long_prefill_token_threshold of at least 0, got {self.long_prefill_token_threshold}"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"expected watermark in [0, 1), got {self.watermark}")


class Scheduler:
    """Continuous batching over one block pool.

    Args:
        config: the limits.
        kv: the block tables; replaced as a whole by `replace_cache`.

    Invariants:
        A request is in `waiting` or in `running` or has ended, never in two. Outputs are taken by `take_outputs`, each
        once. Whenever something can run and fewer than max_outstanding steps are out, `schedule` returns a step or
        ends a request with an error.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.stats = SchedulerStats()
        self.requests: dict[str, Request] = {}
        self.waiting = POLICIES[config.policy]()
        self.running: dict[str, Request] = {}
        self.outstanding: deque[Step] = deque()
        self.finished: deque[Request] = deque(maxlen=KEPT_FINISHED)
        self._num_requeued = 0
        self._outputs: list[RequestOutput] = []
        self._tags: list[tuple[int, BlockContent | None]] = []
        self._next_step_id = 1
        self._next_arrival_seq = 0

    # --- requests come and go -------------------------------------------------------------------------------------

    def add_request(self, new: NewRequest) -> Request:
        """Accept a request.

        Raises:
            DuplicateRequestError: the id is waiting or running.
            QueueFullError: max_waiting requests wait.
            InvalidRequestError: the known sequence and one more token can never fit the pool.
        """
        if new.request_id in self.requests:
            raise DuplicateRequestError(
                "REQUEST_ID_IN_USE",
                f"expected a request_id that is not in use, got {new.request_id!r}; choose another or leave it empty",
                request_id=new.request_id,
            )
        if len(self.waiting) - self._num_requeued >= self.config.max_waiting:
            raise QueueFullError(
                "QUEUE_FULL",
                f"expected fewer than {self.config.max_waiting} waiting requests, got {len(self.waiting)}; "
                "back off and try again",
                max_waiting=self.config.max_waiting,
            )
        request = Request(new, self._next_arrival_seq)
        self._check_can_ever_fit(request)
        self._next_arrival_seq += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request, wherever it stands; its blocks are free when this returns.

        Raises:
            UnknownRequestError: it is neither waiting nor running.
        """
        self._finish(self._known(request_id), FinishReason.ABORT)

    def finish(self, request_id: str) -> None:
        """A stop string was found in a request's text: end it. No output follows; the caller has the last one.

        A request that has ended by its tokens in the same step is left alone.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.STOP, emit=False)

    def fail(self, request_id: str, error: CoreError) -> None:
        """End a request with an error from outside the core. Raises UnknownRequestError."""
        self._finish(self._known(request_id), FinishReason.ERROR, error=error)

    def take_outputs(self) -> list[RequestOutput]:
        """Everything that happened to requests since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

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
            The step, or None when there is nothing to compute now. Call `take_outputs` in either case.
        """
        if len(self.outstanding) >= self.config.max_outstanding:
            return None
        rows: dict[str, ScheduledRow] = {}
        step_id = self._next_step_id
        budget, preempted = self._schedule_running(rows, self.config.max_num_batched_tokens)
        for row in rows.values():
            self._claim(row, step_id)
        # Whoever was preempted would be the first to come back. If nothing else will bring about another call, it may.
        if not preempted or not (rows or self.outstanding):
            self._admit_waiting(rows, budget, step_id)
        if not rows:
            return None
        return self._make_step(step_id, list(rows.values()))

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
        self.waiting.remove(request)
        if request.status is RequestStatus.PREEMPTED:
            self._num_requeued -= 1
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
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
        tags = [(block_id, content) for block_id, content in self._tags if blocks[block_id].content is content]
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
        request.status = RequestStatus.PREEMPTED
        request.num_pending_tokens = 0
        request.last_sample_index = -1
        request.incarnation += 1
        request.num_preemptions += 1
        del self.running[request.request_id]
        self.waiting.requeue(request)
        self._num_requeued += 1

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
        step = self._check_result(result)
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
            request.failed_steps = 0
            if row.sample_index >= 0:
                self._append(request, row.sample_index, result)

    def _check_result(self, result: StepResult) -> Step:
        step = self.outstanding[0] if self.outstanding else None
        if step is None or step.step_id != result.step_id:
            expected = f"step {step.step_id}" if step else "no result at all"
            raise BadResultError(f"expected {expected}, got the result of step {result.step_id}")
        if len(result.sampled) != step.num_samples or len(result.computed_upto) != len(step.rows):
            raise BadResultError(
                f"expected {step.num_samples} samples and {len(step.rows)} rows for step {step.step_id}, got "
                f"{len(result.sampled)} and {len(result.computed_upto)}"
            )
        for index in result.errors:
            if not 0 <= index < len(step.rows):
                raise BadResultError(f"expected row errors of {len(step.rows)} rows, got one of row {index}")
        has_missing = min(result.sampled, default=0) < 0
        for index, row in enumerate(step.rows):
            if result.computed_upto[index] != row.stop and index not in result.errors:
                raise BadResultError(
                    f"expected row {index} of step {step.step_id} to be computed up to {row.stop}, got "
                    f"{result.computed_upto[index]} and no row error"
                )
            if has_missing and row.sample_index >= 0 > result.sampled[row.sample_index] and index not in result.errors:
                raise BadResultError(
                    f"expected row {index} of step {step.step_id} to sample a token, got "
                    f"{result.sampled[row.sample_index]} and no row error"
                )
        return step

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
        output = RequestOutput(request.request_id, [token_id], [], request.num_cached_tokens)
        logprobs = result.logprobs.get(sample_index)
        if logprobs is not None:
            output.logprobs.append(logprobs)
        self._outputs.append(output)
        if token_id in request.stop.stop_token_ids and request.num_output_tokens > request.stop.min_tokens:
            output.stop_token_id = token_id
            self._end(request, FinishReason.STOP, output)
        elif request.num_tokens >= request.max_total_tokens:
            self._end(request, FinishReason.LENGTH, output)

    # --- a step, or the executor, is lost -------------------------------------------------------------------------

    def lose_steps(self) -> None:
        """Every outstanding step is lost: un-hash what they would have filled, schedule running requests anew.

        A request that was in the first lost step MAX_FAILED_STEPS times in a row ends with an error.
        """
        lost = list(self.outstanding)
        self.outstanding.clear()
        self.stats.steps_failed += len(lost)
        self.kv.pool.forget_provisional()
        suspects = [row.request for row in lost[0].rows] if lost else []
        self._requeue_running()
        for request in suspects:
            request.failed_steps += 1
            if request.failed_steps >= MAX_FAILED_STEPS and request.status is not RequestStatus.FINISHED:
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
        self._tags = [(block.block_id, None) for block in forgotten]
        return len(forgotten)

    # --- the end of a request -------------------------------------------------------------------------------------

    def _known(self, request_id: str) -> Request:
        request = self.requests.get(request_id)
        if request is None:
            raise UnknownRequestError(
                "REQUEST_NOT_FOUND",
                f"expected the id of a waiting or running request, got {request_id!r}; it may have finished",
                request_id=request_id,
            )
        return request

    def _finish(
        self, request: Request, reason: FinishReason, *, error: CoreError | None = None, emit: bool = True
    ) -> None:
        output = RequestOutput(request.request_id, [], [], request.num_cached_tokens, error=error)
        if emit:
            self._outputs.append(output)
        self._end(request, reason, output)

    def _end(self, request: Request, reason: FinishReason, output: RequestOutput) -> None:
        output.finish_reason = reason
        request.finish_reason = reason
        self.stats.finished[reason.value] = self.stats.finished.get(reason.value, 0) + 1
        del self.requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            del self.running[request.request_id]
            request.last_block_id_bytes = bytes(request.block_id_bytes)
            self.kv.free(request)
        else:
            self._num_requeued -= request.status is RequestStatus.PREEMPTED
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self.finished.append(request)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check every invariant of scheduler and pool. Raises AssertionError."""
        self.kv.check_integrity(self.running.values())
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting)
        assert len(self.requests) == len(self.running) + len(waiting), "a request is in no queue or in two"
        assert self._num_requeued == sum(request.status is RequestStatus.PREEMPTED for request in waiting)
        for request in waiting:
            assert not request.blocks, f"{request!r} waits and holds blocks"
        for request in self.running.values():
            assert request.status is RequestStatus.RUNNING, f"{request!r} is in running"
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
