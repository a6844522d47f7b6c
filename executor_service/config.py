"""The configuration of an executor process: one frozen object from which flags, environment and help come.

Station: read by `__main__`, which hands parts of it to `server`, `registration` and `backends.registry`. A flag wins
over its environment twin (`KVPLANE_EXECUTOR_<NAME>`), which wins over the default.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from executor_service.logging import LogFormat

__all__ = ["ENV_PREFIX", "ExecutorConfig", "parse_config", "parse_size"]

ENV_PREFIX = "KVPLANE_EXECUTOR_"

_MAX_INT32 = (1 << 31) - 1
_MAX_BLOCKS = 1 << 26
"""Of the sim backend, which makes each of them: so many blocks of 16 tokens take 13 GB."""
_HOST_AND_PORT = re.compile(r".+:[0-9]{1,5}")

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("B", 1000), ("iB", 1024))
}


def parse_size(value: object) -> object:
    """Turn "2GiB", "500MB", "1.5G" or "1048576" into bytes; GB is 1000**3, G and GiB are 1024**3.

    Raises:
        ValueError: not a size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError('a size such as "2GiB", "500MB" or a number of bytes')
    return int(float(match[1]) * _UNITS[match[2]])


def _parse_id_list(value: object) -> object:
    """Turn "1,2" into (1, 2); an empty string is no ids.

    Raises:
        ValueError: a number is missing between commas, or is none, or no int32.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return ()
    numbers = []
    for part in value.split(","):
        if re.fullmatch(r"\s*[+-]?[0-9]{1,10}\s*", part) is None or not -_MAX_INT32 <= int(part) <= _MAX_INT32:
            raise ValueError(f'whole numbers of at most {_MAX_INT32} with commas between them, such as "1,2"')
        numbers.append(int(part))
    return tuple(numbers)


def _check_address(value: str) -> str:
    """Refuse what has no port; empty is no address. Raises ValueError."""
    if value and (_HOST_AND_PORT.fullmatch(value) is None or not 1 <= int(value.rpartition(":")[2]) <= 65_535):
        raise ValueError("host:port such as 10.0.0.5:50051")
    return value


_Address = Annotated[str, AfterValidator(_check_address)]


class ExecutorConfig(BaseSettings):
    """What an executor process is told. `None` means "choose": the model's own value, or what the machine has."""

    # An empty variable counts as unset, as compose files write it: `KVPLANE_EXECUTOR_MANAGER: ${MANAGER:-}`.
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", protected_namespaces=()
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(50061, ge=0, le=65535, description="Port to listen on; 0 chooses a free one.")
    advertise_address: _Address = Field(
        "",
        description="host:port the manager reaches this executor at. Empty: the address it listens on, with the "
        "machine's host name in place of a wildcard host.",
    )
    manager: _Address = Field("", description="host:port of the manager to register with. Empty: do not register.")
    manager_tls: bool = Field(False, description="Use TLS to the manager, with the system's authorities.")
    manager_tls_ca: str = Field("", description="PEM file of certificates to trust; use TLS to the manager with them.")
    manager_api_key_file: str = Field(
        "",
        description="File with the key to register with, where the manager has --api-keys. Empty: KVPLANE_API_KEY of"
        " the environment, if set.",
    )
    executor_id: str = Field(
        default_factory=lambda: f"executor-{secrets.token_hex(6)}",
        min_length=1,
        max_length=128,
        description="Unique to one run of one executor. Default: random.",
    )
    backend: str = Field(
        "torch",
        min_length=1,
        description="What computes: torch, triton (own kernels, on a GPU), sim, an entry point of group"
        " kvplane.backends, or the place of a class, as module:class.",
    )
    model: str = Field("", description="Folder, hub id or GGUF file of the model. The sim backend needs none.")
    model_name: str | None = Field(None, description="Name the model is served under. Default: taken from model.")
    device: str = Field("auto", min_length=1, description="Where to compute: auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="Type to compute in.")
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description="Type K/V is stored in; auto is dtype, fp8 is fp8_e4m3. In eight bits a block takes half of what it"
        " does in bfloat16, and twice as many fit.",
    )
    max_model_len: int | None = Field(None, ge=2, description="Most tokens of a sequence. Default: the model's own.")
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    state_interval: int = Field(
        512,
        ge=1,
        le=65_536,
        description="Tokens between the states that are kept for reuse, of a model whose layers keep one: its blocks"
        " are the least multiple of block_size that is no shorter, and that a state fits into.",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the device's memory (or of memory_limit) the executor may use."
    )
    memory_limit: Annotated[int | None, BeforeValidator(parse_size)] = Field(
        None,
        ge=1,
        description="Memory to count as the device's, such as 2GiB. Default: the GPU's; on a CPU the control group's"
        " limit or half of what is free, whichever is less.",
    )
    swap_space: Annotated[int, BeforeValidator(parse_size)] = Field(
        0,
        ge=0,
        description="Host memory set aside for blocks that are swapped out, such as 4GiB; on a CPU it is part of"
        " memory_limit. 0 for none.",
    )
    max_loras: int = Field(
        0,
        ge=0,
        le=1024,
        description="LoRA adapters that can be loaded at once (`kvplane adapter load`); memory for as many of"
        " max_lora_rank is kept free of KV blocks. 0 for none.",
    )
    max_lora_rank: int = Field(16, ge=1, le=4096, description="Largest rank of a LoRA adapter.")
    num_blocks_override: int | None = Field(
        None, ge=2, le=_MAX_INT32, description="KV blocks (the null block included), in place of what was measured."
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads to compute with, of all processes together. Default: torch's own."
    )
    enforce_eager: bool = Field(
        False,
        description="Launch the kernels of every decode step one by one. Default: on a GPU, and where the backend's"
        " kernels allow it (triton), decode steps are recorded as CUDA graphs and replayed.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that share one model: each has a part of the weights and some of the K/V heads, on a"
        " GPU of its own where there are GPUs.",
    )
    tensor_parallel_timeout_s: float = Field(
        120.0,
        ge=1,
        le=3600,
        description="Seconds such a process waits in a step for the others before all of them end.",
    )
    cache_dir: Path | None = Field(
        None, description="Folder for converted models and compiled kernels. Default: the user's cache folder."
    )
    native_kernels: bool = Field(
        True,
        description="On a CPU, compile kernels for it at the first start, where there is a C++ compiler (CXX, g++ or"
        " clang++); without them, or one, torch's own are used.",
    )
    exit_with_parent: bool = Field(
        False,
        description="End at once when standard input ends: for a program that starts this one and holds the other end.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Lowest level logged.")
    log_format: LogFormat = Field("console", description="console for people, json for one JSON object a line.")
    sim_step_ms: float = Field(
        0.0, ge=0, le=60_000, allow_inf_nan=False, description="sim: how long a step takes, in milliseconds."
    )
    sim_us_per_token: float = Field(
        0.0,
        ge=0,
        le=60_000_000,
        allow_inf_nan=False,
        description="sim: added step time for each token, in microseconds.",
    )
    sim_vocab_size: int = Field(32_000, ge=2, le=_MAX_INT32, description="sim: number of token ids.")
    sim_num_blocks: int = Field(
        4096, ge=2, le=_MAX_BLOCKS, description="sim: KV blocks that are said to fit, null block included."
    )
    sim_eos_token_ids: Annotated[tuple[int, ...], NoDecode, BeforeValidator(_parse_id_list)] = Field(
        (), description='sim: ids that end a sequence, such as "2,5". Default: none.'
    )
    sim_windows: Annotated[tuple[int, ...], NoDecode, BeforeValidator(_parse_id_list)] = Field(
        (),
        description='sim: the window of each KV group in tokens, 0 for full attention, -1 for a state, such as "0,64";'
        " -n for chunks of n tokens. Default: one group of full attention.",
    )
    sim_block_sizes: Annotated[tuple[int, ...], NoDecode, BeforeValidator(_parse_id_list)] = Field(
        (),
        description='sim: tokens per block of each KV group of sim_windows, such as "16,32". Default: block_size in'
        " each.",
    )

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        """Refuse a missing model here, where the flag can be named, rather than after torch was imported."""
        if self.backend in ("torch", "triton") and not self.model:
            raise ValueError(f"a folder, hub id or GGUF file as model for the {self.backend} backend, got none")
        return self


def parse_config(argv: Sequence[str]) -> ExecutorConfig:
    """Build the configuration from flags, environment and defaults; a bad value ends the process with status 2.

    Args:
        argv: the command line without the program's name.

    Raises:
        SystemExit: 0 after --help, 2 after a bad flag or value.
    """
    flags = vars(_build_parser().parse_args(argv))
    try:
        return ExecutorConfig(**flags)
    except ValidationError as error:
        print(_explain(error, set(flags)), file=sys.stderr)
        raise SystemExit(2) from error


def _build_parser() -> argparse.ArgumentParser:
    """Generate the command line from the model's fields."""
    parser = argparse.ArgumentParser(
        prog="python -m executor_service",
        description="The data plane of KVPlane: holds weights and the paged KV cache, and runs the manager's steps.",
        epilog="Each flag has an environment twin, named beside it. A flag wins over it; it wins over the default.",
        allow_abbrev=False,
    )
    for name, field in ExecutorConfig.model_fields.items():
        text = _help(name, field).replace("%", "%%")
        if field.annotation is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(_flag(name), dest=name, action=action, default=argparse.SUPPRESS, help=text)
        else:
            metavar = _metavar(field)
            parser.add_argument(_flag(name), dest=name, default=argparse.SUPPRESS, metavar=metavar, help=text)
    return parser


def _flag(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def _metavar(field: FieldInfo) -> str:
    """Return the choices of a field, or what kind of value it takes."""
    choices = getattr(field.annotation, "__args__", ())
    if any(isinstance(taken, BeforeValidator) and taken.func is _parse_id_list for taken in field.metadata):
        return "N,..."
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    if any(isinstance(taken, BeforeValidator) and taken.func is parse_size for taken in field.metadata):
        return "SIZE"
    return {int: "N", float: "X"}.get(field.annotation, "N" if int in choices else "VALUE")  # type: ignore[arg-type]


def _help(name: str, field: FieldInfo) -> str:
    """Return description, environment twin and default."""
    default = "" if field.default_factory or field.default in (None, "", ()) else f" [default: {field.default}]"
    return f"{field.description} [env: {ENV_PREFIX}{name.upper()}]{default}"


def _explain(error: ValidationError, flags: set[str]) -> str:
    """Say for each bad value what was expected, what was got and what to do."""
    lines = []
    for problem in error.errors():
        # A check over several fields has no location: it speaks of the model.
        name = str(problem["loc"][0]) if problem["loc"] else "model"
        source = _flag(name) if name in flags else f"{ENV_PREFIX}{name.upper()}"
        got = f", got {problem['input']!r}" if problem["loc"] else ""
        expected = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        lines.append(
            f"{source}: expected {expected}{got}. Set {_flag(name)} "
            f"or {ENV_PREFIX}{name.upper()} to such a value; --help describes it."
        )
    return "\n".join(lines)
