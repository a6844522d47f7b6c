"""The manager's settings: one frozen object from which flags, environment variables, defaults and help come.

Station: made once by `__main__`, read by everybody, changed by nobody. Precedence: flag, environment, default.
The environment twin of `--max-num-seqs` is `KVPLANE_MANAGER_MAX_NUM_SEQS`.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES

if TYPE_CHECKING:
    EvictionPolicyName = str
else:
    EvictionPolicyName = Literal[tuple(EVICTION_POLICIES)]
    """One of those there are, whoever adds one."""

MAX_INT32 = 2**31 - 1
"""The wire's columns are int32, and so are the limits that the manager tells of itself."""

MIN_STEP_TIMEOUT_S = 1.0

__all__ = ["ENV_PREFIX", "ConfigError", "ManagerConfig", "load_config"]

ENV_PREFIX = "KVPLANE_MANAGER_"

_DESCRIPTION = """\
KVPlane's KV manager: admits requests, owns the block pool, schedules steps and sends them to the executors that
register with it. It serves gRPC (see proto/kvplane/kvmanager/v1); it needs no GPU and no torch."""

_EPILOG = """\
Start a manager, then an executor that registers with it, then ask:
  python -m kvmanager_service --port 50051
  python -m executor_service --manager 127.0.0.1:50051
  kvplane generate "Once upon a time"
Every flag has an environment twin, named in brackets; a flag wins over its twin. SIGTERM or SIGINT drains: new
requests get UNAVAILABLE, running ones may finish within --drain-timeout-s; a second signal stops at once."""


class ConfigError(Exception):
    """A setting is wrong; the message says expected, got and what to do."""


class ManagerConfig(BaseSettings):
    """Settings of one manager process."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(50051, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one.")
    policy: Literal["fcfs", "priority", "fair"] = Field(
        "fcfs",
        description="Order of service: first come first served, lower priority value first, or the tenant first that"
        " was served least.",
    )
    fair_input_weight: float = Field(
        1.0, gt=0.0, le=1000.0, description="What a computed prompt token counts for its tenant under the fair policy."
    )
    fair_output_weight: float = Field(
        2.0, gt=0.0, le=1000.0, description="What a generated token counts for its tenant under the fair policy."
    )
    fair_cached_weight: float = Field(
        0.0,
        ge=0.0,
        le=1000.0,
        description="What a prompt token found in the prefix cache counts under the fair policy; at most"
        " fair_input_weight. 0 charges a tenant for what is computed for it and nothing else.",
    )
    max_num_batched_tokens: int = Field(
        2048,
        ge=1,
        le=MAX_INT32,
        description="Most tokens computed in one step. Bounds the executor's activation memory and the time of a step:"
        " 2048 suits a CPU or a small GPU, 8192 and more a large GPU.",
    )
    max_num_seqs: int = Field(
        256, ge=1, le=MAX_INT32, description="Most requests running at once; at most max_num_batched_tokens."
    )
    max_waiting: int = Field(
        1000,
        ge=1,
        le=MAX_INT32,
        description="Most requests that may wait, each output counted; a further one gets RESOURCE_EXHAUSTED.",
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, le=MAX_INT32, description="Most prompt tokens of one request computed in one step; 0 means no limit."
    )
    enable_prefix_caching: bool = Field(True, description="Keep computed blocks so that later requests can share them.")
    eviction_policy: EvictionPolicyName = Field(
        DEFAULT_EVICTION_POLICY,
        description="Which cached block gives way first: least recently used, least often used, first come, or lowest"
        " retention priority. `kvplane replay` compares them on a trace.",
    )
    max_pinned_fraction: float = Field(
        0.25,
        ge=0.0,
        le=1.0,
        description="Most of the blocks that pinned prefixes may name, as a share of all; a pin beyond gets"
        " RESOURCE_EXHAUSTED.",
    )
    kv_event_buffer: int = Field(
        16_384,
        ge=1,
        le=10_000_000,
        description="How many events of the prefix cache are kept for those who follow it: 0.3 KB each at most. One who"
        " falls farther behind starts anew with a snapshot.",
    )
    block_history: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="How many moments in the lives of blocks are kept for `kvplane blocks trace`: 0.2 KB each. 0 keeps"
        " none and costs nothing.",
    )
    isolate_tenants: bool = Field(
        False,
        description="Share cached blocks only among requests of one tenant. Requests that name none are a tenant, too.",
    )
    api_keys: str = Field(
        "",
        description="TOML file with the keys of tenants, operators and executors (docs/security.md), read anew on"
        " SIGHUP. Without it everybody may call, and name any tenant.",
    )
    tls_certificate: str = Field(
        "", description="PEM file with the certificate of the manager's port and its chain; needs --tls-key."
    )
    tls_key: str = Field("", description="PEM file with the certificate's private key, without a password.")
    queue_ahead: bool = Field(True, description="Send one step before the result of the last is known.")
    watermark: float = Field(
        0.01,
        ge=0.0,
        lt=1.0,
        description="Share of the blocks kept free when a request is admitted, against preemption soon after.",
    )
    preemption_mode: Literal["recompute", "swap", "auto"] = Field(
        "recompute",
        description="What becomes of a preempted request's blocks: computed again, copied to the executor's host memory"
        " and back (start the executor with --swap-space), or whichever was measured to be cheaper.",
    )
    max_pools: int = Field(
        16,
        ge=0,
        le=10_000,
        description="Most pools of engines that run their own loop (the block-table API); 0 refuses all.",
    )
    max_pool_blocks: int = Field(
        1_048_576,
        ge=0,
        le=MAX_INT32,
        description="Most blocks of all those pools together: 0.1 KB each, 0.4 KB while cached.",
    )
    lease_ms: int = Field(
        10_000, ge=300, le=3_600_000, description="How long an executor's registration is valid, in milliseconds."
    )
    executor_timeout_s: float = Field(
        60.0,
        ge=0.0,
        allow_inf_nan=False,
        description="How long running requests wait for a lost executor before they fail UNAVAILABLE, in seconds.",
    )
    step_timeout_s: float = Field(
        300.0,
        ge=0.0,
        allow_inf_nan=False,
        description="How long a step may take until its executor is given up for hung, in seconds, at least 1. A step"
        " of max_num_batched_tokens must fit in it with room to spare; 0 means no limit.",
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0.0,
        allow_inf_nan=False,
        description="How long running requests may take to finish at a stop, in seconds.",
    )
    exit_with_parent: bool = Field(
        False,
        description="End at once when standard input ends: for a program that starts this one and holds the other end.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe event to log.")
    log_format: Literal["console", "json"] = Field("console", description="For people, or one JSON object a line.")

    @field_validator("step_timeout_s")
    @classmethod
    def _check_step_timeout(cls, value: float) -> float:
        if 0 < value < MIN_STEP_TIMEOUT_S:
            raise ValueError(
                f"0 for no limit, or at least {MIN_STEP_TIMEOUT_S:g} s, since less takes an executor for hung that"
                " only had to wait for its turn on a busy machine"
            )
        return value

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs at most max_num_batched_tokens ({self.max_num_batched_tokens}), since each running"
                f" request computes at least one token a step; got {self.max_num_seqs}"
            )
        if self.fair_cached_weight > self.fair_input_weight:
            raise ValueError(
                f"fair_cached_weight at most fair_input_weight ({self.fair_input_weight}), since a token that is found"
                f" costs no more than one that is computed; got {self.fair_cached_weight}"
            )
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError(
                "tls_certificate and tls_key together, or neither for plain text; got"
                f" {'tls_certificate' if self.tls_certificate else 'tls_key'} alone"
            )
        return self


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Run with --help for every flag.")


def load_config(arguments: Sequence[str]) -> ManagerConfig:
    """Build the settings from command-line arguments, the environment and the defaults.

    Args:
        arguments: the arguments after the program's name.

    Raises:
        ConfigError: a flag is unknown or a value is out of range.
        SystemExit: `--help` was asked for; its text is printed and the status is 0.
    """
    given = {name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None}
    try:
        return ManagerConfig(**given)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(entry, given) for entry in error.errors())) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _env(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m kvmanager_service",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, info in ManagerConfig.model_fields.items():
        default = "none" if info.default == "" else info.default
        text = f"{info.description} Default: {default}. [{_env(name)}]".replace("%", "%%")
        if info.annotation is bool:
            parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(_flag(name), metavar=_metavar(info.annotation), default=None, help=text)
    return parser


def _metavar(annotation: Any) -> str:
    choices = typing.get_args(annotation)
    if choices and not isinstance(annotation, types.UnionType):
        return "|".join(choices)
    return str(annotation.__name__).upper()


def _explain(entry: Any, given: dict[str, Any]) -> str:
    """Turn one pydantic error into a line that says where, expected, got and what to do."""
    if not entry["loc"]:
        return f"settings: expected {entry['msg'].removeprefix('Value error, ')}. Change one of the two."
    name = str(entry["loc"][0])
    where = _flag(name) if name in given else f"{_env(name)} in the environment"
    expected = entry["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    default = ManagerConfig.model_fields[name].default
    return f"{where}: expected {expected}; got {entry['input']!r}. Correct it, or leave it out for {default}."
