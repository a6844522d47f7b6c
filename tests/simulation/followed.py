"""A life with one who sees nothing of the cache but its events, and must know at any time what the pool knows."""

from __future__ import annotations

from kvplane_client import KvCacheIndex
from kvplane_client._convert import kv_batch_from

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.errors import EventsForgottenError
from kvmanager_service.core.group_key import group_of
from kvmanager_service.kv_event_messages import event_batch, snapshot_batches
from tests.simulation.chaos import Chaos
from tests.simulation.life import Life

Held = dict[int, tuple[str, int, int | None, tuple[int, ...]]]


def held_by(pool: BlockPool) -> Held:
    """What filled blocks hold, from the pool's own books: hash, content, parent, tokens."""
    held: Held = {}
    for block in pool.blocks:
        content = block.content
        if content is None or block.provisional_step:
            continue
        tokens = tuple(
            int.from_bytes(content.token_bytes[at : at + 4], "little") for at in range(0, len(content.token_bytes), 4)
        )
        parent = None if content.parent is None else content.parent.serial
        held[block.block_id] = (content.block_hash.hex(), content.serial, parent, tokens)
    return held


def reachable_in(pool: BlockPool) -> set[str]:
    """Hashes of contents that are held, together with all before them in their group, by blocks that are filled."""
    filled = [block.content for block in pool.blocks if block.content is not None and not block.provisional_step]
    held = {(group_of(content), content.serial): content for content in filled}

    def is_held_from_the_first_on(content: BlockContent) -> bool:
        group = group_of(content)  # of which the one before, a link between all groups' contents, says nothing
        found = held.get((group, content.serial))
        while found is not None and found.parent is not None:
            found = held.get((group, found.parent.serial))
        return found is not None

    contents = pool.cached_block_hash_to_block.values()
    return {content.block_hash.hex() for content in contents if is_held_from_the_first_on(content)}


class FollowedChaos(Chaos):
    """A life with a follower, which falls behind when the ring is too small and then starts anew."""

    def __init__(self, life: Life) -> None:
        assert life.follower_ring is not None
        self.events = BlockEventLog(life.follower_ring)
        self.index = KvCacheIndex()
        self.snapshots = 0
        self.kinds: set[str] = set()
        super().__init__(life, events=self.events)

    def check(self) -> None:
        super().check()
        self.follow()
        pool = self.world.scheduler.kv.pool
        followed = {
            block_id: (block.block_hash, block.content_id, block.parent_content_id, block.token_ids)
            for (_, _, block_id), block in self.index.blocks.items()
        }
        assert followed == held_by(pool)
        assert self.index.reachable() == reachable_in(pool)

    def follow(self) -> None:
        sequence = self.index.next_sequence  # 0 before the first time, which no event has
        try:
            messages = [event_batch(self.events.since(sequence, 1_000_000), sequence, with_tokens=True)]
        except EventsForgottenError:
            self.snapshots += 1
            stored = self.world.scheduler.kv.pool.committed_contents()
            messages = list(snapshot_batches(stored, self.events.next_sequence, with_tokens=True))
        for message in messages:
            self.kinds |= {str(event.WhichOneof("event")) for event in message.events if not message.is_snapshot}
            self.index.apply(kv_batch_from(message))
