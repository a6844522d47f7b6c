"""The books, the clients' streams, and the steps between them and an executor.

Station: `executor_life` fits the books to an executor and runs steps on its stream; `engine_loop` brings requests. It
calls `Scheduler` and `StepStream`, and knows not which executor is at the stream's other end.

    each round: update ▸ publish ▸ schedule ▸ send

Two steps are out at most: one computing, one queued behind it, so that an executor never waits for the wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import NoReturn

import structlog
from kvplane.executor.v1.executor_service_pb2 import ExecuteResponse

from kvmanager_service.adapters import AdapterBook, adapter_lost
from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.block_history import BlockHistory
from kvmanager_service.core.block_tag import MAX_TAGGED_TOKENS
from kvmanager_service.core.errors import BadResultError, CoreError
from kvmanager_service.core.fair_queue import FairWeights
from kvmanager_service.core.kv_cache import group_block_sizes, make_kv_cache, table_sizes
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.request import FinishReason, NewRequest, Request, RequestOutput
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import RECOMPUTE, SchedulerConfig
from kvmanager_service.core.step import Step
from kvmanager_service.engine_api import OutputSink
from kvmanager_service.errors import PreconditionError
from kvmanager_service.executor_client import ExecutorLostError, LoadedAdapter, ReadyExecutor, StepStream
from kvmanager_service.executor_groups import read_groups
from kvmanager_service.kv_events import KvEvents
from kvmanager_service.step_message import build_execute_request, read_execute_response

_log = structlog.get_logger(__name__)


class StepLoop:
    """Runs steps, and keeps what outlives an executor: requests and their sinks.

    Args:
        config: the manager's settings.
        clock: seconds that never fall; how long blocks are kept goes by it.
        settle: called when a pool has been made: what is there then stays for long.

    Attributes:
        scheduler: the books; None before the first `fit`, and until then there is nobody to ask them.
        kv_epoch: names the content of the cache that the books are about; 0 before there is one.
        kv_events: for those who follow the cache.
        longest_chunk: most tokens of one request in a step.
        adapters: the LoRA adapters that requests may name.
    """

    def __init__(
        self,
        config: ManagerConfig,
        clock: Callable[[], float] = time.monotonic,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler: Scheduler | None = None
        self.kv_epoch = 0
        self.kv_events = KvEvents(config.kv_event_buffer)
        self.longest_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self.adapters = AdapterBook()
        self._config = config
        self._clock = clock
        self._settle = settle
        self._sinks: dict[str, OutputSink] = {}
        self._table_sizes: list[int] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._published = asyncio.Event()
        self._got_result = False

    # --- requests come and go -------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """How many clients still wait for the end of their request."""
        return len(self._sinks)

    @property
    def oldest_step(self) -> Step | None:
        """The step whose result comes next, or None when none is out."""
        return self.scheduler.outstanding[0] if self.scheduler is not None and self.scheduler.outstanding else None

    def wake(self) -> None:
        """Look for work: a result has come, or a request."""
        self._wake.set()

    def submit(self, request: NewRequest, sink: OutputSink, *branch_sinks: OutputSink) -> None:
        """See `engine_api.Engine.submit`."""
        self.adapters.require_current(request.lora)
        self._books().add_request(request)
        self._sinks[request.request_id] = sink
        for branch, branch_sink in zip(request.branches, branch_sinks, strict=True):
            self._sinks[branch.request_id] = branch_sink
        self._wake.set()

    def abort(self, request_id: str, tenant: str | None = None) -> None:
        """See `engine_api.Engine.abort`. The request's blocks are free when this returns."""
        self._books_now().abort(request_id, tenant)
        self._publish()

    def reset_prefix_cache(self) -> int:
        """See `engine_api.Engine.reset_prefix_cache`."""
        self._wake.set()  # the executor is to forget its tags, too
        forgotten = self._books().reset_prefix_cache()
        self.kv_events.notify()
        return forgotten

    def pin_prefix(self, pin: PinnedPrefix) -> PinnedPrefix:
        """See `engine_api.Engine.pin_prefix`."""
        if not self._config.enable_prefix_caching:
            raise PreconditionError(
                "NO_PREFIX_CACHING",
                "expected a manager that keeps computed blocks, got one that does not; start it without "
                "--no-enable-prefix-caching",
            )
        return self._books_now().pins.pin(pin)

    def unpin_prefix(self, name: str) -> None:
        """See `engine_api.Engine.unpin_prefix`."""
        self._books_now().pins.unpin(name)
        self._wake.set()  # what waits may find the blocks that came free

    def fail_all(self, error: CoreError) -> None:
        """End every request with an error."""
        scheduler = self._books_now()
        while scheduler.requests:  # one may end others that were to be forked from it
            scheduler.fail(next(iter(scheduler.requests)), error)
        self._publish()

    def end_streams(self, error: CoreError) -> None:
        """Tell every client an error without asking the scheduler, which may be what is broken."""
        for request_id, sink in self._sinks.items():
            sink.push(RequestOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error))
        self._sinks.clear()
        if self.scheduler is not None:
            self.scheduler.outstanding.clear()  # nobody takes their results any more
        self._idle.set()
        self._published.set()

    async def wait_idle(self) -> None:
        """Wait until every client has been told the end of its request, and no step is out.

        The last step is the one that tells the executor what the others have filled.
        """
        while self._sinks or self.oldest_step is not None:
            self._idle.clear()
            await self._idle.wait()

    def num_using(self, adapter: str) -> int:
        """See `adapters.AdapterUsers`."""
        return len(self._using(adapter))

    async def wait_unused(self, adapter: str) -> None:
        """See `adapters.AdapterUsers`."""
        while any(_uses(row.request, adapter) for step in self._outstanding() for row in step.rows):
            self._published.clear()
            await self._published.wait()

    def adopt_adapters(self, held: list[LoadedAdapter]) -> None:
        """The executor has these adapters; requests that run with another end with an error."""
        for adapter in self.adapters.adopt(held):
            for request in self._using(adapter.name):
                if (
                    request.request_id in self._books_now().requests
                ):  # one may end others that were to be forked from it
                    self._books().fail(request.request_id, adapter_lost(adapter))
        if self.scheduler is not None:
            self._publish()

    def _using(self, adapter: str) -> list[Request]:
        requests = () if self.scheduler is None else self.scheduler.requests.values()
        return [request for request in requests if _uses(request, adapter)]

    def _outstanding(self) -> Collection[Step]:
        return () if self.scheduler is None else self.scheduler.outstanding

    # --- an executor comes and goes -------------------------------------------------------------------------------

    def fit(self, ready: ReadyExecutor) -> None:
        """Make the books fit the executor's cache."""
        if ready.tagged is None:
            return
        kv_cache = ready.kv_cache
        groups = read_groups(ready.info.kv_groups, kv_cache.block_size)
        kv = make_kv_cache(
            kv_cache.num_blocks,
            groups,
            longest_chunk=self.longest_chunk,
            enable_caching=self._config.enable_prefix_caching,
            eviction_policy=self._config.eviction_policy,
            events=self.kv_events.log,
            history=BlockHistory(self._config.block_history) if self._config.block_history else None,
        )
        adopted = kv.adopt(ready.tagged)
        if self.scheduler is None:
            self.scheduler = Scheduler(_scheduler_config(self._config), kv, ready.num_host_blocks)
        else:
            self.scheduler.replace_cache(kv, ready.num_host_blocks)
        self.kv_epoch = kv_cache.kv_epoch
        self._table_sizes = table_sizes(kv)
        self._publish()
        self._settle()
        _log.info(
            "kv_cache_ready",
            num_blocks=kv_cache.num_blocks,
            block_size=kv.block_size,
            num_groups=len(groups),
            group_block_sizes=group_block_sizes(kv),
            num_host_blocks=ready.num_host_blocks,
            adopted_blocks=adopted,
        )
        untagged = [size for size in group_block_sizes(kv) if size > MAX_TAGGED_TOKENS]
        if untagged and self._config.enable_prefix_caching:
            _log.warning(
                "blocks_without_tags",
                block_sizes=untagged,
                max_tagged_tokens=MAX_TAGGED_TOKENS,
                note="a restarted manager will not find what these blocks hold; start the executor with smaller ones",
            )
        if self._config.preemption_mode != RECOMPUTE and not ready.num_host_blocks:
            _log.warning(
                "no_swap_space",
                preemption_mode=self._config.preemption_mode,
                note="preempted requests recompute; start the executor with --swap-space, such as 4GiB",
            )
        if ready.num_unwanted_host_blocks:
            _log.warning(
                "swap_space_unused",
                preemption_mode=self._config.preemption_mode,
                unused_host_blocks=ready.num_unwanted_host_blocks,
                note="preempted requests recompute; start the manager with --preemption-mode auto, or the executor"
                " without --swap-space, which on a CPU makes its cache larger",
            )

    def lose(self, *, blame: bool) -> bool:
        """The executor can not be used any more: schedule everything anew.

        Args:
            blame: whether what it computed may be why.

        Returns:
            Whether any result has come since the last loss.
        """
        got_result, self._got_result = self._got_result, False
        if self.scheduler is not None:
            self._books_now().lose_steps(blame=blame)
            self._publish()
        return got_result

    # --- steps ----------------------------------------------------------------------------------------------------

    async def run(self, stream: StepStream) -> NoReturn:
        """Keep the executor busy until it is lost. Raises ExecutorLostError then."""
        scheduler = self._books()
        while True:
            self._wake.clear()
            self._books_now()
            for response in stream.take_results():
                self._update(response)
            self._publish()
            while (step := scheduler.schedule()) is not None:
                message = build_execute_request(
                    step, self.kv_epoch, scheduler.kv.block_size, self._table_sizes, self.adapters.ids
                )
                self._publish()  # while the step is sent, the id of who ended in it may be taken anew
                await stream.send(message)
            self._publish()
            await self._wake.wait()

    def _update(self, response: ExecuteResponse) -> None:
        try:
            self._books().update(read_execute_response(response, self.kv_epoch))
        except BadResultError as error:
            raise ExecutorLostError(str(error)) from error
        self._got_result = True

    def _publish(self) -> None:
        """Hand outputs to their sinks; a sink that finds a stop string ends its request."""
        scheduler = self._books()
        for output in scheduler.take_outputs():
            sink = self._sinks.get(output.request_id)
            if sink is None:
                continue  # a stop string ended it, and a result was already on its way
            match = sink.push(output)
            if match is not None:
                scheduler.finish(output.request_id)
            if match is not None or output.finish_reason is not None:
                del self._sinks[output.request_id]
        self.kv_events.notify()
        self._published.set()
        if not self._sinks:
            self._idle.set()

    def _books(self) -> Scheduler:
        assert self.scheduler is not None, "nothing is asked of the books before there are any"
        return self.scheduler

    def _books_now(self) -> Scheduler:
        """The books, told what time it is: blocks are about to come free, or to be handed out."""
        scheduler = self._books()
        scheduler.kv.pool.advance(self._clock())
        return scheduler


def _uses(request: Request, adapter: str) -> bool:
    return request.lora is not None and request.lora.lora_id == adapter


def _scheduler_config(config: ManagerConfig) -> SchedulerConfig:
    return SchedulerConfig(
        policy=config.policy,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        watermark=config.watermark,
        preemption_mode=config.preemption_mode,
        max_pinned_fraction=config.max_pinned_fraction,
        max_outstanding=2 if config.queue_ahead else 1,
        fair_weights=FairWeights(
            input=config.fair_input_weight, output=config.fair_output_weight, cached=config.fair_cached_weight
        ),
    )
