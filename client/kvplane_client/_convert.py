"""From messages of the wire to the values users see.

Station: between the calls and the types; pure functions. An enum value this client does not know (a newer manager)
is an InternalError that names it, not a guess.
"""

from __future__ import annotations

import enum
import struct
from typing import TypeVar

from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import inference_service_pb2 as inference_pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb

from kvplane_client import manager_types as mt
from kvplane_client.errors import InternalError
from kvplane_client.kv_events import KvBlockKeys, KvBlockRemoved, KvBlockStored, KvCacheCleared, KvEvent, KvEventBatch
from kvplane_client.types import FinishReason, StopMatch, TokenLogprob, TokenLogprobs, Usage

__all__ = [
    "adapter_from",
    "block_filter_to",
    "block_from",
    "executor_from",
    "finish_reason_from",
    "kv_batch_from",
    "logprobs_from",
    "model_from",
    "pin_from",
    "pins_from",
    "request_from",
    "stats_from",
    "stop_match_from",
    "trace_from",
    "usage_from",
]

_E = TypeVar("_E", bound=enum.StrEnum)


def finish_reason_from(value: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    """Returns the finish reason, or None for one that is unspecified."""
    if value == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _enum(FinishReason, common_pb2.FinishReason.Name, value, "FINISH_REASON_")


def stop_match_from(response: inference_pb.GenerateResponse) -> StopMatch:
    """Returns the stop token id or the stop string, whichever is set."""
    match response.WhichOneof("stop_match"):
        case "stop_token_id":
            return response.stop_token_id
        case "stop_string":
            return response.stop_string
        case _:
            return None


def usage_from(usage: common_pb2.Usage) -> Usage:
    """Returns the usage."""
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def logprobs_from(response: inference_pb.GenerateResponse) -> tuple[TokenLogprobs, ...]:
    """Returns the log probabilities of a piece of output."""
    return tuple(
        TokenLogprobs(entry.logprob, tuple(TokenLogprob(top.token_id, top.logprob) for top in entry.top))
        for entry in response.logprobs
    )


def model_from(model: inference_pb.GetModelResponse) -> mt.Model:
    """Returns the served model."""
    return mt.Model(
        name=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        max_logprobs=model.max_logprobs,
        has_chat_template=model.has_chat_template,
        has_tokenizer=model.has_tokenizer,
        dtype=model.dtype,
    )


def stats_from(stats: manager_pb.GetStatsResponse) -> mt.Stats:
    """Returns the manager's counters and gauges."""
    return mt.Stats(
        uptime_seconds=stats.uptime_seconds,
        state=_enum(mt.ManagerState, manager_pb.ManagerState.Name, stats.state, "MANAGER_STATE_"),
        pool=_pool_from(stats.pool) if stats.HasField("pool") else None,
        requests_waiting=stats.requests_waiting,
        requests_running=stats.requests_running,
        requests_finished=dict(stats.requests_finished),
        steps=stats.steps,
        steps_failed=stats.steps_failed,
        tokens_computed=stats.tokens_computed,
        tokens_generated=stats.tokens_generated,
        preemptions=stats.preemptions,
        reschedules=stats.reschedules,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        blocks_evicted=stats.blocks_evicted,
        settings=_settings_from(stats.settings),
        tenants=tuple(
            mt.TenantStats(one.tenant, one.requests_waiting, one.requests_running, one.served) for one in stats.tenants
        ),
        swapped_out=stats.swapped_out,
        swapped_in=stats.swapped_in,
    )


def _pool_from(pool: manager_pb.PoolStats) -> mt.PoolStats:
    return mt.PoolStats(
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        free_blocks=pool.free_blocks,
        cached_blocks=pool.cached_blocks,
        kv_epoch=pool.kv_epoch,
        num_host_blocks=pool.num_host_blocks,
        used_host_blocks=pool.used_host_blocks,
        pinned_blocks=pool.pinned_blocks,
        group_block_sizes=tuple(pool.group_block_sizes),
    )


def pin_from(pin: manager_pb.PinnedPrefix) -> mt.PinnedPrefix:
    """Returns one pin."""
    keys = _keys_from(pin.keys) if pin.HasField("keys") else None
    return mt.PinnedPrefix(pin.name, pin.num_tokens, pin.num_blocks, pin.held_blocks, keys)


def adapter_from(adapter: manager_pb.LoraAdapter) -> mt.LoraAdapter:
    """Returns one adapter."""
    return mt.LoraAdapter(
        adapter.name, adapter.revision, adapter.source, adapter.rank, adapter.size_bytes, adapter.requests
    )


def pins_from(response: manager_pb.ListPinnedPrefixesResponse) -> mt.PinnedPrefixes:
    """Returns all pins."""
    return mt.PinnedPrefixes(tuple(map(pin_from, response.pins)), response.max_blocks)


def _settings_from(settings: manager_pb.SchedulerSettings) -> mt.SchedulerSettings:
    return mt.SchedulerSettings(
        policy=settings.policy,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        enable_prefix_caching=settings.enable_prefix_caching,
        queue_ahead=settings.queue_ahead,
        fair_input_weight=settings.fair_input_weight,
        fair_output_weight=settings.fair_output_weight,
        fair_cached_weight=settings.fair_cached_weight,
        isolate_tenants=settings.isolate_tenants,
        preemption_mode=settings.preemption_mode,
    )


def request_from(info: manager_pb.RequestInfo) -> mt.RequestInfo:
    """Returns one listed request."""
    return mt.RequestInfo(
        request_id=info.request_id,
        status=_enum(mt.RequestStatus, manager_pb.RequestStatus.Name, info.status, "REQUEST_STATUS_"),
        priority=info.priority,
        num_prompt_tokens=info.num_prompt_tokens,
        num_output_tokens=info.num_output_tokens,
        num_computed_tokens=info.num_computed_tokens,
        num_cached_tokens=info.num_cached_tokens,
        num_preemptions=info.num_preemptions,
        block_table=tuple(info.block_table),
        age_seconds=info.age_seconds,
        finish_reason=finish_reason_from(info.finish_reason),
        tenant=info.tenant,
        block_tables=tuple(tuple(table.block_ids) for table in info.block_tables),
        adapter=info.adapter,
    )


def block_from(info: manager_pb.BlockInfo) -> mt.BlockInfo:
    """Returns one listed block."""
    return mt.BlockInfo(info.block_id, info.ref_cnt, info.block_hash.hex() or None, info.provisional, info.group)


def trace_from(block_id: int, response: manager_pb.TraceBlockResponse) -> mt.BlockTrace:
    """Returns a block's life."""
    records = tuple(
        mt.BlockRecord(
            order=record.order,
            moment=_enum(mt.BlockMoment, manager_pb.BlockMoment.Name, record.moment, "BLOCK_MOMENT_"),
            request_id=record.request_id or None,
            step_id=record.step_id or None,
            block_hash=record.block_hash.hex() or None,
            group=record.group,
            keys=_keys_from(record.keys) if record.HasField("keys") else None,
        )
        for record in response.records
    )
    # A manager of before there were several says nothing of groups.
    return mt.BlockTrace(block_id, records, response.is_whole, max(1, response.num_groups))


def kv_batch_from(response: manager_pb.WatchKvEventsResponse) -> KvEventBatch:
    """Returns a batch of events."""
    return KvEventBatch(
        response.log_id, tuple(map(_kv_event_from, response.events)), response.next_sequence, response.is_snapshot
    )


def _keys_from(keys: manager_pb.KvBlockKeys) -> KvBlockKeys:
    tenant = keys.tenant if keys.HasField("tenant") else None
    return KvBlockKeys(keys.cache_salt, tenant, keys.lora_id, keys.lora_revision)


def _kv_event_from(event: manager_pb.KvEvent) -> KvEvent:
    kind = event.WhichOneof("event")
    if kind == "stored":
        stored = event.stored
        return KvBlockStored(
            sequence=event.sequence,
            block_id=stored.block_id,
            block_hash=stored.block_hash.hex(),
            parent_block_hash=stored.parent_block_hash.hex() or None,
            content_id=stored.content_id,
            parent_content_id=stored.parent_content_id or None,
            token_ids=struct.unpack(f"<{len(stored.token_ids.data) // 4}i", stored.token_ids.data),
            group=stored.group,
            medium=_medium(stored.medium),
            keys=_keys_from(stored.keys) if stored.HasField("keys") else None,
        )
    if kind == "removed":
        removed = event.removed
        return KvBlockRemoved(
            event.sequence,
            removed.block_id,
            removed.block_hash.hex(),
            removed.content_id,
            removed.group,
            _medium(removed.medium),
        )
    if kind == "cleared":
        return KvCacheCleared(event.sequence)
    raise InternalError(
        f"the server sent event {event.sequence} of a kind this client does not know: expected stored, removed or "
        "cleared; a newer server needs a newer client"
    )


def _medium(value: manager_pb.KvMedium.ValueType) -> str:
    try:
        return manager_pb.KvMedium.Name(value).removeprefix("KV_MEDIUM_").lower()
    except ValueError as error:
        raise InternalError(
            f"the server sent a KvMedium of {value}: expected one this client knows; "
            "a newer server needs a newer client"
        ) from error


def block_filter_to(block_filter: mt.BlockFilter) -> manager_pb.BlockFilter.ValueType:
    """Returns the wire's name of a filter."""
    if block_filter is mt.BlockFilter.ALL:
        return manager_pb.BLOCK_FILTER_UNSPECIFIED
    return manager_pb.BlockFilter.Value(f"BLOCK_FILTER_{block_filter.name}")


def executor_from(info: registry_pb.ExecutorInfo) -> mt.ExecutorInfo:
    """Returns one listed executor."""
    return mt.ExecutorInfo(
        executor_id=info.executor_id,
        address=info.address,
        state=_enum(mt.ExecutorState, registry_pb.ExecutorState.Name, info.state, "EXECUTOR_STATE_"),
        lease_remaining_seconds=info.lease_remaining_ms / 1000,
        last_error=info.last_error or None,
    )


def _enum(cls: type[_E], name_of: object, value: int, prefix: str) -> _E:
    """Finds the member by the wire's name without its prefix."""
    assert callable(name_of)
    try:
        return cls[name_of(value).removeprefix(prefix)]
    except (ValueError, KeyError) as error:
        raise InternalError(
            f"the server sent {prefix}{value} for a {cls.__name__}: expected one of {', '.join(cls)}; "
            "a newer server needs a newer client"
        ) from error
