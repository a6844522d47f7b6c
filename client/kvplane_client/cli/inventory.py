"""``kvplane requests`` and ``kvplane blocks``: who holds which blocks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvplane_client.cli import options as opt
from kvplane_client.cli.connection import connected
from kvplane_client.cli.output import escaped, keys_told, out_console, print_json, ranges
from kvplane_client.cli.session import session
from kvplane_client.cli.values import MAX_INT32, integer
from kvplane_client.manager_types import BlockFilter, BlockInfo, BlockTrace, RequestInfo

__all__ = ["blocks", "blocks_app", "requests", "trace"]

_MAP_WIDTH = 64
_MOST_ALIKE = 4
_LEGEND = "█ used and cached  ▓ used  ? used, not yet acknowledged  ░ free and cached  · free"


def requests(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Show this request only.")] = "",
    include_finished: Annotated[
        bool, typer.Option("--all", "-a", metavar="", help="Add requests that finished lately.")
    ] = False,
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """List requests with their block tables, oldest first.

    A block id in two tables is a block that two requests share. Prompts and
    outputs are never shown.

    Examples:
      kvplane requests --all

      kvplane requests req-4f2a --json | jq '.requests[0].block_table'
    """
    with session(server, as_json=as_json, wait=wait) as client:
        infos = list(client.list_requests(include_finished=include_finished, request_id=request_id))
    if as_json:
        print_json({"requests": [dataclasses.asdict(info) for info in infos]})
    elif not infos:
        named = f" {escaped(request_id)}" if request_id else "s"
        hint = "" if include_finished else "; --all adds those that finished lately"
        out_console().print(f"no request{named}{hint}")
    else:
        out_console().print(_request_table(infos))


def _request_table(infos: Sequence[RequestInfo]) -> Table:
    table = Table(box=None)
    table.add_column("request", overflow="fold")
    table.add_column("status")
    has_tenants = any(info.tenant for info in infos)
    if has_tenants:
        table.add_column("tenant", overflow="fold")
    has_adapters = any(info.adapter for info in infos)
    if has_adapters:
        table.add_column("adapter", overflow="fold")
    for name in ("age", "prompt", "cached", "output", "computed", "preempted"):
        table.add_column(name, justify="right")
    table.add_column("blocks", overflow="fold")
    for info in infos:
        status = f"{info.status} ({info.finish_reason})" if info.finish_reason else str(info.status)
        counts = (
            info.num_prompt_tokens,
            info.num_cached_tokens,
            info.num_output_tokens,
            info.num_computed_tokens,
            info.num_preemptions,
        )
        age = f"{info.age_seconds:.1f} s"
        tenant = (escaped(info.tenant),) if has_tenants else ()
        owner = (*tenant, *((escaped(info.adapter),) if has_adapters else ()))
        table.add_row(escaped(info.request_id), status, *owner, age, *(str(count) for count in counts), _tables(info))
    return table


def _tables(info: RequestInfo) -> str:
    """Its block ids; of several KV groups one line for each, without the null blocks that windows have left behind."""
    if not info.block_tables:
        return ranges(info.block_table)
    return "\n".join(ranges(tuple(block_id for block_id in table if block_id)) for table in info.block_tables)


blocks_app = typer.Typer(invoke_without_command=True)


@blocks_app.callback()
@connected
def blocks(
    context: typer.Context,
    *,
    block_filter: Annotated[
        BlockFilter, typer.Option("--filter", "-f", help="Which blocks to show.", case_sensitive=False)
    ] = BlockFilter.ALL,
    show_list: Annotated[
        bool, typer.Option("--list", "-l", metavar="", help="One line a block instead of the map.")
    ] = False,
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """Show the block pool: a map with one character a block, or a list with hashes and reference counts.

    `kvplane blocks trace ID` tells one block's life.

    Examples:
      kvplane blocks

      kvplane blocks --filter cached --list

      kvplane blocks --filter used --json | jq '.blocks | length'
    """
    if context.invoked_subcommand is not None:
        return
    with session(server, as_json=as_json, wait=wait) as client:
        infos = list(client.list_blocks(block_filter))
    if as_json:
        print_json({"blocks": [dataclasses.asdict(info) for info in infos]})
    elif not infos:
        out_console().print(f"no blocks ({block_filter})")
    elif show_list:
        out_console().print(_block_table(infos))
    else:
        _print_map(infos, out_console())


@blocks_app.command()
@connected
def trace(
    block_id: Annotated[
        int,
        typer.Argument(
            metavar="ID", parser=integer(1, MAX_INT32, advice="block 0 is the null block"),
            help="The block's id, as `kvplane blocks --list` shows it.",
        ),
    ],
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:  # fmt: skip
    """Tell one block's life: who took it, what it held, who hit it; of several KV groups, in which.

    The manager keeps it when it is started with --block-history N:
    kvplane up --manager-arg=--block-history=100000

    Example:
      kvplane blocks trace 12
    """
    with session(server, as_json=as_json, wait=wait) as client:
        told = client.trace_block(block_id)
    if as_json:
        print_json(told)
        return
    if not told.is_whole:
        out_console().print("earlier moments are not kept any more", style="dim")
    if not told.records:
        out_console().print(f"nothing is known of block {block_id}")
        return
    out_console().print(_life_table(told))


def _life_table(told: BlockTrace) -> Table:
    """One line a moment; the KV group is told where there are several, for a block may be of one after the other.

    So are the keys, where any moment has some.
    """
    has_groups, has_keys = told.num_groups > 1, any(record.keys is not None for record in told.records)
    groups, keys = ("group",) if has_groups else (), ("shared under",) if has_keys else ()
    table = Table("order", "moment", *groups, "request", "step", "hash", *keys, box=None)
    for record in told.records:
        group = (str(record.group),) if has_groups else ()
        step = "" if record.step_id is None else str(record.step_id)
        request_id = escaped(record.request_id or "")
        shared = (escaped("" if record.keys is None else keys_told(record.keys)),) if has_keys else ()
        table.add_row(str(record.order), record.moment, *group, request_id, step, record.block_hash or "", *shared)
    return table


def _block_table(infos: Sequence[BlockInfo]) -> Table:
    has_groups = any(info.group for info in infos)
    table = Table("block", "references", "state", *(("group",) if has_groups else ()), "hash", box=None)
    for info in infos:
        group = (str(info.group) if info.block_hash else "",) if has_groups else ()
        table.add_row(str(info.block_id), str(info.ref_cnt), _state(info), *group, info.block_hash or "")
    return table


def _state(info: BlockInfo) -> str:
    parts = ["used" if info.ref_cnt else "free"]
    if info.block_hash is not None:
        parts.append("cached")
    if info.provisional:
        parts.append("provisional")
    return ", ".join(parts)


def _print_map(infos: Sequence[BlockInfo], console: Console) -> None:
    """Prints one character a block, each line led by the id of its first place; a gap is a block not selected.

    Of many lines that are alike the first is shown, and how many follow: an idle pool of a GPU has thousands.
    """
    symbols = {info.block_id: _symbol(info) for info in infos}
    firsts = sorted({(block_id - 1) // _MAP_WIDTH * _MAP_WIDTH + 1 for block_id in symbols})
    rows = [(first, "".join(symbols.get(first + place, " ") for place in range(_MAP_WIDTH))) for first in firsts]
    for line, alike in itertools.groupby(rows, key=lambda row: row[1]):
        numbers = [first for first, _ in alike]
        shown = numbers if len(numbers) <= _MOST_ALIKE else numbers[:1]
        for first in shown:
            console.print(f"{first:>7} {line}".rstrip(), markup=False)
        if len(shown) < len(numbers):
            console.print(f"      … {len(numbers) - 1} more lines like it, to {numbers[-1]}", style="dim", markup=False)
    used = sum(1 for info in infos if info.ref_cnt)
    cached = sum(1 for info in infos if info.block_hash is not None)
    console.print(_LEGEND, style="dim", markup=False)
    console.print(f"{len(infos)} blocks: {used} used, {len(infos) - used} free, {cached} cached", markup=False)


def _symbol(info: BlockInfo) -> str:
    if info.provisional:
        return "?"
    if info.ref_cnt:
        return "█" if info.block_hash is not None else "▓"
    return "░" if info.block_hash is not None else "·"
