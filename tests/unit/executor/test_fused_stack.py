"""All layers in one call give what they give one by one, to the last bit, or run one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor_service.backends.base import BackendError, StepBatch
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.fused_layers import FusedLayer
from executor_service.fused_stack import FusedStack
from tests.unit.executor.native_builds import native_ops
from tests.unit.executor.step_builder import Row, build_step, prompt_of, save_tiny_model

KINDS = ["llama", "qwen2", "qwen3", "mistral"]
BLOCK = 4
BLOCKS = 120


@pytest.fixture(autouse=True)
def _products_of_bfloat16() -> None:
    if not native_ops().linear_columns:
        pytest.skip("this CPU has no products of bfloat16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of 32, which products of pairs take, and of 16, which they do not."""
    folders = {
        f"{kind}-{dim}": save_tiny_model(tmp_path_factory.mktemp(kind), kind, head_dim=dim)
        for kind in KINDS
        for dim in (16, 32)
    }
    return folders | {"gemma3": save_tiny_model(tmp_path_factory.mktemp("gemma3"), "gemma3")}


def loaded(folder: Path, **changes: object) -> TorchBackend:
    values: dict[str, object] = {"model": str(folder), "dtype": "bfloat16", "block_size": BLOCK} | changes
    backend = TorchBackend(TorchBackendConfig(**values))  # type: ignore[arg-type]
    backend.load()
    backend.initialize_kv_cache(BLOCKS)
    return backend


def layers_of(backend: TorchBackend) -> list[FusedLayer]:
    return [module for module in backend._ready().loaded.model.modules() if isinstance(module, FusedLayer)]


def steps() -> list[StepBatch]:
    """A prompt in two chunks beside a short one, then both decode beside a third that begins."""
    long, short, late = prompt_of(61, 1), prompt_of(3, 2), prompt_of(17, 3)
    first, second, third = (range(start, start + 30) for start in (1, 31, 61))
    return [
        build_step([Row(long[:40], 0, first), Row(short, 0, second)], BLOCK),
        build_step([Row(long[40:60], 40, first), Row([5], 3, second)], BLOCK),
        build_step([Row(long[60:], 60, first), Row(late, 0, third), Row([9], 4, second)], BLOCK),
    ]


def logits_of(backend: TorchBackend) -> list[torch.Tensor]:
    return [backend.forward(step).clone() for step in steps()]


def one_by_one(backend: TorchBackend) -> list[torch.Tensor]:
    """The same without the stack, in a cache that is new."""
    backend.initialize_kv_cache(BLOCKS)
    layers = layers_of(backend)
    stacks = [layer.stack for layer in layers]
    for layer in layers:
        layer.stack = None
    try:
        return logits_of(backend)
    finally:
        for layer, stack in zip(layers, stacks, strict=True):
            layer.stack = stack


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_stack_gives_what_its_layers_give(folders: dict[str, Path], kind: str, dim: int, threads: int) -> None:
    backend = loaded(folders[f"{kind}-{dim}"], num_threads=threads)
    layers = layers_of(backend)
    assert all(layer.stack is layers[0].stack is not None for layer in layers)
    together = logits_of(backend)
    assert all(map(torch.equal, together, one_by_one(backend)))


@pytest.mark.parametrize("threads", [1, 3])
def test_stack_gates_that_are_no_whole_blocks_give_what_layers_give(tmp_path: Path, threads: int) -> None:
    backend = loaded(save_tiny_model(tmp_path, "llama", head_dim=32, intermediate_size=80), num_threads=threads)
    assert all(layer.stack is not None for layer in layers_of(backend))
    assert all(map(torch.equal, logits_of(backend), one_by_one(backend)))


def test_head_norms_of_real_sizes_are_stacked(tmp_path: Path) -> None:
    """As many values as one that is rounded otherwise would be among."""
    sizes = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    folder = save_tiny_model(tmp_path, "qwen3", num_hidden_layers=12, **sizes)
    layers = layers_of(loaded(folder))
    assert len(layers) == 12
    assert all(layer.stack is not None for layer in layers)


def test_profile_with_adapters_keeps_the_workspace_of_steps_without(folders: dict[str, Path]) -> None:
    backend = loaded(folders["llama-32"], max_loras=2, memory_limit=8 << 30)
    backend.profile_memory(96, 4)
    stack = layers_of(backend)[0].stack
    assert isinstance(stack, FusedStack)
    assert len(stack._workspace) >= native_ops().layers_workspace(stack._sizes, 96)


def test_step_that_fails_is_let_go(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds it holds the cache, whose memory the next one needs."""
    backend = loaded(folders["llama-32"])
    stack = layers_of(backend)[0].stack
    assert isinstance(stack, FusedStack)
    monkeypatch.setattr(FusedStack, "_run", lambda *_: fail())
    with pytest.raises(BackendError, match="no memory") as caught:
        backend.execute(steps()[0])
    assert caught.value.reason == "STEP_FAILED"
    assert stack._running is None


def fail() -> None:
    raise RuntimeError("no memory")


def test_hook_on_a_projection_sees_its_calls(folders: dict[str, Path]) -> None:
    backend = loaded(folders["llama-32"])
    before = logits_of(backend)
    seen: list[tuple[int, ...]] = []
    handle = layers_of(backend)[1].mlp.down_proj.register_forward_hook(lambda *call: seen.append(tuple(call[2].shape)))
    backend.initialize_kv_cache(BLOCKS)
    hooked = logits_of(backend)
    handle.remove()
    assert seen == [(1, 43, 96), (1, 21, 96), (1, 19, 96)]
    assert all(map(torch.equal, hooked, before))
    backend.initialize_kv_cache(BLOCKS)
    assert all(map(torch.equal, logits_of(backend), before))
    assert len(seen) == 3


def test_layers_of_another_shape_or_type_run_one_by_one(folders: dict[str, Path]) -> None:
    assert layers_of(loaded(folders["gemma3"])) == []
    for changes in ({"dtype": "float32"}, {"kv_cache_dtype": "fp8_e4m3"}, {"native_kernels": False}):
        layers = layers_of(loaded(folders["llama-32"], **changes))
        assert layers
        assert all(layer.stack is None for layer in layers)
