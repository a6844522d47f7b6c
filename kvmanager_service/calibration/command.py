"""The command: time an executor's steps, fit the terms, write them down.

Station: called by `__main__` with its arguments; returns the exit status that this says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvmanager_service.calibration.fit import UndeterminedError, fit_cost_model
from kvmanager_service.calibration.measurement import CalibrationError, Measurement, measure
from kvmanager_service.calibration.options import parse
from kvmanager_service.calibration.report import describe, steps_table, summarise

__all__ = ["main"]

_UNAVAILABLE = 3
_INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    try:
        return _calibrate(options)
    except CalibrationError as error:
        _tell(options, error.reason, str(error))
        return _UNAVAILABLE if error.is_unavailable else 1
    except UndeterminedError as error:
        message = f"got {error}; raise --max-num-seqs, --max-num-batched-tokens or the executor's --max-model-len"
        _tell(options, "UNDETERMINED", message)
        return 1
    except OSError as error:
        _tell(options, "BAD_FILE", f"{error.filename}: {error.strerror}; name another file")
        return 1
    except KeyboardInterrupt:
        _tell(options, "INTERRUPTED", "interrupted")
        return _INTERRUPTED


def _tell(options: argparse.Namespace, reason: str, message: str) -> None:
    if options.json:
        message = json.dumps({"error": {"reason": reason, "message": message, "metadata": {}}})
        sys.stderr.write(f"{message}\n")
    else:
        sys.stderr.write(f"kvplane calibrate: {message}\n")


def _calibrate(options: argparse.Namespace) -> int:
    found = _measure(options)
    document = summarise(found, fit_cost_model(found.steps, has_kv=found.has_kv), _settings(options))
    if options.json:
        sys.stdout.write(f"{json.dumps(document)}\n")
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(steps_table(document))
        console.print(describe(document), markup=False)
    if options.output is not None:  # last, so that what took minutes is shown even where this fails
        options.output.write_text(f"{json.dumps(document, indent=2)}\n", encoding="utf-8")
    return 0


def _measure(options: argparse.Namespace) -> Measurement:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=None)

        def on_step(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return asyncio.run(
            measure(
                options.address,
                max_num_batched_tokens=options.max_num_batched_tokens,
                max_num_seqs=options.max_num_seqs,
                rounds=options.rounds,
                force=options.force,
                on_step=on_step,
            )
        )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("address", "max_num_batched_tokens", "max_num_seqs", "rounds")
    return {name: getattr(options, name) for name in names}
