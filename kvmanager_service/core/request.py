"""A request, from the moment the core accepts it.

Station: made by `Scheduler.add_request` from a `NewRequest`; read and written by the scheduler, by what it is made of
and by the `KVCacheManager`, by nobody else.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import BlockHash
from kvmanager_service.core.errors import CoreError
from kvmanager_service.core.extra_keys import LoraAdapter, PromptSpan, SpanKeys, request_keys
from kvmanager_service.core.kv_groups import GroupTable
from kvmanager_service.core.retention import RetentionRange, without_gaps

TOKEN_BYTES = 4
"""Bytes of one token id in `Request.token_bytes`: little-endian int32, as on the wire."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen; every value explicit. Ranges are those of `TokenSampling` in the executor's proto.

    `logit_bias` is pairs of token id and bias. Hashable: a step sends each distinct set of parameters once.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1

    @property
    def has_penalty(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a request ends by its tokens. Stop strings are found where text is made, and end it by `Scheduler.finish`.

    Attributes:
        max_tokens: most output tokens, resumed ones included.
        min_tokens: output tokens before any stop token may end the request.
        stop_token_ids: end-of-sequence (unless ignored) and stop tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class NewBranch:
    """One more sequence of a request, sampled from the same prompt.

    Attributes:
        request_id: what it is called; see `forks.branch_id`.
        seed: its random seed.
        resumed: as `NewRequest.resumed`.
    """

    request_id: str
    seed: int
    resumed: bytes = b""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What a servicer hands to the core.

    Attributes:
        prompt: the prompt's token ids as little-endian int32 bytes.
        resumed: output tokens of an earlier stream, in the same form; they count as output and are not emitted.
        seed: the random seed, drawn by the caller when the client set none.
        arrival_time: seconds on the caller's clock. Only for who looks at requests: it orders listings and tells ages,
            while the core goes by the order in which it accepted them.
        tenant: whose request it is, for the fair policy; empty is a tenant, too.
        is_isolated: whether only requests of the same tenant share its blocks.
        lora: the adapter it runs with; None is the model itself.
        spans: what stands behind prompt tokens, in order and without overlap.
        retention_priority: how much its blocks are worth keeping, in [MIN_RETENTION_PRIORITY, MAX_RETENTION_PRIORITY];
            higher is longer. Only the eviction policy `priority` asks.
        branches: each further sequence that is sampled from the same prompt.
        family_id: what it and its branches are called together; empty means as itself. It is another where the first
            of them ended in an earlier stream.
        fork_of: the request whose blocks it shares where it can; empty means none's. Its tokens, prompt and resumed
            ones, begin with those that are known of that one, or are a beginning of them; the last of the shorter may
            be another.
        retention: the same for ranges of its tokens, and for how long; what none covers has `retention_priority`.
    """

    request_id: str
    prompt: bytes
    stop: StopRules
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""
    resumed: bytes = b""
    arrival_time: float = 0.0
    tenant: str = ""
    is_isolated: bool = False
    lora: LoraAdapter | None = None
    spans: tuple[PromptSpan, ...] = ()
    retention_priority: int = 0
    branches: tuple[NewBranch, ...] = ()
    family_id: str = ""
    fork_of: str = ""
    retention: tuple[RetentionRange, ...] = ()


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request produced its last token."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one output position: the produced token first, then the likeliest, likeliest first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class RequestOutput:
    """What one step brought for one request.

    Attributes:
        token_ids: new output tokens (none when the request ended without one).
        logprobs: one entry per token when the request asked, else empty.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        finish_reason: set in the last output.
        stop_token_id: the token that ended it, when one did.
        error: set when finish_reason is ERROR.
    """

    __slots__ = (
        "error",
        "finish_reason",
        "logprobs",
        "num_cached_tokens",
        "request_id",
        "stop_token_id",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: list[int],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        num_cached_tokens: int = 0,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        error: CoreError | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self.logprobs = logprobs or []
        self.num_cached_tokens = num_cached_tokens
        self.finish_reason = finish_reason
        self.stop_token_id = stop_token_id
        self.error = error


class Request:
    """A request the scheduler owns.

    Attributes:
        arrival_seq: the number it was accepted under: no two have the same, and a later one has a higher. It orders
            requests of one priority, and names the owner of what a step fills.
        arrival_time: as `NewRequest.arrival_time`; no decision goes by it.
        token_bytes: known tokens, prompt then output, little-endian int32; none once it has ended.
        num_tokens: how many tokens are known.
        num_pending_tokens: tokens being sampled by outstanding steps: their ids are not known yet.
        num_swapped_tokens: tokens from which it can go on by what the host holds, see `SwapSpace`; 0 without a copy.
        num_computed_tokens: tokens whose K/V is computed or being computed by an outstanding step.
        blocks: the block table.
        block_id_bytes: the table's block ids as on the wire, little-endian int32.
        last_block_id_bytes: the table it held when it ended; of several KV groups, that of the first.
        block_hashes: chain hashes of the full blocks of known tokens.
        block_tokens: those blocks' tokens; what is cached of them keeps the very same objects.
        lora: the adapter it runs with; None is the model itself.
        extra_keys: what of the request as a whole decides its K/V; keys of its first block.
        spans: what stands behind its tokens; None for nothing.
        retention: ranges that cover all its tokens; None where `retention_priority` is all it asks.
        contents: verified contents of the table's first blocks, those that are cached.
        tables: one block table per KV group where there are several; then blocks and block_id_bytes stay empty, and
            block_tokens stays empty, too, block_hashes and contents are of its prefixes, see `KVCacheCoordinator`.
        is_cacheable: False once a hash collision kept a block out of the cache; its successors have no verified parent.
        may_share_tail: it was forked since it last wrote: the block that its next token goes to may be another's, too.
        incarnation: grows at each preemption, so that a late result of an earlier life is told apart.
        awaited_incarnation: the life before this one, when a step that is out samples for that and the token is still
            the request's: all that it had computed is on its way to the host. Otherwise -1.
        last_step_id: the newest step that has a row of this request.
        last_sample_index: where that step samples this request's token, or -1.
        failed_steps: steps that failed with this request in them since it last came as far as the newest of them.
        failed_at: sequence length that the newest of them was to bring it to.
        family_id: the id of the request that it is a branch of, or has branches of; empty without branches.
        followers: branches that wait, outside the queue, to be forked from it when its first token is sampled.
        leader: whose follower it is, until it is forked.

    Invariants:
        num_computed_tokens <= num_tokens + num_pending_tokens, of which a request that waits has none unless it awaits
        samples of its life before; only tokens up to num_tokens can be hashed;
        a request that is not RUNNING has no blocks, but for a new fork that waits (`ForkHolds`).
    """

    __slots__ = (
        "arrival_seq",
        "arrival_time",
        "awaited_incarnation",
        "block_hashes",
        "block_id_bytes",
        "block_tokens",
        "blocks",
        "contents",
        "extra_keys",
        "failed_at",
        "failed_steps",
        "family_id",
        "finish_reason",
        "followers",
        "incarnation",
        "is_cacheable",
        "last_block_id_bytes",
        "last_sample_index",
        "last_step_id",
        "leader",
        "lora",
        "max_total_tokens",
        "may_share_tail",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_swapped_tokens",
        "num_tokens",
        "priority",
        "request_id",
        "retention",
        "retention_priority",
        "sampling",
        "seed",
        "spans",
        "status",
        "stop_token_ids",
        "tables",
        "tenant",
        "token_bytes",
        "was_admitted",
    )

    def __init__(self, new: NewRequest, arrival_seq: int, branch: NewBranch | None = None) -> None:
        """Make the request itself, or the one of its branches that is given."""
        self.request_id = new.request_id if branch is None else branch.request_id
        self.sampling = new.sampling
        self.stop_token_ids = new.stop.stop_token_ids
        self.min_tokens = new.stop.min_tokens
        self.seed = new.seed if branch is None else branch.seed
        self.priority = new.priority
        self.tenant = new.tenant
        self.arrival_time = new.arrival_time
        self.retention_priority = new.retention_priority
        self.retention = without_gaps(new.retention, new.retention_priority) if new.retention else None
        self.arrival_seq = arrival_seq
        self.lora = new.lora
        self.extra_keys = request_keys(new.cache_salt, new.tenant if new.is_isolated else None, new.lora)
        self.spans = SpanKeys(new.spans) if new.spans else None

        self.token_bytes = bytearray(new.prompt)
        self.token_bytes += new.resumed if branch is None else branch.resumed
        self.num_prompt_tokens = len(new.prompt) // TOKEN_BYTES
        self.num_tokens = len(self.token_bytes) // TOKEN_BYTES
        self.max_total_tokens = self.num_prompt_tokens + new.stop.max_tokens
        self.num_pending_tokens = 0
        self.num_swapped_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0

        self.blocks: list[KVCacheBlock] = []
        self.block_id_bytes = bytearray()
        self.last_block_id_bytes = b""
        self.block_hashes: list[BlockHash] = []
        self.block_tokens: list[bytes] = []
        self.contents: list[BlockContent] = []
        self.is_cacheable = True
        self.may_share_tail = False
        self.tables: list[GroupTable] = []

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.was_admitted = False
        self.incarnation = 0
        self.awaited_incarnation = -1
        self.num_preemptions = 0
        self.last_step_id = 0
        self.last_sample_index = -1
        self.failed_steps = 0
        self.failed_at = 0
        self.family_id = new.family_id or (new.request_id if new.branches else "")
        self.followers: list[Request] = []
        self.leader: Request | None = None

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens, resumed ones included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_schedulable_tokens(self) -> int:
        """Tokens that could be computed in the next step: known or being sampled, and not computed yet.

        None once every token the request may have is known or being sampled.
        """
        total = self.num_tokens + self.num_pending_tokens
        return 0 if total >= self.max_total_tokens else total - self.num_computed_tokens

    def append_token(self, token: bytes) -> None:
        """A sampled token, little-endian int32, became known."""
        self.token_bytes += token
        self.num_tokens += 1

    def drop_tokens(self) -> None:
        """It has ended and will be looked at only: how many tokens there were is kept, which they were is not."""
        self.token_bytes = bytearray()
        self.drop_hashes()

    def drop_hashes(self) -> None:
        """Its blocks are to be hashed anew, if they are asked for: another cache may cut its tokens otherwise."""
        self.block_hashes = []
        self.block_tokens = []

    def tokens(self, start: int, stop: int) -> bytes:
        """Known tokens [start, stop) as little-endian int32 bytes."""
        return bytes(self.token_bytes[start * TOKEN_BYTES : stop * TOKEN_BYTES])

    def keys_of_block(self, index: int, block_size: int) -> bytes:
        """All extra keys of its block `index`."""
        keys = b"" if index else self.extra_keys
        if self.spans is None:
            return keys
        return keys + self.spans.keys_of(index * block_size, (index + 1) * block_size)

    def keys_of_blocks(self, start: int, stop: int, block_size: int) -> list[bytes]:
        """All extra keys of each of its blocks [start, stop)."""
        if self.spans is None:
            keys = [b""] * (stop - start)
        else:
            keys = self.spans.keys_of_blocks(start * block_size, stop * block_size, block_size)
        if start == 0 and stop > 0:
            keys[0] = self.extra_keys + keys[0]
        return keys

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, tokens={self.num_tokens}+{self.num_pending_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={len(self.blocks)})"
        )
