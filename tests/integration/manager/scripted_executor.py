"""A scripted executor behind a real server, and an engine loop that uses it."""

# ruff: noqa: N802 - the contract names the methods

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from kvplane.common.v1.common_pb2 import Int32Array
from kvplane.executor.v1 import executor_service_pb2 as pb
from kvplane.executor.v1 import executor_service_pb2_grpc as pb_grpc

from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.request import RequestOutput
from kvmanager_service.engine_api import StopMatch
from kvmanager_service.engine_loop import EngineLoop
from kvmanager_service.registry import ExecutorRegistry, RegisteredExecutor

EXECUTOR_ID = "scripted"


def model_info(**changes: Any) -> pb.GetModelInfoResponse:
    """A model of 600 tokens and length 128, without a tokenizer."""
    values: dict[str, Any] = {
        "executor_id": EXECUTOR_ID,
        "model_name": "tiny",
        "model_fingerprint": "f1",
        "vocab_size": 600,
        "max_model_len": 128,
        "block_size": 4,
        "kv_groups": [pb.KvGroup(type=pb.KV_GROUP_TYPE_FULL_ATTENTION)],
    }
    return pb.GetModelInfoResponse(**(values | changes))


class ScriptedExecutor(pb_grpc.ExecutorServiceServicer):
    """Answers each step with token 7 for every sample.

    Attributes:
        info: what it says of itself.
        kv_cache: the cache it says it has once it is initialised.
        asked_for_tokenizer: for each time that it was asked about its model, whether with the tokenizer's files.
        tags: what it lists when `info` says that its cache is filled.
        steps: the steps it was sent.
        compute: set while steps are answered.
        streams_to_lose: how many streams end with a step unanswered, from now on.
        steps_of_another_cache: ids of the steps that it answers as one does whose cache is another than the step's:
            under another epoch, and with token 8.
        stops_with: the ErrorInfo reason that such streams end with, UNAVAILABLE; "" ends them as if all were well.
        hangs_in: the name of a method that never answers.
        called: the methods that were called while it was brought up, in order.
    """

    def __init__(self) -> None:
        self.info = model_info()
        self.kv_cache = pb.KvCacheState(kv_epoch=1, num_blocks=11, block_size=4)
        self.asked_for_tokenizer: list[bool] = []
        self.tags = pb.BlockTags()
        self.steps: list[pb.ExecuteRequest] = []
        self.compute = asyncio.Event()
        self.compute.set()
        self.streams_to_lose = 0
        self.steps_of_another_cache: Container[int] = ()
        self.stops_with = ""
        self.hangs_in = ""
        self.called: list[str] = []

    async def _called(self, method: str) -> None:
        self.called.append(method)
        if method == self.hangs_in:
            await asyncio.Event().wait()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        await self._called("GetModelInfo")
        self.asked_for_tokenizer.append(request.include_tokenizer_files)
        return self.info

    async def ProfileMemory(self, request: pb.ProfileMemoryRequest, context: Any) -> pb.ProfileMemoryResponse:
        await self._called("ProfileMemory")
        return pb.ProfileMemoryResponse(num_blocks=self.kv_cache.num_blocks)

    async def InitializeKvCache(
        self, request: pb.InitializeKvCacheRequest, context: Any
    ) -> pb.InitializeKvCacheResponse:
        await self._called("InitializeKvCache")
        return pb.InitializeKvCacheResponse(kv_cache=self.kv_cache)

    async def ListBlockTags(
        self, request: pb.ListBlockTagsRequest, context: Any
    ) -> AsyncIterator[pb.ListBlockTagsResponse]:
        await self._called("ListBlockTags")
        yield pb.ListBlockTagsResponse(block_tags=self.tags)

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ExecuteRequest], context: Any
    ) -> AsyncIterator[pb.ExecuteResponse]:
        async for step in request_iterator:
            self.steps.append(step)
            await self.compute.wait()
            if self.streams_to_lose:
                self.streams_to_lose -= 1
                if self.stops_with:
                    await stop(context, self.stops_with)
                return
            if step.step_id in self.steps_of_another_cache:
                yield answer(step, kv_epoch=step.kv_epoch + 1, token_id=8)
            else:
                yield answer(step)


async def stop(context: Any, reason: str) -> None:
    """End a call as an executor does for a reason of its own."""
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="it went")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="kvplane"))
    await context.abort_with_status(rpc_status.to_status(status))


def answer(step: pb.ExecuteRequest, *, kv_epoch: int | None = None, token_id: int = 7) -> pb.ExecuteResponse:
    """What an executor answers when all goes well; kv_epoch None is the step's."""
    indptr, positions = array("i", step.query_indptr.data), array("i", step.positions.data)
    num_samples = len(array("i", step.sampling.rows.data))
    return pb.ExecuteResponse(
        step_id=step.step_id,
        kv_epoch=step.kv_epoch if kv_epoch is None else kv_epoch,
        sampled_token_ids=Int32Array(data=array("i", [token_id] * num_samples).tobytes()),
        computed_upto=Int32Array(data=array("i", [positions[end - 1] + 1 for end in indptr[1:]]).tobytes()),
    )


@dataclass
class Sink:
    """An `OutputSink` that keeps what it is given, and finds a stop string in the last output if it is told to."""

    outputs: list[RequestOutput] = field(default_factory=list)
    match: StopMatch | None = None

    def push(self, output: RequestOutput) -> StopMatch | None:
        self.outputs.append(output)
        return self.match if output.finish_reason else None

    @property
    def last(self) -> RequestOutput | None:
        """The last output, once there is one."""
        return self.outputs[-1] if self.outputs and self.outputs[-1].finish_reason else None

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        return [token_id for output in self.outputs for token_id in output.token_ids]


@dataclass
class Split:
    """An engine loop and the executor it uses."""

    engine: EngineLoop
    executor: ScriptedExecutor
    registry: ExecutorRegistry

    @property
    def record(self) -> RegisteredExecutor:
        """What the registry knows of the executor."""
        return self.registry.records()[0]


@asynccontextmanager
async def listening(executor: ScriptedExecutor) -> AsyncIterator[str]:
    """Serve the executor on a free port; yields its address."""
    server = grpc.aio.server()
    pb_grpc.add_ExecutorServiceServicer_to_server(executor, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def running_engine(
    *addresses: str, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> AsyncIterator[tuple[EngineLoop, ExecutorRegistry]]:
    """An engine that runs, with executors registered as `executor-0`, `executor-1`, ..., each for a minute."""
    registry = ExecutorRegistry(clock, lease_ms=60_000)
    for index, address in enumerate(addresses):
        registry.register(f"executor-{index}", address)
    engine = EngineLoop(ManagerConfig(**settings), registry)
    await engine.start()
    try:
        yield engine, registry
    finally:
        await engine.stop()


@asynccontextmanager
async def running_split(executor: ScriptedExecutor, **settings: Any) -> AsyncIterator[Split]:
    """Serve the executor on a free port, registered with an engine that runs."""
    async with listening(executor) as address, running_engine(address, **settings) as (engine, registry):
        yield Split(engine, executor, registry)
