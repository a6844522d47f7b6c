"""A trace without a clock: prompts alone, one after another in file order.

What is left is the pool: which blocks are there when a prompt comes. That is how hit ratios of cache sizes and eviction
policies are published, and it takes a second for thousands of requests.

Station: called by `command` and by tests; calls the KV cache manager, or the coordinator of several groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.request import Request
from kvmanager_service.replay.report import Measurements, Sample
from kvmanager_service.replay.tenants import has_tenants
from kvmanager_service.replay.trace import TraceRequest

__all__ = ["replay_one_at_a_time"]


def replay_one_at_a_time(
    trace: Sequence[TraceRequest], kv: KVCache, on_done: Callable[[int], None] = lambda _: None
) -> Measurements:
    """Compute each prompt, free its blocks, go on to the next. No token is produced, and no duration runs out.

    Args:
        trace: the requests, in the order they are taken.
        kv: empty block tables. Of several groups, prompts are computed in pieces of its longest_chunk tokens: windows
            leave blocks on the way.
        on_done: told how many requests are done, after each.
    """
    found = Measurements(has_clock=False, by_tenant=has_tenants(trace))
    for index, traced in enumerate(trace):
        request = Request(traced.to_new_request(0.0), index)
        if kv.allocate_sequence(request):
            _count_prompt(found, request, kv)
            in_use = kv.pool.num_usable_blocks - kv.pool.num_free_blocks
            _compute(request, kv)
            kv.free(request)
            found.samples.append(Sample(float(index + 1), found.hit_tokens, found.prompt_tokens, 0, 1, in_use))
        else:
            found.note_refusal(traced.tenant)  # nobody else holds a block, so it can never fit
        on_done(index + 1)
    found.evictions = kv.pool.num_evictions
    return found


def _compute(request: Request, kv: KVCache) -> None:
    chunk = kv.longest_chunk if isinstance(kv, KVCacheCoordinator) else request.num_tokens
    while request.num_computed_tokens < request.num_tokens:
        stop = min(request.num_tokens, request.num_computed_tokens + chunk)
        fits = kv.allocate_slots(request, stop)
        assert fits, f"{request!r} was admitted alone and lacks blocks"
        request.num_computed_tokens = stop
        kv.cache_blocks(request, 0)


def _count_prompt(found: Measurements, request: Request, kv: KVCache) -> None:
    num_hit, num_tokens = request.num_computed_tokens, request.num_prompt_tokens
    found.note_prompt(request.tenant, num_hit, num_tokens, kv.block_size)
    found.hit_tokens += num_hit
    found.prompt_tokens += num_tokens
