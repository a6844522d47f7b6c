"""Executors that talk wrong: a gRPC server before a good one, each with one fault in how it keeps the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1 import executor_service_pb2_grpc as pb_grpc
from kvplane_client.conformance.target import info_of

from executor_service.server import running_executor
from tests.conformance.broken_backends import FaultyBackend
from tests.conformance.trial import sim_config

EPOCH_KEY = "kvplane-kv-epoch"
TOGETHER_S = 0.05
"""So long the fault that needs two steps waits for the second."""


class Wire(pb_grpc.ExecutorServiceServicer):
    """Hands everything on as it is.

    Args:
        stub: The good executor's.
        backend: What it computes with.
    """

    def __init__(self, stub: pb_grpc.ExecutorServiceStub, backend: FaultyBackend | None) -> None:
        self.stub = stub
        self.backend = backend
        self.server: grpc.aio.Server | None = None

    async def GetModelInfo(self, request, context):  # noqa: N802
        return await self.passed(self.stub.GetModelInfo(request), context)

    async def ProfileMemory(self, request, context):  # noqa: N802
        return await self.passed(self.stub.ProfileMemory(request), context)

    async def InitializeKvCache(self, request, context):  # noqa: N802
        return await self.passed(self.stub.InitializeKvCache(request), context)

    async def Reset(self, request, context):  # noqa: N802
        return await self.passed(self.stub.Reset(request), context)

    async def LoadAdapter(self, request, context):  # noqa: N802
        return await self.passed(self.stub.LoadAdapter(request), context)

    async def UnloadAdapter(self, request, context):  # noqa: N802
        return await self.passed(self.stub.UnloadAdapter(request), context)

    async def ListAdapters(self, request, context):  # noqa: N802
        return await self.passed(self.stub.ListAdapters(request), context)

    async def ListBlockTags(self, request, context):  # noqa: N802
        try:
            async for portion in self.stub.ListBlockTags(request):
                yield portion
        except grpc.aio.AioRpcError as error:
            await self.end(context, error)

    async def Execute(self, request_iterator, context):  # noqa: N802
        call = self.stub.Execute(metadata=await self.opened(context))
        sender = asyncio.create_task(self.send(self.sent(request_iterator), call))
        try:
            async for response in call:
                yield self.answered(response)
        except grpc.aio.AioRpcError as error:
            async for response in self.failed(error):
                yield response
            await self.end(context, error)
        finally:
            call.cancel()
            sender.cancel()
            await asyncio.wait([sender])

    async def send(self, requests, call) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream is over; its reader says why
            async for request in requests:
                await call.write(request)
            await call.done_writing()

    async def passed(self, call, context) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            await self.end(context, error)

    # What faults change.

    async def opened(self, context) -> tuple[tuple[str, str], ...]:
        """The metadata a stream is opened with."""
        return tuple((key, value) for key, value in context.invocation_metadata() if key == EPOCH_KEY)

    async def sent(self, requests) -> AsyncIterator[pb.ExecuteRequest]:
        """The steps that are handed on."""
        async for request in requests:
            yield request

    def answered(self, response: pb.ExecuteResponse) -> pb.ExecuteResponse:
        """An answer on its way back."""
        return response

    async def failed(self, error: grpc.aio.AioRpcError) -> AsyncIterator[pb.ExecuteResponse]:
        """What is answered before a stream ends with an error."""
        return
        yield

    async def end(self, context, error: grpc.aio.AioRpcError) -> None:
        """End a call with the error that the good executor ended it with."""
        await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


class IgnoresFeeds(Wire):
    """Takes token 0 where a row is fed."""

    async def sent(self, requests):
        async for request in requests:
            if request.feeds_from.data:
                indptr, tokens = (ints(packed) for packed in (request.query_indptr, request.token_ids))
                for row, feed in enumerate(ints(request.feeds_from)):
                    if feed >= 0 and row + 1 < len(indptr):
                        tokens[indptr[row + 1] - 1] = 0
                request.token_ids.CopyFrom(column(tokens))
                request.ClearField("feeds_from")
                request.feeds_from_step_id = 0
            yield request


class AcceptsAnyEpoch(Wire):
    """Runs a step whatever content it speaks of."""

    async def sent(self, requests):
        async for request in requests:
            info = await self.stub.GetModelInfo(pb.GetModelInfoRequest())
            request.kv_epoch = info.kv_cache.kv_epoch
            yield request


class LosesTags(Wire):
    """Stores no tag."""

    async def sent(self, requests):
        async for request in requests:
            request.ClearField("block_tags")
            yield request


class LosesTagsOfCopies(Wire):
    """Stores no tag of a block that the same step copies to."""

    async def sent(self, requests):
        async for request in requests:
            targets = ints(request.copies.target_ids)
            kept = [
                (block, tag)
                for block, tag in zip(ints(request.block_tags.block_ids), request.block_tags.tags, strict=False)
                if block not in targets
            ]
            if targets and request.HasField("block_tags"):
                tags = pb.BlockTags(block_ids=column([block for block, _ in kept]), tags=[tag for _, tag in kept])
                request.block_tags.CopyFrom(tags)
            yield request


class ForgetsATerm(Wire):
    """Says that more memory was taken than it reckons with."""

    async def ProfileMemory(self, request, context):  # noqa: N802
        response = await self.passed(self.stub.ProfileMemory(request), context)
        response.peak_bytes += 4096
        return response


class TimesBackwards(Wire):
    """Says that steps took less than no time."""

    def answered(self, response):
        response.compute_us = -1
        return response


class AnswersForFailedRows(Wire):
    """Has a token for a row that has none."""

    REASONS: frozenset[str] = frozenset({"ALL_TOKENS_SUPPRESSED"})

    def answered(self, response):
        errors = [error for error in response.row_errors if error.reason not in self.REASONS]
        if len(errors) < len(response.row_errors):
            response.sampled_token_ids.CopyFrom(column([max(0, one) for one in ints(response.sampled_token_ids)]))
        del response.row_errors[:]
        response.row_errors.extend(errors)
        return response


class AnswersForFedRows(AnswersForFailedRows):
    """Has one for a row that was fed none."""

    REASONS = frozenset({"FED_BY_FAILED_ROW"})


class FailsSamplesAlone(Wire):
    """Has a failed row fail for the last of its samples."""

    def answered(self, response):
        tokens = ints(response.sampled_token_ids)
        failed = [place for place, token in enumerate(tokens) if token < 0]
        for place in failed[:-1]:
            tokens[place] = 0
        response.sampled_token_ids.CopyFrom(column(tokens))
        return response


class FailsWholeSteps(Wire):
    """Has all rows of a step fail where one does."""

    def answered(self, response):
        if response.row_errors:
            rows = range(len(ints(response.computed_upto)))
            del response.row_errors[:]
            response.row_errors.extend(pb.RowError(row=row, reason="FAILED", message="failed") for row in rows)
            response.sampled_token_ids.CopyFrom(column([-1] * len(ints(response.sampled_token_ids))))
        return response


class RunsStepsOutOfOrder(Wire):
    """Runs two steps that arrive together the other way round, and answers them in order."""

    def __init__(self, stub, backend) -> None:
        super().__init__(stub, backend)
        self.swapped: set[int] = set()
        self.held: pb.ExecuteResponse | None = None

    async def sent(self, requests):
        pending = asyncio.ensure_future(anext(requests, None))
        while (first := await pending) is not None:
            pending = asyncio.ensure_future(anext(requests, None))
            done, _ = await asyncio.wait([pending], timeout=TOGETHER_S)
            if done and (second := pending.result()) is not None:
                first.step_id, second.step_id = second.step_id, first.step_id
                yield second
                yield first
                pending = asyncio.ensure_future(anext(requests, None))
            else:
                yield first


class AnswersMalformedSteps(Wire):
    """Answers a step that it cannot run as if it had run."""

    async def failed(self, error):
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            info = await self.stub.GetModelInfo(pb.GetModelInfoRequest())
            step_id = 1
            yield pb.ExecuteResponse(
                step_id=step_id,
                kv_epoch=info.kv_cache.kv_epoch,
                sampled_token_ids=column([0]),
                computed_upto=column([1]),
            )


class DiesOfMalformedSteps(Wire):
    """Is gone after the first step that it cannot run."""

    async def failed(self, error):
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            assert self.server is not None
            self.stopped = asyncio.create_task(self.server.stop(None))
            await asyncio.sleep(3600)
        return
        yield


class HarmsKvOfOthers(Wire):
    """Refuses a malformed step once it has written where its numbers point: anywhere."""

    async def failed(self, error):
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            self.backend.spoil_all()
        return
        yield


class SaysNothingOfErrors(Wire):
    """Ends calls with a status and a message, without ErrorInfo."""

    async def end(self, context, error):
        await context.abort(error.code(), error.details() or "")


class TakesOverAtOnce(Wire):
    """A stream ends those before it as soon as it is opened."""

    async def opened(self, context):
        info = await self.stub.GetModelInfo(pb.GetModelInfoRequest())
        return ((EPOCH_KEY, str(info.kv_cache.kv_epoch)),)


class LeavesOldStreamsAlone(Wire):
    """Does not look at the epoch that a stream is opened with."""

    async def opened(self, context):
        return ()


class CountsShort(Wire):
    """Says that one token less is computed than is."""

    def answered(self, response):
        response.computed_upto.CopyFrom(column([max(0, value - 1) for value in ints(response.computed_upto)]))
        return response


class AcceptsNullBlocksAnywhere(Wire):
    """Takes the null block in any table for one that it need not read."""

    async def sent(self, requests):
        async for request in requests:
            for table in request.block_tables:
                table.block_ids.CopyFrom(column([block or 1 for block in ints(table.block_ids)]))
            yield request


class TakesAnyNumberOfTables(Wire):
    """Leaves out tables beyond the last group's, and has that group use the cache's last blocks where it has none."""

    async def sent(self, requests):
        num_groups = len(self.backend.WINDOWS)
        async for request in requests:
            tables = list(request.block_tables)[:num_groups]
            if len(tables) == num_groups - 1:
                cache = (await self.stub.GetModelInfo(pb.GetModelInfoRequest())).kv_cache
                count = len(ints(tables[0].block_ids))
                blocks = column([cache.num_blocks - 1 - place for place in range(count)])
                tables.append(pb.BlockTables(block_indptr=tables[0].block_indptr, block_ids=blocks,
                                             last_block_len=tables[0].last_block_len))  # fmt: skip
            del request.block_tables[:]
            request.block_tables.extend(tables)
            yield request


class MakesACacheForAnyManager(Wire):
    """Asks no manager whether it knows groups' own block sizes before it makes a cache."""

    async def InitializeKvCache(self, request, context):  # noqa: N802
        request.knows_group_block_sizes = True
        return await super().InitializeKvCache(request, context)


class ListsTagsToAnyManager(Wire):
    """Asks none before it hands a cache on."""

    async def ListBlockTags(self, request, context):  # noqa: N802
        request.knows_group_block_sizes = True
        async for portion in super().ListBlockTags(request, context):
            yield portion


@asynccontextmanager
async def broken_wire(fault: type[Wire], backend: FaultyBackend | None = None) -> AsyncIterator[str]:
    """A good executor behind a wire with a fault; yields the wire's address."""
    backend = backend or FaultyBackend()
    async with (
        running_executor(sim_config(backend.WINDOWS, max_loras=backend.MAX_LORAS), backend) as good,
        wire_before(good.address, fault, backend) as address,
    ):
        yield address


@asynccontextmanager
async def wire_before(address: str, fault: type[Wire], backend: FaultyBackend | None = None) -> AsyncIterator[str]:
    """The same before an executor that runs already."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    async with grpc.aio.insecure_channel(address) as channel:
        wire = fault(pb_grpc.ExecutorServiceStub(channel), backend)
        wire.server = server
        pb_grpc.add_ExecutorServiceServicer_to_server(wire, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason of an error's ErrorInfo."""
    info = info_of(error)
    return "" if info is None else info.reason


def ints(packed: common_pb2.Int32Array) -> list[int]:
    """A column's values."""
    size = len(packed.data) // 4
    return [int.from_bytes(packed.data[4 * place : 4 * place + 4], "little", signed=True) for place in range(size)]


def column(values: list[int]) -> common_pb2.Int32Array:
    """A column of these values."""
    return common_pb2.Int32Array(data=b"".join(value.to_bytes(4, "little", signed=True) for value in values))
