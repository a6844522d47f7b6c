"""Python's own heap, and a model's modules on it: what the garbage collector is kept from.

Station: `server` hands it to `kv_session` where the process is the executor's own. Process-wide, as the collector is:
an executor in somebody else's process leaves it alone.
"""

from __future__ import annotations

import gc

__all__ = ["settle_heap"]


def settle_heap() -> None:
    """Keep the garbage collector off what is there now, which stays: it need not walk it in the middle of steps."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
