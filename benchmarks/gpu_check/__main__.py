"""Checks the Triton kernels on the GPU that is here, in a few minutes.

    python -m benchmarks.gpu_check [--seconds 420] [--json FILE] [--parts correctness,decode,prefill,model]

Correctness against the float64 oracle; then decode as a share of the bandwidth of a plain copy, and prefill as a share
of the rate of a large product, both measured here and now, beside torch's attention over flat K/V and FlashInfer's, if
it is installed; then a whole model of random weights, output tokens per second with CUDA graphs and without. What does
not fit the time is left out, and said so.

Exit status: 0 all is right; 1 a kernel is wrong; 2 a wrong argument; 77 no GPU, nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_check.shapes import Heads, decode_steps, prefill_steps

if TYPE_CHECKING:
    from benchmarks.gpu_check.runs import Point

NO_GPU = 77
WRONG = 1
PARTS = ("correctness", "decode", "prefill", "model")
# What the check of blocks that lie far behind in the cache takes, and to spare.
_FAR_BYTES = 12 << 30
_PEERS = ("torch", "flashinfer")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags. Raises SystemExit: 2 for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=_positive, default=420.0, help="time for all; nothing is begun after it")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"what to do, of {','.join(PARTS)}")
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text}")
    return value


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"expected parts of {', '.join(PARTS)}, got {', '.join(unknown)}")
    return parts


def table(title: str, unit: str, points: Sequence[Point]) -> str:
    """Points as lines. Peers are given as their time over ours: above 1, ours is the faster."""
    lines = [f"{title}", f"  {'rows x tokens':>20} {'µs':>10} {unit:>9} {'share':>6}  torch/ours  flashinfer/ours"]
    for point in points:
        peers = [point.peers.get(name, "-") for name in _PEERS]
        shown = [f"{value / point.seconds:.2f}" if isinstance(value, float) else "-" for value in peers]
        lines.append(
            f"  {point.name:>20} {point.seconds * 1e6:10.1f} {point.rate / 1e12:9.2f} {point.fraction:6.1%}"
            f"  {shown[0]:>10}  {shown[1]:>15}"
        )
    why = {f"{name}: {value}" for point in points for name, value in point.peers.items() if isinstance(value, str)}
    return "\n".join([*lines, *(f"  ({reason})" for reason in sorted(why))])


class Deadline:
    """Nothing is begun after it; what was left out is remembered."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self.left_out: list[str] = []

    def passed(self, what: str) -> bool:
        """Whether it has passed; then `what` counts as left out."""
        late = time.monotonic() > self._until
        if late:
            self.left_out.append(what)
        return late


def main(argv: Sequence[str] | None = None) -> int:
    """Check what is asked for. Returns the exit status."""
    args = parse(sys.argv[1:] if argv is None else argv)
    import torch  # noqa: PLC0415 - after the arguments: --help and a wrong flag need not wait for it

    if not torch.cuda.is_available():
        print("no GPU here (torch.cuda.is_available() is False): nothing was checked", file=sys.stderr)
        return NO_GPU
    deadline = Deadline(args.seconds)
    found: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{found['device']}, torch {found['torch']}", flush=True)
    wrong = _correctness(deadline, found) if "correctness" in args.parts else []
    for kind in ("decode", "prefill"):
        if kind in args.parts:
            _speed(kind, deadline, found)
    if "model" in args.parts:
        _model(deadline, found)
    if deadline.left_out:
        print(f"left out for want of time: {', '.join(deadline.left_out)}")
    if args.json is not None:
        args.json.write_text(json.dumps(found | {"wrong": wrong, "left_out": deadline.left_out}, indent=1))
    print(f"WRONG: {', '.join(wrong)}" if wrong else "all that was compared is right")
    return WRONG if wrong else 0


def _correctness(deadline: Deadline, found: dict[str, object]) -> list[str]:
    """Compare with the oracle. Returns the names of what is wrong."""
    import torch  # noqa: PLC0415 - see main

    from benchmarks.gpu_check import runs  # noqa: PLC0415 - it imports Triton

    device = torch.device("cuda")
    checks = {"copy_blocks": runs.copies_are_right, "swaps": runs.swaps_are_right}
    if torch.cuda.mem_get_info()[0] > _FAR_BYTES:
        checks["blocks behind 2^31 elements"] = runs.far_blocks_are_right
    wrong = []
    for name, check in checks.items():
        right = check(device)
        print(f"  {name:32} {'ok' if right else 'WRONG'}", flush=True)
        wrong += [] if right else [name]
    torch.cuda.empty_cache()
    errors = {}
    for case in runs.cases(fp8=torch.cuda.get_device_capability() >= (8, 9)):
        if deadline.passed(case.name):
            continue
        errors[case.name] = error = runs.largest_error(case, device)
        right = error <= runs.tolerance(case)
        print(f"  {case.name:32} error {error:.1e} {'ok' if right else 'WRONG'}", flush=True)
        wrong += [] if right else [case.name]
    found["errors"] = errors
    return wrong


def _speed(kind: str, deadline: Deadline, found: dict[str, object]) -> None:
    """Measure decode or prefill, and print its table."""
    import torch  # noqa: PLC0415 - see main

    from benchmarks.gpu_check import runs  # noqa: PLC0415 - it imports Triton

    device, heads, dtype = torch.device("cuda"), Heads(), torch.bfloat16
    if deadline.passed(kind):
        return
    timer = runs.cuda_timer(device)
    if kind == "decode":
        peak, unit, steps = runs.copy_bandwidth(device, timer), "TB/s", decode_steps
    else:
        peak, unit, steps = runs.matmul_rate(device, timer, dtype), "TFLOP/s", prefill_steps
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    within = (step for step in steps(heads, dtype.itemsize, free) if not deadline.passed(f"{kind} {step.name}"))
    points = list(_shown(runs.points(within, heads, dtype, device, timer=timer, peak=peak)))
    print(table(f"{kind}: shares of {peak / 1e12:.2f} {unit}, measured", unit, points), flush=True)
    found[kind] = {"peak": peak, "points": [vars(point) for point in points]}


def _model(deadline: Deadline, found: dict[str, object]) -> None:
    """Measure a whole model, and print its table."""
    import torch  # noqa: PLC0415 - see main

    from benchmarks.gpu_check import model  # noqa: PLC0415 - it imports Triton
    from executor_service.decode_graphs import cuda_recorder  # noqa: PLC0415 - it imports torch

    if deadline.passed("model"):
        return
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    print("model: a Llama of a billion parameters in bfloat16, output tokens per second", flush=True)
    print(f"  {'rows x tokens':>20} {'eager':>10} {'graphs':>10} {'ratio':>6} {'same tokens':>12}")
    points = []
    for point in model.measure_model(model.random_llama(device, torch.bfloat16), model.LOADS, cuda_recorder(device)):
        points.append(vars(point))
        name, ratio = f"{point.rows} x {point.context}", point.graphs / point.eager
        print(
            f"  {name:>20} {point.eager:10.1f} {point.graphs:10.1f} {ratio:6.2f} {point.same_tokens:12.1%}", flush=True
        )
        if deadline.passed(f"model beyond {name}"):
            break
    found["model"] = points


def _shown(points: Iterator[Point]) -> Iterator[Point]:
    """Pass on, and show that something happens."""
    for point in points:
        print(".", end="", flush=True)
        yield point
    print()


if __name__ == "__main__":
    sys.exit(main())
