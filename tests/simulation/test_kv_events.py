"""A follower that sees nothing but events knows the cache as the pool does, after every step and every fault."""

from __future__ import annotations

import os

import pytest
from kvplane_client import KvCacheIndex
from kvplane_client._convert import kv_batch_from

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.errors import EventsForgottenError
from kvmanager_service.kv_event_messages import event_batch, snapshot_batches
from tests.simulation.chaos import Chaos

FIRST_SEED = int(os.environ.get("KVPLANE_SIMULATION_SEED", "1"))
NUM_SEEDS = int(os.environ.get("KVPLANE_SIMULATION_SEEDS", "40")) // 2

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
    """Hashes of contents that are held, together with all before them, by blocks that are filled."""

    def is_filled(content: BlockContent) -> bool:
        return any(not block.provisional_step for block in content.blocks)

    hashes = set()
    for content in pool.cached_block_hash_to_block.values():
        link: BlockContent | None = content
        while link is not None and is_filled(link):
            link = link.parent
        if link is None:
            hashes.add(content.block_hash.hex())
    return hashes


class FollowedChaos(Chaos):
    """A life with a follower, which falls behind when the ring is too small and then starts anew."""

    def __init__(self, seed: int, capacity: int) -> None:
        self.events = BlockEventLog(capacity)
        self.index = KvCacheIndex()
        self.snapshots = 0
        self.kinds: set[str] = set()
        super().__init__(seed, events=self.events)

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


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS))
def test_simulation_follower_knows_what_the_pool_knows_after_every_step(seed: int) -> None:
    life = FollowedChaos(seed, 1_000)
    life.run()
    assert life.snapshots == 1, "a ring that is large enough needs no other"


def test_simulation_follower_that_falls_behind_starts_anew() -> None:
    kinds: set[str] = set()
    snapshots = 0
    for seed in range(FIRST_SEED, FIRST_SEED + 10):
        life = FollowedChaos(seed, 4)
        life.run()
        kinds |= life.kinds
        snapshots += life.snapshots
    assert snapshots > 10
    assert kinds == {"stored", "removed", "cleared"}
