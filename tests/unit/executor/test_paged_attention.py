"""The fast paged attention against the float64 oracle: odd shapes, shuffled blocks, garbage in unused slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_service.kernels import reference
from executor_service.kernels.attention_plan import AttentionLimits, plan_attention
from executor_service.kernels.fp8 import FP8_TYPES, PLAIN, layer_codecs
from executor_service.kernels.paged_kernels import GroupStep, PagedKernels
from executor_service.kernels.torch_paged import paged_attention
from tests.simulation.harness import first_read
from tests.unit.executor.step_builder import Row, build_step

# (dtype, absolute tolerance, relative tolerance)
TOLERANCES = [(torch.float32, 2e-6, 1e-5), (torch.bfloat16, 2e-2, 2e-2), (torch.float16, 2e-3, 2e-3)]
CPU = torch.device("cpu")
WIDE = AttentionLimits(gather_tokens=1 << 16)
# Every bound so small that it splits: one row a group, 16 queries a mask, indices made per layer.
NARROW = AttentionLimits(gather_tokens=1, mask_elements=1, index_elements=0)

# (query tokens, sequence length) of each row.
STEPS = {
    "decode_one": [(1, 37)],
    "decode_first_token": [(1, 1), (1, 2)],
    "decode_equal": [(1, 32), (1, 32), (1, 32)],
    "decode_ragged": [(1, 5), (1, 200), (1, 64), (1, 1), (1, 130), (1, 66)],
    "prefill_new": [(33, 33)],
    "prefill_chunk": [(40, 75), (2, 130)],
    "mixed": [(1, 200), (17, 17), (1, 9), (23, 90), (1, 33), (2, 2)],
}


WINDOWS = [(1, 7), (8, 1), (8, 20), (16, 16), (16, 33), (32, 300)]
CHUNKS = [(1, -7), (8, -2), (8, -20), (16, -16), (16, -33), (32, -300)]
"""Tokens per block, and a window or, negated, a chunk."""


def run_both(
    shapes: list[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    limits: AttentionLimits,
    *,
    heads: tuple[int, int, int] = (6, 2, 16),
    garbage: float = float("nan"),
    seed: int = 0,
    stored: torch.dtype | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    window: int = 0,
    kernels: PagedKernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step through both, K/V stored as dtype or as fp8 with scales; by other kernels than torch's if there are any.

    The slots that no row uses hold garbage, and so does the null block before windows.
    """
    q_heads, kv_heads, dim = heads
    rng = np.random.default_rng(seed)
    counts = [-(-seq // block_size) for _, seq in shapes]
    free = rng.permutation(np.arange(1, sum(counts) + 4)).tolist()
    blocks = [[free.pop() for _ in range(count)] for count in counts]
    firsts = [first_read(seq - query, window) for query, seq in shapes]
    for first, own in zip(firsts, blocks, strict=True):
        own[: first // block_size] = [0] * (first // block_size)
    rows = [Row([0] * query, seq - query, own) for (query, seq), own in zip(shapes, blocks, strict=True)]
    step = build_step(rows, block_size)
    torch.manual_seed(seed)
    num_tokens = len(step.token_ids)
    query = torch.randn(num_tokens, q_heads, dim).to(dtype)
    key, value = torch.randn(2, num_tokens, kv_heads, dim).to(dtype)
    cache = torch.full((2, sum(counts) + 4, block_size, kv_heads, dim), garbage, dtype=stored or dtype)
    for first, row in zip(firsts, rows, strict=True):
        for position in range(first, row.start):  # what earlier steps wrote
            past = torch.randn(2, kv_heads, dim) / torch.tensor(scales).view(2, 1, 1)
            cache[:, row.blocks[position // block_size], position % block_size] = past.to(cache.dtype)
    expected_cache = cache.clone()
    slots = torch.from_numpy(step.slot_mappings[0].copy())
    reference.write_kv(key, value, expected_cache, slots, None if stored is None else scales)
    seq_lens = [seq for _, seq in shapes]
    expected = reference.paged_attention(
        query,
        expected_cache,
        query_lens=[q for q, _ in shapes],
        seq_lens=seq_lens,
        block_tables=blocks,
        scaling=0.3,
        scales=scales,
        window=window,
    )
    plan = plan_attention(
        step.query_indptr,
        step.seq_lens,
        step.tables[0],
        step.slot_mappings[0],
        block_size=block_size,
        limits=limits,
        device=torch.device("cpu"),
        window=window,
    )
    flat, codecs = cache.view(2, -1, kv_heads * dim), PLAIN
    if stored is not None:
        flat = flat.view(torch.uint8)
        (codecs,) = layer_codecs(stored, [scales[0]], [scales[1]])
    if kernels is None:
        actual = paged_attention(query, key, value, flat[0], flat[1], plan=plan, scaling=0.3, codecs=codecs)
    else:
        group = GroupStep(window, step.tables[0], step.slot_mappings[0], block_size)
        (own,) = kernels.plan(step.query_indptr, step.seq_lens, [group], device=CPU)
        actual = own.attend(query, key, value, flat[0], flat[1], scaling=0.3)
    assert torch.equal(cache.float().nan_to_num(7.0), expected_cache.float().nan_to_num(7.0))
    return actual, expected


@pytest.mark.parametrize("tolerance", TOLERANCES, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("limits", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("shapes", STEPS.values(), ids=STEPS.keys())
def test_paged_attention_any_step_equals_oracle(
    shapes: list[tuple[int, int]],
    block_size: int,
    limits: AttentionLimits,
    tolerance: tuple[torch.dtype, float, float],
) -> None:
    dtype, atol, rtol = tolerance
    actual, expected = run_both(shapes, block_size, dtype, limits)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("tolerance", TOLERANCES, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("limits", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(("block_size", "window"), WINDOWS + CHUNKS)
@pytest.mark.parametrize("shapes", STEPS.values(), ids=STEPS.keys())
def test_paged_attention_with_a_window_or_chunks_equals_oracle(
    shapes: list[tuple[int, int]],
    block_size: int,
    window: int,
    limits: AttentionLimits,
    tolerance: tuple[torch.dtype, float, float],
) -> None:
    dtype, atol, rtol = tolerance
    actual, expected = run_both(shapes, block_size, dtype, limits, window=window)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("heads", [(4, 4, 8), (5, 1, 24), (9, 3, 64), (1, 1, 2)])
def test_paged_attention_any_head_geometry_equals_oracle(heads: tuple[int, int, int]) -> None:
    actual, expected = run_both(STEPS["mixed"], 16, torch.float32, WIDE, heads=heads)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("tolerance", TOLERANCES, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("limits", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("stored", FP8_TYPES.values(), ids=FP8_TYPES)
@pytest.mark.parametrize("shapes", STEPS.values(), ids=STEPS.keys())
def test_paged_attention_over_fp8_equals_oracle_that_reads_what_was_written(
    shapes: list[tuple[int, int]],
    stored: torch.dtype,
    limits: AttentionLimits,
    tolerance: tuple[torch.dtype, float, float],
) -> None:
    """This step's own K/V included: the oracle knows them only from the cache. Values beyond 0.011 * 448 saturate."""
    dtype, atol, rtol = tolerance
    actual, expected = run_both(shapes, 16, dtype, limits, stored=stored, scales=(0.011, 0.25))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    if shapes != STEPS["decode_first_token"] and dtype == torch.float32:
        plain, _ = run_both(shapes, 16, dtype, limits)
        assert (plain - expected).abs().max() > 100 * atol


@pytest.mark.parametrize("heads", [(3, 3, 5), (5, 1, 24)])
def test_paged_attention_over_fp8_any_head_geometry_equals_oracle(heads: tuple[int, int, int]) -> None:
    """An odd number of values in a token, too."""
    actual, expected = run_both(
        STEPS["mixed"], 16, torch.float32, WIDE, heads=heads, stored=torch.float8_e4m3fn, scales=(0.02, 0.25)
    )
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_paged_attention_garbage_in_unused_slots_changes_no_bit(garbage: float) -> None:
    clean, _ = run_both(STEPS["mixed"], 16, torch.float32, WIDE, garbage=0.0)
    dirty, _ = run_both(STEPS["mixed"], 16, torch.float32, WIDE, garbage=garbage)
    assert torch.equal(clean, dirty)


def test_plan_attention_many_lengths_bounds_padding_and_gather() -> None:
    shapes = [(1, length) for length in (900, 30, 40, 500, 880, 470, 100, 90, 860)]
    table = list(range(1, 100))
    step = build_step([Row([0], seq - 1, table) for _, seq in shapes], 16)
    limits = AttentionLimits(gather_tokens=1800)
    plan = plan_attention(
        step.query_indptr,
        step.seq_lens,
        step.tables[0],
        step.slot_mappings[0],
        block_size=16,
        limits=limits,
        device=CPU,
    )
    groups = [sorted(int(n) for n in group.lens) for group in plan.decode]
    assert groups == [[880, 900], [860], [470, 500], [40, 90, 100], [30]]
    assert all(len(group.lens) * group.width <= 1800 for group in plan.decode)
    assert sorted(int(t) for group in plan.decode for t in group.tokens) == list(range(9))


def test_plan_attention_over_the_index_limit_keeps_no_slots() -> None:
    step = build_step([Row([0], 99, list(range(1, 8))), Row([0], 9, [9])], 16)
    limits = AttentionLimits(gather_tokens=4096, index_elements=50)
    plan = plan_attention(
        step.query_indptr,
        step.seq_lens,
        step.tables[0],
        step.slot_mappings[0],
        block_size=16,
        limits=limits,
        device=CPU,
    )
    assert [(group.width, group.kept_slots is None) for group in plan.decode] == [(100, True), (10, False)]


@pytest.mark.parametrize(("context", "chunk"), [(1, 512), (8192, 512), (131072, 32), (10_000_000, 16)])
def test_attention_limits_query_chunk_follows_context(context: int, chunk: int) -> None:
    assert AttentionLimits(gather_tokens=1).query_chunk(context) == chunk
