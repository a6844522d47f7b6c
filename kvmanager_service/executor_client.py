"""The manager's end of the executor's contract.

Station: made by `ExecutorLife` for the executor it uses; calls `ExecutorService`. It knows no request.

    connect: ProfileMemory ─▶ GetModelInfo ─▶ InitializeKvCache, or ListBlockTags when the cache is already filled
    StepStream: steps go down in order, results come back in order; the first failure ends it
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import structlog
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub

from kvmanager_service.core.block_tag import decode_tag
from kvmanager_service.core.kv_cache_manager import TaggedBlock

_Answer = TypeVar("_Answer")
_log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 256 << 20
UNARY_TIMEOUT_S = 30.0
PROFILE_TIMEOUT_S = 900.0
"""A profile run is a real forward pass at the largest step, and a cache is memory to touch: both take a while."""

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)
"""No keepalive: the lease says whether an executor lives, and a server that was not told otherwise ends a connection
that pings more often than every five minutes without data."""


class ExecutorLostError(Exception):
    """An executor, or its stream, can not be used any more; the message says why."""


@dataclass(frozen=True, slots=True)
class ReadyExecutor:
    """An executor whose cache stands.

    Attributes:
        info: what it said of its model.
        kv_cache: the cache's name and size, host blocks included.
        tagged: blocks it still holds from an earlier manager; None when the cache is the one the caller knew.
    """

    info: pb.GetModelInfoResponse
    kv_cache: pb.KvCacheState
    tagged: list[TaggedBlock] | None

    @property
    def num_host_blocks(self) -> int:
        """Host blocks that steps may copy to and from; 0 for none."""
        return self.kv_cache.num_host_blocks


class ExecutorConnection:
    """A channel to one executor.

    Args:
        address: host:port.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub: Any = ExecutorServiceStub(self._channel)

    async def prepare(
        self, max_num_batched_tokens: int, max_num_seqs: int, known_epoch: int, *, with_tokenizer: bool
    ) -> ReadyExecutor:
        """Bring the executor to where steps can be sent.

        Args:
            max_num_batched_tokens: most tokens of a step.
            max_num_seqs: most rows of a step.
            known_epoch: the cache content the caller has books on, or 0.
            with_tokenizer: whether the tokenizer's files, which may be tens of MB, are wanted.

        Raises:
            ExecutorLostError: a call failed, or its answer cannot be read.
        """
        try:
            # First: under other limits than those its cache was made for, an executor's cache is gone.
            profile = _readable(
                await self._stub.ProfileMemory(
                    pb.ProfileMemoryRequest(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs),
                    timeout=PROFILE_TIMEOUT_S,
                )
            )
            info = _readable(
                await self._stub.GetModelInfo(
                    pb.GetModelInfoRequest(include_tokenizer_files=with_tokenizer), timeout=UNARY_TIMEOUT_S
                )
            )
            if info.HasField("kv_cache") and info.kv_cache.kv_epoch == known_epoch:
                return ReadyExecutor(info, info.kv_cache, None)
            if info.HasField("kv_cache") and _is_all_there_is(info.kv_cache, profile):
                return ReadyExecutor(info, info.kv_cache, await self._list_tags(info.kv_cache.kv_epoch))
            initialized = _readable(
                await self._stub.InitializeKvCache(
                    pb.InitializeKvCacheRequest(num_blocks=profile.num_blocks, num_host_blocks=profile.num_host_blocks),
                    timeout=PROFILE_TIMEOUT_S,
                )
            )
            return ReadyExecutor(info, initialized.kv_cache, [])
        except grpc.aio.AioRpcError as error:
            raise ExecutorLostError(_describe(error)) from error

    async def model_info(self) -> pb.GetModelInfoResponse:
        """What the executor serves. Raises ExecutorLostError when it does not say."""
        try:
            info: pb.GetModelInfoResponse = _readable(
                await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=UNARY_TIMEOUT_S)
            )
        except grpc.aio.AioRpcError as error:
            raise ExecutorLostError(_describe(error)) from error
        return info

    async def _list_tags(self, kv_epoch: int) -> list[TaggedBlock]:
        tagged = []
        async for portion in self._stub.ListBlockTags(pb.ListBlockTagsRequest(kv_epoch=kv_epoch)):
            _readable(portion)
            try:
                block_ids = array("i", portion.block_tags.block_ids.data)
                named_tags = list(zip(block_ids, portion.block_tags.tags, strict=True))
            except ValueError as error:
                raise ExecutorLostError(f"block_tags: expected int32 ids and a tag for each, got {error}") from error
            tagged += [tag for block_id, data in named_tags if (tag := decode_tag(block_id, data)) is not None]
        return tagged

    def open_stream(self, on_event: Callable[[], None]) -> StepStream:
        """Open the stream that steps go down. `on_event` is called when a result, or the end, has come."""
        return StepStream(self._stub.Execute(), on_event)

    async def close(self) -> None:
        """Close the channel; an open stream ends."""
        await self._channel.close()


class StepStream:
    """One `Execute` stream.

    Args:
        call: the open call.
        on_event: called, on the loop, whenever `take_results` has something new to say.
    """

    def __init__(self, call: Any, on_event: Callable[[], None]) -> None:
        self._call = call
        self._on_event = on_event
        self._results: deque[pb.ExecuteResponse] = deque()
        self._lost: ExecutorLostError | None = None
        self._reader = asyncio.create_task(self._read(), name="step-stream-reader")

    async def send(self, message: pb.ExecuteRequest) -> None:
        """Send a step. Raises ExecutorLostError when the stream has ended."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            await self._reader
            raise self._lost or ExecutorLostError(str(error)) from error

    def take_results(self) -> list[pb.ExecuteResponse]:
        """All results that have come since the last call, in order.

        Raises:
            ExecutorLostError: the stream has ended, and every result before that was taken.
        """
        if not self._results and self._lost is not None:
            raise self._lost
        results = list(self._results)
        self._results.clear()
        if self._lost is not None:
            self._on_event()  # come again for the end: it may have been told together with these
        return results

    async def close(self) -> None:
        """Cancel the call and wait for the reader."""
        self._call.cancel()
        await self._reader

    async def _read(self) -> None:
        why = "the executor ended the stream"
        try:
            while True:
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    break
                self._results.append(_readable(message))
                self._on_event()
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                why = f"{code.name}: {await self._call.details()}"
        except grpc.aio.AioRpcError as error:
            why = _describe(error)
        except ExecutorLostError as error:
            why = str(error)
        except asyncio.CancelledError:
            why = "the stream was closed"
            if not self._call.cancelled():
                raise
        finally:
            self._lost = ExecutorLostError(why)
            self._on_event()


def _is_all_there_is(kv_cache: pb.KvCacheState, profile: pb.ProfileMemoryResponse) -> bool:
    """Whether a cache has every block that the executor has room for."""
    return (kv_cache.num_blocks, kv_cache.num_host_blocks) == (profile.num_blocks, profile.num_host_blocks)


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"


def _readable(answer: _Answer | None) -> _Answer:
    """Pass an answer on. grpc.aio gives None for bytes that are not the message; raises ExecutorLostError then."""
    if answer is None:
        raise ExecutorLostError("expected an executor's answer, got bytes that are not one; is the address right?")
    return answer
