"""One request of a multiplexed stream, as its user holds it.

Station: made by ManyStream, which fills it; the public half is for whoever iterates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from kvplane_client._resumable import ResumableRequest
from kvplane_client.errors import InvalidArgumentError, KvPlaneError
from kvplane_client.retry import RetryState
from kvplane_client.types import Chunk, Completion, completions_of

__all__ = ["Fork", "ManyRequest"]


@dataclass(frozen=True, slots=True)
class Fork:
    """What was asked of :meth:`ManyRequest.fork`."""

    index: int
    token_ids: Sequence[int]
    request_id: str
    seed: int | None
    deadline: float | None


class ManyRequest:
    """One request of a multiplexed stream: an asynchronous iterator of :class:`Chunk`. It serves one task.

    Attributes:
        request_id: The request's id.
    """

    def __init__(
        self,
        state: ResumableRequest,
        retry: RetryState,
        on_abort: Callable[[ManyRequest], None],
        on_fork: Callable[[ManyRequest, Fork], ManyRequest],
    ) -> None:
        self._on_abort = on_abort
        self._on_fork = on_fork
        self._taken: list[list[int]] = [list(state.first_token_ids), *([] for _ in range(state.num_outputs - 1))]
        self._items: asyncio.Queue[Chunk | KvPlaneError] = asyncio.Queue()
        self._over = False
        self._num_open = state.num_outputs
        self.state = state
        self.retry = retry
        self.request_id = state.request_id
        self.sent = False
        self.abort_asked = False
        self.expiry: asyncio.TimerHandle | None = None
        self.question: asyncio.Task[None] | None = None

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
        self._taken[item.index] += item.token_ids
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
        return await completions_of(self, self.state.num_outputs)

    def abort(self) -> None:
        """Ends the request; a last chunk with finish_reason ABORT follows unless it was over already."""
        self._on_abort(self)

    def fork(
        self,
        *,
        index: int = 0,
        token_ids: Sequence[int] | None = None,
        request_id: str = "",
        seed: int | None = None,
        deadline: float | None = None,
    ) -> ManyRequest:
        """Starts another request that goes on from this one's output; both go on independently of each other.

        The prompt and all parameters are this one's, max_tokens counts from the end of the prompt. While this one has
        not ended, the fork shares its blocks, and nothing they have in common is computed again; the tokens are the
        same in any case.

        Args:
            index: Which of this request's outputs.
            token_ids: The output it begins with, whose pieces are not delivered again. Default: what was taken of this
                request so far. The last one may be another than this request's, as a beam search wants.
            request_id: Its id. Default: one is chosen.
            seed: Its seed. Default: one is drawn where it samples at random, so that the two part.
            deadline: Its own, in seconds. Default: the client's.

        Returns:
            The fork, to iterate over: one output, from the fork point on.

        Raises:
            InvalidArgumentError: A value cannot be sent at all; others are refused through the fork, also token ids
                that are none of this request's (``NOT_A_FORK``).
            AlreadyExistsError: The id belongs to an unfinished request of this stream.
            FailedPreconditionError: The stream is closed.
        """
        if not 0 <= index < len(self._taken):
            raise InvalidArgumentError(f"index: expected 0 to {len(self._taken) - 1}, got {index}")
        taken = self._taken[index] if token_ids is None else token_ids
        return self._on_fork(self, Fork(index, list(taken), request_id, seed, deadline))

    def put(self, item: Chunk | KvPlaneError) -> None:
        """Hands the next piece, or the end, to whoever iterates. Called by the stream only."""
        self._items.put_nowait(item)
