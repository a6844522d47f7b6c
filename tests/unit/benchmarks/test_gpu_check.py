"""All of the GPU check that needs no GPU: arguments, shapes, report; and its work on a CPU, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import model, runs
from benchmarks.gpu_check.shapes import Heads, Step, decode_steps, prefill_steps
from executor_service import kv_memory
from executor_service.kernels import triton_paged

CPU = torch.device("cpu")
SMALL = Heads(4, 2, 64)


def test_parse_defaults_end_within_eight_minutes() -> None:
    args = gpu_check.parse([])
    assert args.seconds < 480
    assert args.parts == ("correctness", "decode", "prefill", "model")
    assert gpu_check.parse(["--parts", "decode, prefill"]).parts == ("decode", "prefill")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parts", "decode,speed"], "expected parts of correctness, decode, prefill, model, got speed"),
        (["--seconds", "0"], "expected a number of seconds above 0, got 0"),
        (["--seconds", "nan"], "expected a number of seconds above 0, got nan"),
    ],
)
def test_parse_wrong_argument_exits_with_2(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gpu_check.parse(flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_main_without_gpu_says_so_with_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 77
    assert "no GPU here" in capsys.readouterr().err


def test_steps_of_a_large_gpu_span_the_range_and_of_a_small_one_fit() -> None:
    heads = Heads()
    every = list(decode_steps(heads, 2, 1 << 40))
    assert {step.rows for step in every} == {1, 8, 32, 64, 256}
    assert {step.context for step in every} == {1024, 4096, 8192, 32768}
    assert list(decode_steps(heads, 2, 13 << 20)) == [Step(1, 1, 1024)]
    assert len(list(prefill_steps(heads, 2, 1 << 40))) == 6
    assert not list(prefill_steps(heads, 2, 1 << 20))


@pytest.mark.parametrize(("query", "context"), [(1, 9), (4, 4), (3, 10)])
def test_flops_count_every_pair_that_is_seen(query: int, context: int) -> None:
    pairs = sum(1 for q in range(context - query, context) for k in range(context) if k <= q)
    assert Step(2, query, context).flops(SMALL) == 2 * pairs * 4 * 64 * 4
    assert Step(2, query, context).kv_bytes(SMALL, 2) == 2 * context * 2 * 2 * 64 * 2


def test_table_shows_shares_peers_and_why_one_is_missing() -> None:
    point = runs.Point("8 x 1024", 1e-4, 2e12, 0.625, {"torch": 2e-4, "flashinfer": "ImportError: No module"})
    text = gpu_check.table("decode", "TB/s", [point])
    assert "8 x 1024      100.0      2.00  62.5%        2.00                -" in text
    assert text.endswith("(flashinfer: ImportError: No module)")


def test_deadline_that_has_passed_remembers_what_was_left_out() -> None:
    open_one, closed = gpu_check.Deadline(1e6), gpu_check.Deadline(-1.0)
    assert not open_one.passed("decode")
    assert closed.passed("decode")
    assert (open_one.left_out, closed.left_out) == ([], ["decode"])


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:executor_service")
class TestInterpreted:
    def test_largest_error_is_within_tolerance_and_a_broken_kernel_is_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = runs.Case("small", SMALL, torch.float32, torch.float32, rows=((1, 20), (5, 9)), window=7)
        assert runs.largest_error(case, CPU) <= runs.tolerance(case)
        monkeypatch.setattr(triton_paged, "write_kv", lambda *args, **kwargs: None)
        assert runs.largest_error(case, CPU) == float("inf")

    def test_whole_model_gives_the_same_tokens_computed_and_replayed(self) -> None:
        ran = []

        def record(step: Callable[[], None]) -> Callable[[], None]:
            step()
            return lambda: ran.append(step())

        small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        llama = model.random_llama(CPU, torch.float32, **small, **heads)
        points = list(model.measure_model(llama, (model.Load(1, 20, 3), model.Load(3, 15, 4)), record))
        assert [(point.rows, point.context, point.same_tokens) for point in points] == [(1, 20, 1.0), (3, 15, 1.0)]
        assert len(ran) == 3 + 4
        assert all(point.eager > 0 and point.graphs > 0 for point in points)

    def test_recorded_rows_are_compared_too(self) -> None:
        case = runs.Case("small", SMALL, torch.float32, torch.float32, recorded=True, rows=((1, 20), (5, 9)), window=-7)
        assert runs.largest_error(case, CPU) <= runs.tolerance(case)

    def test_copies_swaps_and_far_blocks_are_right(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert runs.copies_are_right(CPU)
        assert runs.swaps_are_right(CPU)
        assert runs.far_blocks_are_right(CPU, elements=2**16)
        monkeypatch.setattr(kv_memory, "copy_from_host", lambda *args, **kwargs: None)
        monkeypatch.setattr(runs, "copy_blocks", lambda *args, **kwargs: None)
        assert not runs.copies_are_right(CPU)
        assert not runs.swaps_are_right(CPU)

    @pytest.mark.parametrize(
        ("step", "peer"), [(Step(2, 1, 20), True), (Step(1, 20, 20), True), (Step(1, 5, 20), False)]
    )
    def test_measure_step_times_ours_and_torchs(self, step: Step, peer: bool) -> None:
        made: list[torch.Tensor] = []

        def timer(work: object) -> float:
            made.append(work())  # type: ignore[operator]
            return 0.5

        point = runs.measure_step(step, SMALL, torch.float32, CPU, timer=timer, peak=100.0)
        amount = step.kv_bytes(SMALL, 4) if step.query == 1 else step.flops(SMALL)
        assert (point.rate, point.fraction) == (amount / 0.5, amount / 50)
        assert (point.peers["torch"] == 0.5) is peer
        assert made[0].shape == (step.rows * step.query, 4, 64)
        assert not made[0].isnan().any()

    def test_peaks_are_work_over_time(self) -> None:
        def timer(work: object) -> float:
            work()  # type: ignore[operator]
            return 2.0

        assert runs.copy_bandwidth(CPU, timer, size=1000) == 1000
        assert runs.matmul_rate(CPU, timer, torch.float32, size=8) == 512

    def test_cases_cover_what_the_kernels_are_for(self) -> None:
        made = runs.cases(fp8=True)
        assert {case.block_size for case in made} == {8, 16, 32, 64, 128, 256}
        assert {case.heads.head_dim for case in made} == {64, 80, 96, 128, 256}
        assert {case.kv_dtype.itemsize for case in made} == {1, 2, 4}
        assert any(case.window and case.softcap for case in made)
        assert {case.heads.num_heads // case.heads.num_kv_heads for case in made} == {1, 2, 3, 5, 6, 7, 16}
        assert {bool(case.window) for case in made if case.recorded} == {True, False}
        assert len({case.name for case in made}) == len(made)
