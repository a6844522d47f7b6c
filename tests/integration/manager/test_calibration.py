"""A calibration against real executors over gRPC. Time is a clock that the backend moves, so that terms are exact."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service import step_runner
from executor_service.backends import sim_backend
from executor_service.backends.base import STATE, RowFailure, StepBatch, StepResult
from executor_service.backends.sim_backend import SimBackend, SimBackendConfig
from executor_service.config import ExecutorConfig
from executor_service.server import running_executor
from kvmanager_service.calibration.fit import fit_cost_model, relative_error
from kvmanager_service.calibration.measurement import CalibrationError, Measurement, measure
from kvmanager_service.replay.cost_model import TERMS, CostModel
from tests.unit.executor.step_builder import save_tiny_model
from tests.unit.executor_shell.executor_builders import connected, sim_config

KNOWN = CostModel(7_000.0, 40.0, 90.0, 0.5, 0.02)
MAX_TOKENS = 256
MAX_SEQS = 16


class Clock:
    """Stands in for the `time` module where an executor looks at it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 1_000.0

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds

    def monotonic(self) -> float:
        with self._lock:
            return self._seconds

    def perf_counter_ns(self) -> int:
        return round(self.monotonic() * 1e9)


class PricedBackend(SimBackend):
    """Takes for a step what the terms of `KNOWN` say, counted from what an executor is sent.

    Args:
        clock: moves on.
        windows: of its groups, each of one layer.
        sizes: tokens per block of each group; none: 16.
    """

    def __init__(self, clock: Clock, windows: tuple[int, ...] = (0,), sizes: tuple[int, ...] = ()) -> None:
        super().__init__(
            SimBackendConfig(
                sim_num_blocks=600 * len(windows), max_model_len=1500, sim_windows=windows, sim_block_sizes=sizes
            )
        )
        self._clock = clock
        self._windows = windows

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        lengths = np.diff(batch.query_indptr)
        starts = batch.positions[batch.query_indptr[:-1]]
        ends = batch.positions[batch.query_indptr[1:] - 1] + 1
        reads, attended = np.zeros(len(ends)), np.zeros(len(ends))
        for window in self._windows:
            if window == STATE:
                continue
            span = window or 1 << 30
            reads += ends - np.maximum(0, starts - span + 1)
            attended += np.add.reduceat(np.minimum(batch.positions + 1, span), batch.query_indptr[:-1])
        reads, attended = reads / len(self._windows), attended / len(self._windows)
        several = lengths > 1
        micros = KNOWN.step_us + KNOWN.prefill_token_us * lengths[several].sum()
        micros += KNOWN.decode_row_us * (~several).sum() + KNOWN.context_token_us * reads.sum()
        micros += KNOWN.attention_pair_us * attended[several].sum()
        self._clock.advance(float(micros) / 1e6)
        return result


class FailingBackend(SimBackend):
    """Its first row fails in every step."""

    def __init__(self) -> None:
        super().__init__(SimBackendConfig())

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        return StepResult(result.sampled_token_ids, failures=[RowFailure(0, "NON_FINITE_LOGITS", "as told")])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(step_runner, "time", made)
    return made


async def calibrate(address: str, **values: object) -> Measurement:
    usual = {"max_num_batched_tokens": MAX_TOKENS, "max_num_seqs": MAX_SEQS, "rounds": 1, "force": False}
    return await measure(address, **(usual | values))  # type: ignore[arg-type]


def terms(model: CostModel) -> list[float]:
    return [getattr(model, name) for name in TERMS]


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ((0,), ()),
        ((0, 64, 64), ()),
        ((0, 100, STATE), ()),
        ((200,), ()),
        ((0,), (8,)),
        ((0, 64, 64), (16, 32, 32)),
        ((0, 100, STATE), (32, 16, 64)),
    ],
)
async def test_calibration_of_known_costs_gives_every_term_back(
    clock: Clock, windows: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    async with running_executor(sim_config(), PricedBackend(clock, windows, sizes)) as executor:
        found = await calibrate(executor.address)
    # An executor says whole microseconds.
    assert terms(fit_cost_model(found.steps)) == pytest.approx(terms(KNOWN), rel=2e-3)
    assert found.num_blocks == 600 * len(windows)


async def test_calibration_of_states_alone_has_no_terms_of_what_is_read(clock: Clock) -> None:
    async with running_executor(sim_config(), PricedBackend(clock, (STATE, STATE))) as executor:
        found = await calibrate(executor.address)
    expected = [*terms(KNOWN)[:3], 0.0, 0.0]
    assert terms(fit_cost_model(found.steps, has_kv=found.has_kv)) == pytest.approx(expected, rel=2e-3)


async def test_calibration_of_sim_gives_its_step_time_back(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sim backend as it is, whose sleep moves the clock."""
    monkeypatch.setattr(sim_backend, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(sim_backend, "_sleep_until", lambda moment: clock.advance(moment - clock.monotonic()))
    config = ExecutorConfig(backend="sim", port=0, sim_step_ms=6.0, sim_us_per_token=25.0, sim_num_blocks=600)
    async with running_executor(config) as executor:
        found = await calibrate(executor.address)
    model = fit_cost_model(found.steps)
    assert terms(model) == pytest.approx([6000.0, 25.0, 25.0, 0.0, 0.0], rel=2e-3, abs=1e-3)
    assert max(abs(relative_error(model, step)) for step in found.steps) < 1e-3


async def test_calibration_leaves_the_executor_without_a_cache() -> None:
    async with running_executor(sim_config()) as executor, connected(executor.address) as client:
        for _ in range(2):
            await calibrate(executor.address, max_num_batched_tokens=16, max_num_seqs=4)
            info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
            assert not info.HasField("kv_cache")


async def test_calibration_of_an_executor_with_a_cache_refuses_and_leaves_it_alone() -> None:
    async with running_executor(sim_config()) as executor, connected(executor.address) as client:
        kv_epoch = await client.handshake()
        with pytest.raises(CalibrationError, match="expected an executor without a KV cache") as caught:
            await calibrate(executor.address, max_num_batched_tokens=16)
        assert caught.value.reason == "EXECUTOR_IN_USE"
        info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.kv_cache.kv_epoch == kv_epoch
        assert (await calibrate(executor.address, max_num_batched_tokens=16, max_num_seqs=4, force=True)).steps


async def test_calibration_ends_when_a_manager_takes_the_executor_and_leaves_it_the_cache() -> None:
    """Its handshake comes in the middle; what it made must be there afterwards."""
    async with running_executor(sim_config()) as executor, connected(executor.address) as client:
        seen: list[int] = []

        def on_step(done: int, total: int) -> None:
            seen.append(done)
            if done == 3:
                executor.session.profile(32, 2)
                seen.append(executor.session.initialize(40).limits.kv_epoch)

        with pytest.raises(CalibrationError, match="a manager has taken the executor") as caught:
            await calibrate(executor.address, max_num_batched_tokens=16, max_num_seqs=4, on_step=on_step)
        assert (caught.value.reason, seen[:3]) == ("ABORTED", [1, 2, 3])
        info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info.kv_cache.kv_epoch == seen[3]


async def test_calibration_of_a_row_that_fails_is_an_error_that_names_the_step() -> None:
    async with running_executor(sim_config(), FailingBackend()) as executor, connected(executor.address) as client:
        with pytest.raises(CalibrationError, match=r"1 row of 19 tokens to length 19: row 0 .* NON_FINITE_LOGITS"):
            await calibrate(executor.address)
        info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert not info.HasField("kv_cache")


async def test_calibration_of_nobody_is_unavailable() -> None:
    with pytest.raises(CalibrationError) as caught:
        await calibrate("127.0.0.1:1")
    assert caught.value.is_unavailable


@pytest.mark.parametrize(("family", "num_groups"), [("llama", 1), ("gemma3", 2), ("bamba", 2)])
async def test_calibration_of_a_model_times_every_step(tmp_path: Path, family: str, num_groups: int) -> None:
    """The torch backend: sizes of every shape are accepted, nothing fails, and what is fitted is a cost model."""
    folder = save_tiny_model(tmp_path, family)
    config = ExecutorConfig(
        backend="torch", model=str(folder), device="cpu", port=0, block_size=8, num_blocks_override=300,
        memory_limit=8 << 30,
    )  # fmt: skip
    async with running_executor(config) as executor:
        found = await calibrate(executor.address, max_num_batched_tokens=128, max_num_seqs=8)
    assert found.info.backend == "torch"
    assert len(found.info.kv_groups) >= num_groups
    assert len(found.steps) > 10
    model = fit_cost_model(found.steps)
    assert min(terms(model)) >= 0
    assert model.microseconds(found.steps[0].counts) > 0
