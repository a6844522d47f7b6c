"""Two ranks as one backend, the second a real process: what it reports, computes and refuses is what one would."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from executor_service.backends.base import (
    BackendError,
    BlockCopies,
    CopyDirection,
    MemoryProfile,
    NotEnoughMemoryError,
    PenaltyHistory,
    StepResult,
)
from executor_service.backends.registry import create_backend
from executor_service.backends.torch_backend import TorchBackend
from executor_service.config import ExecutorConfig
from executor_service.tensor_parallel.backend import TensorParallelBackend, profile_of_all, rank_configs
from executor_service.tensor_parallel.calls import Failure, without_sampling
from tests.unit.executor.step_builder import Row, Sample, build_step, prompt_of, sampling, save_tiny_model

BLOCK_SIZE = 8
DRAWN = sampling(temperature=1.0, num_logprobs=3)
PENALISED = sampling(temperature=0.7, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tp-model"), "llama")


def config(folder: Path, **values: object) -> ExecutorConfig:
    defaults = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "memory_limit": "6GiB",
        "swap_space": "1MiB", "num_threads": 2,
    }  # fmt: skip
    return ExecutorConfig(**(defaults | values))  # type: ignore[arg-type]


def workers_of(parent: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(parent).children() if "tensor_parallel.worker" in " ".join(one.cmdline())]


@pytest.fixture(scope="module", params=["auto", "fp8"])
def backends(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[TorchBackend, TensorParallelBackend]]:
    """A backend of one process and one of two, of the same model."""
    whole = create_backend(config(folder, kv_cache_dtype=request.param))
    ranks = create_backend(config(folder, kv_cache_dtype=request.param, tensor_parallel_size=2))
    assert isinstance(whole, TorchBackend)
    assert isinstance(ranks, TensorParallelBackend)
    lost: list[BackendError] = []
    ranks.on_lost(lost.append)
    expected, info = whole.load(), ranks.load()
    assert info == replace(expected, tensor_parallel_size=2), "geometry, identity and scales are the whole's"
    assert expected.tensor_parallel_size == 1
    for backend in (whole, ranks):
        backend.profile_memory(64, 8)
        backend.initialize_kv_cache(40, 8)
    yield whole, ranks
    pids = [one.pid for one in workers_of(os.getpid())]
    assert pids
    ranks.close()
    whole.close()
    assert not lost
    assert not any(psutil.pid_exists(pid) for pid in pids)


def both(backends: tuple[TorchBackend, TensorParallelBackend], rows: list[Row]) -> StepResult:
    """The result of a step, the same in both."""
    step = build_step(rows, BLOCK_SIZE)
    expected, got = (backend.execute(step) for backend in backends)
    assert got.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
    assert list(got.failures) == list(expected.failures) == []
    assert got.logprobs.keys() == expected.logprobs.keys()
    for sample, row in expected.logprobs.items():
        assert got.logprobs[sample].token_ids.tolist() == row.token_ids.tolist()
        np.testing.assert_allclose(got.logprobs[sample].logprobs, row.logprobs, atol=1e-3)
    return got


def test_execute_prefill_decode_and_forks_equal_one_process(
    backends: tuple[TorchBackend, TensorParallelBackend],
) -> None:
    """Greedy, drawn and penalised rows; a row that samples nothing, and a whole step of such."""
    prompt, other = prompt_of(20, 1), prompt_of(11, 2)
    history = PenaltyHistory(np.array(other, dtype=np.int32), len(other))
    both(backends, [Row(prompt[:10], 0, [1, 2, 3], None), Row(other[:4], 0, [4, 5], None)])
    result = both(
        backends,
        [
            Row(prompt[10:], 10, [1, 2, 3], DRAWN, seed=7, forks=[Sample(DRAWN, 8)]),
            Row(other[4:], 4, [4, 5], PENALISED, seed=9, history=history),
            Row(prompt[:5], 0, [6], None),
        ],
    )
    token = int(result.sampled_token_ids[0])
    both(backends, [Row([token], 20, [1, 2, 3]), Row(other, 0, [7, 8])])


def test_copy_blocks_through_host_memory_takes_every_ranks_heads(
    backends: tuple[TorchBackend, TensorParallelBackend],
) -> None:
    prompt = prompt_of(16, 3)
    both(backends, [Row(prompt, 0, [10, 11])])

    def run(direction: CopyDirection, source: list[int], target: list[int]) -> BlockCopies:
        return BlockCopies(direction, np.array(source, dtype=np.int32), np.array(target, dtype=np.int32))

    for backend in backends:
        backend.copy_blocks(
            [
                run(CopyDirection.DEVICE_TO_HOST, [10, 11], [3, 5]),
                run(CopyDirection.DEVICE_TO_DEVICE, [20, 20], [10, 11]),
                run(CopyDirection.HOST_TO_DEVICE, [3, 5], [30, 31]),
            ]
        )
    moved = both(backends, [Row([5], 16, [30, 31, 32])])
    wiped = backends[1].execute(build_step([Row([5], 16, [10, 11, 33])], BLOCK_SIZE))
    assert moved.sampled_token_ids.tolist() != wiped.sampled_token_ids.tolist(), "the copied blocks are what is read"


def test_initialize_kv_cache_without_room_is_refused_and_the_ranks_live_on(
    backends: tuple[TorchBackend, TensorParallelBackend],
) -> None:
    _, ranks = backends
    with pytest.raises(NotEnoughMemoryError, match="rank 1 of 2: expected room for") as no:
        ranks.initialize_kv_cache(1 << 44)
    assert no.value.metadata["rank"] == "1"
    for backend in backends:
        backend.initialize_kv_cache(40, 8)
    both(backends, [Row(prompt_of(9, 4), 0, [1, 2])])


def test_rank_configs_share_what_is_the_executors_as_a_whole(folder: Path) -> None:
    ranks = rank_configs(config(folder, tensor_parallel_size=2, num_threads=5, num_blocks_override=9))
    assert [
        (one.memory_limit, one.swap_space, one.num_threads, one.num_blocks_override, one.enforce_eager) for one in ranks
    ] == [(3 << 30, 1 << 19, 2, 9, True)] * 2
    assert {one.tensor_parallel_size for one in ranks} == {1}
    assert rank_configs(config(folder, tensor_parallel_size=2, num_threads=1))[0].num_threads == 1


def test_rank_configs_without_a_limit_share_what_the_machine_has(folder: Path) -> None:
    first, second = rank_configs(config(folder, tensor_parallel_size=2, memory_limit=None))
    assert first.memory_limit == second.memory_limit
    assert first.memory_limit is not None
    assert 0 < first.memory_limit <= psutil.virtual_memory().total // 4


def test_profile_of_all_is_the_tightest_ranks_and_its_terms_fit_together() -> None:
    roomy = MemoryProfile(1000, 0.9, 50, 100, 800, 10, 80, overridden=False, num_host_blocks=4)
    tight = replace(roomy, weights_bytes=60, peak_bytes=145, available_bytes=755, num_blocks=75, num_host_blocks=5)
    profile = profile_of_all([roomy, tight])
    assert profile == MemoryProfile(2000, 0.9, 120, 290, 1510, 20, 75, overridden=False, num_host_blocks=4)
    assert profile.num_blocks == profile.available_bytes // profile.bytes_per_block


def test_without_sampling_keeps_what_is_computed_and_drops_what_is_drawn_with() -> None:
    history = PenaltyHistory(np.arange(5, dtype=np.int32), 5)
    step = build_step([Row([1, 2], 0, [1], None), Row([3], 0, [2], PENALISED, history=history)], BLOCK_SIZE)
    bare = without_sampling(step)
    assert bare.sampling is not None
    assert bare.sampling.rows.tolist() == [1]
    assert (bare.sampling.params, bare.sampling.histories, len(bare.sampling.seeds)) == ((), {}, 0)
    assert bare.token_ids is step.token_ids
    silent = build_step([Row([1, 2], 0, [1], None)], BLOCK_SIZE)
    assert without_sampling(silent) is silent


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (BackendError("SOME_REASON", "expected this", got=3), BackendError, "SOME_REASON"),
        (NotEnoughMemoryError("NOT_ENOUGH_MEMORY", "expected this"), NotEnoughMemoryError, "NOT_ENOUGH_MEMORY"),
        (ValueError("expected this"), BackendError, "RANK_FAILED"),
    ],
)
def test_failure_is_the_same_error_with_the_ranks_name(error: Exception, kind: type, reason: str) -> None:
    told = Failure.of(error).error(1, 2)
    assert type(told) is kind
    assert told.reason == reason
    assert str(told).startswith("rank 1 of 2: ")
    assert "expected this" in str(told)
    assert told.metadata["rank"] == "1"


def test_create_backend_that_computes_in_one_process_refuses_ranks() -> None:
    with pytest.raises(BackendError, match=r"'sim' computes in one process: expected --tensor-parallel-size 1") as no:
        create_backend(ExecutorConfig(backend="sim", tensor_parallel_size=2))
    assert no.value.reason == "TENSOR_PARALLEL_NOT_SUPPORTED"
