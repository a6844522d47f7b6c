"""The work of the check: kernels against the oracle, and timed beside torch's attention and FlashInfer's.

Everything takes a device and a timer, so that tests run all of it but FlashInfer on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.shapes import BLOCK_SIZE, Heads, Step
from executor_service.backends.base import BlockCopies, CopyDirection, GroupTables
from executor_service.kernels import reference
from executor_service.kernels.copy_blocks import copy_blocks, layer_addresses
from executor_service.kernels.fp8 import PLAIN, layer_codecs
from executor_service.kernels.paged_kernels import DeviceTables, GroupStep
from executor_service.kernels.triton_paged import TritonAttention, TritonKernels, TritonStep
from executor_service.kv_cache import KvLayout
from executor_service.kv_memory import KvMemory, copy_chunk

# Writing 256 MiB takes some 80 µs, launching an attention layer from Python some 200.
_CLEARINGS = 10

Timer = Callable[[Callable[[], object]], float]
"""Runs something several times and returns the median, in seconds."""


@dataclass(frozen=True)
class Case:
    """One comparison with the oracle.

    Attributes:
        window: below 0, chunks of so many tokens.
        recorded: by the kernels of decode graphs, which cut rows by themselves; of all rows the last token alone.
        rows: (query tokens, sequence length) of each.
    """

    name: str
    heads: Heads
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    recorded: bool = False
    rows: tuple[tuple[int, int], ...] = ((1, 200), (17, 17), (1, 700), (40, 300), (1, 1), (2, 2), (150, 150))


@dataclass(frozen=True)
class Point:
    """One time. Units: seconds; rate: bytes/s in decode, operations/s in prefill; fraction: of what was measured.

    `peers` has the seconds of others for the same work, or why there are none.
    """

    name: str
    seconds: float
    rate: float
    fraction: float
    peers: dict[str, float | str]


def cases(fp8: bool, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)) -> list[Case]:
    """What is compared: types, head sizes, groups, block sizes, windows and soft caps."""
    shapes = [Heads(4, 2, 64), Heads(8, 8, 128), Heads(16, 1, 128), Heads(7, 1, 80), Heads(6, 2, 96), Heads(4, 2, 256)]
    made = [
        Case(f"{_name(dtype)} {heads.num_heads}/{heads.num_kv_heads} x {heads.head_dim}", heads, dtype, dtype, block)
        for dtype in dtypes
        for heads, block in zip(shapes, (16, 8, 32, 64, 128, 256), strict=True)
    ]
    made += [
        Case(f"{_name(dtypes[-1])} window 37", shapes[0], dtypes[-1], dtypes[-1], window=37),
        Case(f"{_name(dtypes[-1])} softcap 5, window 300", shapes[0], dtypes[-1], dtypes[-1], softcap=5.0, window=300),
    ]
    made += [
        Case(f"{_name(dtypes[-1])} chunks of 100", shapes[0], dtypes[-1], dtypes[-1], window=-100),
        *(Case(f"{_name(dtypes[-1])} group of {n}", Heads(n, 1, 128), dtypes[-1], dtypes[-1]) for n in (3, 5, 6, 7)),
        *(
            Case(
                f"{_name(dtypes[-1])} recorded, window {window}",
                shapes[1],
                *dtypes[-1:] * 2,
                window=window,
                recorded=True,
            )
            for window in (None, 300, -100)
        ),
    ]
    if fp8:
        made += [Case(_name(kind), shapes[1], dtypes[-1], kind) for kind in (torch.float8_e4m3fn, torch.float8_e5m2)]
    return made


def largest_error(case: Case, device: torch.device) -> float:
    """The case through the kernels and the float64 oracle. Returns the largest difference over the largest result."""
    heads, rng = case.heads, np.random.default_rng(1)
    rows = tuple((1, seq) for _, seq in case.rows) if case.recorded else case.rows
    counts = [-(-seq // case.block_size) for _, seq in rows]
    order = rng.permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    query_lens, seq_lens = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    positions = [np.arange(seq - query, seq) for query, seq in rows]
    slots = np.concatenate(
        [
            order[first + own // case.block_size] * case.block_size + own % case.block_size
            for first, own in zip(indptr, positions, strict=False)
        ]
    ).astype(np.int64)
    torch.manual_seed(1)
    shape = (2, sum(counts) + 1, case.block_size, heads.num_kv_heads, heads.head_dim)
    cache = torch.randn(shape).to(case.kv_dtype)
    tokens = int(query_lens.sum())
    query = torch.randn(tokens, heads.num_heads, heads.head_dim).to(case.dtype)
    key, value = torch.randn(2, tokens, heads.num_kv_heads, heads.head_dim).to(case.dtype)
    expected_cache = cache.clone()
    scaling, window = heads.head_dim**-0.5, case.window or 0
    scales, codecs = (1.0, 1.0), PLAIN
    if cache.itemsize == 1:
        scales = (0.5, 0.25)
        (codecs,) = layer_codecs(case.kv_dtype, scales[:1], scales[1:])
    reference.write_kv(key, value, expected_cache, torch.from_numpy(slots), None if codecs is PLAIN else scales)
    expected = reference.paged_attention(
        query,
        expected_cache,
        query_lens=query_lens.tolist(),
        seq_lens=seq_lens.tolist(),
        block_tables=[order[a:b].tolist() for a, b in itertools.pairwise(indptr)],
        scaling=scaling,
        scales=scales,
        window=window,
        softcap=case.softcap,
    )
    last = (seq_lens - 1) % case.block_size + 1
    group = GroupStep(window, GroupTables(indptr, order, last), slots, case.block_size)
    query_indptr = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    kernels = _kernels(heads, case.dtype, case.kv_dtype, device)
    step: TritonAttention
    if case.recorded:
        columns = (torch.from_numpy(column).to(device) for column in (query_indptr, seq_lens, indptr, order, slots))
        (step,) = kernels.plan_decode([DeviceTables(*columns, block_size=case.block_size)], [window])
    else:
        (step,) = kernels.plan(query_indptr, seq_lens, [group], device=device)
    there = cache.to(device)
    flat = there.view(2, -1, heads.num_kv_heads * heads.head_dim)
    keys, values = flat if codecs is PLAIN else flat.view(torch.uint8)  # as a `PagedKvCache` keeps it
    states = (query.to(device), key.to(device), value.to(device))
    actual = step.attend(*states, keys, values, scaling=scaling, codecs=codecs, softcap=case.softcap).cpu()
    written = (there.cpu().float() - expected_cache.float()).abs().max()
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(error) if written == 0 else float("inf")


def tolerance(case: Case) -> float:
    """The largest error that counts as right: a few units in the last place of the type it computes in."""
    return {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.dtype]


def far_blocks_are_right(device: torch.device, elements: int = 2**31) -> bool:
    """Whether blocks so many elements behind the first give bit for bit what the same blocks give as the first.

    Offsets of 32 bits would read and write elsewhere.
    """
    heads, rows = Heads(8, 2, 128), ((1, 20), (17, 17))
    width = heads.num_kv_heads * heads.head_dim
    far = elements // (width * BLOCK_SIZE)
    shape = (2, far + 5, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    cache = torch.empty(shape, dtype=torch.float16, device=device)
    torch.manual_seed(1)
    cache[:, :5] = cache[:, far:] = torch.randn((2, 5, *shape[2:]), device=device).half()
    query = torch.randn(18, heads.num_heads, heads.head_dim, device=device).half()
    states = torch.randn(2, 18, heads.num_kv_heads, heads.head_dim, device=device).half()
    found = []
    for first in (0, far):
        order = (np.array([3, 1, 4, 2]) + first).astype(np.int32)
        positions = [np.arange(seq - tokens, seq) for tokens, seq in rows]
        slots = np.concatenate(
            [
                order[2 * row + own // BLOCK_SIZE] * np.int64(BLOCK_SIZE) + own % BLOCK_SIZE
                for row, own in enumerate(positions)
            ]
        )
        (step,) = _kernels(heads, torch.float16, torch.float16, device).plan(
            np.int32([0, 1, 18]),
            np.int32([seq for _, seq in rows]),
            [GroupStep(0, GroupTables(np.int32([0, 2, 4]), order, np.int32([4, 1])), slots, BLOCK_SIZE)],
            device=device,
        )
        keys, values = cache.view(2, -1, width)
        found.append(step.attend(query, *states, keys, values, scaling=0.1))
    return torch.equal(*found) and torch.equal(cache[:, :5], cache[:, far:])


def swaps_are_right(device: torch.device) -> bool:
    """Whether blocks that went to the host and back, in several portions, are what they were."""
    layout = KvLayout(3, 256, 128, BLOCK_SIZE, torch.float16)  # of so large blocks two are a portion
    kernels = _kernels(Heads(4, 2, 64), layout.dtype, layout.dtype, device)
    memory = KvMemory(layout, 6, 3, device, kernels)
    for layer in memory.cache.layers:
        layer.normal_()
    expected = [layer.to("cpu", copy=True) for layer in memory.cache.layers]
    own, host, other = (np.array(ids, dtype=np.int32) for ids in ([1, 5, 3], [2, 0, 1], [5, 2, 4]))
    assert copy_chunk(layout) < len(own)
    memory.copy([BlockCopies(CopyDirection.DEVICE_TO_HOST, own, host)])
    memory.copy([BlockCopies(CopyDirection.HOST_TO_DEVICE, host, other)])
    right = all(
        torch.equal(layer[:, other.tolist()].cpu(), before[:, own.tolist()])
        for layer, before in zip(memory.cache.layers, expected, strict=True)
    )
    memory.close()
    return right


def copies_are_right(device: torch.device) -> bool:
    """Whether `copy_blocks` gives what the oracle gives."""
    layers = [torch.randn(2, 9, 16, 2, 64, device=device) for _ in range(3)]
    expected = [layer.to("cpu", copy=True) for layer in layers]
    copies = [(1, 4), (8, 2), (3, 7)]
    for layer in expected:
        for source, target in copies:
            layer[:, target] = layer[:, source]
    sources, targets = torch.tensor(copies, device=device).unbind(1)
    copy_blocks(layers, layer_addresses(layers), sources, targets)
    return all(torch.equal(layer.cpu(), other) for layer, other in zip(layers, expected, strict=True))


def cuda_timer(device: torch.device, repeats: int = 7) -> Timer:
    """Times by events on the device, with its cache cleared before each run, after two runs that do not count.

    It is cleared so often that the host has launched the work by then: what is timed is the device alone, as where a
    recorded step is replayed.
    """
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def measure(work: Callable[[], object]) -> float:
        times = []
        for index in range(repeats + 2):
            for _ in range(_CLEARINGS):
                scratch.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            if index >= 2:
                times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times)

    return measure


def copy_bandwidth(device: torch.device, timer: Timer, size: int = 1 << 30) -> float:
    """Bytes read and written per second by a plain copy."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timer(lambda: target.copy_(source))


def matmul_rate(device: torch.device, timer: Timer, dtype: torch.dtype, size: int = 8192) -> float:
    """Operations per second of one large product."""
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / timer(lambda: left @ right)


def measure_step(
    step: Step, heads: Heads, dtype: torch.dtype, device: torch.device, *, timer: Timer, peak: float
) -> Point:
    """One attention layer over one step's rows, beside the same of others.

    Args:
        step: rows.
        heads: geometry.
        dtype: type of queries and cache.
        device: where.
        timer: how.
        peak: bytes/s for decode, operations/s for prefill, that count as 1.
    """
    work = _Work(step, heads, dtype, device)
    seconds = timer(work.own)
    amount = step.kv_bytes(heads, dtype.itemsize) if step.query == 1 else step.flops(heads)
    peers: dict[str, float | str] = {}
    for name, peer in (("torch", work.torch), ("flashinfer", work.flashinfer)):
        try:
            peers[name] = timer(peer())
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            # Another's library that is not there, or not as it was: no reason to stop measuring ours.
            peers[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    return Point(step.name, seconds, amount / seconds, amount / seconds / peak, peers)


class _Work:
    """Tensors of one step: every row has blocks of its own, scattered."""

    def __init__(self, step: Step, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
        self._step, self._heads, self._device = step, heads, device
        per_row = -(-step.context // BLOCK_SIZE)
        count = step.rows * per_row
        self._order = np.random.default_rng(2).permutation(count).astype(np.int32)
        self._indptr = (np.arange(step.rows + 1) * per_row).astype(np.int32)
        shape = (2, count, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        self._cache = torch.randn(shape, device=device, dtype=dtype)
        tokens = step.rows * step.query
        self._query = torch.randn(tokens, heads.num_heads, heads.head_dim, device=device, dtype=dtype)
        self._states = torch.randn(2, tokens, heads.num_kv_heads, heads.head_dim, device=device, dtype=dtype)
        self._own = self._plan(dtype)

    def _plan(self, dtype: torch.dtype) -> TritonStep:
        step = self._step
        own = np.tile(np.arange(step.context - step.query, step.context), (step.rows, 1))
        blocks = np.take_along_axis(self._order.reshape(step.rows, -1), own // BLOCK_SIZE, axis=1)
        last = np.full(step.rows, (step.context - 1) % BLOCK_SIZE + 1, dtype=np.int32)
        slots = (blocks.astype(np.int64) * BLOCK_SIZE + own % BLOCK_SIZE).reshape(-1)
        (planned,) = _kernels(self._heads, dtype, dtype, self._device).plan(
            (np.arange(step.rows + 1) * step.query).astype(np.int32),
            np.full(step.rows, step.context, dtype=np.int32),
            [GroupStep(0, GroupTables(self._indptr, self._order, last), slots, BLOCK_SIZE)],
            device=self._device,
        )
        return planned

    def own(self) -> torch.Tensor:
        """The kernels: write, then attend."""
        keys, values = self._cache.view(2, -1, self._heads.num_kv_heads * self._heads.head_dim)
        scaling = self._heads.head_dim**-0.5
        return self._own.attend(self._query, *self._states, keys, values, scaling=scaling)

    def torch(self) -> Callable[[], torch.Tensor]:
        """What torch takes over K/V that already lie flat: what pages cost shows beside it."""
        step, heads = self._step, self._heads
        shape = (step.rows, step.context, heads.num_kv_heads, heads.head_dim)
        keys, values = torch.randn(2, *shape, device=self._device, dtype=self._query.dtype).transpose(2, 3)
        query = self._query.view(step.rows, step.query, heads.num_heads, heads.head_dim).transpose(1, 2)
        if 1 < step.query < step.context:
            raise ValueError("no causal mask behind a prefix")
        causal = step.query > 1
        return lambda: scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)

    def flashinfer(self) -> Callable[[], torch.Tensor]:
        """FlashInfer over the same pages."""
        flashinfer = importlib.import_module("flashinfer")
        step, heads = self._step, self._heads
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=self._device)
        pages = (
            torch.from_numpy(self._indptr).to(self._device),
            torch.from_numpy(self._order).to(self._device),
            torch.full((step.rows,), (step.context - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=self._device),
        )
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, BLOCK_SIZE)
        dtype = self._query.dtype
        if step.query == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(*pages, *sizes, q_data_type=dtype, kv_data_type=dtype)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            indptr = torch.arange(step.rows + 1, dtype=torch.int32, device=self._device) * step.query
            wrapper.plan(indptr, *pages, *sizes, causal=True, q_data_type=dtype, kv_data_type=dtype)
        return lambda: wrapper.run(self._query, (self._cache[0], self._cache[1]))


def _kernels(heads: Heads, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> TritonKernels:
    return TritonKernels(
        device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def points(
    steps: Iterator[Step], heads: Heads, dtype: torch.dtype, device: torch.device, *, timer: Timer, peak: float
) -> Iterator[Point]:
    """`measure_step` of each."""
    for step in steps:
        yield measure_step(step, heads, dtype, device, timer=timer, peak=peak)
