"""``kvplane plan``: how many blocks and users a memory holds, before anything is started: no server, no torch."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

import typer
from rich.table import Table

from kvplane_client.cli import options as opt
from kvplane_client.cli.capacity import DTYPE_BYTES, PRESETS, Capacity, PlanError, load_shape, plan_capacity
from kvplane_client.cli.output import out_console, print_json
from kvplane_client.cli.session import CommandError, reported

__all__ = ["parse_size", "plan"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_GIB = 1024**3
_HELP = f"""Say how many KV blocks fit a memory, and how many users at once.

MODEL is one of {", ".join(PRESETS)}, or a config.json, or its folder. The executor measures the same at its start; this
reckons: weights from the shape, and --overhead for activations and the runtime.

Examples:

  kvplane plan llama-3-8b --memory 80GiB

  kvplane plan llama-3-8b --memory 80GiB --kv-dtype fp8 --context-len 4096

  kvplane plan ~/models/Qwen3-0.6B --memory 8GiB --overhead 1GiB --json
"""


def parse_size(text: str) -> int:
    """Reads "80GiB", "500MB" or a number of bytes; GB is 1000**3, G and GiB are 1024**3, as for the executor.

    Raises:
        typer.BadParameter: It is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise typer.BadParameter(f'expected a size such as "80GiB", "500MB" or a number of bytes, got {text!r}')
    base = 1000 if match[4] and not match[3] else 1024
    return int(float(match[1]) * base ** _POWERS[match[2].upper()])


def _parse_dtype(text: str) -> str:
    if text not in DTYPE_BYTES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPE_BYTES)}, got {text!r}")
    return text


def _parse_kv_dtype(text: str) -> str:
    return text if text == "auto" else _parse_dtype(text)


def _parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise typer.BadParameter(f"expected a share above 0 and at most 1, got {text!r}")
    return share


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a config.json, or its folder.")],
    *,
    memory: Annotated[int, typer.Option("--memory", parser=parse_size, help="Memory of the device, such as 80GiB.")],
    dtype: Annotated[str, typer.Option("--dtype", parser=_parse_dtype, help="What weights are kept in.")] = "bfloat16",
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", parser=_parse_kv_dtype, help="What K and V are kept in; auto: as weights.")
    ] = "auto",
    utilization: Annotated[
        float, typer.Option("--utilization", parser=_parse_share, help="Share of the memory to use.")
    ] = 0.9,
    overhead: Annotated[
        int, typer.Option("--overhead", parser=parse_size, help="Activations and runtime, such as 6GiB.")
    ] = "2GiB",  # type: ignore[assignment]  # typer parses defaults, too
    weights: Annotated[
        int | None, typer.Option("--weights", parser=parse_size, help="What weights take. Default: reckoned.")
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens per block.")] = 16,
    context_len: Annotated[
        int | None, typer.Option("--context-len", min=1, help="Tokens of one user. Default: the model's longest.")
    ] = None,
    as_json: opt.JsonFlag = False,
) -> None:
    """Reckon what fits; the help text is _HELP."""
    with reported(as_json):
        try:
            shape = load_shape(model)
        except PlanError as error:
            raise CommandError(str(error)) from error
    capacity = plan_capacity(
        shape,
        total_bytes=memory,
        utilization=utilization,
        dtype=dtype,
        kv_dtype=kv_dtype,
        overhead_bytes=overhead,
        block_size=block_size,
        context_len=context_len or shape.max_model_len,
        weights_bytes=weights,
    )
    if as_json:
        print_json({"model": dataclasses.asdict(shape), "capacity": dataclasses.asdict(capacity)})
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _rows(capacity):
        table.add_row(f"[dim]{name}[/dim]", value)
    out_console().print(table)


plan.__doc__ = _HELP


def _rows(capacity: Capacity) -> list[tuple[str, str]]:
    rows = [
        ("memory", f"{_gib(capacity.total_bytes)}, {_gib(capacity.usable_bytes)} of it to use"),
        ("weights", _gib(capacity.weights_bytes)),
        ("overhead", _gib(capacity.overhead_bytes)),
        ("left for KV", _gib(capacity.kv_bytes)),
        ("one token", f"{capacity.bytes_per_token:,} bytes"),
        ("one block", f"{capacity.bytes_per_block:,} bytes for {capacity.block_size} tokens"),
        ("blocks", f"{capacity.num_blocks:,}, for {capacity.num_tokens:,} tokens"),
        ("users", f"{capacity.num_users:,} at once with {capacity.context_len:,} tokens each"),
    ]
    if capacity.num_users == 0:
        rows.append(("", "not one fits: more --memory, a shorter --context-len, or --kv-dtype fp8"))
    return rows


def _gib(size: int) -> str:
    return f"{size / _GIB:,.2f} GiB"
