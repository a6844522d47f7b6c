"""The gRPC methods of `ExecutorService`: check, call, map the error.

Station: called by grpc.aio; calls `kv_session` through the compute thread, and `step_runner` for steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import numpy as np
import structlog
from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1 import executor_service_pb2_grpc as pb_grpc

from executor_service.adapters import LoadedAdapter
from executor_service.backends.base import (
    STATE,
    KvGroupSpec,
    MemoryProfile,
    ModelInfo,
    NotEnoughMemoryError,
    chunk_size,
)
from executor_service.block_tags import portions
from executor_service.compute_thread import ComputeThread, in_daemon_thread
from executor_service.errors import ExecutorError, abort_with, as_executor_error
from executor_service.kv_session import KvSession, KvState
from executor_service.step_runner import StepRunner

__all__ = ["ExecutorServicer"]

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]

MAX_EPOCH_DIGITS = 20
EPOCH_KEY = "kvplane-kv-epoch"
"""Metadata of an Execute call: the content that the caller has the books of."""


class ExecutorServicer(pb_grpc.ExecutorServiceServicer):
    """Answers a manager.

    Args:
        session: the executor's state.
        thread: where everything that touches it runs.
        runner: runs steps.
        executor_id: unique to this run.
        backend_name: the registered name.
        on_memory_refused: told, on the loop, that not even one sequence fits into the memory.
    """

    def __init__(
        self,
        session: KvSession,
        thread: ComputeThread,
        runner: StepRunner,
        executor_id: str,
        backend_name: str,
        *,
        on_memory_refused: Callable[[], object],
    ) -> None:
        self._session = session
        self._thread = thread
        self._runner = runner
        self._executor_id = executor_id
        self._backend_name = backend_name
        self._on_memory_refused = on_memory_refused
        self._loading = asyncio.Lock()
        self._loads: set[asyncio.Future[LoadedAdapter]] = set()

    async def GetModelInfo(  # noqa: N802, D102 - named and described by the proto
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        # Not through the compute thread: a manager that reconnects need not wait for a long step.
        try:
            info, cache = self._session.model_info, self._session.cache
        except ExecutorError as error:
            await abort_with(context, error)
        response = _model_info(info, self._executor_id, self._backend_name)
        if cache is not None:
            response.kv_cache.CopyFrom(_kv_cache(cache))
        if request.include_tokenizer_files:
            for name, content in info.tokenizer_files.items():
                response.tokenizer_files.add(name=name, content=content)
        return response

    async def ProfileMemory(  # noqa: N802, D102
        self, request: pb.ProfileMemoryRequest, context: _Context
    ) -> pb.ProfileMemoryResponse:
        profile = await self._call(context, self._profile, request.max_num_batched_tokens, request.max_num_seqs)
        return pb.ProfileMemoryResponse(
            total_bytes=profile.total_bytes,
            utilization=profile.utilization,
            weights_bytes=profile.weights_bytes,
            peak_bytes=profile.peak_bytes,
            available_bytes=profile.available_bytes,
            bytes_per_block=profile.bytes_per_block,
            num_blocks=profile.num_blocks,
            overridden=profile.overridden,
            num_host_blocks=profile.num_host_blocks,
        )

    async def InitializeKvCache(  # noqa: N802, D102
        self, request: pb.InitializeKvCacheRequest, context: _Context
    ) -> pb.InitializeKvCacheResponse:
        await self._call(context, self._session.require_known_block_sizes, request.knows_group_block_sizes)
        cache = await self._call(context, self._session.initialize, request.num_blocks, request.num_host_blocks)
        return pb.InitializeKvCacheResponse(kv_cache=_kv_cache(cache))

    # The stub type knows the generator form only; this one writes, so that the runner decides when.
    async def Execute(  # type: ignore[override]  # noqa: N802, D102
        self, request_iterator: AsyncIterator[pb.ExecuteRequest], context: _Context
    ) -> None:
        try:
            _ = self._session.model_info
            with self._runner.open_stream(_epoch_of(context)) as stream:
                await stream.pump(request_iterator, context.write)
        except ExecutorError as error:
            await abort_with(context, error)

    async def ListBlockTags(  # noqa: N802, D102
        self, request: pb.ListBlockTagsRequest, context: _Context
    ) -> AsyncIterator[pb.ListBlockTagsResponse]:
        await self._call(context, self._session.require_known_block_sizes, request.knows_group_block_sizes)
        tags = await self._call(context, self._session.list_tags, request.kv_epoch)
        for block_ids, values in portions(tags):
            # A reset between two portions makes the rest of the copy a list of what is gone.
            await self._call(context, self._session.require_cache, request.kv_epoch)
            column = common_pb2.Int32Array(data=np.array(block_ids, dtype="<i4").tobytes())
            yield pb.ListBlockTagsResponse(block_tags=pb.BlockTags(block_ids=column, tags=values))

    async def Reset(  # noqa: N802, D102
        self, request: pb.ResetRequest, context: _Context
    ) -> pb.ResetResponse:
        cache = await self._call(context, self._session.reset, request.kv_epoch)
        return pb.ResetResponse(kv_cache=_kv_cache(cache))

    async def LoadAdapter(  # noqa: N802, D102
        self, request: pb.LoadAdapterRequest, context: _Context
    ) -> pb.LoadAdapterResponse:
        # It goes on when the caller has left: memory for what is read is kept free once, and reading cannot be stopped.
        load = asyncio.ensure_future(self._load_adapter(request))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        load.add_done_callback(lambda done: done.cancelled() or done.exception())  # else it is logged as never seen
        try:
            loaded = await asyncio.shield(load)
        except Exception as error:  # noqa: BLE001 - as in _call
            await abort_with(context, as_executor_error(error))
        return pb.LoadAdapterResponse(adapter=_lora_adapter(loaded))

    async def _load_adapter(self, request: pb.LoadAdapterRequest) -> LoadedAdapter:
        adapters = self._session.adapters
        async with self._loading:
            _ = self._session.model_info
            adapters.check_request(request.name, request.source, request.revision)
            # Not in the compute thread: a hub may take minutes, and steps go on.
            content = await in_daemon_thread(adapters.read, request.source)
            return await self._thread.call(adapters.load, request.name, request.source, request.revision, content)

    async def UnloadAdapter(  # noqa: N802, D102
        self, request: pb.UnloadAdapterRequest, context: _Context
    ) -> pb.UnloadAdapterResponse:
        await self._call(context, self._session.adapters.unload, request.name)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802, D102
        self, request: pb.ListAdaptersRequest, context: _Context
    ) -> pb.ListAdaptersResponse:
        loaded = await self._call(context, self._session.adapters.list)
        return pb.ListAdaptersResponse(adapters=map(_lora_adapter, loaded))

    def _profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Profile, in the compute thread; that nothing fits is for the whole process to know."""
        try:
            return self._session.profile(max_num_batched_tokens, max_num_seqs)
        except NotEnoughMemoryError as error:
            _log.error("memory_not_enough", error=str(error))
            self._thread.post(self._on_memory_refused)
            raise

    async def _call(self, context: _Context, function: Callable[..., _T], *args: object) -> _T:
        """Call the session in the compute thread, once the model is loaded; end the call with whatever it raises."""
        try:
            _ = self._session.model_info
            return await self._thread.call(function, *args)
        except Exception as error:  # noqa: BLE001 - mapped to a status; a mistake of ours is logged there
            await abort_with(context, as_executor_error(error))


def _model_info(info: ModelInfo, executor_id: str, backend_name: str) -> pb.GetModelInfoResponse:
    """Say what is served, without the cache and the tokenizer."""
    return pb.GetModelInfoResponse(
        executor_id=executor_id,
        model_name=info.model_name,
        model_fingerprint=info.model_fingerprint,
        backend=backend_name,
        device=info.device,
        dtype=info.dtype,
        kv_cache_dtype=info.kv_cache_dtype,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        block_size=info.block_size,
        kv_groups=[_kv_group(group) for group in info.kv_groups],
        max_logprobs=info.max_logprobs,
        tensor_parallel_size=info.tensor_parallel_size,
        max_adapters=info.max_adapters,
    )


def _lora_adapter(adapter: LoadedAdapter) -> pb.LoraAdapter:
    return pb.LoraAdapter(
        name=adapter.name,
        revision=adapter.revision,
        source=adapter.source,
        adapter_id=adapter.adapter_id,
        rank=adapter.rank,
        size_bytes=adapter.size_bytes,
    )


def _group_type(window: int) -> pb.KvGroupType:
    if window == STATE:
        return pb.KV_GROUP_TYPE_RECURRENT_STATE
    if chunk_size(window):
        return pb.KV_GROUP_TYPE_CHUNKED_LOCAL
    return pb.KV_GROUP_TYPE_SLIDING_WINDOW if window else pb.KV_GROUP_TYPE_FULL_ATTENTION


def _kv_group(group: KvGroupSpec) -> pb.KvGroup:
    return pb.KvGroup(
        type=_group_type(group.window),
        num_layers=group.num_layers,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        bytes_per_block=group.bytes_per_block,
        window=max(group.window, 0),
        chunk=chunk_size(group.window),
        block_size=group.block_size,
    )


def _kv_cache(cache: KvState) -> pb.KvCacheState:
    limits = cache.limits
    return pb.KvCacheState(
        kv_epoch=limits.kv_epoch,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_host_blocks=limits.num_host_blocks,
    )


def _epoch_of(context: _Context) -> int:
    """The epoch that the caller of Execute says it knows; 0, which names none, without or with another text."""
    for key, value in context.invocation_metadata() or ():
        if key == EPOCH_KEY and isinstance(value, str) and value.isascii() and value.isdecimal():
            return int(value[:MAX_EPOCH_DIGITS])
    return 0
