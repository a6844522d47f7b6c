"""``kvplane up``: a manager and an executor on this machine, started and kept running together."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import warnings
from pathlib import Path

import typer

from kvplane_client._stubs import PlainTextKeyWarning
from kvplane_client.async_client import AsyncClient
from kvplane_client.cli import options as opt
from kvplane_client.cli import up_options as up_opt
from kvplane_client.cli.child_process import ChildProcess, ChildSpec
from kvplane_client.cli.connection import current_access
from kvplane_client.cli.local_server import LocalServer
from kvplane_client.cli.model_check import check_model
from kvplane_client.cli.model_store import KNOWN_MODELS, installed_path, resolve
from kvplane_client.cli.output import err_console
from kvplane_client.cli.server_probe import ServerProbe
from kvplane_client.cli.session import CommandError, reported
from kvplane_client.cli.supervisor import Supervisor, SupervisorSettings
from kvplane_client.cli.up_view import UpView
from kvplane_client.cli.values import refused
from kvplane_client.retry import NO_RETRY

__all__ = ["up"]

_HELP = """Start a manager and an executor on this machine, and keep them running.

Weights and KV cache take memory when the executor starts: 0.9 of a GPU's, on
a CPU 0.9 of half of what is free. --memory-limit 4GiB takes less. A step
computes at most 2048 tokens: --max-num-batched-tokens.

The first start of smollm2 fetches it. Ctrl-C stops: running requests may
finish first. An executor that dies is started anew, and requests go on.

Examples:

  kvplane up

  kvplane up --memory-limit 2GiB --max-num-batched-tokens 512

  kvplane up --model ~/models/Qwen3-0.6B --port 50052 --max-model-len 4096

  kvplane up --backend sim            (no weights: try the control plane)

  kvplane up --manager-arg=--log-level --manager-arg=debug

The torch backend needs the extra: pip install 'kvplane\\[executor]'.
"""
_STOP_SECONDS = 10.0
_READS_MODELS = "torch"
# What the built-in backends need beside what the manager needs, and what brings it. Others look after themselves.
_LIBRARIES = {
    "torch": (("torch", "transformers"), "pip install 'kvplane[executor]', or try --backend sim"),
    "sim": (("numpy",), "pip install 'kvplane[sim]'"),
}
_EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def up(
    *,
    model: up_opt.ModelName = None,
    host: up_opt.Host = "127.0.0.1",
    port: up_opt.Port = 50051,
    backend: up_opt.Backend = "torch",
    dtype: up_opt.Dtype = None,
    kv_cache_dtype: up_opt.KvCacheDtype = None,
    memory_limit: up_opt.MemoryLimit = None,
    gpu_memory_utilization: up_opt.GpuMemoryUtilization = None,
    swap_space: up_opt.SwapSpace = None,
    num_blocks_override: up_opt.NumBlocksOverride = None,
    block_size: up_opt.BlockSize = None,
    max_model_len: up_opt.MaxModelLen = None,
    max_loras: up_opt.MaxLoras = None,
    max_lora_rank: up_opt.MaxLoraRank = None,
    tensor_parallel_size: up_opt.TensorParallelSize = None,
    max_num_batched_tokens: up_opt.MaxNumBatchedTokens = None,
    max_num_seqs: up_opt.MaxNumSeqs = None,
    policy: up_opt.Policy = None,
    preemption_mode: up_opt.PreemptionMode = None,
    manager_arg: up_opt.ManagerArg = None,
    executor_arg: up_opt.ExecutorArg = None,
    no_restart_executor: up_opt.NoRestartExecutor = False,
    drain_seconds: up_opt.DrainSeconds = 30.0,
    state_dir: up_opt.StateDir = None,
    verbose: up_opt.Verbose = False,
    as_json: opt.JsonFlag = False,
) -> None:
    """Start a server; the help text is _HELP."""
    if max_num_seqs is not None and max_num_batched_tokens is not None and max_num_seqs > max_num_batched_tokens:
        expected = f"at most --max-num-batched-tokens ({max_num_batched_tokens})"
        raise refused(expected, max_num_seqs, "lower it or raise the other", option="--max-num-seqs")
    if model is not None and backend == _READS_MODELS and (model not in KNOWN_MODELS or Path(model).exists()):
        check_model(model)
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
        "--kv-cache-dtype": kv_cache_dtype,
        "--memory-limit": memory_limit,
        "--gpu-memory-utilization": gpu_memory_utilization,
        "--swap-space": swap_space,
        "--num-blocks-override": num_blocks_override,
        "--block-size": block_size,
        "--max-model-len": max_model_len,
        "--max-loras": max_loras,
        "--max-lora-rank": max_lora_rank,
        "--tensor-parallel-size": tensor_parallel_size,
    }
    settings = SupervisorSettings(restart_executor=not no_restart_executor, drain_seconds=drain_seconds + _STOP_SECONDS)
    with reported(as_json):
        _check_installed(backend)
        server = LocalServer.planned(host, port, state_dir)
        view = UpView(server.address, server.network_address, err_console(), as_json=as_json, verbose=verbose)
        manager = server.manager(manager_flags, manager_arg or ())
        executor = server.executor({"--model": _resolved(model, backend), **executor_flags}, executor_arg or ())
        code = asyncio.run(_supervise(manager, executor, view, settings, address=server.address))
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


def _check_installed(backend: str) -> None:
    """Refuses to start what would find out, after seconds, that a library is missing."""
    needed, advice = _LIBRARIES.get(backend, ((), ""))
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise CommandError(
            f"--backend {backend}: expected {' and '.join(needed)}, got no {' and no '.join(missing)}; {advice}"
        )


async def _supervise(
    manager: ChildSpec, executor: ChildSpec, view: UpView, settings: SupervisorSettings, *, address: str
) -> int:
    def child(spec: ChildSpec) -> ChildProcess:
        return ChildProcess(spec, lambda line: view.line(spec.name, line))

    access = current_access()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlainTextKeyWarning)  # of an address of this machine, whatever it looks like
        asks = AsyncClient(address, retry=NO_RETRY, credentials=access.credentials, api_key=access.api_key)
    async with asks as client:
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
