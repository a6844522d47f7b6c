"""Compiles `kernels.cpp` for this machine's CPU, once, and finds what was compiled before.

Station: called by `ops.load_native_ops`. It knows compilers and files, and nothing of what is compiled.

What is compiled lies in the cache folder under a name that the source, the compiler and the CPU make: another of any of
them is compiled anew. It takes seconds; a machine without a compiler does without. A compiler that fails gives way to
the next, and one that hangs is ended: all of them together have a bounded time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog

__all__ = ["NativeBuildError", "native_library"]

SOURCE = Path(__file__).with_name("kernels.cpp")
# Several units in the last place are not worth what -ffast-math does to NaN, which has to stay NaN here.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_QUIET = ("-Wno-psabi",)
_COMPILERS = ("g++", "clang++", "c++")
# Of all compilers that are tried in a start, in seconds: many times what it takes on one slow core.
_TIME_LIMIT_S = 180.0
_KILL_TIMEOUT_S = 10.0
_SAID_CHARS = 1000

_log = structlog.get_logger(__name__)


class NativeBuildError(Exception):
    """There is no compiler, or what each of them says."""


def native_library(cache_dir: Path) -> Path:
    """The compiled kernels, from the cache or from the first compiler that makes them.

    Args:
        cache_dir: where they lie; made when absent.

    Raises:
        NativeBuildError: they cannot be compiled here, or not be kept.
    """
    deadline = time.monotonic() + _TIME_LIMIT_S
    failed: list[str] = []
    for compiler in _compilers():
        try:
            return _library_of(compiler, cache_dir, deadline)
        except NativeBuildError as error:
            why = f"{shlex.join(compiler)}: {error}"
            _log.warning("native_compiler_failed", compiler=shlex.join(compiler), why=str(error))
            failed.append(why)
        except OSError as error:
            raise NativeBuildError(f"expected a cache folder that can be written to, got {error}") from error
    raise NativeBuildError("expected a C++ compiler that compiles the kernels, got " + "; ".join(failed))


def _library_of(compiler: Sequence[str], cache_dir: Path, deadline: float) -> Path:
    """What one compiler makes, or has made. Raises NativeBuildError, and OSError where it cannot be kept."""
    target = cache_dir / "native" / f"kernels-{_fingerprint(compiler)}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Compiled beside and moved: several executors may start at once, and one may be killed.
    with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as folder:
        built = Path(folder) / target.name
        _compile(compiler, built, deadline)
        built.replace(target)
    return target


def _compilers() -> list[list[str]]:
    """Commands that may compile C++: $CXX, which may have arguments, then those that are usual and here.

    Raises:
        NativeBuildError: there is none.
    """
    found: list[list[str]] = []
    asked = os.environ.get("CXX", "").strip()
    unusable = ""
    try:
        words = shlex.split(asked)
    except ValueError as error:
        words, unusable = [], f"CXX={asked!r} is no command: {error}"
    if words and not shutil.which(words[0]):
        words, unusable = [], f"CXX={asked!r} is not here"
    if unusable:
        _log.warning("native_compiler_failed", compiler=asked, why=unusable)
    for command in (words, *([name] for name in _COMPILERS)):
        if command and (place := shutil.which(command[0])) and [place, *command[1:]] not in found:
            found.append([place, *command[1:]])
    if not found:
        usual = ", ".join(_COMPILERS)
        raise NativeBuildError(
            f"expected a C++ compiler, {usual} or CXX, got none{f' ({unusable})' if unusable else ''}"
        )
    return found


def _compile(compiler: Sequence[str], target: Path, deadline: float) -> None:
    """Compile the kernels.

    Args:
        compiler: a command, with the arguments that it always gets.
        target: where to.
        deadline: when, by the monotonic clock, it is ended, with all that it has started.

    Raises:
        NativeBuildError: it fails, or is not done by then.
    """
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise NativeBuildError(f"not tried: the {_TIME_LIMIT_S:g} seconds that a start has for compilers were over")
    command = [*compiler, *FLAGS, *_QUIET, str(SOURCE), "-o", str(target)]
    said = target.with_suffix(".log")  # no pipe: what a compiler has started may hold one open for ever
    with said.open("wb") as output:
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own compiler
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise NativeBuildError(f"it does not start: {error}") from error
        try:
            code = process.wait(left_s)
        except subprocess.TimeoutExpired as error:
            _kill(process)
            raise NativeBuildError(
                f"it hung: ended when the {_TIME_LIMIT_S:g} seconds that a start has for compilers were over; set CXX"
                " to another, or start with --no-native-kernels"
            ) from error
    if code != 0:
        text = said.read_text(errors="replace").strip()[-_SAID_CHARS:]
        missing = "; clang's OpenMP is a package of its own, libomp-dev" if "-lomp" in text or "omp.h" in text else ""
        raise NativeBuildError(f"it ended with {code}: {text}{missing}")
    if not target.is_file():
        raise NativeBuildError("it ended with 0 and made nothing; is it a compiler?")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a disk that does not answer holds it: it is nobody's child then
        process.wait(_KILL_TIMEOUT_S)


def _fingerprint(compiler: Sequence[str]) -> str:
    """What was compiled is for: source, flags, compiler and CPU."""
    digest = hashlib.sha256()
    programs = [place for word in compiler if (place := shutil.which(word))]  # a launcher and its compiler are two
    stats = [Path(place).resolve().stat() for place in programs]
    of_compiler = [shlex.join(compiler), *(f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats)]
    for source in _sources():
        digest.update(source + b"\0")
    for part in (" ".join(FLAGS), *of_compiler, _cpu()):
        digest.update(part.encode() + b"\0")
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
