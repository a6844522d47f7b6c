"""The options of ``kvplane up``, so that its signature shows which there are and what they default to.

Station: below the command. Typer reads the annotations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Backend",
    "BlockSize",
    "DrainSeconds",
    "Dtype",
    "ExecutorArg",
    "GpuMemoryUtilization",
    "Host",
    "ManagerArg",
    "MaxModelLen",
    "MaxNumBatchedTokens",
    "MaxNumSeqs",
    "MemoryLimit",
    "ModelName",
    "NumBlocksOverride",
    "Policy",
    "Port",
    "PreemptionMode",
    "RestartExecutor",
    "StateDir",
    "SwapSpace",
    "Verbose",
]

_EXECUTOR = "Executor"
_MANAGER = "Manager"

ModelName = Annotated[
    str | None,
    typer.Option("--model", "-m", help="smollm2, a folder, a GGUF file or a hub id. Default: smollm2; sim: none."),
]
Host = Annotated[str, typer.Option("--host", help="Address the manager listens on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0 chooses a free one.")]
RestartExecutor = Annotated[
    bool, typer.Option("--restart-executor/--no-restart-executor", help="Start a dead executor anew.")
]
DrainSeconds = Annotated[float, typer.Option("--drain-seconds", min=0, help="For running requests.")]
StateDir = Annotated[
    Path | None, typer.Option("--state-dir", help="Folder for logs. Default: ~/.local/state/kvplane/PORT.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show both logs here.")]

Backend = Annotated[str, typer.Option("--backend", help="torch or sim.", rich_help_panel=_EXECUTOR)]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Type to compute in, such as float32.", rich_help_panel=_EXECUTOR)
]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", help="Memory to count on, such as 4GiB.", rich_help_panel=_EXECUTOR)
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option("--gpu-memory-utilization", help="Share of that memory to use, 0 to 1.", rich_help_panel=_EXECUTOR),
]
SwapSpace = Annotated[
    str | None,
    typer.Option("--swap-space", help="Host memory for swapped blocks, such as 4GiB.", rich_help_panel=_EXECUTOR),
]
NumBlocksOverride = Annotated[
    int | None,
    typer.Option("--num-blocks-override", help="KV blocks, instead of measuring.", rich_help_panel=_EXECUTOR),
]
BlockSize = Annotated[int | None, typer.Option("--block-size", help="Tokens per KV block.", rich_help_panel=_EXECUTOR)]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", help="Most tokens of a sequence.", rich_help_panel=_EXECUTOR)
]
ExecutorArg = Annotated[
    list[str] | None,
    typer.Option("--executor-arg", help="Passed to the executor as it is. Repeat.", rich_help_panel=_EXECUTOR),
]

MaxNumBatchedTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", help="Most tokens a step.", rich_help_panel=_MANAGER)
]
MaxNumSeqs = Annotated[
    int | None, typer.Option("--max-num-seqs", help="Most requests running at once.", rich_help_panel=_MANAGER)
]
Policy = Annotated[str | None, typer.Option("--policy", help="fcfs, priority or fair.", rich_help_panel=_MANAGER)]
PreemptionMode = Annotated[
    str | None,
    typer.Option("--preemption-mode", help="recompute, swap (with --swap-space) or auto.", rich_help_panel=_MANAGER),
]
ManagerArg = Annotated[
    list[str] | None,
    typer.Option("--manager-arg", help="Passed to the manager as it is. Repeat.", rich_help_panel=_MANAGER),
]
