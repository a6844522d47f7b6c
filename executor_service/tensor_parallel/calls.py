"""What goes between rank 0 and a worker: calls down, one answer each back.

Station: spoken by `workers` in rank 0 and by `worker` in the others, over a pair of sockets that only these two
processes have; so it may be pickled.

    call     (name, arguments)
    answer   what the call returned, or how it failed
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from executor_service.backends.base import BackendError, NotEnoughMemoryError, StepBatch
from executor_service.config import ExecutorConfig

__all__ = ["Answer", "Failure", "RankConfig", "without_sampling"]


@dataclass(frozen=True)
class RankConfig:
    """What a worker is told first.

    Attributes:
        config: the rank's own share of the executor's settings.
        rank: from 1.
        size: how many ranks there are.
        store: where they find each other.
        timeout_s: seconds to wait for the others in an exchange.
    """

    config: ExecutorConfig
    rank: int
    size: int
    store: str
    timeout_s: float


@dataclass(frozen=True)
class Failure:
    """An error on its way: exceptions of ours do not pickle, their constructors take more than a message."""

    reason: str
    message: str
    metadata: dict[str, str]
    lacks_memory: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What is told of an error; of one that is not the backend's, its name and text."""
        if isinstance(error, BackendError):
            return cls(error.reason, str(error), error.metadata, isinstance(error, NotEnoughMemoryError))
        return cls("RANK_FAILED", f"{type(error).__name__}: {error}", {}, lacks_memory=False)

    def error(self, rank: int, size: int) -> BackendError:
        """The same error in rank 0; it names the rank."""
        kind = NotEnoughMemoryError if self.lacks_memory else BackendError
        return kind(self.reason, f"rank {rank} of {size}: {self.message}", **(self.metadata | {"rank": str(rank)}))


@dataclass(frozen=True)
class Answer:
    """How a call ended. `failure` is None where it returned `value`."""

    value: Any = None
    failure: Failure | None = None


def without_sampling(batch: StepBatch) -> StepBatch:
    """A step for who computes it and samples nothing: without seeds, parameters and histories, which may be long."""
    sampling = batch.sampling
    if sampling is None:
        return batch
    none = np.empty(0, dtype=np.int32)
    bare = replace(sampling, params=(), params_index=none, seeds=none.astype(np.uint64), positions=none, histories={})
    return replace(batch, sampling=bare)
