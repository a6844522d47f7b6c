"""``kvplane events``: what changes in the prefix cache, as it changes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from kvplane_client.cli import options as opt
from kvplane_client.cli.output import keys_told, print_json, write_text
from kvplane_client.cli.session import session
from kvplane_client.cli.values import refused
from kvplane_client.kv_events import KvBlockRemoved, KvBlockStored, KvCacheCleared, KvEvent, KvEventBatch

__all__ = ["events"]

_NAMES = {KvBlockStored: "stored", KvBlockRemoved: "removed", KvCacheCleared: "cleared"}


def events(
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="AT",
            help='LOG:NUMBER, as the last line with --json names it in "next"; else a snapshot.',
        ),
    ] = None,
    *,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", metavar="", help="Add the blocks' tokens: what users wrote.")
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", metavar="", help="Add whose they are: salts, tenants and adapters of requests.")
    ] = False,
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """Follow the prefix cache: each block that comes and goes, until Ctrl-C.

    It begins with what is there. A block counts once it is filled. With --json
    each batch is one line; "next" says where to go on after it.

    Examples:
      kvplane events

      kvplane events --json | jq -c '.events[] | select(.event == "removed")'
    """
    log_id, from_sequence = _position(since)
    with session(server, as_json=as_json, wait=wait) as client:
        for batch in client.watch_kv_events(
            log_id=log_id, from_sequence=from_sequence, include_token_ids=token_ids, include_keys=keys
        ):
            if as_json:
                print_json(_document(batch))
            else:
                write_text("".join(map(_line, batch.events)))


def _position(since: str | None) -> tuple[str, int]:
    if since is None:
        return "", 0
    log_id, _, number = since.partition(":")
    if not log_id or not (number.isascii() and number.isdecimal()) or not int(number):
        raise refused('LOG:NUMBER such as "3f2a:17"', since, "leave it out for a snapshot", option="--since")
    return log_id, int(number)


def _document(batch: KvEventBatch) -> dict[str, Any]:
    return {
        "next": f"{batch.log_id}:{batch.next_sequence}" if batch.next_sequence else None,
        "is_snapshot": batch.is_snapshot,
        "events": [{"event": _NAMES[type(event)], **dataclasses.asdict(event)} for event in batch.events],
    }


def _line(event: KvEvent) -> str:
    head = f"{event.sequence:>8} {_NAMES[type(event)]:<7}"
    if isinstance(event, KvCacheCleared):
        return f"{head}\n"
    line = f"{head} block {event.block_id:<6} {event.block_hash}"
    if isinstance(event, KvBlockStored):
        line += f" after {event.parent_block_hash}" if event.parent_block_hash else " first"
        line += "".join(f" {token_id}" for token_id in event.token_ids)
        line += "" if event.keys is None else f" {keys_told(event.keys)}"
    return f"{line}\n"
