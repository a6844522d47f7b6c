"""K and V in fp8 beside states: hybrids have one answer on every way, and their states are the bytes they were.

As in `test_fp8_steps` what is compared are logits in float32, within a tolerance that is small beside what fp8 itself
changes. Blocks are as long as the executor makes them, so that a page of eight-bit K/V holds a state.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from executor_service.backends.base import STATE, BackendError, BlockCopies, CopyDirection
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.kernels import torch_paged
from executor_service.kernels.fp8 import FP8_TYPES
from tests.unit.executor.step_builder import VOCAB_SIZE, Row, build_step, prompt_of, save_tiny_model

KINDS = ("bamba", "granitemoehybrid", "jamba", "qwen3_next")
BLOCKS = 120
NEW = prompt_of(5, 2)
TOLERANCES = {"bamba": 0.02, "granitemoehybrid": 0.02, "jamba": 0.02, "qwen3_next": 0.002}
"""A third of what fp8 itself changes at least; what is found is below 1e-4, but for keys that are rounded elsewhere."""


class Engine:
    """A backend whose rows are one sequence: three blocks and a half of prompt, and the answer's tokens."""

    def __init__(self, folder: Path, kv_cache_dtype: str) -> None:
        config = TorchBackendConfig(
            str(folder),
            device="cpu",
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            block_size=4,
            state_interval=4,
            max_model_len=512,
            num_blocks_override=BLOCKS,
            native_kernels=False,
        )
        self.backend = TorchBackend(config)
        info = self.backend.load()
        self.size, self.windows = info.block_size, [group.window for group in info.kv_groups]
        self.backend.initialize_kv_cache(BLOCKS, BLOCKS)
        self.prompt = prompt_of(3 * self.size + self.size // 2, 1)
        self.tokens = [*self.prompt, *NEW]
        self.reset()

    def reset(self) -> None:
        """All blocks are free, and hold what is no number."""
        self._free = np.random.default_rng(3).permutation(np.arange(1, BLOCKS)).tolist()
        self.lose([list(range(BLOCKS))])

    def take(self) -> list[list[int]]:
        """Shuffled blocks for the sequence, of each group."""
        count = -(-len(self.tokens) // self.size)
        return [[self._free.pop() for _ in range(count)] for _ in self.windows]

    def lose(self, tables: list[list[int]]) -> None:
        """Overwrite what blocks hold with what is no number: in eight bits all ones, and so it is in states."""
        blocks = [block for table in tables for block in table]
        for layer in self.backend._ready_memory().cache.layers:
            layer[:, blocks] = 255 if layer.dtype == torch.uint8 else torch.nan

    def compute(self, start: int, end: int, tables: list[list[int]]) -> torch.Tensor:
        """Logits after the last of these tokens. Shape: (V,)."""
        row = Row(self.tokens[start:end], start, tables[0], more_blocks=tables[1:])
        return self.backend.forward(build_step([row], self.size))[0]

    def decode(self, start: int, tables: list[list[int]]) -> list[torch.Tensor]:
        """Logits after each token from `start` on, one step each."""
        return [self.compute(place, place + 1, tables) for place in range(start, len(self.tokens))]


def whole(engine: Engine) -> torch.Tensor:
    tables, length = engine.take(), len(engine.prompt)
    return torch.stack([engine.compute(0, length, tables), *engine.decode(length, tables)])


def chunked(engine: Engine) -> torch.Tensor:
    tables, size, length = engine.take(), engine.size, len(engine.prompt)
    ends = [size - 1, size, 2 * size + 3, 3 * size, length]
    for start, end in zip([0, *ends], ends, strict=False):
        last = engine.compute(start, end, tables)
    return torch.stack([last, *engine.decode(length, tables)])


def over_a_prefix_of_another(engine: Engine) -> torch.Tensor:
    """Two blocks were computed by a request that goes on otherwise: their K/V are read, and the second's states."""
    theirs, own = engine.take(), engine.take()
    size, length = engine.size, len(engine.prompt)
    engine.compute(0, 2 * size, theirs)
    tables = [[*other[:2], *table[2:]] for other, table in zip(theirs, own, strict=True)]
    engine.lose([table[:1] for window, table in zip(engine.windows, theirs, strict=True) if window == STATE])
    return torch.stack([engine.compute(2 * size, length, tables), *engine.decode(length, tables)])


def computed_again(engine: Engine) -> torch.Tensor:
    """Preempted after three tokens: all that is known is computed at once, into other blocks."""
    first, second, length = engine.take(), engine.take(), len(engine.prompt)
    seen = [engine.compute(0, length, first)]
    seen += [engine.compute(place, place + 1, first) for place in range(length, length + 2)]
    engine.lose(first)
    return torch.stack([*seen, engine.compute(0, length + 3, second), *engine.decode(length + 3, second)])


def swapped(engine: Engine) -> torch.Tensor:
    """Preempted after three tokens: its blocks go to the host, and back to other places."""
    first, second, length = engine.take(), engine.take(), len(engine.prompt)
    seen = [engine.compute(0, length, first)]
    seen += [engine.compute(place, place + 1, first) for place in range(length, length + 3)]
    blocks, back = (np.array(tables, dtype=np.int32).ravel() for tables in (first, second))
    host = np.arange(1, 1 + len(blocks), dtype=np.int32)
    engine.backend.copy_blocks([BlockCopies(CopyDirection.DEVICE_TO_HOST, blocks, host)])
    engine.lose(first)
    engine.backend.copy_blocks([BlockCopies(CopyDirection.HOST_TO_DEVICE, host, back)])
    return torch.stack([*seen, *engine.decode(length + 3, second)])


WAYS = [chunked, over_a_prefix_of_another, computed_again, swapped]


@dataclass
class Model:
    """A folder, and what the ways have in common."""

    folder: Path
    tolerance: float
    unrounded: torch.Tensor
    stored: dict[str, Engine]
    expected: dict[str, torch.Tensor]

    def engine(self, stored: str) -> Engine:
        """The one of this type, as new."""
        self.stored[stored].reset()
        return self.stored[stored]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    spread = 0.15 if request.param == "qwen3_next" else 0.2
    folder = save_tiny_model(
        tmp_path_factory.mktemp(request.param), request.param, initializer_range=spread, max_position_embeddings=512
    )
    # The same prompt in all: blocks of eight-bit K/V are longer.
    stored = {name: Engine(folder, name) for name in FP8_TYPES}
    plain = Engine(folder, "auto")
    (prompt,) = {tuple(engine.prompt) for engine in stored.values()}
    plain.prompt, plain.tokens = list(prompt), [*prompt, *NEW]
    expected = {name: whole(engine) for name, engine in stored.items()}
    return Model(folder, TOLERANCES[request.param], whole(plain), stored, expected)


@pytest.mark.parametrize("stored", FP8_TYPES)
@pytest.mark.parametrize("way", WAYS)
def test_forward_of_a_hybrid_in_fp8_gives_the_same_logits_on_every_way(
    model: Model, way: Callable[[Engine], torch.Tensor], stored: str
) -> None:
    expected, actual = model.expected[stored], way(model.engine(stored))
    assert actual.shape == (1 + len(NEW), VOCAB_SIZE)
    torch.testing.assert_close(actual, expected, atol=model.tolerance, rtol=0)
    rounding = (model.unrounded - expected).abs().amax(dim=1)
    assert rounding.min() > 3 * model.tolerance, f"the tolerance says nothing: fp8 itself changes logits by {rounding}"


def test_attention_over_this_steps_unrounded_kv_would_be_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that the tests above are there for."""
    layer = torch_paged._Layer
    write = layer._write

    def unrounded(self: object, states: torch.Tensor, cache: torch.Tensor, codec: object) -> torch.Tensor:
        write(self, states, cache, codec)  # type: ignore[arg-type]
        return states

    monkeypatch.setattr(layer, "_write", unrounded)
    first, second = (way(model.engine("fp8_e4m3")) for way in (whole, chunked))
    difference = (first - second).abs()
    assert difference.max() > 3 * model.tolerance


def test_states_beside_kv_in_fp8_are_the_bytes_that_they_are_without(model: Model) -> None:
    """Of the first layer, before which nothing attends."""
    states = []
    for kind in ("auto", "fp8"):
        engine = Engine(model.folder, kind)
        length = 7
        tables = engine.take()
        engine.compute(0, length, tables)
        paged, cache = engine.backend._ready(), engine.backend._ready_memory().cache
        group, page = paged.groups.group_of[0], paged.groups.page_of[0]
        assert paged.groups.windows[group] == STATE
        newest = torch.tensor([tables[group][(length - 1) // engine.size]])
        kept = paged.runner._states
        assert kept is not None
        states.append(cache.read_pages(page, newest)[0, : kept.layout.num_bytes])
    assert states[0].any()
    assert torch.equal(*states)


def test_load_fp8_for_a_hybrid_makes_blocks_longer_until_a_page_holds_a_state(model: Model) -> None:
    plain, stored = Engine(model.folder, "auto"), Engine(model.folder, "fp8")
    with capture_logs() as logs:
        stored.backend.profile_memory(64, 4)
    (said,) = [log for log in logs if log["event"] == "memory_profile"]
    layouts = [engine.backend._ready().layout for engine in (plain, stored)]
    kept = stored.backend._ready().runner._states
    assert kept is not None
    for layout in layouts:
        page = layout.bytes_per_block // layout.num_layers
        assert page >= kept.layout.num_bytes > page - 4 * layout.bytes_per_token_and_layer
    assert stored.size > 3 * plain.size
    assert (said["block_size"], said["bytes_per_block"]) == (stored.size, layouts[1].bytes_per_block)
    assert (said["auto_block_size"], said["auto_bytes_per_block"]) == (plain.size, layouts[0].bytes_per_block)


def test_load_fp8_for_a_hybrid_whose_interval_is_long_halves_its_blocks(model: Model) -> None:
    """Where the interval and not the state says how long a block is, it stays as long."""
    found = {}
    for kind in ("auto", "fp8"):
        config = TorchBackendConfig(
            str(model.folder), device="cpu", dtype="bfloat16", kv_cache_dtype=kind, state_interval=256
        )
        info = TorchBackend(config).load()
        found[kind] = info.block_size, info.kv_groups[0].bytes_per_block
    assert found["auto"][0] == found["fp8"][0] == 256
    assert found["auto"][1] == 2 * found["fp8"][1]


def test_execute_in_fp8_state_that_is_not_a_number_fails_its_row(model: Model) -> None:
    engine = Engine(model.folder, "fp8")
    weights = engine.backend._ready().loaded.model.get_input_embeddings().weight
    weights.data[77] = torch.nan
    tokens = ([5, 9, 6], [5, 77, 6])
    rows = [
        Row(ids, 0, tables[0], params=None, more_blocks=tables[1:])
        for ids, tables in ((ids, engine.take()) for ids in tokens)
    ]
    failures = engine.backend.execute(build_step(rows, engine.size)).failures
    assert [(failure.row, failure.reason) for failure in failures] == [(1, "NON_FINITE_KV")]


def test_load_fp8_for_a_hybrid_takes_scales_of_the_layers_that_attend(model: Model, tmp_path: Path) -> None:
    folder = shutil.copytree(model.folder, tmp_path / "model")
    attending = Engine(model.folder, "fp8").backend._ready().groups.attending
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in attending for part in "kv"]
    scales = {name: torch.tensor(2.0 + place) for place, name in enumerate(names)}
    weights = load_file(folder / "model.safetensors")
    save_file(weights | scales, folder / "model.safetensors", {"format": "pt"})
    with capture_logs() as logs:
        codecs = Engine(folder, "fp8").backend._ready().codecs
    (said,) = [log for log in logs if log["event"] == "kv_scales"]
    least, most = 2, 1 + len(names)
    assert (said["source"], said["k"], said["v"]) == (
        "checkpoint",
        f"{least} to {most - 1}",
        f"{least + 1} to {most}",
    )
    assert [codecs[layer].values.scale for layer in attending] == list(range(3, most + 1, 2))  # type: ignore[union-attr]
    wrong = scales | {"model.layers.0.mamba.k_scale": torch.tensor(1.0)}
    save_file(weights | wrong, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BackendError, match="of no layer, first k_scale of layer 0") as caught:
        Engine(folder, "fp8")
    assert caught.value.reason == "BAD_KV_SCALES"


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_load_fp8_for_a_model_that_attends_nowhere_is_refused(kind: str, tmp_path: Path) -> None:
    """Its memory would be no smaller: a flag without effect would be believed in."""
    with pytest.raises(BackendError, match=r"layers keep states only, .* Use --kv-cache-dtype auto") as caught:
        Engine(save_tiny_model(tmp_path, kind), "fp8")
    assert caught.value.reason == "KV_CACHE_DTYPE_NOT_SUPPORTED"
