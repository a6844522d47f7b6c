"""Opaque notes of the manager on full blocks, from which a restarted manager adopts the cache.

Station: owned by `kv_session`, touched only in the compute thread; `servicer` lists from a snapshot. The executor never
interprets a tag. One store lives as long as one epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_PORTION_BYTES", "MAX_PORTION_TAGS", "MAX_TAG_BYTES", "BlockTagStore", "portions"]

MAX_TAG_BYTES = 4096
MAX_PORTION_TAGS = 4096
MAX_PORTION_BYTES = 1 << 20


class BlockTagStore:
    """Tag per block.

    Args:
        num_blocks: size of the cache, the null block included.

    Invariants:
        `_tagged[block]` holds exactly for the keys of `_tags`; no tag is empty.
    """

    def __init__(self, num_blocks: int) -> None:
        self._tags: dict[int, bytes] = {}
        # A step writes hundreds of slots and rarely into a tagged block: one gather finds out.
        self._tagged = np.zeros(num_blocks, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._tags)

    def drop(self, block_ids: npt.NDArray[np.signedinteger]) -> None:
        """Forget the tags of blocks about to be written.

        Args:
            block_ids: ids in [0, num_blocks), repeats allowed.
        """
        for block_id in block_ids[self._tagged[block_ids]].tolist():
            self._tags.pop(block_id, None)
            self._tagged[block_id] = False

    def store(self, block_ids: Sequence[int], tags: Sequence[bytes]) -> None:
        """Keep the tags of a computed step; an empty tag drops the block's."""
        for block_id, tag in zip(block_ids, tags, strict=True):
            if tag:
                self._tags[block_id] = tag
            else:
                self._tags.pop(block_id, None)
            self._tagged[block_id] = bool(tag)

    def snapshot(self) -> dict[int, bytes]:
        """Return a copy that steps do not change."""
        return dict(self._tags)


def portions(tags: Mapping[int, bytes]) -> Iterator[tuple[list[int], list[bytes]]]:
    """Cut tags into messages of at most `MAX_PORTION_TAGS` tags and `MAX_PORTION_BYTES` bytes of tags."""
    ids: list[int] = []
    values: list[bytes] = []
    size = 0
    for block_id, tag in tags.items():
        if ids and (len(ids) == MAX_PORTION_TAGS or size + len(tag) > MAX_PORTION_BYTES):
            yield ids, values
            ids, values, size = [], [], 0
        ids.append(block_id)
        values.append(tag)
        size += len(tag)
    if ids:
        yield ids, values
