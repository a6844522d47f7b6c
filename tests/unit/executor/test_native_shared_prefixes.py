"""Rows that begin with the same blocks get what the oracle says, and to the last bit what each of them gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from executor_service.backends.base import Int32
from executor_service.kernels import reference
from executor_service.kernels.native_paged import NativeKernels
from executor_service.kernels.paged_kernels import GroupStep
from tests.unit.executor.native_builds import native_ops
from tests.unit.executor.step_builder import Row, build_step

SCALING = 0.3
# (dtype, absolute and relative tolerance)
TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@dataclass(frozen=True)
class Prefix:
    """Rows, each (query tokens, sequence length), that share so many tokens; prefixes `inside` go on from there."""

    tokens: int
    rows: tuple[tuple[int, int], ...] = ()
    inside: tuple[Prefix, ...] = ()


ALONE = Prefix(0, ((1, 1), (1, 32), (1, 33), (1, 129)))
TREES = {
    "all_share": [Prefix(512, tuple((1, length) for length in range(530, 562)))],
    "two_prefixes": [Prefix(96, ((1, 97), (1, 140), (1, 200))), Prefix(64, ((1, 65), (1, 99)))],
    "prefixes_within_one": [
        Prefix(64, ((1, 70), (1, 300)), (Prefix(160, ((1, 161), (1, 170))), Prefix(128, ((1, 129),)))),
        ALONE,
    ],
    "less_than_a_tile": [Prefix(16, ((1, 40), (1, 50), (1, 17)))],
    "no_whole_tiles": [Prefix(80, ((1, 90), (1, 81), (1, 128)))],
    "seen_to_the_last_token": [Prefix(96, ((1, 96), (1, 96), (1, 80)))],
    "beside_prefill": [Prefix(64, ((1, 70), (30, 120), (1, 90), (2, 66)), (Prefix(96, ((1, 100), (1, 97))),))],
}
"""Of blocks of 16 tokens. Rows that look at a common block's last tokens may end in it."""


@pytest.fixture(params=[1, 3], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """As many as cut a prefix's rows into parts, or some rows by heads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rows_of(tree: list[Prefix], block_size: int) -> list[tuple[int, int, list[int]]]:
    """(query tokens, sequence length, blocks) of all rows, mixed; blocks are scattered."""
    rng = np.random.default_rng(7)
    free = iter(rng.permutation(np.arange(1, 2000)).tolist())
    rows: list[tuple[int, int, list[int]]] = []

    def grow(prefix: Prefix, blocks: list[int]) -> None:
        blocks = blocks + [next(free) for _ in range(prefix.tokens // block_size - len(blocks))]
        for query, length in prefix.rows:
            count = -(-length // block_size)
            rows.append((query, length, (blocks + [next(free) for _ in range(count - len(blocks))])[:count]))
        for inner in prefix.inside:
            grow(inner, blocks)

    for prefix in tree:
        grow(prefix, [])
    return [rows[place] for place in rng.permutation(len(rows))]


def attend(
    rows: list[tuple[int, int, list[int]]],
    states: list[torch.Tensor],
    cache: torch.Tensor,
    block_size: int,
    window: int,
) -> torch.Tensor:
    """The rows' attention by the compiled kernels. Shape: states of q, k, v (T, H, D); cache (2, blocks, ...)."""
    step = build_step([Row([0] * query, length - query, blocks) for query, length, blocks in rows], block_size)
    group = GroupStep(window, step.tables[0], step.slot_mappings[0], block_size)
    (planned,) = NativeKernels(native_ops()).plan(step.query_indptr, step.seq_lens, [group], device=torch.device("cpu"))
    keys, values = cache.view(2, -1, cache.shape[3] * cache.shape[4])
    query, key, value = states
    return planned.attend(query, key, value, keys, values, scaling=SCALING)


def compute(
    tree: list[Prefix], dtype: torch.dtype, heads: tuple[int, int, int], block_size: int = 16, window: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Together, each row in a step of its own, and the oracle."""
    rows = rows_of(tree, block_size)
    q_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    cache = some(2, 2000, block_size, kv_heads, dim)
    lens = [query for query, _, _ in rows]
    ends: Int32 = np.cumsum([0, *lens]).astype(np.int32)
    # What a row writes is what lies there already: rows here may end in blocks that others look at.
    places = [
        (blocks[place // block_size], place % block_size)
        for query, length, blocks in rows
        for place in range(length - query, length)
    ]
    blocks_at, offsets = (torch.tensor(column) for column in zip(*places, strict=True))
    states = [some(sum(lens), q_heads, dim), *cache[:, blocks_at, offsets].unbind(0)]
    expected = reference.paged_attention(
        states[0],
        cache,
        query_lens=lens,
        seq_lens=[length for _, length, _ in rows],
        block_tables=[blocks for _, _, blocks in rows],
        scaling=SCALING,
        scales=(1.0, 1.0),
        window=window,
    )
    together = attend(rows, states, cache, block_size, window)
    apart = [
        attend([row], [part[ends[place] : ends[place + 1]] for part in states], cache, block_size, window)
        for place, row in enumerate(rows)
    ]
    return together, torch.cat(apart), expected


@pytest.mark.parametrize(("dtype", "error"), TOLERANCES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_attend_rows_of_a_prefix_equal_rows_alone_and_oracle(
    tree: list[Prefix], dtype: torch.dtype, error: float
) -> None:
    together, alone, expected = compute(tree, dtype, (6, 2, 64))
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, expected, atol=error, rtol=error)


@pytest.mark.parametrize("heads", [(1, 1, 32), (4, 4, 32), (9, 3, 64), (14, 2, 96), (16, 1, 128), (71, 1, 32)], ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_attend_rows_of_a_prefix_any_heads_and_blocks(heads: tuple[int, int, int], block_size: int) -> None:
    tree = TREES["prefixes_within_one"]
    together, alone, expected = compute(tree, torch.bfloat16, heads, block_size)
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [1, 40, 165, 1000, -64, -160, -1000])
@pytest.mark.parametrize("tree", ["all_share", "prefixes_within_one", "beside_prefill"])
def test_attend_rows_of_a_prefix_with_a_window_or_chunks(tree: str, window: int) -> None:
    """Some of the rows see all of the prefix, some a part of it that begins anywhere."""
    together, alone, expected = compute(TREES[tree], torch.bfloat16, (6, 2, 32), window=window)
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_attend_not_a_number_in_one_row_stays_there(value: float) -> None:
    rows = rows_of([Prefix(64, ((1, 70), (1, 80), (1, 90)))], 16)
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(2, 2000, 16, 1, 32, generator=generator).bfloat16()
    states = [torch.randn(3, 1, 32, generator=generator).bfloat16() for _ in range(3)]
    clean = attend(rows, states, cache.clone(), 16, 0)
    cache[1, rows[1][2][4], 0] = value
    dirty = attend(rows, states, cache, 16, 0)
    assert not dirty[1].isfinite().any()
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(
    ("tree", "threads", "tiles"),
    [
        # 16 of a prefix in each of 2 parts of 16 rows, or of 3; 15 rows have 1 tile behind it, and 17 have 2.
        ("all_share", 1, 2 * 16 + 15 + 2 * 17),
        ("all_share", 3, 3 * 16 + 15 + 2 * 17),
        # Fewer rows than keep so many threads at work: each reads for itself.
        ("all_share", 32, 32 * 16 + 15 + 2 * 17),
        # 2 of the outer prefix, 3 of one within it; behind them 70, 300, 161, 170 and 129; rows that share nothing.
        ("prefixes_within_one", 1, 2 + 3 + (1 + 8) + (1 + 1) + 3 + (1 + 1 + 2 + 5)),
        ("less_than_a_tile", 1, 2 + 2 + 1),
        ("two_prefixes", 1, (3 + 1 + 2 + 4) + (2 + 1 + 2)),
        # 90 and 81 have 16 tokens of the prefix behind whole tiles, and so does 128.
        ("no_whole_tiles", 1, 2 + 1 + 1 + 2),
    ],
)
def test_plan_rows_of_a_prefix_look_at_it_once_in_a_part(tree: str, threads: int, tiles: int) -> None:
    rows = rows_of(TREES[tree], 16)
    step = build_step([Row([0] * query, length - query, blocks) for query, length, blocks in rows], 16)
    group = GroupStep(0, step.tables[0], step.slot_mappings[0], 16)
    ops = native_ops()
    (planned,) = NativeKernels(ops).plan(step.query_indptr, step.seq_lens, [group], device=torch.device("cpu"))
    assert ops.planned_tiles(planned.rows, kv_heads=2, share=3, threads=threads) == 2 * tiles
