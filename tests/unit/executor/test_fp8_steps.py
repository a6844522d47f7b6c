"""In fp8, too, a sequence has one answer: whole, in chunks, over another's blocks, after a preemption of either kind.

What is compared are logits, in float32. Two ways to compute a key differ in its last bits, and rarely, where they fall
on both sides of a rounding, the key is stored as its neighbour: so there is a tolerance, and it is small beside what
attention would differ by if it saw this step's own K/V before they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_service.backends.base import BackendError, BlockCopies, CopyDirection
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.kernels import torch_paged
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.fp8 import FP8_TYPES, layer_codecs
from executor_service.kernels.torch_paged import TorchKernels
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.kv_memory import KvMemory
from executor_service.kv_scales import calibrated_scales, calibration_passages
from executor_service.layer_groups import group_layers
from executor_service.model_loader import load_model
from executor_service.model_runner import ModelRunner, probe
from tests.unit.executor.step_builder import VOCAB_SIZE, Row, build_step, prompt_of, save_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 8
PROMPT, NEW = prompt_of(75, 1), prompt_of(6, 2)
"""What stands in the sequence; the answer's tokens are given, so that logits can be compared token by token."""
LENGTH = len(PROMPT) + len(NEW)
TABLE = np.random.default_rng(3).permutation(np.arange(1, 40))[: -(-LENGTH // BLOCK_SIZE)].tolist()
OTHER_TABLE = [block for block in range(1, 40) if block not in TABLE][: len(TABLE)]
TOLERANCE = 0.02


class Engine:
    """A model, and K/V memory of one type."""

    def __init__(self, folder: Path, stored: str | None) -> None:
        model = load_model(str(folder), device=CPU, dtype="float32").model
        windows, kv_heads, dim = probe(model, VOCAB_SIZE)
        layers = len(windows)
        kernels = TorchKernels(AttentionLimits(gather_tokens=1 << 16))
        self.runner = ModelRunner(model, kernels, group_layers(windows))
        layout, codecs = KvLayout(layers, kv_heads, dim, BLOCK_SIZE, torch.float32), []
        if stored is not None:
            passages = calibration_passages({}, VOCAB_SIZE, 256)
            scales = calibrated_scales(self.runner, layout, stored, passages, CPU)
            layout = KvLayout(layers, kv_heads, dim, BLOCK_SIZE, FP8_TYPES[stored])
            codecs = layer_codecs(FP8_TYPES[stored], scales.keys, scales.values)
        self.memory = KvMemory(layout, 40, 16, CPU, kernels, codecs=codecs)
        self.cache: PagedKvCache = self.memory.cache

    def compute(self, start: int, end: int, table: list[int]) -> torch.Tensor:
        """Logits after each of these tokens that ends a row: the last one. Shape: (V,)."""
        row = Row([*PROMPT, *NEW][start:end], start, table)
        return self.runner.forward(build_step([row], BLOCK_SIZE), self.cache)[0]

    def decode(self, start: int, table: list[int]) -> torch.Tensor:
        """Logits after each token from `start` on, one step each. Shape: (LENGTH - start, V)."""
        return torch.stack([self.compute(place, place + 1, table) for place in range(start, LENGTH)])


def whole(engine: Engine) -> torch.Tensor:
    first = engine.compute(0, len(PROMPT), TABLE)
    return torch.cat([first[None], engine.decode(len(PROMPT), TABLE)])


def chunked(engine: Engine) -> torch.Tensor:
    for start, end in ((0, 7), (7, 8), (8, 48), (48, 71)):
        engine.compute(start, end, TABLE)
    first = engine.compute(71, len(PROMPT), TABLE)
    return torch.cat([first[None], engine.decode(len(PROMPT), TABLE)])


def over_a_prefix_of_another(engine: Engine) -> torch.Tensor:
    """Eight full blocks were computed by a request that goes on otherwise."""
    engine.compute(0, 70, OTHER_TABLE)
    table = [*OTHER_TABLE[:8], *TABLE[8:]]
    first = engine.compute(64, len(PROMPT), table)
    return torch.cat([first[None], engine.decode(len(PROMPT), table)])


def computed_again(engine: Engine) -> torch.Tensor:
    """Preempted after three tokens: all that is known is computed at once, into other blocks."""
    seen = [engine.compute(0, len(PROMPT), TABLE)]
    seen += [engine.compute(place, place + 1, TABLE) for place in range(len(PROMPT), len(PROMPT) + 2)]
    for layer in engine.cache.layers:
        layer[:, TABLE] = 255 if engine.cache.layout.is_quantized else torch.nan
    seen.append(engine.compute(0, len(PROMPT) + 3, OTHER_TABLE))
    return torch.cat([torch.stack(seen), engine.decode(len(PROMPT) + 3, OTHER_TABLE)])


def swapped(engine: Engine) -> torch.Tensor:
    """Preempted after three tokens: its blocks go to the host, and back to other places."""
    seen = [engine.compute(0, len(PROMPT), TABLE)]
    seen += [engine.compute(place, place + 1, TABLE) for place in range(len(PROMPT), len(PROMPT) + 3)]
    blocks, host, back = (
        np.array(ids, dtype=np.int32) for ids in (TABLE, range(2, 2 + len(TABLE)), OTHER_TABLE)
    )  # fmt: skip
    engine.memory.copy([BlockCopies(CopyDirection.DEVICE_TO_HOST, blocks, host)])
    for layer in engine.cache.layers:
        layer[:, TABLE] = 255 if engine.cache.layout.is_quantized else torch.nan
    engine.memory.copy([BlockCopies(CopyDirection.HOST_TO_DEVICE, host, back)])
    return torch.cat([torch.stack(seen), engine.decode(len(PROMPT) + 3, OTHER_TABLE)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", initializer_range=0.2)


@pytest.mark.parametrize("stored", FP8_TYPES)
@pytest.mark.parametrize("way", [chunked, over_a_prefix_of_another, computed_again, swapped])
def test_forward_in_fp8_gives_the_same_logits_on_every_way(
    folder: Path, way: Callable[[Engine], torch.Tensor], stored: str
) -> None:
    expected = whole(Engine(folder, stored))
    actual = way(Engine(folder, stored))
    assert actual.shape == (1 + len(NEW), VOCAB_SIZE)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
    rounding = (whole(Engine(folder, None)) - expected).abs().amax(dim=1)
    assert rounding.min() > 3 * TOLERANCE, f"the tolerance says nothing: fp8 itself changes logits by {rounding}"


def test_attention_over_this_steps_unrounded_kv_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that the tests above are there for."""
    layer = torch_paged._Layer
    write = layer._write

    def unrounded(self: object, states: torch.Tensor, cache: torch.Tensor, codec: object) -> torch.Tensor:
        write(self, states, cache, codec)  # type: ignore[arg-type]
        return states

    monkeypatch.setattr(layer, "_write", unrounded)
    difference = (whole(Engine(folder, "fp8_e4m3")) - chunked(Engine(folder, "fp8_e4m3"))).abs()
    assert difference.max() > 3 * TOLERANCE


def test_load_fp8_for_a_model_with_several_kv_groups_is_refused(tmp_path: Path) -> None:
    config = TorchBackendConfig(str(save_tiny_model(tmp_path, "gemma3")), device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(BackendError, match="expected one KV group for --kv-cache-dtype fp8_e4m3, got 4") as caught:
        TorchBackend(config).load()
    assert caught.value.reason == "KV_CACHE_DTYPE_NOT_SUPPORTED"
