"""The engine: what servicers ask, and whether it serves.

Station: servicers call it (`engine_api.Engine`). It passes requests to `StepLoop` and leaves executors to
`ExecutorLife`. Everything runs on one asyncio loop, so nothing needs a lock.

    EngineLoop ─▶ ExecutorLife: which executor ─▶ StepLoop: steps on it
        └───────── requests ──────────────────────▲
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from kvmanager_service.adapters import Adapters
from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.errors import CoreError
from kvmanager_service.core.extra_keys import LoraAdapter
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.request import NewRequest
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.engine_api import (
    AdapterView,
    BlockTrace,
    BlockView,
    EngineStats,
    ManagerState,
    ModelView,
    OutputSink,
    PinsView,
    PinView,
    RequestView,
)
from kvmanager_service.engine_views import BlockViews, block_trace, engine_stats, pin_view, pins_view, request_views
from kvmanager_service.errors import UnavailableError
from kvmanager_service.executor_client import LoadedAdapter
from kvmanager_service.executor_life import ExecutorLife
from kvmanager_service.kv_events import KvEvents
from kvmanager_service.registry import ExecutorRegistry
from kvmanager_service.step_loop import StepLoop

_log = structlog.get_logger(__name__)

WHY_UNAVAILABLE = {
    ManagerState.NO_EXECUTOR: "one without an executor that is ready; start one, or wait until its model is loaded",
    ManagerState.DRAINING: "one that is stopping; try another, or this one after its restart",
    ManagerState.BROKEN: "one in which an invariant did not hold; look at its log and restart it",
}
"""What a client is told in every state but SERVING. The reason is the state's name."""


class EngineLoop:
    """Serves requests with whatever executor there is.

    Args:
        config: the manager's settings.
        registry: where executors make themselves known.
        on_serving: told True when requests are admitted, False when not.
        settle: see `StepLoop`.
    """

    def __init__(
        self,
        config: ManagerConfig,
        registry: ExecutorRegistry,
        on_serving: Callable[[bool], None] = lambda _: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor_timeout_s = config.executor_timeout_s
        self._on_serving = on_serving
        self._started = time.monotonic()
        self._state = ManagerState.NO_EXECUTOR
        self._steps = StepLoop(config, settle=settle)
        self._adapters = Adapters(self._steps, self._unavailable)
        self._executors = ExecutorLife(config, registry, self._steps, self._adapters, self._on_executor)
        self._task: asyncio.Task[None] | None = None
        self._give_up: asyncio.TimerHandle | None = None

    # --- what servicers ask ---------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """See `engine_api.Engine.check_open`."""
        self._require_serving()
        self._books().book.check_queue()

    def submit(self, request: NewRequest, sink: OutputSink, *branch_sinks: OutputSink) -> None:
        """See `engine_api.Engine.submit`."""
        self._require_serving()
        with self._kept_books():
            self._steps.submit(request, sink, *branch_sinks)

    def abort(self, request_id: str, tenant: str | None = None) -> None:
        """See `engine_api.Engine.abort`. The request's blocks are free when this returns."""
        self._books()
        with self._kept_books():
            self._steps.abort(request_id, tenant)

    def stats(self) -> EngineStats:
        """See `engine_api.Engine.stats`."""
        uptime_seconds = time.monotonic() - self._started
        return engine_stats(uptime_seconds, self._state, self._steps.scheduler, self._steps.kv_epoch)

    def requests(self, *, include_finished: bool) -> list[RequestView]:
        """See `engine_api.Engine.requests`."""
        if self._steps.scheduler is None:
            return []
        return request_views(self._steps.scheduler, time.monotonic(), include_finished=include_finished)

    def blocks(self) -> Sequence[BlockView]:
        """See `engine_api.Engine.blocks`."""
        return BlockViews(self._books().kv.pool)

    def pin_prefix(self, pin: PinnedPrefix) -> PinView:
        """See `engine_api.Engine.pin_prefix`."""
        self._books()
        with self._kept_books():
            return pin_view(self._steps.pin_prefix(pin))

    def unpin_prefix(self, name: str) -> None:
        """See `engine_api.Engine.unpin_prefix`."""
        self._books()
        with self._kept_books():
            self._steps.unpin_prefix(name)

    def pinned_prefixes(self) -> PinsView:
        """See `engine_api.Engine.pinned_prefixes`."""
        return PinsView() if self._steps.scheduler is None else pins_view(self._steps.scheduler.pins)

    def adapter(self, name: str) -> LoraAdapter:
        """See `engine_api.Engine.adapter`."""
        return self._steps.adapters.require(name)

    async def load_adapter(self, name: str, source: str) -> AdapterView:
        """See `engine_api.Engine.load_adapter`."""
        return self._adapter_view(await self._adapters.load(name, source))

    async def unload_adapter(self, name: str) -> None:
        """See `engine_api.Engine.unload_adapter`."""
        await self._adapters.unload(name)

    def adapters(self) -> list[AdapterView]:
        """See `engine_api.Engine.adapters`."""
        return [self._adapter_view(adapter) for adapter in self._steps.adapters.all()]

    def reset_prefix_cache(self) -> int:
        """See `engine_api.Engine.reset_prefix_cache`."""
        self._books()
        with self._kept_books():
            return self._steps.reset_prefix_cache()

    def block_trace(self, block_id: int) -> BlockTrace:
        """See `engine_api.Engine.block_trace`."""
        return block_trace(self._books().kv, block_id)

    def kv_events(self) -> KvEvents:
        """See `engine_api.Engine.kv_events`."""
        return self._steps.kv_events

    def kv_snapshot(self) -> list[tuple[int, BlockContent]]:
        """See `engine_api.Engine.kv_snapshot`."""
        return [] if self._steps.scheduler is None else self._steps.scheduler.kv.pool.committed_contents()

    async def switch_executor(self, executor_id: str) -> str:
        """See `engine_api.Engine.switch_executor`."""
        return await self._executors.switch_to(executor_id)

    def model(self) -> ModelView:
        """See `engine_api.Engine.model`."""
        if self._executors.model is None:
            raise self._unavailable()
        return self._executors.model

    def _adapter_view(self, adapter: LoadedAdapter) -> AdapterView:
        requests = self._steps.num_using(adapter.name)
        return AdapterView(adapter.name, adapter.revision, adapter.source, adapter.rank, adapter.size_bytes, requests)

    def _require_serving(self) -> None:
        if self._state is not ManagerState.SERVING:
            raise self._unavailable()

    def _books(self) -> Scheduler:
        """The scheduler. Raises UnavailableError before the first executor is ready."""
        if self._steps.scheduler is None:
            raise self._unavailable()
        return self._steps.scheduler

    def _unavailable(self) -> UnavailableError:
        # A manager that serves may be between two executors for a moment.
        state = ManagerState.NO_EXECUTOR if self._state is ManagerState.SERVING else self._state
        return UnavailableError(state.name, f"expected a manager that serves, got {WHY_UNAVAILABLE[state]}")

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to look for executors."""
        self._task = asyncio.create_task(self._run(), name="engine-loop")

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait, at most timeout_s seconds, until the accepted ones have ended."""
        self._set_state(ManagerState.DRAINING)
        _log.info("engine_draining", requests=self._steps.num_open)
        try:
            async with asyncio.timeout(timeout_s):
                await self._steps.wait_idle()
        except TimeoutError:
            _log.warning("engine_drain_timed_out", requests=self._steps.num_open, drain_timeout_s=timeout_s)

    async def stop(self) -> None:
        """Stop at once; requests that are left end with UNAVAILABLE."""
        self._set_state(ManagerState.DRAINING)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._steps.kv_events.close(self._unavailable())
        if self._state is not ManagerState.BROKEN:
            self._fail_all(self._unavailable())

    def _set_state(self, state: ManagerState) -> None:
        if state is self._state or self._state in (ManagerState.BROKEN, ManagerState.DRAINING):
            return
        self._state = state
        self._on_serving(state is ManagerState.SERVING)

    def _on_executor(self, active: bool) -> None:
        """Serve while there is an executor; without one, what waits too long for the next ends UNAVAILABLE."""
        if active:
            self._set_state(ManagerState.SERVING)
            if self._give_up is not None:
                self._give_up.cancel()
                self._give_up = None
            return
        self._set_state(ManagerState.NO_EXECUTOR)
        if self._give_up is None:
            loop = asyncio.get_running_loop()
            self._give_up = loop.call_later(self._executor_timeout_s, self._fail_all, self._unavailable())

    def _fail_all(self, error: CoreError) -> None:
        if self._steps.scheduler is None:
            return
        with self._kept_books():
            self._steps.fail_all(error)

    async def _run(self) -> None:
        try:
            await self._executors.run()
        except Exception:  # noqa: BLE001 - told to everybody
            self._break()

    @contextmanager
    def _kept_books(self) -> Iterator[None]:
        """Whatever but a CoreError comes out of the scheduler is a broken invariant, whoever called it."""
        try:
            yield
        except CoreError:
            raise
        except Exception:
            self._break()
            raise

    def _break(self) -> None:
        """An invariant does not hold: tell everybody, compute and admit nothing more."""
        if self._state is ManagerState.BROKEN:
            return
        _log.exception("engine_broken", state=self._state.value, pool=self.stats().pool)
        self._state = ManagerState.BROKEN
        self._on_serving(False)
        self._steps.end_streams(self._unavailable())
        self._steps.kv_events.close(self._unavailable())
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
