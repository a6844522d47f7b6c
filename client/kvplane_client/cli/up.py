"""``kvplane up``: a manager and an executor on this machine, started and kept running together."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import typer

from kvplane_client.async_client import AsyncClient
from kvplane_client.cli import options as opt
from kvplane_client.cli import up_options as up_opt
from kvplane_client.cli.child_process import ChildProcess, ChildSpec
from kvplane_client.cli.local_server import LocalServer
from kvplane_client.cli.model_store import KNOWN_MODELS, installed_path, resolve
from kvplane_client.cli.output import err_console
from kvplane_client.cli.server_probe import ServerProbe
from kvplane_client.cli.session import reported
from kvplane_client.cli.supervisor import Supervisor, SupervisorSettings
from kvplane_client.cli.up_view import UpView
from kvplane_client.retry import NO_RETRY

__all__ = ["up"]

_HELP = """Start a manager and an executor on this machine, and keep them running.

The first start of --model smollm2 fetches the model. Ctrl-C stops: running requests may finish first. An executor
that dies is started anew, and requests go on. Needs the extra: pip install 'kvplane\\[executor]'.

Examples:

  kvplane up

  kvplane up --model ~/models/Qwen3-0.6B --port 50052 --max-model-len 4096

  kvplane up --backend sim                        (no weights: try the control plane)

  kvplane up --manager-arg=--log-level --manager-arg=debug
"""
_STOP_SECONDS = 10.0
_EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def up(
    *,
    model: up_opt.ModelName = None,
    host: up_opt.Host = "127.0.0.1",
    port: up_opt.Port = 50051,
    backend: up_opt.Backend = "torch",
    dtype: up_opt.Dtype = None,
    memory_limit: up_opt.MemoryLimit = None,
    gpu_memory_utilization: up_opt.GpuMemoryUtilization = None,
    swap_space: up_opt.SwapSpace = None,
    num_blocks_override: up_opt.NumBlocksOverride = None,
    block_size: up_opt.BlockSize = None,
    max_model_len: up_opt.MaxModelLen = None,
    max_num_batched_tokens: up_opt.MaxNumBatchedTokens = None,
    max_num_seqs: up_opt.MaxNumSeqs = None,
    policy: up_opt.Policy = None,
    preemption_mode: up_opt.PreemptionMode = None,
    manager_arg: up_opt.ManagerArg = None,
    executor_arg: up_opt.ExecutorArg = None,
    restart_executor: up_opt.RestartExecutor = True,
    drain_seconds: up_opt.DrainSeconds = 30.0,
    state_dir: up_opt.StateDir = None,
    verbose: up_opt.Verbose = False,
    as_json: opt.JsonFlag = False,
) -> None:
    """Start a server; the help text is _HELP."""
    manager_flags = {
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--max-num-seqs": max_num_seqs,
        "--policy": policy,
        "--preemption-mode": preemption_mode,
        "--drain-timeout-s": drain_seconds,
    }
    executor_flags = {
        "--backend": backend,
        "--dtype": dtype,
        "--memory-limit": memory_limit,
        "--gpu-memory-utilization": gpu_memory_utilization,
        "--swap-space": swap_space,
        "--num-blocks-override": num_blocks_override,
        "--block-size": block_size,
        "--max-model-len": max_model_len,
    }
    settings = SupervisorSettings(restart_executor=restart_executor, drain_seconds=drain_seconds + _STOP_SECONDS)
    with reported(as_json):
        server = LocalServer.planned(host, port, state_dir)
        view = UpView(server.address, err_console(), as_json=as_json)
        manager = server.manager(manager_flags, manager_arg or ())
        executor = server.executor({"--model": _resolved(model, backend), **executor_flags}, executor_arg or ())
        code = asyncio.run(_supervise(manager, executor, view, settings, address=server.address, verbose=verbose))
    raise typer.Exit(code)


up.__doc__ = _HELP


def _resolved(model: str | None, backend: str) -> str | None:
    """Returns the model the executor is given; a known one is fetched when absent."""
    if model is None and backend == "sim":
        return None
    name = model or "smollm2"
    if name in KNOWN_MODELS and not Path(name).exists() and installed_path(name) is None:
        err_console().print(f"[dim]fetching {KNOWN_MODELS[name].about}[/dim]")
    return resolve(name)


async def _supervise(
    manager: ChildSpec, executor: ChildSpec, view: UpView, settings: SupervisorSettings, *, address: str, verbose: bool
) -> int:
    def child(spec: ChildSpec) -> ChildProcess:
        show = view.line if verbose else view.error
        return ChildProcess(spec, lambda line: show(spec.name, line))

    async with AsyncClient(address, retry=NO_RETRY) as client:
        probe = ServerProbe(client)
        supervisor = Supervisor(child(manager), child(executor), probe, view, settings)
        loop = asyncio.get_running_loop()
        for number in _EXIT_SIGNALS:
            loop.add_signal_handler(number, supervisor.signal)
        try:
            return await supervisor.run()
        finally:
            for number in _EXIT_SIGNALS:
                loop.remove_signal_handler(number)
