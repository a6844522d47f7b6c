"""The triton backend: the torch backend with Triton's kernels in place of torch's for everything that touches K/V.

Station: built and driven like `torch_backend`, from which it takes all but the kernels. It wants a GPU; on a CPU it
runs only in Triton's interpreter (TRITON_INTERPRET=1), which tests use.
"""

from __future__ import annotations

import torch

from executor_service.backends.base import STATE
from executor_service.backends.torch_backend import TorchBackend
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.paged_kernels import PagedKernels
from executor_service.kernels.triton_paged import TritonKernels
from executor_service.kv_cache import KvLayout
from executor_service.layer_groups import layer_windows
from executor_service.model_loader import LoadedModel
from executor_service.native.ops import NativeOps


class TritonBackend(TorchBackend):
    """Runs steps with torch and the Triton kernels; what it is told and what it promises are the torch backend's."""

    def _make_kernels(
        self, loaded: LoadedModel, layout: KvLayout, limits: AttentionLimits, native: NativeOps | None
    ) -> PagedKernels:
        """Triton's kernels; torch's where no layer attends, which only copy blocks.

        Raises:
            BackendError: not on this device, or not for this model.
        """
        if set(layer_windows(loaded.model.config)) == {STATE}:
            return super()._make_kernels(loaded, layout, limits, native)
        config = loaded.model.config.get_text_config(decoder=True)
        # A rank of several has fewer heads than the configuration says, in the same proportion.
        num_heads = int(config.num_attention_heads)
        group_size = num_heads // int(getattr(config, "num_key_value_heads", None) or num_heads)
        return TritonKernels(
            torch.device(loaded.model.device),
            dtype=loaded.dtype,
            kv_dtype=layout.dtype,
            num_heads=layout.num_kv_heads * group_size,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
        )
