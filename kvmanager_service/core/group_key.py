"""What names a KV group in a content: the extra key that all contents of a group begin with, where there are several.

Station: used by whoever makes contents of several groups (`group_hits`), and whoever tells of any (`block_history`,
events, listings). It knows no pool.
"""

from __future__ import annotations

from typing import Final

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_hash import KeyDomain, encode_extra_keys

_INDEX_BYTES: Final = 2


def group_key(index: int) -> bytes:
    """The extra key that a content of this group begins with."""
    return encode_extra_keys(((KeyDomain.KV_GROUP, index.to_bytes(_INDEX_BYTES, "little")),))


KEY_BYTES: Final = len(group_key(0))
_KEY_HEAD: Final = group_key(0)[:-_INDEX_BYTES]


def has_group_key(content: BlockContent) -> bool:
    """Whether a content is of a cache of several groups."""
    return content.extra_keys.startswith(_KEY_HEAD)


def group_of(content: BlockContent) -> int:
    """The KV group of a content; 0 where there is only one, whose contents have no key that says so."""
    if not has_group_key(content):
        return 0
    return int.from_bytes(content.extra_keys[KEY_BYTES - _INDEX_BYTES : KEY_BYTES], "little")
