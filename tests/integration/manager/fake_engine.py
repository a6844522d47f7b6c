"""A scripted engine behind the real server: the test decides what each step brings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from kvplane.kvmanager.v1 import (
    executor_registry_service_pb2_grpc,
    inference_service_pb2_grpc,
    kv_manager_service_pb2_grpc,
)

from kvmanager_service.config import ManagerConfig
from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.errors import CoreError, DuplicateRequestError, UnknownPinError, UnknownRequestError
from kvmanager_service.core.extra_keys import LoraAdapter
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.request import FinishReason, NewRequest, RequestOutput
from kvmanager_service.engine_api import (
    AdapterView,
    BlockTrace,
    BlockView,
    EngineStats,
    ManagerState,
    ModelView,
    OutputSink,
    PinsView,
    PinView,
    RequestView,
)
from kvmanager_service.errors import UnavailableError, UnknownAdapterError
from kvmanager_service.kv_events import KvEvents
from kvmanager_service.registry import ExecutorRegistry
from kvmanager_service.server import Health, ManagerServer
from tests.unit.manager.manager_builders import model_view, text_model


@dataclass
class FakeEngine:
    """Accepts requests and emits what `step` is told. Set `refuse` to make every call raise it."""

    model_view: ModelView | None = field(default_factory=lambda: model_view(text_model()))
    refuse: Exception | None = None
    open: dict[str, tuple[NewRequest, OutputSink]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    block_views: Sequence[BlockView] | None = None
    request_views: list[RequestView] = field(default_factory=list)
    trace: BlockTrace = field(default_factory=lambda: BlockTrace((), 0))
    events: KvEvents = field(default_factory=lambda: KvEvents(8))
    snapshot: list[tuple[int, BlockContent]] = field(default_factory=list)
    pinned: dict[str, PinnedPrefix] = field(default_factory=dict)
    switched_to: list[str] = field(default_factory=list)
    loaded: dict[str, AdapterView] = field(default_factory=dict)
    stats_value: EngineStats = field(default_factory=lambda: EngineStats(1.5, ManagerState.SERVING))

    def check_open(self) -> None:
        self._check()

    def submit(self, request: NewRequest, sink: OutputSink, *branch_sinks: OutputSink) -> None:
        self._check()
        if request.request_id in self.open:
            raise DuplicateRequestError("REQUEST_ID_IN_USE", "expected a new id", request_id=request.request_id)
        self.open[request.request_id] = (request, sink)
        for branch, branch_sink in zip(request.branches, branch_sinks, strict=True):
            self.open[branch.request_id] = (request, branch_sink)

    def abort(self, request_id: str, tenant: str | None = None) -> None:
        members = {name: new for name, (new, _) in self.open.items() if request_id in (name, new.family_id)}
        if any(tenant not in (None, new.tenant) for new in members.values()) or not members:
            raise UnknownRequestError(
                "REQUEST_NOT_FOUND", "expected a waiting or running request", request_id=request_id
            )
        self.aborted.append(request_id)
        for name in members:
            self.step(name, finish=FinishReason.ABORT)

    def step(
        self,
        request_id: str,
        *token_ids: int,
        finish: FinishReason | None = None,
        stop_token_id: int | None = None,
        error: CoreError | None = None,
    ) -> None:
        """Emit for one request."""
        sink = self.open[request_id][1]
        output = RequestOutput(
            request_id, list(token_ids), finish_reason=finish, stop_token_id=stop_token_id, error=error
        )
        if sink.push(output) is not None or finish is not None:
            del self.open[request_id]

    async def submitted(self, *request_ids: str) -> None:
        """Wait until these requests are in."""
        await until(lambda: all(request_id in self.open for request_id in request_ids))

    def stats(self) -> EngineStats:
        self._check()
        return self.stats_value

    def requests(self, *, include_finished: bool) -> list[RequestView]:
        return [view for view in self.request_views if include_finished or view.finish_reason is None]

    def blocks(self) -> Sequence[BlockView]:
        if self.block_views is None:
            raise UnavailableError("NO_EXECUTOR", "expected a block pool, got none yet")
        return self.block_views

    def pin_prefix(self, pin: PinnedPrefix) -> PinView:
        self._check()
        self.pinned[pin.name] = pin
        return self.pinned_prefixes().pins[-1]

    def unpin_prefix(self, name: str) -> None:
        if name not in self.pinned:
            raise UnknownPinError("PIN_NOT_FOUND", "expected a pin", name=name)
        del self.pinned[name]

    def pinned_prefixes(self) -> PinsView:
        """Each pin names four blocks more than the one before, and holds all but one."""
        return PinsView(
            [PinView(name, pin.num_tokens, 4 * index, 4 * index - 1, pin.extra_keys) for index, (name, pin) in
             enumerate(self.pinned.items(), start=1)], 20,
        )  # fmt: skip

    def adapter(self, name: str) -> LoraAdapter:
        if name not in self.loaded:
            raise UnknownAdapterError("UNKNOWN_ADAPTER", "expected a loaded adapter", adapter=name)
        return LoraAdapter(name, self.loaded[name].revision)

    async def load_adapter(self, name: str, source: str) -> AdapterView:
        self._check()
        self.loaded[name] = AdapterView(name, f"revision of {source}", source, 8, 1_000, 2)
        return self.loaded[name]

    async def unload_adapter(self, name: str) -> None:
        self.adapter(name)
        del self.loaded[name]

    def adapters(self) -> list[AdapterView]:
        return list(self.loaded.values())

    def reset_prefix_cache(self) -> int:
        self._check()
        return 7

    def block_trace(self, block_id: int) -> BlockTrace:
        self._check()
        return self.trace

    def kv_events(self) -> KvEvents:
        return self.events

    def kv_snapshot(self) -> list[tuple[int, BlockContent]]:
        return self.snapshot

    async def switch_executor(self, executor_id: str) -> str:
        self._check()
        self.switched_to.append(executor_id)
        return "executor-0"

    def model(self) -> ModelView:
        if self.model_view is None:
            raise UnavailableError("NO_EXECUTOR", "expected an executor, got none")
        return self.model_view

    def _check(self) -> None:
        if self.refuse is not None:
            raise self.refuse


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; pytest's own limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - conditions on the fake engine have no event of their own
        await asyncio.sleep(0.002)


@dataclass
class Manager:
    """A running server with stubs of every service."""

    engine: FakeEngine
    registry: ExecutorRegistry
    health: Health
    server: ManagerServer
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.inference = inference_service_pb2_grpc.InferenceServiceStub(self.channel)
        self.kv = kv_manager_service_pb2_grpc.KvManagerServiceStub(self.channel)
        self.executors = executor_registry_service_pb2_grpc.ExecutorRegistryServiceStub(self.channel)


@asynccontextmanager
async def running_manager(
    clock: Callable[[], float] = lambda: 0.0, credentials: grpc.ChannelCredentials | None = None, **settings: Any
) -> AsyncIterator[Manager]:
    """Serve a fake engine on a free port, with these settings; credentials are for a server with TLS."""
    config = ManagerConfig(port=0, **settings)
    engine, registry, health = FakeEngine(), ExecutorRegistry(clock, config.lease_ms), Health()
    server = ManagerServer(config, engine, registry, health)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    async with (
        grpc.aio.secure_channel(address, credentials) if credentials else grpc.aio.insecure_channel(address)
    ) as channel:
        yield Manager(engine, registry, health, server, channel)
    await server.stop(0)


def details(error: grpc.aio.AioRpcError) -> tuple[str, dict[str, str], int]:
    """Return ErrorInfo's reason and metadata, and RetryInfo's delay in milliseconds (0 without one)."""
    raw = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "kvplane"
    for detail in status.details[1:]:
        assert detail.Unpack(retry)
    return info.reason, dict(info.metadata), retry.retry_delay.ToMilliseconds()
