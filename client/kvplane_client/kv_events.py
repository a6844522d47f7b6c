"""What changes in the manager's prefix cache, as plain values, and an index that follows it.

Station: the vocabulary of ``watch_kv_events``. Nothing here knows the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "KvBlockKeys",
    "KvBlockRemoved",
    "KvBlockStored",
    "KvCacheCleared",
    "KvCacheIndex",
    "KvEvent",
    "KvEventBatch",
]


@dataclass(frozen=True, slots=True)
class KvBlockKeys:
    """What requests must have in common, beside tokens, to share a first block, and so all that follow it.

    Attributes:
        cache_salt: Theirs; empty for none.
        tenant: Whose they are; None where tenants are not kept apart.
        lora_id: Their adapter; empty for the model itself.
        lora_revision: The adapter's weights.
    """

    cache_salt: str = ""
    tenant: str | None = None
    lora_id: str = ""
    lora_revision: str = ""


@dataclass(frozen=True, slots=True)
class KvBlockStored:
    """A block can be hit from now on.

    Attributes:
        sequence: The event's number.
        block_id: The block.
        block_hash: Its chain hash in hexadecimal.
        parent_block_hash: That of the block before; None for a first block.
        content_id: Names the content within its group: tokens in the context of one parent. Never given to another one.
        parent_content_id: The content of the block before; None for a first block.
        token_ids: Its tokens; empty unless they were asked for.
        group: The KV group.
        medium: Where it lies.
        keys: Of a first block that tokens alone do not decide; None for others, and unless they were asked for.
    """

    sequence: int
    block_id: int
    block_hash: str
    parent_block_hash: str | None
    content_id: int
    parent_content_id: int | None
    token_ids: tuple[int, ...] = ()
    group: int = 0
    medium: str = "device"
    keys: KvBlockKeys | None = None


@dataclass(frozen=True, slots=True)
class KvBlockRemoved:
    """A block does not hold a content any more; the attributes are those of :class:`KvBlockStored`."""

    sequence: int
    block_id: int
    block_hash: str
    content_id: int
    group: int = 0
    medium: str = "device"


@dataclass(frozen=True, slots=True)
class KvCacheCleared:
    """No block can be hit: the cache was reset, or is another executor's."""

    sequence: int


KvEvent: TypeAlias = KvBlockStored | KvBlockRemoved | KvCacheCleared


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events in order.

    Attributes:
        log_id: Names the run of the manager, and with it the numbers.
        events: The events.
        next_sequence: Where to go on after this batch; 0 while a snapshot is not complete.
        is_snapshot: The events make up a state rather than being what happened.
    """

    log_id: str
    events: tuple[KvEvent, ...]
    next_sequence: int
    is_snapshot: bool


class KvCacheIndex:
    """What can be hit, as far as the batches applied tell.

    Attributes:
        blocks: What each block holds, by group, medium and block id.
        log_id: Of the last batch; empty before the first.
        next_sequence: Where to go on; 0 before a snapshot is complete.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, str, int], KvBlockStored] = {}
        self.log_id = ""
        self.next_sequence = 0

    def apply(self, batch: KvEventBatch) -> None:
        """Takes the next batch: a snapshot's first, or the one that follows the last that was applied.

        Raises:
            KeyError: A block is removed that was never stored: a batch was left out.
        """
        for event in batch.events:
            if isinstance(event, KvBlockStored):
                self.blocks[event.group, event.medium, event.block_id] = event
            elif isinstance(event, KvBlockRemoved):
                del self.blocks[event.group, event.medium, event.block_id]
            else:
                self.blocks.clear()
        self.log_id, self.next_sequence = batch.log_id, batch.next_sequence

    def reachable(self) -> set[str]:
        """Returns the hashes of all contents that are held with every one before them, up to a first block.

        Those are what a request can hit, but for a group with a window, of which it needs the last ones only.
        """
        parents = {(block.group, block.content_id): block.parent_content_id for block in self.blocks.values()}
        known: dict[tuple[int, int], bool] = {}
        for group, content_id in parents:
            chain: list[tuple[int, int]] = []
            current: int | None = content_id
            while current is not None and (group, current) in parents and (group, current) not in known:
                chain.append((group, current))
                current = parents[group, current]
            is_reachable = current is None or known.get((group, current), False)
            known.update(dict.fromkeys(chain, is_reachable))
        return {block.block_hash for block in self.blocks.values() if known[block.group, block.content_id]}
