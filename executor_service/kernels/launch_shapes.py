"""How a step's rows are cut into programs, and how large a program is: plain numbers, without Triton or a device.

Station: called by `triton_paged`, which puts the arrays on the device, and by `benchmarks.gpu_check`.

Tile sizes are a table and not searched for at run time: a search would run kernels with other numerics in turn, and
take seconds in the middle of a service. The budgets that each must keep (registers, spills, shared memory) are
asserted for every target in tests, without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

MAX_HEAD_DIM = 256
# A split of fewer positions costs more in its own start and in the reduction than it gains by running beside others.
MIN_SPLIT = 256
# Programs for each multiprocessor that decode is cut into: enough that those which end early are made up for.
PROGRAMS_PER_PROCESSOR = 4


class Target(Enum):
    """What the kernels are compiled for."""

    CUDA = "cuda"
    """NVIDIA's, with 99 KiB of shared memory for a program at least: compute capability 8.x and 12.x."""
    HOPPER = "hopper"
    """Those with 227 KiB, whose matrix units read shared memory: compute capability 9.x and 10.x."""
    HIP = "hip"
    INTERPRETER = "interpreter"


@dataclass(frozen=True)
class Tile:
    """Sizes of one program.

    Units:
        block_m: rows of the query tile, query tokens times heads of a group; block_n: keys at a time.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_tile(target: Target, *, head_dim: int, group: int, itemsize: int) -> Tile:
    """The tile of `paged_decode`.

    Args:
        target: what it runs on.
        head_dim: elements of a head.
        group: query heads that share a KV head.
        itemsize: bytes of a query element.
    """
    block_m = max(16, _power_of_2(group))  # a matrix instruction takes 16 rows at least
    if target is Target.INTERPRETER:
        return Tile(block_m, 256, 1, 1)
    block_n = 64 if _power_of_2(head_dim) * itemsize <= 256 else 32
    if itemsize == 4:
        block_n = 32 if head_dim <= 128 else 16
    return Tile(block_m, block_n, num_warps=4, num_stages=1 if target is Target.HIP else 3)


def prefill_tile(target: Target, *, head_dim: int, group: int, itemsize: int) -> Tile:
    """The tile of `paged_prefill`; arguments as in `decode_tile`.

    With three stages block ids are two tiles ahead of the products and K/V one: nothing waits for an id.
    """
    if target is Target.INTERPRETER:
        return Tile(max(128, _power_of_2(group)), 128, 1, 1)
    least = _power_of_2(group)
    wide = head_dim > 128
    if itemsize == 4:
        return Tile(max(16, least), 16 if wide else 32, num_warps=4, num_stages=1)
    if target is Target.HIP:
        return Tile(max(64, least), 32 if wide else 64, num_warps=8 if wide else 4, num_stages=1)
    if wide:
        return Tile(max(128 if target is Target.HOPPER else 64, least), 32, num_warps=8, num_stages=3)
    return Tile(max(128, least), 64, num_warps=8, num_stages=3)


def split_length(lengths: Int32, *, kv_heads: int, block_n: int, programs: int) -> int:
    """Positions of one split, so that a step's decode rows make about `programs` programs. A multiple of block_n.

    Rows of different lengths are cut into pieces of one length: a long row gets more programs, and ends no later.

    Args:
        lengths: positions that each row attends to.
        kv_heads: KV heads, each of which has programs of its own.
        block_n: keys at a time.
        programs: how many keep the device busy.
    """
    share = -(-int(lengths.sum(dtype=np.int64)) * kv_heads // programs)
    return -(-max(share, MIN_SPLIT) // block_n) * block_n


def splits_per_row(num_rows: int, *, kv_heads: int, programs: int) -> int:
    """Splits of each row where lengths are not known: about `programs` programs over all rows, one split at least.

    Args:
        num_rows: rows of the step.
        kv_heads: KV heads, each of which has programs of its own.
        programs: how many keep the device busy.
    """
    return max(1, programs // (num_rows * kv_heads))


@dataclass(frozen=True)
class DecodeSplits:
    """Decode rows cut into splits.

    Shape:
        rows: (B,) their numbers in the step; indptr: (B + 1,), row b has splits indptr[b] to indptr[b + 1];
        split_rows: (S,) the row's number in the step; split_numbers: (S,) which split of its row.
    """

    rows: Int32
    indptr: Int32
    split_rows: Int32
    split_numbers: Int32


def decode_splits(rows: Int32, lengths: Int32, split_len: int) -> DecodeSplits:
    """Cut rows into splits of `split_len` positions. Shape: rows, lengths (B,)."""
    counts = -(-lengths // np.int32(split_len))
    indptr = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    numbers = np.arange(indptr[-1], dtype=np.int32) - np.repeat(indptr[:-1], counts)
    return DecodeSplits(rows, indptr, np.repeat(rows, counts), numbers)


def most_splits(max_num_seqs: int, *, kv_heads: int, programs: int) -> int:
    """Splits that a step of so many rows has at most, with the lengths that `split_length` gives."""
    return max_num_seqs + programs // kv_heads


def prefill_runs(query_indptr: Int32, seq_lens: Int32, run: int) -> tuple[Int32, Int32]:
    """Cut rows with several query tokens into runs, those that see most first: what starts last ends soon.

    Args:
        query_indptr: row r has tokens query_indptr[r] to query_indptr[r + 1].
        seq_lens: sequence lengths after this step.
        run: query tokens of a program.

    Shape:
        query_indptr: (R + 1,); seq_lens: (R,).

    Returns:
        The row of each run, and its first query token within the row. Shape: both (N,).
    """
    query_lens = np.diff(query_indptr)
    rows = np.flatnonzero(query_lens > 1)
    counts = -(-query_lens[rows] // run)
    run_rows = np.repeat(rows, counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(run_rows)) - np.repeat(firsts, counts)) * run
    seen = seq_lens[run_rows] - query_lens[run_rows] + starts
    order = np.argsort(-seen, kind="stable")
    return run_rows[order].astype(np.int32), starts[order].astype(np.int32)


def _power_of_2(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()
