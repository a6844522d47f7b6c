"""The Triton kernels, interpreted, against the float64 oracle: odd shapes, shuffled blocks, garbage in unused slots.

In float32 and float16, since the interpreter computes bfloat16 wrongly; few programs and large tiles, since it takes
milliseconds for each. That they compile, and with what, is `test_triton_compile`.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton

from executor_service.backends.base import BackendError, StepBatch
from executor_service.kernels import reference, triton_paged
from executor_service.kernels.copy_blocks import copy_blocks, layer_addresses
from executor_service.kernels.fp8 import PLAIN, layer_codecs
from executor_service.kernels.launch_shapes import Target
from executor_service.kernels.paged_kernels import DeviceTables, GroupStep
from executor_service.kernels.triton_paged import TritonDecode, TritonKernels, TritonStep
from executor_service.kernels.write_kv import write_kv
from tests.unit.executor.interpreter_casts import exact_casts
from tests.unit.executor.step_builder import Row, build_step

CPU = torch.device("cpu")
PADDING = 3
TOLERANCES = {torch.float32: (3e-6, 1e-5), torch.float16: (3e-3, 3e-3), torch.bfloat16: (3e-3, 8e-3)}
# NumPy, by which the interpreter computes, warns of what GPUs do silently: 0 / 0 in the padding of a tile, for one.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:executor_service")
# Weights are float32 in the kernel and float64 in the oracle; products are of the numbers that the cache really holds.
DECODE = [(1, 37), (1, 1), (1, 600), (1, 256), (1, 257)]
MIXED = [(1, 200), (17, 17), (1, 9), (23, 90), (1, 33), (2, 2)]


@dataclass(frozen=True)
class Case:
    """One step through one layer. shapes: (query tokens, sequence length) of each row; heads: H_q, H_kv, D."""

    shapes: list[tuple[int, int]]
    heads: tuple[int, int, int] = (4, 2, 64)
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    programs: int = 4
    garbage: float = float("nan")
    transposed: bool = False
    scales: tuple[float, float] = (1.0, 1.0)
    recorded: bool = False
    query_factor: float = 1.0
    key_factor: float = 1.0


CASES = {
    "decode": Case(DECODE),
    "decode_split": Case(DECODE, programs=64),
    "decode_one_first_token": Case([(1, 1)]),
    "decode_split_window": Case(DECODE, programs=64, window=300),
    "decode_short_window": Case(DECODE, programs=64, window=3),
    "decode_split_chunk": Case(DECODE, programs=64, window=-300),
    "decode_short_chunk": Case(DECODE, programs=64, window=-3),
    "decode_softcap_half": Case(DECODE, dtype=torch.float16, softcap=5.0),
    "recorded": Case(DECODE, recorded=True),
    "recorded_split": Case(DECODE, recorded=True, programs=64),
    "recorded_split_window": Case(DECODE, recorded=True, programs=64, window=300),
    "recorded_short_window": Case(DECODE, recorded=True, programs=64, window=3),
    "recorded_split_chunk": Case(DECODE, recorded=True, programs=64, window=-300),
    "recorded_short_chunk": Case(DECODE, recorded=True, programs=64, window=-3),
    "recorded_softcap_half": Case(DECODE, recorded=True, dtype=torch.float16, softcap=5.0),
    "recorded_group_7_dim_80": Case(DECODE, recorded=True, heads=(7, 1, 80), block_size=48, programs=32),
    "prefill_new": Case([(150, 150)]),
    "prefill_chunk": Case([(40, 300), (2, 130)]),
    "prefill_window": Case([(150, 150), (40, 300)], window=33),
    "prefill_softcap_window_half": Case([(40, 75)], window=50, softcap=3.0, dtype=torch.float16),
    "prefill_chunks": Case([(150, 150), (40, 300)], window=-33),
    "prefill_softcap_chunks_half": Case([(40, 75)], window=-50, softcap=3.0, dtype=torch.float16),
    "mixed_chunks": Case(MIXED, window=-16),
    "mixed": Case(MIXED),
    "mixed_half": Case(MIXED, dtype=torch.float16),
    "mixed_transposed": Case(MIXED, transposed=True),
    "block_8": Case(MIXED, block_size=8, heads=(1, 1, 64)),
    "block_32_group_16": Case(MIXED, block_size=32, heads=(16, 1, 64)),
    "block_64_group_3": Case(MIXED, block_size=64, heads=(9, 3, 64)),
    "block_128_dim_128": Case(MIXED, block_size=128, heads=(8, 2, 128)),
    "block_256_dim_256": Case(MIXED, block_size=256, heads=(2, 1, 256)),
    "block_48_dim_80_group_7": Case(MIXED, block_size=48, heads=(7, 1, 80)),
    "block_1_dim_96": Case(MIXED, block_size=1, heads=(5, 5, 96)),
    "tiny_heads": Case(MIXED, heads=(6, 2, 20)),
    "e4m3": Case(MIXED, kv_dtype=torch.float8_e4m3fn, scales=(0.02, 0.5)),
    "e4m3_bfloat16": Case(MIXED, kv_dtype=torch.float8_e4m3fn, scales=(0.02, 0.5), dtype=torch.bfloat16, programs=64),
    "e5m2_bfloat16": Case(MIXED, kv_dtype=torch.float8_e5m2, scales=(0.01, 3.0), dtype=torch.bfloat16),
    "e4m3_queries_below_float16": Case(
        MIXED,
        kv_dtype=torch.float8_e4m3fn,
        scales=(4e4, 1.0),
        dtype=torch.bfloat16,
        query_factor=3e-7,
        key_factor=2e6,
    ),
    "e4m3_decode_queries_below_float16": Case(
        DECODE,
        kv_dtype=torch.float8_e4m3fn,
        scales=(4e4, 1.0),
        dtype=torch.bfloat16,
        query_factor=3e-7,
        key_factor=2e6,
    ),
    "e4m3_queries_beyond_float16": Case(
        MIXED, kv_dtype=torch.float8_e4m3fn, scales=(1e-7, 1.0), dtype=torch.bfloat16, query_factor=3e5
    ),
    "e5m2": Case(MIXED, kv_dtype=torch.float8_e5m2, scales=(0.01, 3.0), dtype=torch.float16, programs=64),
}


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The step through kernels and oracle: what either gives, and whether each token's K/V are stored alike."""
    q_heads, kv_heads, dim = case.heads
    kv_dtype = case.kv_dtype or case.dtype
    rng = np.random.default_rng(0)
    counts = [-(-seq // case.block_size) for _, seq in case.shapes]
    num_blocks = sum(counts) + 4
    free = rng.permutation(np.arange(1, num_blocks)).tolist()
    blocks = [[free.pop() for _ in range(count)] for count in counts]
    rows = [Row([0] * query, seq - query, own) for (query, seq), own in zip(case.shapes, blocks, strict=True)]
    step = build_step(rows, case.block_size)
    torch.manual_seed(0)
    num_tokens = len(step.token_ids)
    query = _states(num_tokens, q_heads, dim, case) * case.query_factor
    key, value = (_states(num_tokens, kv_heads, dim, case) for _ in range(2))
    key = key * case.key_factor
    shape = (2, num_blocks, case.block_size, kv_heads, dim)
    cache = torch.full(shape, case.garbage).to(kv_dtype)
    for row in rows:  # what earlier steps wrote
        factors = torch.tensor([case.key_factor / case.scales[0], 1 / case.scales[1]])
        before = torch.randn(row.start, 2, kv_heads, dim) * factors.view(1, 2, 1, 1)
        for position in range(row.start):
            cache[:, row.blocks[position // case.block_size], position % case.block_size] = before[position].to(
                kv_dtype
            )
    expected_cache = cache.clone()
    slots = torch.from_numpy(step.slot_mappings[0].copy())
    reference.write_kv(key, value, expected_cache, slots, case.scales if case.kv_dtype else None)
    expected = reference.paged_attention(
        query,
        expected_cache,
        query_lens=[query_len for query_len, _ in case.shapes],
        seq_lens=[seq_len for _, seq_len in case.shapes],
        block_tables=blocks,
        scaling=0.3,
        scales=case.scales,
        window=case.window or 0,
        softcap=case.softcap,
    )
    planned = recorded(case, step) if case.recorded else planned_step(case, step)
    flat, codecs = cache.view(2, -1, kv_heads * dim), PLAIN
    if case.kv_dtype is not None:
        flat = flat.view(torch.uint8)  # as a `PagedKvCache` keeps it
        (codecs,) = layer_codecs(case.kv_dtype, case.scales[:1], case.scales[1:])
    if case.recorded:  # whatever padding holds, nobody notices
        query, key, value = (torch.cat([states, torch.randn_like(states[:PADDING])]) for states in (query, key, value))
    with exact_casts() if case.kv_dtype else nullcontext():
        actual = planned.attend(query, key, value, flat[0], flat[1], scaling=0.3, codecs=codecs, softcap=case.softcap)
    same = bits(cache) == bits(expected_cache)
    return actual[:num_tokens], expected, same


def planned_step(case: Case, step: StepBatch) -> TritonStep:
    return TritonStep(
        Target.INTERPRETER,
        case.programs,
        query_indptr=step.query_indptr,
        seq_lens=step.seq_lens,
        group=GroupStep(case.window or 0, step.tables[0], step.slot_mappings[0], case.block_size),
        device=CPU,
    )


def recorded(case: Case, step: StepBatch) -> TritonDecode:
    """The step as it is recorded: with rows of padding, and a table longer than it says."""
    rows = step.num_rows + PADDING
    last = int(step.tables[0].block_indptr[-1])
    tables = DeviceTables(
        query_indptr=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=torch.tensor([*step.seq_lens, *[0] * PADDING], dtype=torch.int32),
        block_indptr=torch.tensor([*step.tables[0].block_indptr, *[last] * PADDING], dtype=torch.int32),
        block_ids=torch.tensor([*step.tables[0].block_ids, *[1 << 30] * 9], dtype=torch.int32),
        slots=torch.tensor([*step.slot_mappings[0], *[-1] * PADDING]),
        block_size=case.block_size,
    )
    return TritonDecode(Target.INTERPRETER, case.programs, tables, case.window or 0)


def _states(tokens: int, heads: int, dim: int, case: Case) -> torch.Tensor:
    """Random states; transposed as a model that keeps (H, T, D) hands them on."""
    states = torch.randn(tokens, heads, dim).to(case.dtype)
    return states.transpose(0, 1).contiguous().transpose(0, 1) if case.transposed else states


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers: NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_triton_step_equals_oracle(case: Case) -> None:
    actual, expected, same = run(case)
    assert bool(same.all())
    atol, rtol = TOLERANCES[case.dtype]
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, atol=atol * largest, rtol=rtol)


@pytest.mark.parametrize("garbage", [float("inf"), 1e30])
def test_triton_step_garbage_in_unused_slots_changes_no_bit(garbage: float) -> None:
    clean, _, _ = run(Case(MIXED, garbage=0.0, window=40))
    dirty, _, _ = run(Case(MIXED, garbage=garbage, window=40))
    assert torch.equal(clean, dirty)


def test_triton_step_splits_give_what_one_split_gives() -> None:
    one, _, _ = run(Case(DECODE, programs=1))
    many, _, _ = run(Case(DECODE, programs=64))
    assert not torch.equal(one, many)  # another order of sums: else nothing was split
    torch.testing.assert_close(one, many, atol=1e-6, rtol=1e-5)


def test_triton_step_not_a_number_stays_in_its_row() -> None:
    """K/V of one row are NaN: its result is, the others' are not, and the NaN is stored, where it is found out."""
    step = build_step([Row([0] * 3, 0, [1]), Row([0], 5, [2])], 16)
    key = torch.randn(4, 2, 64)
    key[1, 0, 7] = float("nan")
    cache = torch.zeros(2, 3, 16, 2, 64)
    planned = TritonStep(
        Target.INTERPRETER,
        4,
        query_indptr=step.query_indptr,
        seq_lens=step.seq_lens,
        group=GroupStep(0, step.tables[0], step.slot_mappings[0], 16),
        device=CPU,
    )
    flat = cache.view(2, -1, 128)
    out = planned.attend(torch.randn(4, 2, 64), key, torch.randn(4, 2, 64), flat[0], flat[1], scaling=1.0)
    assert out.isnan().any(-1).tolist() == [[False, False], [True, False], [True, False], [False, False]]
    assert cache.isnan().nonzero().tolist() == [[0, 1, 1, 0, 7]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_write_kv_fp8_every_half_number_is_stored_as_torch_stores_it(dtype: torch.dtype) -> None:
    """All 65,536 numbers of float16: rounding to nearest even, saturation, subnormals; NaN stays NaN."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(512, 1, 128)
    cache = torch.zeros(2, 32, 16, 1, 128, dtype=dtype)
    expected = cache.clone()
    slots = torch.arange(512)
    reference.write_kv(every, every, expected, slots, (1.0, 0.37))
    flat = cache.view(2, 512, 128)
    with exact_casts():
        write_kv(every, every, flat[0], flat[1], slots, k_scale=1.0, v_scale=0.37, block_t=256)
    number = ~expected.float().isnan()
    assert torch.equal(bits(cache)[number], bits(expected)[number])
    assert bool(cache.float()[~number].isnan().all())
    assert int((~number).sum()) == 2 * 2 * 1023


def test_write_kv_another_type_is_refused() -> None:
    states = torch.zeros(1, 1, 64)
    cache = torch.zeros(16, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"expected a cache of torch\.float32"):
        write_kv(states, states, cache, cache, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 9, 16, 2, 64), torch.float32),
        ((2, 9, 5, 3, 80), torch.bfloat16),
        ((2, 9, 3, 1, 3), torch.float16),
        ((2, 9, 7, 1, 5), torch.float8_e4m3fn),
    ],
)
def test_copy_blocks_equals_oracle(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    layers = [torch.randn(shape).to(dtype) for _ in range(3)]
    expected = [layer.clone() for layer in layers]
    copies = [(1, 4), (8, 2), (3, 7)]
    reference.copy_blocks(expected, torch.empty(0), [(1, source, target) for source, target in copies])  # type: ignore[misc]
    source, target = torch.tensor(copies).unbind(1)
    copy_blocks(layers, layer_addresses(layers), source, target, block=512)
    for layer, other in zip(layers, expected, strict=True):
        assert torch.equal(bits(layer), bits(other))


class FarCache:
    """K and V of one layer more than 2^31 elements behind their first: reserved addresses, memory where it is used.

    What the kernels are given begins at the first element and is one slot long.
    """

    HEADS, DIM, BLOCK_SIZE = 2, 64, 16
    FIRST_BLOCK = 2**31 // (HEADS * DIM * BLOCK_SIZE)
    NUM_BLOCKS = FIRST_BLOCK + 8

    def __init__(self) -> None:
        self.width = self.HEADS * self.DIM
        self.half = self.NUM_BLOCKS * self.BLOCK_SIZE * self.width * 2
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
        self._memory = mmap.mmap(-1, 2 * self.half, flags=flags)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.keys, self.values = (self._at(half * self.half, 1).view(1, self.width) for half in range(2))

    def block(self, part: int, block: int) -> torch.Tensor:
        """One block. Shape: (BLOCK_SIZE, HEADS, DIM)."""
        size = self.BLOCK_SIZE * self.width
        return self._at(part * self.half + block * size * 2, self.BLOCK_SIZE).view(-1, self.HEADS, self.DIM)

    def bytes_at(self, offset: int, size: int) -> torch.Tensor:
        """Some of the memory. Shape: (size,) uint8."""
        return torch.frombuffer((ctypes.c_char * size).from_address(self.address + offset), dtype=torch.uint8)

    def _at(self, offset: int, slots: int) -> torch.Tensor:
        return self.bytes_at(offset, slots * self.width * 2).view(torch.float16)


@pytest.fixture(scope="module")
def far() -> FarCache:
    return FarCache()


def test_kernels_reach_blocks_behind_two_to_the_31_elements(far: FarCache) -> None:
    """Written, then read by decode and prefill: offsets of 32 bits would lie before the cache."""
    near_step, far_step = (
        build_step([Row([0] * 20, 0, [base + 1, base + 5]), Row([0], 17, [base + 3, base + 2])], 16)
        for base in (0, far.FIRST_BLOCK)
    )
    torch.manual_seed(0)
    tokens = len(near_step.token_ids)
    query = torch.randn(tokens, 4, 64).half()
    key, value = torch.randn(2, tokens, 2, 64).half()
    near = torch.randn(2, 8, 16, 2, 64).half()
    for part in range(2):
        for block in range(8):
            far.block(part, far.FIRST_BLOCK + block).copy_(near[part, block])
    case = Case([], dtype=torch.float16)
    flat = near.view(2, -1, far.width)
    expected = planned_step(case, near_step).attend(query, key, value, flat[0], flat[1], scaling=0.3)
    actual = planned_step(case, far_step).attend(query, key, value, far.keys, far.values, scaling=0.3)
    assert torch.equal(actual, expected)
    for part in range(2):
        for block in range(8):
            assert torch.equal(far.block(part, far.FIRST_BLOCK + block), near[part, block])


def test_copy_blocks_reaches_blocks_behind_two_to_the_31_words(far: FarCache) -> None:
    """Of a size that only bytes divide: a word is one byte, and there are the most of them."""
    block_bytes = 3 * 3
    first = 2**31 // block_bytes
    layer = torch.empty((2, first + 8, 3, 1, 3), dtype=torch.float8_e5m2, device="meta")

    def block(part: int, block_id: int) -> torch.Tensor:
        return far.bytes_at((part * (first + 8) + block_id) * block_bytes, block_bytes)

    source, target = torch.tensor([first + 1, 3]), torch.tensor([2, first + 4])
    for part in range(2):
        for place, block_id in enumerate(source.tolist()):
            block(part, block_id).fill_(10 * part + place + 1)
    copy_blocks([layer], torch.tensor([far.address]), source, target)
    for part in range(2):
        for place, block_id in enumerate(target.tolist()):
            assert block(part, block_id).tolist() == [10 * part + place + 1] * block_bytes


@pytest.mark.parametrize(("window", "splits"), [(0, 8 + 1), (512, 2 + 1), (-512, 2 + 1), (-300, 1 + 1)])
def test_triton_step_decode_splits_cover_what_is_seen_and_no_more(window: int, splits: int) -> None:
    """Of 2,048 positions, the last of a chunk of 512 but not of one of 300, and of one."""
    step = build_step([Row([0], 2047, list(range(1, 129))), Row([0], 0, [129])], 16)
    planned = TritonStep(
        Target.INTERPRETER,
        64,
        query_indptr=step.query_indptr,
        seq_lens=step.seq_lens,
        group=GroupStep(window, step.tables[0], step.slot_mappings[0], 16),
        device=CPU,
    )
    rows = planned._decode_rows(2, 64)
    assert rows is not None
    assert rows.num_splits == splits


def kernels(**changes: object) -> TritonKernels:
    """Kernels of a small model."""
    values: dict[str, object] = {
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
    }
    return TritonKernels(CPU, **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.bfloat16}, "computes bfloat16 wrongly"),
        ({"kv_dtype": torch.float8_e5m2}, "rounds to 8-bit floats wrongly"),
        ({"head_dim": 512}, "at most 256 elements"),
    ],
)
def test_triton_kernels_what_they_can_not_do_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        kernels(**changes)


@pytest.mark.parametrize(
    ("capability", "kv_dtype", "outcome"),
    [
        ((7, 5), torch.float16, "compute capability 8.0 at least"),
        ((8, 0), torch.float16, Target.CUDA),
        ((8, 0), torch.float8_e5m2, Target.CUDA),
        ((8, 6), torch.float8_e4m3fn, "compute capability 8.9 for fp8_e4m3, got a GPU; set --kv-cache-dtype auto or"),
        ((8, 9), torch.float8_e4m3fn, Target.CUDA),
        ((9, 0), torch.float8_e4m3fn, Target.HOPPER),
        ((10, 0), torch.float16, Target.HOPPER),
        ((12, 0), torch.float8_e4m3fn, Target.CUDA),
    ],
)
def test_triton_kernels_know_what_a_gpu_can_do(
    capability: tuple[int, int], kv_dtype: torch.dtype, outcome: Target | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_paged, "paged_decode_kernel", triton.JITFunction(triton_paged.paged_decode))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    properties = SimpleNamespace(multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    expected = nullcontext() if isinstance(outcome, Target) else pytest.raises(BackendError, match=outcome)
    with expected:
        made = TritonKernels(
            torch.device("cuda:0"),
            dtype=torch.float16,
            kv_dtype=kv_dtype,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
        )
        assert (made._target, made._programs) == (outcome, 4 * 108)


def test_triton_kernels_reserve_what_the_widest_step_splits_take() -> None:
    """The partial results of a decode step, counted as they are allocated, are within what was reserved."""
    made = kernels()
    taken: list[int] = []
    for lengths in ([1024] * 4, [1024, 1, 1, 1], [300, 700, 2, 1024]):
        step = build_step([Row([0], seq - 1, list(range(1, 70))) for seq in lengths], 16)
        group = GroupStep(0, step.tables[0], step.slot_mappings[0], 16)
        (planned,) = made.plan(step.query_indptr, step.seq_lens, [group], device=CPU)
        rows = planned._decode_rows(2, 256)
        assert rows is not None
        taken.append(rows.num_splits * 4 * 65 * 4)
    assert max(taken) <= made.reserved_bytes(4, 1024, [0])
