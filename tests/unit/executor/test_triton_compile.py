"""The Triton kernels compile for GPUs that are not here, and keep their budgets of registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.executor.compile_kernels import SHAPES, TARGETS, cases

ROOT = Path(__file__).parents[3]
# Bytes of shared memory that one program may have: CUDA's programming guide, table of technical specifications; CDNA 3.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
# Registers of a thread. Of 64 Ki registers a multiprocessor has: for 2 programs of 256 threads in prefill would be 128,
# which no matrix tile of this size keeps, so 1; for 2 of 128 in decode, beside the loads in flight; for as many small
# ones as it takes threads.
REGISTERS = {"prefill": 255, "decode": 192, "reduce": 64, "write": 64, "copy": 64}
REGISTERS |= {"decode, recorded": REGISTERS["decode"], "reduce, recorded": REGISTERS["reduce"]}
MATRIX = {"sm_80": {"mma.sync"}, "sm_90": {"wgmma"}, "sm_100": {"tcgen05.mma"}, "gfx942": {"mfma"}}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, object]]]:
    """What each case takes, from a process that does not interpret and has an empty cache."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "proto", "client")),
    }
    command = [sys.executable, "-m", "tests.unit.executor.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {found["case"]: found["kernels"] for found in map(json.loads, done.stdout.splitlines())}


def test_every_shape_compiles_for_every_target(reports: dict[str, dict[str, dict[str, object]]]) -> None:
    assert sorted(reports) == sorted(cases())
    assert len(reports) == len(TARGETS) * len(SHAPES) - 1
    for target in TARGETS:
        assert set(reports[f"{target} plain"]) == set(REGISTERS)


@pytest.mark.parametrize("case", cases())
def test_kernels_keep_their_budgets(case: str, reports: dict[str, dict[str, dict[str, object]]]) -> None:
    target = case.split(maxsplit=1)[0]
    for kernel, taken in reports[case].items():
        assert taken["spilled"] == 0, (kernel, taken)
        assert 0 < taken["registers"] <= REGISTERS[kernel], (kernel, taken)  # type: ignore[operator]
        assert taken["shared"] <= SHARED[target], (kernel, taken)  # type: ignore[operator]


@pytest.mark.parametrize("target", TARGETS)
def test_prefill_uses_the_matrix_units(target: str, reports: dict[str, dict[str, dict[str, object]]]) -> None:
    for shape in ("plain", "small", "gemma", "chunks", "odd", "e5m2"):
        assert reports[f"{target} {shape}"]["prefill"]["matrix"] in MATRIX[target], shape
