"""Which books a model's KV groups need: those of one group, or of several.

Station: `step_loop` makes one for each executor. Whoever works on a cache asks both kinds the same; only whoever writes
tables down, or shows them, has to know how many there are for a request.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import HashFunction, default_hash
from kvmanager_service.core.block_history import BlockHistory
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import FullAttention, KVGroup

KVCache = KVCacheManager | KVCacheCoordinator
"""What a scheduler works on."""


def make_kv_cache(
    num_blocks: int,
    groups: Sequence[KVGroup],
    *,
    longest_chunk: int,
    enable_caching: bool = True,
    hash_function: HashFunction = default_hash,
    eviction_policy: str = DEFAULT_EVICTION_POLICY,
    events: BlockEventLog | None = None,
    history: BlockHistory | None = None,
) -> KVCache:
    """The books for a model's groups: a single one of full attention needs no coordinator. See `KVCacheCoordinator`."""
    if needs_no_coordinator(groups):
        return KVCacheManager(
            num_blocks,
            groups[0].block_size,
            enable_caching=enable_caching,
            hash_function=hash_function,
            eviction_policy=eviction_policy,
            events=events,
            history=history,
        )
    return KVCacheCoordinator(
        num_blocks,
        groups,
        longest_chunk=longest_chunk,
        enable_caching=enable_caching,
        hash_function=hash_function,
        eviction_policy=eviction_policy,
        events=events,
        history=history,
    )


def needs_no_coordinator(groups: Sequence[KVGroup]) -> bool:
    """Whether there is one group, of full attention."""
    return len(groups) == 1 and isinstance(groups[0], FullAttention)


def table_sizes(kv: KVCache) -> list[int]:
    """By group, tokens per entry of its tables. None where requests have their one table in `blocks`."""
    return [group.block_size for group in kv.groups] if isinstance(kv, KVCacheCoordinator) else []


def group_block_sizes(kv: KVCache) -> tuple[int, ...]:
    """By group, tokens per block; of the one group, too, whose tables are in `blocks`."""
    return tuple(table_sizes(kv)) or (kv.block_size,)


def num_groups(kv: KVCache) -> int:
    """How many KV groups there are."""
    return len(kv.groups) if isinstance(kv, KVCacheCoordinator) else 1
