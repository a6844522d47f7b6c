"""Python's own heap, and the block pools on it: what the garbage collector is kept from.

Station: `process` hands it to `sequence_pools` and to `step_loop`, which call it when they have made a pool. It is
process-wide, as the collector is: a manager in somebody else's process leaves it alone.
"""

from __future__ import annotations

import gc

__all__ = ["GC_THRESHOLD", "settle_heap"]

GC_THRESHOLD = (1_000, 50, 50)
"""When garbage is collected; see `gc.set_threshold`. Each call leaves a few objects in a cycle, and those hold some of
gRPC's: so the young ones go soon, and all are looked through after 2.5 million, which is seldom and not never."""


def settle_heap() -> None:
    """Keep the garbage collector off the pool and off what fills it: both stay, and a walk over them holds up steps.

    The pool is frozen. What the blocks come to hold is freed by reference counts and only looks like a heap that grows
    without end, for which full collections come every 130 steps of 256 rows and take 10 ms and more.

    A pool that is not needed any more has to be freed by reference counts, too: see `BlockPool.dismantle`.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
