"""The synchronous client: the asynchronous one on another thread, which all clients share (`_loop_thread`).

Station: beside AsyncClient, for scripts and notebooks. Every method waits for the coroutine of the same name; an
interrupt (Ctrl-C) while waiting cancels it, and with it the request on the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from kvplane_client._loop_thread import Calls
from kvplane_client.async_client import AsyncClient
from kvplane_client.errors import KvPlaneError
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
from kvplane_client.retry import RetryListener, RetryPolicy
from kvplane_client.sequences import SequenceOperation, SequencePool, SequencePoolInfo, SequenceResult
from kvplane_client.stream import GenerationStream
from kvplane_client.types import Chunk, Completion, GenerateOptions, Prompt

__all__ = ["Client", "SyncGenerationStream", "SyncSequencePool"]

_T = TypeVar("_T")


class SyncGenerationStream:
    """The output of one request: an iterator of :class:`Chunk` and a context manager.

    Attributes:
        request_id: The request's id.
    """

    def __init__(self, stream: GenerationStream, calls: Calls) -> None:
        self._stream = stream
        self._calls = calls
        self.request_id = stream.request_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """Returns the next chunk; errors are those of :class:`GenerationStream`."""
        chunk = self._calls.wait(_next_or_none, self._stream)
        if chunk is None:
            raise StopIteration
        return chunk

    def abort(self) -> None:
        """Ends the request; a last chunk with finish_reason ABORT follows."""
        self._calls.wait(self._stream.abort)

    def completion(self) -> Completion:
        """Waits for the end and returns everything not yet taken from the stream."""
        return self._calls.wait(self._stream.completion)

    def completions(self) -> list[Completion]:
        """Waits for the end and returns everything not yet taken from the stream, output by output."""
        return self._calls.wait(self._stream.completions)

    def close(self) -> None:
        """Ends the stream, and the request if it is unfinished."""
        self._calls.wait(self._stream.aclose)


class SyncSequencePool:
    """One engine's pool; a context manager that closes it. Methods and errors are those of :class:`SequencePool`.

    Attributes:
        info: The pool as it was opened.
    """

    def __init__(self, pool: SequencePool, calls: Calls) -> None:
        self._pool = pool
        self._calls = calls
        self.info = pool.info

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def recovered(self) -> list[tuple[SequenceOperation, SequenceResult]]:
        """What the newest call of ``update`` learned of a batch whose answer was lost."""
        return self._pool.recovered

    def update(self, operations: Iterable[SequenceOperation] = ()) -> list[SequenceResult]:
        """Applies operations in order and returns a result for each."""
        return self._calls.wait(self._pool.update, operations)

    def close(self) -> None:
        """Closes the pool."""
        self._calls.wait(self._pool.close)


class Client:
    """A client of one KV manager that blocks; a context manager. Threads may share it.

    Arguments, methods and errors are those of :class:`AsyncClient`.
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
        self._client = AsyncClient(
            target, timeout=timeout, retry=retry, on_retry=on_retry, credentials=credentials, api_key=api_key
        )
        self._calls = Calls()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; unfinished requests are aborted. May be called any number of times."""
        if not self._calls.closed:
            self._calls.wait(self._client.close)
        self._calls.close()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> SyncGenerationStream:
        """Generates, piece by piece."""
        return SyncGenerationStream(self._calls.wait(self._open, prompt, options), self._calls)

    async def _open(self, prompt: Prompt, options: GenerateOptions) -> GenerationStream:
        return self._client.stream(prompt, **options)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates and returns the whole output."""
        return self._calls.wait(self._client.generate, prompt, **options)

    def generate_batch(
        self, prompts: Iterable[Prompt], *, max_in_flight: int = 256, **options: Unpack[GenerateOptions]
    ) -> list[Completion | KvPlaneError]:
        """Generates for many prompts on one stream."""
        return self._calls.wait(self._client.generate_batch, prompts, max_in_flight=max_in_flight, **options)

    def abort(self, request_id: str) -> None:
        """Ends a request."""
        self._calls.wait(self._client.abort, request_id)

    def get_model(self) -> Model:
        """Returns the model being served."""
        return self._calls.wait(self._client.get_model)

    def get_stats(self) -> Stats:
        """Returns the manager's counters and gauges."""
        return self._calls.wait(self._client.get_stats)

    def list_requests(
        self, *, include_finished: bool = False, request_id: str = "", page_size: int = 0
    ) -> Iterator[RequestInfo]:
        """Lists requests, page after page."""
        return self._iterate(
            self._client.list_requests(include_finished=include_finished, request_id=request_id, page_size=page_size)
        )

    def list_blocks(self, block_filter: BlockFilter = BlockFilter.ALL, *, page_size: int = 0) -> Iterator[BlockInfo]:
        """Lists blocks, page after page."""
        return self._iterate(self._client.list_blocks(block_filter, page_size=page_size))

    def trace_block(self, block_id: int) -> BlockTrace:
        """Returns what became of a block."""
        return self._calls.wait(self._client.trace_block, block_id)

    def pin_prefix(
        self, name: str, prefix: str | Sequence[int], *, cache_salt: str = "", tenant: str = "", adapter: str = ""
    ) -> PinnedPrefix:
        """Keeps a prefix's full blocks from eviction."""
        return self._calls.wait(
            self._client.pin_prefix, name, prefix, cache_salt=cache_salt, tenant=tenant, adapter=adapter
        )

    def unpin_prefix(self, name: str) -> None:
        """Lets go of a pinned prefix."""
        self._calls.wait(self._client.unpin_prefix, name)

    def list_pinned_prefixes(self) -> PinnedPrefixes:
        """Returns all pins."""
        return self._calls.wait(self._client.list_pinned_prefixes)

    def load_adapter(self, name: str, source: str) -> LoraAdapter:
        """Loads a LoRA adapter, for requests to name."""
        return self._calls.wait(self._client.load_adapter, name, source)

    def unload_adapter(self, name: str) -> None:
        """Takes a LoRA adapter away."""
        self._calls.wait(self._client.unload_adapter, name)

    def list_adapters(self) -> list[LoraAdapter]:
        """Returns the LoRA adapters that requests may name."""
        return self._calls.wait(self._client.list_adapters)

    def reset_prefix_cache(self) -> int:
        """Forgets every cached block and returns how many there were."""
        return self._calls.wait(self._client.reset_prefix_cache)

    def watch_kv_events(
        self,
        *,
        log_id: str = "",
        from_sequence: int = 0,
        include_token_ids: bool = False,
        include_keys: bool = False,
    ) -> Iterator[KvEventBatch]:
        """Follows the prefix cache, without an end."""
        return self._iterate(
            self._client.watch_kv_events(
                log_id=log_id,
                from_sequence=from_sequence,
                include_token_ids=include_token_ids,
                include_keys=include_keys,
            )
        )

    def open_pool(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        pool_id: str = "",
        enable_prefix_caching: bool = True,
        eviction_policy: str = "",
        lease_seconds: float = 0,
    ) -> SyncSequencePool:
        """Opens a pool of block tables for an engine that runs its own loop."""
        opened = self._calls.wait(
            self._client.open_pool,
            num_blocks,
            block_size,
            pool_id=pool_id,
            enable_prefix_caching=enable_prefix_caching,
            eviction_policy=eviction_policy,
            lease_seconds=lease_seconds,
        )
        return SyncSequencePool(opened, self._calls)

    def list_pools(self) -> list[SequencePoolInfo]:
        """Returns the open pools of engines that run their own loop."""
        return self._calls.wait(self._client.list_pools)

    def list_executors(self) -> Sequence[ExecutorInfo]:
        """Returns the executors whose lease is valid."""
        return self._calls.wait(self._client.list_executors)

    def switch_executor(self, executor_id: str) -> str:
        """Moves on to another executor; returns the id of the one that was active before."""
        return self._calls.wait(self._client.switch_executor, executor_id)

    def wait_ready(self, timeout: float | None = None) -> Model:
        """Waits until the manager is ready."""
        return self._calls.wait(self._client.wait_ready, timeout)

    def _iterate(self, items: AsyncIterator[_T]) -> Iterator[_T]:
        while (item := self._calls.wait(_next_or_none, items)) is not None:
            yield item


async def _next_or_none(items: AsyncIterator[_T]) -> _T | None:
    """Returns the next item, or None at the end: StopAsyncIteration cannot leave a coroutine."""
    return await anext(items, None)
