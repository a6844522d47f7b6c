"""The asynchronous client: every call KVPlane offers to users.

Station: the top of the library. It owns the channel; streams get the stubs from it.
"""

from __future__ import annotations

import asyncio
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
from kvplane_client._batch import complete_all
from kvplane_client._contract import ManagerContract
from kvplane_client._manager_calls import ManagerCalls
from kvplane_client._pools import Pools
from kvplane_client._readiness import wait_until_ready
from kvplane_client._request_builder import build_pin, build_request
from kvplane_client._resumable import ResumableRequest
from kvplane_client._stubs import Stubs, task_is_cancelled
from kvplane_client.errors import (
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
from kvplane_client.retry import Deadline, RetryListener, RetryPolicy
from kvplane_client.sequence_types import SequencePoolInfo
from kvplane_client.sequences import SequencePool
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
        self._calls = ManagerCalls(ManagerContract(self._stubs), timeout, retry or RetryPolicy(), on_retry)
        self._pools = Pools(self._calls, self._stubs)
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
        deadline = self._deadline(options.get("deadline"))
        retry = self._calls.new_retry(deadline)
        return GenerationStream(self._stubs.inference, self._calls.contract, request, retry, deadline)

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
        return ManyStream(self._stubs.inference, self._calls)

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
        deadline = self._deadline(options.pop("deadline", None))
        request_id = options.pop("request_id", None)
        async with self.many() as many:
            return await complete_all(
                many, prompts, max_in_flight=max_in_flight, deadline=deadline, id_prefix=request_id, options=options
            )

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets a last chunk with finish_reason ABORT.

        Args:
            request_id: As given or reported. A stream of this client that was resumed is found by its first id.

        Raises:
            NotFoundError: No such request is waiting or running.
        """
        live = self._live.get(request_id)
        wire_id = live.wire_id if live is not None else request_id
        await self._calls.unary(self._stubs.inference.Abort, inference_pb.AbortRequest(request_id=wire_id))

    async def get_model(self) -> Model:
        """Returns the model being served."""
        return _convert.model_from(
            await self._calls.unary(self._stubs.inference.GetModel, inference_pb.GetModelRequest())
        )

    async def get_stats(self) -> Stats:
        """Returns the manager's counters and gauges, all of one moment."""
        return _convert.stats_from(await self._calls.unary(self._stubs.manager.GetStats, manager_pb.GetStatsRequest()))

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
            page = await self._calls.unary(self._stubs.manager.ListRequests, request)
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
            page = await self._calls.unary(self._stubs.manager.ListBlocks, request)
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
        return _convert.trace_from(block_id, await self._calls.unary(self._stubs.manager.TraceBlock, request))

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
        return _convert.pin_from((await self._calls.unary(self._stubs.manager.PinPrefix, request)).pin)

    async def unpin_prefix(self, name: str) -> None:
        """Lets go of a pinned prefix; its blocks stay cached until they are evicted.

        Raises:
            NotFoundError: Nothing is pinned under that name.
        """
        await self._calls.unary(self._stubs.manager.UnpinPrefix, manager_pb.UnpinPrefixRequest(name=name))

    async def list_pinned_prefixes(self) -> PinnedPrefixes:
        """Returns all pins, in the order they were made, and how many blocks they may name."""
        request = manager_pb.ListPinnedPrefixesRequest()
        return _convert.pins_from(await self._calls.unary(self._stubs.manager.ListPinnedPrefixes, request))

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
        return _convert.adapter_from((await self._calls.unary(self._stubs.manager.LoadAdapter, request)).adapter)

    async def unload_adapter(self, name: str) -> None:
        """Takes a LoRA adapter away.

        Raises:
            NotFoundError: None is loaded under that name.
            FailedPreconditionError: A request waits or runs with it.
        """
        await self._calls.unary(self._stubs.manager.UnloadAdapter, manager_pb.UnloadAdapterRequest(name=name))

    async def list_adapters(self) -> list[LoraAdapter]:
        """Returns the LoRA adapters that requests may name, in the order they were loaded."""
        response = await self._calls.unary(self._stubs.manager.ListAdapters, manager_pb.ListAdaptersRequest())
        return [_convert.adapter_from(adapter) for adapter in response.adapters]

    async def reset_prefix_cache(self) -> int:
        """Forgets every cached block.

        Returns:
            How many blocks lost their hash.

        Raises:
            FailedPreconditionError: A request holds blocks.
        """
        request = manager_pb.ResetPrefixCacheRequest()
        return (await self._calls.unary(self._stubs.manager.ResetPrefixCache, request)).blocks_forgotten

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
        self._calls.contract.note_connection()
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
            pool_id=pool_id,
            num_blocks=num_blocks,
            block_size=block_size,
            disable_prefix_caching=not enable_prefix_caching,
            eviction_policy=eviction_policy,
            lease_ms=round(lease_seconds * 1e3),
        )
        return await self._pools.open(request)

    async def list_pools(self) -> list[SequencePoolInfo]:
        """Returns the open pools of engines that run their own loop."""
        return await self._pools.list()

    async def list_executors(self) -> Sequence[ExecutorInfo]:
        """Returns the executors whose lease is valid, in order of registration."""
        response = await self._calls.unary(self._stubs.registry.ListExecutors, registry_pb.ListExecutorsRequest())
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
        return (await self._calls.unary(self._stubs.registry.SwitchExecutor, request)).previous_executor_id

    async def wait_ready(self, timeout: float | None = None) -> Model:  # noqa: ASYNC109 - bounds polling, not one await
        """Waits until the manager is reachable, healthy and serves a model.

        Args:
            timeout: Seconds; None waits for ever.

        Returns:
            The model being served.

        Raises:
            UnavailableError: It is not ready in time; the message says what it was waiting for.
        """
        model = await wait_until_ready(self._stubs, self._calls.contract, Deadline(timeout))
        return _convert.model_from(model)

    def _deadline(self, seconds: float | None) -> Deadline:
        """When a generation must have ended: as it says itself, or as the client does."""
        return Deadline(self._calls.timeout if seconds is None else seconds)


def _require_one_output(options: GenerateOptions) -> None:
    if (options.get("n") or 1) > 1:
        raise InvalidArgumentError(
            f"n: expected 1 where one completion is returned, got {options['n']}; use stream(...).completions()",
            metadata={"parameter": "n"},
        )
