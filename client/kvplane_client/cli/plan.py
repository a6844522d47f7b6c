"""``kvplane plan``: how many blocks and users a memory holds, before anything is started: no server, no torch."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.table import Table

from kvplane_client.cli import options as opt
from kvplane_client.cli.capacity import (
    DTYPE_BYTES,
    KV_DTYPE_BYTES,
    PRESETS,
    Capacity,
    ModelShape,
    PlanError,
    load_shape,
    plan_capacity,
)
from kvplane_client.cli.model_states import STATE
from kvplane_client.cli.option_panel import Panel
from kvplane_client.cli.output import out_console, print_json
from kvplane_client.cli.session import EXIT_ERROR, CommandError, reported
from kvplane_client.cli.values import MAX_INT32, parse_size

__all__ = ["plan"]

_GIB = 1024**3
_HELP = f"""Say how many KV blocks fit a memory, and how many users at once.

MODEL is one of {", ".join(PRESETS)},
or a config.json, or its folder. The executor measures the same at its start;
this reckons: weights from the shape (of a model that also sees or hears: of
its decoder alone), and --overhead for activations and the runtime. Layers
that keep a state (Mamba, linear attention) need blocks that it fits into:
their size is then a multiple of --block-size, as the executor makes it. Of
layers that keep less of a token than others blocks have more tokens. Where
not one user fits it says so, and the exit code is 1.

Examples:

  kvplane plan llama-3-8b --memory 80GiB

  kvplane plan llama-3-8b --memory 80GiB --kv-dtype fp8 --context-len 4096

  kvplane plan ~/models/Qwen3-0.6B --memory 8GiB --overhead 1GiB --json

  kvplane plan ~/models/gemma-3-1b --memory 8GiB --json > gemma.json

  kvplane replay mooncake.jsonl --kv-cache gemma.json
"""


_OPTIONS = Panel()
_Model = Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a config.json, or its folder.")]
_Memory = Annotated[int, _OPTIONS.option("--memory SIZE", "Memory of the device, such as 80GiB.", parser=parse_size)]
_Dtype = Annotated[
    str,
    _OPTIONS.one_of("--dtype TYPE", "What weights are kept in.", names=list(DTYPE_BYTES), advice="bfloat16 is usual"),
]
_KvDtype = Annotated[
    str,
    _OPTIONS.one_of(
        "--kv-dtype --kv-cache-dtype TYPE",
        "What K and V are kept in; auto: as weights.",
        names=["auto", *KV_DTYPE_BYTES],
        advice="auto is that of the weights",
    ),
]
_Utilization = Annotated[
    float,
    _OPTIONS.number("--utilization X", "Share of the memory to use.", most=1, above=True, advice="0.9 is usual"),
]
_Overhead = Annotated[
    int, _OPTIONS.option("--overhead SIZE", "Activations and runtime, such as 6GiB.", parser=parse_size)
]
_Weights = Annotated[
    int | None, _OPTIONS.option("--weights SIZE", "What weights take. Default: reckoned.", parser=parse_size)
]
_BlockSize = Annotated[
    int, _OPTIONS.integer("--block-size N", "Tokens per block.", least=1, most=1024, advice="16 is usual")
]
_ContextLen = Annotated[
    int | None,
    _OPTIONS.integer(
        "--context-len N",
        "Tokens of one user. Default: the model's longest.",
        least=1,
        advice="leave it out for the model's longest",
    ),
]
_LongestChunk = Annotated[
    int,
    _OPTIONS.integer(
        "--max-num-batched-tokens N",
        "Most tokens of one step, as of the manager. Layers with a window hold as many beside it.",
        least=1,
        advice="as the manager's",
    ),
]
_StateInterval = Annotated[
    int,
    _OPTIONS.integer(
        "--state-interval N",
        "Fewest tokens of a block where layers keep a state (Mamba), as of the executor.",
        least=1,
        most=65_536,
        advice="as the executor's",
    ),
]


def plan(
    model: _Model,
    *,
    memory: _Memory,
    dtype: _Dtype = "bfloat16",
    kv_dtype: _KvDtype = "auto",
    utilization: _Utilization = 0.9,
    overhead: _Overhead = "2GiB",  # type: ignore[assignment]  # typer parses defaults, too
    weights: _Weights = None,
    block_size: _BlockSize = 16,
    context_len: _ContextLen = None,
    longest_chunk: _LongestChunk = 2048,
    state_interval: _StateInterval = 512,
    as_json: opt.JsonFlag = False,
) -> None:
    """Reckon what fits; the help text is _HELP."""
    with reported(as_json):
        try:
            shape = load_shape(model)
            capacity = plan_capacity(
                shape,
                total_bytes=memory,
                utilization=utilization,
                dtype=dtype,
                kv_dtype=kv_dtype,
                overhead_bytes=overhead,
                block_size=block_size,
                context_len=context_len or _longest(model, shape),
                weights_bytes=weights,
                longest_chunk=longest_chunk,
                state_interval=state_interval,
            )
        except PlanError as error:
            raise CommandError(str(error)) from error
        if capacity.num_blocks > MAX_INT32:
            raise CommandError(
                f"expected at most {MAX_INT32} blocks, whose ids are int32, got {capacity.num_blocks}; a larger"
                " --block-size, or less --memory"
            )
    if as_json:
        print_json(_document(shape, capacity))
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in _rows(capacity):
            table.add_row(f"[dim]{name}[/dim]", value)
        out_console().print(table)
    if capacity.num_users == 0:
        raise typer.Exit(EXIT_ERROR)


plan.__doc__ = _HELP


def _document(shape: ModelShape, capacity: Capacity) -> dict[str, Any]:
    return {
        "model": dataclasses.asdict(shape),
        "capacity": dataclasses.asdict(capacity),
        "kv_cache": _kv_cache(capacity),
    }


def _kv_cache(capacity: Capacity) -> dict[str, Any]:
    """What ``kvplane replay --kv-cache`` takes."""
    groups = []
    for group in capacity.groups:
        own = {} if group.block_size == capacity.block_size else {"block_size": group.block_size}
        groups.append(_kind(group.window) | own | {"num_layers": group.num_layers})
    return {"num_blocks": capacity.num_blocks, "block_size": capacity.block_size, "groups": groups}


def _kind(window: int) -> dict[str, Any]:
    """A group's type and size; chunks and states are windows below 0."""
    if window == STATE:
        return {"type": "recurrent_state"}
    if window < 0:
        return {"type": "chunked_local", "chunk": -window}
    return {"type": "sliding_window", "window": window} if window else {"type": "full_attention"}


def _longest(model: str, shape: ModelShape) -> int:
    if shape.max_model_len is None:
        raise PlanError(f"{model}: expected --context-len, since the model names no longest sequence, got none; set it")
    return shape.max_model_len


def _rows(capacity: Capacity) -> list[tuple[str, str]]:
    sizes = " or ".join(str(size) for size in sorted({group.block_size for group in capacity.groups}))
    rows = [
        ("memory", f"{_gib(capacity.total_bytes)}, {_gib(capacity.usable_bytes)} of it to use"),
        ("weights", _gib(capacity.weights_bytes)),
        ("overhead", _gib(capacity.overhead_bytes)),
        ("left for KV", _gib(capacity.kv_bytes)),
        ("one token", f"{capacity.bytes_per_token:,} bytes"),
        ("one block", f"{capacity.bytes_per_block:,} bytes for {sizes} tokens"),
        ("blocks", f"{capacity.num_blocks:,}, for {capacity.num_tokens:,} tokens"),
        ("users", f"{capacity.num_users:,} at once with {capacity.context_len:,} tokens each"),
    ]
    if capacity.bytes_per_state:
        rows.insert(5, ("one state", f"{capacity.bytes_per_state:,} bytes in each layer that keeps one"))
    if capacity.num_groups > 1:
        rows.insert(-2, ("groups", f"{capacity.num_groups} of layers, each with blocks of its own"))
    if capacity.num_users == 0:
        rows.append(("", f"not one fits: {_what_helps(capacity)}"))
    return rows


def _what_helps(capacity: Capacity) -> str:
    needed = capacity.weights_bytes + capacity.overhead_bytes
    if needed >= capacity.usable_bytes:
        return f"weights and overhead alone take {_gib(needed)}; more --memory, or a smaller --dtype or model"
    third = "a smaller --max-num-batched-tokens" if capacity.bytes_per_state else "--kv-dtype fp8"
    return f"more --memory, a shorter --context-len, or {third}"


def _gib(size: int) -> str:
    return f"{size / _GIB:,.2f} GiB"
