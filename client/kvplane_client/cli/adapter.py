"""``kvplane adapter``: LoRA adapters that requests may run with."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.table import Table

from kvplane_client.cli import options as opt
from kvplane_client.cli.connection import connected
from kvplane_client.cli.output import escaped, out_console, print_json, visible
from kvplane_client.cli.session import session

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Load, unload and list LoRA adapters.\n\n"
        "Requests run with one that they name, beside others in the same batch.\n\n"
        "Examples:\n"
        "  kvplane adapter load support /models/support-lora\n\n"
        '  kvplane generate "My parcel is late." --adapter support'
    ),
)


@app.command()
@connected
def load(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What requests call it.")],
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A folder on the executors' machines as peft saves it, or a hub id."),
    ],
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """Load an adapter, for requests to name with --adapter.

    The executor must have room for it: --max-loras, --max-lora-rank. It lasts
    until `kvplane adapter unload`: each executor that takes over loads it too.

    Example:
      kvplane adapter load support /models/support-lora
    """
    with session(server, as_json=as_json, wait=wait) as client:
        adapter = client.load_adapter(name, source)
    if as_json:
        print_json(adapter)
    else:
        size = f"rank {adapter.rank}, {adapter.size_bytes / 1e6:.1f} MB"
        typer.echo(f"loaded {visible(adapter.name)}: revision {visible(adapter.revision)}, {size}")


@app.command()
@connected
def unload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, as `kvplane adapter list` shows it.")],
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """Unload an adapter that no request uses.

    What was computed with it stays cached until it is evicted.

    Example:
      kvplane adapter unload support
    """
    with session(server, as_json=as_json, wait=wait) as client:
        client.unload_adapter(name)
    if as_json:
        print_json({"unloaded": name})
    else:
        typer.echo(f"unloaded {visible(name)}")


@app.command("list")
@connected
def list_adapters(server: opt.Server = "localhost:50051", wait: opt.Wait = 0, as_json: opt.JsonFlag = False) -> None:
    """List loaded adapters.

    With each, where it comes from and how many requests wait or run with it.

    Example:
      kvplane adapter list --json | jq -r '.adapters[].name'
    """
    with session(server, as_json=as_json, wait=wait) as client:
        adapters = client.list_adapters()
    if as_json:
        print_json({"adapters": [dataclasses.asdict(adapter) for adapter in adapters]})
        return
    if not adapters:
        out_console().print("no adapter is loaded")
        return
    table = Table(box=None)
    table.add_column("adapter", overflow="fold")
    for column in ("rank", "MB", "requests"):
        table.add_column(column, justify="right")
    for column in ("revision", "source"):
        table.add_column(column, overflow="fold")
    for one in adapters:
        size = f"{one.size_bytes / 1e6:.1f}"
        table.add_row(
            escaped(one.name), str(one.rank), size, str(one.requests), escaped(one.revision), escaped(one.source)
        )
    out_console().print(table)
