"""What the manager notes on a block that an executor keeps for it, so that a restarted manager can adopt the cache.

Station: encoded into steps by `step_message`, decoded by `executor_client` when it finds a filled cache. An
executor never looks inside.

    version (1 byte) | serial (8) | parent's serial (8) | block hash (16) | length of extra keys (4) | extra keys
    | tokens

A block of more tokens than fit into what an executor keeps has no tag: no restarted manager finds it, nor in its group
anything that follows it.
"""

from __future__ import annotations

from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.group_key import KEY_BYTES
from kvmanager_service.core.request import TOKEN_BYTES

TAG_VERSION = 2
MAX_TAG_BYTES = 4096
_FIXED_BYTES = 1 + 8 + 8 + 16 + 4
MAX_TAGGED_TOKENS = (MAX_TAG_BYTES - _FIXED_BYTES - KEY_BYTES) // TOKEN_BYTES
"""Of a block with no extra key but its group's; every other takes room from them."""
_END_OF_SERIALS = 1 << 63


def encode_tag(content: BlockContent) -> bytes:
    """Note everything needed to prove the content again. Empty when it would be longer than an executor keeps."""
    parent_serial = 0 if content.parent is None else content.parent.serial
    extra = content.extra_keys
    tag = b"".join(
        (
            bytes((TAG_VERSION,)),
            content.serial.to_bytes(8, "little"),
            parent_serial.to_bytes(8, "little"),
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
    serial, parent_serial = int.from_bytes(tag[1:9], "little"), int.from_bytes(tag[9:17], "little")
    extra_end = _FIXED_BYTES + int.from_bytes(tag[33:37], "little")
    if extra_end > len(tag) or max(serial, parent_serial) >= _END_OF_SERIALS:
        return None
    return TaggedBlock(block_id, tag[17:33], serial, parent_serial, tag[extra_end:], tag[_FIXED_BYTES:extra_end])
