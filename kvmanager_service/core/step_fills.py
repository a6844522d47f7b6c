"""What outstanding steps fill: which blocks, with which contents, and in whose rows.

Station: owned by `BlockPool`, which makes a block findable when a step that fills it is scheduled, and takes that back
when the step is lost. A block may be evicted or filled anew meanwhile: what stands here is what the step was to fill.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvmanager_service.core.block import BlockContent, KVCacheBlock


class StepFill:
    """What one step fills: blocks[i] with contents[i]; parents before children.

    Rows fill one block after the other, so whose they are is kept by row: those before ends[0] are owners[0]'s, those
    from there on and before ends[1] are owners[1]'s, and so on.
    """

    __slots__ = ("blocks", "contents", "ends", "owners")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.contents: list[BlockContent] = []
        self.owners: list[int] = []
        self.ends: list[int] = []

    def add_row(self, blocks: list[KVCacheBlock], contents: list[BlockContent], owner: int) -> None:
        """One more row of the step, an owner's, fills these."""
        self.blocks += blocks
        self.contents += contents
        self.owners.append(owner)
        self.ends.append(len(self.blocks))

    def of_owner(self, owner: int) -> Iterator[tuple[KVCacheBlock, BlockContent]]:
        """What an owner's rows fill."""
        start = 0
        for row_owner, end in zip(self.owners, self.ends, strict=True):
            if row_owner == owner:
                yield from zip(self.blocks[start:end], self.contents[start:end], strict=True)
            start = end


class StepFills:
    """What all outstanding steps fill, by step; oldest first."""

    __slots__ = ("_fills",)

    def __init__(self) -> None:
        self._fills: dict[int, StepFill] = {}

    def __contains__(self, step_id: int) -> bool:
        return step_id in self._fills

    def __iter__(self) -> Iterator[int]:
        """Steps that fill any block."""
        return iter(self._fills)

    def add_row(self, step_id: int, blocks: list[KVCacheBlock], contents: list[BlockContent], owner: int) -> None:
        """A row of a step, an owner's, fills these blocks with these contents."""
        fill = self._fills.get(step_id)
        if fill is None:
            fill = self._fills[step_id] = StepFill()
        fill.add_row(blocks, contents, owner)

    def pop(self, step_id: int) -> StepFill | None:
        """A step is not outstanding any more: what it was to fill, None for nothing."""
        return self._fills.pop(step_id, None)

    def clear(self) -> None:
        """No step is outstanding any more."""
        self._fills.clear()

    def blocks(self) -> Iterator[tuple[KVCacheBlock, BlockContent]]:
        """All that is to be filled: a block, and the content it was given for it; parents before children."""
        for fill in self._fills.values():
            yield from zip(fill.blocks, fill.contents, strict=True)

    def blocks_of(self, owner: int, first_step: int) -> Iterator[tuple[KVCacheBlock, BlockContent]]:
        """The same of an owner's rows in first_step or later."""
        for step_id, fill in self._fills.items():
            if step_id >= first_step:
                yield from fill.of_owner(owner)
