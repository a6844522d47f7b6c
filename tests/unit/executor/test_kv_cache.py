"""Layout and memory of the paged cache."""

from __future__ import annotations

import pytest
import torch

from executor_service.kernels.fp8 import layer_codecs
from executor_service.kv_cache import KvLayout, PagedKvCache

CPU = torch.device("cpu")
LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype=torch.float32)


def test_paged_kv_cache_slot_is_block_times_size_plus_offset() -> None:
    cache = PagedKvCache(LAYOUT, num_blocks=5, device=CPU)
    cache.keys[1][3 * 4 + 2] = 7.0
    cache.values[0][4 * 4 + 1] = 8.0
    assert cache.layers[1].shape == (2, 5, 4, 3, 8)
    assert torch.all(cache.layers[1][0, 3, 2] == 7.0)
    assert torch.all(cache.layers[0][1, 4, 1] == 8.0)
    assert sum(int((layer != 0).sum()) for layer in cache.layers) == 2 * 3 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_paged_kv_cache_holds_as_many_bytes_as_the_layout_says(dtype: torch.dtype) -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype=dtype)
    codecs = layer_codecs(dtype, [1.0] * 2, [0.5] * 2) if layout.is_quantized else ()
    cache = PagedKvCache(layout, num_blocks=5, device=CPU, codecs=codecs)
    assert cache.num_bytes == 5 * layout.bytes_per_block == sum(layer.nbytes for layer in cache.layers)
    assert layout.bytes_per_block == 4 * 2 * layout.bytes_per_token_and_layer


def test_clear_zeroes_every_slot() -> None:
    cache = PagedKvCache(LAYOUT, num_blocks=5, device=CPU)
    for layer in cache.layers:
        layer.fill_(float("nan"))
    cache.clear()
    assert all(not layer.any() for layer in cache.layers)
