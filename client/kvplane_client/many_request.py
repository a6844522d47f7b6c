"""One request of a multiplexed stream, as its user holds it.

Station: made by ManyStream, which fills it; the public half is for whoever iterates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from kvplane_client._resumable import ResumableRequest
from kvplane_client.errors import KvPlaneError
from kvplane_client.retry import RetryState
from kvplane_client.types import Chunk, Completion, CompletionBuilder

__all__ = ["ManyRequest"]


class ManyRequest:
    """One request of a multiplexed stream: an asynchronous iterator of :class:`Chunk`. It serves one task.

    Attributes:
        request_id: The request's id.
    """

    def __init__(self, state: ResumableRequest, retry: RetryState, on_abort: Callable[[ManyRequest], None]) -> None:
        self._on_abort = on_abort
        self._items: asyncio.Queue[Chunk | KvPlaneError] = asyncio.Queue()
        self._over = False
        self._num_open = state.num_outputs
        self.state = state
        self.retry = retry
        self.request_id = state.request_id
        self.sent = False
        self.abort_asked = False
        self.expiry: asyncio.TimerHandle | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Returns the next chunk.

        Raises:
            StopAsyncIteration: The last chunk was delivered.
            KvPlaneError: The request failed.
        """
        if self._over:
            raise StopAsyncIteration
        item = await self._items.get()
        if isinstance(item, KvPlaneError):
            self._over = True
            raise item
        self._num_open -= item.finish_reason is not None
        self._over = not self._num_open
        return item

    async def completion(self) -> Completion:
        """Waits for the end and returns everything of the first output not yet taken.

        Raises:
            KvPlaneError: The request failed.
        """
        return (await self.completions())[0]

    async def completions(self) -> list[Completion]:
        """Waits for the end and returns everything not yet taken, output by output.

        Raises:
            KvPlaneError: The request failed.
        """
        builders = [CompletionBuilder() for _ in range(self.state.num_outputs)]
        async for chunk in self:
            builders[chunk.index].add(chunk)
        return [builder.build() for builder in builders]

    def abort(self) -> None:
        """Ends the request; a last chunk with finish_reason ABORT follows unless it was over already."""
        self._on_abort(self)

    def put(self, item: Chunk | KvPlaneError) -> None:
        """Hands the next piece, or the end, to whoever iterates. Called by the stream only."""
        self._items.put_nowait(item)
