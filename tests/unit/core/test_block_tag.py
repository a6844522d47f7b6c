import pytest

from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block import BlockContent
from kvmanager_service.core.block_tag import MAX_TAG_BYTES, MAX_TAGGED_TOKENS, TAG_VERSION, decode_tag, encode_tag
from kvmanager_service.core.group_key import group_key
from kvmanager_service.core.request import TOKEN_BYTES
from tests.unit.core.builders import token_bytes

TOKENS = token_bytes([1, 2, 3, -1])
ROOT = BlockContent(5, b"r" * 16, None, TOKENS, b"salt")
CHILD = BlockContent(6, b"c" * 16, ROOT, TOKENS[::-1], b"")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ROOT, TaggedBlock(7, b"r" * 16, 5, 0, TOKENS, b"salt")),
        (CHILD, TaggedBlock(7, b"c" * 16, 6, 5, TOKENS[::-1], b"")),
    ],
)
def test_tag_written_and_read_is_the_same(content: BlockContent, expected: TaggedBlock) -> None:
    assert decode_tag(7, encode_tag(content)) == expected


def test_encode_tag_longer_than_an_executor_keeps_is_empty() -> None:
    tag = encode_tag(ROOT)
    room = MAX_TAG_BYTES - len(tag)
    assert len(encode_tag(BlockContent(5, b"r" * 16, None, TOKENS, b"salt" + bytes(room)))) == MAX_TAG_BYTES
    assert encode_tag(BlockContent(5, b"r" * 16, None, TOKENS, b"salt" + bytes(room + 1))) == b""


def test_max_tagged_tokens_are_the_most_of_a_block_with_its_groups_key() -> None:
    def tag_of(num_tokens: int) -> bytes:
        return encode_tag(BlockContent(1, b"h" * 16, None, bytes(TOKEN_BYTES * num_tokens), group_key(3)))

    assert tag_of(MAX_TAGGED_TOKENS)
    assert not tag_of(MAX_TAGGED_TOKENS + 1)


@pytest.mark.parametrize(
    "tag",
    [
        b"",
        bytes((TAG_VERSION + 1,)) + encode_tag(ROOT)[1:],
        encode_tag(ROOT)[:36],
        encode_tag(ROOT)[:33] + (1 << 31).to_bytes(4, "little") + encode_tag(ROOT)[37:],
        encode_tag(ROOT)[:8] + b"\x80" + encode_tag(ROOT)[9:],
    ],
    ids=["empty", "other version", "cut", "keys beyond the end", "serial beyond the end"],
)
def test_decode_tag_not_one_of_ours_is_none(tag: bytes) -> None:
    assert decode_tag(7, tag) is None
