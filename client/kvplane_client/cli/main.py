"""The ``kvplane`` command: its sub-commands put together.

Station: the console script calls ``app``.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Annotated

import grpc
import typer
from typer.core import TyperGroup

from kvplane_client._version import __version__
from kvplane_client.cli import (
    adapter,
    calibrate,
    chat,
    conformance,
    events,
    generate,
    inventory,
    model,
    options,
    pins,
    plan,
    pools,
    replay,
    stats,
    up,
)
from kvplane_client.cli.connection import connected
from kvplane_client.cli.output import print_json
from kvplane_client.cli.session import EXIT_USAGE, usage_document

__all__ = ["app"]

_AS_JSON = "kvplane.as_json"
# In click or, since typer brings its own copy of that, in typer.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _Root(TyperGroup):
    """Reports wrong usage as JSON, too, where --json is among the arguments: then no command has read it yet."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        options = args[: args.index("--")] if "--" in args else args
        ctx.meta[_AS_JSON] = "--json" in options
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if not ctx.meta[_AS_JSON]:
                raise
            print_json(usage_document(error), to_stderr=True)
            raise typer.Exit(EXIT_USAGE) from error


app = typer.Typer(
    name="kvplane",
    cls=_Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "LLM inference with a KV manager you can look into.\n\n"
        "Start with `kvplane up`, then in another terminal:\n\n"
        '  kvplane generate "The capital of France is" -n 16\n\n'
        "  kvplane chat\n\n"
        "  kvplane stats\n\n"
        "Every command explains itself with --help.\n\n"
        "Exit codes: 0 done, 1 error, 2 wrong usage, 3 no server, 130 interrupted."
    ),
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Holds the options of the command itself; the help text is the app's."""


_SERVE, _LOOK, _OPERATE, _PLAN = "Serve and generate", "Look in", "Operate", "Plan, measure, prove"


def _add(panel: str, command: Callable[..., None], name: str | None = None) -> None:
    """Adds a command that talks to a server."""
    app.command(name, rich_help_panel=panel)(connected(command))


_add(_SERVE, up.up)
_add(_SERVE, generate.generate)
_add(_SERVE, chat.chat)
app.add_typer(model.app, name="model", rich_help_panel=_SERVE)
_add(_LOOK, stats.stats)
_add(_LOOK, inventory.requests)
app.add_typer(inventory.blocks_app, name="blocks", rich_help_panel=_LOOK)
_add(_LOOK, stats.executors)
_add(_LOOK, pools.pools)
_add(_LOOK, events.events)
_add(_OPERATE, stats.abort)
_add(_OPERATE, pins.pin)
_add(_OPERATE, pins.unpin)
_add(_OPERATE, pins.pins)
app.add_typer(adapter.app, name="adapter", rich_help_panel=_OPERATE)
_add(_OPERATE, stats.switch_executor, "switch-executor")
_add(_OPERATE, stats.reset_cache, "reset-cache")
app.command(rich_help_panel=_PLAN)(plan.plan)
# Whatever is given to these, --help too, is for the manager's module to understand.
for passed_through in (replay.replay, calibrate.calibrate):
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
        add_help_option=False,
        rich_help_panel=_PLAN,
    )(passed_through)
app.command(rich_help_panel=_PLAN)(conformance.conformance)


@app.command(rich_help_panel=_PLAN)
def version(as_json: options.JsonFlag = False) -> None:
    """Print the versions of KVPlane, Python and gRPC."""
    versions = {"kvplane": __version__, "python": platform.python_version(), "grpc": str(grpc.__version__)}
    if as_json:
        print_json(versions)
    else:
        typer.echo(" ".join(f"{name} {number}" for name, number in versions.items()))


if __name__ == "__main__":
    app()
