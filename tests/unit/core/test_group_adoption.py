"""A restarted manager's cache of several groups: what it finds again, in blocks of one size and of several."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block_tag import decode_tag, encode_tag
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow
from kvmanager_service.core.request import Request
from tests.unit.core.builders import free_ids, make_coordinator, make_request, table_ids

FULL_AND_SLIDING = [FullAttention(4), SlidingWindow(4, 8)]


def fill(kv: KVCacheCoordinator, request: Request) -> list[list[int]]:
    """Compute a request and let go of it; returns the tables it had."""
    assert kv.allocate_sequence(request)
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request, 0)
    tables = table_ids(request)
    kv.free(request)
    return tables


def tags_of(kv: KVCacheCoordinator) -> list[TaggedBlock]:
    """What an executor would have of all cached blocks, through the tag's own bytes."""
    tags = []
    for block in kv.pool.blocks:
        if block.content is not None:
            tag = decode_tag(block.block_id, encode_tag(block.content))
            assert tag is not None
            tags.append(tag)
    return tags


def hits_of(kv: KVCacheCoordinator, texts: Sequence[Sequence[int]]) -> list[int]:
    """By text, how much of it is found when it goes on."""
    return [kv.longest_hit(make_request(f"q{index}", [*text, -1])) for index, text in enumerate(texts)]


def lose(kv: KVCacheCoordinator, block_ids: Collection[int]) -> None:
    """These were overwritten since."""
    kv.pool.distrust([kv.pool.blocks[block_id] for block_id in block_ids])


def restarted(kv: KVCacheCoordinator) -> KVCacheCoordinator:
    """A new manager that was given all tags, in no order, and adopted all it could."""
    again = make_coordinator(kv.groups, len(kv.pool.blocks))
    tags = tags_of(kv)
    random.Random(len(tags)).shuffle(tags)
    assert again.adopt(tags) == again.pool.num_cached_blocks
    again.check_integrity([])
    assert again.pool.num_free_blocks == again.pool.num_usable_blocks
    return again


@pytest.mark.parametrize(
    "groups",
    [
        FULL_AND_SLIDING,
        [FullAttention(2), SlidingWindow(4, 8), RecurrentState(6)],
        [ChunkedLocal(3, 6), SlidingWindow(4, 8)],
        [FullAttention(8), SlidingWindow(4, 4)],
        [FullAttention(8), RecurrentState(4), RecurrentState(12)],
    ],
)
def test_adopt_gives_a_new_manager_the_same_hits(groups: list[KVGroup]) -> None:
    kv = make_coordinator(groups, 101)
    texts = [*range(24)], [*range(13), *range(50, 61)]
    for name, text in zip("ab", texts, strict=True):
        fill(kv, make_request(name, text, salt="s"))
    wanted = [make_request(name, [*text, 1], salt="s") for name, text in zip("cd", texts, strict=True)]
    hits = [kv.longest_hit(request) for request in wanted]
    assert hits[0] == 24
    tags = tags_of(kv)
    again = make_coordinator(groups, 101)
    assert again.adopt(tags) == len(tags) > 0
    again.check_integrity([])
    for request in wanted:
        request.block_hashes, request.contents = [], []
    assert [again.longest_hit(request) for request in wanted] == hits
    assert tags_of(again) == tags, "and it would note the same"


def test_adopt_what_is_not_proved_from_the_first_token_on_stays_empty() -> None:
    kv = make_coordinator([SlidingWindow(4, 8)])
    fill(kv, make_request("a", range(20)))
    tags = sorted(tags_of(kv), key=lambda tag: tag.serial)
    again = make_coordinator([SlidingWindow(4, 8)])
    assert again.adopt(tags[1:]) == 0
    assert again.pool.num_cached_blocks == 0


def test_adopt_full_attention_proves_what_a_window_has_kept() -> None:
    """The first blocks of the window's chain are gone; those of full attention name the same prefixes."""
    kv = make_coordinator(FULL_AND_SLIDING)
    fill(kv, make_request("a", range(20)))
    tags = [tag for tag in tags_of(kv) if tag.block_id not in (6, 7, 8)]
    again = make_coordinator(FULL_AND_SLIDING)
    assert again.adopt(tags) == len(tags) == 7
    assert again.longest_hit(make_request("b", range(24))) == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_id", 0),
        ("block_id", 999),
        ("block_hash", bytes(16)),
        ("serial", 0),
        ("token_bytes", bytes(12)),
        ("token_bytes", bytes(16)),
        ("extra_keys", b""),
    ],
)
def test_adopt_tag_that_does_not_hold_stays_empty(field: str, value: Any) -> None:
    kv = make_coordinator(FULL_AND_SLIDING)
    fill(kv, make_request("a", range(4)))
    good, _ = tags_of(kv)
    again = make_coordinator(FULL_AND_SLIDING)
    assert again.adopt([dataclasses.replace(good, **{field: value})]) == 0
    again.check_integrity([])
    assert again.adopt([good]) == 1


TEXT = range(32)


@pytest.mark.parametrize(
    ("groups", "kept"),
    [
        ([FullAttention(8), SlidingWindow(4, 4)], {1: {1, 3, 5, 7}}),
        ([FullAttention(8), SlidingWindow(4, 8)], {1: {6, 7}}),
        ([FullAttention(16), SlidingWindow(4, 4), SlidingWindow(8, 8)], {1: {3, 7}, 2: {3}}),
        ([FullAttention(4), SlidingWindow(8, 8)], {1: {3}}),
        ([FullAttention(4), SlidingWindow(16, 16)], {1: {1}}),
        ([FullAttention(8), RecurrentState(4)], {1: {7}}),
        ([FullAttention(4), RecurrentState(16)], {1: {1}}),
        ([FullAttention(8), ChunkedLocal(4, 16)], {1: {4, 5, 6, 7}}),
        ([FullAttention(2), SlidingWindow(4, 8), RecurrentState(16)], {1: {6, 7}, 2: {1}}),
        ([SlidingWindow(4, 4), FullAttention(8)], {0: {7}}),
    ],
    ids=lambda value: (
        " ".join(f"{type(group).__name__}{group.block_size}" for group in value) if isinstance(value, list) else ""
    ),
)
def test_adopt_unequal_blocks_finds_what_the_manager_before_did(
    groups: list[KVGroup], kept: dict[int, set[int]]
) -> None:
    """Of windows and states only what some hits need is left, which starts within a block of full attention."""
    kv = make_coordinator(groups, 101)
    tables = fill(kv, make_request("a", TEXT))
    for group, left in kept.items():
        lose(kv, [block_id for index, block_id in enumerate(tables[group]) if block_id and index not in left])
    assert hits_of(kv, [TEXT]) == [32]
    again = restarted(kv)
    assert sorted(map(str, tags_of(again))) == sorted(map(str, tags_of(kv))), "all is adopted, and called as before"
    assert hits_of(again, [TEXT]) == [32]
    assert hits_of(restarted(again), [TEXT]) == [32]


def test_adopt_blocks_within_a_larger_one_are_found_though_one_between_them_is_gone() -> None:
    """[0, 4) and [8, 12) are left of a window, and 12 tokens of full attention; 8 is called by the second alone."""
    kv = make_coordinator([FullAttention(12), SlidingWindow(4, 4)])
    _, window = fill(kv, make_request("a", range(12)))
    lose(kv, window[1:2])
    again = restarted(kv)
    assert again.pool.num_cached_blocks == 3
    assert sorted(map(str, tags_of(again))) == sorted(map(str, tags_of(kv)))
    assert hits_of(again, [range(12)]) == [12]


@pytest.mark.parametrize("seed", range(150))
def test_adopt_with_full_attention_finds_all_that_would_be_found_now(seed: int) -> None:
    """Groups of any sizes, texts that share prefixes, any blocks gone: twice restarted, every hit is as long."""
    rng = random.Random(seed)
    sizes = (1, 2, 3, 4, 6, 8, 12)
    others: list[KVGroup] = []
    for size in rng.choices(sizes, k=rng.randint(1, 3)):
        reach = rng.randint(1, 20)
        others.append(rng.choice((SlidingWindow(size, reach), ChunkedLocal(size, reach), RecurrentState(size))))
    groups = [FullAttention(rng.choice(sizes)), *others]
    rng.shuffle(groups)
    kv = make_coordinator(groups, 2001)
    texts: list[list[int]] = []
    for index in range(5):
        parent = rng.choice(texts) if texts else []
        own = rng.choices(range(3), k=rng.randint(1, 30))
        texts.append(parent[: rng.randint(0, len(parent))] + own)
        fill(kv, make_request(f"r{index}", texts[-1]))
    cached = [block.block_id for block in kv.pool.blocks if block.content is not None]
    lose(kv, [block_id for block_id in cached if rng.random() < rng.choice((0.0, 0.1, 0.3))])
    hits = hits_of(kv, texts)
    again = restarted(kv)
    assert hits_of(again, texts) == hits
    for index, text in enumerate(texts):  # what is computed after that is found with what was adopted
        fill(again, make_request(f"new{index}", [*text, *range(12)]))
    texts += [[*text, *range(12)] for text in texts]
    hits = hits_of(again, texts)
    assert hits_of(restarted(again), texts) == hits


def test_adopt_deepest_of_all_groups_is_evicted_first() -> None:
    kv = make_coordinator([FullAttention(8), SlidingWindow(4, 8)], 8)
    full, window = fill(kv, make_request("a", range(16)))
    again = restarted(kv)
    ends = {block_id: (index + 1) * 8 for index, block_id in enumerate(full)}
    ends |= {block_id: (index + 1) * 4 for index, block_id in enumerate(window)}
    order = [ends[block_id] for block_id in free_ids(again) if block_id in ends]
    assert order == [16, 16, 12, 8, 8, 4]


@pytest.fixture
def ending_within() -> tuple[list[TaggedBlock], TaggedBlock]:
    """Tags of two blocks of 8 tokens of full attention, and of one of 4 tokens that ends with the second of them."""
    kv = make_coordinator([FullAttention(8), SlidingWindow(4, 4)])
    full, window = fill(kv, make_request("a", range(16)))
    by_id = {tag.block_id: tag for tag in tags_of(kv)}
    return [by_id[block_id] for block_id in full], by_id[window[-1]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_id", 0),
        ("block_hash", bytes(16)),
        ("parent_serial", 0),
        ("parent_serial", 2),
        ("token_bytes", bytes(16)),
        ("extra_keys", b""),
    ],
    ids=["null block", "hash", "starts at nothing", "starts at another prefix", "tokens", "no group"],
)
def test_adopt_tag_that_ends_at_a_proved_prefix_and_does_not_hold_stays_empty(
    ending_within: tuple[list[TaggedBlock], TaggedBlock], field: str, value: Any
) -> None:
    full, window = ending_within
    assert full[0].serial == 2, "what the second is called where it starts"
    again = make_coordinator([FullAttention(8), SlidingWindow(4, 4)])
    assert again.adopt([*full, dataclasses.replace(window, **{field: value})]) == 2
    again.check_integrity([])
    again = make_coordinator([FullAttention(8), SlidingWindow(4, 4)])
    assert again.adopt([*full, window]) == 3


def test_adopt_block_longer_than_all_before_its_end_stays_empty() -> None:
    """It ends at 4 tokens, it says, and holds 8 of them."""
    groups = [FullAttention(4), SlidingWindow(8, 8)]
    kv = make_coordinator(groups)
    full, window = fill(kv, make_request("a", range(8)))
    by_id = {tag.block_id: tag for tag in tags_of(kv)}
    first, long = by_id[full[0]], by_id[window[0]]
    again = make_coordinator(groups)
    assert again.adopt([first, dataclasses.replace(long, serial=first.serial, parent_serial=99)]) == 1


def test_adopt_prefix_with_two_names_is_followed_by_both() -> None:
    """It was forgotten between them; whatever was noted under either is found."""
    kv = make_coordinator(FULL_AND_SLIDING)
    fill(kv, make_request("a", range(12)))
    tags = tags_of(kv)
    first = min(tag.serial for tag in tags)
    free = max(tag.block_id for tag in tags) + 1
    (twin,) = [tag for tag in tags if tag.serial == first and tag.block_id < 4]
    renamed = [dataclasses.replace(tag, parent_serial=90) if tag.parent_serial == first else tag for tag in tags]
    renamed.append(dataclasses.replace(twin, block_id=free, serial=90))
    again = make_coordinator(FULL_AND_SLIDING)
    assert again.adopt(renamed) == len(tags) + 1
    assert hits_of(again, [range(12)]) == [12]
