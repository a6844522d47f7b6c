"""The options of ``kvplane up``, so that its signature shows which there are and what they default to.

Station: below the command. Typer reads the annotations. The limits are those of the services' own settings, so that a
wrong value is told at once; a test holds the two together.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from kvplane_client.cli.values import MAX_INT32, integer, number, one_of, parse_size, text

__all__ = [
    "Backend",
    "BlockSize",
    "DrainSeconds",
    "Dtype",
    "ExecutorArg",
    "GpuMemoryUtilization",
    "Host",
    "KvCacheDtype",
    "ManagerArg",
    "MaxLoraRank",
    "MaxLoras",
    "MaxModelLen",
    "MaxNumBatchedTokens",
    "MaxNumSeqs",
    "MemoryLimit",
    "ModelName",
    "NoRestartExecutor",
    "NumBlocksOverride",
    "Policy",
    "Port",
    "PreemptionMode",
    "StateDir",
    "SwapSpace",
    "TensorParallelSize",
    "Verbose",
]

_EXECUTOR = "Executor"
_MANAGER = "Manager"
_BUILT_IN_BACKENDS = {"torch", "sim"}


def _backends() -> list[str]:
    """Returns the backends there are, those of other distributions too; nothing of them is imported."""
    return sorted(_BUILT_IN_BACKENDS | {point.name for point in entry_points(group="kvplane.backends")})


def _memory(given: str) -> int:
    size = parse_size(given)
    if size < 1:
        raise typer.BadParameter(f"expected a size above 0, got {given!r}; 4GiB is one")
    return size


ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="M", help="smollm2, a folder, a GGUF file or a hub id. Default: smollm2; sim: none."
    ),
]
Host = Annotated[
    str,
    typer.Option(
        "--host", metavar="ADDR", parser=text(1, 253, advice="127.0.0.1 is this machine alone"),
        help="Address to listen on. 0.0.0.0: all; whoever reaches the port can use it.",
    ),
]  # fmt: skip
Port = Annotated[
    int,
    typer.Option(
        "--port", "-p", metavar="N", parser=integer(0, 65535, advice="0 chooses a free one"),
        help="Port to listen on; 0 chooses a free one.",
    ),
]  # fmt: skip
NoRestartExecutor = Annotated[
    bool,
    typer.Option("--no-restart-executor", metavar="", help="End when the executor dies, instead of starting it anew."),
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        "--drain-seconds", metavar="SEC", parser=number(0, advice="0 waits for none"),
        help="How long running requests may take to finish at the end.",
    ),
]  # fmt: skip
StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", metavar="DIR", help="Folder for logs. Default: ~/.local/state/kvplane/PORT."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", metavar="", help="Show both logs here.")]

Backend = Annotated[
    str,
    typer.Option(
        "--backend", metavar="NAME", parser=one_of(_backends, advice="install what provides it, or choose another"),
        help="What computes: torch, sim (no weights), or another that is installed.", rich_help_panel=_EXECUTOR,
    ),
]  # fmt: skip
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="TYPE", help="Type to compute in. Default: the model's.", rich_help_panel=_EXECUTOR,
        parser=one_of(lambda: ["auto", "float32", "bfloat16", "float16"], advice="auto takes the model's"),
    ),
]  # fmt: skip
KvCacheDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype", metavar="TYPE", rich_help_panel=_EXECUTOR,
        help="Type K and V are stored in; fp8 holds twice as many blocks as bfloat16. Default: as computed.",
        parser=one_of(lambda: ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"], advice="auto stores what is computed"),
    ),
]  # fmt: skip
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        "--memory-limit", metavar="SIZE", parser=_memory, rich_help_panel=_EXECUTOR,
        help="Memory to count on, such as 4GiB. Default: the GPU's; on a CPU half of what is free.",
    ),
]  # fmt: skip
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization", metavar="X", parser=number(0, 1, above=True, advice="0.9 is usual"),
        help="Share of that memory to use. Default: 0.9.", rich_help_panel=_EXECUTOR,
    ),
]  # fmt: skip
SwapSpace = Annotated[
    int | None,
    typer.Option(
        "--swap-space", metavar="SIZE", parser=_memory, rich_help_panel=_EXECUTOR,
        help="Host memory for blocks of preempted requests, such as 4GiB. Default: none.",
    ),
]  # fmt: skip
NumBlocksOverride = Annotated[
    int | None,
    typer.Option(
        "--num-blocks-override", metavar="N", parser=integer(2, MAX_INT32, advice="leave it out to measure"),
        help="KV blocks, the null block included, instead of measuring what fits.", rich_help_panel=_EXECUTOR,
    ),
]  # fmt: skip
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size", metavar="N", parser=integer(1, 1024, advice="16 is usual"),
        help="Tokens per KV block. Default: 16.", rich_help_panel=_EXECUTOR,
    ),
]  # fmt: skip
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", metavar="N", parser=integer(2, MAX_INT32, advice="leave it out for the model's own"),
        help="Most tokens of a sequence. Default: the model's own.", rich_help_panel=_EXECUTOR,
    ),
]  # fmt: skip
MaxLoras = Annotated[
    int | None,
    typer.Option(
        "--max-loras", metavar="N", parser=integer(0, 1024, advice="4 is a beginning"),
        help="LoRA adapters loaded at once: kvplane adapter load. Default: 0, none.", rich_help_panel=_EXECUTOR,
    ),
]  # fmt: skip
MaxLoraRank = Annotated[
    int | None,
    typer.Option(
        "--max-lora-rank", metavar="N", parser=integer(1, 4096, advice="16 is usual"),
        help="Largest rank of an adapter. Default: 16.", rich_help_panel=_EXECUTOR,
    ),
]  # fmt: skip
TensorParallelSize = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size", metavar="N", parser=integer(1, 64, advice="1 is one process"),
        help="Processes that share the model, each on a GPU if there are any. Default: 1.", rich_help_panel=_EXECUTOR,
    ),
]  # fmt: skip
ExecutorArg = Annotated[
    list[str] | None,
    typer.Option(
        "--executor-arg", metavar="ARG", rich_help_panel=_EXECUTOR,
        help="Passed to `python -m executor_service` as it is. Repeat for more.",
    ),
]  # fmt: skip

MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens", metavar="N", parser=integer(1, MAX_INT32, advice="2048 suits a CPU"),
        help="Most tokens a step computes: its length and its memory. Default: 2048.", rich_help_panel=_MANAGER,
    ),
]  # fmt: skip
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs", metavar="N", parser=integer(1, MAX_INT32, advice="256 is usual"),
        help="Most requests running at once. Default: 256.", rich_help_panel=_MANAGER,
    ),
]  # fmt: skip
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy", metavar="NAME", parser=one_of(lambda: ["fcfs", "priority", "fair"], advice="fcfs is usual"),
        help="Who is next: fcfs (first come), priority, or fair (the tenant served least). Default: fcfs.",
        rich_help_panel=_MANAGER,
    ),
]  # fmt: skip
PreemptionMode = Annotated[
    str | None,
    typer.Option(
        "--preemption-mode", metavar="MODE",
        parser=one_of(lambda: ["recompute", "swap", "auto"], advice="swap and auto need --swap-space"),
        help="What becomes of preempted blocks: recompute, swap or auto. Default: recompute.",
        rich_help_panel=_MANAGER,
    ),
]  # fmt: skip
ManagerArg = Annotated[
    list[str] | None,
    typer.Option(
        "--manager-arg", metavar="ARG", rich_help_panel=_MANAGER,
        help="Passed to `python -m kvmanager_service` as it is. Repeat for more.",
    ),
]  # fmt: skip
