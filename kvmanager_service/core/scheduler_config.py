"""The limits a scheduler works under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmanager_service.core.fair_queue import DEFAULT_WEIGHTS, FairWeights
from kvmanager_service.core.policies import POLICIES

RECOMPUTE: Final = "recompute"
PREEMPTION_MODES: Final = (RECOMPUTE, "swap", "auto")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        policy: one of `policies.POLICIES`.
        max_num_batched_tokens: most tokens computed in a step.
        max_num_seqs: most requests running.
        max_waiting: most requests waiting for their first admission; preempted ones may exceed it.
        long_prefill_token_threshold: most tokens of one request in a step; 0 is no limit.
        watermark: share of the pool that an admission must leave free while others run, in [0, 1).
        max_outstanding: most steps without a result: 2 keeps one queued ahead, 1 does not. Not more: a row can be fed
            by the step right before it only.
        preemption_mode: one of `PREEMPTION_MODES`: what becomes of a preempted request's K/V. Anything but recompute
            needs an executor with host blocks.
        max_pinned_fraction: share of the pool that pinned prefixes may name, in [0, 1].
        fair_weights: what a token counts under the fair policy.
    """

    policy: str = "fcfs"
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_waiting: int = 1000
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    max_outstanding: int = 2
    preemption_mode: str = RECOMPUTE
    max_pinned_fraction: float = 0.25
    fair_weights: FairWeights = DEFAULT_WEIGHTS

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"expected policy to be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ValueError(
                f"expected preemption_mode to be one of {', '.join(PREEMPTION_MODES)}, got {self.preemption_mode!r}"
            )
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.max_outstanding not in (1, 2):
            raise ValueError(f"expected max_outstanding of 1 or 2, got {self.max_outstanding}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"expected long_prefill_token_threshold of at least 0, got {self.long_prefill_token_threshold}"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"expected watermark in [0, 1), got {self.watermark}")
        if not 0 <= self.max_pinned_fraction <= 1:
            raise ValueError(f"expected max_pinned_fraction in [0, 1], got {self.max_pinned_fraction}")
