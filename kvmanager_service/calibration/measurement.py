"""Has an executor run steps, as its manager would, and notes how long it computed for each.

Station: called by `command`; calls `ExecutorService`.

    GetModelInfo: is it free? ─▶ ProfileMemory ─▶ InitializeKvCache ─▶ Execute, a step at a time ─▶ ProfileMemory(1, 1)

An executor with a cache is a manager's: one that is alive, or one that will come back and adopt it. Another `Execute`
stream would end that manager's, and a profile run its cache; so only an executor without one is taken. It is given back
without one: under other limits than those it was made for, a cache is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import grpc
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub

from kvmanager_service.calibration.fit import Measured
from kvmanager_service.calibration.shapes import (
    CalibrationLimits,
    StepShape,
    blocks_by_group,
    choose_shapes,
    make_step,
)
from kvmanager_service.core.kv_cache import needs_no_coordinator
from kvmanager_service.core.kv_groups import KVGroup
from kvmanager_service.core.step import Step
from kvmanager_service.executor_client import MAX_MESSAGE_BYTES, PROFILE_TIMEOUT_S, UNARY_TIMEOUT_S
from kvmanager_service.executor_groups import UnsupportedGroupsError, read_groups
from kvmanager_service.replay.cost_model import quantities
from kvmanager_service.replay.group_reads import GroupReads
from kvmanager_service.step_message import build_execute_request

__all__ = ["CalibrationError", "Measurement", "measure"]

_T = TypeVar("_T")
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
_NO_LIMITS = (1, 1)
"""Limits of a profile under which no step is timed."""


class CalibrationError(Exception):
    """An executor can not be measured.

    Attributes:
        reason: UPPER_SNAKE_CASE.
        is_unavailable: whether there is nobody to talk to, or not yet.
    """

    def __init__(self, reason: str, message: str, *, is_unavailable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_unavailable = is_unavailable


@dataclass(frozen=True)
class Measurement:
    """What was found.

    Attributes:
        info: what the executor said of its model.
        num_blocks: blocks that it has room for under these limits, the null block included.
        has_kv: whether any layer of it keeps K and V.
        steps: each shape with the median of its times.
    """

    info: pb.GetModelInfoResponse
    num_blocks: int
    has_kv: bool
    steps: list[Measured] = field(default_factory=list)


async def measure(
    address: str,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    rounds: int,
    force: bool,
    on_step: Callable[[int, int], None] = lambda _done, _total: None,
) -> Measurement:
    """Time an executor's steps.

    Args:
        address: host:port of its `ExecutorService`.
        max_num_batched_tokens: most tokens of a step; that of the manager that is replayed.
        max_num_seqs: most rows of a step; that of the same.
        rounds: how often each step is timed, after once to warm up. All steps have their turn before any has the next.
        force: take an executor that has a cache. The cache is gone then; a manager that is alive takes it back.
        on_step: told how many steps are done, of how many.

    Raises:
        CalibrationError: it is somebody's, or a call failed, or a step could not be computed.
    """
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        executor = _Executor(address, ExecutorServiceStub(channel))
        info = await executor.info()
        groups = _check_usable(info, force=force)
        profile = await executor.profile(max_num_batched_tokens, max_num_seqs)
        limits = CalibrationLimits(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=info.max_model_len,
            block_size=groups[0].block_size,
            num_blocks=profile.num_blocks,
            vocab_size=info.vocab_size,
            groups=tuple(groups),
        )
        reads = GroupReads(groups, [group.num_layers for group in info.kv_groups])
        shapes = choose_shapes(limits)
        if not shapes:
            raise CalibrationError("LIMITS_TOO_SMALL", f"expected limits that some step keeps to, got {limits}")
        kv_cache = await executor.initialize(1 + sum(blocks_by_group(shapes, limits)))
        try:
            times = await _time_steps(executor, shapes, limits, kv_cache.kv_epoch, rounds=rounds, on_step=on_step)
        except BaseException:
            with suppress(CalibrationError):  # what ended the run is told; an executor that is gone keeps nothing
                await executor.give_back(kv_cache.kv_epoch)
            raise
        await executor.give_back(kv_cache.kv_epoch)
        steps = [
            Measured(str(shape), quantities(step, reads), max(1.0, median(found)))
            for shape, (step, found) in zip(shapes, times, strict=True)
        ]
        return Measurement(info, profile.num_blocks, reads.has_kv, steps)


def _check_usable(info: pb.GetModelInfoResponse, *, force: bool) -> list[KVGroup]:
    """The executor's groups, if it can be measured."""
    try:
        groups = read_groups(info.kv_groups, info.block_size)
    except UnsupportedGroupsError as error:
        raise CalibrationError("KV_GEOMETRY_UNSUPPORTED", f"expected {error}; no manager would take it") from error
    if info.HasField("kv_cache") and not force:
        raise CalibrationError(
            "EXECUTOR_IN_USE",
            f"expected an executor without a KV cache, got one with {info.kv_cache.num_blocks:,} blocks: it serves a "
            "manager, or keeps the cache for one that will come back. Start another (python -m executor_service, "
            "without --manager), or stop the manager and give --force, which throws the cache away",
        )
    return groups


async def _time_steps(
    executor: _Executor,
    shapes: list[StepShape],
    limits: CalibrationLimits,
    kv_epoch: int,
    *,
    rounds: int,
    on_step: Callable[[int, int], None],
) -> list[tuple[Step, list[int]]]:
    """By shape, its step and how long that took each time."""
    times: list[list[int]] = [[] for _ in shapes]
    num_blocks = blocks_by_group(shapes, limits)
    steps = [make_step(shape, 1, limits, num_blocks) for shape in shapes]
    groups = limits.kv_groups
    table_sizes = () if needs_no_coordinator(groups) else tuple(group.block_size for group in groups)
    total = (rounds + 1) * len(shapes)
    stream = executor.open_stream()
    try:
        for done in range(total):
            which = done % len(shapes)
            steps[which].step_id = done + 1
            request = build_execute_request(steps[which], kv_epoch, limits.block_size, table_sizes)
            response = await stream.run(request, str(shapes[which]))
            if done >= len(shapes):
                times[which].append(response.compute_us)
            on_step(done + 1, total)
    finally:
        stream.cancel()
    return list(zip(steps, times, strict=True))


class _Executor:
    """The executor's unary calls; each raises CalibrationError."""

    def __init__(self, address: str, stub: Any) -> None:
        self._address = address
        self._stub = stub

    async def info(self) -> pb.GetModelInfoResponse:
        """What it serves."""
        return await self._call(self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=UNARY_TIMEOUT_S))

    async def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> pb.ProfileMemoryResponse:
        """How many blocks it has room for."""
        request = pb.ProfileMemoryRequest(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        return await self._call(self._stub.ProfileMemory(request, timeout=PROFILE_TIMEOUT_S))

    async def initialize(self, num_blocks: int) -> pb.KvCacheState:
        """A cache of that many blocks."""
        request = pb.InitializeKvCacheRequest(num_blocks=num_blocks, knows_group_block_sizes=True)
        response: pb.InitializeKvCacheResponse = await self._call(
            self._stub.InitializeKvCache(request, timeout=PROFILE_TIMEOUT_S)
        )
        return response.kv_cache

    async def give_back(self, kv_epoch: int) -> None:
        """Leave it without a cache, unless the cache is somebody else's by now."""
        info = await self.info()
        if info.HasField("kv_cache") and info.kv_cache.kv_epoch == kv_epoch:
            await self.profile(*_NO_LIMITS)

    def open_stream(self) -> _Stream:
        """The stream that steps go down."""
        return _Stream(self._address, self._stub.Execute())

    async def _call(self, call: Awaitable[_T]) -> _T:
        try:
            return _readable(await call)
        except grpc.aio.AioRpcError as error:
            raise _as_calibration_error(self._address, error) from error


class _Stream:
    """One `Execute` stream, one step at a time."""

    def __init__(self, address: str, call: Any) -> None:
        self._address = address
        self._call = call

    async def run(self, request: pb.ExecuteRequest, name: str) -> pb.ExecuteResponse:
        """Run a step and return its answer. Raises CalibrationError when the step, or a row of it, failed."""
        try:
            async with asyncio.timeout(PROFILE_TIMEOUT_S):
                await self._call.write(request)
                response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _as_calibration_error(self._address, error) from error
        except asyncio.InvalidStateError as error:  # a write to a stream that has ended; its status says why
            raise await self._ended() from error
        except TimeoutError as error:
            message = f"{name}: expected an answer within {PROFILE_TIMEOUT_S:g} s, got none"
            raise CalibrationError("DEADLINE_EXCEEDED", message) from error
        if response is grpc.aio.EOF:
            raise await self._ended()
        answer: pb.ExecuteResponse = _readable(response)
        for row_error in answer.row_errors:
            message = f"{name}: row {row_error.row} could not be computed: {row_error.reason}: {row_error.message}"
            raise CalibrationError("ROW_FAILED", message)
        return answer

    def cancel(self) -> None:
        """End the stream."""
        self._call.cancel()

    async def _ended(self) -> CalibrationError:
        code, details = await self._call.code(), await self._call.details()
        return _calibration_error(self._address, code, details or "the executor ended the stream")


def _as_calibration_error(address: str, error: grpc.aio.AioRpcError) -> CalibrationError:
    return _calibration_error(address, error.code(), error.details() or "")


def _calibration_error(address: str, code: grpc.StatusCode, details: str) -> CalibrationError:
    message = f"{address}: {code.name}: {details}"
    if code is grpc.StatusCode.ABORTED:
        message += "; a manager has taken the executor: measure one that no manager knows"
    return CalibrationError(code.name, message, is_unavailable=code is grpc.StatusCode.UNAVAILABLE)


def _readable(answer: _T | None) -> _T:
    """Pass an answer on. grpc.aio gives None for bytes that are not the message."""
    if answer is None:
        raise CalibrationError(
            "NOT_AN_EXECUTOR", "expected an executor's answer, got bytes that are not one; is the address right?"
        )
    return answer
