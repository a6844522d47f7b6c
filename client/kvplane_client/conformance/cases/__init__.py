"""All cases, one module for each topic: read the one that you work on."""

from __future__ import annotations

from kvplane_client.conformance.cases import (
    adapter_files,
    adapters,
    cache,
    copies,
    epochs,
    feeds,
    groups,
    handshake,
    malformed,
    numerics,
    rows,
    sampling,
    states,
    steps,
    streams,
    tables,
    tags,
    windows,
)
from kvplane_client.conformance.registry import Case

__all__ = ["all_cases"]

_TOPICS = (
    handshake, steps, epochs, streams, tables, groups, windows, states, rows, cache, feeds, copies, tags, sampling,
    adapters, adapter_files, malformed, numerics,
)  # fmt: skip


def all_cases() -> list[Case]:
    """Returns every case, in the order in which they are run."""
    return [case for module in _TOPICS for case in module.TOPIC.cases]
