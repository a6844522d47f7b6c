"""Memory is real: what the profile promises holds under load, what does not fit is refused, and the formula is the one
that the log shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvplane_client import NO_RETRY, AsyncClient, ManagerState

from executor_service.gguf_conversion import converted_folder, default_cache_dir
from tests.e2e.cluster import Event, ServiceProcess, settled
from tests.e2e.model_cluster import ModelCluster, model_cluster, wait_patiently

pytestmark = [pytest.mark.model, pytest.mark.timeout(3000)]

GIB = 1 << 30
LIMIT = 2 * GIB
SMALL_LIMIT = 7 * GIB // 4
VOCAB_SIZE = 49_152
MANAGER: dict[str, object] = {"max_num_batched_tokens": 1024, "max_num_seqs": 128}


@pytest.fixture(scope="module")
def gguf() -> Path:
    path = os.environ.get("KVPLANE_TEST_MODEL")
    if not path:
        pytest.skip("KVPLANE_TEST_MODEL names no model")
    converted_folder(Path(path), default_cache_dir())
    return Path(path)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModelCluster]:
    with model_cluster(request, tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("limit", "max_model_len", "seconds"),
    [
        pytest.param(SMALL_LIMIT, 1024, 0.0, id="small"),
        pytest.param(LIMIT, 8192, 300.0, id="large", marks=pytest.mark.soak),
    ],
)
async def test_resident_memory_stays_under_the_limit_at_full_load(
    cluster: ModelCluster, gguf: Path, limit: int, max_model_len: int, seconds: float
) -> None:
    """The small one lasts until everything was met at once; the large one, with the model's own length, for minutes."""
    cluster.start_manager(lease_ms=60_000, **MANAGER)
    executor = cluster.start_model_executor(
        gguf, memory_limit=limit, max_model_len=max_model_len, cache_dir=default_cache_dir()
    )
    with PeakWatch(executor.pid) as watch:
        wait_patiently(cluster.manager, "executor_active", executor)
        started = watch.peak_bytes
        async with cluster.client(retry=NO_RETRY) as client:
            assert (await client.get_model()).max_model_len == max_model_len
            load = Load(client, max_model_len)
            await load.run(seconds, profile_of(executor)["num_blocks"])
            stats = await settled(client)
        children = psutil.Process(executor.pid).children(recursive=True)
    profile = profile_of(executor)
    for name, value in {
        "peak_bytes": watch.peak_bytes,
        "peak_while_starting_bytes": started,
        "profiled_peak_bytes": profile["peak_bytes"],
        "num_blocks": profile["num_blocks"],
        "longest_done": load.longest_done,
        "others_done": load.others_done,
        "most_running": load.most_running,
        "preemptions": stats.preemptions,
        "tokens_computed": stats.tokens_computed,
    }.items():
        print(f"{name}: {value}")
    assert not children, "their memory would have to be added"
    assert stats.state is ManagerState.SERVING
    assert stats.steps_failed == 0
    assert load.fewest_free_blocks <= profile["num_blocks"] // 20, "expected a load that fills the pool"
    assert watch.peak_bytes < limit


async def test_limit_that_is_too_small_stops_the_executor_with_numbers_and_flags(
    cluster: ModelCluster, gguf: Path
) -> None:
    cluster.expected_errors.add("memory_not_enough")
    cluster.start_manager(lease_ms=60_000, **MANAGER)
    executor = cluster.start_model_executor(gguf, memory_limit=GIB, cache_dir=default_cache_dir())
    message = wait_patiently(executor, "memory_not_enough")["error"]
    assert await executor.exit_status() == 1
    async with cluster.client(retry=NO_RETRY) as client:
        assert (await client.get_stats()).state is ManagerState.NO_EXECUTOR
    profile = profile_of(executor)
    assert message.startswith("one sequence of max_model_len=8192 tokens needs 513 KV blocks")
    for value in ("bytes_per_block", "total_bytes", "utilization", "peak_bytes", "weights_bytes", "available_bytes"):
        assert str(profile[value]) in message
    flags = ("--memory-limit", "--gpu-memory-utilization", "--max-model-len", "--max-num-batched-tokens")
    assert all(flag in message for flag in (*flags, "--max-num-seqs"))
    # The manager was told the same.
    assert cluster.manager.wait_event("executor_lost")["reason"] == f"FAILED_PRECONDITION: {message}"


async def test_twice_the_limit_gives_the_blocks_of_the_formula(cluster: ModelCluster, gguf: Path) -> None:
    cluster.start_manager(lease_ms=60_000, max_num_batched_tokens=256, max_num_seqs=16)
    profiles = []
    for count, limit in enumerate((LIMIT, 2 * LIMIT), start=1):
        executor = cluster.start_model_executor(
            gguf, memory_limit=limit, max_model_len=2048, cache_dir=default_cache_dir()
        )
        wait_patiently(cluster.manager, "executor_active", executor, count=count)
        profiles.append(profile_of(executor))
        assert cluster.manager.events("kv_cache_ready")[-1]["num_blocks"] == profiles[-1]["num_blocks"]
        executor.kill()
    for profile, limit in zip(profiles, (LIMIT, 2 * LIMIT), strict=True):
        assert profile["total_bytes"] == limit
        left = math.floor(profile["utilization"] * limit) - profile["peak_bytes"]
        assert profile["available_bytes"] == left
        assert profile["num_blocks"] == left // profile["bytes_per_block"]
        assert 0 < profile["weights_bytes"] < profile["peak_bytes"]
    one, two = profiles
    assert one["bytes_per_block"] == two["bytes_per_block"]
    expected = one["utilization"] * LIMIT / one["bytes_per_block"]
    allowed = abs(two["peak_bytes"] - one["peak_bytes"]) / one["bytes_per_block"] + 1
    assert abs(two["num_blocks"] - one["num_blocks"] - expected) <= allowed


def profile_of(executor: ServiceProcess) -> Event:
    """The terms of the formula, as the executor logged them."""
    return executor.wait_event("memory_profile")


class PeakWatch:
    """Context that follows a process's resident high-water mark.

    The executor resets the mark before it profiles, so it is read again and again, not only at the end.

    Attributes:
        peak_bytes: the highest so far.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._status = Path(f"/proc/{pid}/status")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _follow(self) -> None:
        last_look = False
        while not last_look:
            last_look = self._done.wait(0.005)
            for line in self._status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    self.peak_bytes = max(self.peak_bytes, int(line.split()[1]) * 1024)


class Load:
    """Requests of every kind at once, for a while: longest prompts, many short ones, every sampling parameter.

    Attributes:
        longest_done: requests of full length that ended.
        others_done: the others that ended.
        fewest_free_blocks: how full the pool was.
        most_running: how many requests had blocks at once.
    """

    def __init__(self, client: AsyncClient, max_model_len: int) -> None:
        self.longest_done = 0
        self.others_done = 0
        self.fewest_free_blocks = 1 << 62
        self.most_running = 0
        self._client = client
        self._max_model_len = max_model_len
        self._rng = random.Random(1)

    async def run(self, seconds: float, num_blocks: int) -> None:
        """Load until the time is over, some of each kind are done and the pool of this many blocks was full."""
        # First come, first served: the many first, so that the longest run beside full steps of them.
        kinds = [self._short] * 120 + [self._medium] * 6 + [self._longest] * 2
        workers = [asyncio.create_task(self._repeat(kind)) for kind in kinds]
        until = time.monotonic() + seconds
        while (
            time.monotonic() < until
            or self.longest_done < 2
            or self.others_done < 100
            or self.fewest_free_blocks > num_blocks // 20
        ):
            stats = await self._client.get_stats()
            assert stats.pool is not None
            self.fewest_free_blocks = min(self.fewest_free_blocks, stats.pool.free_blocks)
            self.most_running = max(self.most_running, stats.requests_running)
            done, _ = await asyncio.wait(workers, timeout=0.25, return_when=asyncio.FIRST_EXCEPTION)
            for failed in done:
                failed.result()
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    async def _repeat(self, once: Callable[[], Any]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await once()

    async def _longest(self) -> None:
        """A sequence that ends where the model's length ends, its last steps with everything on."""
        await self._generate(self._max_model_len - 16, 16, self._everything())
        self.longest_done += 1

    async def _medium(self) -> None:
        most = min(2000, self._max_model_len - 40)
        await self._generate(self._rng.randint(500, most), self._rng.randint(8, 40), self._some())
        self.others_done += 1

    async def _short(self) -> None:
        await self._generate(self._rng.randint(1, 60), self._rng.randint(8, 48), self._some())
        self.others_done += 1

    async def _generate(self, prompt_tokens: int, max_tokens: int, options: dict[str, Any]) -> None:
        prompt = [self._rng.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)]
        await self._client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, **options)

    def _everything(self) -> dict[str, Any]:
        penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2}
        return {"temperature": 1.5, "top_p": 0.9999, "min_p": 1e-6, "logprobs": 20, "logit_bias": {5: 1.0}} | penalties

    def _some(self) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1.0},
            {"temperature": 0.8, "top_k": 40, "logprobs": 5},
            {"temperature": 2.0, "top_p": 0.95},
            {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 20},
            self._everything(),
        ]
        return self._rng.choice(kinds)
