"""Steps on a stream that a test holds the other end of; what the loop tells the core of time; and its heap."""

from __future__ import annotations

import asyncio
import gc
from typing import cast

import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.retention import RetentionRange
from kvmanager_service.executor_client import ReadyExecutor, StepStream
from kvmanager_service.heap import settle_heap
from kvmanager_service.step_loop import StepLoop
from tests.integration.manager.fake_engine import until
from tests.integration.manager.scripted_executor import Sink, answer, model_info
from tests.unit.core.builders import make_new


class AnsweringStream:
    """Answers each step at once."""

    def __init__(self, steps: StepLoop) -> None:
        self._steps = steps
        self._results: list[pb.ExecuteResponse] = []

    async def send(self, message: pb.ExecuteRequest) -> None:
        self._results.append(answer(message))
        self._steps.wake()

    def take_results(self) -> list[pb.ExecuteResponse]:
        results, self._results = self._results, []
        return results


@pytest.mark.parametrize(("waited", "num_cached"), [(9.0, 8), (10.0, 0)])
async def test_step_loop_durations_run_by_its_clock(waited: float, num_cached: int) -> None:
    """Two prompts are cached and there comes one that leaves room for one of them: which is for the clock to say."""
    now = 1_000.0
    steps = StepLoop(ManagerConfig(eviction_policy="priority"), lambda: now)
    steps.fit(ReadyExecutor(model_info(), pb.KvCacheState(kv_epoch=1, num_blocks=8, block_size=4), []))
    running = asyncio.create_task(steps.run(cast(StepStream, AnsweringStream(steps))))

    async def cached_of(name: str, prompt: range, *retention: RetentionRange) -> int:
        sink = Sink()
        steps.submit(make_new(name, prompt, max_tokens=1, retention=retention), sink)
        await until(lambda: sink.last is not None)
        assert sink.last is not None
        return sink.last.num_cached_tokens

    await cached_of("kept", range(9), RetentionRange(0, 9, 90, 10.0))
    await cached_of("plain", range(100, 109))
    now += waited
    await cached_of("large", range(200, 217))  # five blocks of seven, of which three hold nothing
    assert await cached_of("again", range(9)) == num_cached
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_step_loop_settles_whenever_there_is_another_pool() -> None:
    settled: list[int] = []
    steps = StepLoop(ManagerConfig(), settle=lambda: settled.append(steps.kv_epoch))
    for kv_epoch in (1, 2):
        steps.fit(ReadyExecutor(model_info(), pb.KvCacheState(kv_epoch=kv_epoch, num_blocks=8, block_size=4), []))
    assert settled == [1, 2]


def test_settle_heap_a_cache_that_fills_brings_about_no_full_collection():
    before = gc.get_threshold()
    full = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(info)

    settle_heap()
    gc.callbacks.append(note)
    try:
        contents = [BlockContent(serial, b"hash", None, b"tokens", b"") for serial in range(200_000)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
        gc.unfreeze()
    assert len(contents) == 200_000
    assert full == []
