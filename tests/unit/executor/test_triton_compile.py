"""The Triton kernels compile for GPUs that are not here, and keep their budgets of registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executor_service.kernels.launch_shapes import PROGRAMS_PER_PROCESSOR
from tests.unit.executor.compile_kernels import SHAPES, TARGETS, cases

ROOT = Path(__file__).parents[3]
# Bytes of shared memory that one program may have: CUDA's programming guide, table of technical specifications; CDNA 3.
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
# The code for sm_80 is what sm_86, sm_89 and sm_120 run, and these have less.
SHARED_OF_SMALLER = 99 << 10
# Registers of a thread, beyond what any shape takes today by a few. Of 64 Ki a multiprocessor has: prefill runs one
# program of 256 threads, which no matrix tile of this size shares with another; small ones as many as it takes threads.
REGISTERS = {"prefill": 250, "decode": 168, "reduce": 64, "write": 36, "copy": 56}
REGISTERS |= {"decode, recorded": REGISTERS["decode"], "reduce, recorded": REGISTERS["reduce"]}
# Programs of decode that a multiprocessor holds at once: as many as it is cut into, but of the widest types and heads.
RESIDENT = dict.fromkeys(("plain", "small", "odd", "chunks", "e5m2", "e4m3"), PROGRAMS_PER_PROCESSOR)
RESIDENT |= {"gemma": 3, "float32": 3}
# Bytes of shared memory of a multiprocessor, of which each program takes 1 KiB for the system.
SHARED_OF_ALL = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
MATRIX = {"sm_80": {"mma.sync"}, "sm_90": {"wgmma"}, "sm_100": {"tcgen05.mma"}, "gfx942": {"mfma"}}


Reports = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a process prints that does not interpret and has an empty cache."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "proto", "client")),
    }
    command = [sys.executable, "-m", "tests.unit.executor.compile_kernels"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def reports(printed: list[Any]) -> Reports:
    """What each case takes."""
    return {found["case"]: found["kernels"] for found in printed[1:]}


def test_every_shape_compiles_for_every_target(reports: Reports) -> None:
    assert sorted(reports) == sorted(cases())
    assert len(reports) == len(TARGETS) * len(SHAPES) - 1
    for target in TARGETS:
        assert set(reports[f"{target} plain"]) == set(REGISTERS)


@pytest.mark.parametrize("case", cases())
def test_kernels_keep_their_budgets(case: str, reports: Reports) -> None:
    target = case.split(maxsplit=1)[0]
    for kernel, taken in reports[case].items():
        assert taken["spilled"] == 0, (kernel, taken)
        assert 0 < taken["registers"] <= REGISTERS[kernel], (kernel, taken)
        assert taken["shared"] <= (SHARED_OF_SMALLER if target == "sm_80" else SHARED[target]), (kernel, taken)


@pytest.mark.parametrize("case", [case for case in cases() if case[:3] == "sm_" and case.split(" ", 1)[1] in RESIDENT])
def test_decode_is_cut_into_as_many_programs_as_a_multiprocessor_holds(case: str, reports: Reports) -> None:
    target, shape = case.split(maxsplit=1)
    for kernel in {"decode", "decode, recorded"} & reports[case].keys():
        taken = reports[case][kernel]
        by_registers = 65536 // (128 * -(-taken["registers"] // 8) * 8)
        by_shared = SHARED_OF_ALL[target] // (taken["shared"] + 1024)
        assert min(by_registers, by_shared) >= RESIDENT[shape], (kernel, taken)


def test_a_step_makes_no_variant_of_a_kernel(printed: list[Any]) -> None:
    """Tables lie anywhere in what is uploaded, and numbers of rows, tokens and splits are any: a kernel that was
    specialised for their alignment or value would be compiled anew in the middle of a service."""
    fixed = {"out", "partial", "partial_log_sum", "query", "key", "value", "keys", "values"}  # as torch allocates
    fixed |= {"scale", "v_scale", "k_scale", "softcap"}  # floats, never specialised
    fixed |= {"slot_stride"} | {f"{name}_{of}_stride" for name in ("query", "key", "value") for of in ("token", "head")}
    assert len(printed[0]) == 5
    for kernel, arguments in printed[0].items():
        assert set(arguments) <= fixed, kernel


@pytest.mark.parametrize("target", TARGETS)
def test_attention_uses_the_matrix_units(target: str, reports: Reports) -> None:
    """Decode's tiles, of one token's heads, are too small for those of Hopper and Blackwell that read shared memory."""
    for shape in ("plain", "small", "gemma", "chunks", "odd", "e5m2"):
        kernels = reports[f"{target} {shape}"]
        assert kernels["prefill"]["matrix"] in MATRIX[target], shape
        assert kernels["decode"]["matrix"] == ("mfma" if target == "gfx942" else "mma.sync"), shape
