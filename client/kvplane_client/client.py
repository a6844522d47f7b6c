"""The synchronous client: the asynchronous one on a thread of its own.

Station: beside AsyncClient, for scripts and notebooks. Every method waits for the coroutine of the same name; an
interrupt (Ctrl-C) while waiting cancels it, and with it the request on the server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from kvplane_client.async_client import AsyncClient
from kvplane_client.errors import FailedPreconditionError, KvPlaneError, RequestCancelledError
from kvplane_client.kv_events import KvEventBatch
from kvplane_client.manager_types import (
    BlockFilter,
    BlockInfo,
    BlockTrace,
    ExecutorInfo,
    Model,
    PinnedPrefix,
    PinnedPrefixes,
    RequestInfo,
    Stats,
)
from kvplane_client.retry import RetryListener, RetryPolicy
from kvplane_client.stream import GenerationStream
from kvplane_client.types import Chunk, Completion, GenerateOptions, Prompt

__all__ = ["Client", "SyncGenerationStream"]

_T = TypeVar("_T")


class _LoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvplane-client", daemon=True)
        self._thread.start()
        self.closed = False

    def wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine to its end; an exception that strikes here, such as KeyboardInterrupt, cancels it."""
        if self.closed:
            coroutine.close()
            raise FailedPreconditionError("the client is closed: make another")
        future: Future[_T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RequestCancelledError("the client was closed during the call") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the loop and the thread. May be called any number of times."""
        if self.closed:
            return
        self.wait(_cancel_others())
        self.closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    """Cancels what an interrupt left behind and waits for it."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class SyncGenerationStream:
    """The output of one request: an iterator of :class:`Chunk` and a context manager.

    Attributes:
        request_id: The request's id.
    """

    def __init__(self, stream: GenerationStream, thread: _LoopThread) -> None:
        self._stream = stream
        self._thread = thread
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
        chunk = self._thread.wait(_next_or_none(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    def abort(self) -> None:
        """Ends the request; a last chunk with finish_reason ABORT follows."""
        self._thread.wait(self._stream.abort())

    def completion(self) -> Completion:
        """Waits for the end and returns everything not yet taken from the stream."""
        return self._thread.wait(self._stream.completion())

    def close(self) -> None:
        """Ends the stream, and the request if it is unfinished."""
        self._thread.wait(self._stream.aclose())


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
    ) -> None:
        self._client = AsyncClient(target, timeout=timeout, retry=retry, on_retry=on_retry, credentials=credentials)
        self._thread = _LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; unfinished requests are aborted. May be called any number of times."""
        if not self._thread.closed:
            self._thread.wait(self._client.close())
        self._thread.close()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> SyncGenerationStream:
        """Generates, piece by piece."""
        return SyncGenerationStream(self._thread.wait(self._open(prompt, options)), self._thread)

    async def _open(self, prompt: Prompt, options: GenerateOptions) -> GenerationStream:
        return self._client.stream(prompt, **options)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates and returns the whole output."""
        return self._thread.wait(self._client.generate(prompt, **options))

    def generate_batch(
        self, prompts: Iterable[Prompt], *, max_in_flight: int = 256, **options: Unpack[GenerateOptions]
    ) -> list[Completion | KvPlaneError]:
        """Generates for many prompts on one stream."""
        return self._thread.wait(self._client.generate_batch(prompts, max_in_flight=max_in_flight, **options))

    def abort(self, request_id: str) -> None:
        """Ends a request."""
        self._thread.wait(self._client.abort(request_id))

    def get_model(self) -> Model:
        """Returns the model being served."""
        return self._thread.wait(self._client.get_model())

    def get_stats(self) -> Stats:
        """Returns the manager's counters and gauges."""
        return self._thread.wait(self._client.get_stats())

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
        return self._thread.wait(self._client.trace_block(block_id))

    def pin_prefix(
        self, name: str, prefix: str | Sequence[int], *, cache_salt: str = "", tenant: str = ""
    ) -> PinnedPrefix:
        """Keeps a prefix's full blocks from eviction."""
        return self._thread.wait(self._client.pin_prefix(name, prefix, cache_salt=cache_salt, tenant=tenant))

    def unpin_prefix(self, name: str) -> None:
        """Lets go of a pinned prefix."""
        self._thread.wait(self._client.unpin_prefix(name))

    def list_pinned_prefixes(self) -> PinnedPrefixes:
        """Returns all pins."""
        return self._thread.wait(self._client.list_pinned_prefixes())

    def reset_prefix_cache(self) -> int:
        """Forgets every cached block and returns how many there were."""
        return self._thread.wait(self._client.reset_prefix_cache())

    def watch_kv_events(
        self, *, log_id: str = "", from_sequence: int = 0, include_token_ids: bool = False
    ) -> Iterator[KvEventBatch]:
        """Follows the prefix cache, without an end."""
        return self._iterate(
            self._client.watch_kv_events(
                log_id=log_id, from_sequence=from_sequence, include_token_ids=include_token_ids
            )
        )

    def list_executors(self) -> Sequence[ExecutorInfo]:
        """Returns the executors whose lease is valid."""
        return self._thread.wait(self._client.list_executors())

    def wait_ready(self, timeout: float | None = None) -> Model:
        """Waits until the manager is ready."""
        return self._thread.wait(self._client.wait_ready(timeout))

    def _iterate(self, items: AsyncIterator[_T]) -> Iterator[_T]:
        while (item := self._thread.wait(_next_or_none(items))) is not None:
            yield item


async def _next_or_none(items: AsyncIterator[_T]) -> _T | None:
    """Returns the next item, or None at the end: StopAsyncIteration cannot leave a coroutine."""
    return await anext(items, None)
