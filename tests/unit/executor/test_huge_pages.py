"""An arena hands out what is asked for, each part its own, and huge pages change nothing but speed."""

from __future__ import annotations

import pytest
import torch

from executor_service.huge_pages import PAGE, HugePageArena, advise_huge_pages


def test_arena_hands_out_aligned_parts_that_do_not_overlap() -> None:
    arena = HugePageArena()
    counts = [1, 31, 32, 33, 1000, 20 * PAGE, 5, 16 * PAGE // 2]
    taken = [arena.empty(count, torch.bfloat16) for count in counts]
    for number, (tensor, count) in enumerate(zip(taken, counts, strict=True)):
        assert (tensor.shape, tensor.dtype) == ((count,), torch.bfloat16)
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(taken))


def test_arena_puts_small_parts_side_by_side_in_one_huge_page() -> None:
    arena = HugePageArena()
    first, second = arena.empty(100, torch.float32), arena.empty(100, torch.float32)
    assert first.data_ptr() % PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 448  # 400 bytes, to the next line


def test_what_is_handed_out_in_inference_mode_is_written_outside_of_it() -> None:
    arena = HugePageArena()
    with torch.inference_mode():
        arena.empty(15 * PAGE, torch.uint8).zero_()
        arena.empty(2 * PAGE, torch.uint8).zero_()  # of another chunk
    assert not arena.empty(100, torch.uint8).zero_().any()


@pytest.mark.parametrize("size", [0, 1, 4096, PAGE // 2])
def test_what_has_no_room_for_a_huge_page_is_left_as_it_is(size: int) -> None:
    assert not advise_huge_pages(torch.empty(size, dtype=torch.uint8))


def test_advised_memory_is_memory() -> None:
    tensor = torch.empty(4 * PAGE, dtype=torch.uint8)
    advise_huge_pages(tensor)
    tensor.fill_(7)
    assert (tensor == 7).all()
