"""``kvplane stats``, ``executors``, ``switch-executor``, ``abort`` and ``reset-cache``: the manager as a whole."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.table import Table

from kvplane_client.cli import options as opt
from kvplane_client.cli.output import escaped, out_console, print_json, visible
from kvplane_client.cli.session import session
from kvplane_client.manager_types import PoolStats, SchedulerSettings, Stats, TenantStats

__all__ = ["abort", "executors", "reset_cache", "stats", "switch_executor"]

_TENANTS_SHOWN = 10


def stats(server: opt.Server = "localhost:50051", wait: opt.Wait = 0, as_json: opt.JsonFlag = False) -> None:
    """Show what the manager is doing: requests, block pool, cache, steps.

    Counters run since the manager started.

    Examples:
      kvplane stats

      kvplane stats --json | jq '.pool.free_blocks'
    """
    with session(server, as_json=as_json, wait=wait) as client:
        current = client.get_stats()
    if as_json:
        print_json(current)
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _rows(current):
        table.add_row(f"[dim]{name}[/dim]", value)
    out_console().print(table)


def _rows(current: Stats) -> list[tuple[str, str]]:
    finished = ", ".join(f"{count} {reason}" for reason, count in sorted(current.requests_finished.items()) if count)
    settings = current.settings
    rows = [
        ("state", f"{current.state}, up {current.uptime_seconds:.0f} s"),
        ("requests", f"{current.requests_running} running, {current.requests_waiting} waiting"),
        ("finished", finished or "none"),
        ("blocks", _pool(current.pool)),
        ("prefix cache", _hit_rate(current)),
        ("evicted", f"{current.blocks_evicted} cached blocks"),
        ("tokens", f"{current.tokens_generated} generated, {current.tokens_computed} computed"),
        ("steps", f"{current.steps} done, {current.steps_failed} failed"),
        ("preemptions", _preemptions(current)),
        ("policy", f"{escaped(settings.policy)}, prefix caching {_caching(settings)}"),
        (
            "limits",
            f"{settings.max_num_seqs} running, {settings.max_waiting} waiting, "
            f"{settings.max_num_batched_tokens} tokens a step",
        ),
    ]
    if any(tenant.tenant for tenant in current.tenants):
        rows.append(("tenants", "\n".join(map(_tenant, current.tenants[:_TENANTS_SHOWN]))))
    return rows


def _tenant(tenant: TenantStats) -> str:
    name = escaped(tenant.tenant) or "(none named)"
    counts = f"{tenant.requests_running} running, {tenant.requests_waiting} waiting"
    return f"{name}: {counts}, {tenant.served:.0f} served" if tenant.served else f"{name}: {counts}"


def _caching(settings: SchedulerSettings) -> str:
    if not settings.enable_prefix_caching:
        return "off"
    return "on, tenants apart" if settings.isolate_tenants else "on"


def _pool(pool: PoolStats | None) -> str:
    if pool is None:
        return "no pool before an executor is ready"
    used = pool.num_blocks - pool.free_blocks
    share = used / pool.num_blocks if pool.num_blocks else 0.0
    pinned = f", {pool.pinned_blocks} pinned" if pool.pinned_blocks else ""
    kept = f"{pool.cached_blocks} cached{pinned}"
    sizes = " or ".join(str(size) for size in sorted({*pool.group_block_sizes}) or [pool.block_size])
    return f"{used} of {pool.num_blocks} used ({share:.0%}), {kept}, {sizes} tokens each"


def _preemptions(current: Stats) -> str:
    counts = f"{current.preemptions}, and {current.reschedules} rescheduled"
    pool = current.pool
    if pool is None or not pool.num_host_blocks:
        return counts
    used = f"{pool.used_host_blocks} of {pool.num_host_blocks} host blocks used"
    return f"{counts}; {current.swapped_out} swapped out, {current.swapped_in} in, {used}"


def _hit_rate(current: Stats) -> str:
    if not current.prefix_queries:
        return "no prompt looked up"
    share = current.prefix_hits / current.prefix_queries
    return f"{current.prefix_hits} of {current.prefix_queries} prompt tokens found ({share:.0%})"


def executors(server: opt.Server = "localhost:50051", wait: opt.Wait = 0, as_json: opt.JsonFlag = False) -> None:
    """List the executors that hold a lease, and which of them runs the steps.

    The others stand by: one takes over when the active one is lost, or when
    `kvplane switch-executor` names it.

    Examples:
      kvplane executors

      kvplane executors --json | jq -r '.executors[].address'
    """
    with session(server, as_json=as_json, wait=wait) as client:
        infos = client.list_executors()
    if as_json:
        print_json({"executors": [dataclasses.asdict(info) for info in infos]})
        return
    if not infos:
        out_console().print("no executor is registered")
        return
    table = Table("executor", "address", "state", "lease", "last error", box=None)
    for info in infos:
        lease = f"{info.lease_remaining_seconds:.1f} s"
        told = (info.executor_id, info.address, info.state, lease, info.last_error or "")
        table.add_row(*map(escaped, told))
    out_console().print(table)


def switch_executor(
    executor_id: Annotated[
        str, typer.Argument(metavar="ID", help="Of an executor that stands by, as `kvplane executors` shows it.")
    ],
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """Move on to another executor on purpose, while requests run.

    Until it is ready the present one goes on. Then what runs is computed anew on
    the other, and streams go on where they were; the present one stands by.

    Example:
      kvplane switch-executor executor-4f2a
    """
    with session(server, as_json=as_json, wait=wait) as client:
        previous = client.switch_executor(executor_id)
    if as_json:
        print_json({"active": executor_id, "previous": previous})
    else:
        typer.echo(f"{visible(executor_id)} is active; {visible(previous)} stands by")


def abort(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id, as `kvplane requests` shows it.")],
    server: opt.Server = "localhost:50051",
    wait: opt.Wait = 0,
    as_json: opt.JsonFlag = False,
) -> None:
    """End a request; whoever streams it gets finish_reason "abort".

    `kvplane requests` shows the ids of those that run.

    Example:
      kvplane abort req-4f2a
    """
    with session(server, as_json=as_json, wait=wait) as client:
        client.abort(request_id)
    if as_json:
        print_json({"aborted": request_id})
    else:
        typer.echo(f"aborted {visible(request_id)}")


def reset_cache(server: opt.Server = "localhost:50051", wait: opt.Wait = 0, as_json: opt.JsonFlag = False) -> None:
    """Forget every cached block, so that nothing computed so far is reused.

    Refused while a request holds blocks.

    Example:
      kvplane reset-cache
    """
    with session(server, as_json=as_json, wait=wait) as client:
        forgotten = client.reset_prefix_cache()
    if as_json:
        print_json({"blocks_forgotten": forgotten})
    else:
        typer.echo(f"forgot {forgotten} cached block{'' if forgotten == 1 else 's'}")
