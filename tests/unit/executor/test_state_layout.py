"""States in pages of a cache whose numbers are of another type."""

from __future__ import annotations

import pytest
import torch

from executor_service.kernels.fp8 import FP8_TYPES, layer_codecs
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.state_layout import StateLayout, StatePart

CPU = torch.device("cpu")
LAYOUT = StateLayout((StatePart((5, 4), torch.bfloat16), StatePart((2, 3, 7), torch.float32)))


def test_layout_bytes_are_those_of_its_parts() -> None:
    assert LAYOUT.num_bytes == 5 * 4 * 2 + 2 * 3 * 7 * 4 == 208
    assert LAYOUT.ends == [40, 208]


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, *FP8_TYPES.values()])
@pytest.mark.parametrize("blocks", [[3], [4, 1, 2]])
def test_layout_states_come_back_bit_for_bit_and_touch_no_other_block(
    cache_dtype: torch.dtype, blocks: list[int]
) -> None:
    block_size = 3
    head_dim = LAYOUT.head_dim(block_size, cache_dtype.itemsize)
    layout = KvLayout(2, 1, head_dim, block_size, cache_dtype)
    cache = PagedKvCache(layout, 6, CPU, layer_codecs(cache_dtype, [1.0] * 2, [1.0] * 2) if layout.is_quantized else ())
    for layer in cache.layers:
        layer.fill_(7)
    ids = torch.tensor(blocks)
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn((len(blocks), *part.shape), generator=generator).to(part.dtype) for part in LAYOUT.parts]
    states[1][0, 0, 0, 0] = float("nan")
    states[0][-1, 0, 0] = float("-inf")
    pages = cache.read_pages(1, ids)
    LAYOUT.pack(states, pages)
    cache.write_pages(1, ids, pages)
    for expected, found in zip(states, LAYOUT.unpack(cache.read_pages(1, ids)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    others = [block for block in range(6) if block not in blocks]
    assert (cache.layers[1][:, others] == 7).all()
    assert (cache.layers[0] == 7).all()


def test_layout_unpacked_states_are_no_views_of_the_pages() -> None:
    """Modules change their states in place, and a checkpoint must stay."""
    pages = torch.zeros((1, LAYOUT.num_bytes), dtype=torch.uint8)
    for part in LAYOUT.unpack(pages):
        part.fill_(1)
    assert not pages.any()


@pytest.mark.parametrize("block_size", [1, 4, 512])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_head_dim_is_the_least_with_which_a_page_holds_a_state(block_size: int, itemsize: int) -> None:
    head_dim = LAYOUT.head_dim(block_size, itemsize)
    assert 2 * block_size * head_dim * itemsize >= LAYOUT.num_bytes > 2 * block_size * (head_dim - 1) * itemsize


def test_tokens_per_block_are_the_fewest_with_which_a_page_holds_a_state() -> None:
    assert [LAYOUT.tokens_per_block(size) for size in (1, 100, 208, 1000)] == [208, 3, 1, 1]
