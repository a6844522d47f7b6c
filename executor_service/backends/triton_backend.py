"""The triton backend: the torch backend with Triton's kernels in place of torch's for everything that touches K/V.

Station: built and driven like `torch_backend`, from which it takes all but the kernels. It wants a GPU; on a CPU it
runs only in Triton's interpreter (TRITON_INTERPRET=1), which tests use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_service.backends.torch_backend import TorchBackend
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.paged_kernels import PagedKernels
from executor_service.kernels.triton_paged import TritonKernels
from executor_service.layer_groups import KvShape
from executor_service.model_loader import LoadedModel
from executor_service.native.ops import NativeOps


class TritonBackend(TorchBackend):
    """Runs steps with torch and the Triton kernels; what it is told and what it promises are the torch backend's."""

    def _make_kernels(
        self,
        loaded: LoadedModel,
        kv_dtype: torch.dtype,
        shapes: Sequence[KvShape],
        limits: AttentionLimits,
        native: NativeOps | None,
    ) -> PagedKernels:
        """Triton's kernels; torch's where no layer attends, which only copy blocks.

        Raises:
            BackendError: not on this device, or not for this model.
        """
        if not shapes:
            return super()._make_kernels(loaded, kv_dtype, shapes, limits, native)
        config = loaded.model.config.get_text_config(decoder=True)
        num_heads = int(config.num_attention_heads)
        if len(shapes) == 1:
            # A rank of several has fewer heads than the configuration says, in the same proportion.
            group_size = num_heads // int(getattr(config, "num_key_value_heads", None) or num_heads)
            num_heads = shapes[0].num_kv_heads * group_size
        return TritonKernels(
            torch.device(loaded.model.device),
            dtype=loaded.dtype,
            kv_dtype=kv_dtype,
            num_heads=num_heads,
            num_kv_heads=min(shape.num_kv_heads for shape in shapes),
            head_dim=max(shape.head_dim for shape in shapes),
        )
