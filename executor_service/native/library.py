"""Compiles `kernels.cpp` for this machine's CPU, once, and finds what was compiled before.

Station: called by `ops.load_native_ops`. It knows compilers and files, and nothing of what is compiled.

What is compiled lies in the cache folder under a name that the source, the compiler and the CPU make: another of any of
them is compiled anew. It takes seconds; a machine without a compiler does without.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["NativeBuildError", "native_library"]

SOURCE = Path(__file__).with_name("kernels.cpp")
# Several units in the last place are not worth what -ffast-math does to NaN, which has to stay NaN here.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_QUIET = ("-Wno-psabi",)
_COMPILERS = ("g++", "clang++", "c++")
_COMPILE_TIMEOUT_S = 300


class NativeBuildError(Exception):
    """There is no compiler, or what it says."""


def native_library(cache_dir: Path) -> Path:
    """The compiled kernels, from the cache or from the compiler.

    Args:
        cache_dir: where they lie; made when absent.

    Raises:
        NativeBuildError: they cannot be compiled here, or not be kept.
    """
    compiler = _compiler()
    target = cache_dir / "native" / f"kernels-{_fingerprint(compiler)}.so"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Compiled beside and moved: several executors may start at once, and one may be killed.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            _compile(compiler, built)
            built.replace(target)
    except OSError as error:
        raise NativeBuildError(f"expected a cache folder that can be written to, got {error}") from error
    return target


def _compiler() -> str:
    """$CXX, or the first of those that are usual."""
    for name in [os.environ.get("CXX", ""), *_COMPILERS]:
        if name and (found := shutil.which(name)):
            return found
    raise NativeBuildError(f"expected a C++ compiler, {', '.join(_COMPILERS)} or CXX, got none")


def _compile(compiler: str, target: Path) -> None:
    command = [compiler, *FLAGS, *_QUIET, str(SOURCE), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)  # noqa: S603 - the user's own compiler
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{compiler}: {error}") from error
    if done.returncode != 0:
        raise NativeBuildError(f"{compiler} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")


def _fingerprint(compiler: str) -> str:
    """What was compiled is for: source, flags, compiler and CPU."""
    digest = hashlib.sha256()
    stat = Path(compiler).resolve().stat()
    for part in (*_sources(), " ".join(FLAGS), f"{compiler} {stat.st_size} {stat.st_mtime_ns}", _cpu()):
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:24]


def _sources() -> list[bytes]:
    """The source and the headers beside it."""
    return [SOURCE.read_bytes(), *(header.read_bytes() for header in sorted(SOURCE.parent.glob("*.h")))]


def _cpu() -> str:
    """The CPU's model and instruction sets, which -march=native goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
