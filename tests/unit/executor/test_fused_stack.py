"""All layers in one call give what they give one by one, to the last bit, or run one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_service.backends.base import BackendError, StepBatch
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.fused_layers import FusedLayer
from executor_service.fused_stack import FusedStack
from tests.unit.executor.native_builds import native_ops
from tests.unit.executor.step_builder import Row, Sample, build_step, prompt_of, save_tiny_model

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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["llama-16", "llama-32", "qwen3-32", "mistral-32"])
def test_stack_of_tokens_that_are_wanted_gives_what_layers_give(
    folders: dict[str, Path], kind: str, threads: int
) -> None:
    """Rows that sample, more than once too, beside rows that do not; then none that does. K/V are written of all."""
    backend = loaded(folders[kind], num_threads=threads)
    twice = Sample()
    rows = [
        Row(prompt_of(40, 1), 0, range(1, 11), params=None),
        Row(prompt_of(19, 2), 0, range(11, 16), forks=[twice]),
        Row([5], 0, [16], params=None),
        Row([7], 0, [17]),
        Row([8, 9], 0, [18]),
    ]
    silent = [replace(row, params=None, forks=()) for row in rows]
    some, none = build_step(rows, BLOCK), build_step(silent, BLOCK)

    def outcome() -> list[torch.Tensor]:
        cache = backend._ready_memory().cache.layers
        logits = [backend.forward(some).clone(), *(layer.clone() for layer in cache)]
        for layer in cache:
            layer.zero_()
        assert backend.forward(none).shape[0] == 0
        return [*logits, *(layer.clone() for layer in cache)]

    assert all(layer.stack is not None for layer in layers_of(backend))
    together = outcome()
    backend.initialize_kv_cache(BLOCKS)
    for layer in layers_of(backend):
        layer.stack = None
    assert all(map(torch.equal, together, outcome()))
    assert together[0].shape[0] == 4


@pytest.mark.parametrize(("kind", "rest_is_left_out"), [("llama", True), ("mistral", False)])
def test_stack_behind_the_last_kv_computes_tokens_that_are_wanted_alone(
    tmp_path: Path, kind: str, rest_is_left_out: bool
) -> None:
    """Where no window is: seen by what attention leaves in a workspace that held no numbers, and by what comes out."""
    backend = loaded(save_tiny_model(tmp_path, kind, head_dim=32, num_hidden_layers=1))
    rows = [Row(prompt_of(40, 1), 0, range(1, 11)), Row([5], 0, [16], params=None), Row(prompt_of(3, 2), 0, [17])]
    (layer,), step = layers_of(backend), build_step(rows, BLOCK)
    stack, wanted, tokens = layer.stack, torch.tensor([39, 43]), 44
    assert isinstance(stack, FusedStack)
    results: list[torch.Tensor] = []
    hook = backend._ready().loaded.model.model.norm.register_forward_pre_hook(
        lambda _, args: results.append(args[0][0].clone())
    )
    width, heads, kv_heads, dim, _ = stack._sizes.tolist()
    stack._workspace = torch.full(
        (native_ops().layers_workspace(stack._sizes, tokens),), float("nan"), dtype=torch.bfloat16
    )
    backend.forward(step)
    before = tokens * (2 * width + (heads + 2 * kv_heads) * dim)  # `attended` in native/layers.h
    attended = stack._workspace[before : before + tokens * heads * dim].view(tokens, -1).isfinite().all(1)
    layer.stack = None
    backend.forward(step)
    hook.remove()
    same = torch.tensor([torch.equal(one, other) for one, other in zip(*results, strict=True)])
    expected = torch.ones(tokens, dtype=torch.bool)
    if rest_is_left_out:
        expected = torch.zeros(tokens, dtype=torch.bool).index_fill(0, wanted, 1)
    assert torch.equal(attended, expected)
    assert torch.equal(same, expected)


def test_stack_of_few_wanted_tokens_of_real_sizes_adds_up_as_layers_do(tmp_path: Path) -> None:
    """A few rows by themselves are added up otherwise: among so many values some would be rounded otherwise, too."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = save_tiny_model(tmp_path, "llama", head_dim=64, num_hidden_layers=2, **sizes)
    backend = loaded(folder)
    steps = [
        build_step([Row(prompt_of(8, 10 * seed + row), 0, [1 + 2 * row, 2 + 2 * row]) for row in range(rows)], BLOCK)
        for rows in (1, 2, 3, 4)
        for seed in range(1, 9)
    ]
    layers = layers_of(backend)
    stack = layers[0].stack
    assert stack is not None
    for step in steps:
        found = []
        for used in (stack, None):
            for layer in layers:
                layer.stack = used
            found.append(backend.forward(step).clone())
        assert torch.equal(*found)


@pytest.mark.parametrize("wanted", [[3, 3], [4, 2], [-1], [5]])
def test_run_layers_tokens_that_are_not_there_are_refused(folders: dict[str, Path], wanted: list[int]) -> None:
    backend = loaded(folders["llama-32"])
    stack = layers_of(backend)[0].stack
    assert isinstance(stack, FusedStack)
    states = torch.zeros(1, 5, 96, dtype=torch.bfloat16)
    angles = torch.zeros(1, 5, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rising indices of tokens"):
        native_ops().run_layers(
            states,
            angles,
            angles,
            sizes=stack._sizes,
            layers=stack._table,
            pages=np.zeros((len(stack._table), 3), np.int64),
            groups=np.zeros((1, 8), np.int64),
            workspace=torch.zeros(native_ops().layers_workspace(stack._sizes, 5), dtype=torch.bfloat16),
            wanted=np.array(wanted, np.int64),
        )


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
