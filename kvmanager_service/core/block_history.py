"""What happened to each block, as far back as a bounded ring goes: for those who look for why a block was not hit.

Station: written by `KVCacheManager`, or `KVCacheCoordinator` and what it is made of, and by `release` (who took and
gave back a block), and by `BlockPool` (what it came to hold and lost), where a manager is told to keep one; read by
`engine_views`. One belongs to one cache: another one's blocks are others.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.group_key import group_of


class BlockMoment(enum.IntEnum):
    """A moment in a block's life."""

    ALLOCATED = 1
    """Handed out to a request, to be written."""
    HASHED = 2
    """Full once the step that was just decided is computed; requests of later steps can hit it already."""
    FILLED = 3
    """The step that fills it was acknowledged."""
    HIT = 4
    """Found in the prefix cache by a request."""
    FREED = 5
    """Given back by a request."""
    EVICTED = 6
    """Lost its hash as it was handed out for something else."""
    FORGOTTEN = 7
    """Lost its hash: its step was lost or failed, or the cache was reset."""
    ADOPTED = 8
    """Filled under an earlier manager, which left a tag."""


class BlockRecord:
    """One moment of one block.

    Attributes:
        order: grows by one with each record of any block, from 1.
        moment: what happened.
        request_id: whose doing it was; empty where it was nobody's.
        step_id: the step that fills it, for HASHED and FILLED; 0 otherwise.
        block_hash: what it came to hold, held or lost; empty where it has no hash.
        extra_keys: what decided that beside tokens; see `block_hash.encode_extra_keys`.
        group: the KV group whose table the block was in, or whose content it came to hold or lost.
    """

    __slots__ = ("block_hash", "block_id", "extra_keys", "group", "moment", "order", "request_id", "step_id")

    def __init__(
        self,
        order: int,
        block_id: int,
        moment: BlockMoment,
        *,
        request_id: str,
        step_id: int,
        block_hash: bytes,
        extra_keys: bytes = b"",
        group: int = 0,
    ) -> None:
        self.order = order
        self.block_id = block_id
        self.moment = moment
        self.request_id = request_id
        self.step_id = step_id
        self.block_hash = block_hash
        self.extra_keys = extra_keys
        self.group = group


class BlockHistory:
    """The last records of all blocks.

    Args:
        capacity: how many are kept, at least 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"expected a capacity of at least 1 record, got {capacity}")
        self._records: deque[BlockRecord] = deque(maxlen=capacity)
        self._next_order = 1

    def note(
        self,
        block_id: int,
        moment: BlockMoment,
        *,
        request_id: str = "",
        step_id: int = 0,
        block_hash: bytes = b"",
        extra_keys: bytes = b"",
        group: int = 0,
    ) -> None:
        """Something happened to a block."""
        self._records.append(
            BlockRecord(
                self._next_order,
                block_id,
                moment,
                request_id=request_id,
                step_id=step_id,
                block_hash=block_hash,
                extra_keys=extra_keys,
                group=group,
            )
        )
        self._next_order += 1

    def note_table(self, request_id: str, group: int, blocks: Iterable[KVCacheBlock], moment: BlockMoment) -> None:
        """A request did something with blocks of its table in a group."""
        for block in blocks:
            content = block.content
            self.note(
                block.block_id,
                moment,
                request_id=request_id,
                block_hash=b"" if content is None else content.block_hash,
                extra_keys=b"" if content is None else content.extra_keys,
                group=group,
            )

    def note_content(self, block: KVCacheBlock, content: BlockContent, moment: BlockMoment, step_id: int = 0) -> None:
        """A block came to hold a content, or lost it, by nobody's doing in particular."""
        self.note(
            block.block_id,
            moment,
            step_id=step_id,
            block_hash=content.block_hash,
            extra_keys=content.extra_keys,
            group=group_of(content),
        )

    def of(self, block_id: int) -> list[BlockRecord]:
        """What is kept of one block, oldest first."""
        return [record for record in self._records if record.block_id == block_id]

    @property
    def num_dropped(self) -> int:
        """How many records, of any block, are not kept any more."""
        return self._next_order - 1 - len(self._records)
