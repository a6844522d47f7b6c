"""A manager whose behaviour a test writes down: a real gRPC server on port 0.

Its model: the token of output position ``i`` is byte ``i`` of a text, so that characters of several bytes are held back
by the detokeniser, and resumed tokens are pushed through it again, as the contract wants.
"""

# ruff: noqa: N802 - the contract names the methods

from __future__ import annotations

import asyncio
import codecs
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from kvplane.common.v1 import common_pb2
from kvplane.kvmanager.v1 import executor_registry_service_pb2 as registry_pb
from kvplane.kvmanager.v1 import executor_registry_service_pb2_grpc as registry_grpc
from kvplane.kvmanager.v1 import inference_service_pb2 as pb
from kvplane.kvmanager.v1 import inference_service_pb2_grpc as inference_grpc
from kvplane.kvmanager.v1 import kv_manager_service_pb2 as manager_pb
from kvplane.kvmanager.v1 import kv_manager_service_pb2_grpc as manager_grpc
from kvplane.kvmanager.v1 import sequence_pool_pb2 as pool_pb

TEXT = "Ω naïve 漢字 text 🙂!"
PROMPT_TOKENS = 7
CACHED_TOKENS = 3

Generate = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateResponse]]
Many = Callable[[AsyncIterator[pb.GenerateManyRequest], Any], AsyncIterator[pb.GenerateManyResponse]]
Unary = Callable[[Any, Any], Awaitable[Any]]


def text_of_output(index: int) -> str:
    """What a request's output ``index`` is: each begins later in the text than the one before, and ends with it."""
    return TEXT[2 * index :]


def pieces(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """All messages of an undisturbed answer to a request; those of several outputs in turns."""
    if request.n <= 1:
        return _pieces_of_output(request, 0, request.resume_token_ids.ids)
    assert len(request.resume_outputs) in (0, request.n)
    resumed = request.resume_outputs or [pb.ResumedOutput()] * request.n
    outputs = [
        _pieces_of_output(request, index, output.token_ids)
        for index, output in enumerate(resumed)
        if not output.is_finished
    ]
    return [message for turn in itertools.zip_longest(*outputs) for message in turn if message is not None]


def _pieces_of_output(request: pb.GenerateRequest, place: int, resumed: Sequence[int]) -> list[pb.GenerateResponse]:
    data = text_of_output(place).encode()
    limit = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else len(data)
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = len(resumed)
    assert bytes(resumed) == data[:start], "resumed tokens are those that were sent"
    decoder.decode(data[:start])
    messages = []
    for index in range(start, min(limit, len(data))):
        message = pb.GenerateResponse(
            request_id=request.request_id,
            text=decoder.decode(data[index : index + 1]),
            token_ids=[data[index]],
            index=place,
        )
        if request.sampling.HasField("logprobs"):
            top = [pb.TokenLogprob(token_id=data[index], logprob=-0.5)]
            message.logprobs.append(pb.TokenLogprobs(logprob=-0.5, top=top))
        if index == start:
            message.usage.CopyFrom(usage(index + 1, cached=0 if start else CACHED_TOKENS))
        messages.append(message)
    messages[-1].finish_reason = common_pb2.FINISH_REASON_LENGTH
    messages[-1].usage.CopyFrom(usage(start + len(messages), cached=0 if start else CACHED_TOKENS))
    return messages


def usage(completion: int, cached: int = CACHED_TOKENS) -> common_pb2.Usage:
    return common_pb2.Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=completion, cached_tokens=cached)


async def answer(request: pb.GenerateRequest, _context: Any) -> AsyncIterator[pb.GenerateResponse]:
    """The undisturbed answer."""
    for message in pieces(request):
        yield message


def break_after(count: int) -> Generate:
    """Delivers some messages, then breaks as a lost connection does: UNAVAILABLE without details."""

    async def script(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        for message in pieces(request)[:count]:
            yield message
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")

    return script


def hang_after(count: int, cancelled: Callable[[], None]) -> Generate:
    """Delivers some messages, then nothing until the client goes away."""

    async def script(request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        # The script has no end of its own, so the call is done only when the client has gone away.
        context.add_done_callback(lambda _context: cancelled())
        for message in pieces(request)[:count]:
            yield message
        await asyncio.Event().wait()

    return script


def fail(code: grpc.StatusCode, message: str, reason: str = "", retry_ms: int = 0, **metadata: str) -> Any:
    """A script, for any kind of method, that fails as the contract says."""
    details = []
    if reason:
        details.append(error_details_pb2.ErrorInfo(reason=reason, domain="kvplane", metadata=metadata))
    if retry_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(retry_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailer = (("grpc-status-details-bin", status.SerializeToString()),)

    def script(_request: Any, context: Any) -> Any:
        return context.abort(code, message, trailer)

    return script


def failing_stream(code: grpc.StatusCode, message: str, reason: str = "", retry_ms: int = 0, **metadata: str) -> Any:
    """The same for a method that streams its response."""
    failing = fail(code, message, reason, retry_ms, **metadata)

    async def script(request: Any, context: Any) -> AsyncIterator[Any]:
        await failing(request, context)
        yield

    return script


@dataclass
class Scripts:
    """What the manager does. A list gives one entry to each call; its last entry serves all later calls.

    Attributes:
        generate: Scripts of Generate.
        many: Scripts of GenerateMany.
        unary: Scripts by method name.
        health: What the health service says.
        seen: Every request, with the method's name.
    """

    generate: list[Generate] = field(default_factory=lambda: [answer])
    many: list[Many] = field(default_factory=list)
    unary: dict[str, list[Unary]] = field(default_factory=dict)
    health: int = health_pb2.HealthCheckResponse.SERVING
    seen: list[tuple[str, Any]] = field(default_factory=list)

    def of(self, method: str) -> list[Any]:
        """The requests one method has seen."""
        return [request for name, request in self.seen if name == method]

    def next(self, scripts: list[Any]) -> Any:
        """Takes the next script."""
        return scripts.pop(0) if len(scripts) > 1 else scripts[0]


class _Inference(inference_grpc.InferenceServiceServicer):
    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self._scripts.seen.append(("Generate", request))
        async for message in self._scripts.next(self._scripts.generate)(request, context):
            yield message

    async def GenerateMany(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        async def recorded() -> AsyncIterator[pb.GenerateManyRequest]:
            async for order in request_iterator:
                self._scripts.seen.append(("GenerateMany", order))
                yield order

        async for message in self._scripts.next(self._scripts.many)(recorded(), context):
            yield message

    async def Abort(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "Abort", request, context, pb.AbortResponse())

    async def GetModel(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "GetModel", request, context, MODEL)

    async def GetContract(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "GetContract", request, context, CONTRACT)


class _Manager(manager_grpc.KvManagerServiceServicer):
    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def GetStats(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "GetStats", request, context, STATS)

    async def ListRequests(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "ListRequests", request, context, _page_of_requests(request))

    async def ListBlocks(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "ListBlocks", request, context, _page_of_blocks(request))

    async def TraceBlock(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "TraceBlock", request, context, TRACE)

    async def WatchKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Two batches, then what a stream that fell behind ends with."""
        self._scripts.seen.append(("WatchKvEvents", request))
        for message in KV_EVENTS:
            yield message
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "too slow")

    async def PinPrefix(self, request: Any, context: Any) -> Any:
        response = manager_pb.PinPrefixResponse(pin=PINS.pins[0])
        return await _unary(self._scripts, "PinPrefix", request, context, response)

    async def UnpinPrefix(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "UnpinPrefix", request, context, manager_pb.UnpinPrefixResponse())

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        response = manager_pb.LoadAdapterResponse(adapter=ADAPTERS.adapters[0])
        return await _unary(self._scripts, "LoadAdapter", request, context, response)

    async def UnloadAdapter(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "UnloadAdapter", request, context, manager_pb.UnloadAdapterResponse())

    async def ListAdapters(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "ListAdapters", request, context, ADAPTERS)

    async def ListPinnedPrefixes(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "ListPinnedPrefixes", request, context, PINS)

    async def OpenPool(self, request: Any, context: Any) -> Any:
        info = pool_pb.SequencePoolInfo(pool_id=request.pool_id, num_blocks=request.num_blocks, block_size=16)
        return await _unary(self._scripts, "OpenPool", request, context, pool_pb.OpenPoolResponse(pool=info))

    async def UpdateSequences(self, request: Any, context: Any) -> Any:
        """Every operation is answered with an empty table."""
        results = [pool_pb.SequenceResult(table=pool_pb.SequenceTable()) for _ in request.operations]
        response = pool_pb.UpdateSequencesResponse(batch_id=request.batch_id, results=results)
        return await _unary(self._scripts, "UpdateSequences", request, context, response)

    async def ClosePool(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "ClosePool", request, context, pool_pb.ClosePoolResponse())

    async def ResetPrefixCache(self, request: Any, context: Any) -> Any:
        response = manager_pb.ResetPrefixCacheResponse(blocks_forgotten=4)
        return await _unary(self._scripts, "ResetPrefixCache", request, context, response)


class _Registry(registry_grpc.ExecutorRegistryServiceServicer):
    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def Register(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "Register", request, context, registry_pb.RegisterResponse(lease_ms=1000))

    async def ListExecutors(self, request: Any, context: Any) -> Any:
        return await _unary(self._scripts, "ListExecutors", request, context, EXECUTORS)

    async def SwitchExecutor(self, request: Any, context: Any) -> Any:
        response = registry_pb.SwitchExecutorResponse(previous_executor_id="ex-1")
        return await _unary(self._scripts, "SwitchExecutor", request, context, response)


async def _unary(scripts: Scripts, method: str, request: Any, context: Any, default: Any) -> Any:
    recorded = type(request)()
    recorded.CopyFrom(request)
    scripts.seen.append((method, recorded))
    planned = scripts.unary.get(method)
    return await scripts.next(planned)(request, context) if planned else default


async def succeed_with(response: Any, _request: Any, _context: Any) -> Any:
    return response


MODEL = pb.GetModelResponse(
    name="tiny", max_model_len=128, vocab_size=256, eos_token_ids=[2], max_logprobs=5, has_chat_template=True,
    has_tokenizer=True, dtype="float32",
)  # fmt: skip
CONTRACT = pb.GetContractResponse(contract_version=1)
STATS = manager_pb.GetStatsResponse(
    uptime_seconds=12.5,
    state=manager_pb.MANAGER_STATE_SERVING,
    pool=manager_pb.PoolStats(
        block_size=16,
        num_blocks=10,
        free_blocks=6,
        cached_blocks=5,
        kv_epoch=9,
        num_host_blocks=20,
        used_host_blocks=7,
        pinned_blocks=2,
        group_block_sizes=[16],
    ),
    requests_waiting=1,
    requests_running=2,
    requests_finished={"stop": 3, "length": 1},
    preemptions=6,
    reschedules=2,
    prefix_queries=100,
    prefix_hits=25,
    swapped_out=4,
    swapped_in=3,
    settings=manager_pb.SchedulerSettings(
        policy="fcfs",
        max_num_batched_tokens=512,
        max_num_seqs=8,
        max_waiting=64,
        enable_prefix_caching=True,
        isolate_tenants=True,
        preemption_mode="swap",
    ),
    tenants=[
        manager_pb.TenantStats(tenant="acme", requests_waiting=2, requests_running=1, served=340.25),
        manager_pb.TenantStats(requests_waiting=1),
    ],
)
REQUESTS = [
    manager_pb.RequestInfo(
        request_id=f"r{index}", status=manager_pb.REQUEST_STATUS_RUNNING, num_prompt_tokens=index,
        block_table=[1, 2, 3, 7], age_seconds=1.5, tenant="acme",
    )
    for index in range(5)
]  # fmt: skip
BLOCKS = [
    manager_pb.BlockInfo(block_id=1, ref_cnt=2, block_hash=b"\x01" * 16),
    manager_pb.BlockInfo(block_id=2, ref_cnt=1),
    manager_pb.BlockInfo(block_id=3, ref_cnt=1, block_hash=b"\x02" * 16, provisional=True),
    manager_pb.BlockInfo(block_id=4, ref_cnt=0, block_hash=b"\x03" * 16),
    manager_pb.BlockInfo(block_id=70, ref_cnt=0),
]
ADAPTERS = manager_pb.ListAdaptersResponse(
    adapters=[
        manager_pb.LoraAdapter(
            name="support", revision="r1", source="/lora/support", rank=8, size_bytes=2_500_000, requests=3
        ),
        manager_pb.LoraAdapter(name="[b]", revision="r2", source="org/b", rank=16, size_bytes=400_000),
    ]
)
PINS = manager_pb.ListPinnedPrefixesResponse(
    pins=[
        manager_pb.PinnedPrefix(name="system", num_tokens=70, num_blocks=4, held_blocks=3),
        manager_pb.PinnedPrefix(
            name="[b]",
            num_tokens=16,
            num_blocks=1,
            held_blocks=1,
            keys=manager_pb.KvBlockKeys(cache_salt="s", tenant="", lora_id="[l]", lora_revision="r1"),
        ),
    ],
    max_blocks=25,
)
TRACE = manager_pb.TraceBlockResponse(
    records=[
        manager_pb.BlockRecord(order=3, moment=manager_pb.BLOCK_MOMENT_ALLOCATED, request_id="r1"),
        manager_pb.BlockRecord(order=8, moment=manager_pb.BLOCK_MOMENT_FILLED, step_id=4, block_hash=b"\xab\xcd"),
    ],
    num_groups=1,
)
KV_EVENTS = [
    manager_pb.WatchKvEventsResponse(
        log_id="log",
        events=[
            manager_pb.KvEvent(sequence=4, cleared=manager_pb.KvCacheCleared()),
            manager_pb.KvEvent(
                sequence=4,
                stored=manager_pb.KvBlockStored(
                    block_id=7,
                    block_hash=b"\xaa",
                    content_id=1,
                    medium=manager_pb.KV_MEDIUM_DEVICE,
                    keys=manager_pb.KvBlockKeys(cache_salt="s\x1b", tenant="", lora_id="a", lora_revision="1"),
                ),
            ),
        ],
        next_sequence=5,
        is_snapshot=True,
    ),
    manager_pb.WatchKvEventsResponse(
        log_id="log",
        events=[
            manager_pb.KvEvent(
                sequence=5,
                removed=manager_pb.KvBlockRemoved(
                    block_id=7, block_hash=b"\xaa", content_id=1, medium=manager_pb.KV_MEDIUM_DEVICE
                ),
            )
        ],
        next_sequence=6,
    ),
]
EXECUTORS = registry_pb.ListExecutorsResponse(
    executors=[
        registry_pb.ExecutorInfo(
            executor_id="ex-1", address="localhost:1", state=registry_pb.EXECUTOR_STATE_ACTIVE, lease_remaining_ms=2500
        )
    ]
)
PAGE_SIZE = 2


def _page_of_requests(request: manager_pb.ListRequestsRequest) -> manager_pb.ListRequestsResponse:
    found = [info for info in REQUESTS if request.request_id in ("", info.request_id)]
    first = int(request.page_token or 0)
    more = str(first + PAGE_SIZE) if first + PAGE_SIZE < len(found) else ""
    return manager_pb.ListRequestsResponse(requests=found[first : first + PAGE_SIZE], next_page_token=more)


def _page_of_blocks(request: manager_pb.ListBlocksRequest) -> manager_pb.ListBlocksResponse:
    keep = {
        manager_pb.BLOCK_FILTER_UNSPECIFIED: lambda block: True,
        manager_pb.BLOCK_FILTER_USED: lambda block: block.ref_cnt > 0,
        manager_pb.BLOCK_FILTER_CACHED: lambda block: bool(block.block_hash),
        manager_pb.BLOCK_FILTER_FREE: lambda block: block.ref_cnt == 0,
    }[request.filter]
    found = [block for block in BLOCKS if keep(block)]
    first = int(request.page_token or 0)
    more = str(first + PAGE_SIZE) if first + PAGE_SIZE < len(found) else ""
    return manager_pb.ListBlocksResponse(blocks=found[first : first + PAGE_SIZE], next_page_token=more)


class ScriptedManager:
    """The server, in the loop of whoever starts it."""

    def __init__(self) -> None:
        self.scripts = Scripts()
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Starts, again on the same port after a stop."""
        server = grpc.aio.server()
        inference_grpc.add_InferenceServiceServicer_to_server(_Inference(self.scripts), server)
        manager_grpc.add_KvManagerServiceServicer_to_server(_Manager(self.scripts), server)
        registry_grpc.add_ExecutorRegistryServiceServicer_to_server(_Registry(self.scripts), server)
        servicer = health.aio.HealthServicer()
        await servicer.set("", self.scripts.health)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Stops at once; every stream breaks."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


class ThreadedManager(ScriptedManager):
    """The server on a thread of its own, for tests that block."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> ThreadedManager:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result(30)
        return self

    def __exit__(self, *_exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
