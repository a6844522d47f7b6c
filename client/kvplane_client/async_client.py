"""The asynchronous client: every call KVPlane offers to users.

Station: the top of the library. It owns the channel; streams get the stubs from it.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import inference_service_pb2 as inference_pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pool_pb

from kvplane_client import _convert
from kvplane_client._readiness import wait_until_ready
from kvplane_client._request_builder import build_pin, build_request
from kvplane_client._resumable import ResumableRequest
from kvplane_client._stubs import Stubs, task_is_cancelled
from kvplane_client.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    KvPlaneError,
    RequestCancelledError,
    error_from_rpc,
)
from kvplane_client.kv_events import KvEventBatch
from kvplane_client.manager_types import (
    BlockFilter,
    BlockInfo,
    BlockTrace,
    ExecutorInfo,
    LoraAdapter,
    Model,
    PinnedPrefix,
    PinnedPrefixes,
    RequestInfo,
    Stats,
)
from kvplane_client.many import ManyStream
from kvplane_client.retry import Deadline, RetryListener, RetryPolicy, RetryState
from kvplane_client.sequences import SequencePool, SequencePoolInfo, pool_info_from
from kvplane_client.stream import GenerationStream
from kvplane_client.types import Completion, GenerateOptions, Prompt

__all__ = ["AsyncClient"]

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class AsyncClient:
    """A client of one KV manager; an asynchronous context manager.

    Example::

        async with AsyncClient("localhost:50051") as client:
            async for chunk in client.stream("The capital of France is", temperature=0, max_tokens=16):
                print(chunk.text, end="")

    Args:
        target: The manager's address as host:port, or any gRPC target.
        timeout: Seconds a call may take, retries included; for a generation, from its start to its end. None means
            no limit. A generation's own ``deadline`` takes precedence.
        retry: How persistently UNAVAILABLE is answered with a new attempt.
        on_retry: Told of each pause before a new attempt.
        credentials: For TLS, such as ``grpc.ssl_channel_credentials()``. None means plain text.
        api_key: Sent with each call, to a manager with ``--api-keys``. Read it from where secrets are kept.

    Raises:
        ValueError: The key is no visible ASCII text.

    Warns:
        PlainTextKeyWarning: The key would go to another machine without TLS.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout: float | None = None,
        retry: RetryPolicy | None = None,
        on_retry: RetryListener | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
    ) -> None:
        self._stubs = Stubs(target, credentials, api_key)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._on_retry = on_retry
        self._live: weakref.WeakValueDictionary[str, ResumableRequest] = weakref.WeakValueDictionary()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; unfinished requests are aborted."""
        await self._stubs.close()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Generates, piece by piece.

        Args:
            prompt: Text, token ids or a conversation.
            **options: See :class:`GenerateOptions`.

        Returns:
            An asynchronous iterator of chunks. Use it as a context manager where the loop may be left early.

        Raises:
            InvalidArgumentError: A value cannot be sent at all. Other errors come while iterating.
        """
        request = ResumableRequest(build_request(prompt, options))
        self._live[request.request_id] = request
        seconds = options.get("deadline")
        deadline = Deadline(self._timeout if seconds is None else seconds)
        retry = RetryState(self._retry, deadline, self._on_retry)
        return GenerationStream(self._stubs.inference, request, retry, deadline)

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates and returns the whole output.

        Args:
            prompt: Text, token ids or a conversation.
            **options: See :class:`GenerateOptions`; for several outputs there is ``stream(...).completions()``.

        Raises:
            InvalidArgumentError: n is above 1.
            KvPlaneError: The request failed.
        """
        _require_one_output(options)
        async with self.stream(prompt, **options) as stream:
            return await stream.completion()

    def many(self) -> ManyStream:
        """Opens a stream that multiplexes any number of requests: for gateways and batches."""
        return ManyStream(self._stubs.inference, self._new_retry, self._timeout)

    async def generate_batch(
        self, prompts: Iterable[Prompt], *, max_in_flight: int = 256, **options: Unpack[GenerateOptions]
    ) -> list[Completion | KvPlaneError]:
        """Generates for many prompts on one stream.

        Args:
            prompts: The prompts.
            max_in_flight: How many requests to have on the server at once, at least 1; it may refuse too many.
            **options: For every prompt; see :class:`GenerateOptions`. ``request_id`` is a prefix (``id-0``, ``id-1``,
                …) and ``deadline`` holds for the batch.

        Returns:
            For each prompt, in order, its completion or the error that ended it and nothing else.

        Raises:
            ValueError: max_in_flight is below 1.
            InvalidArgumentError: n is above 1; submit such requests to ``many()``.
        """
        _require_one_output(options)
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight: expected at least 1, got {max_in_flight}")
        seconds = options.pop("deadline", None)
        deadline = Deadline(self._timeout if seconds is None else seconds)
        prefix = options.pop("request_id", None)
        gate = asyncio.Semaphore(max_in_flight)
        async with self.many() as many:

            async def run_one(index: int, prompt: Prompt) -> Completion | KvPlaneError:
                own_id = f"{prefix}-{index}" if prefix else None
                async with gate:
                    own = GenerateOptions(**options, request_id=own_id, deadline=deadline.remaining())
                    try:
                        return await many.submit(prompt, **own).completion()
                    except KvPlaneError as error:
                        return error

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run_one(index, prompt)) for index, prompt in enumerate(prompts)]
        return [task.result() for task in tasks]

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last chunk with finish_reason ABORT.

        Args:
            request_id: As given or reported. A stream of this client that was resumed is found by its first id.

        Raises:
            NotFoundError: No such request is waiting or running.
        """
        live = self._live.get(request_id)
        wire_id = live.wire_id if live is not None else request_id
        await self._unary(self._stubs.inference.Abort, inference_pb.AbortRequest(request_id=wire_id))

    async def get_model(self) -> Model:
        """Returns the model being served."""
        return _convert.model_from(await self._unary(self._stubs.inference.GetModel, inference_pb.GetModelRequest()))

    async def get_stats(self) -> Stats:
        """Returns the manager's counters and gauges, all of one moment."""
        return _convert.stats_from(await self._unary(self._stubs.manager.GetStats, manager_pb.GetStatsRequest()))

    async def list_requests(
        self, *, include_finished: bool = False, request_id: str = "", page_size: int = 0
    ) -> AsyncIterator[RequestInfo]:
        """Lists requests, oldest arrival first, fetching page after page as they are consumed.

        Args:
            include_finished: Adds those that finished lately.
            request_id: Selects one request.
            page_size: Requests to fetch at a time, at most 1,000; 0 leaves it to the server.
        """
        request = manager_pb.ListRequestsRequest(
            include_finished=include_finished, request_id=request_id, page_size=page_size
        )
        while True:
            page = await self._unary(self._stubs.manager.ListRequests, request)
            for info in page.requests:
                yield _convert.request_from(info)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def list_blocks(
        self, block_filter: BlockFilter = BlockFilter.ALL, *, page_size: int = 0
    ) -> AsyncIterator[BlockInfo]:
        """Lists blocks by block id, fetching page after page as they are consumed.

        Args:
            block_filter: Which blocks.
            page_size: Blocks to fetch at a time, at most 10,000; 0 leaves it to the server.
        """
        request = manager_pb.ListBlocksRequest(filter=_convert.block_filter_to(block_filter), page_size=page_size)
        while True:
            page = await self._unary(self._stubs.manager.ListBlocks, request)
            for info in page.blocks:
                yield _convert.block_from(info)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def trace_block(self, block_id: int) -> BlockTrace:
        """Returns what became of a block, as far back as the manager keeps it.

        Raises:
            FailedPreconditionError: The manager keeps no history.
            InvalidArgumentError: There is no such block.
        """
        request = manager_pb.TraceBlockRequest(block_id=block_id)
        return _convert.trace_from(block_id, await self._unary(self._stubs.manager.TraceBlock, request))

    async def pin_prefix(
        self, name: str, prefix: str | Sequence[int], *, cache_salt: str = "", tenant: str = "", adapter: str = ""
    ) -> PinnedPrefix:
        """Keeps the full blocks of a prefix from eviction, for as long as the manager runs or until it is unpinned.

        It computes nothing: what is not cached yet is held once a request has computed it.

        Args:
            name: The pin's, 1 to 256 characters. Pinning the same prefix under it again changes nothing.
            prefix: What prompts begin with, as text or token ids.
            cache_salt: That of the requests which share it.
            tenant: That of the requests which share it, where the manager keeps tenants apart.
            adapter: The LoRA adapter, with the weights it has now, of the requests which share it.

        Raises:
            AlreadyExistsError: The name pins another prefix.
            NotFoundError: No such adapter is loaded.
            ResourceExhaustedError: Pins may not name so many blocks.
            InvalidArgumentError: The prefix is shorter than a block, or a value is out of range.
            FailedPreconditionError: The manager caches nothing, or the model has no tokenizer for text.
        """
        request = build_pin(name, prefix, cache_salt, tenant, adapter)
        return _convert.pin_from((await self._unary(self._stubs.manager.PinPrefix, request)).pin)

    async def unpin_prefix(self, name: str) -> None:
        """Lets go of a pinned prefix; its blocks stay cached until they are evicted.

        Raises:
            NotFoundError: Nothing is pinned under that name.
        """
        await self._unary(self._stubs.manager.UnpinPrefix, manager_pb.UnpinPrefixRequest(name=name))

    async def list_pinned_prefixes(self) -> PinnedPrefixes:
        """Returns all pins, in the order they were made, and how many blocks they may name."""
        request = manager_pb.ListPinnedPrefixesRequest()
        return _convert.pins_from(await self._unary(self._stubs.manager.ListPinnedPrefixes, request))

    async def load_adapter(self, name: str, source: str) -> LoraAdapter:
        """Loads a LoRA adapter, for requests to name in ``adapter``, until it is unloaded.

        Each executor that takes over loads it too, at the same revision. It may take minutes if the executor has to
        fetch it from a hub: give the client a timeout to match.

        Args:
            name: What requests call it, 1 to 256 characters. Loading the same content under it again changes nothing.
            source: A folder on the executors' machines, as peft saves it, or a hub id.

        Raises:
            InvalidArgumentError: The executor cannot read it, or not run it.
            AlreadyExistsError: Other content is loaded under that name.
            ResourceExhaustedError: The executor has no room for another.
            FailedPreconditionError: It has room for none.
        """
        request = manager_pb.LoadAdapterRequest(name=name, source=source)
        return _convert.adapter_from((await self._unary(self._stubs.manager.LoadAdapter, request)).adapter)

    async def unload_adapter(self, name: str) -> None:
        """Takes a LoRA adapter away.

        Raises:
            NotFoundError: None is loaded under that name.
            FailedPreconditionError: A request waits or runs with it.
        """
        await self._unary(self._stubs.manager.UnloadAdapter, manager_pb.UnloadAdapterRequest(name=name))

    async def list_adapters(self) -> list[LoraAdapter]:
        """Returns the LoRA adapters that requests may name, in the order they were loaded."""
        response = await self._unary(self._stubs.manager.ListAdapters, manager_pb.ListAdaptersRequest())
        return [_convert.adapter_from(adapter) for adapter in response.adapters]

    async def reset_prefix_cache(self) -> int:
        """Forgets every cached block.

        Returns:
            How many blocks lost their hash.

        Raises:
            FailedPreconditionError: A request holds blocks.
        """
        request = manager_pb.ResetPrefixCacheRequest()
        return (await self._unary(self._stubs.manager.ResetPrefixCache, request)).blocks_forgotten

    async def watch_kv_events(
        self,
        *,
        log_id: str = "",
        from_sequence: int = 0,
        include_token_ids: bool = False,
        include_keys: bool = False,
    ) -> AsyncIterator[KvEventBatch]:
        """Follows the prefix cache, without an end; :class:`KvCacheIndex` keeps what the batches tell.

        A stream that breaks raises what broke it: go on from the last batch's ``log_id`` and ``next_sequence``.

        Args:
            log_id: Of the batch that from_sequence was taken from; empty starts with a snapshot.
            from_sequence: The first event wanted; 0 starts with a snapshot.
            include_token_ids: Adds the tokens of stored blocks: they are what users wrote.
            include_keys: Adds what else decides who shares them: salts, tenants and adapters.

        Raises:
            OutOfRangeError: Those events are not kept any more, or are another run's: start with a snapshot.
            UnavailableError: The manager cannot be reached, or stops.
        """
        request = manager_pb.WatchKvEventsRequest(
            log_id=log_id,
            from_sequence=from_sequence,
            include_token_ids=include_token_ids,
            include_keys=include_keys,
        )
        call = self._stubs.manager.WatchKvEvents(request)
        try:
            async for response in call:
                yield _convert.kv_batch_from(response)
        except grpc.aio.AioRpcError as rpc_error:
            raise error_from_rpc(rpc_error) from rpc_error
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise RequestCancelledError("the client was closed while the cache was followed") from None
        finally:
            call.cancel()

    async def open_pool(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        pool_id: str = "",
        enable_prefix_caching: bool = True,
        eviction_policy: str = "",
        lease_seconds: float = 0,
    ) -> SequencePool:
        """Opens a pool of block tables for an engine that runs its own loop; see :mod:`kvplane_client.sequences`.

        Args:
            num_blocks: Blocks of the engine's memory, the null block (id 0) included.
            block_size: Tokens per block.
            pool_id: Names the pool; empty draws a name.
            enable_prefix_caching: Whether blocks are kept for later sequences.
            eviction_policy: Which of them gives way first; empty means lru.
            lease_seconds: How long the pool outlives the last call; 0 means a minute.

        Raises:
            InvalidArgumentError: A value is out of range.
            AlreadyExistsError: A pool of that id is open: perhaps your own, when the answer to an attempt was lost.
            ResourceExhaustedError: There are too many pools, or blocks in all of them.
        """
        request = pool_pb.OpenPoolRequest(
            pool_id=pool_id or f"pool-{secrets.token_hex(16)}",
            num_blocks=num_blocks,
            block_size=block_size,
            disable_prefix_caching=not enable_prefix_caching,
            eviction_policy=eviction_policy,
            lease_ms=round(lease_seconds * 1e3),
        )
        while True:
            try:
                opened = await self._unary(self._stubs.manager.OpenPool, request)
                info = pool_info_from(opened.pool)
                break
            except AlreadyExistsError:
                if pool_id:
                    raise
                # Nobody else has drawn this name: an earlier attempt made the pool, and its answer was lost.
                found = [pool for pool in await self.list_pools() if pool.pool_id == request.pool_id]
                if found:
                    info = found[0]
                    break
                request.pool_id = f"pool-{secrets.token_hex(16)}"  # that attempt has not come to its end
        return SequencePool(info, self._update_sequences, self._close_pool)

    async def list_pools(self) -> list[SequencePoolInfo]:
        """Returns the open pools of engines that run their own loop."""
        response = await self._unary(self._stubs.manager.ListPools, pool_pb.ListPoolsRequest())
        return [pool_info_from(pool) for pool in response.pools]

    async def _update_sequences(self, request: pool_pb.UpdateSequencesRequest) -> pool_pb.UpdateSequencesResponse:
        return await self._unary(self._stubs.manager.UpdateSequences, request)

    async def _close_pool(self, pool_id: str) -> None:
        await self._unary(self._stubs.manager.ClosePool, pool_pb.ClosePoolRequest(pool_id=pool_id))

    async def list_executors(self) -> Sequence[ExecutorInfo]:
        """Returns the executors whose lease is valid, in order of registration."""
        response = await self._unary(self._stubs.registry.ListExecutors, registry_pb.ListExecutorsRequest())
        return [_convert.executor_from(info) for info in response.executors]

    async def switch_executor(self, executor_id: str) -> str:
        """Moves on to another executor on purpose; what runs is computed anew there, and streams go on.

        Returns when that one is active. A call that ends early, by the client's timeout or otherwise, does not take the
        order back: :meth:`list_executors` shows how it ended.

        Args:
            executor_id: Of an executor that stands by, as :meth:`list_executors` has it.

        Returns:
            The id of the executor that was active before, which stands by now.

        Raises:
            NotFoundError: No executor of that id is registered.
            FailedPreconditionError: It is active already, cannot be used, or was not ready; or another order is carried
                out.
            UnavailableError: There is no active executor, or it was lost meanwhile.
        """
        request = registry_pb.SwitchExecutorRequest(executor_id=executor_id)
        return (await self._unary(self._stubs.registry.SwitchExecutor, request)).previous_executor_id

    async def wait_ready(self, timeout: float | None = None) -> Model:  # noqa: ASYNC109 - bounds polling, not one await
        """Waits until the manager is reachable, healthy and serves a model.

        Args:
            timeout: Seconds; None waits for ever.

        Returns:
            The model being served.

        Raises:
            UnavailableError: It is not ready in time; the message says what it was waiting for.
        """
        return _convert.model_from(await wait_until_ready(self._stubs, Deadline(timeout)))

    def _new_retry(self, deadline: float | None) -> RetryState:
        return RetryState(self._retry, Deadline(deadline), self._on_retry)

    async def _unary(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response], request: _Request
    ) -> _Response:
        """Calls a method, again after UNAVAILABLE."""
        deadline = Deadline(self._timeout)
        retry = RetryState(self._retry, deadline, self._on_retry)
        while True:
            try:
                return await method(request, timeout=deadline.remaining())
            except grpc.aio.AioRpcError as rpc_error:
                await retry.pause_or_raise(error_from_rpc(rpc_error))
            except asyncio.CancelledError:
                if task_is_cancelled():
                    raise
                raise RequestCancelledError("the client was closed during the call") from None


def _require_one_output(options: GenerateOptions) -> None:
    if (options.get("n") or 1) > 1:
        raise InvalidArgumentError(
            f"n: expected 1 where one completion is returned, got {options['n']}; use stream(...).completions()",
            metadata={"parameter": "n"},
        )
