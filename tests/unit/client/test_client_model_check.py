"""What `kvplane up` tells of a model before it starts anything."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from kvplane_client.cli.model_check import check_model


def safetensors(path: Path, *, cut: int = 0) -> None:
    """Writes a file with one tensor, without its last bytes."""
    head = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    content = struct.pack("<Q", len(head)) + head + bytes(16)
    path.write_bytes(content[: len(content) - cut])


def gguf(*, tensors: int = 1) -> bytes:
    """A file with settings of each kind of type, and tensors of 32 bytes."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    settings = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"general.alignment") + struct.pack("<II", 4, 64),
        text(b"rope.base") + struct.pack("<If", 6, 1.0),
        text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"bc"),
        text(b"scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5),
    ]
    infos = [text(b"t%d" % index) + struct.pack("<IQQIQ", 2, 4, 2, 0, 64 * index) for index in range(tensors)]
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(settings)) + b"".join(settings + infos)
    return head + bytes(-len(head) % 64) + bytes(64 * (tensors - 1) + 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of one file."""
    (tmp_path / "config.json").write_text("{}")
    safetensors(tmp_path / "model.safetensors")
    return tmp_path


def sharded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    safetensors(folder / "b.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refusal(model: str | Path) -> str:
    with pytest.raises(typer.BadParameter) as caught:
        check_model(str(model))
    message = caught.value.message
    assert all(part in message for part in ("expected ", ", got ", "; ")), message
    return message


def test_models_that_may_be_whole_are_let_pass(folder: Path, tmp_path: Path) -> None:
    check_model(str(folder))
    sharded(folder)
    check_model(str(folder))
    file = tmp_path / "model.gguf"
    for content in (gguf(), gguf(tensors=3), b"GGUF" + struct.pack("<I", 4) + b" of a version to come"):
        file.write_bytes(content)
        check_model(str(file))


def test_gguf_file_that_is_cut_off_anywhere_before_its_last_tensor_is_refused(tmp_path: Path) -> None:
    file, whole = tmp_path / "model.gguf", gguf(tensors=3)
    for length in range(4, len(whole) - 31):
        file.write_bytes(whole[:length])
        told = refusal(file)
        assert "cut off: fetch it again" in told
        assert str(length) in told
    file.write_bytes(whole[: len(whole) - 31])
    check_model(str(file))


@pytest.mark.parametrize("model", ["gpt2", "Qwen/Qwen3-0.6B", "nobody/nothing-here", "a/b.c_d-e"])
def test_what_may_be_a_hub_id_is_let_pass(model: str) -> None:
    check_model(model)


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "../none", "a/b/c", "model.gguf", "~/none", "", "a b"])
def test_what_is_neither_there_nor_a_hub_id_is_refused(model: str) -> None:
    assert "a hub id" in refusal(model)


def test_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(gguf())
    check_model(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGU")
    assert "a GGUF file" in refusal(tmp_path)
    (tmp_path / "y.gguf").write_bytes(gguf())
    assert "x.gguf, y.gguf" in refusal(tmp_path)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"GGUF")
    assert "a .gguf file or a folder" in refusal(file)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "nothing" in refusal(tmp_path)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def cut_weights(folder: Path) -> None:
    safetensors(folder / "model.safetensors", cut=1)


def no_head(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"garbage that is no head")


def cut_head(folder: Path) -> None:
    safetensors(folder / "model.safetensors", cut=20)


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def missing_shard(folder: Path) -> None:
    sharded(folder)
    (folder / "b.safetensors").unlink()


def broken_index(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')


def unnamed_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (no_config, "config.json beside the weights"),
        (broken_config, "JSON in "),
        (list_config, "a JSON object in "),
        (cut_weights, "bytes, as its head says"),
        (no_head, "a safetensors file"),
        (cut_head, "a safetensors file"),
        (empty_weights, "a safetensors file"),
        (missing_shard, "b.safetensors"),
        (broken_index, "weight_map"),
        (unnamed_weights, "model.safetensors"),
    ],
)
def test_damaged_folder_is_refused_with_what_is_wrong(folder: Path, damage: Callable[[Path], None], told: str) -> None:
    damage(folder)
    assert told in refusal(folder)
