"""Decode steps recorded once as CUDA graphs and replayed: a step then costs one launch in place of hundreds.

Station: asked for by `backends.torch_graphs` once a cache is there; `model_runner` asks it first and computes itself
what it does not take. What is launched, and over which tables, is `kernels.paged_kernels.PagedKernels.plan_decode`'s.

How: a recording is of a number of rows, and of addresses. So the step's arrays are copied to the same place before
each replay, and rows that the step lacks are padding, without slots and of length 0: they store nothing, and nobody
reads what becomes of them. All recordings share one pool of memory, since no two run at once.

Source: vLLM's and SGLang's decode graphs, in what is padded and shared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from executor_service.backends.base import BackendError, StepBatch
from executor_service.devices import staged
from executor_service.kernels.paged_kernels import DeviceTables, PagedKernels, StepAttention

# Sizes that are recorded: these, then every eighth, then every sixteenth up to MOST_ROWS; more rows would be bound by
# memory and arithmetic, not by launches.
_FIRST_SIZES = (1, 2, 4)
_FINE_UP_TO = 64
MOST_ROWS = 256

# Runs a function once to see what it launches; the result launches the same again, on the same memory.
Replay = Callable[[], None]
Recorder = Callable[[Callable[[], None]], Replay]
# The model over one sequence of all rows' tokens: token ids and positions, (1, B), and each KV group's attention.
# Returns logits of every row, (B, V).
Forward = Callable[[torch.Tensor, torch.Tensor, Sequence[StepAttention]], torch.Tensor]


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Row counts to record for steps of up to max_num_seqs rows, rising; a step takes the next one."""
    most = min(max_num_seqs, MOST_ROWS)
    sizes = {*_FIRST_SIZES, *range(8, _FINE_UP_TO, 8), *range(_FINE_UP_TO, MOST_ROWS + 1, 16)}
    return (*sorted(size for size in sizes if size < most), most)


class DecodeGraphs:
    """Recordings of one model over one cache.

    Args:
        forward: the model.
        kernels: what writes K/V and attends; they can be recorded.
        windows: of each KV group.
        sizes: row counts to record, rising.
        vocab_size: V.
        dtype: of the logits.
        max_model_len: tokens of the longest sequence.
        block_sizes: of each KV group, tokens per block.
        device: where all of it lies.
        record: how.

    Raises:
        BackendError: this model cannot be recorded.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Forward,
        kernels: PagedKernels,
        *,
        windows: Sequence[int],
        sizes: Sequence[int],
        vocab_size: int,
        dtype: torch.dtype,
        max_model_len: int,
        block_sizes: Sequence[int],
        device: torch.device,
        record: Recorder,
    ) -> None:
        self._sizes = tuple(sizes)
        self._device = device
        self._num_groups = len(windows)
        most = self._sizes[-1]
        # What a size reads lies in the first part of them, in one piece: a transfer each. See `_wide_of`, `_indptr_of`.
        self._wide = torch.zeros((2 + self._num_groups) * most, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._indptr = torch.zeros(self._num_groups * (most + 1), dtype=torch.int32, device=device)
        blocks_per_row = -(-max_model_len // min(block_sizes))
        self._block_ids = torch.zeros((self._num_groups, most * blocks_per_row), dtype=torch.int32, device=device)
        self._query_indptr = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._logits = torch.zeros((most, vocab_size), dtype=dtype, device=device)
        self._replays: dict[int, Replay] = {}
        for size in reversed(self._sizes):  # the largest first: the others fit into the memory that it leaves
            attention = kernels.plan_decode(
                [self._tables(group, size, block_size) for group, block_size in enumerate(block_sizes)], windows
            )
            # Recorded over padding: valid token ids and positions, and no slot.
            self._wide_of(size)[:2] = 0
            self._wide_of(size)[2:] = -1
            self._replays[size] = self._recorded(size, attention, forward, record)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor | None:
        """Logits of a step that decodes, K/V written; None of another step, or of one with too many rows.

        Shape:
            returns (R, V), valid until the next call.
        """
        rows = batch.num_rows
        if not self.takes(batch):
            return None
        size = self._sizes[bisect_left(self._sizes, rows)]
        self._fill(batch, size)
        self._replays[size]()
        return self._logits[:rows]

    def takes(self, batch: StepBatch) -> bool:
        """Whether every row of a step has one token and samples once, in order, none has an adapter, and few are.

        Which adapters a step has, and on which tokens, decides what is launched: a recording knows one way only.
        """
        rows = batch.num_rows
        sampling = batch.sampling
        return (
            0 < rows <= self._sizes[-1]
            and batch.adapter_ids is None
            and rows == len(batch.token_ids)
            and sampling is not None
            and np.array_equal(sampling.rows, np.arange(rows))
        )

    def _fill(self, batch: StepBatch, size: int) -> None:
        """Put a step where the recordings of `size` rows read; what follows its rows becomes padding."""
        rows = batch.num_rows
        wide = np.zeros((2 + self._num_groups, size), dtype=np.int64)
        wide[0, :rows], wide[1, :rows] = batch.token_ids, batch.positions
        wide[2:] = -1
        lengths = np.zeros(size, dtype=np.int32)
        lengths[:rows] = batch.seq_lens
        indptr = np.zeros((self._num_groups, size + 1), dtype=np.int32)
        for group, (tables, slots) in enumerate(zip(batch.tables, batch.slot_mappings, strict=True)):
            wide[2 + group, :rows] = slots
            indptr[group, : rows + 1] = tables.block_indptr
            indptr[group, rows + 1 :] = tables.block_indptr[-1]
            self._send(tables.block_ids, self._block_ids[group, : len(tables.block_ids)])
        self._send(wide, self._wide_of(size))
        self._send(lengths, self._seq_lens[:size])
        self._send(indptr, self._indptr_of(size))

    def _send(self, array: np.ndarray[Any, Any], place: torch.Tensor) -> None:
        place.copy_(staged(array, self._device), non_blocking=True)

    def _wide_of(self, size: int) -> torch.Tensor:
        """Token ids, positions, and each group's slots. Shape: (2 + groups, size) int64."""
        return self._wide[: (2 + self._num_groups) * size].view(-1, size)

    def _indptr_of(self, size: int) -> torch.Tensor:
        """Where each row's blocks begin. Shape: (groups, size + 1) int32."""
        return self._indptr[: self._num_groups * (size + 1)].view(-1, size + 1)

    def _tables(self, group: int, size: int, block_size: int) -> DeviceTables:
        """Where the tables of so many rows lie."""
        return DeviceTables(
            self._query_indptr[: size + 1],
            self._seq_lens[:size],
            self._indptr_of(size)[group],
            self._block_ids[group],
            self._wide_of(size)[2 + group],
            block_size,
        )

    def _recorded(self, size: int, attention: Sequence[StepAttention], forward: Forward, record: Recorder) -> Replay:
        def step() -> None:
            wide = self._wide_of(size)
            self._logits[:size].copy_(forward(wide[0:1], wide[1:2], attention))

        try:
            return record(step)
        except RuntimeError as error:  # what torch raises of an operation that cannot be captured
            raise BackendError(
                "GRAPHS_NOT_SUPPORTED",
                f"expected a model whose decode step can be recorded as a CUDA graph, got, for {size} rows: {error}; "
                "--enforce-eager does without",
                rows=size,
            ) from error


def cuda_recorder(device: torch.device) -> Recorder:
    """Records CUDA graphs that share one pool of memory.

    All of it on one stream beside the thread's own. A library's workspace belongs to a stream: the run before makes it,
    outside of the pool, once for all graphs. And memory that a run leaves behind is there for the next one.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def record(step: Callable[[], None]) -> Replay:
        own = torch.cuda.current_stream(device)
        stream.wait_stream(own)
        # `graph` leaves its stream the thread's current one where capturing fails; this comes back.
        with torch.cuda.stream(stream):
            # Once before, as torch's documentation asks: it compiles kernels and makes workspaces.
            step()
            graph = torch.cuda.CUDAGraph()
            # Of this thread alone: another one may be reading an adapter onto the device.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                step()
        own.wait_stream(stream)
        return graph.replay  # type: ignore[no-any-return]

    return record
