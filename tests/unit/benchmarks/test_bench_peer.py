"""What the comparison with vLLM says of itself, and which sources it takes; no vLLM is needed for that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import bench_peer


def make_source(folder: Path, version: str) -> Path:
    (folder / "vllm" / "v1" / "core").mkdir(parents=True)
    (folder / "PKG-INFO").write_text(f"Name: vllm\nVersion: {version}\n\nVersion: 9, as a readme might say\n")
    return folder


def test_source_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    assert bench_peer.source_version(make_source(tmp_path, bench_peer.VERSION)) == bench_peer.VERSION


def test_source_version_another_one_is_refused_with_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"expected vLLM 0\.33\.0.*, got 0\.32\.1 in .*: pip download .*==0\.33\.0"):
        bench_peer.source_version(make_source(tmp_path, "0.32.1"))


def test_source_version_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected vLLM's unpacked source distribution, got"):
        bench_peer.source_version(tmp_path)


def test_commit_is_a_short_hash_or_unknown() -> None:
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?|unknown", bench_peer.commit())


def test_cpu_model_is_the_first_name_of_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nprocessor\t: 1\nmodel name\t: Another\n")
    assert bench_peer.cpu_model(cpuinfo) == "Some CPU @ 2.0GHz"
    assert bench_peer.cpu_model(tmp_path / "none")
