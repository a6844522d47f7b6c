"""Adapters beside a model: many in one step, exact against peft; what is refused, what memory is kept for them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import nn

from executor_service.backends.base import AdapterError
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.lora import find_targets
from executor_service.lora_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter_files
from tests.unit.executor.lora_builder import ATTENTION, COUNT, generate, peft_tokens, save_adapter
from tests.unit.executor.step_builder import prompt_of, save_tiny_model

NO_LIMIT = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama", "llama")


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three that differ in layers, rank and scale."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        save_adapter(root / "all", folder, 1),
        save_adapter(root / "attention", folder, 2, r=8, lora_alpha=4, use_rslora=True, target_modules=list(ATTENTION)),
        save_adapter(
            root / "patterns",
            folder,
            3,
            rank_pattern={"q_proj": 2, r"model\.layers\.1\.mlp\.up_proj": 7},
            alpha_pattern={"v_proj": 32},
            layers_to_transform=[0, 1],
        ),
    ]


@pytest.fixture(scope="module")
def loaded(folder: Path) -> TorchBackend:
    made = backend(folder)
    made.load()
    made.initialize_kv_cache(64)
    return made


def backend(folder: Path, **changes: object) -> TorchBackend:
    values: dict[str, object] = {
        "model": str(folder),
        "device": "cpu",
        "memory_limit": 8 * NO_LIMIT,
        "max_loras": 4,
        "max_lora_rank": 8,
    }
    return TorchBackend(TorchBackendConfig(**(values | changes)))  # type: ignore[arg-type]


def test_execute_several_adapters_in_one_step_give_the_tokens_that_peft_gives(
    loaded: TorchBackend, folder: Path, adapters: list[Path]
) -> None:
    for adapter_id, source in enumerate(adapters, start=1):
        loaded.load_adapter(adapter_id, loaded.read_adapter(str(source)))
    prompts = [prompt_of(length, seed) for seed, length in enumerate((5, 17, 1, 9, 30, 3, 12))]
    adapter_ids = [1, 0, 2, 3, 1, 2, 0]  # one adapter's rows lie apart, others' between
    try:
        got = generate(loaded, prompts, adapter_ids)
    finally:
        for adapter_id in (1, 2, 3):
            loaded.unload_adapter(adapter_id)
    sources: Mapping[int, Path | None] = {0: None} | dict(enumerate(adapters, start=1))
    expected = [
        peft_tokens(folder, sources[one], prompt, COUNT) for prompt, one in zip(prompts, adapter_ids, strict=True)
    ]
    assert got == expected
    base = peft_tokens(folder, None, prompts[0], COUNT)
    assert expected[0] != base, "the adapter changes nothing, and nothing was tested"


def test_profile_memory_while_adapters_are_loaded_leaves_them_at_work(folder: Path, adapters: list[Path]) -> None:
    """As a manager with other limits has it done when it takes over."""
    made = backend(folder)
    made.load()
    made.load_adapter(1, made.read_adapter(str(adapters[0])))
    made.load_adapter(7, made.read_adapter(str(adapters[1])))
    prompts = [prompt_of(5, 1), prompt_of(9, 2)]
    with capture_logs():
        made.profile_memory(64, 8)
    made.initialize_kv_cache(64)
    expected = [peft_tokens(folder, source, prompt, COUNT) for source, prompt in zip(adapters, prompts, strict=False)]
    assert generate(made, prompts, [1, 7]) == expected
    made.unload_adapter(1)
    made.unload_adapter(7)
    made.close()


def test_unload_adapter_leaves_the_model_as_it_was(loaded: TorchBackend, folder: Path, adapters: list[Path]) -> None:
    prompt = prompt_of(9, 4)
    loaded.load_adapter(7, loaded.read_adapter(str(adapters[0])))
    loaded.load_adapter(8, loaded.read_adapter(str(adapters[1])))
    loaded.unload_adapter(7)
    assert generate(loaded, [prompt], [8]) == [peft_tokens(folder, adapters[1], prompt, COUNT)]
    loaded.unload_adapter(8)
    assert generate(loaded, [prompt], [0]) == [peft_tokens(folder, None, prompt, COUNT)]
    assert not any(module._forward_hooks for module in loaded._ready().loaded.model.modules()), (
        "an unused hook costs time"
    )


def test_read_adapter_tells_revision_rank_and_size(loaded: TorchBackend, adapters: list[Path], tmp_path: Path) -> None:
    contents = [loaded.read_adapter(str(source)) for source in adapters]
    assert [content.rank for content in contents] == [4, 8, 7]
    assert len({content.revision for content in contents}) == 3
    tensors = load_file(adapters[0] / WEIGHTS_FILE)
    assert contents[0].size_bytes == sum(tensor.nbytes for tensor in tensors.values())
    copy = shutil.copytree(adapters[0], tmp_path / "copy")
    assert loaded.read_adapter(str(copy)).revision == contents[0].revision
    change_config(copy, lora_alpha=16)
    assert loaded.read_adapter(str(copy)).revision != contents[0].revision


def change_config(folder: Path, **changes: object) -> None:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"a_setting_of_tomorrow": {"x": 1}}, "a_setting_of_tomorrow"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_read_adapter_that_is_more_than_plain_lora_is_refused_by_name(
    loaded: TorchBackend, adapters: list[Path], tmp_path: Path, changes: dict[str, object], names: str
) -> None:
    copy = shutil.copytree(adapters[0], tmp_path / "copy")
    change_config(copy, **changes)
    with pytest.raises(AdapterError, match=names) as caught:
        loaded.read_adapter(str(copy))
    assert caught.value.reason == "ADAPTER_NOT_SUPPORTED"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"r": 5}, "rank of the matrices"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"alpha_pattern": {"(": 1}}, "regular expressions"),
    ],
)
def test_read_adapter_whose_settings_do_not_fit_its_matrices_is_refused(
    adapters: list[Path], tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    copy = shutil.copytree(adapters[0], tmp_path / "copy")
    change_config(copy, **changes)
    with pytest.raises(AdapterError, match=expected) as caught:
        read_adapter_files(str(copy), NO_LIMIT)
    assert caught.value.reason == "ADAPTER_NOT_READABLE"


def test_read_adapter_of_another_model_is_refused(
    loaded: TorchBackend, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("other")
    wider = save_tiny_model(root / "wider", "llama", intermediate_size=128)
    other = save_adapter(root / "wider-adapter", wider, 5)
    deeper = save_tiny_model(root / "deeper", "llama", num_hidden_layers=4)
    for source, reason, names in (
        (other, "ADAPTER_SHAPE_MISMATCH", "mlp"),
        (save_adapter(root / "deeper-adapter", deeper, 5), "ADAPTER_TARGETS_UNKNOWN", "layers.3"),
        (save_adapter(root / "head", deeper, 5, target_modules=["lm_head"]), "ADAPTER_TARGETS_UNKNOWN", "lm_head"),
        (save_adapter(root / "embed", deeper, 5, target_modules=["embed_tokens"]), "ADAPTER_NOT_SUPPORTED", "embed"),
        (save_adapter(root / "rank", deeper, 5, r=9, layers_to_transform=[0]), "ADAPTER_RANK_TOO_LARGE", "9"),
    ):
        with pytest.raises(AdapterError, match=names) as caught:
            loaded.read_adapter(str(source))
        assert caught.value.reason == reason


def test_read_adapter_that_is_no_adapter_is_refused(loaded: TorchBackend, adapters: list[Path], tmp_path: Path) -> None:
    copy = shutil.copytree(adapters[0], tmp_path / "copy")
    tensors = load_file(copy / WEIGHTS_FILE)

    def refused(expected: str) -> str:
        with pytest.raises(AdapterError, match=expected) as caught:
            loaded.read_adapter(str(copy))
        return caught.value.reason

    half = {name: tensor for name, tensor in tensors.items() if not name.endswith("0.self_attn.q_proj.lora_B.weight")}
    save_file(half, copy / WEIGHTS_FILE)
    assert refused("lora_A") == "ADAPTER_NOT_READABLE"
    save_file(tensors | {"base_model.model.lm_head.weight": torch.ones(2, 2)}, copy / WEIGHTS_FILE)
    assert refused("lm_head") == "ADAPTER_NOT_SUPPORTED"
    first, matrix = next(iter(tensors.items()))
    for broken in (float("nan"), float("inf")):
        diverged = matrix.clone()
        diverged[-1, -1] = broken
        save_file(tensors | {first: diverged}, copy / WEIGHTS_FILE)
        assert refused(f"finite numbers, got NaN or infinities in {re.escape(first)}") == "ADAPTER_NOT_READABLE"
    save_file(tensors | {first: matrix.to(torch.int32)}, copy / WEIGHTS_FILE)
    assert refused("floating-point numbers, got .* of int32") == "ADAPTER_NOT_SUPPORTED"
    (copy / WEIGHTS_FILE).write_bytes(b"no safetensors")
    assert refused("safetensors") == "ADAPTER_NOT_READABLE"
    (copy / WEIGHTS_FILE).write_bytes(bytes(16 << 20))
    assert refused("at most") == "ADAPTER_TOO_LARGE"
    (copy / WEIGHTS_FILE).unlink()
    assert refused(f"expected {WEIGHTS_FILE} in .*, got no such file") == "ADAPTER_NOT_READABLE"
    (copy / CONFIG_FILE).write_text("[]")
    assert refused("JSON object") == "ADAPTER_NOT_READABLE"
    (copy / CONFIG_FILE).unlink()
    assert refused(CONFIG_FILE) == "ADAPTER_NOT_READABLE"


def test_read_adapter_nowhere_is_refused(loaded: TorchBackend) -> None:
    with pytest.raises(AdapterError, match="/no/such/place") as caught:
        loaded.read_adapter("/no/such/place")
    assert caught.value.reason == "ADAPTER_NOT_FOUND"


class Mixture(nn.Module):
    """A layer with an expert that is routed to and one that all share, with tokens that have lost their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.unused, self.router = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.experts, self.shared = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 4)
        self.head = nn.Linear(4, 9)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        flat = self.whole(states).reshape(-1, 4)
        both = self.experts[0](flat) + self.experts[1](flat[:1])
        return self.head((both + self.shared(flat) + self.router(flat).sum())[None, -1:] @ self.unused.weight)


def test_find_targets_are_linear_layers_that_get_all_tokens_however_they_lie() -> None:
    model = Mixture()
    found = find_targets(model, lambda: model(torch.ones(1, 2, 4)))
    assert found.layers == {"whole": model.whole, "router": model.router, "shared": model.shared}
    assert found.idle == {"unused"}


def test_profile_memory_keeps_room_for_adapters(folder: Path) -> None:
    plain, with_adapters = backend(folder, max_loras=0), backend(folder, max_loras=200, max_lora_rank=64)
    grown = []
    for made in (plain, with_adapters):
        made.load()
        with capture_logs():
            profile = made.profile_memory(64, 8)
        grown.append(profile.peak_bytes - profile.weights_bytes)
        made.close()
    # (in + out) of q, k, v, o, gate, up and down in three layers.
    elements = 3 * (192 + 2 * 128 + 192 + 3 * 192)
    reserved = 200 * elements * 64 * 4
    assert grown[0] < reserved / 2 < reserved < grown[1]


def test_backend_without_room_for_adapters_has_none(folder: Path) -> None:
    made = backend(folder, max_loras=0)
    assert made.load().max_adapters == 0
    with pytest.raises(AdapterError):
        made.read_adapter("anything")
