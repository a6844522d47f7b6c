"""A trace on a simulated clock: requests arrive when they did, and a cost model says how long each step takes.

Station: called by `command` and by tests; drives `Scheduler` as `StepLoop` does, with an executor that makes up its
results. Nothing sleeps: the clock jumps to the next arrival or to the end of the oldest step.

    arrivals ─▶ add_request ─▶ schedule ─▶ step, ends at max(now, end of the step before) + cost ─▶ update ─▶ outputs
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.core.request import FinishReason, RequestOutput
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.step import Step, StepResult
from kvmanager_service.replay.cost_model import CostModel
from kvmanager_service.replay.group_reads import GroupReads
from kvmanager_service.replay.report import Measurements, Sample, TenantMeasurements
from kvmanager_service.replay.tenants import has_tenants
from kvmanager_service.replay.trace import FIRST_SAMPLED_TOKEN, TraceRequest

__all__ = ["TimedReplay"]

_NOT_YET = -1.0
_MAX_SAMPLED = (1 << 31) - FIRST_SAMPLED_TOKEN


class _Progress:
    """Where one request stands. `started` and `last_token` are moments, _NOT_YET before; `tenant` is None for none."""

    __slots__ = ("last_token", "started", "tenant", "traced")

    def __init__(self, traced: TraceRequest, tenant: TenantMeasurements | None) -> None:
        self.traced = traced
        self.tenant = tenant
        self.started = _NOT_YET
        self.last_token = _NOT_YET


class TimedReplay:
    """One run over a trace.

    Args:
        trace: the requests; taken by arrival, in file order where that is equal.
        scheduler: a new one. Its max_waiting must be no less than the trace is long: a replay refuses nobody for that.
        cost: how long steps take.
        speedup: how many times faster than recorded requests arrive.
        on_done: told how many requests have ended, whenever some have.
        reads: how much of a sequence the model's layers read; None: the scheduler's groups have as many layers each.

    Attributes:
        now: the clock, seconds since the first arrival.
    """

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        scheduler: Scheduler,
        cost: CostModel,
        speedup: float = 1.0,
        on_done: Callable[[int], None] = lambda _: None,
        *,
        reads: GroupReads | None = None,
    ) -> None:
        self.now = 0.0
        self._scheduler = scheduler
        self._cost = cost
        self._reads = reads or GroupReads.of(scheduler.kv)
        self._speedup = speedup
        self._on_done = on_done
        self._arrivals = deque(sorted(trace, key=lambda traced: traced.arrival))
        self._open: dict[str, _Progress] = {}
        self._in_flight: deque[tuple[Step, float, float]] = deque()  # with its end, and how long it takes
        self._num_sampled = 0
        self._num_done = 0
        self._found = Measurements(has_clock=True, by_tenant=has_tenants(trace))

    def run(self) -> Measurements:
        """Replay until every request has ended."""
        while True:
            self._take_arrivals()
            self._send_steps()
            moment = self._next_moment()
            if moment is None:
                break
            self._advance(moment)
            if self._in_flight and self._in_flight[0][1] <= self.now:
                self._finish_step()
        assert not self._scheduler.has_work, "the scheduler left requests without a step"
        return self._finished()

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrives_at(self._arrivals[0]) <= self.now:
            traced = self._arrivals.popleft()
            try:
                self._scheduler.add_request(traced.to_new_request(self._arrives_at(traced)))
            except InvalidRequestError:
                self._found.note_refusal(traced.tenant)
                self._end_one()
            else:
                self._open[traced.request_id] = _Progress(traced, self._found.tenant(traced.tenant))

    def _send_steps(self) -> None:
        """Schedule as many steps as may be out."""
        while True:
            step = self._scheduler.schedule()
            if step is not None:
                starts_at = max(self.now, self._in_flight[-1][1] if self._in_flight else 0.0)
                seconds = self._cost.seconds(step, self._reads)
                self._in_flight.append((step, starts_at + seconds, seconds))
                self._note_admissions(step)
            if not self._publish() and step is None:
                return

    def _note_admissions(self, step: Step) -> None:
        for row in step.rows:
            if row.request.num_output_tokens == 0:
                progress = self._open[row.request.request_id]
                if progress.started == _NOT_YET:
                    progress.started = self.now
                    waited = self.now - self._arrives_at(progress.traced)
                    self._found.queue_times.append(waited)
                    if progress.tenant is not None:
                        progress.tenant.queue_times.append(waited)

    def _next_moment(self) -> float | None:
        moments = [self._in_flight[0][1]] if self._in_flight else []
        if self._arrivals:
            moments.append(self._arrives_at(self._arrivals[0]))
        return min(moments, default=None)

    def _advance(self, moment: float) -> None:
        num_waiting = len(self._scheduler.waiting)
        self._found.queue_seconds += num_waiting * (moment - self.now)
        if moment > self.now:
            self._found.max_queue = max(self._found.max_queue, num_waiting)
        self.now = moment
        self._scheduler.kv.pool.advance(moment)

    def _finish_step(self) -> None:
        step, _, seconds = self._in_flight.popleft()
        first = FIRST_SAMPLED_TOKEN + self._num_sampled % (_MAX_SAMPLED - step.num_samples)
        self._num_sampled += step.num_samples
        sampled = list(range(first, first + step.num_samples))
        result = StepResult(
            step.step_id,
            sampled,
            [row.stop for row in step.rows],
            compute_us=round(seconds * 1e6),
            copy_us=round(self._cost.copy_seconds(step, self._reads) * 1e6),
        )
        self._scheduler.update(result)
        self._publish()

    def _publish(self) -> bool:
        """Note what became of requests. Returns whether anything has."""
        outputs = self._scheduler.take_outputs()
        for output in outputs:
            progress = self._open[output.request_id]
            for _ in output.token_ids:
                self._note_token(progress)
            if output.finish_reason is not None:
                self._note_end(progress, output)
        return bool(outputs)

    def _note_token(self, progress: _Progress) -> None:
        found, tenant = self._found, progress.tenant
        if progress.last_token == _NOT_YET:
            waited = self.now - self._arrives_at(progress.traced)
            found.first_token_times.append(waited)
            if tenant is not None:
                tenant.first_token_times.append(waited)
        else:
            gap = self.now - progress.last_token
            found.token_gaps.append(gap)
            if tenant is not None:
                tenant.token_gaps.append(gap)
        if tenant is not None:
            tenant.output_tokens += 1
        progress.last_token = self.now

    def _note_end(self, progress: _Progress, output: RequestOutput) -> None:
        found, traced = self._found, progress.traced
        del self._open[output.request_id]
        if output.finish_reason is FinishReason.ERROR:
            found.failed += 1
            if progress.tenant is not None:
                progress.tenant.failed += 1
        block_size = self._scheduler.kv.block_size
        found.note_prompt(traced.tenant, output.num_cached_tokens, traced.prompt_length, block_size)
        self._end_one()

    def _end_one(self) -> None:
        self._num_done += 1
        scheduler, pool = self._scheduler, self._scheduler.kv.pool
        self._found.samples.append(
            Sample(
                self.now,
                scheduler.stats.prefix_hits,
                scheduler.stats.prefix_queries,
                len(scheduler.waiting),
                len(scheduler.running),
                pool.num_usable_blocks - pool.num_free_blocks,
            )
        )
        self._on_done(self._num_done)

    def _arrives_at(self, traced: TraceRequest) -> float:
        return traced.arrival / self._speedup

    def _finished(self) -> Measurements:
        found, stats = self._found, self._scheduler.stats
        found.hit_tokens, found.prompt_tokens = stats.prefix_hits, stats.prefix_queries
        found.evictions = self._scheduler.kv.pool.num_evictions
        found.preemptions, found.steps, found.output_tokens = stats.preemptions, stats.steps, stats.tokens_generated
        found.swapped_out, found.swapped_in = stats.swapped_out, stats.swapped_in
        found.tokens_computed = stats.tokens_computed
        found.makespan = self.now
        return found
