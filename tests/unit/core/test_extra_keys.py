"""Who may share a block with whom: adapters, tenants, salts, and what stands behind tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvmanager_service.core import extra_keys
from kvmanager_service.core.block_hash import KeyDomain, encode_extra_key, encode_extra_keys
from kvmanager_service.core.block_tag import decode_tag, encode_tag
from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.core.extra_keys import LoraAdapter, PromptSpan, SpanKeys, first_difference, request_keys
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import Request
from tests.unit.core.builders import block_ids, make_kv, make_new, make_request, make_scheduler, run_step

IMAGE, EMBEDDING = KeyDomain.MULTIMODAL_ITEM, KeyDomain.PROMPT_EMBEDDING
CAT, DOG = b"cat" + bytes(13), b"dog" + bytes(13)
PLACEHOLDER = [5] * 17
"""Every token is the same, so that nothing but keys can tell blocks apart."""


def image(digest: bytes, offset: int, length: int = 6) -> PromptSpan:
    return PromptSpan(IMAGE, digest, offset, length)


def filled(kv: KVCacheManager, prompt: Sequence[int] = PLACEHOLDER, **values: Any) -> Request:
    """A request that was computed and has ended."""
    request = make_request("filled", prompt, **values)
    assert kv.allocate_sequence(request)
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request, 0)
    assert len(request.contents) == request.num_tokens // kv.block_size
    kv.free(request)
    return request


def hits(kv: KVCacheManager, prompt: Sequence[int] = PLACEHOLDER, **values: Any) -> int:
    return len(kv.get_computed_blocks(make_request("asks", prompt, **values)))


WHOLE_REQUEST: list[dict[str, Any]] = [
    {},
    {"salt": "x"},
    {"lora": LoraAdapter("x")},
    {"lora": LoraAdapter("x", "1")},
    {"lora": LoraAdapter("x", "2")},
    {"lora": LoraAdapter("x1")},
    {"tenant": "x", "is_isolated": True},
    {"tenant": "", "is_isolated": True},
    {"salt": "x", "lora": LoraAdapter("x")},
    {"salt": "x", "tenant": "x", "is_isolated": True},
]


@pytest.mark.parametrize(("mine", "yours"), list(itertools.product(WHOLE_REQUEST, repeat=2)))
def test_requests_share_blocks_only_with_the_same_salt_tenant_and_adapter(
    mine: dict[str, Any], yours: dict[str, Any]
) -> None:
    kv = make_kv(41)
    filled(kv, **mine)
    assert hits(kv, **yours) == (4 if mine == yours else 0)


def test_lora_named_like_a_salt_or_a_tenant_shares_nothing_with_it() -> None:
    kv = make_kv(41)
    filled(kv, lora=LoraAdapter("x"))
    assert hits(kv, salt="x") == hits(kv, tenant="x", is_isolated=True) == hits(kv) == 0
    assert hits(kv, lora=LoraAdapter("x")) == 4


def test_requests_of_tenants_that_are_not_isolated_share() -> None:
    kv = make_kv(41)
    filled(kv, tenant="a")
    assert hits(kv, tenant="b") == hits(kv) == 4


def test_request_keys_are_keys_of_the_first_block_only() -> None:
    kv = make_kv(41)
    request = make_request("a", PLACEHOLDER, salt="s", tenant="t", is_isolated=True, lora=LoraAdapter("l", "r"))
    assert request.keys_of_block(0, 4) == request_keys("s", "t", LoraAdapter("l", "r"))
    assert request.keys_of_block(1, 4) == b""
    assert kv.allocate_sequence(request)
    request.num_computed_tokens = 17
    kv.cache_blocks(request, 0)
    assert [bool(content.extra_keys) for content in request.contents] == [True, False, False, False]


def test_request_keys_none_is_no_bytes() -> None:
    assert request_keys("", None, None) == b""


SPANS: list[tuple[PromptSpan, ...]] = [
    (),
    (image(CAT, 2),),
    (image(CAT, 3),),
    (image(DOG, 2),),
    (image(CAT, 2, 5),),
    (image(CAT, 2), image(CAT, 8)),
    (PromptSpan(EMBEDDING, CAT, 2, 6),),
]


@pytest.mark.parametrize(("mine", "yours"), list(itertools.product(SPANS, repeat=2)))
def test_spans_only_the_same_item_at_the_same_place_hits(
    mine: tuple[PromptSpan, ...], yours: tuple[PromptSpan, ...]
) -> None:
    kv = make_kv(41)
    filled(kv, spans=mine)
    # The first two blocks of one cat and of a cat before another are the same.
    share = {(SPANS[1], SPANS[5]), (SPANS[5], SPANS[1])}
    expected = 4 if mine == yours else 2 if (mine, yours) in share else 0
    assert hits(kv, spans=yours) == expected


def test_spans_text_before_an_image_is_shared_whatever_the_image() -> None:
    kv = make_kv(41)
    filled(kv, spans=[image(CAT, 9, 3)])
    assert hits(kv) == 2
    assert hits(kv, spans=[image(DOG, 9, 3)]) == 2
    assert hits(kv, spans=[image(DOG, 7, 3)]) == 1
    assert hits(kv, spans=[image(CAT, 9, 3)]) == 4


def test_span_keys_lie_on_the_blocks_the_item_covers_with_its_place_in_each() -> None:
    spans = SpanKeys([image(CAT, 2), PromptSpan(EMBEDDING, DOG, 9, 2), image(DOG, 11, 1)])
    length = (6).to_bytes(4, "little")

    def place(value: int) -> bytes:
        return value.to_bytes(4, "little", signed=True)

    assert spans.keys_of(0, 4) == encode_extra_keys([(IMAGE, place(2) + length + CAT)])
    assert spans.keys_of(4, 8) == encode_extra_keys([(IMAGE, place(-2) + length + CAT)])
    assert spans.keys_of(8, 12) == encode_extra_keys(
        [(EMBEDDING, place(1) + place(2) + DOG), (IMAGE, place(3) + place(1) + DOG)]
    )
    assert spans.keys_of(12, 16) == b""
    assert spans.keys_of(0, 2) == spans.keys_of(8, 9) == b"", "a span begins where the block ends"


@pytest.mark.parametrize("seed", range(20))
def test_span_keys_of_a_run_of_blocks_are_those_of_each(seed: int) -> None:
    """Against the plain way: every block is held against every span."""
    draw = random.Random(seed)
    spans, position = [], 0
    for _ in range(draw.randint(1, 12)):
        position += draw.choice((0, 0, 1, 3, 9))
        length = draw.randint(1, 11)
        spans.append(PromptSpan(draw.choice((IMAGE, EMBEDDING)), bytes([draw.randint(0, 2)]) * 16, position, length))
        position += length
    block_size = draw.choice((1, 3, 4, 16))

    def plain(start: int) -> bytes:
        return encode_extra_keys(
            [
                (
                    span.domain,
                    (span.offset - start).to_bytes(4, "little", signed=True)
                    + span.length.to_bytes(4, "little")
                    + span.digest,
                )
                for span in spans
                if span.offset < start + block_size and span.stop > start
            ]
        )

    keys, num_blocks = SpanKeys(spans), position // block_size + 2
    first = draw.randrange(num_blocks)
    expected = [plain(index * block_size) for index in range(first, num_blocks)]
    assert keys.keys_of_blocks(first * block_size, num_blocks * block_size, block_size) == expected, seed
    assert [
        keys.keys_of(index * block_size, (index + 1) * block_size) for index in range(first, num_blocks)
    ] == expected, seed


@pytest.mark.patches_core
def test_span_keys_only_blocks_with_a_span_cost_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image in a long prompt: to hash, find and commit its other blocks nothing is encoded."""
    encoded: list[KeyDomain] = []

    def counting(domain: KeyDomain, value: bytes) -> bytes:
        encoded.append(domain)
        return encode_extra_key(domain, value)

    monkeypatch.setattr(extra_keys, "encode_extra_key", counting)
    kv, prompt, spans = make_kv(1_001), [5] * 4_000, [image(CAT, 402, 6), image(DOG, 801, 2)]
    filled(kv, prompt, spans=spans)
    assert hits(kv, prompt, spans=spans) == 999
    num_uses, num_blocks_with_one = 4, 3  # hashed, looked up, committed; hashed and looked up again
    assert len(encoded) <= (num_uses + 1) * num_blocks_with_one


def test_first_difference_is_where_the_first_span_begins_that_only_one_has() -> None:
    cat, dog = image(CAT, 2), image(DOG, 9, 2)
    both = SpanKeys([cat, dog])
    assert first_difference(both, both, 20) == -1
    assert first_difference(both, SpanKeys([replace(cat), dog]), 20) == -1
    assert first_difference(None, None, 20) == -1
    for one, other, num_tokens, where in (
        (both, None, 20, 2),
        (both, None, 3, 2),
        (both, None, 2, -1),
        (both, SpanKeys([cat]), 20, 9),
        (both, SpanKeys([cat]), 9, -1),
        (both, SpanKeys([image(DOG, 2), dog]), 20, 2),
        (both, SpanKeys([image(CAT, 1), dog]), 20, 1),
    ):
        assert first_difference(one, other, num_tokens) == first_difference(other, one, num_tokens) == where


def test_span_keys_prompt_moved_by_whole_blocks_has_the_same_keys() -> None:
    near, far = SpanKeys([image(CAT, 2)]), SpanKeys([image(CAT, 1002)])
    assert near.keys_of(0, 4) == far.keys_of(1000, 1004)


def test_span_keys_go_on_and_are_cut_without_a_change_to_those_of_others() -> None:
    first = [image(CAT, 2), image(DOG, 9, 2)]
    spans = SpanKeys(first)
    longer = spans.and_then([image(CAT, 11, 3)])
    assert (len(spans), len(longer)) == (2, 3)
    assert longer.keys_of(8, 12) != spans.keys_of(8, 12) == SpanKeys(first).keys_of(8, 12)
    assert [spans.before(position) for position in (0, 1, 2)] == [None, None, None]
    cut = spans.before(9)
    assert cut is not None
    assert [cut.keys_of(start, start + 4) for start in (0, 4, 8)] == [
        spans.keys_of(0, 4),
        spans.keys_of(4, 8),
        b"",
    ]
    assert spans.before(11) is spans.before(99) is spans, "branches of one prompt have the same object"


def test_span_across_a_position_begins_before_it_and_ends_behind_it() -> None:
    spans = SpanKeys([image(CAT, 2, 3), image(DOG, 5, 1), image(CAT, 8, 2)])
    across = {position: span.offset for position in range(12) if (span := spans.across(position)) is not None}
    assert across == {3: 2, 4: 2, 9: 8}


def test_spans_survive_tags_and_adoption() -> None:
    kv, spans = make_kv(41), [image(CAT, 2), image(DOG, 9)]
    request = make_request("a", PLACEHOLDER, spans=spans, lora=LoraAdapter("l", "1"))
    assert kv.allocate_sequence(request)
    request.num_computed_tokens = 17
    kv.cache_blocks(request, 0)
    tags = [(block.block_id, encode_tag(block.content)) for block in request.blocks[:4] if block.content is not None]
    assert len(tags) == 4
    restarted = make_kv(41)
    assert restarted.adopt([tag for block_id, data in tags if (tag := decode_tag(block_id, data))]) == 4
    again = make_request("b", PLACEHOLDER, spans=spans, lora=LoraAdapter("l", "1"))
    assert block_ids(restarted.get_computed_blocks(again)) == block_ids(request.blocks[:4])
    assert hits(restarted, spans=spans, lora=LoraAdapter("l", "2")) == 0
    assert hits(restarted, spans=[image(CAT, 2), image(DOG, 10)], lora=LoraAdapter("l", "1")) == 2


def test_spans_generated_tokens_after_an_image_are_cached_and_hit() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_new("a", [1, 2, 3, 4, 5, 6], max_tokens=7, spans=[image(CAT, 3, 3)]))
    while scheduler.has_work:
        run_step(scheduler)
    longer = [1, 2, 3, 4, 5, 6, *[7] * 6, 9]
    assert hits(scheduler.kv, longer, spans=[image(CAT, 3, 3)]) == 3
    assert hits(scheduler.kv, longer, spans=[image(DOG, 3, 3)]) == 0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"lora": LoraAdapter("")}, "lora.lora_id"),
        ({"lora": LoraAdapter("x" * 257)}, "lora.lora_id"),
        ({"lora": LoraAdapter("x", "y" * 257)}, "lora.revision"),
        ({"spans": [PromptSpan(KeyDomain.CACHE_SALT, CAT, 0, 1)]}, "spans[0].domain"),
        ({"spans": [image(b"short", 0, 1)]}, "spans[0].digest"),
        ({"spans": [image(bytes(65), 0, 1)]}, "spans[0].digest"),
        ({"spans": [image(CAT, -1)]}, "spans[0].offset"),
        ({"spans": [image(CAT, 0, 0)]}, "spans[0].length"),
        ({"spans": [image(CAT, 3, 6)]}, "spans[0].length"),
        ({"spans": [image(CAT, 0, 3), image(DOG, 2, 1)]}, "spans[1].offset"),
        ({"spans": [image(CAT, 4, 1), image(DOG, 0, 1)]}, "spans[1].offset"),
        ({"spans": [image(CAT, 0, 3), image(DOG, 3, 2**31)]}, "spans[1].length"),
    ],
)
def test_scheduler_bad_key_is_refused_by_name(values: dict[str, Any], field: str) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add_request(make_new("a", 8, **values))
    assert caught.value.metadata["field"] == field
    assert not scheduler.has_work
    scheduler.add_request(
        make_new(
            "a",
            8,
            spans=[
                image(CAT, 2),
            ],
        )
    )
