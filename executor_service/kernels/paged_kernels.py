"""The seam between the model runner and the kernels: how a step's attention is planned and done.

Station: `model_runner` calls `plan` once a step and `attend` once a layer; `kv_memory` calls `copy_within` before a
step. Implemented by `torch_paged.TorchKernels` and `triton_paged.TritonKernels`; a backend chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from executor_service.backends.base import GroupTables, Int32


class StepAttention(ABC):
    """Attention of one step; what it holds is the same for every layer."""

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
    ) -> torch.Tensor:
        """Write this step's K/V of one layer, then attend: softmax(scaling * q k^T) v, causal, over each row's blocks.

        Args:
            query: queries of all tokens.
            key: keys of all tokens.
            value: values of all tokens.
            keys: the layer's key cache, changed in place.
            values: the layer's value cache, changed in place.
            scaling: factor on the scores.

        Shape:
            query: (T, H_q, D); key, value: (T, H_kv, D); keys, values: (num_slots, H_kv * D); returns (T, H_q, D).
        """


class PagedKernels(ABC):
    """Kernels over a paged cache. One object serves all steps; it keeps nothing of a request."""

    @abstractmethod
    def plan(
        self,
        query_indptr: Int32,
        seq_lens: Int32,
        tables: GroupTables,
        slot_mapping: npt.NDArray[np.int64],
        *,
        block_size: int,
        device: torch.device,
    ) -> StepAttention:
        """Turn a step's block tables into what attention needs of them on the device.

        Args:
            query_indptr: row r has tokens query_indptr[r] to query_indptr[r + 1].
            seq_lens: sequence lengths after this step.
            tables: block tables of the rows.
            slot_mapping: slot of every token of the step.
            block_size: tokens per block.
            device: where the cache lies.

        Shape:
            query_indptr: (R + 1,); seq_lens: (R,); slot_mapping: (T,).
        """

    @abstractmethod
    def copy_within(
        self, layers: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, chunk: int
    ) -> None:
        """Copy blocks within the cache; arguments as in `block_copy.copy_within`."""

    @abstractmethod
    def reserved_bytes(self, max_num_seqs: int, max_model_len: int) -> int:
        """Device memory that a step within these limits may take beside what `profile_batch.worst_batch` takes."""
