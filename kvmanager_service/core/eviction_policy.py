"""Which free block is handed out next: what every policy does.

Station: one policy is owned by `BlockPool`, which tells it of every block that comes free, is hit again or loses its
content. A policy never sees a request and never changes a block but for its links.

Whatever the policy, a block without content is handed out before any with content, and a block that a table references
is not handed out at all. Policies differ only in the order of free blocks with content.

A further policy is a class like these and a line in `eviction_policies.EVICTION_POLICIES`: flags, replay and the tests
of all policies take its name from there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

from kvmanager_service.core.block import KVCacheBlock


class EvictionPolicy:
    """The free blocks, in the order they will be handed out; abstract.

    No `ABC`, for the reason that `KVGroup` gives.

    Attributes:
        num_free_blocks: how many there are.
    """

    num_free_blocks: int

    @abstractmethod
    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the next n blocks out, in order. Raises IndexError when fewer are free; nothing is taken then."""

    @abstractmethod
    def remove(self, block: KVCacheBlock) -> None:
        """A free block is referenced again. Raises ValueError when it is not free."""

    @abstractmethod
    def append(self, block: KVCacheBlock) -> None:
        """A block with content came free."""

    @abstractmethod
    def prepend(self, block: KVCacheBlock) -> None:
        """A block without content came free."""

    @abstractmethod
    def emptied(self, block: KVCacheBlock) -> None:
        """A block, free or referenced, lost its content otherwise than by being handed out."""

    def note_use(self, blocks: Iterable[KVCacheBlock]) -> None:
        """A request that referenced these blocks is about to give them back. For a policy that counts uses."""

    def retain(self, blocks: Iterable[KVCacheBlock], priority: int, duration: float) -> None:
        """A request that is about to give these blocks back asks for them to be kept. For a policy that listens.

        Args:
            blocks: part of its table.
            priority: higher is longer; see `retention`.
            duration: seconds for which that holds after each use; 0 for as long as the block is cached.
        """

    def advance(self, now: float) -> None:
        """The caller's clock says so many seconds; never less than before. For a policy that knows durations."""

    @abstractmethod
    def __iter__(self) -> Iterator[KVCacheBlock]:
        """In the order they will be handed out; for tests and checks."""
