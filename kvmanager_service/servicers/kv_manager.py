"""KvManagerService: a window on the block pool and the requests.

Station: called by grpc, reads the engine's views, pages and filters them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2_grpc as pb_grpc
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pool_pb

from kvmanager_service.callers import own_tenant
from kvmanager_service.config import ManagerConfig
from kvmanager_service.convert import check_pin_name
from kvmanager_service.core.block_history import BlockMoment, BlockRecord
from kvmanager_service.core.request import RequestStatus
from kvmanager_service.engine_api import (
    AdapterView,
    BlockView,
    Engine,
    EngineStats,
    ManagerState,
    PinView,
    RequestView,
    TenantView,
)
from kvmanager_service.errors import RpcErrors
from kvmanager_service.kv_event_messages import fill_keys, watch
from kvmanager_service.pinning import pin_prefix
from kvmanager_service.request_stream import FINISH_REASONS
from kvmanager_service.servicers import sequences
from kvmanager_service.servicers.paging import page_size, read_block_token, read_request_token, request_token

__all__ = ["KvManagerServicer"]

_STATES = {
    ManagerState.NO_EXECUTOR: pb.MANAGER_STATE_NO_EXECUTOR,
    ManagerState.SERVING: pb.MANAGER_STATE_SERVING,
    ManagerState.DRAINING: pb.MANAGER_STATE_DRAINING,
    ManagerState.BROKEN: pb.MANAGER_STATE_BROKEN,
}
_STATUSES = {
    RequestStatus.WAITING: pb.REQUEST_STATUS_WAITING,
    RequestStatus.RUNNING: pb.REQUEST_STATUS_RUNNING,
    RequestStatus.PREEMPTED: pb.REQUEST_STATUS_PREEMPTED,
    RequestStatus.FINISHED: pb.REQUEST_STATUS_FINISHED,
}
_MOMENTS = {
    BlockMoment.ALLOCATED: pb.BLOCK_MOMENT_ALLOCATED,
    BlockMoment.HASHED: pb.BLOCK_MOMENT_HASHED,
    BlockMoment.FILLED: pb.BLOCK_MOMENT_FILLED,
    BlockMoment.HIT: pb.BLOCK_MOMENT_HIT,
    BlockMoment.FREED: pb.BLOCK_MOMENT_FREED,
    BlockMoment.EVICTED: pb.BLOCK_MOMENT_EVICTED,
    BlockMoment.FORGOTTEN: pb.BLOCK_MOMENT_FORGOTTEN,
    BlockMoment.ADOPTED: pb.BLOCK_MOMENT_ADOPTED,
}
MAX_RECORDS = 1_000
"""Records in one TraceBlock response, the newest."""
MAX_BLOCKS_LOOKED_AT = 10_000
"""Blocks that one ListBlocks call looks at: 10 ms of the loop that all streams share."""

Context = grpc.aio.ServicerContext[Any, Any]


class KvManagerServicer(pb_grpc.KvManagerServiceServicer):
    """Serves what looks at the executors' pool and pins prefixes of it, and the block-table API.

    That is for engines that run their own loop.
    """

    def __init__(self, engine: Engine, config: ManagerConfig, settle: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._pools: sequences.Pools = sequences.Pools(
            config.max_pools, config.max_pool_blocks, isolate_tenants=config.isolate_tenants, settle=settle
        )
        self._settings = pb.SchedulerSettings(
            policy=config.policy,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_waiting=config.max_waiting,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_prefix_caching=config.enable_prefix_caching,
            queue_ahead=config.queue_ahead,
            fair_input_weight=config.fair_input_weight,
            fair_output_weight=config.fair_output_weight,
            fair_cached_weight=config.fair_cached_weight,
            isolate_tenants=config.isolate_tenants,
            preemption_mode=config.preemption_mode,
        )
        self._isolate_tenants = config.isolate_tenants

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:  # noqa: N802
        """Serve `GetStats`; see the proto."""
        async with RpcErrors(context):
            return _to_stats(self._engine.stats(), self._settings)

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:  # noqa: N802
        """Serve `ListRequests`; see the proto."""
        async with RpcErrors(context):
            size = page_size(request.page_size, default=100, most=1_000)
            after = read_request_token(request.page_token)
            views = self._engine.requests(include_finished=request.include_finished)
            tenant = own_tenant()
            views.sort(key=_arrival)
            chosen = [
                view
                for view in views
                if (not request.request_id or view.request_id == request.request_id)
                and (tenant is None or view.tenant == tenant)
                and (after is None or _arrival(view) > after)
            ]
            page = chosen[:size]
            token = request_token(*_arrival(page[-1])) if len(chosen) > size else ""
            return pb.ListRequestsResponse(requests=map(_to_request_info, page), next_page_token=token)

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Context) -> pb.ListBlocksResponse:  # noqa: N802
        """Serve `ListBlocks`; see the proto."""
        async with RpcErrors(context):
            size = page_size(request.page_size, default=1_000, most=10_000)
            start = read_block_token(request.page_token)
            blocks = self._engine.blocks()
            page: list[pb.BlockInfo] = []
            end = min(len(blocks), start + MAX_BLOCKS_LOOKED_AT)
            for index in range(start, end):
                block = blocks[index]
                if not _selects(request.filter, block):
                    continue
                if len(page) == size:
                    return pb.ListBlocksResponse(blocks=page, next_page_token=str(page[-1].block_id))
                page.append(_to_block_info(block))
            return pb.ListBlocksResponse(blocks=page, next_page_token=str(end) if end < len(blocks) else "")

    async def TraceBlock(self, request: pb.TraceBlockRequest, context: Context) -> pb.TraceBlockResponse:  # noqa: N802
        """Serve `TraceBlock`; see the proto."""
        async with RpcErrors(context):
            trace = self._engine.block_trace(request.block_id)
            return pb.TraceBlockResponse(
                records=map(_to_block_record, trace.records[-MAX_RECORDS:]),
                is_whole=not trace.num_dropped and len(trace.records) <= MAX_RECORDS,
                num_groups=trace.num_groups,
            )

    async def WatchKvEvents(  # noqa: N802
        self, request: pb.WatchKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        """Serve `WatchKvEvents`; see the proto."""
        async with RpcErrors(context):
            async for message in watch(self._engine, request):
                yield message

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Context) -> pb.PinPrefixResponse:  # noqa: N802
        """Serve `PinPrefix`; see the proto."""
        async with RpcErrors(context):
            pin = await pin_prefix(self._engine, request, isolate_tenants=self._isolate_tenants)
            return pb.PinPrefixResponse(pin=_to_pinned_prefix(pin))

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Context) -> pb.UnpinPrefixResponse:  # noqa: N802
        """Serve `UnpinPrefix`; see the proto."""
        async with RpcErrors(context):
            check_pin_name(request.name)
            self._engine.unpin_prefix(request.name)
            return pb.UnpinPrefixResponse()

    async def ListPinnedPrefixes(  # noqa: N802
        self, request: pb.ListPinnedPrefixesRequest, context: Context
    ) -> pb.ListPinnedPrefixesResponse:
        """Serve `ListPinnedPrefixes`; see the proto."""
        async with RpcErrors(context):
            view = self._engine.pinned_prefixes()
            return pb.ListPinnedPrefixesResponse(pins=map(_to_pinned_prefix, view.pins), max_blocks=view.max_blocks)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:  # noqa: N802
        """Serve `LoadAdapter`; see the proto."""
        async with RpcErrors(context):
            adapter = await self._engine.load_adapter(request.name, request.source)
            return pb.LoadAdapterResponse(adapter=_to_lora_adapter(adapter))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:  # noqa: N802
        """Serve `UnloadAdapter`; see the proto."""
        async with RpcErrors(context):
            await self._engine.unload_adapter(request.name)
            return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:  # noqa: N802
        """Serve `ListAdapters`; see the proto."""
        async with RpcErrors(context):
            return pb.ListAdaptersResponse(adapters=map(_to_lora_adapter, self._engine.adapters()))

    async def ResetPrefixCache(  # noqa: N802
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        """Serve `ResetPrefixCache`; see the proto."""
        async with RpcErrors(context):
            return pb.ResetPrefixCacheResponse(blocks_forgotten=self._engine.reset_prefix_cache())

    async def OpenPool(self, request: pool_pb.OpenPoolRequest, context: Context) -> pool_pb.OpenPoolResponse:  # noqa: N802
        """Serve `OpenPool`; see the proto."""
        async with RpcErrors(context):
            return await sequences.open_pool(self._pools, request)

    async def ClosePool(self, request: pool_pb.ClosePoolRequest, context: Context) -> pool_pb.ClosePoolResponse:  # noqa: N802
        """Serve `ClosePool`; see the proto."""
        async with RpcErrors(context):
            return sequences.close_pool(self._pools, request)

    async def ListPools(self, request: pool_pb.ListPoolsRequest, context: Context) -> pool_pb.ListPoolsResponse:  # noqa: N802
        """Serve `ListPools`; see the proto."""
        async with RpcErrors(context):
            return sequences.list_pools(self._pools)

    async def UpdateSequences(  # noqa: N802
        self, request: pool_pb.UpdateSequencesRequest, context: Context
    ) -> pool_pb.UpdateSequencesResponse:
        """Serve `UpdateSequences`; see the proto."""
        async with RpcErrors(context):
            return await sequences.update_sequences(self._pools, request)


def _arrival(view: RequestView) -> tuple[float, str]:
    return view.arrival_time, view.request_id


def _selects(wanted: pb.BlockFilter.ValueType, block: BlockView) -> bool:
    if wanted == pb.BLOCK_FILTER_USED:
        return block.ref_cnt > 0
    if wanted == pb.BLOCK_FILTER_CACHED:
        return bool(block.block_hash)
    if wanted == pb.BLOCK_FILTER_FREE:
        return block.ref_cnt == 0
    return True


def _to_stats(stats: EngineStats, settings: pb.SchedulerSettings) -> pb.GetStatsResponse:
    response = pb.GetStatsResponse(
        uptime_seconds=stats.uptime_seconds,
        state=_STATES[stats.state],
        requests_waiting=stats.requests_waiting,
        requests_running=stats.requests_running,
        requests_finished=stats.requests_finished,
        steps=stats.steps,
        steps_failed=stats.steps_failed,
        tokens_computed=stats.tokens_computed,
        tokens_generated=stats.tokens_generated,
        preemptions=stats.preemptions,
        reschedules=stats.reschedules,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        blocks_evicted=stats.blocks_evicted,
        settings=settings,
        tenants=map(_to_tenant_stats, stats.tenants),
        swapped_out=stats.swapped_out,
        swapped_in=stats.swapped_in,
    )
    if stats.pool is not None:
        response.pool.block_size = stats.pool.block_size
        response.pool.num_blocks = stats.pool.num_blocks
        response.pool.free_blocks = stats.pool.free_blocks
        response.pool.cached_blocks = stats.pool.cached_blocks
        response.pool.kv_epoch = stats.pool.kv_epoch
        response.pool.num_host_blocks = stats.pool.num_host_blocks
        response.pool.used_host_blocks = stats.pool.used_host_blocks
        response.pool.pinned_blocks = stats.pool.pinned_blocks
        response.pool.group_block_sizes.extend(stats.pool.group_block_sizes)
    return response


def _to_tenant_stats(view: TenantView) -> pb.TenantStats:
    return pb.TenantStats(
        tenant=view.tenant,
        requests_waiting=view.requests_waiting,
        requests_running=view.requests_running,
        served=view.served,
    )


def _to_request_info(view: RequestView) -> pb.RequestInfo:
    info = pb.RequestInfo(
        request_id=view.request_id,
        status=_STATUSES[view.status],
        priority=view.priority,
        num_prompt_tokens=view.num_prompt_tokens,
        num_output_tokens=view.num_output_tokens,
        num_computed_tokens=view.num_computed_tokens,
        num_cached_tokens=view.num_cached_tokens,
        num_preemptions=view.num_preemptions,
        block_table=view.block_table,
        age_seconds=view.age_seconds,
        tenant=view.tenant,
        block_tables=[pb.GroupBlockTable(block_ids=block_ids) for block_ids in view.block_tables],
        adapter=view.adapter,
    )
    if view.finish_reason is not None and view.finish_reason in FINISH_REASONS:
        info.finish_reason = FINISH_REASONS[view.finish_reason]
    return info


def _to_pinned_prefix(view: PinView) -> pb.PinnedPrefix:
    message = pb.PinnedPrefix(
        name=view.name, num_tokens=view.num_tokens, num_blocks=view.num_blocks, held_blocks=view.held_blocks
    )
    fill_keys(message, view.extra_keys)
    return message


def _to_lora_adapter(view: AdapterView) -> pb.LoraAdapter:
    return pb.LoraAdapter(
        name=view.name,
        revision=view.revision,
        source=view.source,
        rank=view.rank,
        size_bytes=view.size_bytes,
        requests=view.requests,
    )


def _to_block_record(record: BlockRecord) -> pb.BlockRecord:
    message = pb.BlockRecord(
        order=record.order,
        moment=_MOMENTS[record.moment],
        request_id=record.request_id,
        step_id=record.step_id,
        block_hash=record.block_hash,
        group=record.group,
    )
    fill_keys(message, record.extra_keys)
    return message


def _to_block_info(block: BlockView) -> pb.BlockInfo:
    return pb.BlockInfo(
        block_id=block.block_id,
        ref_cnt=block.ref_cnt,
        block_hash=block.block_hash,
        provisional=block.provisional,
        group=block.group,
    )
