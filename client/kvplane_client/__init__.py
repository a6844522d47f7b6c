"""The client of KVPlane: generate text, look into the KV manager, run a server from the command line.

Start with :class:`AsyncClient` or :class:`Client`. Errors are described in :mod:`kvplane_client.errors`. The package
speaks to the manager over the wire alone and imports neither service.
"""

from kvplane_client._version import __version__
from kvplane_client.async_client import AsyncClient
from kvplane_client.client import Client, SyncGenerationStream
from kvplane_client.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    KvPlaneError,
    NotFoundError,
    OutOfRangeError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from kvplane_client.kv_events import (
    KvBlockRemoved,
    KvBlockStored,
    KvCacheCleared,
    KvCacheIndex,
    KvEvent,
    KvEventBatch,
)
from kvplane_client.manager_types import (
    BlockFilter,
    BlockInfo,
    BlockMoment,
    BlockRecord,
    BlockTrace,
    ExecutorInfo,
    ExecutorState,
    ManagerState,
    Model,
    PoolStats,
    RequestInfo,
    RequestStatus,
    SchedulerSettings,
    Stats,
    TenantStats,
)
from kvplane_client.many import ManyStream
from kvplane_client.many_request import ManyRequest
from kvplane_client.retry import NO_RETRY, RetryPolicy
from kvplane_client.stream import GenerationStream
from kvplane_client.types import (
    ChatMessage,
    Chunk,
    Completion,
    FinishReason,
    GenerateOptions,
    Prompt,
    StopMatch,
    TokenLogprob,
    TokenLogprobs,
    Usage,
    branch_seed,
)

__all__ = [
    "NO_RETRY",
    "AbortedError",
    "AlreadyExistsError",
    "AsyncClient",
    "BlockFilter",
    "BlockInfo",
    "BlockMoment",
    "BlockRecord",
    "BlockTrace",
    "ChatMessage",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "ExecutorInfo",
    "ExecutorState",
    "FailedPreconditionError",
    "FinishReason",
    "GenerateOptions",
    "GenerationStream",
    "InternalError",
    "InvalidArgumentError",
    "KvBlockRemoved",
    "KvBlockStored",
    "KvCacheCleared",
    "KvCacheIndex",
    "KvEvent",
    "KvEventBatch",
    "KvPlaneError",
    "ManagerState",
    "ManyRequest",
    "ManyStream",
    "Model",
    "NotFoundError",
    "OutOfRangeError",
    "PoolStats",
    "Prompt",
    "RequestCancelledError",
    "RequestInfo",
    "RequestStatus",
    "ResourceExhaustedError",
    "RetryPolicy",
    "SchedulerSettings",
    "Stats",
    "StopMatch",
    "SyncGenerationStream",
    "TenantStats",
    "TokenLogprob",
    "TokenLogprobs",
    "UnavailableError",
    "Usage",
    "__version__",
    "branch_seed",
]
