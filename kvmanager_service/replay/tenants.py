"""Tenants for a trace that names none: shares of its requests, in turn.

Station: called by `options` and `command`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvmanager_service.replay.trace import TraceRequest

__all__ = ["MAX_TENANTS", "has_tenants", "isolate", "read_shares", "spread"]

MAX_TENANTS = 1000
"""Of what `--tenants` spreads requests over."""


def read_shares(text: str) -> tuple[int, ...]:
    """Read shares such as "3,1". Raises ValueError: they are not 2 to `MAX_TENANTS` integers of at least 1."""
    shares = tuple(int(share) for share in text.split(","))
    if not 2 <= len(shares) <= MAX_TENANTS or min(shares) < 1:
        raise ValueError(text)
    return shares


def has_tenants(trace: Sequence[TraceRequest]) -> bool:
    """Whether any request names one."""
    return any(traced.tenant for traced in trace)


def spread(trace: Sequence[TraceRequest], shares: Sequence[int]) -> list[TraceRequest]:
    """Give each request a tenant: tenant-1, tenant-2 and so on, each its share of any stretch of the trace.

    With 3 and 1: 1, 1, 2, 1, and again. Source: nginx's smooth weighted round robin.
    """
    total = sum(shares)
    due = [0] * len(shares)
    given = []
    for traced in trace:
        due = [credit + share for credit, share in zip(due, shares, strict=True)]
        chosen = due.index(max(due))
        due[chosen] -= total
        given.append(replace(traced, tenant=f"tenant-{chosen + 1}"))
    return given


def isolate(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Let requests share blocks only within their tenant."""
    return [replace(traced, is_isolated=True) for traced in trace]
