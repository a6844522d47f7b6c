"""The longest sequence the pool can hold, and what is said of a longer one.

Station: asked by `Scheduler` when a request comes, and by `StepPlanner` when one is to be admitted. How many blocks are
free now is not its concern: what is too long here would wait for ever.
"""

from __future__ import annotations

from bisect import bisect_right

from kvmanager_service.core.errors import InvalidRequestError, PoolExhaustedError
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.request import Request


def require_fit(kv: KVCache, request: Request) -> None:
    """Raise InvalidRequestError when a new request's known sequence and one more token can never fit the pool."""
    if kv.num_blocks_for(request.num_tokens + 1) > kv.pool.num_usable_blocks:
        pool_tokens = _longest_fit(kv, request)
        raise InvalidRequestError(
            "PROMPT_TOO_LONG",
            f"expected a prompt of at most {pool_tokens - 1} tokens, so that it and one more fit the KV pool, got "
            f"{request.num_tokens}; shorten it, or give the executor more memory for KV",
            pool_tokens=pool_tokens,
            prompt_tokens=request.num_tokens,
        )


def has_outgrown(kv: KVCache, request: Request) -> bool:
    """Whether not even the known sequence fits the pool. One that just fits can still produce its last token."""
    return kv.num_blocks_for(request.num_tokens) > kv.pool.num_usable_blocks


def outgrown_error(kv: KVCache, request: Request) -> PoolExhaustedError:
    """What ends a request that needs more than the whole pool."""
    pool_tokens = _longest_fit(kv, request)
    num_blocks = kv.pool.num_usable_blocks
    return PoolExhaustedError(
        "POOL_EXHAUSTED",
        f"expected a sequence of at most {pool_tokens} tokens ({num_blocks} blocks), got one that needs more after "
        f"{request.num_output_tokens} output tokens; lower max_tokens, or give the executor more memory for KV",
        pool_tokens=pool_tokens,
        num_output_tokens=request.num_output_tokens,
    )


def _longest_fit(kv: KVCache, request: Request) -> int:
    """Tokens of the longest sequence that fits the pool; this request is, or is about to be, longer than that."""
    return bisect_right(range(request.num_tokens + 2), kv.pool.num_usable_blocks, key=kv.num_blocks_for) - 1
