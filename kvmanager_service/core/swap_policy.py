"""Whether a preempted request is swapped out or computed again.

Station: made by `Scheduler`, asked by `SwapSpace` for each victim, told by it what copies and prefill cost, and what a
victim that came back still found in the prefix cache. It knows no block and no clock: times come with the results of
steps.

    recompute   tokens that nobody else holds × lost × measured µs for a prefill token
    swap        blocks × (1 + lost) × measured µs for a copied block: all out, and in again what is lost

`lost` is 1 until a victim has come back: as if the cache kept nothing. From then on it is the share of such tokens that
victims did not find again, the newest counting most. Where the cache gives back nearly everything, recomputation costs
next to nothing and copying out still costs all; where it gives back nothing, a block goes out and in.

Before a copy was measured there is nothing to compare. So under `auto` the first victim is a probe, and so is one of
every PROBE_EVERY that the comparison leaves to recomputation: what was slow at first need not stay so.
"""

from __future__ import annotations

from typing import Final

from kvmanager_service.core.scheduler_config import RECOMPUTE
from kvmanager_service.core.step import BlockCopy, CopyDirection, Step, StepResult

PROBE_EVERY: Final = 64
"""One of so many victims is swapped out although recomputation seems the better choice."""

MAX_LOST_COPIES: Final = 3
"""After so many steps with copies were lost, and none came back in between, the executor may be what cannot copy: then
victims are computed again, but for the probes."""

_DECAY: Final = 0.9


class SwapPolicy:
    """Chooses for one victim at a time.

    Args:
        mode: one of `PREEMPTION_MODES` other than recompute.
    """

    def __init__(self, mode: str) -> None:
        assert mode != RECOMPUTE
        self._always = mode == "swap"
        self._copy = _Average()  # µs per block
        self._prefill = _Average()  # µs per token
        self._found = _Average()  # tokens found again per token that was there
        self._lost = 0
        self._refusals = 0 if self._always else PROBE_EVERY - 1

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to swap out a victim, rather than have it compute again what the prefix cache will have lost.

        Args:
            num_tokens: tokens that it has computed, those left out that others hold, too.
            num_blocks: blocks that would be copied out.
        """
        if self._lost < MAX_LOST_COPIES and (self._always or self._is_cheaper(num_tokens, num_blocks)):
            return True
        self._refusals += 1
        if self._refusals < PROBE_EVERY:
            return False
        self._refusals = 0
        return True

    def _is_cheaper(self, num_tokens: int, num_blocks: int) -> bool:
        if not (self._copy.is_known and self._prefill.is_known):
            return False
        lost = 1.0 - self._found.per_unit if self._found.is_known else 1.0
        return num_blocks * (1.0 + lost) * self._copy.per_unit < num_tokens * lost * self._prefill.per_unit

    def came_back(self, num_tokens: int, num_found: int) -> None:
        """A victim was admitted again, swapped out or not: the prefix cache had num_found of its num_tokens tokens."""
        self._found.add(num_found, num_tokens)

    def acknowledged(self, step: Step, result: StepResult) -> None:
        """A step came back: learn from its times.

        Steps of two tokens a row and more are taken for prefill; those that mostly decode say nothing of it, for
        theirs is the time of reading the weights.
        """
        if step.copies:
            self._lost = 0
        if result.compute_us <= 0:
            return  # the executor does not say
        if step.copies and all(map(_is_swap, step.copies)):
            self._copy.add(result.copy_us, len(step.copies))
        if step.num_tokens >= 2 * len(step.rows) > 0:
            self._prefill.add(max(0, result.compute_us - result.copy_us), step.num_tokens)

    def lost(self, step: Step) -> None:
        """The step that an executor was lost in, or its stream."""
        self._lost += bool(step.copies)


class _Average:
    """An amount per unit, the newest measurements counting most and large ones more than small ones."""

    __slots__ = ("_amount", "_units")

    def __init__(self) -> None:
        self._amount = 0.0
        self._units = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._units > 0.0

    @property
    def per_unit(self) -> float:
        """The average; only where known."""
        return self._amount / self._units

    def add(self, amount: int, units: int) -> None:
        """So many units took, or brought, so much."""
        self._amount = self._amount * _DECAY + amount
        self._units = self._units * _DECAY + units


def _is_swap(copy: BlockCopy) -> bool:
    return copy.direction is not CopyDirection.DEVICE_TO_DEVICE
