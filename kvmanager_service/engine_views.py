"""What the engine shows of itself: plain values made from the scheduler's state, all of one moment.

Station: called by `EngineLoop`, which answers servicers with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import overload

from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.core.group_key import group_of
from kvmanager_service.core.kv_cache import KVCache, group_block_sizes, num_groups
from kvmanager_service.core.pinned_prefixes import PinnedPrefix, PinnedPrefixes
from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.engine_api import (
    BlockTrace,
    BlockView,
    EngineStats,
    ManagerState,
    PinsView,
    PinView,
    PoolView,
    RequestView,
    TenantView,
)
from kvmanager_service.errors import PreconditionError

MAX_TENANTS_SHOWN = 1_000


def engine_stats(uptime_seconds: float, state: ManagerState, scheduler: Scheduler | None, kv_epoch: int) -> EngineStats:
    """Counters and gauges; without a scheduler there is nothing to count yet."""
    if scheduler is None:
        return EngineStats(uptime_seconds, state)
    stats, pool, swap_space = scheduler.stats, scheduler.kv.pool, scheduler.swap_space
    return EngineStats(
        uptime_seconds=uptime_seconds,
        state=state,
        pool=PoolView(
            block_size=scheduler.kv.block_size,
            num_blocks=pool.num_usable_blocks,
            free_blocks=pool.num_free_blocks,
            cached_blocks=pool.num_cached_blocks,
            kv_epoch=kv_epoch,
            num_host_blocks=0 if swap_space is None else swap_space.num_host_blocks,
            used_host_blocks=0 if swap_space is None else swap_space.num_used_host_blocks,
            pinned_blocks=scheduler.pins.num_held_blocks,
            group_block_sizes=group_block_sizes(scheduler.kv),
        ),
        requests_waiting=len(scheduler.waiting) + scheduler.book.num_followers,
        requests_running=len(scheduler.running),
        requests_finished=dict(scheduler.book.num_finished),
        steps=stats.steps,
        steps_failed=stats.steps_failed,
        tokens_computed=stats.tokens_computed,
        tokens_generated=stats.tokens_generated,
        preemptions=stats.preemptions,
        reschedules=stats.reschedules,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        blocks_evicted=stats.blocks_evicted + pool.num_evictions,
        tenants=_tenant_views(scheduler),
        swapped_out=stats.swapped_out,
        swapped_in=stats.swapped_in,
    )


def _tenant_views(scheduler: Scheduler) -> list[TenantView]:
    """Tenants with open requests, the most served first."""
    counts: dict[str, list[int]] = {}
    for request in scheduler.requests.values():
        counts.setdefault(request.tenant, [0, 0])[request.status is RequestStatus.RUNNING] += 1
    views = [
        TenantView(tenant, waiting, running, scheduler.waiting.served(tenant))
        for tenant, (waiting, running) in counts.items()
    ]
    views.sort(key=lambda view: (-view.served, view.tenant))
    return views[:MAX_TENANTS_SHOWN]


def request_views(scheduler: Scheduler, now: float, *, include_finished: bool) -> list[RequestView]:
    """Waiting and running requests, and on demand those that ended lately, in no order.

    Args:
        scheduler: whose requests.
        now: seconds on the clock that `NewRequest.arrival_time` was read from.
        include_finished: add the ended ones that are kept.
    """
    requests = list(scheduler.requests.values())
    if include_finished:
        requests += scheduler.book.finished
    return [_request_view(request, now) for request in requests]


def _request_view(request: Request, now: float) -> RequestView:
    is_finished = request.status is RequestStatus.FINISHED
    return RequestView(
        request_id=request.request_id,
        status=request.status,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        block_table=array("i", request.last_block_id_bytes if is_finished else _first_table(request)),
        arrival_time=request.arrival_time,
        age_seconds=max(0.0, now - request.arrival_time),
        finish_reason=request.finish_reason,
        tenant=request.tenant,
        block_tables=[array("i", bytes(table.block_id_bytes)) for table in request.tables],
        adapter="" if request.lora is None else request.lora.lora_id,
    )


def _first_table(request: Request) -> bytes:
    """Of several KV groups that of the first, which is of full attention if any is."""
    return bytes(request.tables[0].block_id_bytes if request.tables else request.block_id_bytes)


def pin_view(pin: PinnedPrefix) -> PinView:
    """One pin as it stands."""
    return PinView(pin.name, pin.num_tokens, len(pin.block_hashes), len(pin.blocks), pin.extra_keys)


def pins_view(pins: PinnedPrefixes) -> PinsView:
    """All pins as they stand."""
    return PinsView([pin_view(pin) for pin in pins], pins.limit)


def block_trace(kv: KVCache, block_id: int) -> BlockTrace:
    """What is kept of a block's life.

    Raises:
        PreconditionError: no history is kept.
        InvalidRequestError: there is no such block.
    """
    pool, history = kv.pool, kv.pool.history
    if history is None:
        raise PreconditionError(
            "NO_BLOCK_HISTORY",
            "expected a manager that keeps the history of its blocks, got one that does not; start it with"
            " --block-history 100000",
        )
    if not 1 <= block_id <= pool.num_usable_blocks:
        raise InvalidRequestError(
            "INVALID_PARAMETER",
            f"block_id: expected 1 to {pool.num_usable_blocks}, got {block_id}; `kvplane blocks --list` shows them",
            field="block_id",
        )
    return BlockTrace(history.of(block_id), history.num_dropped, num_groups(kv))


class BlockViews(Sequence[BlockView]):
    """The pool's blocks, made as they are asked for: a page of a large pool costs no more than a page."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return self._pool.num_usable_blocks

    @overload
    def __getitem__(self, index: int) -> BlockView: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockView]: ...
    def __getitem__(self, index: int | slice) -> BlockView | list[BlockView]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"expected an index below {len(self)}, got {index}")
        block = self._pool.blocks[index + 1]
        group = 0 if block.content is None else group_of(block.content)
        return BlockView(block.block_id, block.ref_cnt, block.block_hash or b"", block.provisional_step != 0, group)
