"""The manager core beside vLLM's own classes: one run, one core, rounds of the two in turn.

    KVPLANE_VLLM_SOURCE=~/vllm-0.33.0 python -m benchmarks.bench_peer [--source FOLDER] [--rounds 9] [--json]

The folder is vLLM's source distribution, unpacked (`pip download --no-deps --no-binary vllm vllm==0.33.0`); nothing of
it needs a build, but the interpreter needs torch and the pure Python packages that vLLM imports. Without a folder there
is nothing to compare with: the benchmark says so and ends with 0. A source of another version is refused: `vllm_peer`
tells vLLM's classes the same as `bench_core` tells ours, in the terms of this one.

Figures are CPU time, medians over the rounds; the ratio is theirs / ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from email.parser import Parser
from pathlib import Path

from benchmarks import bench_core
from kvmanager_service.core import is_compiled

SOURCE = "KVPLANE_VLLM_SOURCE"
VERSION = "0.33.0"
"""Of vLLM: what `vllm_peer` was written for."""
ROWS, PROMPT_LEN, STEPS = 256, 256, 100
Pair = tuple[str, float, float]
"""Name, our seconds, their seconds."""


def source_version(source: Path) -> str:
    """The version of an unpacked source distribution. Raises SystemExit when it is none, or not `VERSION`."""
    metadata = source / "PKG-INFO"
    if not metadata.is_file() or not (source / "vllm" / "v1" / "core").is_dir():
        raise SystemExit(f"expected vLLM's unpacked source distribution, got {source}")
    found = Parser().parsestr(metadata.read_text(encoding="utf-8"))["Version"]
    if found != VERSION:
        raise SystemExit(
            f"expected vLLM {VERSION}, which this benchmark was written for, got {found} in {source}: "
            f"pip download --no-deps --no-binary vllm vllm=={VERSION}, and unpack it"
        )
    return str(found)


def commit() -> str:
    """Which of our commits this is, with "-dirty" when files differ from it; "unknown" outside of a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the machine calls its CPU."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def make_rounds(source: Path) -> Callable[[], Iterator[Pair]]:
    """Import vLLM and get it ready. Returns what measures everything once, ours and theirs in turn."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.insert(0, str(source))
    from benchmarks.vllm_peer import VllmPeer  # noqa: PLC0415 - vLLM is there from here on

    peer = VllmPeer(ROWS, PROMPT_LEN)

    def one_round() -> Iterator[Pair]:
        ours = values_of(bench_core.block_operations(1))
        theirs = peer.block_operations()
        for seconds, name in zip(ours, ("get", "free", "touch"), strict=True):
            yield f"{name} 64 blocks, per block", seconds, theirs[name]
        (seconds,) = values_of(bench_core.hashing(1))
        for algorithm in ("sha256", "xxhash"):
            yield f"hash a 16-token block, {algorithm} there", seconds, peer.hashing(algorithm)
        cold, warm = values_of(bench_core.admission(1))
        for algorithm in ("sha256", "xxhash"):
            their_cold, their_warm = peer.admission(algorithm)
            yield f"create, hash, admit 1,024 tokens, {algorithm} there", cold, their_cold
            yield f"the same, 1,008 cached, {algorithm} there", warm, their_warm
        (seconds,) = values_of(bench_core.allocation(1))
        yield "allocate_slots, decoding", seconds, peer.allocation()
        seconds, _ = values_of(bench_core.decoding(1, ROWS))
        for queued_ahead, what in ((True, "AsyncScheduler"), (False, "Scheduler")):
            theirs_too = peer.decoding(STEPS, queued_ahead=queued_ahead)
            yield f"schedule + update, {ROWS} decoding, {what} there", seconds, theirs_too

    return one_round


def values_of(figures: list[bench_core.Figure]) -> list[float]:
    """Seconds of figures that were taken in one round."""
    return [values[0] * {"ns": 1e-9, "us": 1e-6}[unit] for _, unit, values in figures]


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=os.environ.get(SOURCE), help=f"vLLM's unpacked source; default ${SOURCE}")
    parser.add_argument("--rounds", type=int, default=9, help="rounds; the medians are shown")
    parser.add_argument("--cpu", type=int, default=None, help="the one CPU to run on; default the last allowed one")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    if not arguments.source:
        print(f"skipped: set --source or {SOURCE} to vLLM's unpacked source distribution")
        return
    source = Path(arguments.source)
    about = {
        "commit": commit(),
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "core": "compiled by mypyc" if is_compiled() else "pure Python",
        "vllm": source_version(source),
    }
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed) if arguments.cpu is None else arguments.cpu})
    one_round = make_rounds(source)
    gc.freeze()
    pairs: dict[str, list[tuple[float, float]]] = {}
    for index in range(arguments.rounds + 1):
        gc.collect()
        for name, ours, theirs in one_round():
            if index:  # the first round warms up both
                pairs.setdefault(name, []).append((ours, theirs))
    lines = {
        name: (statistics.median(ours for ours, _ in rounds), statistics.median(theirs for _, theirs in rounds))
        for name, rounds in pairs.items()
    }
    if arguments.json:
        figures = {name: {"ours": ours, "theirs": theirs} for name, (ours, theirs) in lines.items()}
        print(json.dumps({"about": about, "figures": figures}))
        return
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n")
    print(f"CPU time in us, medians of {arguments.rounds} rounds")
    print(f"{'':<56} {'ours':>10} {'vLLM':>10} {'ratio':>7}")
    for name, (ours, theirs) in lines.items():
        print(f"{name:<56} {ours * 1e6:>10.3f} {theirs * 1e6:>10.3f} {theirs / ours:>7.1f}")


if __name__ == "__main__":
    main()
