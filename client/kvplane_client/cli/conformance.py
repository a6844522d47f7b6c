"""``kvplane conformance``: tries whether an executor keeps the contract."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.table import Table

from kvplane_client.cli import options as opt
from kvplane_client.cli.output import err_console, escaped, out_console, print_json, visible
from kvplane_client.cli.session import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_UNAVAILABLE, EXIT_USAGE
from kvplane_client.cli.values import integer, number, refused
from kvplane_client.conformance.outcome import NoExecutorError, UnusableError
from kvplane_client.conformance.report import as_document, as_junit, failure_text
from kvplane_client.conformance.runner import Outcome, Result, choose_judge, run_cases, selected
from kvplane_client.conformance.target import Target

if TYPE_CHECKING:
    from kvplane_client.conformance.reference_model import ReferenceModel
    from kvplane_client.conformance.registry import Case

__all__ = ["conformance"]

_MARKS = {
    Outcome.PASSED: "[green]passed[/green]",
    Outcome.FAILED: "[bold red]FAILED[/bold red]",
    Outcome.SKIPPED: "[dim]skipped[/dim]",
}
_HELP = """Try whether an executor keeps the contract: over gRPC, in any language.

ADDRESS is the executor's host:port. What its cache holds is lost, so it must
serve no manager. Outputs of a sim executor are compared with its formula,
those of any other with what it computes itself, plainly; and with NumPy's, if
it serves a model that --write-model made and --model names. LoRA adapters are
tried with such a model, with a sim executor, and with those of --adapter.

Exit codes: 0 all passed (or were skipped), 1 some failed, 2 wrong usage or an
executor that cannot be tried, 3 no executor answers, 130 interrupted.

Examples:

  kvplane conformance localhost:50061

  kvplane conformance localhost:50061 -k tables/ -k feeds/ --junit report.xml

  kvplane conformance --write-model tiny

  kvplane conformance localhost:50061 --model tiny --wait 60
"""


def conformance(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="The executor, as host:port.")] = "",
    *,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", "-k", metavar="TEXT", help="Only cases with TEXT in their name. Repeat for more."),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", metavar="", help="List the cases and run none.")] = False,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="The model that is served, made by --write-model.")
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", metavar="SOURCE",
            help="A LoRA adapter of the served model, as the executor finds it. Repeat for a second.",
        ),
    ] = None,
    write_model: Annotated[
        Path | None, typer.Option("--write-model", metavar="DIR", help="Write a small random model and run no case.")
    ] = None,
    window: Annotated[
        int,
        typer.Option(
            "--window", metavar="TOKENS", parser=integer(0, 256, advice="leave it out for full attention alone"),
            help="Of --write-model: two of three layers read that many tokens.",
        ),
    ] = 0,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="N", parser=integer(0, 2**32 - 1, advice="0 is usual"), help="Of --write-model."
        ),
    ] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="X", parser=number(0, advice="leave it out to go by the executor's types"),
            help="How far log probabilities may lie apart. Default: by type, float32 0.001, bfloat16 0.15.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SEC", parser=number(0, above=True, advice="60 is usual"),
            help="Seconds that any answer may take.",
        ),
    ] = 60.0,
    wait: opt.Wait = 0.0,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the results as JUnit's XML.")
    ] = None,
    as_json: opt.JsonFlag = False,
) -> None:  # fmt: skip
    """Try an executor; the help text is _HELP."""
    cases = selected(filters or [])
    if not cases:
        raise refused("a text that names of cases have", " ".join(filters or []), "--list shows them", option="-k")
    try:
        if write_model is not None:
            _write_model(write_model, seed, window)
        elif show_list:
            _list(cases, as_json)
        elif not address:
            raise refused("the executor's address", "none", "such as localhost:50061", option="ADDRESS")
        else:
            reference = None if model is None else _read_model(model)
            run = _run(
                address, cases, reference, _Choices(tolerance, timeout, wait, junit, as_json, tuple(adapters or ()))
            )
            asyncio.run(run)
    except NoExecutorError as error:
        _stop(EXIT_UNAVAILABLE, "UNAVAILABLE", str(error), as_json)
    except UnusableError as error:
        _stop(EXIT_USAGE, "UNUSABLE", str(error), as_json)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


conformance.__doc__ = _HELP


@dataclass(frozen=True)
class _Choices:
    """The options that a run goes by."""

    tolerance: float | None
    timeout: float
    wait: float
    junit: Path | None
    as_json: bool
    adapters: tuple[str, ...]


async def _run(address: str, cases: list[Case], reference: ReferenceModel | None, choices: _Choices) -> None:
    """Runs the cases, shows each as it ends, and exits with 1 where one failed."""
    results: list[Result] = []
    async with Target(address, choices.timeout) as target:
        await target.meet(choices.wait)
        judge = choose_judge(target, reference, choices.tolerance)
        report = _Report(choices.as_json, max(len(case.name) for case in cases))
        async for result in run_cases(target, judge, cases, choices.adapters):
            results.append(result)
            report.show(result)
        if choices.junit is not None:
            _write(choices.junit, as_junit(target, results))
        if choices.as_json:
            print_json(as_document(target, judge.name, results))
        else:
            report.close(results, f"{target.info.backend} executor at {address}, judged by {judge.name}")
    if any(result.outcome is Outcome.FAILED for result in results):
        raise typer.Exit(EXIT_ERROR)


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise UnusableError(f"--junit: expected a file that can be written, got {error}") from error


class _Report:
    """Shows results: a line each as they come, failures with all there is to say. In a pipe, columns are tabs.

    Args:
        silent: Show nothing.
        width: Of the longest name.
    """

    def __init__(self, silent: bool, width: int) -> None:
        self._silent = silent
        self._width = width
        self._is_terminal = sys.stdout.isatty()

    def show(self, result: Result) -> None:
        """Shows one case's end."""
        if self._silent:
            return
        if not self._is_terminal:
            detail = failure_text(result).replace("\n", "; ") if result.outcome is Outcome.FAILED else result.reason
            line = "\t".join((result.outcome, result.name, f"{result.seconds:.3f}", visible(detail)))
            sys.stdout.write(line.rstrip("\t") + "\n")
            sys.stdout.flush()
            return
        line = f"{_MARKS[result.outcome]} {escaped(result.name):<{self._width}} [dim]{result.seconds:8.3f} s[/dim]"
        console = out_console()
        console.print(f"{line}  [dim]{escaped(result.reason)}[/dim]" if result.reason else line)
        if result.outcome is Outcome.FAILED:
            for name, text in (("expected", result.expected), ("got", result.got), ("breaks", result.contract)):
                console.print(f"       [bold]{name:<8}[/bold] {escaped(text)}")

    def close(self, results: list[Result], who: str) -> None:
        """Shows the sum, by topic on a terminal; a pipe gets it on stderr."""
        if self._is_terminal:
            out_console().print(_by_topic(results))
        counts = ", ".join(
            f"{sum(result.outcome is outcome for result in results)} {outcome.value}" for outcome in Outcome
        )
        (out_console() if self._is_terminal else err_console()).print(escaped(f"{counts}: {who}"))


def _by_topic(results: list[Result]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("topic", *(outcome.value for outcome in Outcome)):
        table.add_column(heading, justify="left" if heading == "topic" else "right")
    for topic in dict.fromkeys(result.name.partition("/")[0] for result in results):
        of_topic = [result.outcome for result in results if result.name.startswith(f"{topic}/")]
        table.add_row(topic, *(str(of_topic.count(outcome) or "") for outcome in Outcome))
    return table


def _list(cases: list[Case], as_json: bool) -> None:
    """Lists cases: names and what they do."""
    if as_json:
        rows = [{"name": case.name, "summary": case.summary, "contract": case.contract} for case in cases]
        print_json({"cases": rows})
        return
    if not sys.stdout.isatty():
        sys.stdout.writelines(f"{case.name}\t{case.summary}\n" for case in cases)
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for case in cases:
        table.add_row(escaped(case.name), f"[dim]{escaped(case.summary)}[/dim]")
    out_console().print(table)


def _write_model(folder: Path, seed: int, window: int) -> None:
    _require_numpy()
    from kvplane_client.conformance.reference_model import write_model  # noqa: PLC0415 - needs the extra

    try:
        write_model(folder, seed, window)
    except OSError as error:
        raise UnusableError(f"--write-model: expected a folder that can be written, got {error}") from error


def _read_model(folder: Path) -> ReferenceModel:
    _require_numpy()
    from kvplane_client.conformance.reference_model import ReferenceModel  # noqa: PLC0415 - needs the extra

    return ReferenceModel(folder)


def _require_numpy() -> None:
    """Refuses what needs the extra where it is not installed."""
    try:
        import numpy  # noqa: F401, PLC0415
        import safetensors  # noqa: F401, PLC0415
    except ImportError as error:
        raise UnusableError(
            f"models need NumPy and safetensors ({error}): pip install 'kvplane[conformance]'"
        ) from error


def _stop(exit_code: int, code: str, message: str, as_json: bool) -> NoReturn:
    if as_json:
        print_json({"error": {"code": code, "reason": "", "message": message}}, to_stderr=True)
    else:
        err_console().print(f"[bold red]error:[/bold red] {escaped(message, as_lines=True)}")
    raise typer.Exit(exit_code)
