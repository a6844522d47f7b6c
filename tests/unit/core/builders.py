"""Builders of the core's tests: one per domain object, and a picture of all state to compare before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import HashFunction, default_hash
from kvmanager_service.core.block_history import BlockHistory
from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY
from kvmanager_service.core.extra_keys import LoraAdapter, PromptSpan
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import KVGroup
from kvmanager_service.core.request import NewRequest, Request, RequestOutput, SamplingParams, StopRules, TokenLogprobs
from kvmanager_service.core.retention import RetentionRange
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import Step, StepResult


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Little-endian int32, as the core wants tokens."""
    return b"".join(token_id.to_bytes(4, "little", signed=True) for token_id in token_ids)


def read_int32(data: bytes) -> list[int]:
    """What `token_bytes` wrote."""
    return [int.from_bytes(data[at : at + 4], "little", signed=True) for at in range(0, len(data), 4)]


def make_new(
    request_id: str = "a",
    prompt: Sequence[int] | int = 8,
    *,
    max_tokens: int = 10,
    min_tokens: int = 0,
    stop: Iterable[int] = (),
    sampling: SamplingParams | None = None,
    seed: int = 0,
    priority: int = 0,
    salt: str = "",
    resumed: Sequence[int] = (),
    tenant: str = "",
    is_isolated: bool = False,
    lora: LoraAdapter | None = None,
    spans: Sequence[PromptSpan] = (),
    retention_priority: int = 0,
    retention: Iterable[RetentionRange] = (),
) -> NewRequest:
    """A request; a prompt given as a number is that many tokens, different for each request id."""
    if isinstance(prompt, int):
        first = 1000 * sum(request_id.encode())
        prompt = range(first, first + prompt)
    return NewRequest(
        request_id=request_id,
        prompt=token_bytes(prompt),
        stop=StopRules(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=frozenset(stop)),
        sampling=sampling or SamplingParams(),
        seed=seed,
        priority=priority,
        cache_salt=salt,
        resumed=token_bytes(resumed),
        tenant=tenant,
        is_isolated=is_isolated,
        lora=lora,
        spans=tuple(spans),
        retention_priority=retention_priority,
        retention=tuple(retention),
    )


def make_request(request_id: str = "a", prompt: Sequence[int] | int = 8, **values: Any) -> Request:
    """A request as the core keeps it, for tests below the scheduler; arrival_seq is keyword too."""
    arrival_seq = values.pop("arrival_seq", 0)
    return Request(make_new(request_id, prompt, **values), arrival_seq)


def make_kv(
    num_blocks: int = 11,
    block_size: int = 4,
    *,
    enable_caching: bool = True,
    hash_function: HashFunction = default_hash,
    events: BlockEventLog | None = None,
    history: BlockHistory | None = None,
    eviction_policy: str = DEFAULT_EVICTION_POLICY,
) -> KVCacheManager:
    """A KV cache manager; by default 10 blocks of 4 tokens."""
    return KVCacheManager(
        num_blocks,
        block_size,
        enable_caching=enable_caching,
        hash_function=hash_function,
        events=events,
        history=history,
        eviction_policy=eviction_policy,
    )


def make_scheduler(kv: KVCache | None = None, *, num_host_blocks: int = 0, **limits: Any) -> Scheduler:
    """A scheduler; without limits given, one step at a time and no watermark."""
    config = SchedulerConfig(**({"max_outstanding": 1, "watermark": 0.0} | limits))
    return Scheduler(config, kv or make_kv(), num_host_blocks)


def make_result(
    step: Step,
    tokens: Sequence[int] | Mapping[str, int] | int = 7,
    *,
    failed: Iterable[int] = (),
    logprobs: Mapping[int, TokenLogprobs] | None = None,
    compute_us: int = 0,
    copy_us: int = 0,
) -> StepResult:
    """What an executor answers: the same token for every sample, or one for each, or by request id."""
    failed = set(failed)
    if isinstance(tokens, Mapping):
        tokens = [tokens[row.request.request_id] for row in step.rows if row.sample_index >= 0]
    sampled = [tokens] * step.num_samples if isinstance(tokens, int) else list(tokens)
    for index in failed:
        if step.rows[index].sample_index >= 0:
            sampled[step.rows[index].sample_index] = -1
    return StepResult(
        step_id=step.step_id,
        sampled=sampled,
        computed_upto=[row.start if index in failed else row.stop for index, row in enumerate(step.rows)],
        logprobs=dict(logprobs or {}),
        errors={index: RowFailedError("NON_FINITE_LOGITS", "as the test wants", row=index) for index in failed},
        compute_us=compute_us,
        copy_us=copy_us,
    )


def run_step(scheduler: Scheduler, tokens: Sequence[int] | Mapping[str, int] | int = 7) -> Step:
    """Schedule a step and take its result at once."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(make_result(step, tokens))
    scheduler.check_integrity()
    return step


def rows_of(step: Step | None) -> dict[str, tuple[int, int]]:
    """What a step computes: by request id, first position and number of tokens."""
    assert step is not None
    return {row.request.request_id: (row.start, row.num_tokens) for row in step.rows}


def outputs_of(scheduler: Scheduler) -> dict[str, RequestOutput]:
    """Outputs since the last call; at most one for each request."""
    outputs = scheduler.take_outputs()
    by_id = {output.request_id: output for output in outputs}
    assert len(by_id) == len(outputs)
    return by_id


def block_ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    """Ids, in order."""
    return [block.block_id for block in blocks]


def free_ids(kv: KVCache) -> list[int]:
    """The free queue from head to tail."""
    return block_ids(kv.pool.free_block_queue)


def state_of(subject: object) -> object:
    """A picture of everything reachable from an object of the core, equal to another only if nothing changed.

    Objects are numbered in the order they are met, so that identity is part of the picture.
    """
    numbers: dict[int, int] = {}
    kept: list[object] = []  # so that no id is used twice
    pending: list[object] = []
    picture: list[object] = []

    def reference(value: object) -> object:
        if value is None or isinstance(value, (int, float, str, bytes, type, frozenset)) or callable(value):
            return value
        if isinstance(value, bytearray):
            return ("bytearray", bytes(value))
        if isinstance(value, tuple):
            return tuple(reference(item) for item in value)
        if id(value) not in numbers:
            numbers[id(value)] = len(numbers)
            kept.append(value)
            pending.append(value)
        return ("object", numbers[id(value)])

    reference(subject)
    while pending:
        value = pending.pop(0)
        picture.append((type(value).__name__, _parts(value, reference)))
    return picture


def _parts(value: Any, reference: Any) -> object:
    if isinstance(value, Mapping):
        return [(reference(key), reference(item)) for key, item in value.items()]
    if isinstance(value, (set, list)) or type(value).__name__ == "deque":
        return [reference(item) for item in value]
    names = list(getattr(value, "__dict__", ()))
    names += [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()) if name != "__weakref__"]
    if isinstance(value, BaseException) or not names:
        return repr(value)
    return [(name, reference(getattr(value, name))) for name in sorted(names)]


def chain_of(content: BlockContent | None) -> list[BlockContent]:
    """A content and its parents, the root first."""
    chain: list[BlockContent] = []
    while content is not None:
        chain.append(content)
        content = content.parent
    return chain[::-1]


def make_coordinator(
    groups: Sequence[KVGroup],
    num_blocks: int = 51,
    *,
    longest_chunk: int = 64,
    enable_caching: bool = True,
    hash_function: HashFunction = default_hash,
    events: BlockEventLog | None = None,
    history: BlockHistory | None = None,
    eviction_policy: str = DEFAULT_EVICTION_POLICY,
) -> KVCacheCoordinator:
    """A coordinator over groups; by default 50 blocks and chunks longer than any sequence of these tests."""
    return KVCacheCoordinator(
        num_blocks,
        groups,
        longest_chunk=longest_chunk,
        enable_caching=enable_caching,
        hash_function=hash_function,
        events=events,
        history=history,
        eviction_policy=eviction_policy,
    )


def table_ids(request: Request) -> list[list[int]]:
    """The block ids of all its tables, 0 for null."""
    return [block_ids(table.blocks) for table in request.tables]
