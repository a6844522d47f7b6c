"""The seam between the model runner and the kernels: how a step's attention is planned and done.

Station: `model_runner` calls `plan` once a step and `attend` once a layer; `kv_memory` calls `copy_within` before a
step. Implemented by `torch_paged.TorchKernels`, `native_paged.NativeKernels` and `triton_paged.TritonKernels`; a
backend chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from executor_service.backends.base import GroupTables, Int32
from executor_service.kernels.fp8 import PLAIN, LayerCodecs


class GroupStep(NamedTuple):
    """What one KV group has of a step.

    Units:
        window: tokens that a token sees, itself included; 0 for all before it, `chunks_of` for those of its chunk;
        block_size: tokens per block.

    Shape:
        slot_mapping: (T,), the slot of every token of the step.
    """

    window: int
    tables: GroupTables
    slot_mapping: npt.NDArray[np.int64]
    block_size: int


class DeviceTables(NamedTuple):
    """The rows of a step in one KV group, on the device. What it is recorded over may be longer than it says.

    Shape:
        query_indptr: (R + 1,); seq_lens: (R,); block_indptr: (R + 1,); block_ids: (block_indptr[R],); all int32.
        slots: (T,) int64, of every token; -1 where K/V are not stored.
    """

    query_indptr: torch.Tensor
    seq_lens: torch.Tensor
    block_indptr: torch.Tensor
    block_ids: torch.Tensor
    slots: torch.Tensor
    block_size: int


class StepAttention(ABC):
    """Attention of one step; what it holds is the same for every layer of a KV group."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        codecs: LayerCodecs = PLAIN,
    ) -> torch.Tensor:
        """Write this step's K/V of one layer, then attend: softmax(scaling * q k^T) v, causal, over each row's blocks.

        Args:
            query: queries of all tokens.
            key: keys of all tokens.
            value: values of all tokens.
            keys: the layer's key cache, changed in place.
            values: the layer's value cache, changed in place.
            scaling: factor on the scores.
            codecs: how the layer's K and V are stored.

        Shape:
            query: (T, H_q, D); key, value: (T, H_kv, D); keys, values: (num_slots, H_kv * D), bytes where there are
            codecs; returns (T, H_q, D).
        """


class PagedKernels(ABC):
    """Kernels over a paged cache. One object serves all steps; it keeps nothing of a request."""

    @abstractmethod
    def plan(
        self,
        query_indptr: Int32,
        seq_lens: Int32,
        groups: Sequence[GroupStep],
        *,
        device: torch.device,
    ) -> Sequence[StepAttention]:
        """Turn a step's block tables into what attention needs of them on the device, for each KV group.

        Args:
            query_indptr: row r has tokens query_indptr[r] to query_indptr[r + 1].
            seq_lens: sequence lengths after this step.
            groups: the KV groups' part of the step.
            device: where the cache lies.

        Shape:
            query_indptr: (R + 1,); seq_lens: (R,).
        """

    @property
    def can_record(self) -> bool:
        """Whether `plan_decode` is there: launches that do not depend on what the host knows of a step's lengths."""
        return False

    def plan_decode(self, groups: Sequence[DeviceTables], windows: Sequence[int]) -> Sequence[StepAttention]:
        """Attention of decode steps whose tables are overwritten between them: one sequence of launches for all.

        Args:
            groups: tables of each KV group; rows of length 0 and without slots are padding.
            windows: of each KV group, as in `GroupStep`.

        Raises:
            NotImplementedError: `can_record` is false.
        """
        raise NotImplementedError(f"expected kernels that can be recorded, got {type(self).__name__}")

    @abstractmethod
    def copy_within(
        self, layers: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, chunk: int
    ) -> None:
        """Copy blocks within the cache; arguments as in `block_copy.copy_within`."""

    @abstractmethod
    def reserved_bytes(self, max_num_seqs: int, max_model_len: int, windows: Sequence[int]) -> int:
        """Device memory that a step within these limits may take beside what `profile_batch.worst_batch` takes.

        Args:
            max_num_seqs: rows.
            max_model_len: tokens of a row.
            windows: of each KV group, as in `GroupStep`.
        """
