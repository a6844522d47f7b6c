"""The pools of engines that run their own loop: who has one, and for how long.

Station: owned by the server, called by `servicers.sequences`. An engine that goes away leaves its pool behind; the
lease that each of its calls renews ends it.

Batches of one pool are applied one after the other. Each is applied to its end, whatever becomes of the call, and gives
way to the other work of the loop about every `MAX_TURN_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog

from kvmanager_service.core.errors import CoreError, DuplicateRequestError, UnknownRequestError, invalid_parameter
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.sequence_pool import SequencePool
from kvmanager_service.errors import StaleBatchError, TooManyPoolsError

__all__ = ["OpenedPool", "PoolSpec", "SequencePools"]

_log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer")

MAX_POOL_ID_CHARS = 128
MAX_BLOCK_SIZE = 1_024
DEFAULT_BLOCK_SIZE = 16
MIN_LEASE_MS, MAX_LEASE_MS, DEFAULT_LEASE_MS = 1_000, 3_600_000, 60_000
BLOCKS_MADE_AT_ONCE = 65_536
"""A larger pool is made, and taken apart, in a thread: a block takes about a microsecond of the loop that all streams
share. Then the garbage collector walks over it once (0.3 s for a million blocks), and is kept from it afterwards."""
MAX_TURN_S = 0.002
"""How long a batch holds up the loop that all streams share before it gives way, in seconds; one operation at least."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What an engine asks for; 0 and empty mean the default. See `OpenPoolRequest`."""

    pool_id: str
    num_blocks: int
    block_size: int = 0
    enable_caching: bool = True
    eviction_policy: str = ""
    lease_ms: int = 0


@dataclass(eq=False)
class OpenedPool(Generic[_Answer]):
    """One engine's pool.

    Attributes:
        pool_id: names it.
        sequences: the tables.
        lease_s: how long it outlives the last call, in seconds.
        used_at: when that was, on the monotonic clock.
        last_batch_id: the newest batch applied.
        last_batch: what it was, to know it again.
        last_answer: what it was answered with.
        lock: held while a batch is applied.
        is_open: False once it was closed or dropped; nothing more is to be done to it.
    """

    pool_id: str
    sequences: SequencePool
    lease_s: float
    used_at: float
    last_batch_id: int = 0
    last_batch: object = field(default=None, repr=False)
    last_answer: _Answer | None = field(default=None, repr=False)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    is_open: bool = True
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def lease_remaining_s(self) -> float:
        """Seconds that it still lasts without a call."""
        return max(0.0, self.used_at + self.lease_s - time.monotonic())

    def require_open(self) -> None:
        """Renew the lease. Raises UnknownRequestError."""
        if not self.is_open:
            raise _not_found(self.pool_id)
        self.used_at = time.monotonic()

    async def end_turn(self) -> None:
        """Let others use the loop while a batch is applied. Raises UnknownRequestError when they closed the pool."""
        await asyncio.sleep(0)
        self.require_open()

    async def once(self, batch_id: int, batch: object, apply: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Apply a batch, unless it is the newest one sent again: that gets the answer it got before.

        To be run to its end: cancelled halfway, it would be applied halfway.

        Args:
            batch_id: its number.
            batch: what it is, by which the newest is known again; kept until the next.
            apply: applies it.

        Raises:
            StaleBatchError: it is neither the next nor the newest.
            UnknownRequestError: the pool was closed meanwhile.
        """
        async with self.lock:
            self.require_open()
            if batch_id == self.last_batch_id and self.last_answer is not None and batch == self.last_batch:
                return self.last_answer
            if batch_id != self.last_batch_id + 1:
                raise StaleBatchError(
                    "STALE_BATCH",
                    f"batch_id: expected {self.last_batch_id + 1}, or {self.last_batch_id} sent again, got {batch_id}; "
                    "one pool is for one engine, which sends one batch after the other",
                    expected=self.last_batch_id + 1,
                    got=batch_id,
                )
            answer = await apply()
            self.last_batch_id, self.last_batch, self.last_answer = batch_id, batch, answer
            return answer


class SequencePools(Generic[_Answer]):
    """All open pools.

    Args:
        max_pools: most at once.
        max_blocks: most blocks of all together.
        isolate_tenants: whether only sequences of one tenant share a pool's blocks.
        settle: called when a large pool has been made: what is there then stays for long.
    """

    def __init__(
        self,
        max_pools: int,
        max_blocks: int,
        *,
        isolate_tenants: bool = False,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_pools = max_pools
        self._max_blocks = max_blocks
        self._isolate_tenants = isolate_tenants
        self._settle = settle
        self._pools: dict[str, OpenedPool[_Answer]] = {}
        self._being_made: dict[str, int] = {}
        self._running: set[asyncio.Task[Any]] = set()

    async def open(self, spec: PoolSpec) -> OpenedPool[_Answer]:
        """Make a pool.

        Raises:
            InvalidRequestError: a value is out of range.
            DuplicateRequestError: a pool of that id is open.
            TooManyPoolsError: there is no room for it.
        """
        _check(spec)
        if spec.pool_id in self._pools or spec.pool_id in self._being_made:
            raise DuplicateRequestError(
                "POOL_ID_IN_USE",
                f"expected a pool_id that is not open, got {spec.pool_id!r}; choose another, or close that pool",
                pool_id=spec.pool_id,
            )
        self._require_room(spec.num_blocks)
        self._being_made[spec.pool_id] = spec.num_blocks
        try:
            if spec.num_blocks <= BLOCKS_MADE_AT_ONCE:
                sequences = _make(spec, self._isolate_tenants)
            else:
                sequences = await _make_aside(spec, self._isolate_tenants)
                self._settle()
        finally:
            del self._being_made[spec.pool_id]
        lease_s = (spec.lease_ms or DEFAULT_LEASE_MS) / 1e3
        pool: OpenedPool[_Answer] = OpenedPool(spec.pool_id, sequences, lease_s, time.monotonic())
        self._pools[spec.pool_id] = pool
        self._watch(pool)
        _log.info("pool_opened", pool_id=spec.pool_id, num_blocks=spec.num_blocks, block_size=sequences.kv.block_size)
        return pool

    def use(self, pool_id: str) -> OpenedPool[_Answer]:
        """Find a pool and renew its lease. Raises UnknownRequestError."""
        pool = self._pools.get(pool_id)
        if pool is None:
            raise _not_found(pool_id)
        pool.require_open()
        return pool

    async def update(
        self, pool: OpenedPool[_Answer], batch_id: int, batch: object, apply: Callable[[], Awaitable[_Answer]]
    ) -> _Answer:
        """Apply a batch once, see `OpenedPool.once`: to its end, even if whoever waits for the answer goes away."""
        return await asyncio.shield(self._run(self._update(pool, batch_id, batch, apply)))

    def _run(self, work: Coroutine[Any, Any, _Answer]) -> asyncio.Task[_Answer]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _update(
        self, pool: OpenedPool[_Answer], batch_id: int, batch: object, apply: Callable[[], Awaitable[_Answer]]
    ) -> _Answer:
        try:
            return await pool.once(batch_id, batch, apply)
        except CoreError:
            raise
        except Exception:
            self._drop_broken(pool)
            raise

    def close(self, pool_id: str) -> None:
        """Forget a pool and its sequences. Raises UnknownRequestError."""
        self._drop(self.use(pool_id), "closed")

    def _drop_broken(self, pool: OpenedPool[_Answer]) -> None:
        """An invariant of this pool does not hold: nothing more is to be built on it."""
        _log.exception("pool_broken", pool_id=pool.pool_id, sequences=len(pool.sequences.sequences))
        self._drop(pool, "broken")

    def list(self) -> list[OpenedPool[_Answer]]:
        """The open pools, in the order they were opened."""
        return list(self._pools.values())

    def _require_room(self, num_blocks: int) -> None:
        num_pools = len(self._pools) + len(self._being_made)
        if num_pools >= self._max_pools:
            raise TooManyPoolsError(
                "TOO_MANY_POOLS",
                f"expected fewer than {self._max_pools} open pools, got {num_pools}; close one, or raise --max-pools",
                max_pools=self._max_pools,
            )
        taken = sum(len(pool.sequences.kv.pool.blocks) for pool in self._pools.values())
        left = self._max_blocks - taken - sum(self._being_made.values())
        if num_blocks > left:
            raise TooManyPoolsError(
                "TOO_MANY_POOL_BLOCKS",
                f"num_blocks: expected at most {left} (what is left of {self._max_blocks} for all pools), got "
                f"{num_blocks}; close a pool, or raise --max-pool-blocks",
                left=left,
                got=num_blocks,
            )

    def _watch(self, pool: OpenedPool[_Answer]) -> None:
        """Look again when the lease would run out; a call in between has renewed it."""
        pool.timer = asyncio.get_running_loop().call_later(pool.lease_remaining_s, self._end_of_lease, pool)

    def _end_of_lease(self, pool: OpenedPool[_Answer]) -> None:
        if pool.lease_remaining_s > 0:
            self._watch(pool)
        else:
            self._drop(pool, "lease ran out")

    def _drop(self, pool: OpenedPool[_Answer], why: str) -> None:
        assert pool.timer is not None
        pool.timer.cancel()
        del self._pools[pool.pool_id]
        pool.is_open = False
        _log.info("pool_dropped", pool_id=pool.pool_id, sequences=len(pool.sequences.sequences), why=why)
        if len(pool.sequences.kv.pool.blocks) <= BLOCKS_MADE_AT_ONCE:
            pool.sequences.dismantle()
        else:
            asyncio.get_running_loop().run_in_executor(None, pool.sequences.dismantle)


def _make(spec: PoolSpec, isolate_tenants: bool) -> SequencePool:
    return SequencePool(
        KVCacheManager(
            spec.num_blocks,
            spec.block_size or DEFAULT_BLOCK_SIZE,
            enable_caching=spec.enable_caching,
            eviction_policy=spec.eviction_policy or DEFAULT_EVICTION_POLICY,
        ),
        isolate_tenants=isolate_tenants,
    )


async def _make_aside(spec: PoolSpec, isolate_tenants: bool) -> SequencePool:
    """Make a pool in a thread; one that nobody waits for any more is taken apart again."""
    making = asyncio.get_running_loop().run_in_executor(None, _make, spec, isolate_tenants)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_discard)
        raise


def _discard(made: asyncio.Future[SequencePool]) -> None:
    if not made.cancelled() and made.exception() is None:
        made.result().dismantle()


def _not_found(pool_id: str) -> UnknownRequestError:
    return UnknownRequestError(
        "POOL_NOT_FOUND",
        f"expected the id of an open pool, got {pool_id!r}; open it, or anew if its lease ran out",
        pool_id=pool_id,
    )


def _check(spec: PoolSpec) -> None:
    if not 1 <= len(spec.pool_id) <= MAX_POOL_ID_CHARS:
        raise invalid_parameter("pool_id", f"1 to {MAX_POOL_ID_CHARS} characters", len(spec.pool_id))
    if spec.num_blocks < 2:
        raise invalid_parameter("num_blocks", "at least 2 (block 0 is the null block)", spec.num_blocks)
    if not 0 <= spec.block_size <= MAX_BLOCK_SIZE:
        raise invalid_parameter("block_size", f"1 to {MAX_BLOCK_SIZE}, or 0 for {DEFAULT_BLOCK_SIZE}", spec.block_size)
    if spec.eviction_policy and spec.eviction_policy not in EVICTION_POLICIES:
        raise invalid_parameter("eviction_policy", f"one of {', '.join(EVICTION_POLICIES)}", spec.eviction_policy)
    if spec.lease_ms and not MIN_LEASE_MS <= spec.lease_ms <= MAX_LEASE_MS:
        raise invalid_parameter(
            "lease_ms", f"{MIN_LEASE_MS} to {MAX_LEASE_MS}, or 0 for {DEFAULT_LEASE_MS}", spec.lease_ms
        )
