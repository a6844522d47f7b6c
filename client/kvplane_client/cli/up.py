"""``kvplane up``: a manager and an executor on this machine, started and kept running together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvplane_client.async_client import AsyncClient
from kvplane_client.cli import options as opt
from kvplane_client.cli.child_process import ChildProcess, ChildSpec
from kvplane_client.cli.model_store import KNOWN_MODELS, installed_path, resolve
from kvplane_client.cli.output import err_console
from kvplane_client.cli.session import CommandError, reported
from kvplane_client.cli.supervisor import Supervisor, SupervisorSettings
from kvplane_client.cli.up_view import UpView
from kvplane_client.errors import UnavailableError
from kvplane_client.manager_types import ExecutorState, Model
from kvplane_client.retry import NO_RETRY

__all__ = ["executor_argv", "manager_argv", "server_address", "up"]

_HELP = """Start a manager and an executor on this machine, and keep them running.

The first start of --model smollm2 fetches the model. Ctrl-C stops: running requests may finish first. An executor
that dies is started anew, and requests go on. Needs the extra: pip install 'kvplane\\[executor]'.

Examples:

  kvplane up

  kvplane up --model ~/models/Qwen3-0.6B --port 50052 --max-model-len 4096

  kvplane up --backend sim                        (no weights: try the control plane)

  kvplane up --manager-arg=--log-level --manager-arg=debug
"""
_EXECUTOR = "Executor"
_MANAGER = "Manager"
_STOP_SECONDS = 10.0
_PROBE_PAUSE = 0.3
_EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def up(
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="smollm2, a folder, a GGUF file or a hub id. Default: smollm2; sim: none."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address the manager listens on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0 chooses a free one.")] = 50051,
    backend: Annotated[str, typer.Option("--backend", help="torch or sim.", rich_help_panel=_EXECUTOR)] = "torch",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Type to compute in, such as float32.", rich_help_panel=_EXECUTOR)
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Memory to count on, such as 4GiB.", rich_help_panel=_EXECUTOR)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory-utilization", help="Share of that memory to use, 0 to 1.", rich_help_panel=_EXECUTOR
        ),
    ] = None,
    num_blocks_override: Annotated[
        int | None,
        typer.Option("--num-blocks-override", help="KV blocks, instead of measuring.", rich_help_panel=_EXECUTOR),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Tokens per KV block.", rich_help_panel=_EXECUTOR)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Most tokens of a sequence.", rich_help_panel=_EXECUTOR)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", help="Most tokens a step.", rich_help_panel=_MANAGER)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", help="Most requests running at once.", rich_help_panel=_MANAGER)
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="fcfs or priority.", rich_help_panel=_MANAGER)] = None,
    manager_arg: Annotated[
        list[str] | None,
        typer.Option("--manager-arg", help="Passed to the manager as it is. Repeat.", rich_help_panel=_MANAGER),
    ] = None,
    executor_arg: Annotated[
        list[str] | None,
        typer.Option("--executor-arg", help="Passed to the executor as it is. Repeat.", rich_help_panel=_EXECUTOR),
    ] = None,
    restart_executor: Annotated[
        bool, typer.Option("--restart-executor/--no-restart-executor", help="Start a dead executor anew.")
    ] = True,
    drain_seconds: Annotated[float, typer.Option("--drain-seconds", min=0, help="For running requests.")] = 30.0,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", help="Folder for logs. Default: ~/.local/state/kvplane/PORT.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show both logs here.")] = False,
    as_json: opt.JsonFlag = False,
) -> None:
    """Start a server; the help text is _HELP."""
    executor_flags = {
        "--backend": backend,
        "--dtype": dtype,
        "--memory-limit": memory_limit,
        "--gpu-memory-utilization": gpu_memory_utilization,
        "--num-blocks-override": num_blocks_override,
        "--block-size": block_size,
        "--max-model-len": max_model_len,
    }
    manager_flags = {
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--max-num-seqs": max_num_seqs,
        "--policy": policy,
        "--drain-timeout-s": drain_seconds,
    }
    settings = SupervisorSettings(restart_executor=restart_executor, drain_seconds=drain_seconds + _STOP_SECONDS)
    with reported(as_json):
        port = _free_port(host, port)
        address = server_address(host, port)
        logs = _log_folder(state_dir, port)
        path = _resolved_model(model, backend)
        manager = ChildSpec("manager", manager_argv(host, port, manager_flags, manager_arg or []), logs / "manager.log")
        executor = ChildSpec(
            "executor", executor_argv(path, address, executor_flags, executor_arg or []), logs / "executor.log"
        )
        view = UpView(address, err_console(), as_json=as_json)
        code = asyncio.run(_supervise(manager, executor, view, settings, address=address, verbose=verbose))
    raise typer.Exit(code)


up.__doc__ = _HELP


def server_address(host: str, port: int) -> str:
    """Returns where clients on this machine reach a manager that listens there."""
    if host in ("0.0.0.0", "::", "127.0.0.1"):  # noqa: S104 - compared with, not bound to
        return f"localhost:{port}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def manager_argv(host: str, port: int, flags: Mapping[str, object], extra: list[str]) -> list[str]:
    """Returns the manager's command line."""
    fixed = ["--host", host, "--port", str(port), "--log-format", "json"]
    return [sys.executable, "-m", "kvmanager_service", *fixed, *_given(flags), *extra]


def executor_argv(model: str | None, manager: str, flags: Mapping[str, object], extra: list[str]) -> list[str]:
    """Returns the executor's command line."""
    fixed = ["--manager", manager, "--port", "0", "--log-format", "json"]
    named = ["--model", model] if model is not None else []
    return [sys.executable, "-m", "executor_service", *named, *fixed, *_given(flags), *extra]


def _given(flags: Mapping[str, object]) -> list[str]:
    return [item for name, value in flags.items() if value is not None for item in (name, str(value))]


def _resolved_model(model: str | None, backend: str) -> str | None:
    """Returns the model the executor is given; a known one is fetched when absent."""
    if model is None and backend == "sim":
        return None
    name = model or "smollm2"
    if name in KNOWN_MODELS and not Path(name).exists() and installed_path(name) is None:
        err_console().print(f"[dim]fetching {KNOWN_MODELS[name].about}[/dim]")
    return resolve(name)


def _free_port(host: str, port: int) -> int:
    """Checks that the port can be listened on, or finds one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommandError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
        chosen: int = probe.getsockname()[1]
    return chosen


def _log_folder(state_dir: Path | None, port: int) -> Path:
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state_dir or home / "kvplane" / str(port)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write logs to {folder}: {error.strerror}; choose another --state-dir") from error
    return folder


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


_MISSING = {
    "connection": "the manager does not answer yet",
    "health": "no executor is ready yet",
    "model": "no model is known yet",
}


class ServerProbe:
    """Asks the server whether an executor serves that did not serve before.

    Args:
        client: A client that does not retry.
        seconds: How long one question may take.
    """

    def __init__(self, client: AsyncClient, seconds: float = 1.0) -> None:
        self._client = client
        self._seconds = seconds
        self._served_before: set[str] = set()

    async def __call__(self) -> Model | str:
        """Returns the model, or what is missing."""
        try:
            model = await self._client.wait_ready(self._seconds)
            executors = await self._client.list_executors()
        except UnavailableError as error:
            return _MISSING.get(error.metadata.get("missing", ""), error.message)
        active = {info.executor_id for info in executors if info.state is ExecutorState.ACTIVE}
        if active <= self._served_before:
            await asyncio.sleep(_PROBE_PAUSE)
            errors = [info.last_error for info in executors if info.last_error]
            return errors[-1] if errors else "the executor is not in use yet"
        self._served_before |= active
        return model
