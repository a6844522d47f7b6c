"""What the executor has not been told yet of its blocks' content.

Station: owned by `Residency`, one for each cache; every step takes along what is in it. What a tag looks like on the
wire is for `block_tag` to know.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.step import Step

Tag = tuple[int, BlockContent | None]


class TagOutbox:
    """Tags for the next step: a block's id and its content, None where that is not trusted any more.

    Args:
        pool: whose blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._blocks = pool.blocks
        self._tags: list[Tag] = []

    def __bool__(self) -> bool:
        return bool(self._tags)

    def committed(self, blocks: Iterable[KVCacheBlock]) -> None:
        """A step that filled these blocks was acknowledged."""
        self._tags += [(block.block_id, content) for block in blocks if (content := block.content) is not None]

    def forgotten(self, blocks: Iterable[KVCacheBlock]) -> None:
        """These blocks hold nothing to be found again, though the executor may have a tag that says so."""
        self._tags += [(block.block_id, None) for block in blocks]

    def lost(self, steps: Iterable[Step]) -> None:
        """The executor may not have stored what these steps took along."""
        self._tags = [tag for step in steps for tag in step.tags] + self._tags

    def take(self) -> list[Tag]:
        """Everything since the last call that still holds, in order."""
        tags, self._tags = self._tags, []
        blocks = self._blocks
        return [
            (block_id, content)
            for block_id, content in tags
            if blocks[block_id].content is content and not blocks[block_id].provisional_step
        ]
