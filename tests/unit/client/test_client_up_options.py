"""The values that `kvplane up` lets pass are those that the services take. It may not import them, so a test does."""

from __future__ import annotations

import typing
from typing import Any

import pytest
import typer
from kvplane_client.cli import up_options

from executor_service.backends.registry import known_backends
from executor_service.config import parse_config
from kvmanager_service.config import ConfigError, load_config

MANAGER = {
    "--max-num-seqs": ["1", "2048", "0", "-1", "x", "2147483648"],
    "--max-num-batched-tokens": ["2147483647", "0", "2147483648", "1.5", "256"],
    "--policy": ["fcfs", "priority", "fair", "nonsense", "FAIR", ""],
    "--host": ["127.0.0.1", "localhost", ""],
    "--port": ["0", "65535", "65536", "-1"],
}
EXECUTOR = {
    "--dtype": ["auto", "float32", "bfloat16", "float16", "int8", ""],
    "--kv-cache-dtype": ["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp4", "bfloat16", ""],
    "--memory-limit": ["4GiB", "1", "0", "4 apples", "1.5G", "500MB", "-1"],
    "--gpu-memory-utilization": ["0.9", "1", "0", "1.1", "2", "-0.5", "nan", "inf", "x"],
    "--num-blocks-override": ["2", "1", "0", "x"],
    "--block-size": ["1", "16", "1024", "0", "1025", "-1"],
    "--max-model-len": ["2", "1", "0", "x"],
    "--max-loras": ["0", "1024", "1025", "-1", "x"],
    "--max-lora-rank": ["1", "4096", "4097", "0", "x"],
    "--tensor-parallel-size": ["1", "64", "65", "0", "x"],
}


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(flag, value) for flag, values in table.items() for value in values]


def parsed(flag: str, value: str) -> Any:
    """What the command makes of a value; None is a refusal."""
    options = [typing.get_args(getattr(up_options, name))[1] for name in up_options.__all__]
    (option,) = (option for option in options if flag in (option.default, *option.param_decls))
    try:
        return option.parser(value)
    except typer.BadParameter as error:
        told = error.message
    assert all(part in told for part in ("expected ", ", got ", "; ")), told
    return None


def manager_takes(*flags: str) -> bool:
    try:
        load_config(flags)
    except ConfigError:
        return False
    return True


def executor_takes(*flags: str) -> bool:
    try:
        parse_config(["--backend", "sim", *flags])
    except SystemExit:
        return False
    return True


@pytest.mark.parametrize(("flag", "value"), cases(MANAGER))
def test_manager_takes_exactly_what_the_command_lets_pass(flag: str, value: str) -> None:
    ours = parsed(flag, value)
    assert manager_takes(f"{flag}={value if ours is None else ours}") == (ours is not None)


@pytest.mark.parametrize(("flag", "value"), cases(EXECUTOR))
def test_executor_takes_exactly_what_the_command_lets_pass(flag: str, value: str) -> None:
    ours = parsed(flag, value)
    assert executor_takes(f"{flag}={value if ours is None else ours}") == (ours is not None)


def test_backends_are_those_the_executor_has() -> None:
    assert all(parsed("--backend", name) == name for name in known_backends())
    assert parsed("--backend", "nonsense") is None
