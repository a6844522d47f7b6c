"""The manager's end of the executor's contract.

Station: made by `ExecutorLife` for each executor it brings up; calls `ExecutorService`. It knows no request.

    prepare: connect ─▶ ProfileMemory ─▶ GetModelInfo ─▶ InitializeKvCache, or ListBlockTags when there is a cache
    StepStream: steps go down in order, results come back in order; the first failure ends it
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub

from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block_tag import decode_tag
from kvmanager_service.errors import STATUS_DETAILS_KEY

_Answer = TypeVar("_Answer")
_T = TypeVar("_T")

MAX_MESSAGE_BYTES = 256 << 20
EPOCH_KEY = "kvplane-kv-epoch"
UNARY_TIMEOUT_S = 30.0
PROFILE_TIMEOUT_S = 900.0
"""A profile run is a real forward pass at the largest step, and a cache is memory to touch: both take a while."""

ADAPTER_TIMEOUT_S = 900.0
"""An executor may have to fetch an adapter from a hub first."""

TAGS_TIMEOUT_S = 300.0
"""The tags of ten million blocks take about a minute."""

REASONS_OF_ITS_OWN = frozenset(
    {"EXECUTOR_LOADING", "EXECUTOR_STOPPING", "KV_NOT_INITIALIZED", "STALE_EPOCH", "STREAM_SUPERSEDED"}
)
"""Reasons, of an executor that ends its stream, that say nothing against what it was sent."""

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)
"""No keepalive: the lease says whether an executor lives, and a server that was not told otherwise ends a connection
that pings more often than every five minutes without data."""


class ExecutorLostError(Exception):
    """An executor, or its stream, can not be used any more; the message says why. What it computed may be the cause."""


class ExecutorGoneError(ExecutorLostError):
    """It went in an orderly way, or stayed away: no row of its steps is to blame."""


class ExecutorRefusedError(Exception):
    """An executor refused what it was asked; nothing is wrong with the executor.

    Args:
        code: INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, RESOURCE_EXHAUSTED or FAILED_PRECONDITION.
        info: why, as it says.
        message: expected, got and what to do.
    """

    def __init__(self, code: grpc.StatusCode, info: ErrorInfo, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = info.reason
        self.metadata = dict(info.metadata)

    def because(self, what: str) -> ExecutorRefusedError:
        """The same refusal, told of what it kept from being done."""
        return ExecutorRefusedError(self.code, ErrorInfo(reason=self.reason, metadata=self.metadata), f"{what}: {self}")


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A LoRA adapter as an executor has it; `LoraAdapter` of its contract. Units: size_bytes in bytes."""

    name: str
    revision: str
    source: str
    adapter_id: int
    rank: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadyExecutor:
    """An executor whose cache stands.

    Attributes:
        info: what it said of its model.
        kv_cache: the cache's name and size, host blocks included.
        tagged: blocks it still holds from an earlier manager; None when the cache is the one the caller knew.
        num_unwanted_host_blocks: host blocks that it has set memory aside for, and that the caller has no use for.
    """

    info: pb.GetModelInfoResponse
    kv_cache: pb.KvCacheState
    tagged: list[TaggedBlock] | None
    num_unwanted_host_blocks: int = 0

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
        self,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        known_epoch: int,
        *,
        with_tokenizer: bool,
        with_host_blocks: bool = True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> ReadyExecutor:
        """Bring the executor to where steps can be sent. A cache that it has stays as it is if it is of use.

        Args:
            max_num_batched_tokens: most tokens of a step.
            max_num_seqs: most rows of a step.
            known_epoch: the cache content the caller has books on, or 0.
            with_tokenizer: whether the tokenizer's files, which may be tens of MB, are wanted.
            with_host_blocks: whether blocks will be swapped out. Without, no memory is taken for host blocks; a cache
                that has some is kept all the same, for what it holds is worth more than they cost.
            on_progress: called at each sign that the executor does something.

        Raises:
            ExecutorLostError: a call failed, or its answer cannot be read.
        """
        try:
            await self._connect()
            on_progress()
            # First: under other limits than those its cache was made for, an executor's cache is gone.
            profile = _readable(
                await self._stub.ProfileMemory(
                    pb.ProfileMemoryRequest(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs),
                    timeout=PROFILE_TIMEOUT_S,
                )
            )
            on_progress()
            num_host_blocks = profile.num_host_blocks if with_host_blocks else 0
            num_unwanted = profile.num_host_blocks - num_host_blocks
            info = _readable(
                await self._stub.GetModelInfo(
                    pb.GetModelInfoRequest(include_tokenizer_files=with_tokenizer), timeout=UNARY_TIMEOUT_S
                )
            )
            on_progress()
            if info.HasField("kv_cache") and info.kv_cache.kv_epoch == known_epoch:
                return ReadyExecutor(info, info.kv_cache, None)
            if info.HasField("kv_cache") and _is_enough(info.kv_cache, profile.num_blocks, num_host_blocks):
                tagged = await self._list_tags(info.kv_cache, on_progress)
                return ReadyExecutor(info, info.kv_cache, tagged, num_unwanted)
            initialized = _readable(
                await self._stub.InitializeKvCache(
                    pb.InitializeKvCacheRequest(
                        num_blocks=profile.num_blocks, num_host_blocks=num_host_blocks, knows_group_block_sizes=True
                    ),
                    timeout=PROFILE_TIMEOUT_S,
                )
            )
            return ReadyExecutor(info, initialized.kv_cache, [], num_unwanted)
        except grpc.aio.AioRpcError as error:
            raise _lost(error) from error

    async def _connect(self) -> None:
        """Wait until the connection stands, or does not: the next call then says why."""
        while (state := self._channel.get_state(try_to_connect=True)) in _UNDECIDED:
            await self._channel.wait_for_state_change(state)

    async def model_info(self) -> pb.GetModelInfoResponse:
        """What the executor serves. Raises ExecutorLostError when it does not say."""
        try:
            info: pb.GetModelInfoResponse = _readable(
                await self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=UNARY_TIMEOUT_S)
            )
        except grpc.aio.AioRpcError as error:
            raise _lost(error) from error
        return info

    async def _list_tags(self, kv_cache: pb.KvCacheState, on_progress: Callable[[], None]) -> list[TaggedBlock]:
        request = pb.ListBlockTagsRequest(kv_epoch=kv_cache.kv_epoch, knows_group_block_sizes=True)
        tagged: list[TaggedBlock] = []
        async for portion in self._stub.ListBlockTags(request, timeout=TAGS_TIMEOUT_S):
            _readable(portion)
            on_progress()
            try:
                block_ids = array("i", portion.block_tags.block_ids.data)
                named_tags = list(zip(block_ids, portion.block_tags.tags, strict=True))
            except ValueError as error:
                raise ExecutorLostError(f"block_tags: expected int32 ids and a tag for each, got {error}") from error
            tagged += [tag for block_id, data in named_tags if (tag := decode_tag(block_id, data)) is not None]
        return tagged

    async def load_adapter(self, name: str, source: str, revision: str = "") -> LoadedAdapter:
        """Have it load an adapter.

        Args:
            name: what to call it.
            source: where the executor finds it.
            revision: what its content must be; empty takes any.

        Raises:
            ExecutorRefusedError: it cannot, or must not.
            ExecutorLostError: the call failed, or its answer cannot be used.
        """
        request = pb.LoadAdapterRequest(name=name, source=source, revision=revision)
        answer = _readable(await _asked(self._stub.LoadAdapter(request, timeout=ADAPTER_TIMEOUT_S)))
        return _adapter(answer.adapter)

    async def unload_adapter(self, name: str) -> None:
        """Have it let go of an adapter. Raises as `load_adapter`."""
        await _asked(self._stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name), timeout=UNARY_TIMEOUT_S))

    async def list_adapters(self) -> list[LoadedAdapter]:
        """Which adapters it has. Raises ExecutorLostError when it does not say."""
        try:
            answer = _readable(await self._stub.ListAdapters(pb.ListAdaptersRequest(), timeout=UNARY_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise _lost(error) from error
        return [_adapter(adapter) for adapter in answer.adapters]

    def open_stream(self, on_event: Callable[[], None], kv_epoch: int = 0) -> StepStream:
        """Open the stream that steps go down, and fence off whoever else sends steps.

        Args:
            on_event: called when a result, or the end, has come.
            kv_epoch: the content that the steps will speak of.
        """
        return StepStream(self._stub.Execute(metadata=((EPOCH_KEY, str(kv_epoch)),)), on_event)

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

    async def connected(self) -> None:
        """Wait until the call has reached the executor. Raises ExecutorLostError when it does not."""
        try:
            await self._call.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            await self._reader
            raise self._lost or _lost(error) from error

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
        lost = ExecutorLostError("the executor ended the stream")
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._results.append(_readable(message))
                self._on_event()
        except grpc.aio.AioRpcError as error:
            lost = _lost(error)
        except ExecutorLostError as error:
            lost = error
        except asyncio.CancelledError:
            lost = ExecutorLostError("the stream was closed")
            if not self._call.cancelled():
                raise
        finally:
            self._lost = lost
            self._on_event()


_UNDECIDED = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)


def _is_enough(kv_cache: pb.KvCacheState, num_blocks: int, num_host_blocks: int) -> bool:
    """Whether a cache has every block that the executor has room for, and the host blocks that are wanted."""
    return kv_cache.num_blocks == num_blocks and kv_cache.num_host_blocks >= num_host_blocks


# What grpc.aio puts in the place of a call's status when a write finds that the call has ended; how it did is not told.
_ENDED_UNDER_A_WRITE = (grpc.StatusCode.INTERNAL, "Internal error from Core")


def _lost(error: grpc.aio.AioRpcError) -> ExecutorLostError:
    """What a call that failed says of its executor."""
    if (error.code(), error.details()) == _ENDED_UNDER_A_WRITE:
        return ExecutorGoneError("the executor ended the stream while a step was being sent")
    message = f"{error.code().name}: {error.details()}"
    return ExecutorGoneError(message) if _reason(error) in REASONS_OF_ITS_OWN else ExecutorLostError(message)


REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)
"""Codes of an `ExecutorRefusedError`."""


async def _asked(call: Awaitable[_T]) -> _T:
    """The answer to a call about adapters. Raises ExecutorRefusedError or ExecutorLostError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _refused_or_lost(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The channel was closed under the call: grpc.aio says so by cancelling it.
        raise ExecutorLostError("the connection was closed: the executor is not in use any more") from None


def _refused_or_lost(error: grpc.aio.AioRpcError) -> ExecutorRefusedError | ExecutorLostError:
    """What a call that failed says of what was asked, or of its executor."""
    info = _error_info(error)
    if error.code() in REFUSALS and info.reason and info.reason not in REASONS_OF_ITS_OWN:
        return ExecutorRefusedError(error.code(), info, error.details() or "")
    return _lost(error)


def _adapter(message: pb.LoraAdapter) -> LoadedAdapter:
    """Read an adapter. Raises ExecutorLostError for one that no step, or no hash, can name."""
    if not (message.name and message.revision and message.adapter_id >= 1):
        raise ExecutorLostError(
            "adapter: expected a name, a revision and an adapter_id of at least 1, got"
            f" {message.name!r}, {message.revision!r} and {message.adapter_id}; mend the executor"
        )
    return LoadedAdapter(
        message.name, message.revision, message.source, message.adapter_id, message.rank, message.size_bytes
    )


def _reason(error: grpc.aio.AioRpcError) -> str:
    """ErrorInfo's reason; empty when the status has none, as when the connection broke."""
    return str(_error_info(error).reason)


def _error_info(error: grpc.aio.AioRpcError) -> ErrorInfo:
    """The status's ErrorInfo; an empty one when it has none."""
    info = ErrorInfo()
    for key, value in error.trailing_metadata():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                if any(detail.Unpack(info) for detail in Status.FromString(value).details):
                    return info
            except DecodeError:
                return ErrorInfo()
    return ErrorInfo()


def _readable(answer: _Answer | None) -> _Answer:
    """Pass an answer on. grpc.aio gives None for bytes that are not the message; raises ExecutorLostError then."""
    if answer is None:
        raise ExecutorLostError("expected an executor's answer, got bytes that are not one; is the address right?")
    return answer
