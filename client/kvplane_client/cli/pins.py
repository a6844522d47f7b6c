"""``kvplane pin``, ``unpin`` and ``pins``: prefixes that stay in the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from kvplane_client.cli import options as opt
from kvplane_client.cli.output import escaped, keys_told, out_console, print_json, visible
from kvplane_client.cli.prompt_input import ids_or_text
from kvplane_client.cli.session import session
from kvplane_client.manager_types import PinnedPrefix

__all__ = ["pin", "pins", "unpin"]

_NO_ROOM = "nothing can be: no executor is ready, or the manager's --max-pinned-fraction leaves no block"


def pin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pin's name.")],
    prefix: Annotated[
        str | None, typer.Argument(metavar="PREFIX", help='What prompts begin with; "-" or nothing reads stdin.')
    ] = None,
    *,
    token_ids: Annotated[
        str | None, typer.Option("--token-ids", metavar="IDS", help='The prefix as ids, such as "1,2,3".')
    ] = None,
    cache_salt: opt.CacheSalt = None,
    tenant: opt.Tenant = None,
    adapter: opt.Adapter = None,
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """Keep the full blocks of a prefix, such as a system prompt, from eviction.

    It computes nothing: what is not cached yet is held once a request has
    computed it. Pins last until `kvplane unpin` or the manager's end, whatever
    becomes of the executor. A salt, an adapter, and a tenant where tenants are
    kept apart, is that of the requests which share the prefix.

    Examples:
      kvplane pin support < system_prompt.txt

      kvplane pin few-shot "Q: What is the capital of France?" --cache-salt acme
    """
    example = 'kvplane pin support "Be brief."'
    what = ids_or_text(prefix, token_ids, name="PREFIX", beside="", example=example)
    with session(server, as_json=as_json, wait=wait) as client:
        pinned = client.pin_prefix(name, what, cache_salt=cache_salt or "", tenant=tenant or "", adapter=adapter or "")
    if as_json:
        print_json(pinned)
    else:
        typer.echo(f"pinned {visible(pinned.name)}: {_told(pinned)}")


def unpin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pin's name, as `kvplane pins` shows it.")],
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """Let go of a pinned prefix; its blocks stay cached until they are evicted.

    `kvplane pins` shows the names.

    Example:
      kvplane unpin support
    """
    with session(server, as_json=as_json, wait=wait) as client:
        client.unpin_prefix(name)
    if as_json:
        print_json({"unpinned": name})
    else:
        typer.echo(f"unpinned {visible(name)}")


def pins(server: opt.Server = "localhost:50051", wait: opt.Wait = 0, as_json: opt.JsonFlag = False) -> None:
    """List pinned prefixes: how many blocks each names, and how many of them are held now.

    A pin lacks what is not cached yet, or was let go of for a request. Where
    pins are of a salt, a tenant or an adapter, "shared under" says of which:
    only requests with the same can hit them.

    Examples:
      kvplane pins

      kvplane pins --json | jq '.pins[] | select(.held_blocks < .num_blocks)'
    """
    with session(server, as_json=as_json, wait=wait) as client:
        pinned = client.list_pinned_prefixes()
    if as_json:
        print_json(dataclasses.asdict(pinned))
        return
    if not pinned.pins:
        limit = f"pins may name {pinned.max_blocks} blocks" if pinned.max_blocks else _NO_ROOM
        out_console().print(f"nothing is pinned; {limit}")
        return
    out_console().print(_table(pinned.pins))
    out_console().print(f"pins may name {pinned.max_blocks} blocks in all", style="dim")


def _table(pinned: Sequence[PinnedPrefix]) -> Table:
    has_keys = any(one.keys is not None for one in pinned)
    table = Table(box=None)
    table.add_column("pin", overflow="fold")
    for column in ("tokens", "blocks", "held"):
        table.add_column(column, justify="right")
    if has_keys:
        table.add_column("shared under", overflow="fold")
    for one in pinned:
        shared = (escaped("" if one.keys is None else keys_told(one.keys)),) if has_keys else ()
        table.add_row(escaped(one.name), str(one.num_tokens), str(one.num_blocks), str(one.held_blocks), *shared)
    return table


def _told(pinned: PinnedPrefix) -> str:
    blocks = f"{pinned.num_tokens} tokens, {pinned.held_blocks} of {pinned.num_blocks} full blocks held"
    return blocks if pinned.held_blocks == pinned.num_blocks else f"{blocks}; the rest once a request computes it"
