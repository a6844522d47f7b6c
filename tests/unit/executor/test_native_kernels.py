"""The compiled kernels compute what their oracles do: odd shapes, garbage in unused slots, NaN that stays NaN."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from structlog.testing import capture_logs

from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.native_paged import NativeKernels
from executor_service.kernels.paged_kernels import GroupStep
from executor_service.layer_ops import TorchOps
from executor_service.native import library, ops
from executor_service.native.library import NativeBuildError, native_library
from executor_service.native.ops import NativeOps, load_native_ops
from tests.unit.executor.native_builds import native_ops
from tests.unit.executor.step_builder import Row, build_step
from tests.unit.executor.test_paged_attention import CHUNKS, STEPS, run_both

# (dtype, absolute tolerance, relative tolerance)
TOLERANCES = [(torch.float32, 2e-6, 1e-5), (torch.bfloat16, 2e-2, 2e-2)]
BLOCKS_AND_WINDOWS = [(1, 0), (8, 0), (16, 0), (32, 0), (1, 7), (8, 1), (16, 33), (32, 300), *CHUNKS]
LIMITS = AttentionLimits(gather_tokens=1 << 16)


@pytest.fixture(scope="module")
def native() -> NativeOps:
    return native_ops()


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("tolerance", TOLERANCES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("block_size", "window"), BLOCKS_AND_WINDOWS)
@pytest.mark.parametrize("shapes", STEPS.values(), ids=STEPS.keys())
def test_attend_any_step_equals_oracle(
    native: NativeOps,
    shapes: list[tuple[int, int]],
    block_size: int,
    window: int,
    tolerance: tuple[torch.dtype, float, float],
) -> None:
    dtype, atol, rtol = tolerance
    actual, expected = run_both(shapes, block_size, dtype, LIMITS, window=window, kernels=NativeKernels(native))
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("heads", [(4, 4, 16), (5, 1, 48), (9, 3, 64), (8, 2, 128), (71, 1, 32)])
def test_attend_any_head_geometry_equals_oracle(native: NativeOps, heads: tuple[int, int, int]) -> None:
    """More query heads on one KV head than are computed at once, too."""
    actual, expected = run_both(STEPS["mixed"], 16, torch.float32, LIMITS, heads=heads, kernels=NativeKernels(native))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)  # a score is a sum of up to 128 products


@pytest.fixture(params=[1, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Few rows on many threads are cut by KV heads; many on few keep the heads of a token together."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("heads", [(6, 2, 32), (9, 3, 64), (71, 1, 32), (8, 2, 128), (4, 4, 96)])
@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (8, 33), (1, 7), *CHUNKS])
def test_attend_products_of_pairs_equal_oracle(
    native: NativeOps, threads: int, block_size: int, window: int, heads: tuple[int, int, int]
) -> None:
    """In bfloat16, with heads that are whole pairs of vectors, over several tiles."""
    for shapes in STEPS.values():
        actual, expected = run_both(
            shapes, block_size, torch.bfloat16, LIMITS, window=window, heads=heads, kernels=NativeKernels(native)
        )
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 32)])
def test_attend_infinite_key_alone_in_a_tile_weighs_nothing(native: NativeOps, dtype: torch.dtype, dim: int) -> None:
    """The first tile that the token sees has nothing but it: what comes later counts alone."""
    keys, values = some(64, dim, dtype=dtype), some(64, dim, dtype=dtype, seed=1)
    query = torch.ones(1, 1, dim, dtype=dtype)
    keys[:32] = float("-inf")
    step = build_step([Row([0], 39, [0, 1, 2])], 16)
    group = GroupStep(0, step.tables[0], step.slot_mappings[0], 16)
    (planned,) = NativeKernels(native).plan(step.query_indptr, step.seq_lens, [group], device=torch.device("cpu"))
    got = planned.attend(query, keys[39:40, None], values[39:40, None], keys, values, scaling=0.1)
    weights = (keys[32:40].float() @ torch.ones(dim) * 0.1).softmax(0)
    torch.testing.assert_close(got[0, 0].float(), weights @ values[32:40].float(), atol=2e-2, rtol=2e-2)


def test_attend_and_rotate_one_kv_head_whose_stride_says_nothing(native: NativeOps) -> None:
    """As rotary positions leave the key of a model with one KV head: (1, T, D) transposed, and contiguous to torch."""
    queries, lone = some(7, 2, 32), some(1, 7, 32, seed=1).transpose(0, 1)
    assert lone.stride(1) != 32
    got = []
    for key in (lone, lone.clone(memory_format=torch.contiguous_format).view(7, 1, 32)):
        step = build_step([Row([0] * 7, 0, [2, 1])], 4)
        group = GroupStep(0, step.tables[0], step.slot_mappings[0], 4)
        (planned,) = NativeKernels(native).plan(step.query_indptr, step.seq_lens, [group], device=torch.device("cpu"))
        got.append(planned.attend(queries, key, key, torch.zeros(12, 32), torch.zeros(12, 32), scaling=0.3))
        angles = some(1, 7, 32, seed=2)
        rotated = key.clone()
        native.rotate(rotated, angles.cos(), angles.sin())
        got.append(rotated)
    torch.testing.assert_close(got[0], got[2])
    torch.testing.assert_close(got[1], got[3])


@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, (6, 2, 16)), (torch.bfloat16, (6, 2, 32))])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_attend_garbage_in_unused_slots_changes_no_bit(
    native: NativeOps, garbage: float, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    kernels = NativeKernels(native)
    clean, _ = run_both(STEPS["mixed"], 16, dtype, LIMITS, heads=heads, garbage=0.0, kernels=kernels)
    dirty, _ = run_both(STEPS["mixed"], 16, dtype, LIMITS, heads=heads, garbage=garbage, kernels=kernels)
    assert torch.equal(clean, dirty)


def test_fits_other_types_and_heads_are_left_to_torch(native: NativeOps) -> None:
    assert NativeKernels.fits(native, torch.float32, 64)
    assert not NativeKernels.fits(native, torch.float16, 64)
    assert not NativeKernels.fits(native, torch.bfloat16, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (7, 40), (3, 1), (40, 1537)])
def test_layer_ops_equal_torch(native: NativeOps, dtype: torch.dtype, tokens: int, width: int) -> None:
    oracle, eps = TorchOps(), torch.finfo(dtype).eps
    states, added = some(2, 1, tokens, width, dtype=dtype)
    weight = some(width, dtype=dtype, seed=1)
    mine, theirs = states.clone(), states.clone()
    for more in (None, added):
        got, expected = native.rms_norm(mine, weight, 1e-5, more), oracle.rms_norm(theirs, weight, 1e-5, more)
        torch.testing.assert_close(got, expected, atol=4 * eps, rtol=4 * eps)
        assert torch.equal(mine, theirs)
    both = some(1, tokens, 2 * width, dtype=dtype) * 40
    torch.testing.assert_close(native.silu_and_mul(both), oracle.silu_and_mul(both), atol=1e-30, rtol=4 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 32, 64, 80])
def test_rotate_in_place_equals_torch(native: NativeOps, dtype: torch.dtype, dim: int) -> None:
    """Some of the heads of a wider row: the others stay."""
    mine = some(5, 7, dim, dtype=dtype)
    theirs, before = mine.clone(), mine.clone()
    cos, sin = some(1, 5, dim, dtype=dtype, seed=1), some(1, 5, dim, dtype=dtype, seed=2)
    native.rotate(mine[:, :4], cos, sin)
    TorchOps().rotate(theirs[:, :4], cos, sin)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mine, theirs, atol=8 * eps, rtol=4 * eps)
    assert torch.equal(mine[:, 4:], before[:, 4:])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, (576, 192, 192)), (48, (33,)), (6, (1, 2)), (30, (32,))])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 12, 13, 100])
def test_linear_equals_product_of_rounded_values(
    native: NativeOps, rows: int, inputs: int, outputs: tuple[int, ...], bias: bool
) -> None:
    if not native.linear_columns:
        pytest.skip("this CPU has no products of bfloat16")
    weights = [some(count, inputs, dtype=torch.bfloat16, seed=count) for count in outputs]
    states, total = some(rows, inputs, dtype=torch.bfloat16), sum(outputs)
    added = some(total, dtype=torch.bfloat16, seed=9) if bias else None
    expected = states.double() @ torch.cat(weights).double().T + (0 if added is None else added.double())
    got = native.linear(states, native.pack(weights), added, total)
    torch.testing.assert_close(got.double(), expected, atol=1e-2, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_a_number_stays_in_its_own_row(native: NativeOps, dtype: torch.dtype) -> None:
    states = some(1, 3, 64, dtype=dtype)
    states[0, 1, 5] = float("nan")
    weight = torch.ones(64, dtype=dtype)
    for result in (native.rms_norm(states.clone(), weight, 1e-5), native.silu_and_mul(states)):
        assert result.isnan().any(dim=-1).tolist() == [[False, True, False]]
    if native.packs(states[0]):
        out = native.linear(states[0], native.pack([some(40, 64, dtype=dtype)]), None, 40)
        assert out.isnan().any(dim=-1).tolist() == [False, True, False]


def test_native_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []

    def note(compiler: Sequence[str], target: Path, deadline: float) -> None:
        compiled.append(target)
        target.write_bytes(b"")

    monkeypatch.setattr(library, "_compile", note)
    first = native_library(tmp_path)
    assert native_library(tmp_path) == first
    assert len(compiled) == 1
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
    assert native_library(tmp_path) != first


def test_load_native_ops_without_a_compiler_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeBuildError, match=r"expected a C\+\+ compiler"):
        native_library(tmp_path)
    assert load_native_ops(lambda: tmp_path) is None


# As a compiler that makes what it is asked for: -o comes last.
MAKES = 'for word; do target=$word; done; echo made by "$0" "$@" > "$target"\n'
NO_LIBOMP = "/usr/bin/ld: cannot find -lomp: No such file or directory"


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    return Compilers(tmp_path, monkeypatch)


class Compilers:
    """Scripts in the place of compilers, and a cache; nothing else is on the path but a shell's own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = folder / "cache"
        self._bin = folder / "bin"
        self._bin.mkdir()
        monkeypatch.setenv("PATH", str(self._bin))
        monkeypatch.delenv("CXX", raising=False)

    def add(self, name: str, script: str) -> Path:
        path = self._bin / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
        return path

    def build(self) -> str:
        """Compile, or find, and return what the compiler that did it says of itself."""
        return native_library(self.cache).read_text()

    def left_over(self) -> list[str]:
        return os.listdir(self.cache / "native")


def failures(logs: Sequence[Mapping[str, object]]) -> list[tuple[str, str]]:
    """Compiler by name, and why it failed."""
    failed = [entry for entry in logs if entry["event"] == "native_compiler_failed"]
    assert {entry["log_level"] for entry in failed} <= {"warning"}
    return [(str(entry["compiler"]).rpartition("/")[2], str(entry["why"])) for entry in failed]


def test_load_native_ops_compilers_that_all_fail_is_none_and_names_each(compilers: Compilers) -> None:
    compilers.add("g++", "echo no such target >&2\nexit 3\n")
    compilers.add("clang++", "exit 0\n")
    with pytest.raises(NativeBuildError, match=r"g\+\+: it ended with 3: no such target; .*clang\+\+: it ended with 0"):
        native_library(compilers.cache)
    with capture_logs() as logs:
        assert load_native_ops(lambda: compilers.cache) is None
    assert [name for name, _ in failures(logs)] == ["g++", "clang++"]
    assert [entry["event"] for entry in logs][-1] == "native_kernels_unavailable"
    assert compilers.left_over() == []


def test_native_library_compiler_that_fails_gives_way_to_the_next_and_is_named(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here clang without its OpenMP, which only the linker finds out."""
    clang = compilers.add("clang++", f"echo '{NO_LIBOMP}' >&2\nexit 1\n")
    compilers.add("g++", MAKES)
    monkeypatch.setenv("CXX", str(clang))
    with capture_logs() as logs:
        assert compilers.build().startswith(f"made by {clang.with_name('g++')} ")
    ((name, why),) = failures(logs)
    assert name == "clang++"
    assert NO_LIBOMP in why
    assert "libomp-dev" in why


@pytest.mark.parametrize(
    ("asked", "start"), [("g++ -m64", "g++ -m64 "), ("launcher 'my c++' -g", "launcher my c++ -g ")]
)
def test_native_library_cxx_with_arguments_is_a_command(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch, asked: str, start: str
) -> None:
    for name in ("g++", "launcher", "my c++"):
        compilers.add(name, MAKES)
    monkeypatch.setenv("CXX", asked)
    with capture_logs() as logs:
        assert f"/{start}{library.FLAGS[0]} " in compilers.build()
    assert failures(logs) == []


def test_native_library_other_arguments_or_another_compiler_behind_a_launcher_are_compiled_anew(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.add("launcher", MAKES)
    behind = compilers.add("g++", MAKES)
    made = set()
    for asked in ("launcher g++", "launcher g++ -m64", "launcher g++"):
        monkeypatch.setenv("CXX", asked)
        made.add(native_library(compilers.cache))
    assert len(made) == 2
    behind.write_text(behind.read_text() + "# updated\n")
    assert native_library(compilers.cache) not in made


@pytest.mark.parametrize(("asked", "why"), [("nowhere++ -m64", "is not here"), ("g++ 'open", "is no command")])
def test_native_library_cxx_that_is_none_is_named_and_the_usual_one_is_taken(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch, asked: str, why: str
) -> None:
    monkeypatch.setenv("CXX", asked)
    with pytest.raises(NativeBuildError, match=f"got none .*{why}"):
        native_library(compilers.cache)
    compilers.add("c++", MAKES)
    with capture_logs() as logs:
        assert "/c++ " in compilers.build()
    ((_, said),) = failures(logs)
    assert why in said


def test_native_library_compiler_that_hangs_is_ended_with_all_it_started(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it started holds its outputs, as g++'s own programs do: ended alone it would be waited for with them."""
    sleep = shutil.which("sleep", path=os.defpath)
    assert sleep is not None
    pids = tmp_path / "pids"
    hangs = compilers.add("hangs", f"{sleep} 600 &\necho $$ $! > {pids}\nwait\n")
    compilers.add("g++", MAKES)
    monkeypatch.setenv("CXX", str(hangs))
    monkeypatch.setattr(library, "_TIME_LIMIT_S", 1.0)
    with capture_logs() as logs, pytest.raises(NativeBuildError, match="it hung: ended when the 1 seconds"):
        native_library(compilers.cache)
    assert [(name, why.partition(":")[0]) for name, why in failures(logs)] == [
        ("hangs", "it hung"),
        ("g++", "not tried"),
    ]
    for pid in pids.read_text().split():
        assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    assert compilers.left_over() == []
    monkeypatch.delenv("CXX")
    assert "/g++ " in compilers.build()
    monkeypatch.setenv("CXX", str(hangs))
    assert "/g++ " in compilers.build(), "what another one has compiled needs no time"


def test_load_native_ops_that_compute_something_else_is_none(
    native: NativeOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "native_library", lambda folder: tmp_path)
    monkeypatch.setattr(ops, "NativeOps", lambda path: native)
    assert load_native_ops(lambda: tmp_path) is native
    monkeypatch.setattr(NativeOps, "silu_and_mul", lambda self, both: TorchOps().silu_and_mul(both) * 1.001)
    assert load_native_ops(lambda: tmp_path) is None
