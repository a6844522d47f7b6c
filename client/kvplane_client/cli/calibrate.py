"""``kvplane calibrate``: starts the manager package's calibration."""

from __future__ import annotations

import typer

from kvplane_client.cli.manager_module import run_module

__all__ = ["calibrate"]


def calibrate(context: typer.Context) -> None:
    """Measure what a step costs on an executor, for `kvplane replay --cost-model`.

    The executor must be up and serve no manager. See --help for all.

    Example:
      kvplane calibrate localhost:50061 -o cost.json
    """
    run_module("kvmanager_service.calibration", context.args)
