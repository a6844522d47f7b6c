"""What the manager notes on a block that an executor keeps for it, so that a restarted manager can adopt the cache.

Station: encoded into steps by `step_message`, decoded by `executor_client` when it finds a filled cache. An
executor never looks inside.

    version (1 byte) | parent hash (16) | block hash (16) | length of extra keys (4) | extra keys | tokens
"""

from __future__ import annotations

from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_hash import NONE_HASH
from kvmanager_service.core.kv_cache_manager import TaggedBlock

TAG_VERSION = 1
MAX_TAG_BYTES = 4096
_FIXED_BYTES = 1 + 16 + 16 + 4


def encode_tag(content: BlockContent) -> bytes:
    """Note everything needed to prove the content again. Empty when it would be longer than an executor keeps."""
    parent_hash = content.parent.block_hash if content.parent is not None else NONE_HASH
    extra = content.extra_keys
    tag = b"".join(
        (
            bytes((TAG_VERSION,)),
            parent_hash,
            content.block_hash,
            len(extra).to_bytes(4, "little"),
            extra,
            content.token_bytes,
        )
    )
    return tag if len(tag) <= MAX_TAG_BYTES else b""


def decode_tag(block_id: int, tag: bytes) -> TaggedBlock | None:
    """Read a tag. None when it is not one of this version: the block is then not adopted."""
    if len(tag) < _FIXED_BYTES or tag[0] != TAG_VERSION:
        return None
    extra_end = _FIXED_BYTES + int.from_bytes(tag[33:37], "little")
    if extra_end > len(tag):
        return None
    return TaggedBlock(block_id, tag[17:33], tag[1:17], tag[extra_end:], tag[_FIXED_BYTES:extra_end])
