import itertools

import xxhash

from kvmanager_service.core.block_hash import (
    NONE_HASH,
    KeyDomain,
    decode_extra_keys,
    default_hash,
    encode_extra_keys,
    hash_block_tokens,
)
from tests.unit.core.builders import token_bytes


def test_hash_block_tokens_is_xxh3_of_parent_tokens_and_keys() -> None:
    parent, tokens, keys = bytes(range(16)), token_bytes([1, 2, 3, 4]), b"keys"
    assert hash_block_tokens(default_hash, parent, tokens, keys) == xxhash.xxh3_128_digest(parent + tokens + keys)


def test_hash_block_tokens_first_block_has_the_none_hash_as_parent() -> None:
    tokens = token_bytes([1, 2])
    assert hash_block_tokens(default_hash, None, tokens) == hash_block_tokens(default_hash, NONE_HASH, tokens)


def test_hash_block_tokens_differs_by_parent_tokens_order_and_keys() -> None:
    inputs = itertools.product(
        (None, b"p" * 16, b"q" * 16), (token_bytes([1, 2]), token_bytes([2, 1]), token_bytes([1, 3])), (b"", b"k")
    )
    hashes = [hash_block_tokens(default_hash, *values) for values in inputs]
    assert len(set(hashes)) == len(hashes) == 18


def test_hash_block_tokens_second_block_depends_on_the_first() -> None:
    first, other, second = token_bytes([1, 2]), token_bytes([9, 2]), token_bytes([3, 4])
    after_first = hash_block_tokens(default_hash, hash_block_tokens(default_hash, None, first), second)
    after_other = hash_block_tokens(default_hash, hash_block_tokens(default_hash, None, other), second)
    assert after_first != after_other


def test_encode_extra_keys_cut_in_another_place_gives_other_bytes() -> None:
    salt = KeyDomain.CACHE_SALT
    cuts = [
        [],
        [(salt, b"")],
        [(salt, b"ab")],
        [(salt, b"a"), (salt, b"b")],
        [(salt, b""), (salt, b"ab")],
        [(salt, b"ab"), (salt, b"")],
        # A value that looks like the encoding of two.
        [(salt, b"a" + encode_extra_keys([(salt, b"b")]))],
    ]
    encoded = [encode_extra_keys(cut) for cut in cuts]
    assert len(set(encoded)) == len(cuts)
    assert [decode_extra_keys(keys) for keys in encoded] == cuts
    assert encoded[0] == b""
    assert encoded[2] == b"\x01\x02\x00\x00\x00ab"
