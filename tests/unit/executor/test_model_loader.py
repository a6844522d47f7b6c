"""Loading: sources, refusals, fingerprints, end tokens, tokenizer files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconMambaConfig,
    PreTrainedConfig,
    T5Config,
)

from executor_service import gguf_conversion, model_loader
from executor_service.backends.base import BackendError
from executor_service.gguf_conversion import content_key, converted_folder, default_cache_dir, num_weights
from executor_service.model_files import eos_token_ids, fingerprint, tokenizer_files, weight_bytes
from executor_service.model_loader import check_architecture, load_model, resolve_max_model_len, resolve_source
from tests.unit.executor.step_builder import VOCAB_SIZE, save_tiny_model, tiny_config

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "tiny", "llama")


def refusal(config: PreTrainedConfig) -> BackendError:
    with pytest.raises(BackendError) as caught:
        check_architecture(config)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"
    return caught.value


def test_load_model_local_folder_tells_what_the_folder_holds(folder: Path) -> None:
    loaded = load_model(str(folder), device=CPU)
    assert (loaded.name, loaded.dtype, loaded.vocab_size) == ("tiny", torch.float32, VOCAB_SIZE)
    assert (loaded.max_model_len, loaded.eos_token_ids, loaded.tokenizer_files) == (256, (3,), {})
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_load_model_other_dtype_and_name_are_taken(folder: Path) -> None:
    loaded = load_model(str(folder), device=CPU, dtype="bfloat16", max_model_len=99, name="mine")
    assert (loaded.dtype, loaded.max_model_len, loaded.name) == (torch.bfloat16, 99, "mine")


def test_load_model_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(BackendError, match="expected dtype auto, float32, bfloat16, float16, got 'int4'"):
        load_model(str(folder), device=CPU, dtype="int4")


def test_load_model_with_json_logs_every_line_is_json(folder: Path) -> None:
    code = f"""
import os, sys, warnings
os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
from executor_service.logging import configure_logging
configure_logging("INFO", "json")
import torch
from executor_service.model_loader import load_model
from transformers.utils import logging
load_model({str(folder)!r}, device=torch.device("cpu"))
for _ in logging.tqdm(range(2), desc="a bar"):
    pass
logging.get_logger("transformers.anything").warning("a warning of transformers")
warnings.warn("a warning of Python")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    events = [json.loads(line)["event"] for line in result.stderr.splitlines()]
    assert events[0] == "a warning of transformers"
    assert "a warning of Python" in events[1]


def test_resolve_source_nothing_there_says_what_was_expected() -> None:
    with pytest.raises(BackendError, match=r"expected a folder, a \.gguf file or a hub id") as caught:
        resolve_source("/no/such/folder/at all")
    assert caught.value.reason == "MODEL_NOT_FOUND"


def test_resolve_source_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(model_loader, "snapshot_download", unreachable)
    with pytest.raises(BackendError, match=r"no route to host.*give a local folder") as caught:
        resolve_source("someone/model")
    assert caught.value.reason == "MODEL_NOT_REACHABLE"


def test_resolve_source_hub_id_takes_the_snapshot(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    asked: list[object] = []

    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        asked.extend([repo, "*.safetensors" in allow_patterns, "tokenizer.json" in allow_patterns])
        return str(folder)

    monkeypatch.setattr(model_loader, "snapshot_download", snapshot)
    assert resolve_source("someone/model") == folder
    assert asked == ["someone/model", True, True]


def test_resolve_source_folder_without_weights_lists_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(BackendError, match=r"expected \*\.safetensors or one .gguf file .*pytorch_model.bin"):
        resolve_source(str(tmp_path))


def test_load_model_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    other, named = tmp_path / "weights.bin", tmp_path / "weights.gguf"
    other.write_bytes(b"GGUF")
    named.write_bytes(b"PK\x03\x04")
    with pytest.raises(BackendError, match=r"expected a \.gguf file or a folder"):
        load_model(str(other), device=CPU, cache_dir=tmp_path / "cache")
    with pytest.raises(BackendError, match="expected a GGUF file, got another kind"):
        load_model(str(named), device=CPU, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


class NotAdmittedError(Exception):
    """What the test's `admit` raises."""


def refused_bytes(source: Path, monkeypatch: pytest.MonkeyPatch, **values: object) -> int:
    """What `load_model` says the weights will take, in a load that is refused for it; nothing may be read then."""
    told: list[int] = []

    def admit(weights_bytes: int) -> None:
        told.append(weights_bytes)
        raise NotAdmittedError

    def reads(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reads)
    with pytest.raises(NotAdmittedError):
        load_model(str(source), device=CPU, admit=admit, **values)  # type: ignore[arg-type]
    (weights_bytes,) = told
    return weights_bytes


def bytes_of(model: torch.nn.Module) -> int:
    """What the parameters take, those that are tied once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "checkpoint",
    [("llama", False, torch.float32), ("qwen2", True, torch.bfloat16), ("qwen3", False, torch.float16)],
)
def test_load_model_admits_exactly_the_bytes_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: tuple[str, bool, torch.dtype], dtype: str
) -> None:
    kind, tied, stored = checkpoint
    model = AutoModelForCausalLM.from_config(tiny_config(kind, tie_word_embeddings=tied), dtype=stored)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    save_file({"again": torch.zeros(10_000)}, tmp_path / "consolidated.safetensors")  # what transformers does not read
    needed = bytes_of(load_model(str(tmp_path), device=CPU, dtype=dtype).model)
    assert refused_bytes(tmp_path, monkeypatch, dtype=dtype) == needed


def test_weight_bytes_embedding_stored_twice_counts_once_when_tied(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" in weights
    head = weights["lm_head.weight"].numel() * 4
    tied, untied = (tiny_config("llama", tie_word_embeddings=value) for value in (True, False))
    assert weight_bytes(folder, untied, None) - weight_bytes(folder, tied, None) == head


def test_weight_bytes_integers_keep_their_size(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10, dtype=torch.int8), "b": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, tiny_config("llama"), torch.bfloat16) == 10 + 6
    assert weight_bytes(tmp_path, tiny_config("llama"), None) == 10 + 12


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, (2).to_bytes(8, "little") + b"[]", b"\x02" + bytes(7) + b"{a", None]
)
def test_weight_bytes_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BackendError, match="expected safetensors files in") as caught:
        weight_bytes(tmp_path, tiny_config("llama"), None)
    assert caught.value.reason == "MODEL_NOT_READABLE"


@pytest.mark.parametrize(("dtype", "size"), [("auto", 4), ("float32", 4), ("bfloat16", 2)])
def test_load_model_admits_a_gguf_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, size: int
) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((30, 32), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    cache = tmp_path / "cache"
    assert refused_bytes(tmp_path / "m.gguf", monkeypatch, dtype=dtype, cache_dir=cache) == (30 + 32) * 32 * size
    assert not cache.exists()


def test_num_weights_gguf_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(BackendError, match="expected a whole GGUF file") as caught:
        num_weights(tmp_path / "m.gguf")
    assert caught.value.reason == "MODEL_NOT_READABLE"


def test_check_architecture_layers_of_another_kind_are_refused_by_name() -> None:
    config = tiny_config("llama")
    config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    assert "chunked_attention, full_attention" in str(refusal(config))


def test_check_architecture_encoder_decoder_is_refused() -> None:
    assert "decoder-only" in str(refusal(T5Config()))


def test_check_architecture_attention_softcap_is_refused() -> None:
    config = tiny_config("llama")
    config.attn_logit_softcapping = 50.0
    assert "attn_logit_softcapping=50.0" in str(refusal(config))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "mamba2", "bamba", "jamba"])
def test_check_architecture_full_attention_sliding_windows_and_states_pass(kind: str) -> None:
    check_architecture(tiny_config(kind))


def test_load_model_with_states_of_a_type_that_was_not_tried_is_refused(tmp_path: Path) -> None:
    config = FalconMambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    config.save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BackendError) as caught:
        load_model(str(tmp_path), device=CPU)
    assert caught.value.reason in ("MODEL_NOT_SUPPORTED", "NO_MAX_MODEL_LEN", "MODEL_NOT_READABLE")


@pytest.mark.parametrize(("asked", "expected"), [(None, 256), (1, 1), (256, 256)])
def test_resolve_max_model_len_within_the_model_is_taken(asked: int | None, expected: int) -> None:
    assert resolve_max_model_len(tiny_config("llama"), asked) == expected


@pytest.mark.parametrize("asked", [0, -1, 257])
def test_resolve_max_model_len_beyond_the_model_is_refused(asked: int) -> None:
    with pytest.raises(BackendError, match="expected --max-model-len from 1 to 256"):
        resolve_max_model_len(tiny_config("llama"), asked)


def test_resolve_max_model_len_longrope_ends_where_factors_change() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [1.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 128,
    }
    assert resolve_max_model_len(tiny_config("llama", rope_parameters=rope), None) == 128


def test_fingerprint_same_model_elsewhere_is_equal(folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    changed = json.loads((copy / "config.json").read_text()) | {"transformers_version": "9", "use_cache": False}
    (copy / "config.json").write_text(json.dumps(changed))
    assert fingerprint(copy, AutoConfig.from_pretrained(copy)) == fingerprint(folder, config)


def test_fingerprint_other_weights_architecture_or_vocabulary_differs(folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    other = shutil.copytree(folder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    prints = [fingerprint(folder, config), fingerprint(other, config)]
    changes: list[dict[str, object]] = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        {"rms_norm_eps": 0.1},
        {"vocab_size": VOCAB_SIZE + 1},
    ]
    prints += [fingerprint(folder, tiny_config("llama", **change)) for change in changes]
    assert len(set(prints)) == 5


@pytest.mark.parametrize(
    ("generation", "config_eos", "expected"),
    [([7, 9], 3, (7, 9, 3)), (3, 3, (3,)), (None, None, ()), (8, None, (8,)), (None, [1, 2], (1, 2))],
)
def test_eos_token_ids_are_of_both_files_without_repeats(
    tmp_path: Path, generation: object, config_eos: object, expected: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert eos_token_ids(tmp_path, tiny_config("llama", eos_token_id=config_eos)) == expected


def test_tokenizer_files_template_inside_the_config_becomes_a_file(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    files = tokenizer_files(tmp_path)
    assert sorted(files) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert files["chat_template.jinja"] == b"D"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert tokenizer_files(tmp_path)["chat_template.jinja"] == b"own file"


def test_converted_folder_is_made_once_and_a_slower_process_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    cache = tmp_path / "cache"
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "by").write_text(str(len(calls)))
        if len(calls) == 1:  # another process finishes while this one is at work
            assert converted_folder(source, cache) == cache / content_key(source)

    monkeypatch.setattr(gguf_conversion, "_convert", convert)
    target = converted_folder(file, cache)
    assert converted_folder(file, cache) == target
    assert len(calls) == 2
    assert (target / "by").read_text() == "2"
    assert list(cache.iterdir()) == [target]


def test_content_key_changes_with_the_content(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(5000))
    first = content_key(file)
    file.write_bytes(bytes(4999) + b"x")
    assert content_key(file) != first
    assert first.startswith("m-")


def test_default_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLANE_CACHE", "/some/where")
    assert default_cache_dir() == Path("/some/where/converted")
    monkeypatch.delenv("KVPLANE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/other")
    assert default_cache_dir() == Path("/other/kvplane/converted")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "kvplane" / "converted"
