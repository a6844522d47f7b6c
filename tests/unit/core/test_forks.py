"""Tables that share blocks, and what is copied when one of their holders writes on."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvmanager_service.core.block_hash import KeyDomain, default_hash
from kvmanager_service.core.extra_keys import LoraAdapter, PromptSpan
from kvmanager_service.core.group_key import KEY_BYTES
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow
from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.step import BlockCopy, CopyDirection
from tests.unit.core.builders import (
    block_ids,
    free_ids,
    make_coordinator,
    make_kv,
    make_request,
    read_int32,
    state_of,
    token_bytes,
)

MIXES: dict[str, list[KVGroup]] = {
    "window": [FullAttention(4), SlidingWindow(4, 7)],
    "chunked": [FullAttention(2), ChunkedLocal(4, 8)],
    "states": [FullAttention(4), RecurrentState(8)],
    "all": [FullAttention(4), SlidingWindow(4, 5), RecurrentState(4)],
}


def compute(kv: KVCache, request: Request, num_tokens: int | None = None) -> None:
    """Admit a request and compute its first tokens."""
    assert kv.allocate_sequence(request)
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = num_tokens or request.num_tokens
    kv.cache_blocks(request, 0)


def write(kv: KVCache, request: Request, token: int) -> bool:
    """Let a request's next token be known and computed."""
    if not kv.allocate_slots(request, request.num_computed_tokens + 1):
        return False
    request.append_token(token_bytes([token]))
    request.num_computed_tokens += 1
    kv.cache_blocks(request, 0)
    return True


def family(kv: KVCache, num_tokens: int, num_children: int) -> list[Request]:
    """A request of so many tokens, all computed, and others forked from its end."""
    parent = make_request("parent", range(num_tokens))
    compute(kv, parent)
    children = [make_request(f"child{n}", range(num_tokens), arrival_seq=n + 1) for n in range(num_children)]
    for child in children:
        kv.fork(parent, child, num_tokens)
    kv.check_integrity([parent, *children])
    return [parent, *children]


def device_copy(source: int, target: int) -> BlockCopy:
    return BlockCopy(CopyDirection.DEVICE_TO_DEVICE, source, target)


def test_fork_shares_every_block_and_takes_none() -> None:
    kv = make_kv(block_size=4)
    parent = make_request("parent", range(10))
    compute(kv, parent)
    num_free = kv.pool.num_free_blocks
    child = make_request("child", range(10))
    kv.fork(parent, child, 10)
    assert kv.pool.num_free_blocks == num_free
    assert block_ids(child.blocks) == block_ids(parent.blocks) == read_int32(child.block_id_bytes)
    assert [block.ref_cnt for block in child.blocks] == [2, 2, 2]
    assert child.contents == parent.contents
    assert child.block_hashes == parent.block_hashes
    assert child.num_computed_tokens == 10
    kv.check_integrity([parent, child])
    assert kv.take_copies() == []


def test_fork_of_fewer_tokens_shares_the_blocks_that_hold_them() -> None:
    kv = make_kv(block_size=4)
    parent = make_request("parent", range(12))
    compute(kv, parent)
    child = make_request("child", [*range(6), 77])
    kv.fork(parent, child, 6)
    assert block_ids(child.blocks) == block_ids(parent.blocks)[:2]
    assert child.contents == parent.contents[:1]
    kv.check_integrity([parent, child])


def test_the_first_to_write_gets_a_copy_and_the_last_holder_writes_in_place() -> None:
    kv = make_kv(block_size=4)
    first, second, third = family(kv, 6, 2)
    shared = first.blocks[1].block_id
    for request in (second, first):
        assert write(kv, request, 50)
        own = request.blocks[1].block_id
        assert own != shared
        assert kv.take_copies() == [device_copy(shared, own)]
        assert read_int32(request.block_id_bytes) == block_ids(request.blocks)
    assert write(kv, third, 52)
    assert third.blocks[1].block_id == shared
    assert kv.take_copies() == []
    kv.check_integrity([first, second, third])


def test_a_copy_is_ordered_once() -> None:
    kv = make_kv(block_size=4)
    parent, child = family(kv, 5, 1)
    for token in range(3):
        assert write(kv, parent, 50 + token)
        assert write(kv, child, 60 + token)
    assert len(kv.take_copies()) == 1
    assert parent.contents[0] is child.contents[0]
    assert parent.contents[1] is not child.contents[1]
    kv.check_integrity([parent, child])


def test_fork_at_a_block_boundary_copies_nothing() -> None:
    kv = make_kv(block_size=4)
    requests = family(kv, 8, 2)
    for token, request in enumerate(requests):
        assert write(kv, request, 50 + token)
    assert kv.take_copies() == []
    assert len({request.blocks[2].block_id for request in requests}) == 3
    kv.check_integrity(requests)


def test_copy_on_write_without_a_free_block_changes_nothing() -> None:
    kv = make_kv(num_blocks=3, block_size=4)
    parent, child = family(kv, 6, 1)
    before = state_of((kv, parent, child))
    assert not kv.allocate_slots(child, 7)
    assert state_of((kv, parent, child)) == before
    kv.free(parent)
    assert kv.allocate_slots(child, 7)  # the last holder needs none
    assert kv.take_copies() == []
    kv.check_integrity([child])


def test_copy_on_write_of_several_tokens_counts_the_copy_beside_the_new_blocks() -> None:
    kv = make_kv(num_blocks=5, block_size=4)
    parent, child = family(kv, 6, 1)
    before = state_of((kv, parent, child))
    assert not kv.allocate_slots(child, 13)  # a copy and two more, two are free
    assert state_of((kv, parent, child)) == before
    assert kv.allocate_slots(child, 12)
    assert len(kv.take_copies()) == 1
    kv.check_integrity([parent, child])


def test_num_new_blocks_counts_the_copy_of_a_shared_block() -> None:
    kv = make_kv(block_size=4)
    parent, child = family(kv, 6, 1)
    assert [kv.num_new_blocks(child, num_tokens) for num_tokens in (7, 8, 9)] == [1, 1, 2]
    num_free = kv.pool.num_free_blocks
    assert kv.allocate_slots(child, 9)
    assert kv.pool.num_free_blocks == num_free - 2
    assert [kv.num_new_blocks(request, 8) for request in (parent, child)] == [0, 0]


def test_a_full_block_forked_in_its_middle_is_copied_while_the_parent_holds_it() -> None:
    kv = make_kv(block_size=4)
    parent = make_request("parent", range(12))
    compute(kv, parent)
    child = make_request("child", range(6))
    kv.fork(parent, child, 6)
    content = parent.blocks[1].content
    assert content is not None
    assert write(kv, child, 99)
    assert parent.blocks[1].content is content
    assert kv.take_copies() == [device_copy(parent.blocks[1].block_id, child.blocks[1].block_id)]
    assert write(kv, child, 98)
    assert child.contents[1].token_bytes == token_bytes([4, 5, 99, 98])
    kv.check_integrity([parent, child])


def test_a_full_block_written_in_its_middle_by_its_last_holder_can_not_be_hit_any_more() -> None:
    """The parent is gone, and its block would be found by the next request with its tokens."""
    kv = make_kv(block_size=4)
    parent = make_request("parent", range(12))
    compute(kv, parent)
    child = make_request("child", range(6))
    kv.fork(parent, child, 6)
    kv.free(parent)
    assert len(kv.get_computed_blocks(make_request("again", range(12)))) == 2
    assert write(kv, child, 99)
    assert kv.take_copies() == []
    assert len(kv.get_computed_blocks(make_request("again", range(12)))) == 1
    kv.check_integrity([child])
    kv.free(child)
    kv.check_integrity([])


def test_fork_of_a_fork_shares_with_both() -> None:
    kv = make_kv(block_size=4)
    parent, child = family(kv, 6, 1)
    assert write(kv, child, 50)
    kv.take_copies()
    grandchild = make_request("grandchild", [*range(6), 50])
    kv.fork(child, grandchild, 7)
    assert [block.ref_cnt for block in grandchild.blocks] == [3, 2]
    assert write(kv, grandchild, 60)
    assert len(kv.take_copies()) == 1
    kv.check_integrity([parent, child, grandchild])


def test_freeing_the_family_gives_every_block_back() -> None:
    kv = make_kv(block_size=4)
    requests = family(kv, 7, 3)
    for request in requests[:2]:
        assert write(kv, request, 50)
    for request in requests:
        kv.free(request)
        assert not request.may_share_tail
    assert len(free_ids(kv)) == kv.pool.num_usable_blocks
    kv.check_integrity([])


def test_fork_without_caching_shares_and_copies_too() -> None:
    kv = make_kv(block_size=4, enable_caching=False)
    parent, child = family(kv, 6, 1)
    assert write(kv, child, 50)
    assert len(kv.take_copies()) == 1
    kv.check_integrity([parent, child])


def test_fork_of_a_prefix_kept_out_of_the_cache_stays_out() -> None:
    """After a collision the parent's blocks have no content; the child has nothing to prove its own ones by."""
    kv = make_kv(block_size=4, hash_function=lambda data: bytes(16))
    first = make_request("first", [9, 9, 9, 9, 8])
    compute(kv, first)
    parent, child = make_request("parent", range(6)), make_request("child", range(6), arrival_seq=1)
    compute(kv, parent)
    kv.fork(parent, child, 6)
    assert not parent.is_cacheable
    assert not child.is_cacheable
    for token in (50, 51, 52):
        assert write(kv, child, token)
    kv.check_integrity([first, parent, child])


SPAN = PromptSpan(KeyDomain.MULTIMODAL_ITEM, bytes(16), 1, 2)


@pytest.mark.parametrize(
    ("parent", "child", "num_tokens", "message"),
    [
        (make_request("p", range(8)), make_request("c", range(8)), 0, "1 to 6 computed tokens"),
        (make_request("p", range(8)), make_request("c", range(8)), 7, "1 to 6 computed tokens"),
        (make_request("p", range(8)), make_request("c", [0, 1, 2, 9]), 4, "begin with the 4 tokens"),
        (make_request("p", range(8)), make_request("c", range(3)), 4, "begin with the 4 tokens"),
        (make_request("p", range(8), salt="s"), make_request("c", range(8)), 4, "others from token 0"),
        (make_request("p", range(8)), make_request("c", range(8), lora=LoraAdapter("l")), 4, "others from token 0"),
        (make_request("p", range(8)), make_request("c", range(8), spans=[SPAN]), 4, "others from token 1"),
    ],
    ids=["none", "not-computed", "other-tokens", "too-short", "salt", "lora", "spans"],
)
def test_fork_of_what_is_not_common_raises_and_changes_nothing(
    parent: Request, child: Request, num_tokens: int, message: str
) -> None:
    for kv in (make_kv(block_size=4), KVCacheCoordinator(20, MIXES["window"], longest_chunk=8)):
        compute(kv, parent, 6)
        before = state_of((kv, parent, child))
        with pytest.raises(ValueError, match=message):
            kv.fork(parent, child, num_tokens)
        assert state_of((kv, parent, child)) == before
        kv.free(parent)


def test_fork_before_a_span_in_the_same_block_is_of_what_is_common() -> None:
    """What stands behind later tokens of the block that both have in part is the parent's alone."""
    later = PromptSpan(KeyDomain.MULTIMODAL_ITEM, bytes(16), 6, 2)
    for kv in (make_kv(block_size=4), KVCacheCoordinator(20, MIXES["window"], longest_chunk=8)):
        parent = make_request("p", range(9), spans=[SPAN, later])
        child = make_request("c", range(6), spans=[SPAN], arrival_seq=1)
        compute(kv, parent, 6)
        kv.fork(parent, child, 6)
        for token in (6, 7, 8):
            assert write(kv, child, token)
        kv.check_integrity([parent, child])
        assert kv.num_lacking(make_request("d", range(9), spans=[SPAN]), 9) == 0
        kv.free(parent)
        assert len(kv.hit_blocks(make_request("again", range(9), spans=[SPAN]))) > len(
            kv.hit_blocks(make_request("other", range(9), spans=[SPAN, later]))
        )


def test_fork_to_a_request_with_blocks_raises() -> None:
    kv = make_kv()
    parent, child = family(kv, 6, 1)
    with pytest.raises(ValueError, match="without blocks"):
        kv.fork(parent, child, 6)


# --- several groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES)
def test_fork_in_groups_copies_what_is_partial_in_each(mix: str) -> None:
    kv = KVCacheCoordinator(60, MIXES[mix], longest_chunk=16)
    requests = family(kv, 14, 2)
    for token, request in enumerate(requests[:2]):
        shared = [
            table.blocks[14 // group.block_size] if 14 % group.block_size else None
            for group, table in zip(kv.groups, request.tables, strict=True)
        ]
        assert write(kv, request, 30 + token)
        expected = [
            device_copy(block.block_id, table.blocks[14 // group.block_size].block_id)
            for group, table, block in zip(kv.groups, request.tables, shared, strict=True)
            if block is not None
        ]
        assert expected
        assert kv.take_copies() == expected
        kv.check_integrity(requests)
    assert write(kv, requests[2], 32)
    assert kv.take_copies() == []
    kv.check_integrity(requests)
    for request in requests:
        kv.free(request)
    assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks


def test_fork_in_groups_of_a_block_kept_out_of_the_cache_stays_out() -> None:
    """Prefixes are told apart, contents of groups are not: the parent's block counts as looked at, and has none."""

    def hash_function(data: bytes) -> bytes:
        return bytes(16) if len(data) == 16 + KEY_BYTES else default_hash(data)

    kv = make_coordinator([SlidingWindow(4, 12)], hash_function=hash_function)
    first, parent = make_request("first", [9, 9, 9, 9, 8]), make_request("parent", range(6), arrival_seq=1)
    for request in (first, parent):
        assert kv.allocate_sequence(request)
        request.num_computed_tokens = request.num_tokens
        kv.cache_blocks(request, 0)
    child = make_request("child", range(6), arrival_seq=2)
    kv.fork(parent, child, 4)
    assert (first.is_cacheable, parent.is_cacheable, child.is_cacheable) == (True, False, False)
    kv.check_integrity([first, parent, child])


def test_fork_in_groups_without_free_blocks_changes_nothing() -> None:
    groups = MIXES["states"]
    kv = KVCacheCoordinator(1 + 4 + 2 + 1, groups, longest_chunk=16)  # one block is left, two tails are shared
    parent, child = family(kv, 14, 1)
    before = state_of((kv, parent, child))
    assert not kv.allocate_slots(child, 15)
    assert state_of((kv, parent, child)) == before
    kv.free(parent)
    assert kv.allocate_slots(child, 15)
    assert kv.take_copies() == []
    kv.check_integrity([child])


@pytest.mark.parametrize("is_taken", [False, True])
def test_fork_behind_a_window_that_has_moved_on_has_what_is_cached_or_raises(is_taken: bool) -> None:
    kv = KVCacheCoordinator(60, MIXES["window"], longest_chunk=4)
    parent = make_request("parent", range(12))
    compute(kv, parent)
    left = list(parent.tables[1].blocks)[:2]
    for token in range(12):
        assert write(kv, parent, 50 + token)
    child = make_request("child", range(6))
    taken = kv.pool.get_new_blocks(kv.pool.num_free_blocks) if is_taken else []
    if is_taken:
        before = state_of((kv, parent, child))
        with pytest.raises(ValueError, match=r"group 1 of .* to hold what token 6 reads"):
            kv.fork(parent, child, 6)
        assert state_of((kv, parent, child)) == before
    else:
        kv.fork(parent, child, 6)
        assert child.tables[1].blocks == left
        assert [block.ref_cnt for block in left] == [1, 1]
        assert write(kv, child, 99)
        assert len(kv.take_copies()) == 1, "of full attention: of the window nobody else holds the block"
    kv.check_integrity([parent, child] if not is_taken else [parent], [taken])


def test_fork_of_a_state_between_checkpoints_raises_and_at_one_does_not() -> None:
    kv = KVCacheCoordinator(60, MIXES["states"], longest_chunk=16)
    parent = make_request("parent", range(12))
    compute(kv, parent)
    with pytest.raises(ValueError, match="group 1"):
        kv.fork(parent, make_request("child", range(10)), 10)
    child = make_request("child", range(9))
    kv.fork(parent, child, 8)
    kv.check_integrity([parent, child])
    assert write(kv, child, 99)
    assert kv.take_copies() == []
    kv.check_integrity([parent, child])


# --- whatever happens, everybody reads its own tokens -----------------------------------------------------------------


class Memory:
    """What an executor's blocks hold: tokens by slot, written and copied as ordered."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.block_size = block_size

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self.slots[copy.target_id] = list(self.slots[copy.source_id])

    def write(self, request: Request, start: int, stop: int) -> None:
        tokens = read_int32(request.tokens(start, stop))
        for position, token in enumerate(tokens, start):
            block = request.blocks[position // self.block_size]
            self.slots[block.block_id][position % self.block_size] = token

    def read(self, request: Request) -> list[int]:
        return [
            self.slots[request.blocks[position // self.block_size].block_id][position % self.block_size]
            for position in range(request.num_computed_tokens)
        ]


class Families:
    """Random requests that are admitted, written, forked and freed; what each reads is checked after every step."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.kv: KVCacheManager = make_kv(rng.randint(4, 30), rng.randint(1, 5))
        self.memory = Memory(len(self.kv.pool.blocks), self.kv.block_size)
        self.running: list[Request] = []
        self.count = 0
        self.num_copies = self.num_in_place = 0

    def new(self, tokens: Sequence[int]) -> Request:
        self.count += 1
        return make_request(f"r{self.count}", tokens, arrival_seq=self.count)

    def admit(self) -> None:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 12))]
        request = self.new(tokens)
        if self.kv.allocate_sequence(request):
            self.running.append(request)

    def fork(self) -> None:
        parents = [request for request in self.running if request.num_computed_tokens]
        if not parents:
            return
        parent = self.rng.choice(parents)
        num_tokens = self.rng.choice((parent.num_computed_tokens, self.rng.randint(1, parent.num_computed_tokens)))
        tokens = read_int32(parent.tokens(0, num_tokens))
        child = self.new([*tokens, *(self.rng.randrange(2, 9) for _ in range(self.rng.randint(0, 2)))])
        self.kv.fork(parent, child, num_tokens)
        self.running.append(child)

    def free(self) -> None:
        if self.running:
            self.kv.free(self.running.pop(self.rng.randrange(len(self.running))))

    def step(self) -> None:
        """Some requests compute what they have not; those that have write a new token."""
        rows = []
        for request in self.rng.sample(self.running, self.rng.randint(0, len(self.running))):
            if request.num_computed_tokens == request.num_tokens:
                request.append_token(token_bytes([self.rng.randrange(2)]))
            start = request.num_computed_tokens
            stop = self.rng.randint(start + 1, request.num_tokens)
            was_shared, before = request.may_share_tail, list(request.blocks)
            if not self.kv.allocate_slots(request, stop):
                continue
            self.num_in_place += was_shared and before == request.blocks[: len(before)]
            rows.append((request, start, stop))
            request.num_computed_tokens = stop
            self.kv.cache_blocks(request, 0)
        copies = self.kv.take_copies()
        self.num_copies += len(copies)
        self.memory.copy(copies)
        for request, start, stop in rows:
            self.memory.write(request, start, stop)

    def check(self) -> None:
        self.kv.check_integrity(self.running)
        for request in self.running:
            expected = read_int32(request.tokens(0, request.num_computed_tokens))
            assert self.memory.read(request) == expected, f"{request!r} reads what another has written"


def live_in_families(num_seeds: int = 150) -> tuple[int, int]:
    """Returns how many blocks were copied, and how often the last holder wrote in place."""
    num_copies = num_in_place = 0
    for seed in range(num_seeds):
        families = Families(seed)
        fork, step = families.fork, families.step
        for _ in range(60):
            families.rng.choice((families.admit, fork, fork, step, step, step, families.free))()
            try:
                families.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
        num_copies += families.num_copies
        num_in_place += families.num_in_place
    return num_copies, num_in_place


def test_families_read_their_own_tokens_whatever_happens() -> None:
    num_copies, num_in_place = live_in_families()
    assert num_copies > 300
    assert num_in_place > 300


@pytest.mark.patches_core
def test_families_without_copy_on_write_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "_own_tail", lambda self, request: None)
    with pytest.raises(AssertionError, match="reads what another has written"):
        live_in_families()


@pytest.mark.patches_core
def test_families_without_the_order_to_copy_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "take_copies", lambda self: [])
    with pytest.raises(AssertionError, match="reads what another has written"):
        live_in_families()


@pytest.mark.patches_core
def test_families_whose_blocks_are_freed_with_the_first_of_them_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork that takes no reference: nobody looks at the books, and still somebody reads a stranger's tokens."""
    original = KVCacheManager.fork

    def fork(self: KVCacheManager, parent: Request, child: Request, num_tokens: int) -> None:
        original(self, parent, child, num_tokens)
        for block in child.blocks:
            block.ref_cnt -= 1

    def free(self: KVCacheManager, request: Request) -> None:
        self.pool.free_blocks(block for block in reversed(request.blocks) if block.ref_cnt)

    monkeypatch.setattr(KVCacheManager, "fork", fork)
    monkeypatch.setattr(KVCacheManager, "free", free)
    monkeypatch.setattr(KVCacheManager, "check_integrity", lambda self, requests: None)
    with pytest.raises(AssertionError, match="reads what another has written"):
        live_in_families()
