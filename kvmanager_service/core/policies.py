"""The policies by name, and a queue for each.

Station: `scheduler_config` checks a name against it, `RequestBook` gets its queue from it. A further policy is a class
beside these and a line here.
"""

from __future__ import annotations

from kvmanager_service.core.fair_queue import FairQueue, FairWeights
from kvmanager_service.core.request_queue import FCFSQueue, PriorityQueue, RequestQueue

POLICIES = ("fcfs", "priority", "fair")


def make_queue(policy: str, fair_weights: FairWeights) -> RequestQueue:
    """An empty queue.

    Args:
        policy: one of `POLICIES`.
        fair_weights: for "fair".
    """
    if policy == "fair":
        return FairQueue(fair_weights)
    return PriorityQueue() if policy == "priority" else FCFSQueue()
