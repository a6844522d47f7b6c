"""What can be told of a model without loading it: whether there is one, and whether its files are whole.

Station: called by ``kvplane up`` before it starts anything, for the backend that reads models. It reads names and the
heads of files, mirrors what the executor looks for, and refuses nothing that the executor could load.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, BinaryIO

from kvplane_client.cli.gguf_length import least_length
from kvplane_client.cli.values import refused

__all__ = ["check_model"]

_GGUF_MAGIC = b"GGUF"
_HUB_ID = re.compile(r"(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)
_MAX_HEAD_BYTES = 100_000_000  # as safetensors itself
_SHOWN_NAMES = 5
_OPTION = "--model"


def check_model(model: str) -> None:
    """Refuses what can not be a model.

    Args:
        model: A folder, a GGUF file, or a hub id; of the last only the form is checked.

    Raises:
        typer.BadParameter: It is none of them, or a file of it is not what its name says.
    """
    path = Path(model).expanduser()
    try:
        if model and path.is_dir():
            _check_folder(path)
        elif path.is_file():
            _check_gguf(path)
        elif _HUB_ID.fullmatch(model) is None or "--" in model or ".." in model or model.endswith(".gguf"):
            raise refused(
                "smollm2, a folder, a .gguf file or a hub id such as Qwen/Qwen3-0.6B", model,
                "there is no such file; check the path", option=_OPTION,
            )  # fmt: skip
    except OSError as error:
        raise refused(
            "files that can be read", f"{error.filename}: {error.strerror}", "see to it", option=_OPTION
        ) from error


def _check_folder(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            _check_gguf(files[0])
            return
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:_SHOWN_NAMES]) or "nothing"
        raise refused(
            f"*.safetensors or one .gguf file in {folder}", names, "name the folder that holds the weights",
            option=_OPTION,
        )  # fmt: skip
    _read_json(folder / "config.json")
    for file in _weight_files(folder):
        _check_safetensors(file)


def _weight_files(folder: Path) -> list[Path]:
    """Returns the files that the executor reads; it prefers one file with all weights."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refused(f"{index} to name its files in weight_map", weight_map, "fetch it again", option=_OPTION)
    return sorted({folder / str(name) for name in weight_map.values()})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise refused(f"{path.name} beside the weights in {path.parent}", "none", "fetch it", option=_OPTION) from None
    except ValueError as error:
        raise refused(f"JSON in {path}", str(error), "fetch it again", option=_OPTION) from None
    if not isinstance(document, dict):
        raise refused(f"a JSON object in {path}", type(document).__name__, "fetch it again", option=_OPTION)
    return document


def _check_gguf(path: Path) -> None:
    if path.suffix != ".gguf":
        raise refused("a .gguf file or a folder", str(path), "name one of these", option=_OPTION)
    with path.open("rb") as file:
        begin = file.read(len(_GGUF_MAGIC))
        file.seek(0)
        least = _least_gguf_length(file) if begin == _GGUF_MAGIC else None
    size = path.stat().st_size
    if least is not None and size < least:
        raise refused(
            f"{path} to have at least {least} bytes, as its head says", size, "it is cut off: fetch it again",
            option=_OPTION,
        )  # fmt: skip
    if begin != _GGUF_MAGIC:
        raise refused(f"a GGUF file, which begins with {_GGUF_MAGIC!r}", begin, f"fetch {path} again", option=_OPTION)


def _least_gguf_length(file: BinaryIO) -> int | None:
    try:
        return least_length(file)
    except EOFError as error:
        raise refused(
            f"a whole GGUF file in {file.name}", str(error), "it is cut off: fetch it again", option=_OPTION
        ) from None


def _check_safetensors(path: Path) -> None:
    """Checks that a file is as long as its head says: what a broken download is not."""
    if not path.is_file():
        raise refused(f"the weights {path.name} in {path.parent}", "no such file", "fetch it", option=_OPTION)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(length) if length <= min(size, _MAX_HEAD_BYTES) else b""
    try:
        tensors = json.loads(head)
        end = 8 + length + max(entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise refused(
            f"{path} to be a safetensors file", "a head that can not be read", "fetch it again", option=_OPTION
        ) from None
    if size < end:
        raise refused(f"{path} to have {end} bytes, as its head says", size, "fetch it again", option=_OPTION)
