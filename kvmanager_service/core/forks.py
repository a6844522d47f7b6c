"""Sequences with a common beginning: who may share another's blocks, and what the branches of a request are called.

Station: `KVCacheManager` and `KVCacheCoordinator` ask it before they let tables share blocks, whoever makes a request
with branches names them by it. It knows no block.
"""

from __future__ import annotations

from typing import Final

from kvmanager_service.core.extra_keys import first_difference
from kvmanager_service.core.request import Request

SEED_STRIDE: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the seeds of a request's branches lie far apart, and no two are the same."""


def branch_seed(seed: int, index: int) -> int:
    """The seed of a request's sequence `index`: a request of its own with it gets the same tokens. 0 has the seed."""
    return (seed + index * SEED_STRIDE) % (1 << 64)


def branch_id(request_id: str, index: int) -> str:
    """The id of a request's sequence `index`; 0 has the request's."""
    return f"{request_id}#{index}" if index else request_id


def require_forkable(parent: Request, child: Request, num_tokens: int) -> None:
    """Raise ValueError unless the K/V of the parent's first num_tokens tokens is computed and is the child's, too.

    Args:
        parent: whose blocks are to be shared.
        child: a request without blocks.
        num_tokens: how many tokens they are to have in common.
    """
    known = min(parent.num_computed_tokens, parent.num_tokens)
    if not 1 <= num_tokens <= known:
        raise ValueError(f"expected to fork 1 to {known} computed tokens of {parent!r}, got {num_tokens}")
    if child.num_computed_tokens or child.blocks or child.tables:
        raise ValueError(f"expected a request without blocks to fork to, got {child!r}")
    require_common(parent, child, num_tokens)


def require_common(parent: Request, child: Request, num_tokens: int) -> None:
    """Raise ValueError unless the child's first num_tokens tokens, and what else decides their K/V, are the parent's.

    Both know so many tokens; whether they are computed, and where either stands, is of no concern. Otherwise as
    `require_forkable`.
    """
    if child.tokens(0, num_tokens) != parent.tokens(0, num_tokens):
        raise ValueError(f"expected {child!r} to begin with the {num_tokens} tokens of {parent!r}, got others")
    differs_at = -1 if child.extra_keys == parent.extra_keys else 0
    if differs_at < 0:
        differs_at = first_difference(child.spans, parent.spans, num_tokens)
    if differs_at >= 0:
        raise ValueError(
            f"expected {child!r} to have the extra keys of {parent!r}, got others from token {differs_at} on"
        )
