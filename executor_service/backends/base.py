"""The seam between the executor's gRPC shell and what computes.

Station: called by `executor_service.servicer` (the unary calls) and `executor_service.step_runner` (the steps), always
from the one compute thread. A backend knows no gRPC and no request; it sees arrays. Backends are found by the
entry-point group `kvplane.backends`, or named by their place (`registry`). `docs/write-a-backend.md` walks through a
whole one; `kvplane conformance` tries any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

STATE: Final = -1
"""Stands for a KV group's window where its layers keep a state (Mamba, linear attention) in place of K/V."""


def chunks_of(size: int) -> int:
    """What stands for a KV group's window where its layers attend within chunks of `size` tokens, at least 2.

    One number for all types of groups: below STATE it is the chunk's size, negated. (Chunks of one token are a window
    of one.)
    """
    if size < 2:
        raise ValueError(f"expected chunks of at least 2 tokens, got {size}; chunks of 1 are a window of 1")
    return -size


def chunk_size(window: int) -> int:
    """Tokens of a chunk, if the window stands for chunks, else 0."""
    return -window if window < STATE else 0


class BackendError(Exception):
    """A backend cannot do what it was asked; the message says expected, got and what to do.

    Attributes:
        reason: UPPER_SNAKE_CASE name for `google.rpc.ErrorInfo`.
        metadata: the names and values the message speaks of.
    """

    def __init__(self, reason: str, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = {name: str(value) for name, value in metadata.items()}


class SettingError(BackendError):
    """A setting has a value that this backend, or this machine, does not take: the process ends with status 2."""


class AdapterError(BackendError):
    """An adapter cannot be read, or is of a kind, or for a model, that this backend does not run."""


class NotEnoughMemoryError(BackendError):
    """The memory left for KV does not hold one sequence of max_model_len (or not even two blocks)."""


@dataclass(frozen=True)
class KvGroupSpec:
    """Layers that share one block table.

    Units:
        bytes_per_block: bytes of one block over all layers of the group, K and V together; window: tokens that a token
        reads, itself included, 0 for full attention, `chunks_of` for chunks, STATE for a state, of which heads and
        their size are 0; block_size: tokens per block, 0 for `ModelInfo.block_size`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_block: int
    window: int = 0
    block_size: int = 0

    def most_blocks(self, num_tokens: int, block_size: int, longest_chunk: int) -> int:
        """Most blocks of this group that a sequence holds on its way to num_tokens tokens.

        Of a window that is what its last tokens and a row of `longest_chunk` tokens take, wherever they begin: of m
        tokens in a row, ceil((m - 1) / block_size) + 1 blocks hold at least one. Of a state it is the entry that the
        row starts from and those that it fills.
        """
        length = -(-num_tokens // block_size)
        if not self.window:
            return length
        return min(length, -(-(reach_of(self.window) + longest_chunk - 1) // block_size) + 1)


def reach_of(window: int) -> int:
    """Most tokens before a row's first one whose entries of the table it reads, for a group that is not full attention.

    Of a state that is one: the state after it. Of chunks it is all of a chunk but its last token.
    """
    return 1 if window == STATE else abs(window) - 1


def first_read(positions: Int32, window: int) -> Int32:
    """The first position whose entry of the table a row reads that begins at each of `positions`. Shape: both (n,)."""
    size = np.int32(chunk_size(window))
    if size:
        return positions - positions % size
    return np.maximum(positions - np.int32(reach_of(window)), 0) if window else np.zeros_like(positions)


@dataclass(frozen=True)
class ModelInfo:
    """What a manager must know of the model; see `GetModelInfoResponse` for each field."""

    model_name: str
    model_fingerprint: str
    device: str
    dtype: str
    kv_cache_dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    kv_groups: tuple[KvGroupSpec, ...]
    max_logprobs: int
    tensor_parallel_size: int = 1
    max_adapters: int = 0
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def group_block_sizes(self) -> tuple[int, ...]:
        """Tokens per block of each KV group."""
        return tuple(group.block_size or self.block_size for group in self.kv_groups)


@dataclass(frozen=True)
class MemoryProfile:
    """Every term of `num_blocks = (utilization * total - peak - host blocks) // bytes_per_block`. Units: bytes.

    Host blocks take from it only where they lie in the same memory, that is on a CPU; available_bytes is without them.
    `num_host_blocks` is how many of these blocks fit into the host memory set aside for swapping.
    """

    total_bytes: int
    utilization: float
    weights_bytes: int
    peak_bytes: int
    available_bytes: int
    bytes_per_block: int
    num_blocks: int
    overridden: bool
    num_host_blocks: int = 0


@dataclass(frozen=True)
class AdapterContent:
    """A LoRA adapter that was read, ready to be loaded.

    Attributes:
        revision: a digest of all that decides what it computes, at most 256 characters.
        rank: the largest rank of its matrices.
        weights: the backend's own.

    Units:
        size_bytes: bytes that its weights take.
    """

    revision: str
    rank: int
    size_bytes: int
    weights: object = field(repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class LogitBias:
    """What is added to the logits of some tokens, as columns. Shape: both (n,); no token twice."""

    token_ids: npt.NDArray[np.int64]
    values: Float32

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> LogitBias:
        """The columns of a mapping, read-only."""
        token_ids = np.fromiter(biases.keys(), dtype=np.int64, count=len(biases))
        values = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))
        token_ids.flags.writeable = values.flags.writeable = False
        return cls(token_ids, values)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class TokenSampling:
    """How a token is chosen; see `TokenSampling` in the executor's proto for ranges and order."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: LogitBias
    suppressed_token_ids: tuple[int, ...]
    num_logprobs: int

    @property
    def has_penalty(self) -> bool:
        """Whether the row's history changes its logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class GroupTables:
    """Block tables of all rows in one KV group.

    Shape:
        block_indptr: (R + 1,), block_ids: (block_indptr[R],), last_block_len: (R,) in [1, the group's block_size].

    Invariants:
        No id is 0, the null block, but of a group with a window, chunks or a state, before what the row's first token
        reads. Of a state the last entries, from the first token's on, are written by this row, and by no other.
    """

    block_indptr: Int32
    block_ids: Int32
    last_block_len: Int32


@dataclass(frozen=True)
class PenaltyHistory:
    """Tokens of one penalised row. Shape: token_ids (n,); the first `prompt_len` of them are prompt."""

    token_ids: Int32
    prompt_len: int


@dataclass(frozen=True)
class SamplingBatch:
    """The S samples: from which row each is drawn, and how. A row may be sampled more than once.

    Shape:
        rows, params_index, positions: (S,), rows never falling; seeds: (S,) uint64.
        histories: by index into `rows`; tokens fed from the step before are already appended.

    `positions[s]` is the position of the token to be produced, that is the row's sequence length after this step.
    """

    rows: Int32
    params: Sequence[TokenSampling]
    params_index: Int32
    seeds: npt.NDArray[np.uint64]
    positions: Int32
    histories: Mapping[int, PenaltyHistory]


@dataclass(frozen=True)
class StepBatch:
    """One validated step of R rows and T tokens, fed tokens filled in.

    Shape:
        query_indptr: (R + 1,); token_ids, positions: (T,); seq_lens: (R,) sequence length after this step;
        tables: one per KV group; slot_mappings: one (T,) int64 per KV group, block_id * block_size + offset, with the
        group's block_size; adapter_ids: (R,) of loaded adapters, 0 for the model itself; None where no row has one.

    Invariants:
        Every array is C-contiguous and read-only; every id is in range; positions of a row end at seq_lens[row] - 1.
    """

    step_id: int
    query_indptr: Int32
    token_ids: Int32
    positions: Int32
    seq_lens: Int32
    tables: Sequence[GroupTables]
    slot_mappings: Sequence[npt.NDArray[np.int64]]
    sampling: SamplingBatch | None
    adapter_ids: Int32 | None = None

    @property
    def num_rows(self) -> int:
        """R, the number of rows."""
        return len(self.query_indptr) - 1


class CopyDirection(IntEnum):
    """Between which memories a block is copied; the values are those of the wire."""

    DEVICE_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    HOST_TO_DEVICE = 3


@dataclass(frozen=True)
class BlockCopies:
    """Whole blocks to copy in one direction, over all layers and groups.

    Shape:
        source_ids, target_ids: (C,), at least one.

    Invariants:
        The copies are independent: a block that one of them writes is neither read nor written by another, so that
        they may be done in any order, or at once. Every id is in range, and host ids only where host blocks are meant.
    """

    direction: CopyDirection
    source_ids: Int32
    target_ids: Int32

    def __len__(self) -> int:
        return len(self.source_ids)


@dataclass(frozen=True)
class RowFailure:
    """A row that failed alone; the others are good."""

    row: int
    reason: str
    message: str


@dataclass(frozen=True)
class RowLogprobs:
    """Log probabilities at one sampled position: the produced token first, then the likeliest, likeliest first.

    Shape: both (k + 1,).
    """

    token_ids: Int32
    logprobs: Float32


@dataclass(frozen=True)
class StepResult:
    """What a step produced.

    Shape:
        sampled_token_ids: (S,), -1 where the row failed; logprobs: by sampling index, only rows that asked.
    """

    sampled_token_ids: Int32
    logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)
    failures: Sequence[RowFailure] = ()


_NO_ADAPTERS = "{}: expected max_adapters of 0 in ModelInfo, or a method {}"


class Backend(ABC):
    """What an executor computes with.

    Life: `load`, `profile_memory`, `initialize_kv_cache`, then for every step `copy_blocks` if it orders copies, and
    `execute` if it has rows; then `close`. All calls come from one thread, one at a time. A backend keeps weights and
    K/V; it keeps nothing of a request.
    """

    @abstractmethod
    def load(self) -> ModelInfo:
        """Load the weights; called once, first.

        Raises:
            BackendError: the model cannot be read or is of a kind this backend does not run.
        """

    @abstractmethod
    def profile_memory(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Measure how many blocks fit, with a real forward pass and sampling at the given limits.

        Raises:
            NotEnoughMemoryError: not one sequence of max_model_len fits; the message has the numbers and the flags.
        """

    @abstractmethod
    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate (or, at the same size, reuse) an empty cache.

        Args:
            num_blocks: blocks of the KV cache, the null block 0 included.
            num_host_blocks: blocks of host memory that the cache's blocks are swapped out to. All of them are used.

        Raises:
            NotEnoughMemoryError: there is no room for them.
        """

    @abstractmethod
    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        """Copy whole blocks, one entry after the other, and return when it is done.

        Raises:
            BackendError: it failed. Nothing but the targets may have been written.
        """

    @abstractmethod
    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step: every layer writes K/V of all rows before any row attends; then sample.

        A layer that keeps a state does so for each row by itself; `state_plan` and the proto say how.

        Raises:
            BackendError: the whole step failed. Only slots of this step may have been written.
        """

    def on_lost(self, tell: Callable[[BackendError], None]) -> None:
        """Take whom to tell, from any thread, that this backend can do nothing any more, so that the process must end.

        Called once, before `load`, on the event loop's thread. The default never tells.
        """
        del tell

    def read_adapter(self, source: str) -> AdapterContent:
        """Read a LoRA adapter and lay it out for the model. The only method that any thread may call, at any time.

        Called only where `ModelInfo.max_adapters` is above 0, as are the two below.

        Args:
            source: a folder as peft saves it, a hub id, or whatever else the backend takes.

        Raises:
            AdapterError: it cannot be read, or not be run.
        """
        raise AdapterError(
            "ADAPTERS_NOT_SUPPORTED", f"expected a backend that runs adapters, got one without: {source}"
        )

    def load_adapter(self, adapter_id: int, content: AdapterContent) -> None:
        """Have steps name what `read_adapter` returned. At most `max_adapters` are loaded at once.

        Args:
            adapter_id: at least 1; one that was never used before.
            content: the adapter.
        """
        raise NotImplementedError(_NO_ADAPTERS.format(type(self).__name__, "load_adapter"))

    def unload_adapter(self, adapter_id: int) -> None:
        """Give back the memory of a loaded adapter; no step names it any more."""
        raise NotImplementedError(_NO_ADAPTERS.format(type(self).__name__, "unload_adapter"))

    def close(self) -> None:
        """Give back memory and devices. Called once, last; the default does nothing."""
        return
