"""The longest sequence the pool can hold, and what is said of a longer one.

Station: asked by `Scheduler` when a request comes and when blocks run short. How many blocks are free now is not its
concern: what is too long here would wait for ever.
"""

from __future__ import annotations

from kvmanager_service.core.errors import InvalidRequestError, PoolExhaustedError
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import Request


def require_fit(kv: KVCacheManager, request: Request) -> None:
    """Raise InvalidRequestError when a new request's known sequence and one more token can never fit the pool."""
    usable = kv.pool.num_usable_blocks
    if kv.num_blocks_for(request.num_tokens + 1) > usable:
        pool_tokens = usable * kv.block_size
        raise InvalidRequestError(
            "PROMPT_TOO_LONG",
            f"expected a prompt of at most {pool_tokens - 1} tokens, so that it and one more fit the KV pool, got "
            f"{request.num_tokens}; shorten it, or give the executor more memory for KV",
            pool_tokens=pool_tokens,
            prompt_tokens=request.num_tokens,
        )


def has_outgrown(kv: KVCacheManager, request: Request) -> bool:
    """Whether not even the known sequence fits the pool. One that just fits can still produce its last token."""
    return kv.num_blocks_for(request.num_tokens) > kv.pool.num_usable_blocks


def outgrown_error(kv: KVCacheManager, request: Request) -> PoolExhaustedError:
    """What ends a request that needs more than the whole pool."""
    usable = kv.pool.num_usable_blocks
    pool_tokens = usable * kv.block_size
    return PoolExhaustedError(
        "POOL_EXHAUSTED",
        f"expected a sequence of at most {pool_tokens} tokens ({usable} blocks of {kv.block_size}), got one that needs "
        f"token {pool_tokens + 1} after {request.num_output_tokens} output tokens; lower max_tokens, or give the "
        "executor more memory for KV",
        pool_tokens=pool_tokens,
        num_output_tokens=request.num_output_tokens,
    )
