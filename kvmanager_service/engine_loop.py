"""The loop that knows both the scheduler and an executor.

Station: servicers call it (`engine_api.Engine`), it calls `Scheduler` and `ExecutorConnection`. Everything here runs on
one asyncio loop, so nothing needs a lock.

    registry ─▶ connect ─▶ steps: update ▸ publish ▸ schedule ▸ execute ─▶ lost? ─▶ reschedule, connect again

Two steps are out at most: one computing, one queued behind it, so that an executor never waits for the wire.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import structlog
from kvplane.executor.v1.executor_service_pb2 import (
    KV_GROUP_TYPE_FULL_ATTENTION,
    ExecuteResponse,
    GetModelInfoResponse,
)

from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.errors import CoreError
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import FinishReason, NewRequest, RequestOutput
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import BadResultError
from kvmanager_service.engine_api import BlockView, EngineStats, ManagerState, ModelView, OutputSink, RequestView
from kvmanager_service.engine_views import BlockViews, engine_stats, request_views
from kvmanager_service.errors import UnavailableError
from kvmanager_service.executor_client import ExecutorConnection, ExecutorLostError, ReadyExecutor, StepStream
from kvmanager_service.registry import ExecutorRegistry, ExecutorState, RegisteredExecutor
from kvmanager_service.step_message import build_execute_request, read_execute_response
from kvmanager_service.text_model import TextModel

_log = structlog.get_logger(__name__)

CONNECT_BACKOFF_S = (0.1, 0.2, 0.5, 1.0)
"""Waits between attempts to bring up an executor; the last repeats."""


class EngineLoop:
    """Owns the scheduler and the executor it uses.

    Args:
        config: the manager's settings.
        registry: where executors make themselves known.
        on_serving: told True when requests are admitted, False when not.
    """

    def __init__(
        self, config: ManagerConfig, registry: ExecutorRegistry, on_serving: Callable[[bool], None] = lambda _: None
    ) -> None:
        self._config = config
        self._registry = registry
        self._on_serving = on_serving
        self._started = time.monotonic()
        self._state = ManagerState.NO_EXECUTOR
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._sinks: dict[str, OutputSink] = {}
        self._scheduler: Scheduler | None = None
        self._model: ModelView | None = None
        self._kv_epoch = 0
        self._task: asyncio.Task[None] | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._last_lost = ""
        self._failures = 0

    # --- what servicers ask ---------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """See `engine_api.Engine.check_open`."""
        self._open_scheduler().book.check_queue()

    def submit(self, request: NewRequest, sink: OutputSink) -> None:
        """See `engine_api.Engine.submit`."""
        with self._kept_books():
            self._open_scheduler().add_request(request)
        self._sinks[request.request_id] = sink
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """See `engine_api.Engine.abort`. The request's blocks are free when this returns."""
        if self._scheduler is None:
            raise self._unavailable()
        with self._kept_books():
            self._scheduler.abort(request_id)
            self._publish()

    def stats(self) -> EngineStats:
        """See `engine_api.Engine.stats`."""
        return engine_stats(time.monotonic() - self._started, self._state, self._scheduler, self._kv_epoch)

    def requests(self, *, include_finished: bool) -> list[RequestView]:
        """See `engine_api.Engine.requests`."""
        if self._scheduler is None:
            return []
        return request_views(self._scheduler, time.monotonic(), include_finished=include_finished)

    def blocks(self) -> Sequence[BlockView]:
        """See `engine_api.Engine.blocks`."""
        if self._scheduler is None:
            raise self._unavailable()
        return BlockViews(self._scheduler.kv.pool)

    def reset_prefix_cache(self) -> int:
        """See `engine_api.Engine.reset_prefix_cache`."""
        if self._scheduler is None:
            raise self._unavailable()
        self._wake.set()  # the executor is to forget its tags, too
        with self._kept_books():
            return self._scheduler.reset_prefix_cache()

    def model(self) -> ModelView:
        """See `engine_api.Engine.model`."""
        if self._model is None:
            raise self._unavailable()
        return self._model

    def _open_scheduler(self) -> Scheduler:
        if self._state is not ManagerState.SERVING or self._scheduler is None:
            raise self._unavailable()
        return self._scheduler

    def _unavailable(self) -> UnavailableError:
        got = {
            ManagerState.NO_EXECUTOR: ("NO_EXECUTOR", "none is ready; start one, or wait until its model is loaded"),
            ManagerState.DRAINING: ("DRAINING", "the manager is stopping; try another, or this one after its restart"),
            ManagerState.BROKEN: ("BROKEN", "an invariant did not hold; look at the manager's log and restart it"),
        }.get(self._state, ("STARTING", "the manager is starting; try again"))
        return UnavailableError(got[0], f"expected an executor that serves, got: {got[1]}")

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to look for executors."""
        self._task = asyncio.create_task(self._run(), name="engine-loop")

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait, at most timeout_s seconds, until the accepted ones have ended."""
        self._set_state(ManagerState.DRAINING)
        _log.info("engine_draining", requests=len(self._sinks))
        try:
            async with asyncio.timeout(timeout_s):
                while self._sinks:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            _log.warning("engine_drain_timed_out", requests=len(self._sinks), drain_timeout_s=timeout_s)

    async def stop(self) -> None:
        """Stop at once; requests that are left end with UNAVAILABLE."""
        self._set_state(ManagerState.DRAINING)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._state is not ManagerState.BROKEN:
            self._fail_all(self._unavailable())

    def _set_state(self, state: ManagerState) -> None:
        if state is self._state or self._state in (ManagerState.BROKEN, ManagerState.DRAINING):
            return
        self._state = state
        self._on_serving(state is ManagerState.SERVING)

    async def _run(self) -> None:
        try:
            while True:
                executor = await self._next_executor()
                try:
                    await self._use(executor)
                except ExecutorLostError as lost:
                    self._lose(executor, str(lost))
                    await asyncio.sleep(CONNECT_BACKOFF_S[min(self._failures, len(CONNECT_BACKOFF_S)) - 1])
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
        self._end_streams(self._unavailable())
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    # --- executors ------------------------------------------------------------------------------------------------

    async def _next_executor(self) -> RegisteredExecutor:
        """Wait for an executor; the one that was lost last comes last."""
        while not (candidates := self._registry.candidates()):
            await self._registry.wait_changed()
        others = [executor for executor in candidates if executor.executor_id != self._last_lost]
        return (others or candidates)[0]

    async def _use(self, executor: RegisteredExecutor) -> None:
        """Run steps on one executor until it is lost. Raises ExecutorLostError then."""
        connection = ExecutorConnection(executor.address)
        work = asyncio.create_task(self._work(executor, connection), name="executor-work")
        lease = asyncio.create_task(self._wait_lease_over(executor), name="executor-lease")
        try:
            # Whatever the work waits for, be it a write to an executor that reads no more, it ends with the lease.
            await asyncio.wait((work, lease), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ExecutorLostError("its lease ran out: it did not register again in time")
            work.result()
        finally:
            for task in (work, lease):
                task.cancel()
            await asyncio.gather(work, lease, return_exceptions=True)
            await connection.close()

    async def _work(self, executor: RegisteredExecutor, connection: ExecutorConnection) -> None:
        self._registry.set_state(executor.executor_id, ExecutorState.CONNECTING)
        ready = await connection.prepare(
            self._config.max_num_batched_tokens,
            self._config.max_num_seqs,
            self._kv_epoch,
            with_tokenizer=self._model is None,
        )
        await self._take_over(executor, ready)
        stream = connection.open_stream(self._wake.set)
        others = asyncio.create_task(self._check_others(executor), name="executor-check")
        try:
            self._serve_with(executor)
            await self._run_steps(stream)
        finally:
            others.cancel()
            await stream.close()

    async def _take_over(self, executor: RegisteredExecutor, ready: ReadyExecutor) -> None:
        """Make the books fit the executor's cache."""
        info, kv_cache = ready.info, ready.kv_cache
        self._require_model(executor, info)
        self._require_geometry(executor, ready)
        self._require_length(executor, ready)
        if self._model is None:
            self._model = await self._load_model(executor, info)
        if ready.tagged is None:
            return
        kv = KVCacheManager(kv_cache.num_blocks, kv_cache.block_size, enable_caching=self._config.enable_prefix_caching)
        adopted = kv.adopt(ready.tagged)
        if self._scheduler is None:
            self._scheduler = Scheduler(_scheduler_config(self._config), kv)
        else:
            self._scheduler.replace_cache(kv)
        self._kv_epoch = kv_cache.kv_epoch
        self._publish()
        _settle_heap()
        _log.info(
            "kv_cache_ready", num_blocks=kv_cache.num_blocks, block_size=kv_cache.block_size, adopted_blocks=adopted
        )

    def _serve_with(self, executor: RegisteredExecutor) -> None:
        self._registry.set_state(executor.executor_id, ExecutorState.ACTIVE)
        self._set_state(ManagerState.SERVING)
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        _log.info("executor_active", executor_id=executor.executor_id, address=executor.address)

    def _lose(self, executor: RegisteredExecutor, reason: str) -> None:
        """An executor can not be used: schedule everything anew; what waits too long for another ends UNAVAILABLE."""
        _log.warning("executor_lost", executor_id=executor.executor_id, address=executor.address, reason=reason)
        self._registry.set_state(executor.executor_id, ExecutorState.STANDBY, error=reason)
        self._set_state(ManagerState.NO_EXECUTOR)
        self._failures = self._failures + 1 if executor.executor_id == self._last_lost else 1
        self._last_lost = executor.executor_id
        if self._scheduler is not None:
            self._scheduler.lose_steps()
            self._publish()
        if self._give_up is None:
            loop = asyncio.get_running_loop()
            self._give_up = loop.call_later(self._config.executor_timeout_s, self._fail_all, self._unavailable())

    async def _wait_lease_over(self, executor: RegisteredExecutor) -> None:
        while any(candidate is executor for candidate in self._registry.candidates()):
            await self._registry.wait_changed()

    async def _check_others(self, active: RegisteredExecutor) -> None:
        """Reject standby executors of another model as they come, not only when they are needed."""
        checked: list[RegisteredExecutor] = [active]
        while True:
            candidates = self._registry.candidates()
            checked = [executor for executor in checked if any(executor is candidate for candidate in candidates)]
            fresh = [executor for executor in candidates if not any(executor is known for known in checked)]
            if not fresh:
                await self._registry.wait_changed()
                continue
            checked += fresh
            await asyncio.gather(*(self._check_model(executor) for executor in fresh))

    async def _check_model(self, executor: RegisteredExecutor) -> None:
        """Reject an executor of another model. One that does not answer now is found out when it is needed."""
        connection = ExecutorConnection(executor.address)
        try:
            self._require_model(executor, await connection.model_info())
        except ExecutorLostError as lost:
            self._registry.set_state(executor.executor_id, ExecutorState.STANDBY, error=str(lost))
        finally:
            await connection.close()

    def _require_model(self, executor: RegisteredExecutor, info: GetModelInfoResponse) -> None:
        """Raise ExecutorLostError, and reject the executor, unless it serves the manager's model."""
        if self._model is not None and info.model_fingerprint != self._model.fingerprint:
            self._reject(
                executor,
                f"expected an executor that serves {self._model.name!r} ({self._model.fingerprint}), got other weights:"
                f" {info.model_name!r} ({info.model_fingerprint}); start it with the same model",
            )

    def _require_geometry(self, executor: RegisteredExecutor, ready: ReadyExecutor) -> None:
        """As above, unless there can be books on its cache."""
        kv_cache, groups = ready.kv_cache, [group.type for group in ready.info.kv_groups]
        if groups != [KV_GROUP_TYPE_FULL_ATTENTION] or kv_cache.block_size < 1 or kv_cache.num_blocks < 2:
            self._reject(
                executor,
                "kv_cache: expected one group of full attention, block_size of at least 1 and num_blocks of at least 2,"
                f" got groups of types {groups}, {kv_cache.block_size} and {kv_cache.num_blocks}; serve a model with"
                " full attention in every layer",
            )

    def _require_length(self, executor: RegisteredExecutor, ready: ReadyExecutor) -> None:
        """As above, unless it can compute every sequence that fits both the model, as admission knows it, and the pool.

        It would fail the steps of longer ones, and with them of all that share those steps.
        """
        if self._model is None:
            return
        longest = min(self._model.max_model_len, (ready.kv_cache.num_blocks - 1) * ready.kv_cache.block_size)
        if ready.info.max_model_len < longest:
            self._reject(
                executor,
                f"max_model_len: expected at least {longest}, which requests were admitted for, got"
                f" {ready.info.max_model_len}; start the executor with as much, or the manager anew",
            )

    async def _load_model(self, executor: RegisteredExecutor, info: GetModelInfoResponse) -> ModelView:
        """Make the model from what an executor says of it, and reject the executor when that cannot be done."""
        try:
            return await _model_view(info)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with its files is wrong with that executor
            self._reject(
                executor,
                f"tokenizer_files: expected a tokenizer and a chat template that can be read, got"
                f" {type(error).__name__}: {error}; mend the model's files",
            )

    def _reject(self, executor: RegisteredExecutor, message: str) -> NoReturn:
        self._registry.reject(executor.executor_id, message)
        _log.warning("executor_rejected", executor_id=executor.executor_id, address=executor.address, reason=message)
        raise ExecutorLostError(message)

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _run_steps(self, stream: StepStream) -> None:
        """Keep the executor busy until it is lost."""
        assert self._scheduler is not None
        scheduler = self._scheduler
        while True:
            self._wake.clear()
            for response in stream.take_results():
                self._update(response)
            self._publish()
            while (step := scheduler.schedule()) is not None:
                message = build_execute_request(step, self._kv_epoch, scheduler.kv.block_size)
                self._publish()  # while the step is sent, the id of who ended in it may be taken anew
                await stream.send(message)
            self._publish()
            await self._wake.wait()

    def _update(self, response: ExecuteResponse) -> None:
        assert self._scheduler is not None
        if response.kv_epoch != self._kv_epoch:
            raise ExecutorLostError(f"expected a result of kv_epoch {self._kv_epoch}, got {response.kv_epoch}")
        try:
            self._scheduler.update(read_execute_response(response))
        except BadResultError as error:
            raise ExecutorLostError(str(error)) from error
        self._failures = 0

    def _publish(self) -> None:
        """Hand outputs to their sinks; a sink that finds a stop string ends its request."""
        assert self._scheduler is not None
        for output in self._scheduler.take_outputs():
            sink = self._sinks.get(output.request_id)
            if sink is None:
                continue  # a stop string ended it, and a result was already on its way
            match = sink.push(output)
            if match is not None:
                self._scheduler.finish(output.request_id)
            if match is not None or output.finish_reason is not None:
                del self._sinks[output.request_id]
        if not self._sinks:
            self._idle.set()

    def _fail_all(self, error: CoreError) -> None:
        if self._scheduler is None:
            return
        with self._kept_books():
            for request in list(self._scheduler.iter_requests()):
                self._scheduler.fail(request.request_id, error)
            self._publish()

    def _end_streams(self, error: CoreError) -> None:
        """Tell every client an error without asking the scheduler, which may be what is broken."""
        for request_id, sink in self._sinks.items():
            sink.push(RequestOutput(request_id, [], [], finish_reason=FinishReason.ERROR, error=error))
        self._sinks.clear()
        self._idle.set()


def _settle_heap() -> None:
    """Keep the garbage collector off the pool: it stays, and walking its blocks would hold up steps."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _scheduler_config(config: ManagerConfig) -> SchedulerConfig:
    return SchedulerConfig(
        policy=config.policy,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        watermark=config.watermark,
        max_outstanding=2 if config.queue_ahead else 1,
    )


async def _model_view(info: GetModelInfoResponse) -> ModelView:
    files = {file.name: file.content for file in info.tokenizer_files}
    return ModelView(
        name=info.model_name,
        fingerprint=info.model_fingerprint,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=tuple(info.eos_token_ids),
        max_logprobs=info.max_logprobs,
        dtype=info.dtype,
        text=await asyncio.to_thread(TextModel.from_files, files),
    )
