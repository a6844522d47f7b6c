"""What the manager tells about itself: the served model, counters, requests, blocks and executors, as plain values.

Station: the vocabulary of the inspecting calls. Nothing here knows the wire.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvplane_client.kv_events import KvBlockKeys
from kvplane_client.types import FinishReason

__all__ = [
    "BlockFilter",
    "BlockInfo",
    "BlockMoment",
    "BlockRecord",
    "BlockTrace",
    "ExecutorInfo",
    "ExecutorState",
    "LoraAdapter",
    "ManagerState",
    "Model",
    "PinnedPrefix",
    "PinnedPrefixes",
    "PoolStats",
    "RequestInfo",
    "RequestStatus",
    "SchedulerSettings",
    "Stats",
    "TenantStats",
]


class ManagerState(enum.StrEnum):
    """Whether requests are admitted."""

    NO_EXECUTOR = "no_executor"
    SERVING = "serving"
    DRAINING = "draining"
    BROKEN = "broken"


class RequestStatus(enum.StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class ExecutorState(enum.StrEnum):
    """What the manager does with an executor."""

    STANDBY = "standby"
    CONNECTING = "connecting"
    ACTIVE = "active"


class BlockFilter(enum.StrEnum):
    """Which blocks to list."""

    ALL = "all"
    USED = "used"
    """Referenced by a request."""
    CACHED = "cached"
    """With a hash, so that a later request can find them."""
    FREE = "free"
    """Referenced by no request; a free block may be cached."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model being served.

    Attributes:
        name: As the executor was given it.
        max_model_len: The most tokens of one sequence, prompt and output together.
        vocab_size: The number of token ids.
        eos_token_ids: They end a sequence unless ignore_eos is set.
        max_logprobs: The most that logprobs may ask for.
        has_chat_template: Whether a conversation may be sent.
        has_tokenizer: Whether text may be sent.
        dtype: The type it computes in.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    has_chat_template: bool
    has_tokenizer: bool
    dtype: str


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The block pool.

    Attributes:
        block_size: Tokens per block; of KV groups with block sizes of their own their least common multiple, which
            reused prefixes are multiples of.
        num_blocks: Usable blocks.
        free_blocks: Blocks no request and no pin references.
        cached_blocks: Blocks with a hash, free or in use.
        kv_epoch: Names the executor's cache content.
        num_host_blocks: Blocks in host memory that the manager swaps to; 0 where it does not.
        used_host_blocks: Those that hold blocks of preempted requests, or are being copied.
        pinned_blocks: Blocks that pins hold.
        group_block_sizes: Tokens per block of each KV group.
    """

    block_size: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    kv_epoch: int
    num_host_blocks: int
    used_host_blocks: int
    pinned_blocks: int = 0
    group_block_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that is kept from eviction.

    Attributes:
        name: The pin's.
        num_tokens: Tokens of the prefix.
        num_blocks: Full blocks of it, which are what is pinned.
        held_blocks: How many of them are held now; the rest is not cached yet, or any more.
        keys: What the requests that share it have in common beside its tokens; None for nothing.
    """

    name: str
    num_tokens: int
    num_blocks: int
    held_blocks: int
    keys: KvBlockKeys | None = None


@dataclass(frozen=True, slots=True)
class PinnedPrefixes:
    """All pins.

    Attributes:
        pins: In the order they were made.
        max_blocks: How many blocks they may name together; 0 before an executor is ready.
    """

    pins: tuple[PinnedPrefix, ...]
    max_blocks: int


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter that requests may name.

    Attributes:
        name: What requests call it.
        revision: A digest of its weights and settings.
        source: Where executors find it.
        rank: The largest rank of its matrices.
        size_bytes: What its weights take in the executor.
        requests: How many wait or run with it.
    """

    name: str
    revision: str
    source: str
    rank: int
    size_bytes: int
    requests: int


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The limits the scheduler works under; the names are those of the manager's flags."""

    policy: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_waiting: int
    long_prefill_token_threshold: int
    enable_prefix_caching: bool
    queue_ahead: bool
    fair_input_weight: float
    fair_output_weight: float
    fair_cached_weight: float
    isolate_tenants: bool
    preemption_mode: str


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant with a waiting or running request.

    Attributes:
        tenant: As requests name it; empty is that of the requests that name none.
        requests_waiting: Its requests that wait, preempted ones included.
        requests_running: Its requests that hold blocks.
        served: Its counter under the fair policy; only differences mean anything. 0 under the other policies.
    """

    tenant: str
    requests_waiting: int
    requests_running: int
    served: float


@dataclass(frozen=True, slots=True)
class Stats:
    """The manager at one moment; counters run since it started. The fields are those of GetStatsResponse."""

    uptime_seconds: float
    state: ManagerState
    pool: PoolStats | None
    requests_waiting: int
    requests_running: int
    requests_finished: dict[str, int]
    steps: int
    steps_failed: int
    tokens_computed: int
    tokens_generated: int
    preemptions: int
    reschedules: int
    prefix_queries: int
    prefix_hits: int
    blocks_evicted: int
    settings: SchedulerSettings
    tenants: tuple[TenantStats, ...]
    swapped_out: int
    swapped_in: int


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request; the fields are those of the wire's RequestInfo. It never shows prompts or token ids."""

    request_id: str
    status: RequestStatus
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    block_table: tuple[int, ...]
    age_seconds: float
    finish_reason: FinishReason | None
    tenant: str
    block_tables: tuple[tuple[int, ...], ...] = ()
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block.

    Attributes:
        block_id: Its index in the executor's cache.
        ref_cnt: How many requests reference it.
        block_hash: The chain hash in hexadecimal, or None when it is not cached.
        provisional: The step that fills it has not been acknowledged.
        group: The KV group of what block_hash names, counted from 0.
    """

    block_id: int
    ref_cnt: int
    block_hash: str | None
    provisional: bool
    group: int = 0


class BlockMoment(enum.StrEnum):
    """A moment in a block's life."""

    ALLOCATED = "allocated"
    """Handed out to a request, to be written."""
    HASHED = "hashed"
    """It got a hash: the step just decided makes it full."""
    FILLED = "filled"
    """The step that fills it was acknowledged."""
    HIT = "hit"
    """A request found it in the prefix cache."""
    FREED = "freed"
    """A request gave it back."""
    EVICTED = "evicted"
    """It lost its hash as it was handed out for something else."""
    FORGOTTEN = "forgotten"
    """It lost its hash: its step was lost or failed, or the cache was reset."""
    ADOPTED = "adopted"
    """An earlier manager had it filled."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One moment of one block.

    Attributes:
        order: Grows with each record of any block.
        moment: What happened.
        request_id: Whose doing it was, or None.
        step_id: The step that fills it, for HASHED and FILLED, or None.
        block_hash: The chain hash in hexadecimal that it got, had or lost, or None.
        group: The KV group whose table the block was in, or that block_hash is of.
        keys: What beside tokens decided what it held; None for tokens alone, and for all but first blocks.
    """

    order: int
    moment: BlockMoment
    request_id: str | None
    step_id: int | None
    block_hash: str | None
    group: int = 0
    keys: KvBlockKeys | None = None


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """A block's life, oldest first; is_whole when nothing is missing since the cache was set up.

    num_groups is how many KV groups the model has: with 1, a record's group says nothing.
    """

    block_id: int
    records: tuple[BlockRecord, ...]
    is_whole: bool
    num_groups: int = 1


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """One registered executor.

    Attributes:
        executor_id: Unique to one run of it.
        address: Where the manager reaches it.
        state: What the manager does with it.
        lease_remaining_seconds: How long its lease lasts.
        last_error: Why the last attempt to use it failed, or None.
    """

    executor_id: str
    address: str
    state: ExecutorState
    lease_remaining_seconds: float
    last_error: str | None
