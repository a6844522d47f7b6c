"""Decoder layers of few operations give what transformers' own give, or do not take their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from executor_service.fused_layers import FusedLayer, ProjectionSlice, fuse_layers
from executor_service.layer_ops import LayerOps, TorchOps
from executor_service.model_loader import load_model
from executor_service.model_runner import ProbeStep, probe, run_probe
from executor_service.packed_linear import PackedLinear
from tests.unit.executor.native_builds import native_ops
from tests.unit.executor.step_builder import VOCAB_SIZE, save_tiny_model

FUSED = ["llama", "qwen2", "qwen3", "mistral"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_tiny_model(tmp_path_factory.mktemp(kind), kind) for kind in [*FUSED, "gemma3"]}


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return load_model(str(folder), device=torch.device("cpu"), dtype=dtype).model


def run(model: PreTrainedModel) -> tuple[ProbeStep, torch.Tensor]:
    step = ProbeStep()
    return step, run_probe(model, VOCAB_SIZE, step, positions=range(6))


def states_of(model: PreTrainedModel) -> torch.Tensor:
    """All that the second layer asks of attention, and the logits."""
    step, logits = run(model)
    return torch.cat([part.flatten() for part in (*step.calls[1][:3], logits)])


def fuse(model: PreTrainedModel, *, compiled: bool) -> int:
    native = native_ops() if compiled else None
    operations: LayerOps = native or TorchOps()
    return fuse_layers(
        model, lambda step: run_probe(model, VOCAB_SIZE, step, positions=(0, 1, 2, 30, 61)), operations, native
    )


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize("kind", FUSED)
def test_fuse_layers_gives_the_same(
    folders: dict[str, Path], kind: str, compiled: bool, dtype: str, allowed: float
) -> None:
    model = load(folders[kind], dtype)
    before, expected = run(model)
    assert fuse(model, compiled=compiled) == model.config.num_hidden_layers
    after, got = run(model)
    assert after.windows == before.windows
    assert (got - expected).norm() <= allowed * expected.norm()
    for layer, call in before.calls.items():
        assert after.calls[layer].scaling == call.scaling
        for one, other in zip(after.calls[layer][:3], call[:3], strict=True):
            assert (one - other).norm() <= allowed * other.norm()
    assert probe(model, VOCAB_SIZE)[0] == [before.windows[layer] for layer in sorted(before.windows)]


def test_fuse_layers_lets_go_of_dense_weights(folders: dict[str, Path]) -> None:
    model = load(folders["llama"])
    assert fuse(model, compiled=False)
    layer = model.model.layers[0]
    dense = {name.rpartition(".")[2] for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    assert dense == {"o_proj", "down_proj"}
    assert sum(isinstance(module, PackedLinear) for module in layer.modules()) == 2
    assert {name for name, _ in layer.named_parameters()} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
    }


def test_fuse_layers_model_of_another_shape_stays_as_it_was(folders: dict[str, Path]) -> None:
    model = load(folders["gemma3"])
    _, expected = run(model)
    assert fuse(model, compiled=False) == 0
    assert torch.equal(run(model)[1], expected)


def _other_activation(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.act_fn = nn.GELU()


def _half_residual(model: PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(lambda layer, args, result: result * 0.5)


def _other_norm(model: PreTrainedModel) -> None:
    model.model.layers[1].input_layernorm.register_forward_hook(lambda norm, args, result: result + 0.01)


def _other_positions(model: PreTrainedModel) -> None:
    def less(attention: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cos, sin = arguments["position_embeddings"]
        return args, arguments | {"position_embeddings": (cos, sin * 0.9)}

    model.model.layers[1].self_attn.register_forward_pre_hook(less, with_kwargs=True)


def _other_far_into_a_sequence(model: PreTrainedModel) -> None:
    """As Ministral 3 scales its queries beyond the length that it was first trained on."""

    def more(attention: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        factor = 1.0 + (arguments["position_ids"] >= 40).float().unsqueeze(-1)
        cos, sin = arguments["position_embeddings"]
        return args, arguments | {"position_embeddings": (cos * factor, sin * factor)}

    model.model.layers[1].self_attn.register_forward_pre_hook(more, with_kwargs=True)


@pytest.mark.parametrize(
    "change", [_other_activation, _half_residual, _other_norm, _other_positions, _other_far_into_a_sequence]
)
def test_fuse_layers_one_layer_that_computes_something_else_leaves_all(
    folders: dict[str, Path], change: Callable[[PreTrainedModel], None]
) -> None:
    """The modules have the names and shapes of a Llama's: only what they give tells."""
    model = load(folders["llama"])
    change(model)
    _, expected = run(model)
    assert fuse(model, compiled=False) == 0
    assert not any(isinstance(module, FusedLayer) for module in model.modules())
    assert torch.equal(run(model)[1], expected)


@pytest.mark.parametrize(
    "name", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
)
def test_projection_slice_hook_sees_and_changes_what_the_projection_alone_would(
    folders: dict[str, Path], name: str
) -> None:
    plain, fused = load(folders["llama"]), load(folders["llama"])
    assert fuse(fused, compiled=False)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        seen.append((args[0].clone(), output.clone()))
        output += args[0].sum(dim=-1, keepdim=True)
        return output

    results = []
    for model in (plain, fused):
        module = model.model.layers[1].get_submodule(name)
        before = states_of(model)
        handle = module.register_forward_hook(add)
        results.append(states_of(model))
        handle.remove()
        assert (results[-1] - before).abs().max() > 1
    own, other = (model.model.layers[1].get_submodule(name) for model in (plain, fused))
    assert isinstance(other, ProjectionSlice)
    assert (own.in_features, own.out_features) == (other.in_features, other.out_features)
    for one, two in zip(*seen, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
