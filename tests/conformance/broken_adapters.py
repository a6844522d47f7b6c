"""Executors that are wrong about LoRA adapters: backends that compute wrong, and wires that tell wrong of them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib

import grpc
import numpy as np
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.base import AdapterContent, StepBatch, StepResult
from tests.conformance.broken_backends import FaultyBackend
from tests.conformance.broken_wire import Wire, column, ints, reason_of


class FaultyAdapters(FaultyBackend):
    """A sim backend with room for two adapters, and how it is spoiled."""

    MAX_LORAS = 2


class IgnoresAdapters(FaultyAdapters):
    """Computes every row as the model itself."""

    def execute(self, batch: StepBatch) -> StepResult:
        return super().execute(dataclasses.replace(batch, adapter_ids=None))


class TakesOneAdapterForAllRows(FaultyAdapters):
    """Computes the whole step with the adapter of one of its rows."""

    def execute(self, batch: StepBatch) -> StepResult:
        if batch.adapter_ids is not None:
            batch = dataclasses.replace(batch, adapter_ids=np.full_like(batch.adapter_ids, batch.adapter_ids.max()))
        return super().execute(batch)


class AdaptsPromptsOnly(FaultyAdapters):
    """Leaves the adapter out where a row goes on from what is in the cache."""

    def execute(self, batch: StepBatch) -> StepResult:
        if batch.adapter_ids is not None:
            begins = batch.positions[batch.query_indptr[:-1]] == 0
            batch = dataclasses.replace(batch, adapter_ids=np.where(begins, batch.adapter_ids, 0).astype(np.int32))
        return super().execute(batch)


class LeavesAdaptersInTheWeights(FaultyAdapters):
    """Computes rows without an adapter with the one that was unloaded last."""

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        super().initialize_kv_cache(num_blocks, num_host_blocks)
        self._salts[0] = 0

    def unload_adapter(self, adapter_id: int) -> None:
        self._salts[0] = self._salts[adapter_id]
        super().unload_adapter(adapter_id)

    def execute(self, batch: StepBatch) -> StepResult:
        if batch.adapter_ids is None:
            batch = dataclasses.replace(batch, adapter_ids=np.zeros(batch.num_rows, dtype=np.int32))
        return super().execute(batch)


class LosesTheCacheOnLoad(FaultyAdapters):
    """Makes room for an adapter where the cache lies."""

    def load_adapter(self, adapter_id: int, content: AdapterContent) -> None:
        super().load_adapter(adapter_id, content)
        self.spoil_all()


class LosesAdaptersWithTheCache(FaultyAdapters):
    """Forgets what adapters compute when a cache is made."""

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        super().initialize_kv_cache(num_blocks, num_host_blocks)
        self._salts = dict.fromkeys(self._salts, 0)


class TakesNoneAndLoadsAll(Wire):
    """Says that it takes no adapters, and loads them."""

    async def LoadAdapter(self, request, context):  # noqa: N802
        return pb.LoadAdapterResponse(adapter=pb.LoraAdapter(name=request.name, source=request.source, adapter_id=1))


class ListsNewestFirst(Wire):
    """Lists adapters the other way round."""

    async def ListAdapters(self, request, context):  # noqa: N802
        response = await self.passed(self.stub.ListAdapters(request), context)
        return pb.ListAdaptersResponse(adapters=reversed(response.adapters))


class KeepsSourcesToItself(Wire):
    """Does not say where an adapter comes from."""

    async def LoadAdapter(self, request, context):  # noqa: N802
        response = await self.passed(self.stub.LoadAdapter(request), context)
        response.adapter.source = ""
        return response


class AnswersAnew(Wire):
    """Loads a name anew that is loaded, under another id."""

    async def LoadAdapter(self, request, context):  # noqa: N802
        loaded = await self.stub.ListAdapters(pb.ListAdaptersRequest())
        if request.name in [adapter.name for adapter in loaded.adapters]:
            await self.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=request.name))
        return await self.passed(self.stub.LoadAdapter(request), context)


class DigestsNames(Wire):
    """Makes a revision of the name, too."""

    async def LoadAdapter(self, request, context):  # noqa: N802
        request.revision = ""
        response = await self.passed(self.stub.LoadAdapter(request), context)
        digest = hashlib.sha256(f"{request.name} {response.adapter.revision}".encode())
        response.adapter.revision = digest.hexdigest()
        return response


class UsesIdsAgain(Wire):
    """Gives an adapter the lowest id that is free."""

    def __init__(self, stub, backend) -> None:
        super().__init__(stub, backend)
        self.ids: dict[str, int] = {}
        self.theirs: dict[int, int] = {}

    async def LoadAdapter(self, request, context):  # noqa: N802
        response = await self.passed(self.stub.LoadAdapter(request), context)
        mine = next(number for number in range(1, 100) if number not in self.ids.values())
        self.ids.setdefault(request.name, mine)
        self.theirs[self.ids[request.name]] = response.adapter.adapter_id
        response.adapter.adapter_id = self.ids[request.name]
        return response

    async def ListAdapters(self, request, context):  # noqa: N802
        response = await self.passed(self.stub.ListAdapters(request), context)
        for adapter in response.adapters:
            adapter.adapter_id = self.ids[adapter.name]
        return response

    async def UnloadAdapter(self, request, context):  # noqa: N802
        self.ids.pop(request.name, None)
        return await self.passed(self.stub.UnloadAdapter(request), context)

    async def sent(self, requests):
        async for request in requests:
            request.adapter_ids.CopyFrom(column([self.theirs.get(one, one) for one in ints(request.adapter_ids)]))
            yield request


class TakesOtherContent(Wire):
    """Puts other content in the place of what is loaded under a name."""

    async def LoadAdapter(self, request, context):  # noqa: N802
        try:
            return await self.stub.LoadAdapter(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.ALREADY_EXISTS:
                await self.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=request.name))
            return await self.passed(self.stub.LoadAdapter(request), context)


class TakesAnyRevision(Wire):
    """Takes whatever is there."""

    async def LoadAdapter(self, request, context):  # noqa: N802
        request.revision = ""
        return await self.passed(self.stub.LoadAdapter(request), context)


class MakesRoom(Wire):
    """Unloads the oldest adapter where there is room for no other."""

    async def LoadAdapter(self, request, context):  # noqa: N802
        try:
            return await self.stub.LoadAdapter(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                oldest = (await self.stub.ListAdapters(pb.ListAdaptersRequest())).adapters[0]
                await self.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=oldest.name))
            return await self.passed(self.stub.LoadAdapter(request), context)


class UnloadsAnything(Wire):
    """Is content where there is nothing to unload."""

    async def UnloadAdapter(self, request, context):  # noqa: N802
        try:
            return await self.stub.UnloadAdapter(request)
        except grpc.aio.AioRpcError:
            return pb.UnloadAdapterResponse()


class CutsFields(Wire):
    """Makes fields fit that are too long, or empty."""

    async def LoadAdapter(self, request, context):  # noqa: N802
        request.name, request.source = request.name[:256] or "unnamed", request.source[:4096] or "nowhere"
        return await self.passed(self.stub.LoadAdapter(request), context)


class RunsWithoutWhatIsGone(Wire):
    """Computes rows with an adapter that is not loaded as the model itself."""

    async def sent(self, requests):
        async for request in requests:
            loaded = (await self.stub.ListAdapters(pb.ListAdaptersRequest())).adapters
            known = [adapter.adapter_id for adapter in loaded]
            request.adapter_ids.CopyFrom(column([one if one in known else 0 for one in ints(request.adapter_ids)]))
            yield request


class RunsQueuedStepsAsTheModel(Wire):
    """Takes the adapter off a step that is queued while it is unloaded; the first such step waits for that."""

    def __init__(self, stub, backend) -> None:
        super().__init__(stub, backend)
        self.unloaded = asyncio.Event()

    async def UnloadAdapter(self, request, context):  # noqa: N802
        response = await self.passed(self.stub.UnloadAdapter(request), context)
        self.unloaded.set()
        return response

    async def sent(self, requests):
        async for request in requests:
            if request.adapter_ids.data and not self.unloaded.is_set():
                await self.unloaded.wait()
                request.ClearField("adapter_ids")
            yield request


class LoadsWhatItCannotRun(Wire):
    """Answers as if it had loaded what the good executor refuses for one reason."""

    REASON = ""

    async def LoadAdapter(self, request, context):  # noqa: N802
        try:
            return await self.stub.LoadAdapter(request)
        except grpc.aio.AioRpcError as error:
            if reason_of(error) == self.REASON:
                return pb.LoadAdapterResponse(adapter=pb.LoraAdapter(name=request.name, adapter_id=1, revision="r"))
            return await self.end(context, error)


class LoadsWhatItCannotRead(LoadsWhatItCannotRun):
    """Of files that are none."""

    REASON = "ADAPTER_NOT_READABLE"


class LoadsWhatIsNotThere(LoadsWhatItCannotRun):
    """Of sources that lead nowhere."""

    REASON = "ADAPTER_NOT_FOUND"


class LoadsOtherShapes(LoadsWhatItCannotRun):
    """Of matrices that do not fit."""

    REASON = "ADAPTER_SHAPE_MISMATCH"


class LoadsOtherLayers(LoadsWhatItCannotRun):
    """Of layers that the model lacks."""

    REASON = "ADAPTER_TARGETS_UNKNOWN"


class LoadsOtherKinds(LoadsWhatItCannotRun):
    """Of adapters that are no LoRA."""

    REASON = "ADAPTER_NOT_SUPPORTED"


class ReadsAnyRank(LoadsWhatItCannotRun):
    """Of more than it has room for, which it says to be of rank 0."""

    REASON = "ADAPTER_TOO_LARGE"
