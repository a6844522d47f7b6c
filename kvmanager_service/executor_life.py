"""The life of the executor in use: chosen, brought up, used, lost.

Station: started by `engine_loop`; calls the registry for who there is, `executor_checks` for who will do, `StepLoop`
for the steps. It knows no request.

    registry ─▶ choose ─▶ connect, prepare, check ─▶ steps ─▶ lost? ─▶ back off, choose again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from kvmanager_service.config import ManagerConfig
from kvmanager_service.engine_api import ModelView
from kvmanager_service.executor_checks import (
    ExecutorUnfitError,
    load_model,
    require_geometry,
    require_length,
    require_model,
)
from kvmanager_service.executor_client import ExecutorConnection, ExecutorLostError, ReadyExecutor
from kvmanager_service.racing import first_of
from kvmanager_service.registry import ExecutorRegistry, ExecutorState, RegisteredExecutor
from kvmanager_service.step_loop import StepLoop
from kvmanager_service.step_watchdog import StepOverdueError, watch_steps

_log = structlog.get_logger(__name__)

BACKOFF_S = (0.1, 0.2, 0.5, 1.0)
"""Waits between attempts to use an executor; the last repeats."""


class ExecutorLife:
    """Uses one executor after another.

    Args:
        config: the manager's settings.
        registry: where executors make themselves known.
        steps: what runs on an executor.
        on_active: told True when an executor takes steps, False when it is lost.

    Attributes:
        model: what is served; None before the first executor is ready.
    """

    def __init__(
        self, config: ManagerConfig, registry: ExecutorRegistry, steps: StepLoop, on_active: Callable[[bool], None]
    ) -> None:
        self.model: ModelView | None = None
        self._config = config
        self._registry = registry
        self._steps = steps
        self._on_active = on_active
        self._last_lost = ""
        self._failures = 0

    async def run(self) -> NoReturn:
        """Use executors until cancelled. Raises what is nobody's fault but ours."""
        while True:
            executor = await self._choose()
            try:
                await self._use(executor)
            except ExecutorLostError as lost:
                self._lose(executor, lost)
                await asyncio.sleep(BACKOFF_S[min(self._failures, len(BACKOFF_S)) - 1])

    async def _choose(self) -> RegisteredExecutor:
        """Wait for an executor; take the best there is."""
        while not (candidates := self._registry.candidates()):
            await self._registry.wait_changed()
        return candidates[0]

    async def _use(self, executor: RegisteredExecutor) -> None:
        """Run steps on one executor until it is lost. Raises ExecutorLostError then."""
        connection = ExecutorConnection(executor.address)
        # Whatever the work waits for, be it a write to an executor that reads no more, these end it.
        guards = [self._end_of_lease(executor)]
        if self._config.step_timeout_s:
            guards.append(watch_steps(lambda: self._steps.oldest_step, self._config.step_timeout_s))
        try:
            await first_of(self._work(executor, connection), *guards)
        finally:
            await connection.close()

    async def _end_of_lease(self, executor: RegisteredExecutor) -> NoReturn:
        while any(candidate is executor for candidate in self._registry.candidates()):
            await self._registry.wait_changed()
        raise ExecutorLostError("its lease ran out: it did not register again in time")

    async def _work(self, executor: RegisteredExecutor, connection: ExecutorConnection) -> NoReturn:
        self._registry.set_state(executor.executor_id, ExecutorState.CONNECTING)
        prepare = connection.prepare(
            self._config.max_num_batched_tokens,
            self._config.max_num_seqs,
            self._steps.kv_epoch,
            with_tokenizer=self.model is None,
        )
        ready = await first_of(prepare, self._better_one(executor))
        await self._check(executor, ready)
        self._steps.fit(ready)
        stream = connection.open_stream(self._steps.wake)
        try:
            self._registry.set_state(executor.executor_id, ExecutorState.ACTIVE)
            self._on_active(True)
            _log.info("executor_active", executor_id=executor.executor_id, address=executor.address)
            await first_of(self._steps.run(stream), self._check_others(executor))
        finally:
            await stream.close()

    async def _better_one(self, executor: RegisteredExecutor) -> NoReturn:
        """Raise ExecutorLostError when a better executor comes while one that was lost is brought up once more.

        A profile run is given a quarter of an hour, and one that was lost may have gone for good. Why it was lost is
        still all that there is to say of it.
        """
        while await self._choose() is executor:
            await self._registry.wait_changed()
        raise ExecutorLostError(executor.last_error)

    async def _check(self, executor: RegisteredExecutor, ready: ReadyExecutor) -> None:
        """Reject an executor that cannot be used; the model of the first that can is the one that is served."""
        try:
            require_model(self.model, ready.info)
            require_geometry(ready)
            require_length(self.model, ready)
            if self.model is None:
                self.model = await load_model(ready.info)
        except ExecutorUnfitError as unfit:
            self._reject(executor, unfit)
            raise ExecutorLostError(str(unfit)) from unfit

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

    def _lose(self, executor: RegisteredExecutor, lost: ExecutorLostError) -> None:
        """An executor can not be used: schedule everything anew."""
        _log.warning("executor_lost", executor_id=executor.executor_id, address=executor.address, reason=str(lost))
        self._registry.lose(executor.executor_id, str(lost), hangs=isinstance(lost, StepOverdueError))
        is_again = executor.executor_id == self._last_lost
        self._last_lost = executor.executor_id
        self._on_active(False)
        got_result = self._steps.lose()
        self._failures = self._failures + 1 if is_again and not got_result else 1
