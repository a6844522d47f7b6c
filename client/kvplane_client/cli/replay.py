"""``kvplane replay``: starts the manager package's replay."""

from __future__ import annotations

import typer

from kvplane_client.cli.manager_module import run_module

__all__ = ["replay"]


def replay(context: typer.Context) -> None:
    """Replay a request trace through the manager's own core, on a simulated clock.

    Shows what a cache size, an eviction policy or a limit would have done. No server, no model. See --help for all.

    Example:
      kvplane replay mooncake.jsonl --num-blocks 30000 --block-size 512
    """
    run_module("kvmanager_service.replay", context.args)
