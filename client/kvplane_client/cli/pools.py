"""``kvplane pools``: the pools of engines that run their own loop."""

from __future__ import annotations

import dataclasses

import typer
from rich.table import Table

from kvplane_client.cli import options as opt
from kvplane_client.cli.output import escaped, out_console, print_json
from kvplane_client.cli.session import session

__all__ = ["pools"]


def pools(server: opt.Server = "localhost:50051", wait: opt.Wait = 0, as_json: opt.JsonFlag = False) -> None:
    """List the pools of engines that run their own loop: the block-table API.

    That of the manager's own executors is not among them: see `kvplane blocks`.

    Examples:
      kvplane pools

      kvplane pools --json | jq '.pools[].free_blocks'
    """
    with session(server, as_json=as_json, wait=wait) as client:
        infos = client.list_pools()
    if as_json:
        print_json({"pools": [dataclasses.asdict(info) for info in infos]})
        return
    if not infos:
        typer.echo("no pools: no engine with a loop of its own is connected")
        return
    table = Table("pool", "sequences", "used", "cached", "hits", "lease", box=None)
    for info in infos:
        used = f"{info.num_blocks - 1 - info.free_blocks} of {info.num_blocks - 1} x {info.block_size}"
        hits = f"{info.prefix_hits} of {info.prefix_queries}"
        lease = f"{info.lease_remaining_seconds:.1f} s"
        table.add_row(escaped(info.pool_id), str(info.num_sequences), used, str(info.cached_blocks), hits, lease)
    out_console().print(table)
