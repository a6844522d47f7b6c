"""The life of the executor in use: brought up, used, lost.

Station: started by `engine_loop`; calls `executor_race` for who is next, `executor_checks` for who will do, `StepLoop`
for the steps. It knows no request.

    registry ─▶ race of those that connect, prepare, check ─▶ adapters ─▶ steps ─▶ lost? ─▶ race again
                                                                          └─ relieved by order? ─▶ the ordered one
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from kvmanager_service.adapters import Adapters, settle_adapters
from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.scheduler_config import RECOMPUTE
from kvmanager_service.engine_api import ModelView
from kvmanager_service.errors import ExecutorSwitchError, UnavailableError
from kvmanager_service.executor_checks import (
    ExecutorUnfitError,
    load_model,
    require_geometry,
    require_length,
    require_model,
)
from kvmanager_service.executor_client import (
    ExecutorConnection,
    ExecutorGoneError,
    ExecutorLostError,
    LoadedAdapter,
    ReadyExecutor,
)
from kvmanager_service.executor_groups import read_groups, shortest_hit
from kvmanager_service.executor_race import LEASE_OVER, ExecutorRace, PreparedExecutor
from kvmanager_service.executor_switch import ExecutorSwitch, SwitchOrder
from kvmanager_service.racing import first_of
from kvmanager_service.registry import ExecutorRegistry, ExecutorState, RegisteredExecutor
from kvmanager_service.step_loop import StepLoop
from kvmanager_service.step_watchdog import StepOverdueError, watch_steps

_log = structlog.get_logger(__name__)


class _RelievedError(Exception):
    """The executor in use is to go on no more: another one, ordered by an operator, is ready."""


class ExecutorLife:
    """Uses one executor after another.

    Args:
        config: the manager's settings.
        registry: where executors make themselves known.
        steps: what runs on an executor.
        adapters: is lent the connection to the executor in use.
        on_active: told True when an executor takes steps, False when it is lost.

    Attributes:
        model: what is served; None before the first executor is ready.
    """

    def __init__(
        self,
        config: ManagerConfig,
        registry: ExecutorRegistry,
        steps: StepLoop,
        adapters: Adapters,
        on_active: Callable[[bool], None],
    ) -> None:
        self.model: ModelView | None = None
        self._config = config
        self._registry = registry
        self._steps = steps
        self._adapters = adapters
        self._on_active = on_active
        self._race = ExecutorRace(registry, self._bring_up)
        self._switch = ExecutorSwitch()
        self._active: RegisteredExecutor | None = None

    async def run(self) -> NoReturn:
        """Use executors until cancelled. Raises what is nobody's fault but ours."""
        try:
            while True:
                prepared = self._switch.take_prepared() or await self._race.winner()
                try:
                    await self._use(prepared)
                except _RelievedError:
                    self._relieve(prepared.executor)
                except ExecutorLostError as lost:
                    self._lose(prepared.executor, lost)
        finally:
            await self._close_ordered()
            self._switch.give_up()

    async def switch_to(self, executor_id: str) -> str:
        """Move on to another executor; returns once it is active.

        Returns:
            The id of the executor that was active before.

        Raises:
            UnknownExecutorError: none of that id is registered.
            ExecutorRejectedError: it cannot be used.
            ExecutorSwitchError: it is active, or was not ready; or another order is carried out.
            UnavailableError: there is no active executor, or it was lost meanwhile.
        """
        executor = self._registry.find(executor_id)
        if executor is self._active:
            message = f"executor_id: expected one that stands by, got {executor_id}, which is active"
            raise ExecutorSwitchError("EXECUTOR_ALREADY_ACTIVE", message, executor_id=executor_id)
        self._switch.require_none()
        if self._active is None:
            message = "expected an active executor to move on from, got none; the manager takes the first that is ready"
            raise UnavailableError("NO_EXECUTOR", message)
        previous = self._active.executor_id
        await self._switch.order(executor)
        return previous

    async def _bring_up(self, executor: RegisteredExecutor, on_progress: Callable[[], None]) -> PreparedExecutor:
        """See `executor_race.BringUp`."""
        connection = ExecutorConnection(executor.address)
        try:
            ready = await connection.prepare(
                self._config.max_num_batched_tokens,
                self._config.max_num_seqs,
                self._steps.kv_epoch,
                with_tokenizer=self.model is None,
                with_host_blocks=self._config.preemption_mode != RECOMPUTE,
                on_progress=on_progress,
            )
            return PreparedExecutor(executor, connection, ready, await self._check(executor, ready))
        except BaseException:
            await connection.close()
            raise

    async def _check(self, executor: RegisteredExecutor, ready: ReadyExecutor) -> ModelView:
        """Return the model to serve with this executor; reject one that cannot be used."""
        try:
            require_model(self.model, ready.info)
            require_geometry(ready)
            require_length(self.model, ready, self._steps.longest_chunk)
            model = self.model or await load_model(ready.info)
        except ExecutorUnfitError as unfit:
            self._reject(executor, unfit)
            raise ExecutorLostError(str(unfit)) from unfit
        self._warn_of_no_hits(executor, ready, model.max_model_len)
        return model

    def _warn_of_no_hits(self, executor: RegisteredExecutor, ready: ReadyExecutor, max_model_len: int) -> None:
        """Say so where no prefix can be found again: a hit is whole blocks of all groups, and leaves a token over."""
        tokens = shortest_hit(read_groups(ready.info.kv_groups, ready.kv_cache.block_size))
        if self._config.enable_prefix_caching and tokens >= max_model_len:
            _log.warning(
                "prefix_hits_impossible",
                executor_id=executor.executor_id,
                shortest_hit=tokens,
                max_model_len=max_model_len,
                advice="start the executor with block sizes that are multiples of each other, and below max_model_len",
            )

    async def _use(self, prepared: PreparedExecutor) -> None:
        """Run steps on an executor until it is lost. Raises ExecutorLostError then."""
        # Whatever the work waits for, be it a write to an executor that reads no more, these end it.
        guards = [self._end_of_lease(prepared.executor), self._ordered_is_ready()]
        if self._config.step_timeout_s:
            guards.append(watch_steps(lambda: self._steps.oldest_step, self._config.step_timeout_s))
        try:
            await first_of(self._work(prepared), *guards)
        finally:
            await prepared.connection.close()

    async def _end_of_lease(self, executor: RegisteredExecutor) -> NoReturn:
        while any(candidate is executor for candidate in self._registry.candidates()):
            await self._registry.wait_changed()
        raise ExecutorGoneError(LEASE_OVER)

    async def _work(self, prepared: PreparedExecutor) -> NoReturn:
        executor = prepared.executor
        held = await self._settled_adapters(prepared)
        self.model = prepared.model
        self._steps.fit(prepared.ready)
        self._steps.adopt_adapters(held)
        stream = prepared.connection.open_stream(self._steps.wake, self._steps.kv_epoch)
        try:
            await stream.connected()  # else the first step would be lost, and blamed for it
            self._registry.set_state(executor.executor_id, ExecutorState.ACTIVE)
            self._active = executor
            self._adapters.lend(prepared.connection, prepared.ready.info.max_adapters)
            self._on_active(True)
            self._switch.succeed(executor)
            _log.info("executor_active", executor_id=executor.executor_id, address=executor.address)
            await first_of(self._steps.run(stream), self._check_others(executor))
        finally:
            self._adapters.take_back()
            await stream.close()

    async def _ordered_is_ready(self) -> NoReturn:
        """Bring up what operators order, beside the executor in use. Raises _RelievedError when one is ready."""
        while True:
            order = await self._switch.next_order()
            try:
                await first_of(self._prepare(order), self._end_of_lease(order.executor))
            except ExecutorLostError as lost:
                await self._close_ordered()
                self._switch.fail(str(lost))
                continue
            raise _RelievedError

    async def _prepare(self, order: SwitchOrder) -> None:
        """Bring up the executor of an order; it is the order's from the moment that it is ready."""
        executor, error = order.executor, ""
        self._registry.set_state(executor.executor_id, ExecutorState.CONNECTING)
        try:
            prepared = await self._bring_up(executor, lambda: None)
            await self._require_adapters(prepared)
            order.prepared = prepared
        except ExecutorLostError as lost:
            error = str(lost)
            raise
        except Exception as fault:
            # A spare's fault must not end the active executor's steps.
            _log.exception("executor_bring_up_failed", executor_id=executor.executor_id, address=executor.address)
            error = f"its bring-up failed: {type(fault).__name__}: {fault}"
            raise ExecutorLostError(error) from fault
        finally:
            if order.prepared is None:
                self._registry.set_state(executor.executor_id, ExecutorState.STANDBY, error)

    async def _require_adapters(self, prepared: PreparedExecutor) -> None:
        """Have an executor load what requests may name before it relieves another. Raises ExecutorLostError."""
        try:
            held = {adapter.name for adapter in await self._settled_adapters(prepared)}
        except BaseException:
            await prepared.connection.close()
            raise
        lacking = [adapter.name for adapter in self._steps.adapters.all() if adapter.name not in held]
        if lacking:
            await prepared.connection.close()
            raise ExecutorLostError(
                f"expected it to hold the adapters in use, but it cannot load {lacking[0]!r}; the manager's log says"
                " why (adapter_lost)"
            )

    async def _close_ordered(self) -> None:
        """Close an executor that was brought up by order and is not used."""
        prepared = self._switch.take_prepared()
        if prepared is not None:
            await prepared.connection.close()
            self._registry.set_state(prepared.executor.executor_id, ExecutorState.STANDBY)

    async def _settled_adapters(self, prepared: PreparedExecutor) -> list[LoadedAdapter]:
        """Have an executor hold the adapters that requests may name; the first one's are those."""
        connection, max_adapters = prepared.connection, prepared.ready.info.max_adapters
        if self.model is None:
            return await settle_adapters(connection, max_adapters, None)
        while True:
            wanted = self._steps.adapters.all()
            held = await settle_adapters(connection, max_adapters, wanted)
            if wanted == self._steps.adapters.all():  # none was unloaded meanwhile
                return held

    async def _check_others(self, active: RegisteredExecutor) -> NoReturn:
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
            require_model(self.model, await connection.model_info())
        except ExecutorUnfitError as unfit:
            self._reject(executor, unfit)
        except ExecutorLostError as lost:
            self._registry.set_state(executor.executor_id, ExecutorState.STANDBY, error=str(lost))
        except Exception as error:  # noqa: BLE001 - a spare's fault must not end the active executor's steps
            _log.exception("executor_check_failed", executor_id=executor.executor_id, address=executor.address)
            self._registry.set_state(
                executor.executor_id, ExecutorState.STANDBY, error=f"its check failed: {type(error).__name__}: {error}"
            )
        finally:
            await connection.close()

    def _reject(self, executor: RegisteredExecutor, unfit: ExecutorUnfitError) -> None:
        self._registry.reject(executor.executor_id, unfit.reason, str(unfit))
        _log.warning("executor_rejected", executor_id=executor.executor_id, address=executor.address, reason=str(unfit))

    def _relieve(self, executor: RegisteredExecutor) -> None:
        """The executor in use stands by from now on: schedule everything anew. Requests are admitted all the time."""
        self._active = None
        self._steps.lose(blame=False)
        self._registry.set_state(executor.executor_id, ExecutorState.STANDBY)
        _log.info("executor_relieved", executor_id=executor.executor_id, address=executor.address)

    def _lose(self, executor: RegisteredExecutor, lost: ExecutorLostError) -> None:
        """The executor in use can not be used any more: schedule everything anew."""
        self._active = None
        self._switch.note_loss(executor, str(lost))
        self._on_active(False)
        got_result = self._steps.lose(blame=not isinstance(lost, ExecutorGoneError))
        self._race.note_loss(executor, lost, hangs=isinstance(lost, StepOverdueError), again=not got_result)
