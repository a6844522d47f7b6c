"""Chain hashes of prefix caching.

Station: called by `KVCacheManager` when a block's tokens are known. A hash only *finds* a candidate; `BlockPool` proves
a hit by comparing tokens, extra keys and the identity of the parent's content, so a collision costs a miss and never
another user's KV.

    hash(block) = xxh3_128(parent hash, 16 bytes | tokens, block_size × int32 | extra keys)

The first two parts have a fixed length, so no two inputs have the same bytes by accident of where they are cut.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

import xxhash

BlockHash = bytes
"""16 bytes."""

HashFunction = Callable[[bytes], BlockHash]

NONE_HASH: BlockHash = bytes(16)
"""The parent of a first block."""


class KeyDomain(enum.IntEnum):
    """What an extra key speaks of, so that a LoRA called like a salt is not the same thing; see `extra_keys`."""

    CACHE_SALT = 1
    TENANT = 2
    LORA_ID = 3
    LORA_REVISION = 4
    MULTIMODAL_ITEM = 5
    PROMPT_EMBEDDING = 6
    KV_GROUP = 7


def encode_extra_keys(keys: Iterable[tuple[KeyDomain, bytes]]) -> bytes:
    """Encode tagged keys so that different keys always give different bytes.

    Args:
        keys: pairs of domain and value, in a fixed order.

    Returns:
        domain (1 byte), length (4 bytes little-endian), value; for each key. Empty for no keys.
    """
    return b"".join([encode_extra_key(domain, value) for domain, value in keys])


def encode_extra_key(domain: KeyDomain, value: bytes) -> bytes:
    """Encode one tagged key; the encodings of several, one after the other, are what `encode_extra_keys` gives."""
    return bytes((domain,)) + len(value).to_bytes(4, "little") + value


def decode_extra_keys(encoded: bytes) -> list[tuple[int, bytes]]:
    """The keys, in order, that `encode_extra_keys` made these bytes of; a later version may have had other domains."""
    keys: list[tuple[int, bytes]] = []
    start = 0
    while start < len(encoded):
        value = start + 5
        stop = value + int.from_bytes(encoded[start + 1 : value], "little")
        keys.append((encoded[start], encoded[value:stop]))
        start = stop
    return keys


default_hash: HashFunction = xxhash.xxh3_128_digest
"""xxh3, 128 bits. Source: the xxHash project."""


def hash_block_tokens(
    hash_function: HashFunction, parent_hash: BlockHash | None, token_bytes: bytes, extra_keys: bytes = b""
) -> BlockHash:
    """Hash one full block in its context.

    Args:
        hash_function: from bytes to a digest.
        parent_hash: the hash of the block before, or None for the first block.
        token_bytes: the block's token ids, little-endian int32.
        extra_keys: `encode_extra_keys` of what else decides the block's K/V.

    Returns:
        The digest; equal prefixes give equal digests, and a block's digest depends on everything before it.
    """
    hashed = (parent_hash or NONE_HASH) + token_bytes
    return hash_function(hashed + extra_keys if extra_keys else hashed)
