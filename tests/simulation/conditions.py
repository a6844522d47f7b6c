"""What the world of a life is like, drawn once from its seed: the pool, the limits and the mixture of requests.

Station: made by `Chaos`, asked by all that draw or check something. It keeps the sources of chance, too.
"""

from __future__ import annotations

import dataclasses
import random

from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import default_hash
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import NewRequest
from kvmanager_service.core.scheduler_config import RECOMPUTE, SchedulerConfig
from tests.simulation.harness import World, kv_groups
from tests.simulation.life import Life


def one_byte_hash(data: bytes) -> bytes:
    """256 values: a collision wherever one looks."""
    return default_hash(data)[:1] * 16


class Conditions:
    """The life's own limits, and where its chances come from.

    Args:
        life: the seed, and what is not left to it.

    Attributes:
        rng, more, branching, resuming, swap, kept: sources of chance, for one subject each, so that what is
            drawn from one changes nothing of what is drawn from another.
        block_size, num_blocks: of the first executor.
        one_byte: whether hashes collide all the time.
        caching: whether blocks are found again.
        config: the scheduler's limits.
        has_keys: whether some requests have adapters, spans and tenants that share nothing.
        has_ranges, has_pins: whether requests ask how long to keep their blocks, and prefixes are pinned.
        branch_rate: how many requests have several outputs.
    """

    def __init__(self, life: Life) -> None:
        self.life = life
        seed = life.seed
        self.rng = rng = random.Random(seed)
        self.more = more = random.Random(f"more of {seed}")
        self.branching = random.Random(f"branches of {seed}")
        self.resuming = random.Random(f"resumed branches of {seed}")
        self.swap = random.Random(f"swap of {seed}")
        self.kept = kept = random.Random(f"kept of {seed}")
        self.block_size = rng.choice((1, 2, 3, 4, 8, 16))
        self.num_blocks = rng.choice((rng.randint(3, 12), rng.randint(8, 40))) + 4 * len(life.windows)
        chosen = rng.random() < 0.2
        self.one_byte = chosen if life.one_byte is None else life.one_byte
        self.caching = rng.random() < 0.95
        budget = rng.choice((rng.randint(1, 8), rng.randint(8, 64), 4096))
        chosen_policy = rng.choice(("fcfs", "priority"))
        self.has_keys = more.random() < 0.3
        self.branch_rate = self.branching.choice((0.0, 0.2, 0.7))
        chosen_mode = self.swap.choice((RECOMPUTE, "swap", "auto"))
        self.has_ranges, self.has_pins = kept.random() < 0.3, kept.random() < 0.4
        self._eviction_policy = kept.choice((DEFAULT_EVICTION_POLICY, "priority", "priority", *EVICTION_POLICIES))
        self.config = self._fitted(
            SchedulerConfig(
                policy=life.policy or (chosen_policy if more.random() < 0.7 else "fair"),
                max_num_batched_tokens=budget,
                max_num_seqs=rng.choice((1, 3, 8, 64)),
                max_waiting=rng.choice((2, 100)),
                long_prefill_token_threshold=rng.choice((0, 0, rng.randint(1, 16))),
                watermark=rng.choice((0.0, 0.01, 0.3)),
                max_outstanding=rng.choice((1, 2)),
                preemption_mode=life.preemption_mode or chosen_mode,
                max_pinned_fraction=kept.choice((0.25, 0.6, 1.0)),
            )
        )

    def _fitted(self, config: SchedulerConfig) -> SchedulerConfig:
        """As the model and the crowd need it."""
        if self.life.windows:
            config = dataclasses.replace(config, long_prefill_token_threshold=0)
        if self.life.crowded:
            config = dataclasses.replace(
                config, max_num_batched_tokens=self.swap.choice((64, 4096)), max_num_seqs=64, watermark=0.0
            )
        return config

    def make_world(self, clock: Clock, events: BlockEventLog | None) -> World:
        """An executor and its manager, whose caches are told the clock's time from the beginning."""

        def make_kv(num_blocks: int, block_size: int) -> KVCache:
            kv = self._make_kv(num_blocks, block_size, events)
            kv.pool.advance(clock.now)
            return kv

        return World(
            self.num_blocks,
            self.block_size,
            self.config,
            make_kv,
            num_host_blocks=self.draw_host_blocks(),
            token_us=self.swap.choice((0, 10)),
            copy_us=self.swap.choice((0, 10 * self.block_size, 1_000)),
            windows=self.life.windows,
            factors=self.life.factors,
        )

    def _make_kv(self, num_blocks: int, block_size: int, events: BlockEventLog | None) -> KVCache:
        hash_function = one_byte_hash if self.one_byte else default_hash
        if self.life.windows:
            return KVCacheCoordinator(
                num_blocks,
                kv_groups(block_size, self.life.windows, self.life.factors),
                longest_chunk=self.config.max_num_batched_tokens,
                enable_caching=self.caching,
                hash_function=hash_function,
                eviction_policy=self._eviction_policy,
                events=events,
            )
        return KVCacheManager(
            num_blocks,
            block_size,
            enable_caching=self.caching,
            hash_function=hash_function,
            eviction_policy=self._eviction_policy,
            events=events,
        )

    def draw_host_blocks(self) -> int:
        """Few, too few for one request, or enough for all."""
        few, some, plenty = self.swap.choice((0, 1)), self.swap.randint(1, self.num_blocks), 10 * self.num_blocks
        return self.swap.choice((few, some, plenty, plenty))


class Clock:
    """What the manager's clock says; it may jump.

    Attributes:
        now: seconds.
        latest: the latest that it has said.
    """

    def __init__(self) -> None:
        self.now = self.latest = 0.0

    def pass_by(self, seconds: float) -> None:
        """Go on by so many seconds, or back by them where they are negative."""
        self.now += seconds
        self.latest = max(self.latest, self.now)

    def stamp(self, new: NewRequest) -> NewRequest:
        """The request as it arrives now."""
        return dataclasses.replace(new, arrival_time=self.now)
