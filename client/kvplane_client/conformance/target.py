"""The executor that is tried: the connection, what it says of itself, and a fresh cache for each case.

Station: made by `runner`, used by `bench` and `judges`. The only place that knows how calls fail.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub

from kvplane_client.conformance.outcome import CaseFailedError, ExecutorGoneError, NoExecutorError, UnusableError
from kvplane_client.conformance.steps import Geometry

if TYPE_CHECKING:
    from kvplane.executor.v1.executor_service_pb2_grpc import ExecutorServiceAsyncStub

__all__ = ["MAX_BATCHED_TOKENS_AT_LEAST", "MAX_SEQS", "NUM_BLOCKS", "Target", "check_error"]

MAX_SEQS = 8
MAX_BATCHED_TOKENS_AT_LEAST = 64
NUM_BLOCKS = 64
"""Logical blocks that cases may use; more where `Target.blocks_beyond_windows` is."""
NUM_HOST_BLOCKS = 8

_ERRORS = 'ExecutorService: Errors carry google.rpc.ErrorInfo with domain "kvplane".'
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
_REASON = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.max_send_message_length", 256 * 1024 * 1024),
)

_T = TypeVar("_T")


class RpcError(Protocol):
    """What the errors of both kinds of calls have."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


class Target:
    """One executor.

    Args:
        address: host:port.
        answer_within: Seconds that any answer may take.

    Attributes:
        beyond_windows: Tokens of a sequence that has blocks before each window and chunk; 0 where there is none of
            either, or the model takes no such sequence.
        blocks_beyond_windows: Logical blocks that cases with such sequences want.
    """

    def __init__(self, address: str, answer_within: float) -> None:
        self.address = address
        self.answer_within = answer_within
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self.stub: ExecutorServiceAsyncStub = ExecutorServiceStub(self._channel)
        self.info = pb.GetModelInfoResponse()
        self.profile = pb.ProfileMemoryResponse()
        self.geometry = Geometry((1,), (0,), NUM_BLOCKS, 0)
        self.max_batched_tokens = MAX_BATCHED_TOKENS_AT_LEAST
        self.beyond_windows = 0
        self.blocks_beyond_windows = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def meet(self, wait: float) -> None:
        """Learns what there is to try.

        Args:
            wait: Seconds to wait for an executor that is not there yet.

        Raises:
            NoExecutorError: None answers.
            UnusableError: There is one that no cases can be run on.
        """
        self.info = await self._first_answer(wait)
        info = self.info
        if info.block_size < 1 or info.vocab_size < 2 or not info.kv_groups:
            got = f"block_size {info.block_size}, vocab_size {info.vocab_size}, {len(info.kv_groups)} kv_groups"
            raise UnusableError(f"expected a model with block_size, vocab_size and kv_groups, got {got}")
        windows = tuple(_window_of(group) for group in info.kv_groups)
        states = frozenset(
            group for group, kind in enumerate(info.kv_groups) if kind.type == pb.KV_GROUP_TYPE_RECURRENT_STATE
        )
        sizes = tuple(group.block_size or info.block_size for group in info.kv_groups)
        if min(sizes) < 1:
            raise UnusableError(f"expected groups with a block_size of at least 1, or 0, got {min(sizes)}")
        one_each = Geometry(sizes, windows, 1, 0)
        size = one_each.block_size
        self.beyond_windows = max(map(abs, windows)) + 3 * size + 1 if any(windows) else 0
        if self.beyond_windows + 2 * size > info.max_model_len:
            self.beyond_windows = 0
        longest = max(8 * size, self.beyond_windows + 2 * size)
        self.max_batched_tokens = max(MAX_BATCHED_TOKENS_AT_LEAST, longest)
        self.profile = await self._profile()
        each = one_each.blocks_each
        needed = NUM_BLOCKS * each + 1
        if self.profile.num_blocks < needed:
            raise UnusableError(
                f"expected at least {needed} blocks to try tables with, got {self.profile.num_blocks}; "
                "give the executor more memory, or smaller blocks"
            )
        self.blocks_beyond_windows = 16 + 3 * -(-self.beyond_windows // size)
        num_blocks = min(max(NUM_BLOCKS, self.blocks_beyond_windows), (self.profile.num_blocks - 1) // each)
        host_blocks = min(NUM_HOST_BLOCKS, self.profile.num_host_blocks // each)
        self.geometry = Geometry(sizes, windows, num_blocks, host_blocks, states)

    async def fresh(self) -> int:
        """Starts an empty cache under the kit's limits, with no adapter loaded. Returns its epoch."""
        await self.unload_adapters()
        await self._profile()
        request = pb.InitializeKvCacheRequest(
            num_blocks=self.geometry.num_blocks * self.geometry.blocks_each + 1,
            num_host_blocks=self.geometry.num_host_blocks * self.geometry.blocks_each,
            knows_group_block_sizes=True,
        )
        return (await self.call(self.stub.InitializeKvCache(request))).kv_cache.kv_epoch

    async def load_adapter(self, name: str, source: str, revision: str = "") -> pb.LoraAdapter:
        """Has an adapter loaded that should be. Raises as `call`."""
        request = pb.LoadAdapterRequest(name=name, source=source, revision=revision)
        return (await self.call(self.stub.LoadAdapter(request))).adapter

    async def unload_adapters(self) -> None:
        """Has all adapters unloaded. Raises as `call`."""
        if not self.info.max_adapters:
            return
        for adapter in (await self.call(self.stub.ListAdapters(pb.ListAdaptersRequest()))).adapters:
            await self.call(self.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=adapter.name)))

    async def call(self, call: Awaitable[_T]) -> _T:
        """Waits for an answer that should be a good one.

        Raises:
            ExecutorGoneError: There is no executor any more.
            CaseFailedError: It answers with an error, or not in time.
        """
        try:
            async with asyncio.timeout(self.answer_within):
                return await call
        except grpc.aio.AioRpcError as error:
            raise unexpected(error) from error
        except TimeoutError:
            raise self.too_late() from None

    async def refused(
        self,
        call: Awaitable[object],
        code: grpc.StatusCode,
        contract: str,
        *,
        may_lack: bool = False,
    ) -> None:
        """Waits for an answer that should be this error.

        Args:
            call: The call.
            code: The status it should have.
            contract: The sentence that says so.
            may_lack: Whether the executor may have no such method at all.
        """
        got = await self.answered_or_refused(call, code, contract, may_lack=may_lack)
        if got is not None:
            raise CaseFailedError(contract, code.name, f"OK ({type(got).__name__})")

    async def answered_or_refused(
        self,
        call: Awaitable[_T],
        code: grpc.StatusCode,
        contract: str,
        *,
        may_lack: bool = False,
    ) -> _T | None:
        """Waits for an answer that may be a good one, or this error. Returns None for the error."""
        try:
            async with asyncio.timeout(self.answer_within):
                return await call
        except grpc.aio.AioRpcError as error:
            if not (may_lack and error.code() is grpc.StatusCode.UNIMPLEMENTED):
                check_error(error, code, contract, {})
            return None
        except TimeoutError:
            raise self.too_late(contract, code.name) from None

    async def refuses_bytes(self, method: str, message: bytes) -> None:
        """Sends what is no message, and waits for an error of any kind."""
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(f"/{SERVICE_NAME}/{method}")
        try:
            async with asyncio.timeout(self.answer_within):
                await call(message)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ExecutorGoneError(described(error)) from error
        except TimeoutError:
            raise self.too_late() from None
        else:
            raise CaseFailedError(_ERRORS, "an error", f"OK for {message!r} to {method}")

    def exchange(self, requests: Sequence[pb.ExecuteRequest]) -> tuple[list[pb.ExecuteResponse], grpc.RpcError | None]:
        """Sends steps on a stream of a channel of its own, and waits for its end; blocks.

        Returns:
            The answers, and the error that ended the stream, if one did.
        """
        answers: list[pb.ExecuteResponse] = []
        with grpc.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            try:
                for answer in ExecutorServiceStub(channel).Execute(iter(requests), timeout=self.answer_within):
                    answers.append(answer)  # noqa: PERF402 - what came before an error counts
            except grpc.RpcError as error:
                return answers, error
        return answers, None

    async def is_alive(self) -> bool:
        """Whether it still says what it said."""
        try:
            async with asyncio.timeout(self.answer_within):
                info = await self.stub.GetModelInfo(pb.GetModelInfoRequest(), wait_for_ready=False)
        except (grpc.aio.AioRpcError, TimeoutError):
            return False
        return info.executor_id == self.info.executor_id

    def too_late(self, contract: str = "", expected: str = "an answer") -> CaseFailedError:
        """The error of what does not come; without a contract it is the case's that is broken."""
        return CaseFailedError(contract, expected, f"nothing within {self.answer_within:g} s")

    async def _profile(self) -> pb.ProfileMemoryResponse:
        limits = pb.ProfileMemoryRequest(max_num_batched_tokens=self.max_batched_tokens, max_num_seqs=MAX_SEQS)
        return await self.call(self.stub.ProfileMemory(limits))

    async def _first_answer(self, wait: float) -> pb.GetModelInfoResponse:
        """Asks until there is an answer that is not UNAVAILABLE."""
        request = pb.GetModelInfoRequest()
        deadline = asyncio.get_running_loop().time() + wait
        while True:
            try:
                async with asyncio.timeout(self.answer_within):
                    return await self.stub.GetModelInfo(request)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise UnusableError(f"no executor at {self.address}: {described(error)}") from error
                if asyncio.get_running_loop().time() >= deadline:
                    raise NoExecutorError(f"no executor at {self.address}: {described(error)}") from error
            except TimeoutError:
                raise NoExecutorError(f"no answer from {self.address} within {self.answer_within:g} s") from None
            await asyncio.sleep(0.2)


def _window_of(group: pb.KvGroup) -> int:
    """How many tokens the layers of a group read, 0 for all and for a state, or the size of their chunks, negated.

    Raises:
        UnusableError: The kit does not know how they use their blocks.
    """
    if group.type in (pb.KV_GROUP_TYPE_FULL_ATTENTION, pb.KV_GROUP_TYPE_RECURRENT_STATE):
        return 0
    if group.type == pb.KV_GROUP_TYPE_SLIDING_WINDOW and group.window >= 1:
        return group.window
    if group.type == pb.KV_GROUP_TYPE_CHUNKED_LOCAL and group.chunk >= 1:
        return -group.chunk
    raise UnusableError(
        "this kit tries KV groups of full attention, of states, and of sliding windows and chunks of at least 1 token, "
        f"got KvGroupType {group.type} with a window of {group.window} and a chunk of {group.chunk}"
    )


def unexpected(error: grpc.aio.AioRpcError) -> CaseFailedError | ExecutorGoneError:
    """What an error means where none should have come."""
    if error.code() is grpc.StatusCode.UNAVAILABLE and info_of(error) is None:
        return ExecutorGoneError(described(error))
    return CaseFailedError("", "a good answer", described(error))


def check_error(error: RpcError, code: grpc.StatusCode, contract: str, metadata: dict[str, object]) -> None:
    """Checks the status of a call that should have failed, and what comes with it.

    Raises:
        CaseFailedError: It is another error, or says too little.
        ExecutorGoneError: There is no executor any more.
    """
    if error.code() is not code:
        if error.code() is grpc.StatusCode.UNAVAILABLE and info_of(error) is None:
            raise ExecutorGoneError(described(error))
        raise CaseFailedError(contract, code.name, described(error))
    info = info_of(error)
    if info is None or info.domain != "kvplane" or not _REASON.fullmatch(info.reason):
        got = "no ErrorInfo" if info is None else f"domain {info.domain!r}, reason {info.reason!r}"
        raise CaseFailedError(_ERRORS, 'ErrorInfo with domain "kvplane" and a reason in UPPER_SNAKE_CASE', got)
    missing = {name: str(value) for name, value in metadata.items() if info.metadata.get(name) != str(value)}
    if missing:
        raise CaseFailedError(contract, f"ErrorInfo.metadata with {missing}", dict(info.metadata))


def info_of(error: RpcError) -> error_details_pb2.ErrorInfo | None:
    """The ErrorInfo that comes with an error, if one does."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it has what is needed of a Call
    except ValueError:  # the status in the trailers is another than that of the call
        return None
    details: Iterable[object] = () if status is None else status.details
    info = error_details_pb2.ErrorInfo()
    for detail in details:
        if detail.Unpack(info):  # type: ignore[attr-defined]
            return info
    return None


def described(error: RpcError) -> str:
    """Status and message."""
    return f"{error.code().name}: {error.details()}"
