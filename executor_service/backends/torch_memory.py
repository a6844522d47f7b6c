"""What memory a torch backend may take: what is refused before it is taken, and how many blocks fit beside the model.

Station: made by `torch_backend`, for one device: `admit_weights` is asked before weights are read, `note_loaded` told
after, and `profile` runs the worst step. `memory_profiler` has the arithmetic and the refusals, `profile_batch` the
worst step; here is what of a model goes into them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import structlog
import torch

from executor_service.backends.base import STATE, MemoryProfile, StepBatch
from executor_service.backends.torch_config import TorchBackendConfig
from executor_service.backends.torch_graphs import StepRecording
from executor_service.backends.torch_model import MAX_LOGPROBS, PagedModel
from executor_service.kv_cache import PagedKvCache
from executor_service.kv_memory import copy_workspace_bytes
from executor_service.lora import LoraAdapters
from executor_service.memory_profiler import (
    PeakMeter,
    available_bytes,
    compute_num_blocks,
    host_memory_left,
    release_free_memory,
    require_host_blocks_fit,
    require_one_sequence,
    require_weights_fit,
    resident_bytes,
    total_memory,
)
from executor_service.packed_linear import warm_up
from executor_service.profile_batch import SCRATCH_BLOCKS, worst_batch

__all__ = ["MemoryBudget"]

_log = structlog.get_logger(__name__)


class MemoryBudget:
    """The memory of one device, shared out among a model, its steps and their K/V.

    Args:
        config: the backend's settings.
        device: whose memory.
    """

    def __init__(self, config: TorchBackendConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._weights_bytes = 0

    def admit_weights(self, weights_bytes: int) -> None:
        """Stop before weights are read that can not fit: the profile would refuse them, if memory lasts until then.

        Raises:
            NotEnoughMemoryError: they are more than may be used.
        """
        if self._config.num_blocks_override is None:
            total = total_memory(self._device, self._config.memory_limit)
            require_weights_fit(weights_bytes, total_bytes=total, utilization=self._config.gpu_memory_utilization)

    def note_loaded(self, model: PagedModel, peak_bytes: int) -> None:
        """Note what the loaded model holds. Units: peak_bytes is what loading it held at most."""
        release_free_memory(self._device)
        self._weights_bytes = self._held_bytes()
        _log.info(
            "weights_loaded",
            dtype=str(model.loaded.dtype),
            packed_layers=model.packed_layers,
            fused_layers=model.fused_layers,
            stacked_layers=model.stacked_layers,
            held_bytes=self._weights_bytes,
            load_peak_bytes=peak_bytes,
        )
        limit = self._config.memory_limit
        if limit is not None and peak_bytes > limit:
            # The formula knows steps, not this: weights lie twice in memory while they are read and laid out.
            _log.warning("load_peak_over_limit", load_peak_bytes=peak_bytes, memory_limit_bytes=limit)

    def profile(
        self, model: PagedModel, recording: StepRecording, max_num_batched_tokens: int, max_num_seqs: int
    ) -> MemoryProfile:
        """Run the worst step of these limits and count the blocks that fit into what it leaves.

        Raises:
            NotEnoughMemoryError: the host blocks do not fit, or one sequence of the longest length does not.
        """
        layout, share = model.layout, self._config.gpu_memory_utilization
        num_host_blocks = self._config.swap_space // layout.bytes_per_block
        self._admit_host_blocks(num_host_blocks * layout.bytes_per_block)
        recording.choose_sizes(model, max_num_seqs)
        try:
            with PeakMeter(self._device) as meter:
                self._run_worst_step(model, recording, max_num_batched_tokens, max_num_seqs)
        finally:
            # Not before the meter is read: what the driver keeps of each recorded launch is in no pool of torch's.
            recording.drop(model)
        release_free_memory(self._device)
        total = total_memory(self._device, self._config.memory_limit)
        host_bytes = 0
        if self._device.type == "cpu":
            host_bytes = num_host_blocks * layout.bytes_per_block
            self._require_beside(host_bytes, total, "peak", meter.peak_bytes)
        measured = compute_num_blocks(total, share, meter.peak_bytes, layout.bytes_per_block, host_bytes)
        override = self._config.num_blocks_override
        profile = MemoryProfile(
            total_bytes=total,
            utilization=share,
            weights_bytes=self._weights_bytes,
            peak_bytes=meter.peak_bytes,
            available_bytes=available_bytes(total, share, meter.peak_bytes, host_bytes),
            bytes_per_block=layout.bytes_per_block,
            num_blocks=measured if override is None else override,
            overridden=override is not None,
            num_host_blocks=num_host_blocks,
        )
        limits = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
        self._log_profile(model, profile, measured_num_blocks=measured, host_bytes=host_bytes, **limits)
        if override is None:
            require_one_sequence(
                measured,
                max_model_len=model.loaded.max_model_len,
                blocks_for=lambda num_tokens: sum(
                    group.most_blocks(num_tokens, size, max_num_batched_tokens)
                    for group, size in zip(model.kv_groups(), model.group_block_sizes, strict=True)
                ),
                bytes_per_block=layout.bytes_per_block,
                total_bytes=total,
                utilization=share,
                weights_bytes=self._weights_bytes,
                peak_bytes=meter.peak_bytes,
                host_bytes=host_bytes,
            )
        return profile

    def _admit_host_blocks(self, size: int) -> None:
        """Refuse, before the worst step is run, host blocks that cannot fit whatever it takes.

        Beside a GPU it takes none of their memory. On a CPU its peak, reckoned with later, is above the weights.
        """
        if self._device.type == "cpu":
            total = total_memory(self._device, self._config.memory_limit)
            self._require_beside(size, total, "weights", self._weights_bytes)
        else:
            left = "what others hold of the machine's memory"
            require_host_blocks_fit(size, left_bytes=host_memory_left(), left=left)

    def _require_beside(self, size: int, total: int, what: str, held: int) -> None:
        """Refuse host blocks that do not fit on a CPU beside what else is held, which is named."""
        share = self._config.gpu_memory_utilization
        left = f"total {total} * utilization {share} - {what} {held}"
        require_host_blocks_fit(size, left_bytes=available_bytes(total, share, held), left=left)

    def _run_worst_step(
        self, model: PagedModel, recording: StepRecording, max_num_batched_tokens: int, max_num_seqs: int
    ) -> None:
        """The step that needs most memory, over a scratch cache of a few blocks. Recorded steps are left there."""
        loaded, layout, windows = model.loaded, model.layout, model.groups.windows
        attending = [window for window in windows if window != STATE]
        scratch = PagedKvCache(layout, SCRATCH_BLOCKS, self._device, model.codecs)
        reserved_bytes = model.kernels.reserved_bytes(max_num_seqs, loaded.max_model_len, attending)
        recording.record(model, scratch)  # what they hold, they hold beside every step
        reserved = torch.ones(reserved_bytes, dtype=torch.uint8, device=self._device)
        warm_up(loaded.model, max_num_batched_tokens)
        token_counts = {max_num_batched_tokens}
        if len(attending) < len(windows):  # many rows of one token take as much memory for states as a few long ones
            token_counts.add(min(max_num_seqs, max_num_batched_tokens))
        for num_tokens in sorted(token_counts):
            batch = worst_batch(
                max_num_batched_tokens=num_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=loaded.max_model_len,
                vocab_size=loaded.vocab_size,
                block_sizes=model.group_block_sizes,
                max_logprobs=MAX_LOGPROBS,
                limits=model.limits,
            )
            model.run(batch, scratch)
            if model.adapters is not None:
                self._run_with_adapters(model, model.adapters, batch, scratch)
        del reserved
        # Copies run before a step, never beside it.
        torch.ones(copy_workspace_bytes(layout), dtype=torch.uint8, device=self._device)

    def _run_with_adapters(
        self, model: PagedModel, adapters: LoraAdapters, batch: StepBatch, scratch: PagedKvCache
    ) -> None:
        """The worst step with as many and as large adapters as may be, while one more is read.

        It takes most where all tokens are one adapter's, or where those of two lie in turn and are gathered; which of
        them depends on a layer's shape.
        """
        on_cpu = self._device.type == "cpu"
        being_read = torch.ones(adapters.reading_bytes if on_cpu else 0, dtype=torch.uint8)
        with adapters.largest() as ids:
            for most in {1, min(2, len(ids))}:
                adapter_ids = np.arange(batch.num_rows, dtype=np.int32) % np.int32(most) + np.int32(1)
                model.run(replace(batch, adapter_ids=adapter_ids), scratch)
        del being_read

    def _held_bytes(self) -> int:
        """Memory held now: the process's on CPU, the device's on CUDA."""
        if self._device.type == "cpu":
            return resident_bytes()
        return int(torch.cuda.memory_reserved(self._device))

    def _log_profile(self, model: PagedModel, profile: MemoryProfile, *, host_bytes: int, **more: int) -> None:
        as_auto: dict[str, int] = {}
        if self._config.fp8 is not None:
            # The same formula for K/V in the type that the model computes in: how much fp8 is worth.
            auto = model.as_computed
            size = auto.bytes_per_block
            fit = compute_num_blocks(profile.total_bytes, profile.utilization, profile.peak_bytes, size, host_bytes)
            as_auto = {"auto_bytes_per_block": size, "auto_num_blocks": fit, "auto_block_size": auto.block_size}
        _log.info(
            "memory_profile",
            device=str(self._device),
            kv_cache_dtype=model.kv_cache_dtype,
            total_bytes=profile.total_bytes,
            utilization=profile.utilization,
            weights_bytes=profile.weights_bytes,
            peak_bytes=profile.peak_bytes,
            available_bytes=profile.available_bytes,
            bytes_per_block=profile.bytes_per_block,
            host_bytes=host_bytes,
            num_host_blocks=profile.num_host_blocks,
            block_size=model.layout.block_size,
            group_block_sizes=model.group_block_sizes,
            num_blocks=profile.num_blocks,
            overridden=profile.overridden,
            **more,
            **as_auto,
        )
