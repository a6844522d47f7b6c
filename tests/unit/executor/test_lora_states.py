"""Adapters on models with layers that keep a state, inside those layers, too: many in one step, exact against peft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from executor_service.backends.base import AdapterError
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.lora_files import WEIGHTS_FILE
from tests.unit.executor.lora_builder import ATTENTION, peft_tokens, save_adapter
from tests.unit.executor.step_builder import Row, build_step, prompt_of, save_tiny_model

COUNT = 8
CHUNK = 7
NUM_BLOCKS = 150
PROMPTS = [prompt_of(length, length) for length in (5, 19, 1, 26, 12)]
ADAPTERS = [1, 0, 2, 2, 1]
"""Of each prompt, 0 for none: rows of one adapter that lie apart, and rows of another side by side."""

MIXERS = {
    "mamba": ("in_proj", "x_proj"),  # peft adapts no out_proj of Mamba
    "mamba2": ("in_proj",),
    "bamba": ("in_proj", "out_proj"),
    "granitemoehybrid": ("in_proj", "out_proj"),
    "jamba": ("in_proj", "x_proj", "out_proj"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
}
OTHERS = {
    "mamba": (),
    "mamba2": (),
    "bamba": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "granitemoehybrid": (*ATTENTION, "input_linear", "output_linear"),
    "jamba": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "qwen3_next": (*ATTENTION, "shared_expert_gate"),  # peft takes the shared expert for one of the others
}
IN_LAYERS = {"mamba": "mixer", "jamba": "mamba"}


@dataclass
class Model:
    """A model, two adapters of it, a backend with room for them, and what peft makes of each prompt."""

    kind: str
    folder: Path
    adapters: list[Path]
    backend: TorchBackend
    block_size: int
    num_groups: int
    expected: list[list[int]]

    def generate(self, rows: Sequence[int], adapter_ids: Sequence[int]) -> list[list[int]]:
        """Greedy tokens of these prompts at once: in chunks that begin and end anywhere, then decoded."""
        known = [list(PROMPTS[row]) for row in rows]
        done = [0] * len(rows)
        free = np.random.default_rng(1).permutation(np.arange(1, NUM_BLOCKS)).tolist()
        most = -(-(max(map(len, known)) + COUNT) // self.block_size)
        tables = [[[free.pop() for _ in range(most)] for _ in range(self.num_groups)] for _ in rows]
        while any(len(tokens) < len(PROMPTS[row]) + COUNT for row, tokens in zip(rows, known, strict=True)):
            going = [at for at, row in enumerate(rows) if len(known[at]) < len(PROMPTS[row]) + COUNT]
            stops = [min(len(known[at]), done[at] + CHUNK) for at in going]
            step = build_step(
                [
                    Row(known[at][done[at] : stop], done[at], tables[at][0], more_blocks=tables[at][1:])
                    for at, stop in zip(going, stops, strict=True)
                ],
                self.block_size,
            )
            ids = np.array([adapter_ids[at] for at in going], dtype=np.int32)
            sampled = self.backend.execute(replace(step, adapter_ids=ids)).sampled_token_ids.tolist()
            for at, stop, token in zip(going, stops, sampled, strict=True):
                if stop == len(known[at]):
                    known[at].append(token)
                done[at] = stop
        return [tokens[len(PROMPTS[row]) :] for row, tokens in zip(rows, known, strict=True)]


def backend(folder: Path, **changes: object) -> TorchBackend:
    values: dict[str, object] = {
        "model": str(folder), "device": "cpu", "memory_limit": 8 << 30, "max_loras": 3, "max_lora_rank": 8,
        "block_size": 4, "state_interval": 4, "max_model_len": 128, "num_blocks_override": NUM_BLOCKS,
    }  # fmt: skip
    return TorchBackend(TorchBackendConfig(**(values | changes)))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=MIXERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    kind, root = request.param, tmp_path_factory.mktemp(request.param)
    folder = save_tiny_model(root / "model", kind)
    adapters = [
        save_adapter(root / "all", folder, 1, target_modules=[*MIXERS[kind], *OTHERS[kind]]),
        save_adapter(root / "mixers", folder, 2, r=8, lora_alpha=4, target_modules=list(MIXERS[kind])),
    ]
    made = backend(folder)
    info = made.load()
    made.initialize_kv_cache(NUM_BLOCKS)
    for adapter_id, source in enumerate(adapters, start=1):
        made.load_adapter(adapter_id, made.read_adapter(str(source)))
    sources = [None, *adapters]
    expected = [peft_tokens(folder, sources[one], prompt, COUNT) for prompt, one in zip(PROMPTS, ADAPTERS, strict=True)]
    return Model(kind, folder, adapters, made, info.block_size, len(info.kv_groups), expected)


def test_execute_several_adapters_in_one_step_give_the_tokens_that_peft_gives(model: Model) -> None:
    assert model.generate(range(len(PROMPTS)), ADAPTERS) == model.expected
    base = peft_tokens(model.folder, None, PROMPTS[0], COUNT)
    assert model.expected[0] != base, "the adapter changes nothing, and nothing was tested"


def test_execute_one_row_at_a_time_gives_the_tokens_that_peft_gives(model: Model) -> None:
    """Without neighbours, a second time after a profile that had other adapters in their place."""
    with capture_logs():
        model.backend.profile_memory(32, 4)
    model.backend.initialize_kv_cache(NUM_BLOCKS)
    for row in (1, 3):
        assert model.generate([row], [ADAPTERS[row]]) == [model.expected[row]]


def test_execute_hooks_in_modules_with_states_see_their_own_rows_only(model: Model) -> None:
    """The mistake that the tests above are there for: with neighbours' adapters tokens are others."""
    swapped = [{1: 2, 2: 1}.get(one, 0) for one in ADAPTERS]
    got = model.generate(range(len(PROMPTS)), swapped)
    assert [one == other for one, other in zip(got, model.expected, strict=True)] == [one == 0 for one in ADAPTERS]


@pytest.mark.parametrize("model", ["mamba", "jamba"], indirect=True)
def test_read_adapter_of_a_layer_whose_weights_the_model_reads_itself_is_refused_by_name(
    model: Model, tmp_path: Path
) -> None:
    source = save_adapter(tmp_path / "dt", model.folder, 5, target_modules=["dt_proj"], layers_to_transform=[0])
    with pytest.raises(
        AdapterError, match=rf"layers\.0\.{IN_LAYERS[model.kind]}\.dt_proj; .* the model reads"
    ) as caught:
        model.backend.read_adapter(str(source))
    assert caught.value.reason == "ADAPTER_TARGETS_UNKNOWN"


# peft says that some of what it makes of these names matches nothing.
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_read_adapter_of_experts_is_refused_by_name(model: Model, tmp_path: Path) -> None:
    """peft saves their matrices as those of parameters."""
    names = ["gate_proj", "up_proj", "down_proj"]
    source = save_adapter(tmp_path / "experts", model.folder, 5, target_modules=names)
    with pytest.raises(AdapterError, match=r"target_parameters none, got .*gate_up_proj") as caught:
        model.backend.read_adapter(str(source))
    assert caught.value.reason == "ADAPTER_NOT_SUPPORTED"


@pytest.mark.parametrize("model", ["jamba"], indirect=True)
def test_read_adapter_with_zeros_where_the_model_takes_none_has_the_others(model: Model, tmp_path: Path) -> None:
    """So peft saves what it was told to adapt, and never could train."""
    source = save_adapter(tmp_path / "trained", model.folder, 1, target_modules=["in_proj", "dt_proj"])
    tensors = load_file(source / WEIGHTS_FILE)
    for name in tensors:
        if "dt_proj.lora_B" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, source / WEIGHTS_FILE)
    content = model.backend.read_adapter(str(source))
    assert isinstance(content.weights, dict)
    assert {name.rpartition(".")[2] for name in content.weights} == {"in_proj"}
    model.backend.load_adapter(3, content)
    try:
        expected = peft_tokens(model.folder, source, PROMPTS[1], COUNT)
        assert model.generate([1], [3]) == [expected]
    finally:
        model.backend.unload_adapter(3)
    only = {name: tensor for name, tensor in tensors.items() if "dt_proj" in name}
    save_file(only, source / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match="dt_proj") as caught:
        model.backend.read_adapter(str(source))
    assert caught.value.reason == "ADAPTER_TARGETS_UNKNOWN"
