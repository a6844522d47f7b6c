"""Backends that a test holds by the hand."""

from __future__ import annotations

import threading

from executor_service.backends.base import ModelInfo, StepBatch, StepResult
from executor_service.backends.sim_backend import SimBackend, SimBackendConfig
from tests.unit.executor_shell.executor_builders import BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE

# A test that waits longer than this for another thread has found a deadlock.
DEADLOCK_S = 30.0


class HeldBackend(SimBackend):
    """A sim backend that waits in `load` and in every step until it is let go.

    `started` counts the steps that a test may wait for; `executed` are the ids of the steps that were run.
    """

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        config = SimBackendConfig(block_size=BLOCK_SIZE, sim_num_blocks=NUM_BLOCKS, sim_vocab_size=vocab_size)
        super().__init__(config)
        self.load_gate = threading.Event()
        self.step_gate = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.executed: list[int] = []
        self.threads: set[int] = set()
        self.closed = False

    def load(self) -> ModelInfo:
        assert self.load_gate.wait(DEADLOCK_S)
        return super().load()

    def execute(self, batch: StepBatch) -> StepResult:
        self.threads.add(threading.get_ident())
        self.started.release()
        assert self.step_gate.acquire(timeout=DEADLOCK_S)
        self.executed.append(batch.step_id)
        return super().execute(batch)

    def close(self) -> None:
        self.closed = True
        super().close()

    def open(self) -> HeldBackend:
        """Let everything go from now on."""
        self.load_gate.set()
        self.step_gate.release(1_000_000)
        return self


class BrokenBackend(HeldBackend):
    """Fails as told: `load_error` in load, `step_errors` by step id, `allocate_error` in initialize_kv_cache."""

    def __init__(self) -> None:
        super().__init__()
        self.open()
        self.load_error: Exception | None = None
        self.allocate_error: Exception | None = None
        self.step_errors: dict[int, Exception] = {}

    def load(self) -> ModelInfo:
        if self.load_error is not None:
            raise self.load_error
        return super().load()

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        if self.allocate_error is not None:
            raise self.allocate_error
        super().initialize_kv_cache(num_blocks, num_host_blocks)

    def execute(self, batch: StepBatch) -> StepResult:
        if batch.step_id in self.step_errors:
            raise self.step_errors[batch.step_id]
        return super().execute(batch)
