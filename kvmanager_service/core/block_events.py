"""What changed in the set of blocks that can be hit, in order, as far back as a bounded ring goes.

Station: written by `BlockPool`, one call for each block that changes; read by those who follow the cache from outside.
A log outlives its pools: a pool that starts on it says so by `cleared`.

A block is told of once it is filled: what an outstanding step is to fill is not stored yet, and if the step is lost,
nothing is removed.
"""

from __future__ import annotations

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.errors import EventsForgottenError

BlockEvent = tuple[int, BlockContent | None, bool]
"""Block id, content, whether the block holds it now (else it does not any more). No content: all blocks are empty."""

_CLEARED: BlockEvent = (0, None, False)


class BlockEventLog:
    """A ring of events, each with a sequence number that grows by one from 1.

    Args:
        capacity: how many are kept, at least 1.

    Attributes:
        next_sequence: the number that the next event will have.
    """

    __slots__ = ("_capacity", "_ring", "next_sequence")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"expected a capacity of at least 1 event, got {capacity}")
        self._capacity = capacity
        self._ring: list[BlockEvent] = [_CLEARED] * capacity
        self.next_sequence = 1

    @property
    def first_sequence(self) -> int:
        """The number of the oldest event that is kept; `next_sequence` when there is none."""
        return max(1, self.next_sequence - self._capacity)

    def stored(self, block_id: int, content: BlockContent) -> None:
        """A block holds this content and can be hit."""
        self._ring[self.next_sequence % self._capacity] = (block_id, content, True)
        self.next_sequence += 1

    def removed(self, block_id: int, content: BlockContent) -> None:
        """A block does not hold this content any more."""
        self._ring[self.next_sequence % self._capacity] = (block_id, content, False)
        self.next_sequence += 1

    def cleared(self) -> None:
        """No block holds anything."""
        self._ring[self.next_sequence % self._capacity] = _CLEARED
        self.next_sequence += 1

    def since(self, sequence: int, most: int) -> list[BlockEvent]:
        """Events from a number on, in order.

        Args:
            sequence: the first one's number; `next_sequence` gives none.
            most: how many at most.

        Raises:
            EventsForgottenError: that event is not kept any more, or is far from having happened.
        """
        if not self.first_sequence <= sequence <= self.next_sequence:
            raise EventsForgottenError(
                "EVENTS_FORGOTTEN",
                f"expected a sequence number from {self.first_sequence} to {self.next_sequence}, which are kept, got"
                f" {sequence}; start with a snapshot",
                first_sequence=self.first_sequence,
                next_sequence=self.next_sequence,
            )
        stop = min(self.next_sequence, sequence + most)
        return [self._ring[number % self._capacity] for number in range(sequence, stop)]
