"""What the servicers and the engine loop ask of each other; plain values, no grpc, no core state.

Station: between the servicers (which submit, abort and look) and `engine_loop` (which answers,
with `step_loop` for what is computed). All run on one asyncio loop: no call here blocks, none needs a lock.

Life of a request across this seam:

1. `Engine.submit(request, sink)` accepts it or raises; nothing is pushed before it returns.
2. Once per step that brought something, the engine calls `sink.push(output)`.
3. The request ends when `output.finish_reason` is set, or when `push` returned a `StopMatch`; after either, the engine
   never calls `push` for it again.
4. `Engine.abort(request_id)` ends it early: the sink gets a last output with `FinishReason.ABORT`, before `abort`
   returns or later.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_history import BlockRecord
from kvmanager_service.core.extra_keys import LoraAdapter
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.request import FinishReason, NewRequest, RequestOutput, RequestStatus
from kvmanager_service.kv_events import KvEvents

if TYPE_CHECKING:
    from kvmanager_service.text_model import TextModel

__all__ = [
    "AdapterView",
    "BlockTrace",
    "BlockView",
    "Engine",
    "EngineStats",
    "ManagerState",
    "ModelView",
    "OutputSink",
    "PinView",
    "PinsView",
    "PoolView",
    "RequestView",
    "StopMatch",
    "TenantView",
]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        text: the stop string.
        num_tokens: how many of the pushed output's tokens belong to the request's output; the rest came after the
            match and is dropped.
    """

    text: str
    num_tokens: int


class OutputSink(Protocol):
    """Where a request's output goes."""

    def push(self, output: RequestOutput) -> StopMatch | None:
        """Take what one step brought. Never blocks, never raises.

        Args:
            output: new tokens, or the end, or both.

        Returns:
            The stop string that ends the request, or None to go on. It may also be found by the last output (when
            text that was held back is released): the request then ended by STOP, whatever the output said.
        """


class ManagerState(enum.Enum):
    """Whether requests are admitted; `kvplane.kvmanager.v1.ManagerState`."""

    NO_EXECUTOR = "no_executor"
    SERVING = "serving"
    DRAINING = "draining"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class PoolView:
    """The block pool; `PoolStats`. Block counts leave the null block out.

    Attributes:
        block_size: tokens that hits are multiples of.
        group_block_sizes: tokens per block, by KV group.
    """

    block_size: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    kv_epoch: int
    num_host_blocks: int = 0
    used_host_blocks: int = 0
    pinned_blocks: int = 0
    group_block_sizes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PinView:
    """One pinned prefix; `PinnedPrefix` on the wire. `num_blocks` is full ones, of which it holds `held_blocks` now.

    `extra_keys` is what decides its K/V beside tokens; see `core.block_hash.encode_extra_keys`.
    """

    name: str
    num_tokens: int
    num_blocks: int
    held_blocks: int
    extra_keys: bytes = b""


@dataclass(frozen=True, slots=True)
class PinsView:
    """All pins in the order they were made, and how many blocks they may name together."""

    pins: Sequence[PinView] = ()
    max_blocks: int = 0


@dataclass(frozen=True, slots=True)
class AdapterView:
    """One LoRA adapter; `LoraAdapter` on the wire. `requests` is how many wait or run with it."""

    name: str
    revision: str
    source: str
    rank: int
    size_bytes: int
    requests: int


@dataclass(frozen=True, slots=True)
class TenantView:
    """One tenant with open requests; `TenantStats`."""

    tenant: str
    requests_waiting: int
    requests_running: int
    served: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The manager at one moment; `GetStatsResponse` without its settings, which the servicer has from the config."""

    uptime_seconds: float
    state: ManagerState
    pool: PoolView | None = None
    requests_waiting: int = 0
    requests_running: int = 0
    requests_finished: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    steps_failed: int = 0
    tokens_computed: int = 0
    tokens_generated: int = 0
    preemptions: int = 0
    reschedules: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    blocks_evicted: int = 0
    tenants: Sequence[TenantView] = ()
    swapped_out: int = 0
    swapped_in: int = 0


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request; `RequestInfo`.

    Attributes:
        arrival_time: `NewRequest.arrival_time`; orders the listing.
        age_seconds: time since it arrived.
        finish_reason: set when the request has finished (`ERROR` included).
    """

    request_id: str
    status: RequestStatus
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    block_table: Sequence[int]
    arrival_time: float
    age_seconds: float
    finish_reason: FinishReason | None = None
    tenant: str = ""
    block_tables: Sequence[Sequence[int]] = ()
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block; `BlockInfo`. An empty hash means none."""

    block_id: int
    ref_cnt: int
    block_hash: bytes = b""
    provisional: bool = False
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """What is kept of one block's life, oldest first; `num_dropped` records of any block are not kept any more.

    `num_groups` is how many KV groups there are that records may speak of.
    """

    records: Sequence[BlockRecord]
    num_dropped: int
    num_groups: int = 1


@dataclass(frozen=True, slots=True)
class ModelView:
    """The model being served; `GetModelResponse` and what admission needs beside it. `text` None: no tokenizer."""

    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    dtype: str
    text: TextModel | None = None


class Engine(Protocol):
    """What servicers may ask of the engine loop."""

    def check_open(self) -> None:
        """Raise what `submit` would raise for any request at all: UnavailableError or QueueFullError."""

    def submit(self, request: NewRequest, sink: OutputSink, *branch_sinks: OutputSink) -> None:
        """Accept a request; each of its branches has a sink of its own.

        Raises:
            InvalidRequestError: it can never fit.
            UnknownAdapterError: its adapter is not loaded, or not with these weights.
            DuplicateRequestError: its id is waiting or running.
            QueueFullError: max_waiting requests wait.
            UnavailableError: no executor, draining, or broken.
        """

    def abort(self, request_id: str, tenant: str | None = None) -> None:
        """End a waiting or running request with its branches, or a branch alone; its blocks are free within a step.

        Args:
            request_id: which.
            tenant: whose it must be; None means anybody's.

        Raises:
            UnknownRequestError: no such request is waiting or running.
        """

    def stats(self) -> EngineStats:
        """Return counters and gauges, all of one moment."""

    def requests(self, *, include_finished: bool) -> list[RequestView]:
        """Return waiting and running requests, on demand the last finished ones too, in no order."""

    def blocks(self) -> Sequence[BlockView]:
        """Return all blocks but the null block, so that item i is block i + 1; may be lazy.

        Raises:
            UnavailableError: no pool exists yet.
        """

    def pin_prefix(self, pin: PinnedPrefix) -> PinView:
        """Keep a prefix's blocks, as far as they are cached and when they come to be.

        Raises:
            InvalidRequestError: it is shorter than any hit.
            DuplicatePinError: the name pins another prefix.
            PinLimitError: pins would be too many or name too many blocks.
            PreconditionError: the manager keeps no computed blocks.
            UnavailableError: no pool exists yet.
        """

    def unpin_prefix(self, name: str) -> None:
        """Let go of a pin.

        Raises:
            UnknownPinError: nothing is pinned under that name.
            UnavailableError: no pool exists yet.
        """

    def pinned_prefixes(self) -> PinsView:
        """Return all pins; none before there is a pool."""

    def adapter(self, name: str) -> LoraAdapter:
        """What of a loaded adapter decides K/V.

        Raises:
            UnknownAdapterError: none is loaded under that name.
        """

    async def load_adapter(self, name: str, source: str) -> AdapterView:
        """Load an adapter for requests to name.

        Raises:
            InvalidRequestError: a field will not do, or the executor cannot read or not run it.
            DuplicateAdapterError: other content is loaded under that name.
            AdapterLimitError: the executor has no room for another.
            PreconditionError: it has room for none.
            UnavailableError: no executor, or it was lost meanwhile.
        """

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away.

        Raises:
            InvalidRequestError: no adapter can have that name.
            UnknownAdapterError: none is loaded under it.
            AdapterInUseError: a request waits or runs with it.
        """

    def adapters(self) -> list[AdapterView]:
        """Return the adapters that requests may name, in the order they were loaded."""

    def reset_prefix_cache(self) -> int:
        """Forget every cached hash and return how many there were.

        Raises:
            PoolInUseError: a request holds blocks.
        """

    def block_trace(self, block_id: int) -> BlockTrace:
        """Return what is kept of a block's life.

        Raises:
            PreconditionError: no history is kept.
            InvalidRequestError: there is no such block.
            UnavailableError: no pool exists yet.
        """

    def kv_events(self) -> KvEvents:
        """What changes in the prefix cache; also before there is one."""

    def kv_snapshot(self) -> list[tuple[int, BlockContent]]:
        """Return every block that is filled and can be hit, with what it holds; none before there is a pool."""

    async def switch_executor(self, executor_id: str) -> str:
        """Move on to another executor and return the id of the one before, when the other is active.

        Raises:
            UnknownExecutorError: none of that id is registered.
            ExecutorRejectedError: it cannot be used.
            ExecutorSwitchError: it is active, or was not ready; or another order is carried out.
            UnavailableError: there is no active executor, or it was lost meanwhile.
        """

    def model(self) -> ModelView:
        """Describe the model.

        Raises:
            UnavailableError: before the first executor is ready.
        """
