"""Paged attention compiled for this machine's CPU: K/V are read where they lie, without a gather.

Station: chosen by `backends.torch_loading` on a CPU with a compiler, instead of `torch_paged`; called through
`paged_kernels`. The kernel is `native/attention.h`; the oracle is `reference`.

How: a thread takes a part of the step at a time: a few tokens of one row, or several rows of one token each, for one KV
head or for several side by side. It goes over the keys 32 at a time with an online softmax in float32. Where K/V are
bfloat16 and the CPU multiplies pairs of them, a tile of keys that rows of a part share is read once for all of these,
and weights are rounded to bfloat16 before they meet values. Decode and prefill are the same program.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor_service.backends.base import Int32
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.block_copy import copy_within
from executor_service.kernels.fp8 import PLAIN, LayerCodecs
from executor_service.kernels.paged_kernels import GroupStep, PagedKernels, StepAttention
from executor_service.native.ops import LANES, NativeOps, PagedRows

__all__ = ["NO_WORKSPACE", "NativeKernels", "NativeStep"]

# What a step takes does not grow with its contexts: the memory profile need not compute long ones.
NO_WORKSPACE = AttentionLimits(gather_tokens=1, mask_elements=1, index_elements=0)


class NativeStep(StepAttention):
    """One step of a KV group. Args: ops: the kernels; rows: where its rows lie; slots: (T,) where its tokens go."""

    def __init__(self, ops: NativeOps, rows: PagedRows, slots: torch.Tensor) -> None:
        self._ops = ops
        self.rows = rows
        self.slots = slots

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
        """Write, then attend; see the base class. K/V are as they are: there are no codecs."""
        assert codecs is PLAIN or codecs == PLAIN
        heads = (_side_by_side(states) for states in (query, key, value))
        return self._ops.attend(*heads, keys, values, slots=self.slots, rows=self.rows, scaling=scaling)


class NativeKernels(PagedKernels):
    """Compiled kernels, for K/V in a type that the model computes in. Args: ops: the kernels."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    @staticmethod
    def fits(ops: NativeOps, dtype: torch.dtype, *head_dims: int) -> bool:
        """Whether there are kernels for K/V of this type and heads of these sizes."""
        return ops.takes(dtype) and all(head_dim % LANES == 0 for head_dim in head_dims)

    def plan(
        self,
        query_indptr: Int32,
        seq_lens: Int32,
        groups: Sequence[GroupStep],
        *,
        device: torch.device,
    ) -> Sequence[NativeStep]:
        """Hand the tables on as they are; see the base class."""
        assert device.type == "cpu"
        indptr, lens = np.ascontiguousarray(query_indptr, np.int32), np.ascontiguousarray(seq_lens, np.int32)
        steps = []
        for group in groups:
            tables = group.tables
            kept = (
                indptr,
                lens,
                np.ascontiguousarray(tables.block_indptr, np.int32),
                np.ascontiguousarray(tables.block_ids, np.int32),
            )
            slots = torch.from_numpy(np.array(group.slot_mapping, dtype=np.int64))
            steps.append(NativeStep(self._ops, PagedRows(kept, group.block_size, group.window), slots))
        return steps

    def copy_within(
        self, layers: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, chunk: int
    ) -> None:
        """Copy blocks within the cache; see the base class."""
        copy_within(layers, source, target, chunk=chunk)

    def reserved_bytes(self, max_num_seqs: int, max_model_len: int, windows: Sequence[int]) -> int:
        """Nothing: tables are those of the step."""
        del max_num_seqs, max_model_len, windows
        return 0


def _side_by_side(states: torch.Tensor) -> torch.Tensor:
    """States whose heads lie side by side in each token, copied where they do not. Shape: (T, H, D)."""
    _, heads, dim = states.shape
    adjoin = states.stride(2) == 1 and (heads == 1 or states.stride(1) == dim)
    return states if adjoin else states.contiguous()
