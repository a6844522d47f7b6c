"""The block formula, memory limits of the machine, and the peak meter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from executor_service import memory_profiler
from executor_service.backends.base import NotEnoughMemoryError
from executor_service.memory_profiler import (
    PeakMeter,
    compute_num_blocks,
    high_water_mark,
    host_memory_left,
    kv_bytes_per_block,
    require_host_blocks_fit,
    require_one_sequence,
    resident_bytes,
    total_memory,
)

GIB = 1 << 30
MIB = 1 << 20
CPU = torch.device("cpu")


def test_compute_num_blocks_llama_3_8b_on_80_gib_gives_the_known_figures() -> None:
    peak = (16 + 6) * GIB
    bf16 = kv_bytes_per_block(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype_bytes=2)
    fp8 = kv_bytes_per_block(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype_bytes=1)
    assert bf16 == 2 * MIB
    assert compute_num_blocks(80 * GIB, 1.0, peak, bf16) == 29_696
    assert compute_num_blocks(80 * GIB, 1.0, peak, fp8) == 59_392


@pytest.mark.parametrize(
    ("total", "utilization", "peak", "blocks"),
    [(1000, 1.0, 0, 10), (1000, 0.9, 0, 9), (1000, 0.999, 0, 9), (1000, 0.9, 801, 0), (1000, 0.9, 901, 0)],
)
def test_compute_num_blocks_rounds_down_and_never_below_zero(
    total: int, utilization: float, peak: int, blocks: int
) -> None:
    assert compute_num_blocks(total, utilization, peak, 100) == blocks


def test_require_one_sequence_too_few_blocks_names_numbers_and_flags() -> None:
    terms = {
        "max_model_len": 64,
        "blocks_for": lambda num_tokens: -(-num_tokens // 16),
        "bytes_per_block": 100,
        "total_bytes": 1000,
        "utilization": 0.9,
        "weights_bytes": 300,
        "peak_bytes": 500,
    }
    require_one_sequence(5, **terms)  # type: ignore[arg-type]
    with pytest.raises(NotEnoughMemoryError) as caught:
        require_one_sequence(4, **terms)  # type: ignore[arg-type]
    message = str(caught.value)
    for part in (
        "5 KV blocks of 100 bytes",
        "4 fit",
        "1000",
        "0.9",
        "500",
        "300",
        "400 bytes",
        "100 too few",
        "48 tokens",
    ):
        assert part in message
    for flag in ("--memory-limit", "--gpu-memory-utilization", "--max-model-len", "--max-num-batched-tokens"):
        assert flag in message
    assert caught.value.metadata["missing_bytes"] == "100"


def test_require_one_sequence_names_host_blocks_only_where_there_are_some() -> None:
    terms = {
        "max_model_len": 64,
        "blocks_for": lambda num_tokens: -(-num_tokens // 16),
        "bytes_per_block": 100,
        "total_bytes": 1000,
        "utilization": 1.0,
        "weights_bytes": 300,
        "peak_bytes": 500,
    }
    with pytest.raises(
        NotEnoughMemoryError, match=r"- host blocks 200 \(swap_space\) leaves 300 bytes, 200 too few"
    ) as with_host:
        require_one_sequence(3, **terms, host_bytes=200)  # type: ignore[arg-type]
    assert "less aside with --swap-space" in str(with_host.value)
    with pytest.raises(NotEnoughMemoryError) as without:
        require_one_sequence(3, **terms)  # type: ignore[arg-type]
    assert "swap" not in str(without.value)


def test_compute_num_blocks_takes_host_blocks_from_the_same_memory() -> None:
    assert compute_num_blocks(1000, 1.0, 300, 100, host_bytes=250) == 4
    assert compute_num_blocks(1000, 1.0, 300, 100, host_bytes=701) == 0


@pytest.mark.parametrize(("host", "left", "missing"), [(10, 10, 0), (0, -5, 0), (11, 10, 1), (3, -5, 3)])
def test_require_host_blocks_fit_says_what_is_missing(host: int, left: int, missing: int) -> None:
    if not missing:
        require_host_blocks_fit(host, left_bytes=left, left="the machine")
        return
    with pytest.raises(NotEnoughMemoryError, match=f"the machine leaves {left} bytes, {missing} too few") as caught:
        require_host_blocks_fit(host, left_bytes=left, left="the machine")
    assert caught.value.metadata["missing_bytes"] == str(missing)


def test_host_memory_left_is_what_the_machine_and_the_cgroup_still_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profiler.psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * GIB))
    monkeypatch.setattr(memory_profiler, "resident_bytes", lambda: GIB)
    for limits, left in (([], 3), ([9 * GIB], 3), ([9 * GIB, 2 * GIB], 1)):
        monkeypatch.setattr(memory_profiler, "_cgroup_limits", lambda limits=limits: limits)
        assert host_memory_left() == left * GIB


def test_total_memory_with_a_limit_is_the_limit() -> None:
    assert total_memory(CPU, 5 * GIB) == 5 * GIB


def test_total_memory_on_cuda_is_the_devices_or_a_smaller_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    cuda = torch.device("cuda:0")
    assert [total_memory(cuda, limit) for limit in (None, 24 * GIB, 96 * GIB)] == [80 * GIB, 24 * GIB, 80 * GIB]


def test_total_memory_without_a_limit_is_at_most_the_smallest_cgroup_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profiler, "_cgroup_limits", lambda: [3 * MIB, 2 * MIB])
    assert total_memory(CPU, None) == 2 * MIB


def test_total_memory_without_a_limit_is_half_of_what_other_processes_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(total=64 * GIB, available=3 * GIB)
    monkeypatch.setattr(memory_profiler.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(memory_profiler, "_cgroup_limits", lambda: [])
    assert 3 * GIB < 2 * total_memory(CPU, None) <= 3 * GIB + resident_bytes()


def test_cgroup_limits_v2_takes_every_level(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    root = tmp_path / "fs"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "memory.max").write_text("max\n")
    (root / "a" / "memory.max").write_text("123456\n")
    assert memory_profiler._cgroup_limits(tmp_path, root) == [123456]


def test_cgroup_limits_v1_reads_the_memory_controller(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/x\n")
    root = tmp_path / "fs"
    (root / "memory" / "x").mkdir(parents=True)
    (root / "memory" / "x" / "memory.limit_in_bytes").write_text("777\n")
    assert memory_profiler._cgroup_limits(tmp_path, root) == [777]


def test_cgroup_limits_without_cgroups_is_empty(tmp_path: Path) -> None:
    assert memory_profiler._cgroup_limits(tmp_path, tmp_path) == []


@pytest.mark.parametrize("can_reset", [True, False])
def test_peak_meter_sees_memory_that_is_gone_again(monkeypatch: pytest.MonkeyPatch, can_reset: bool) -> None:
    if not can_reset:
        monkeypatch.setattr(memory_profiler, "_reset_high_water_mark", lambda: False)
    earlier = np.ones(400 * MIB, dtype=np.uint8)  # a higher peak before the meter opens must not count
    del earlier
    before = resident_bytes()
    with PeakMeter(CPU) as meter:
        block = np.ones(200 * MIB, dtype=np.uint8)
        assert block[-1] == 1
        time.sleep(0.1)  # the sampler sees what lasts a few milliseconds
        del block
    assert 195 * MIB < meter.peak_bytes - before < 260 * MIB
    assert resident_bytes() - before < 50 * MIB


def test_high_water_mark_is_at_least_what_is_resident() -> None:
    assert high_water_mark() >= resident_bytes() * 0.95


def test_tune_malloc_freed_tensors_leave_the_process() -> None:
    # In a process of its own: the setting is process-wide. Freeing what was allocated in between keeps a heap from
    # shrinking; mapped blocks go back at once.
    script = (
        "import torch\n"
        "from executor_service.memory_profiler import resident_bytes, tune_malloc\n"
        "tune_malloc()\n"
        "warm = [torch.ones(6 << 18) for _ in range(4)]; del warm\n"
        "before = resident_bytes()\n"
        "pairs = [(torch.ones(6 << 18), torch.ones(64)) for _ in range(60)]\n"
        "small = [pair[1] for pair in pairs]; del pairs\n"
        "print(resident_bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 30 * MIB
