"""Ranks of one backend that are refused, fail or die: the second is a real process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from executor_service.backends.base import BackendError, NotEnoughMemoryError
from executor_service.backends.registry import create_backend
from executor_service.config import ExecutorConfig
from tests.unit.executor.step_builder import Row, build_step, prompt_of, save_tiny_model

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tp-model"), "llama")


def config(folder: Path, **values: object) -> ExecutorConfig:
    defaults = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "memory_limit": "6GiB",
        "tensor_parallel_size": 2,
    }  # fmt: skip
    return ExecutorConfig(**(defaults | values))  # type: ignore[arg-type]


def workers() -> list[psutil.Process]:
    """The ranks that this process has started and that live."""
    return [
        one
        for one in psutil.Process(os.getpid()).children()
        if one.status() != psutil.STATUS_ZOMBIE and "executor_service.tensor_parallel.worker" in one.cmdline()
    ]


def test_load_model_that_cannot_be_split_is_refused_and_leaves_no_process(folder: Path) -> None:
    backend = create_backend(config(folder, tensor_parallel_size=3))
    lost: list[BackendError] = []
    backend.on_lost(lost.append)
    with pytest.raises(BackendError, match=r"rank \d of 3: expected a --tensor-parallel-size") as no:
        backend.load()
    assert no.value.reason == "BAD_TENSOR_PARALLEL_SIZE"
    backend.close()
    assert not workers()
    assert len(lost) == 1


def test_profile_memory_has_the_minimum_of_what_the_ranks_measured(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = create_backend(config(folder, log_format="json"))
    info = backend.load()
    with capture_logs() as own:
        profile = backend.profile_memory(64, 8)
    backend.close()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    (told,) = [line for line in lines if line["event"] == "memory_profile"]
    assert told["rank"] == "1"
    (mine,) = [event for event in own if event["event"] == "memory_profile"]
    assert mine["measured_num_blocks"] != told["measured_num_blocks"], "two processes do not hold the same to a byte"
    tightest = min((mine, told), key=lambda event: event["measured_num_blocks"])
    assert profile.num_blocks == tightest["num_blocks"]
    assert profile.available_bytes == 2 * tightest["available_bytes"]
    assert profile.bytes_per_block == info.kv_groups[0].bytes_per_block == 2 * tightest["bytes_per_block"]


def test_profile_memory_too_little_in_a_rank_is_refused_with_its_numbers(folder: Path) -> None:
    backend = create_backend(config(folder, memory_limit="64MiB"))
    backend.load()
    with pytest.raises(NotEnoughMemoryError, match=r"rank \d of 2: .*total 33554432") as no:
        backend.profile_memory(64, 8)
    assert no.value.metadata["total_bytes"] == str(32 << 20)
    backend.close()


def test_execute_after_a_rank_was_killed_says_which_and_tells_once(folder: Path) -> None:
    backend = create_backend(config(folder))
    lost: list[BackendError] = []
    backend.on_lost(lost.append)
    backend.load()
    backend.profile_memory(64, 8)
    backend.initialize_kv_cache(40)
    (worker,) = workers()
    worker.send_signal(signal.SIGKILL)
    step = build_step([Row(prompt_of(9, 4), 0, [1, 2])], BLOCK_SIZE)
    for _ in range(2):
        with pytest.raises(BackendError, match=rf"rank 1 of 2 \(pid {worker.pid}\) was ended by signal 9") as no:
            backend.execute(step)
        assert no.value.reason == "RANK_LOST"
    backend.close()
    assert [error.reason for error in lost] == ["RANK_LOST"]
