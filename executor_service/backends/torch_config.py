"""What a torch backend is told: every setting that it knows, with its range.

Station: `registry` fills it from the executor's configuration, by the names of its fields; `torch_backend` and its
parts read it. A setting that users give is a field of `config.ExecutorConfig`, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from executor_service.backends.base import BackendError
from executor_service.kv_scales import fp8_name

__all__ = ["TorchBackendConfig"]


@dataclass(frozen=True)
class TorchBackendConfig:
    """What a `TorchBackend` needs to know.

    Attributes:
        model: a local folder with safetensors, a .gguf file, or a hub id.
        model_name: the name to show; None derives it from `model`.
        device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
        dtype: "auto", "float32", "bfloat16" or "float16". auto is the checkpoint's; for a GGUF it is float32 on CPU and
            bfloat16 on CUDA.
        kv_cache_dtype: the type K/V is stored in: "auto" (the one the model computes in), "fp8_e4m3", which "fp8" is
            too, or "fp8_e5m2".
        max_model_len: the most tokens of a sequence; None takes the model's own.
        block_size: tokens per block.
        state_interval: where layers keep a state, each block is a checkpoint: block_size is multiplied until it is at
            least this, and a block can hold a state.
        gpu_memory_utilization: share of the memory to use, in (0, 1]; on CPU too.
        memory_limit: bytes to count as the device's memory; None is what `memory_profiler.total_memory` finds.
        swap_space: bytes of host memory for blocks that are swapped out, as many whole blocks as fit; on a CPU they
            are part of the device's memory.
        num_blocks_override: this many blocks, whatever fits; None measures.
        num_threads: torch's threads; None leaves torch's choice (OMP_NUM_THREADS).
        enforce_eager: never record decode steps as CUDA graphs; without a GPU, or with kernels that cannot be recorded,
            none is anyway.
        cache_dir: where converted GGUF files and compiled kernels lie; None is `default_cache_dir()`.
        native_kernels: compile kernels for this CPU, where there is a compiler.
        max_loras: adapters at once; memory for as many is reserved.
        max_lora_rank: the largest rank of an adapter.
    """

    model: str
    model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    state_interval: int = 512
    gpu_memory_utilization: float = 0.9
    memory_limit: int | None = None
    swap_space: int = 0
    num_blocks_override: int | None = None
    num_threads: int | None = None
    enforce_eager: bool = False
    cache_dir: Path | None = None
    native_kernels: bool = True
    max_loras: int = 0
    max_lora_rank: int = 16

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        checks = (
            ("block_size", self.block_size, self.block_size >= 1, "at least 1"),
            ("state_interval", self.state_interval, self.state_interval >= 1, "at least 1"),
            ("gpu_memory_utilization", self.gpu_memory_utilization, 0 < self.gpu_memory_utilization <= 1, "in (0, 1]"),
            ("memory_limit", self.memory_limit, self.memory_limit is None or self.memory_limit > 0, "above 0"),
            ("swap_space", self.swap_space, self.swap_space >= 0, "at least 0"),
            ("num_blocks_override", self.num_blocks_override, (self.num_blocks_override or 2) >= 2, "at least 2"),
            ("num_threads", self.num_threads, self.num_threads is None or self.num_threads >= 1, "at least 1"),
            ("max_loras", self.max_loras, self.max_loras >= 0, "at least 0"),
            ("max_lora_rank", self.max_lora_rank, self.max_lora_rank >= 1, "at least 1"),
        )
        for name, value, good, expected in checks:
            if not good:
                raise BackendError("BAD_CONFIG", f"expected {name} {expected}, got {value}", **{name: value})
        fp8_name(self.kv_cache_dtype)

    @property
    def fp8(self) -> str | None:
        """The eight-bit type that K/V is stored in, by its full name; None where it is the one that is computed in."""
        return fp8_name(self.kv_cache_dtype)
