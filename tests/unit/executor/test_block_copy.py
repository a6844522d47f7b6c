"""Copies of whole blocks in torch, against the oracle of all kernels; host blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_service.backends.base import CopyDirection
from executor_service.host_blocks import HostBlocks
from executor_service.kernels import reference
from executor_service.kernels.block_copy import copy_from_host, copy_to_host, copy_within
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.memory_profiler import resident_bytes

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_HOST_BLOCKS = 11, 7
CHUNKS = [1, 2, 3, 100]


def filled(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Layers and host blocks with other content in every element."""
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=5, block_size=4, dtype=dtype)
    layers = PagedKvCache(layout, NUM_BLOCKS, CPU).layers
    host = HostBlocks(layout, NUM_HOST_BLOCKS, CPU).blocks
    rng = torch.Generator().manual_seed(7)
    for tensor in (*layers, host):
        tensor.copy_(torch.randn(tensor.shape, generator=rng))
    return layers, host


def copied(
    direction: CopyDirection, sources: list[int], targets: list[int], chunk: int, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The memories once the kernel has done its work."""
    layers, host = filled(dtype)
    if direction is CopyDirection.DEVICE_TO_DEVICE:
        copy_within(layers, torch.tensor(sources), torch.tensor(targets), chunk=chunk)
    elif direction is CopyDirection.DEVICE_TO_HOST:
        copy_to_host(layers, host, torch.tensor(sources), targets, chunk=chunk)
    else:
        copy_from_host(layers, host, sources, torch.tensor(targets), chunk=chunk)
    return layers, host


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("direction", "sources", "targets"),
    [
        (CopyDirection.DEVICE_TO_DEVICE, [3, 1, 3, 9], [10, 2, 4, 5]),
        (CopyDirection.DEVICE_TO_HOST, [9, 2, 2, 1, 10], [0, 6, 3, 1, 2]),
        (CopyDirection.HOST_TO_DEVICE, [6, 0, 0, 3], [1, 10, 4, 7]),
    ],
)
def test_copies_equal_the_reference(
    direction: CopyDirection, sources: list[int], targets: list[int], chunk: int, dtype: torch.dtype
) -> None:
    layers, host = copied(direction, sources, targets, chunk, dtype)
    expected_layers, expected_host = filled(dtype)
    orders = [(direction, source, target) for source, target in zip(sources, targets, strict=True)]
    reference.copy_blocks(expected_layers, expected_host, orders)
    assert torch.equal(host, expected_host)
    assert all(torch.equal(own, other) for own, other in zip(layers, expected_layers, strict=True))
    before, host_before = filled(dtype)
    changed = host_before if direction is CopyDirection.DEVICE_TO_HOST else before[0]
    result = host if direction is CopyDirection.DEVICE_TO_HOST else layers[0]
    assert not torch.equal(changed, result)


@given(st.data())
def test_swapped_out_and_in_is_what_was_there(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, NUM_HOST_BLOCKS))
    blocks = data.draw(st.permutations(range(1, NUM_BLOCKS)))[:count]
    places = data.draw(st.permutations(range(NUM_HOST_BLOCKS)))[:count]
    chunk = data.draw(st.sampled_from(CHUNKS))
    layers, host = filled()
    copy_to_host(layers, host, torch.tensor(blocks), places, chunk=chunk)
    for layer in layers:
        layer[:, blocks] = float("nan")
    copy_from_host(layers, host, places, torch.tensor(blocks), chunk=chunk)
    assert all(torch.equal(own, other) for own, other in zip(layers, filled()[0], strict=True))


def test_host_blocks_hold_as_many_bytes_as_the_layout_says_until_closed() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=8, head_dim=64, block_size=16, dtype=torch.float32)
    before = resident_bytes()
    host = HostBlocks(layout, 800, CPU)
    size = host.num_bytes
    assert size == 800 * layout.bytes_per_block
    host.clear()
    assert resident_bytes() - before > 0.98 * size
    host.close()
    assert resident_bytes() - before < 0.1 * size
    assert (host.num_blocks, host.num_bytes) == (0, 0)


def test_host_blocks_clear_zeroes_every_block() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=4, dtype=torch.float32)
    host = HostBlocks(layout, 3, CPU)
    host.blocks.fill_(float("nan"))
    host.clear()
    assert np.count_nonzero(host.blocks.numpy()) == 0


def test_reference_copies_one_after_the_other() -> None:
    layers, host = filled()
    expected = layers[2][1, 4].clone()
    device, out, back = CopyDirection.DEVICE_TO_DEVICE, CopyDirection.DEVICE_TO_HOST, CopyDirection.HOST_TO_DEVICE
    reference.copy_blocks(layers, host, [(device, 4, 5), (out, 5, 0), (device, 6, 5), (back, 0, 6)])
    assert torch.equal(layers[2][1, 6], expected)
    assert not torch.equal(layers[2][1, 5], expected)


class FakeCudart:
    """The calls that lock and unlock memory, as CUDA's runtime has them."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        if not self.code:
            self.locked[pointer] = size
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        del self.locked[pointer]
        return self.code


def test_host_blocks_for_cuda_are_locked_exactly_and_unlocked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=4, dtype=torch.float32)
    host = HostBlocks(layout, 3, torch.device("cuda"))
    assert cudart.locked == {host.blocks.data_ptr(): 3 * layout.bytes_per_block}
    host.close()
    host.close()
    assert not cudart.locked
    HostBlocks(layout, 0, torch.device("cuda")).close()
    cudart.code = 2
    with pytest.raises(RuntimeError, match=r"384 bytes of host memory could not be page-locked, CUDA error 2"):
        HostBlocks(layout, 3, torch.device("cuda"))
