import dataclasses
from collections.abc import Iterable

import pytest

from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block_hash import default_hash, hash_block_tokens
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import Request
from tests.unit.core.builders import block_ids, free_ids, make_kv, make_request, read_int32, state_of, token_bytes

ONE_HASH = bytes(16)


def compute(kv: KVCacheManager, request: Request, num_tokens: int | None = None) -> list[int]:
    """Admit a request and compute its first tokens; returns the ids of the blocks it found cached."""
    hits = kv.get_computed_blocks(request)
    assert kv.allocate_slots(request, request.num_tokens, hits)
    request.num_computed_tokens = num_tokens or request.num_tokens
    kv.cache_blocks(request, 0)
    return block_ids(hits)


def tag_of(kv: KVCacheManager, block_id: int) -> TaggedBlock:
    """What an executor would say it holds in a cached block."""
    content = kv.pool.blocks[block_id].content
    assert content is not None
    parent_serial = 0 if content.parent is None else content.parent.serial
    return TaggedBlock(
        block_id, content.block_hash, content.serial, parent_serial, content.token_bytes, content.extra_keys
    )


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_num_blocks_for_tokens_rounds_up(num_tokens: int, blocks: int) -> None:
    assert make_kv(block_size=4).num_blocks_for(num_tokens) == blocks


def test_kv_block_size_zero_raises() -> None:
    with pytest.raises(ValueError, match="block_size of at least 1"):
        make_kv(block_size=0)


def test_allocate_slots_grows_the_table_only_at_a_block_boundary() -> None:
    kv = make_kv(block_size=4)
    request = make_request(prompt=6)
    lengths = []
    for num_tokens in range(1, 10):
        assert kv.allocate_slots(request, num_tokens)
        lengths.append(len(request.blocks))
    assert lengths == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert read_int32(request.block_id_bytes) == block_ids(request.blocks) == [1, 2, 3]


def test_allocate_slots_too_few_blocks_changes_nothing() -> None:
    kv = make_kv(num_blocks=6, block_size=4)
    shared = make_request("shared", range(8))
    compute(kv, shared)
    kv.free(shared)
    big = make_request("big", [*range(8), *range(100, 120)])
    hits = kv.get_computed_blocks(big)
    assert len(hits) == 2
    before = state_of((kv, big))
    assert not kv.allocate_slots(big, big.num_tokens, hits)  # 7 blocks of 5
    assert state_of((kv, big)) == before
    kv.check_integrity([])


def test_allocate_slots_free_hits_do_not_count_as_room_for_others() -> None:
    """A hit in the free queue is not free any more once it is taken: 2 hits and 3 more do not fit 4 free blocks."""
    kv = make_kv(num_blocks=5, block_size=4)
    first = make_request("first", range(8))
    compute(kv, first)
    kv.free(first)
    longer = make_request("longer", [*range(8), *range(100, 109)])
    hits = kv.get_computed_blocks(longer)
    assert kv.pool.num_free_blocks == 4
    assert not kv.allocate_slots(longer, longer.num_tokens, hits)
    assert kv.allocate_slots(longer, longer.num_tokens - 1, hits)


def test_get_computed_blocks_new_prompt_has_no_hit() -> None:
    kv = make_kv()
    compute(kv, make_request("a", 8))
    assert kv.get_computed_blocks(make_request("b", 8)) == []


def test_get_computed_blocks_shared_prefix_hits_its_full_blocks() -> None:
    kv = make_kv(block_size=4)
    first = make_request("a", range(10))
    compute(kv, first)
    assert compute(kv, make_request("b", [*range(9), 77, 78])) == block_ids(first.blocks[:2])


@pytest.mark.parametrize("length", [4, 8, 12])
def test_get_computed_blocks_aligned_cached_prompt_leaves_one_block_to_compute(length: int) -> None:
    kv = make_kv(block_size=4)
    compute(kv, make_request("a", range(length)))
    again = make_request("b", range(length))
    hits = compute(kv, again)
    assert len(hits) == length // 4 - 1
    assert len(again.blocks) == length // 4
    assert again.blocks[-1].block_id not in hits


def test_get_computed_blocks_first_miss_ends_the_hits() -> None:
    kv = make_kv(block_size=4, num_blocks=20)
    compute(kv, make_request("a", range(12)))
    other_middle = [*range(4), 99, 98, 97, 96, *range(8, 12), 5]
    assert len(kv.get_computed_blocks(make_request("b", other_middle))) == 1


def test_get_computed_blocks_prefixes_that_differ_in_the_first_block_share_nothing() -> None:
    kv = make_kv(block_size=4)
    compute(kv, make_request("a", [1, 2, 3, 4, 50, 51, 52, 53, 9]))
    assert kv.get_computed_blocks(make_request("b", [5, 2, 3, 4, 50, 51, 52, 53, 9])) == []


def test_get_computed_blocks_hash_without_the_parent_is_caught_by_the_parents_identity() -> None:
    """The seed's self-check 2: a hash that is not chained finds the wrong block. Here it costs a miss."""

    def unchained(data: bytes) -> bytes:
        return default_hash(data[16:])

    kv = make_kv(block_size=4, hash_function=unchained)
    first = make_request("a", [1, 2, 3, 4, 50, 51, 52, 53, 9])
    compute(kv, first)
    other = make_request("b", [5, 6, 7, 8, 50, 51, 52, 53, 9])
    assert compute(kv, other) == []
    assert first.block_hashes[1] == other.block_hashes[1], "the hash does find the other's block"
    third = make_request("c", [5, 6, 7, 8, 50, 51, 52, 53, 9])
    assert block_ids(kv.get_computed_blocks(third)) == [other.blocks[0].block_id]


@pytest.mark.patches_core
def test_get_computed_blocks_hash_without_the_parent_and_no_proof_shares_the_wrong_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutation: without chain and without the comparison of parents the seed's wrong hit happens."""
    monkeypatch.setattr(
        "kvmanager_service.core.block.BlockContent.is_same",
        lambda content, parent, tokens, keys: content.token_bytes == tokens,
    )
    kv = make_kv(block_size=4, hash_function=lambda data: default_hash(data[16:]))
    first = make_request("a", [1, 2, 3, 4, 50, 51, 52, 53, 9])
    compute(kv, first)
    compute(kv, make_request("b", [5, 6, 7, 8, 61, 62, 63, 64, 9]))
    wrong = make_request("c", [5, 6, 7, 8, 50, 51, 52, 53, 9])
    assert first.blocks[1].block_id in block_ids(kv.get_computed_blocks(wrong))


def test_get_computed_blocks_other_salt_is_a_miss() -> None:
    kv = make_kv(block_size=4)
    mine = make_request("a", range(9), salt="mine")
    compute(kv, mine)
    assert kv.get_computed_blocks(make_request("b", range(9), salt="yours")) == []
    assert kv.get_computed_blocks(make_request("c", range(9))) == []
    assert block_ids(kv.get_computed_blocks(make_request("d", range(9), salt="mine"))) == block_ids(mine.blocks[:2])


def test_cache_blocks_salt_is_a_key_of_the_first_block_only() -> None:
    kv = make_kv(block_size=4)
    request = make_request("a", range(8), salt="mine")
    compute(kv, request)
    assert [content.extra_keys for content in request.contents] == [request.extra_keys, b""]
    assert request.extra_keys


def test_cache_blocks_caches_full_computed_blocks_only() -> None:
    kv = make_kv(block_size=4)
    request = make_request("a", 11)
    compute(kv, request, num_tokens=7)
    assert [block.block_hash is not None for block in request.blocks] == [True, False, False]
    request.num_computed_tokens = 11
    kv.cache_blocks(request, 0)
    assert [block.block_hash is not None for block in request.blocks] == [True, True, False]


def test_cache_blocks_token_not_known_yet_keeps_the_block_out() -> None:
    kv = make_kv(block_size=4)
    request = make_request("a", 7)
    compute(kv, request)
    assert kv.allocate_slots(request, 8)
    request.num_pending_tokens = 1
    request.num_computed_tokens = 8
    kv.cache_blocks(request, 0)
    assert len(request.contents) == 1
    request.append_token(bytes((5, 0, 0, 0)))
    kv.cache_blocks(request, 0)
    assert len(request.contents) == 2


def test_cache_blocks_collision_keeps_the_block_and_its_successors_out() -> None:
    kv = make_kv(block_size=4, hash_function=lambda data: ONE_HASH)
    first, second = make_request("a", 8), make_request("b", 12)
    compute(kv, first)
    compute(kv, second)
    assert len(first.contents) == 1, "its second block has the hash of its first"
    assert not first.is_cacheable
    assert second.contents == []
    kv.free(second)
    assert second.is_cacheable
    kv.check_integrity([first])


def test_cache_blocks_contents_and_requests_keep_one_copy_of_the_tokens() -> None:
    kv = make_kv(block_size=4)
    first, second = make_request("a", 9), make_request("a", 9)
    compute(kv, first)
    compute(kv, second)
    assert len(first.contents) == len(second.contents) == 2
    for index, content in enumerate(first.contents):
        assert content.token_bytes == first.tokens(index * 4, index * 4 + 4)
        assert first.block_tokens[index] is second.block_tokens[index] is content.token_bytes
    kv.check_integrity([first, second])


def test_drop_hashes_tokens_are_cut_anew_for_other_blocks() -> None:
    request = make_request("a", 12)
    compute(make_kv(block_size=4), request)
    request.drop_hashes()
    request.blocks, request.contents, request.block_id_bytes = [], [], bytearray()
    request.num_computed_tokens = 0
    kv = make_kv(block_size=3)
    compute(kv, request)
    assert [content.token_bytes for content in request.contents] == [request.tokens(at, at + 3) for at in (0, 3, 6, 9)]
    kv.check_integrity([request])


def test_kv_caching_disabled_finds_and_keeps_nothing() -> None:
    kv = make_kv(enable_caching=False)
    request = make_request("a", 8)
    compute(kv, request)
    assert kv.get_computed_blocks(make_request("a", 8)) == []
    assert kv.pool.num_cached_blocks == 0
    assert kv.adopt([]) == 0


def test_free_table_goes_back_deepest_first() -> None:
    kv = make_kv(num_blocks=8, block_size=4)
    request = make_request("a", 14)
    compute(kv, request)
    kv.free(request)
    # The partial block 4 to the head; the hashed ones to the tail, the deepest first.
    assert free_ids(kv) == [4, 5, 6, 7, 3, 2, 1]
    assert request.blocks == []
    assert request.block_id_bytes == b""
    assert request.num_computed_tokens == 0


def test_free_two_requests_evicts_the_one_freed_first() -> None:
    kv = make_kv(num_blocks=5, block_size=4)
    old, new = make_request("old", range(8)), make_request("new", range(100, 108))
    compute(kv, old)
    compute(kv, new)
    kv.free(old)
    kv.free(new)
    kv.allocate_slots(make_request("next", 8), 8)
    assert kv.get_computed_blocks(make_request("x", [*range(8), 1])) == []
    assert len(kv.get_computed_blocks(make_request("y", [*range(100, 108), 1]))) == 2


def test_distrust_with_table_unhashes_what_the_row_read_and_wrote() -> None:
    kv = make_kv(block_size=4)
    root = make_request("root", range(4), arrival_seq=1)
    compute(kv, root)
    failed = make_request("failed", range(10), arrival_seq=2)
    hits = kv.get_computed_blocks(failed)
    kv.allocate_slots(failed, 10, hits)
    failed.num_computed_tokens = 10
    kv.cache_blocks(failed, 5)
    assert kv.distrust(failed, 5, with_table=True) == set(failed.blocks[:2])
    assert kv.get_computed_blocks(make_request("x", range(10))) == []


def test_distrust_without_table_unhashes_only_what_outstanding_steps_fill() -> None:
    kv = make_kv(block_size=4)
    request = make_request("a", range(12), arrival_seq=3)
    kv.allocate_slots(request, 12)
    for step, computed in enumerate((4, 8, 12), start=1):
        request.num_computed_tokens = computed
        kv.cache_blocks(request, step)
    kv.pool.commit_step(1)
    third = request.blocks[2]
    kv.free(request)
    assert kv.distrust(request, 3, with_table=False) == {third}
    assert len(kv.get_computed_blocks(make_request("x", range(13)))) == 2


def test_adopt_sound_chain_is_found_again_in_every_order_of_tags() -> None:
    old = make_kv(block_size=4)
    request = make_request("a", range(12), salt="mine")
    compute(old, request)
    for order in ([1, 2, 3], [3, 2, 1], [2, 3, 1]):
        kv = make_kv(block_size=4)
        assert kv.adopt(tag_of(old, block_id) for block_id in order) == 3
        kv.check_integrity([])
        assert block_ids(kv.get_computed_blocks(make_request("b", range(13), salt="mine"))) == [1, 2, 3]
        assert kv.get_computed_blocks(make_request("c", range(13))) == []


def test_adopt_deepest_block_is_evicted_first() -> None:
    old = make_kv(num_blocks=6, block_size=4)
    compute(old, make_request("a", range(12)))
    kv = make_kv(num_blocks=6, block_size=4)
    kv.adopt(tag_of(old, block_id) for block_id in (1, 2, 3))
    assert free_ids(kv) == [4, 5, 3, 2, 1]


def test_adopt_block_without_its_parent_stays_free_and_empty() -> None:
    old = make_kv(block_size=4)
    compute(old, make_request("a", range(12)))
    kv = make_kv(block_size=4)
    assert kv.adopt([tag_of(old, 1), tag_of(old, 3)]) == 1
    assert kv.pool.blocks[3].content is None
    assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks
    kv.check_integrity([])


def test_adopt_duplicate_content_keeps_both_blocks() -> None:
    old = make_kv(block_size=4)
    for name in ("a", "b"):
        compute(old, make_request(name, range(4)))
    kv = make_kv(block_size=4)
    assert kv.adopt([tag_of(old, 1), tag_of(old, 2)]) == 2
    kv.check_integrity([])


def make_tag(
    token_ids: Iterable[int] = range(4),
    *,
    block_id: int = 1,
    serial: int = 1,
    parent: TaggedBlock | None = None,
    extra_keys: bytes = b"",
) -> TaggedBlock:
    """A sound tag."""
    tokens = token_bytes(token_ids)
    block_hash = hash_block_tokens(default_hash, parent.block_hash if parent else None, tokens, extra_keys)
    return TaggedBlock(block_id, block_hash, serial, parent.serial if parent else 0, tokens, extra_keys)


@pytest.mark.parametrize(
    "forged",
    [
        dataclasses.replace(make_tag(), block_hash=b"x" * 16),
        make_tag(block_id=0),
        make_tag(block_id=11),
        make_tag(block_id=-1),
        make_tag(range(8)),
        make_tag(range(2)),
        make_tag(serial=2, parent=make_tag()),
        make_tag(serial=0),
        dataclasses.replace(make_tag(), parent_serial=1),
    ],
    ids=["hash", "null", "beyond", "negative", "longer", "shorter", "unknown parent", "no serial", "own parent"],
)
def test_adopt_forged_tag_is_left_alone(forged: TaggedBlock) -> None:
    kv = make_kv(block_size=4)
    assert kv.adopt([forged]) == 0
    assert kv.pool.num_cached_blocks == 0
    kv.check_integrity([])


def test_adopt_one_block_tagged_twice_is_adopted_once() -> None:
    kv = make_kv(block_size=4)
    assert kv.adopt([make_tag(range(4)), make_tag(range(4, 8), serial=2)]) == 1
    kv.check_integrity([])


def test_adopt_serial_of_two_contents_leads_children_to_their_own_parent_or_nowhere() -> None:
    first, second = make_tag(range(4)), make_tag(range(50, 54), block_id=2)
    child = make_tag(range(4, 8), block_id=3, serial=2, parent=second)
    kv = make_kv(block_size=4)
    assert kv.adopt([first, second, child]) == 2, "the serial is taken to be the first's, and the child's hash is not"
    kv.check_integrity([])


def test_adopt_new_contents_get_serials_that_no_tag_has_spoken_of() -> None:
    kv = make_kv(block_size=4)
    kv.adopt([make_tag(serial=7), make_tag(serial=3, parent=make_tag(range(8, 12), serial=9))])
    request = make_request("a", 8)
    compute(kv, request)
    assert [content.serial for content in request.contents] == [10, 11]


def test_adopt_keys_in_a_later_block_are_never_hit() -> None:
    root = make_tag(range(4))
    kv = make_kv(block_size=4)
    assert kv.adopt([root, make_tag(range(4, 8), block_id=2, serial=2, parent=root, extra_keys=b"keys")]) == 2
    assert block_ids(kv.get_computed_blocks(make_request("a", range(9)))) == [1]


def test_check_integrity_table_that_differs_from_what_is_sent_raises() -> None:
    kv = make_kv(block_size=4)
    request = make_request("a", 8)
    compute(kv, request)
    request.block_id_bytes[0] ^= 3
    with pytest.raises(AssertionError, match="would send another table"):
        kv.check_integrity([request])


def test_check_integrity_more_computed_than_the_table_holds_raises() -> None:
    kv = make_kv(block_size=4)
    request = make_request("a", 8)
    compute(kv, request)
    request.num_computed_tokens = 9
    with pytest.raises(AssertionError, match="too few blocks"):
        kv.check_integrity([request])


def test_adopt_child_of_an_evicted_parent_is_not_given_to_another_with_the_same_hash() -> None:
    """Two first blocks with one hash. The first is gone from the executor, its child is not; the second took over."""
    old = make_kv(block_size=4, hash_function=lambda data: default_hash(data[:16] + data[20:]))
    gone = make_request("gone", [1, 2, 3, 4, 5, 6, 7, 8, 0])
    compute(old, gone)
    child = tag_of(old, gone.blocks[1].block_id)
    old.free(gone)
    old.pool.distrust([old.pool.blocks[1]])
    other = make_request("other", [9, 2, 3, 4, 0])
    compute(old, other)
    assert other.block_hashes[0] == gone.block_hashes[0]
    kv = make_kv(block_size=4, hash_function=old.hash_function)
    kv.adopt([tag_of(old, other.blocks[0].block_id), child])
    assert len(kv.get_computed_blocks(make_request("x", [9, 2, 3, 4, 5, 6, 7, 8, 0]))) == 1
