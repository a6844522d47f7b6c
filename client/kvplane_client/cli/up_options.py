"""The options of ``kvplane up``, so that its signature shows which there are and what they default to.

Station: below the command. Typer reads the annotations. The limits are those of the services' own settings, so that a
wrong value is told at once; a test holds the two together.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from kvplane_client.cli.option_panel import Panel
from kvplane_client.cli.values import parse_size

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

_GENERAL = Panel()
_EXECUTOR = Panel("Executor")
_MANAGER = Panel("Manager")
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
    _GENERAL.option("--model -m M", "smollm2, a folder, a GGUF file or a hub id. Default: smollm2; sim: none."),
]
Host = Annotated[
    str,
    _GENERAL.text(
        "--host ADDR",
        "Address to listen on. 0.0.0.0: all; whoever reaches the port can use it.",
        least=1,
        most=253,
        advice="127.0.0.1 is this machine alone",
    ),
]
Port = Annotated[
    int,
    _GENERAL.integer(
        "--port -p N", "Port to listen on; 0 chooses a free one.", least=0, most=65535, advice="0 chooses a free one"
    ),
]
NoRestartExecutor = Annotated[
    bool, _GENERAL.option("--no-restart-executor", "End when the executor dies, instead of starting it anew.")
]
DrainSeconds = Annotated[
    float,
    _GENERAL.number(
        "--drain-seconds SEC", "How long running requests may take to finish at the end.", advice="0 waits for none"
    ),
]
StateDir = Annotated[
    Path | None, _GENERAL.option("--state-dir DIR", "Folder for logs. Default: ~/.local/state/kvplane/PORT.")
]
Verbose = Annotated[bool, _GENERAL.option("--verbose -v", "Show both logs here.")]

Backend = Annotated[
    str,
    _EXECUTOR.one_of(
        "--backend NAME",
        "What computes: torch, sim (no weights), or another that is installed.",
        names=_backends,
        advice="install what provides it, or choose another",
    ),
]
Dtype = Annotated[
    str | None,
    _EXECUTOR.one_of(
        "--dtype TYPE",
        "Type to compute in. Default: the model's.",
        names=["auto", "float32", "bfloat16", "float16"],
        advice="auto takes the model's",
    ),
]
KvCacheDtype = Annotated[
    str | None,
    _EXECUTOR.one_of(
        "--kv-cache-dtype TYPE",
        "Type K and V are stored in; fp8 holds twice as many blocks as bfloat16. Default: as computed.",
        names=["auto", "fp8", "fp8_e4m3", "fp8_e5m2"],
        advice="auto stores what is computed",
    ),
]
MemoryLimit = Annotated[
    int | None,
    _EXECUTOR.option(
        "--memory-limit SIZE",
        "Memory to count on, such as 4GiB. Default: the GPU's; on a CPU half of what is free.",
        parser=_memory,
    ),
]
GpuMemoryUtilization = Annotated[
    float | None,
    _EXECUTOR.number(
        "--gpu-memory-utilization X",
        "Share of that memory to use. Default: 0.9.",
        most=1,
        above=True,
        advice="0.9 is usual",
    ),
]
SwapSpace = Annotated[
    int | None,
    _EXECUTOR.option(
        "--swap-space SIZE",
        "Host memory for blocks of preempted requests, such as 4GiB. Default: none.",
        parser=_memory,
    ),
]
NumBlocksOverride = Annotated[
    int | None,
    _EXECUTOR.integer(
        "--num-blocks-override N",
        "KV blocks, the null block included, instead of measuring what fits.",
        least=2,
        advice="leave it out to measure",
    ),
]
BlockSize = Annotated[
    int | None,
    _EXECUTOR.integer("--block-size N", "Tokens per KV block. Default: 16.", least=1, most=1024, advice="16 is usual"),
]
MaxModelLen = Annotated[
    int | None,
    _EXECUTOR.integer(
        "--max-model-len N",
        "Most tokens of a sequence. Default: the model's own.",
        least=2,
        advice="leave it out for the model's own",
    ),
]
MaxLoras = Annotated[
    int | None,
    _EXECUTOR.integer(
        "--max-loras N",
        "LoRA adapters loaded at once: kvplane adapter load. Default: 0, none.",
        least=0,
        most=1024,
        advice="4 is a beginning",
    ),
]
MaxLoraRank = Annotated[
    int | None,
    _EXECUTOR.integer(
        "--max-lora-rank N", "Largest rank of an adapter. Default: 16.", least=1, most=4096, advice="16 is usual"
    ),
]
TensorParallelSize = Annotated[
    int | None,
    _EXECUTOR.integer(
        "--tensor-parallel-size N",
        "Processes that share the model, each on a GPU if there are any. Default: 1.",
        least=1,
        most=64,
        advice="1 is one process",
    ),
]
ExecutorArg = Annotated[
    list[str] | None,
    _EXECUTOR.option("--executor-arg ARG", "Passed to `python -m executor_service` as it is. Repeat for more."),
]

MaxNumBatchedTokens = Annotated[
    int | None,
    _MANAGER.integer(
        "--max-num-batched-tokens N",
        "Most tokens a step computes: its length and its memory. Default: 2048.",
        least=1,
        advice="2048 suits a CPU",
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    _MANAGER.integer(
        "--max-num-seqs N", "Most requests running at once. Default: 256.", least=1, advice="256 is usual"
    ),
]
Policy = Annotated[
    str | None,
    _MANAGER.one_of(
        "--policy NAME",
        "Who is next: fcfs (first come), priority, or fair (the tenant served least). Default: fcfs.",
        names=["fcfs", "priority", "fair"],
        advice="fcfs is usual",
    ),
]
PreemptionMode = Annotated[
    str | None,
    _MANAGER.one_of(
        "--preemption-mode MODE",
        "What becomes of preempted blocks: recompute, swap or auto. Default: recompute.",
        names=["recompute", "swap", "auto"],
        advice="swap and auto need --swap-space",
    ),
]
ManagerArg = Annotated[
    list[str] | None,
    _MANAGER.option("--manager-arg ARG", "Passed to `python -m kvmanager_service` as it is. Repeat for more."),
]
