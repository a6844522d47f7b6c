"""Memory that is mapped at once and becomes resident in the background."""

from __future__ import annotations

import errno
import gc
import threading

import pytest
import structlog
import torch

from executor_service import kv_memory, mapped_memory
from executor_service.backends.base import NotEnoughMemoryError
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.torch_paged import TorchKernels
from executor_service.kv_cache import KvLayout
from executor_service.kv_memory import KvMemory
from executor_service.mapped_memory import Filling, forget, map_zeros
from executor_service.memory_profiler import resident_bytes

MIB = 1024 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_mapped_tensors_are_zeros_of_their_shapes_that_share_nothing(dtype: torch.dtype) -> None:
    tensors = map_zeros([(3, 5), (2, 1000, 7), (0, 4), (1,)], dtype)
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 5), (2, 1000, 7), (0, 4), (1,)]
    for number, tensor in enumerate(tensors, start=1):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert not tensor.any()
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors, start=1))


def test_nothing_to_map_is_nothing() -> None:
    (tensor,) = map_zeros([(0, 8)], torch.float32)
    assert tensor.shape == (0, 8)
    Filling([tensor]).wait()


def test_more_than_can_be_mapped_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"bytes could not be mapped: .*memory"):
        map_zeros([(1 << 46,)], torch.float32)


def test_memory_is_resident_when_the_filling_has_ended_and_not_before_anybody_asks() -> None:
    before = resident_bytes()
    tensors = map_zeros([(64 * MIB,), (64 * MIB,)], torch.uint8)
    assert resident_bytes() - before < 16 * MIB
    filling = Filling(tensors)
    filling.wait()
    assert resident_bytes() - before > 0.98 * 128 * MIB
    del tensors, filling
    gc.collect()
    assert resident_bytes() - before < 64 * MIB


def test_what_is_written_meanwhile_stays() -> None:
    (tensor,) = map_zeros([(192 * MIB,)], torch.uint8)
    filling = Filling([tensor])
    for start in range(0, len(tensor), MIB):
        tensor[start : start + 4096] = start // MIB + 1
    filling.wait()
    assert tensor[::MIB].tolist() == list(range(1, 193))
    assert int((tensor != 0).sum()) == 192 * 4096


def test_a_filling_stops_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()
    parts: list[tuple[int, int]] = []

    def populate(tensor: torch.Tensor, start: int, end: int) -> int:
        parts.append((start, end))
        if len(parts) == 3:  # the first is the one that tries
            asked.set()
            assert go_on.wait(60)
        return 0

    monkeypatch.setattr(mapped_memory, "_populate", populate)
    filling = Filling(map_zeros([(MIB,), (MIB,)], torch.uint8))
    assert asked.wait(60)
    stopping = threading.Thread(target=filling.stop)
    stopping.start()
    assert filling._is_stopped.wait(60)
    go_on.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert parts == [(0, 1), (0, MIB // 16), (0, MIB // 16)]


def test_a_filling_takes_a_fifth_of_a_cpu_while_steps_run_and_all_of_it_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))  # each look at it is a second later
    rests: list[float] = []
    monkeypatch.setattr(mapped_memory, "_populate", lambda *_: 0)
    monkeypatch.setattr(mapped_memory.time, "monotonic", lambda: float(next(clock)))
    filling = Filling([])
    monkeypatch.setattr(filling._is_stopped, "wait", rests.append)
    filling._tensors = [torch.zeros(16, dtype=torch.uint8)]
    filling._run()
    assert rests == [0.0] * 16
    rests.clear()
    filling._tensors = [torch.zeros(16, dtype=torch.uint8)]
    filling._last_step = 1e6  # later than all of these
    filling._run()
    assert rests == [4.0] * 16


def test_a_step_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    filling = Filling([])
    monkeypatch.setattr(mapped_memory.time, "monotonic", lambda: 7.0)
    filling.give_way()
    assert filling._last_step == 7.0


def test_forgotten_memory_is_zeros_and_gives_its_pages_back() -> None:
    first, second = map_zeros([(32 * MIB + 5,), (32 * MIB,)], torch.uint8)
    first.fill_(1)
    second.fill_(2)
    before = resident_bytes()
    forget(first)
    assert before - resident_bytes() > 0.9 * 32 * MIB
    assert not first.any()
    assert bool((second == 2).all())
    forget(first[:0])


def test_memory_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "_populate", lambda *_: errno.ENOMEM)
    with pytest.raises(RuntimeError, match=r"first page .* Cannot allocate memory"):
        Filling(map_zeros([(MIB,)], torch.uint8))


def test_a_kernel_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([errno.EAGAIN, errno.EAGAIN, 0])
    monkeypatch.setattr(mapped_memory, "_advise", lambda *_: next(codes))
    assert mapped_memory._populate(torch.zeros(1), 0, 1) == 0
    assert next(codes, None) is None


def test_an_old_kernel_has_it_resident_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "_populate", lambda *_: errno.EINVAL)
    before = resident_bytes()
    (tensor,) = map_zeros([(64 * MIB,)], torch.uint8)
    Filling([tensor])
    assert resident_bytes() - before > 0.98 * 64 * MIB


def test_memory_that_is_gone_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([0, 0, errno.ENOMEM])
    monkeypatch.setattr(mapped_memory, "_populate", lambda *_: next(codes))
    with structlog.testing.capture_logs() as logs:
        Filling(map_zeros([(MIB,)], torch.uint8)).wait()
    (line,) = logs
    assert line["event"] == "kv_memory_not_resident"
    assert "Cannot allocate memory" in line["got"]
    assert str(MIB) in line["expected"]


def test_kv_memory_becomes_resident_with_its_host_blocks_and_goes_when_closed() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=8, head_dim=64, block_size=16, dtype=torch.float32)
    before = resident_bytes()
    memory = KvMemory(layout, 500, 100, torch.device("cpu"), TorchKernels(AttentionLimits(gather_tokens=1 << 16)))
    memory._filling.wait()
    assert resident_bytes() - before > 0.98 * 600 * layout.bytes_per_block
    memory.close()
    del memory
    gc.collect()
    assert resident_bytes() - before < 0.5 * 600 * layout.bytes_per_block


@pytest.mark.parametrize("is_filling", [True, False])
def test_cleared_kv_memory_is_zeros_and_becomes_resident(is_filling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=8, head_dim=64, block_size=16, dtype=torch.float32)
    memory = KvMemory(layout, 300, 50, torch.device("cpu"), TorchKernels(AttentionLimits(gather_tokens=1 << 16)))
    for tensor in (*memory.cache.layers, memory.host.blocks):
        tensor[:, 1::7] = 3.0
    memory._filling.wait()
    if is_filling:
        monkeypatch.setattr(Filling, "is_under_way", property(lambda self: True))
    memory.clear()
    monkeypatch.undo()
    assert not any(bool(tensor.any()) for tensor in (*memory.cache.layers, memory.host.blocks))
    memory._filling.wait()
    memory.close()


def test_more_than_the_machine_has_left_is_refused_before_it_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "host_memory_left", lambda: 1000)
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=1, dtype=torch.float32)
    kernels = TorchKernels(AttentionLimits(gather_tokens=1 << 16))
    KvMemory(layout, 10, 5, torch.device("cpu"), kernels).close()
    with pytest.raises(
        NotEnoughMemoryError, match=r"expected room for 6 host blocks \(384 bytes\), got: 1000 bytes .*--memory-limit"
    ):
        KvMemory(layout, 10, 6, torch.device("cpu"), kernels)
