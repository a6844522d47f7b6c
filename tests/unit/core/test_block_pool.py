import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmanager_service.core.adoption import TaggedBlock, adopt_block
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_pool import NULL_BLOCK_ID, BlockPool
from tests.unit.core.builders import block_ids, token_bytes

TOKENS = token_bytes([1, 2])


def cache(
    pool: BlockPool,
    block: KVCacheBlock,
    name: str,
    parent: BlockContent | None = None,
    *,
    step: int = 0,
    owner: int = 0,
) -> BlockContent | None:
    """Make a block findable under a name: its hash and its tokens."""
    return pool.cache_full_block(
        block, name.encode(), parent, name.encode() + TOKENS, b"", provisional_step=step, owner=owner
    )


def find(pool: BlockPool, name: str, parent: BlockContent | None = None) -> KVCacheBlock | None:
    return pool.lookup.get_cached_block(name.encode(), parent, name.encode() + TOKENS, b"")


def test_pool_new_has_all_blocks_free_but_the_null_block() -> None:
    pool = BlockPool(4)
    assert pool.num_usable_blocks == pool.num_free_blocks == 3
    assert block_ids(pool.free_block_queue) == [1, 2, 3]
    assert pool.null_block.block_id == NULL_BLOCK_ID == 0
    pool.check_integrity([])


def test_pool_without_a_usable_block_raises() -> None:
    with pytest.raises(ValueError, match="num_blocks of at least 2"):
        BlockPool(1)


def test_get_new_blocks_too_many_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(IndexError):
        pool.get_new_blocks(4)
    assert block_ids(pool.free_block_queue) == [1, 2, 3]
    pool.check_integrity([])


def test_free_blocks_hashed_go_to_the_tail_and_unhashed_to_the_head() -> None:
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(4)
    first = cache(pool, blocks[0], "a")
    cache(pool, blocks[1], "b", first)
    pool.free_blocks(reversed(blocks))
    # 3 and 4 hold nothing: they are handed out first, in the order they had. Of the hashed the deepest goes first.
    assert block_ids(pool.free_block_queue) == [3, 4, 5, 2, 1]
    pool.check_integrity([])


def test_free_blocks_twice_raises() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free_blocks(blocks)
    pool.check_integrity([])


def test_free_blocks_null_block_raises() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free_blocks([pool.null_block])


def test_touch_free_block_leaves_the_queue_and_keeps_its_content() -> None:
    pool = BlockPool(4)
    block = pool.get_new_blocks(1)[0]
    cache(pool, block, "a")
    pool.free_blocks([block])
    pool.touch([block])
    pool.touch([block])
    assert block.ref_cnt == 2
    assert block.block_id not in block_ids(pool.free_block_queue)
    assert find(pool, "a") is block
    pool.check_integrity([[block], [block]])


def test_get_new_blocks_cached_block_is_evicted_when_handed_out() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks[0], "a")
    cache(pool, blocks[1], "b")
    pool.free_blocks(blocks)
    assert find(pool, "a") is blocks[0]
    taken = pool.get_new_blocks(1)
    assert taken == [blocks[0]]
    assert taken[0].block_hash is None
    assert find(pool, "a") is None
    assert find(pool, "b") is blocks[1]
    assert pool.num_evictions == 1
    pool.check_integrity([taken])


def test_get_cached_block_other_tokens_keys_or_parent_is_a_miss() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    parent, other = cache(pool, blocks[0], "parent"), cache(pool, blocks[1], "other")
    pool.cache_full_block(blocks[2], b"h", parent, TOKENS, b"salt")
    assert pool.lookup.get_cached_block(b"h", parent, TOKENS, b"salt") is blocks[2]
    assert pool.lookup.get_cached_block(b"h", other, TOKENS, b"salt") is None
    assert pool.lookup.get_cached_block(b"h", None, TOKENS, b"salt") is None
    assert pool.lookup.get_cached_block(b"h", parent, token_bytes([2, 1]), b"salt") is None
    assert pool.lookup.get_cached_block(b"h", parent, TOKENS, b"") is None


def test_cache_full_block_colliding_hash_leaves_the_block_uncached() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_block(blocks[0], b"h", None, TOKENS, b"")
    assert pool.cache_full_block(blocks[1], b"h", None, token_bytes([3, 4]), b"") is None
    assert blocks[1].content is None
    assert pool.lookup.get_cached_block(b"h", None, TOKENS, b"") is blocks[0]
    pool.check_integrity([blocks])


def test_cache_full_block_same_content_twice_is_held_until_both_are_evicted() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    content = cache(pool, blocks[0], "a")
    assert cache(pool, blocks[1], "a") is content
    pool.free_blocks(blocks)
    pool.get_new_blocks(1)
    assert find(pool, "a") is blocks[1]
    pool.get_new_blocks(1)
    assert find(pool, "a") is None
    assert pool.cached_block_hash_to_block == {}


def test_cache_full_block_content_whose_parent_is_gone_is_replaced() -> None:
    pool = BlockPool(4)
    old_parent, child = pool.get_new_blocks(2)
    cache(pool, child, "child", cache(pool, old_parent, "parent"))
    pool.free_blocks([child])
    pool.distrust([old_parent])
    new_parent, new_child = pool.get_new_blocks(1)[0], pool.get_new_blocks(1)[0]
    again = cache(pool, new_parent, "parent")
    assert find(pool, "child", again) is None
    assert cache(pool, new_child, "child", again) is not None
    assert find(pool, "child", again) is new_child
    assert pool.num_cached_blocks == 2
    pool.check_integrity([[old_parent], [new_parent], [new_child]])


def cache_table(
    pool: BlockPool, blocks: list[KVCacheBlock], contents: list[BlockContent], names: str, *, step: int = 0
) -> bool:
    """Make a table's next blocks findable, each under a name of one letter; the table's owner is its first block."""
    hashes = [name.encode() for name in names]
    tokens = [name.encode() + TOKENS for name in names]
    keys = [b""] * (len(names) - len(contents))
    return pool.cache_full_blocks(
        blocks, contents, hashes, tokens, keys, provisional_step=step, owner=blocks[0].block_id
    )


def test_cache_full_blocks_does_to_each_what_cache_full_block_does() -> None:
    pools = BlockPool(6), BlockPool(6)
    tables = [pool.get_new_blocks(3) for pool in pools]
    parent = None
    for name, block in zip("abc", tables[0], strict=True):
        parent = cache(pools[0], block, name, parent, step=4)
    contents: list[BlockContent] = []
    assert cache_table(pools[1], tables[1][:2], contents, "ab", step=4)
    assert cache_table(pools[1], tables[1], contents, "abc", step=4)
    for pool, table in zip(pools, tables, strict=True):
        pool.check_integrity([table])
    described = [
        [(content.serial, content.block_hash, content.token_bytes, content.block.block_id) for content in held]
        for held in ([block.content for block in table] for table in tables)
    ]
    assert described[0] == described[1]
    assert [block.content for block in tables[1]] == contents
    assert [content.parent for content in contents] == [None, contents[0], contents[1]]
    assert pools[0].next_serial == pools[1].next_serial
    assert pools[1].num_cached_blocks == 3
    assert pools[1].commit_step(4) == tables[1]


def test_cache_full_blocks_known_content_is_shared_and_its_children_hang_on_it() -> None:
    pool = BlockPool(6)
    known, table = pool.get_new_blocks(1), pool.get_new_blocks(2)
    first = cache(pool, known[0], "a")
    assert first is not None
    contents: list[BlockContent] = []
    assert cache_table(pool, table, contents, "ab")
    assert contents[0] is first
    assert first.blocks == [known[0], table[0]]
    assert find(pool, "b", first) is table[1]
    assert pool.next_serial == 3, "a content that was made for nothing takes no serial"
    pool.check_integrity([known, table])


def test_cache_full_blocks_colliding_hash_keeps_it_and_what_follows_out() -> None:
    pool = BlockPool(6)
    other, table = pool.get_new_blocks(1), pool.get_new_blocks(3)
    pool.cache_full_block(other[0], b"b", None, TOKENS, b"")
    contents: list[BlockContent] = []
    assert not cache_table(pool, table, contents, "abc", step=1)
    assert [block.content for block in table] == [contents[0], None, None]
    assert pool.num_cached_blocks == 2
    assert pool.commit_step(1) == table[:1]
    pool.check_integrity([other, table])


def test_cache_full_blocks_orphan_gives_way() -> None:
    pool = BlockPool(6)
    old = pool.get_new_blocks(2)
    contents: list[BlockContent] = []
    cache_table(pool, old, contents, "ab")
    pool.free_blocks(old)
    pool.distrust([old[0]])
    kept = pool.cached_block_hash_to_block[b"b"]
    assert kept.is_orphan
    table = [block for block in pool.get_new_blocks(3) if block is not old[1]][:2]
    again: list[BlockContent] = []
    assert cache_table(pool, table, again, "ab")
    assert again[1] is not kept
    assert find(pool, "b", again[0]) is table[1]
    assert kept.block is None
    assert pool.num_cached_blocks == 2


def follow(pool: BlockPool, parent: BlockContent | None, name: str, *, by_index: bool = True) -> BlockContent | None:
    """What `follow` finds after a parent; without the index only where a successor leads there."""
    block_hash = name.encode() if by_index else b"a hash that nothing has"
    return pool.lookup.follow(parent, block_hash, name.encode() + TOKENS, b"")


def test_follow_what_was_cached_in_a_row_is_found_without_the_index() -> None:
    pool = BlockPool(6)
    table = pool.get_new_blocks(3)
    contents: list[BlockContent] = []
    assert cache_table(pool, table[:2], contents, "ab")
    assert cache_table(pool, table, contents, "abc")
    assert follow(pool, None, "a", by_index=False) is None
    assert follow(pool, None, "a") is contents[0]
    assert follow(pool, contents[0], "b", by_index=False) is contents[1]
    assert follow(pool, contents[1], "c", by_index=False) is contents[2]
    pool.check_integrity([table])


def test_follow_other_tokens_or_keys_than_the_successors_are_a_miss() -> None:
    pool = BlockPool(6)
    table = pool.get_new_blocks(2)
    contents: list[BlockContent] = []
    cache_table(pool, table, contents, "ab")
    assert contents[0].successor is contents[1]
    assert pool.lookup.follow(contents[0], b"b", b"other tokens", b"") is None
    assert pool.lookup.follow(contents[0], b"b", b"b" + TOKENS, b"other keys") is None
    assert follow(pool, contents[0], "b") is contents[1], "a miss changes nothing"


def test_follow_of_two_that_go_on_from_a_prefix_the_one_found_last_is_the_successor() -> None:
    pool = BlockPool(6)
    table, other = pool.get_new_blocks(2), pool.get_new_blocks(1)
    contents: list[BlockContent] = []
    cache_table(pool, table, contents, "ab")
    fork = [contents[0]]
    cache_table(pool, [table[0], *other], fork, "ac")
    assert contents[0].successor is fork[1]
    assert follow(pool, contents[0], "b") is contents[1], "by the index"
    assert contents[0].successor is contents[1]
    assert follow(pool, contents[0], "c") is fork[1]
    pool.check_integrity([table, other])


def test_follow_evicted_successor_is_a_miss_and_nothing_keeps_it() -> None:
    pool = BlockPool(4)
    table = pool.get_new_blocks(3)
    contents: list[BlockContent] = []
    cache_table(pool, table, contents, "abc")
    pool.free_blocks(reversed(table))
    assert pool.get_new_blocks(1) == [table[2]]
    assert contents[1].successor is None
    assert follow(pool, contents[1], "c") is None
    assert follow(pool, contents[0], "b") is contents[1], "its parent is still followed by it"
    contents.pop()
    assert cache_table(pool, table, contents, "abc"), "cached again, it is followed again"
    assert follow(pool, contents[1], "c", by_index=False) is contents[2] is table[2].content
    pool.check_integrity([[table[2]]])


def test_follow_content_that_a_second_block_holds_outlives_the_first() -> None:
    pool = BlockPool(6)
    table, twin = pool.get_new_blocks(2), pool.get_new_blocks(2)
    contents: list[BlockContent] = []
    again: list[BlockContent] = []
    cache_table(pool, table, contents, "ab")
    cache_table(pool, twin, again, "ab")
    assert again == contents
    pool.overwrite(table[1])
    found = follow(pool, contents[0], "b", by_index=False)
    assert found is contents[1]
    assert found.block is twin[1]
    pool.overwrite(twin[1])
    assert contents[0].successor is None
    assert follow(pool, contents[0], "b") is None


def test_follow_parent_goes_first_leaves_no_circle() -> None:
    pool = BlockPool(6)
    table = pool.get_new_blocks(3)
    contents: list[BlockContent] = []
    cache_table(pool, table, contents, "abc")
    pool.overwrite(table[1])
    assert [content.successor for content in contents] == [None] * 3
    pool.check_integrity([table])
    assert contents[2].is_orphan
    # Who holds the old contents goes on caching after one that no block holds: nothing leads on from that.
    fourth = pool.get_new_blocks(1)
    kept = contents[:2]
    assert cache_table(pool, [table[0], table[1], *fourth], kept, "abd")
    assert kept[2].parent is contents[1]
    assert contents[1].successor is None
    pool.check_integrity([table, fourth])


def test_check_integrity_successor_that_no_block_holds_or_of_another_parent_is_found() -> None:
    pool = BlockPool(6)
    table = pool.get_new_blocks(3)
    contents: list[BlockContent] = []
    cache_table(pool, table, contents, "abc")
    contents[0].successor = contents[2]
    with pytest.raises(AssertionError, match="another parent"):
        pool.check_integrity([table])
    contents[0].successor = BlockContent(9, b"d", contents[0], TOKENS, b"")
    with pytest.raises(AssertionError, match="no block holds"):
        pool.check_integrity([table])


def test_commit_step_provisional_blocks_become_committed_once() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    parent = cache(pool, blocks[0], "a", step=1)
    cache(pool, blocks[1], "b", parent, step=1)
    cache(pool, blocks[2], "c", step=2)
    assert pool.commit_step(1) == blocks[:2]
    assert [block.provisional_step for block in blocks] == [0, 0, 2]
    assert pool.commit_step(1) == []
    pool.check_integrity([blocks])


def test_commit_step_block_evicted_meanwhile_is_not_resurrected() -> None:
    pool = BlockPool(2)
    block = pool.get_new_blocks(1)[0]
    cache(pool, block, "a", step=1)
    pool.free_blocks([block])
    assert pool.get_new_blocks(1) == [block]
    assert pool.commit_step(1) == []
    assert block.content is None
    assert find(pool, "a") is None
    pool.check_integrity([[block]])


def test_commit_step_block_filled_anew_by_a_later_step_stays_provisional() -> None:
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks[0], "a")  # keeps the content alive while the other block is evicted and filled again
    cache(pool, blocks[1], "a", step=1)
    pool.free_blocks([blocks[1]])
    pool.get_new_blocks(1)
    cache(pool, blocks[1], "a", step=2)
    assert pool.commit_step(1) == []
    assert blocks[1].provisional_step == 2
    assert pool.commit_step(2) == [blocks[1]]


def test_forget_provisional_unhashes_what_no_step_acknowledged_and_nothing_else() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(3)
    parent = cache(pool, blocks[0], "a", step=1)
    cache(pool, blocks[1], "b", parent, step=2)
    cache(pool, blocks[2], "c", step=3)
    pool.commit_step(1)
    assert pool.forget_provisional() == 2
    assert find(pool, "a") is blocks[0]
    assert find(pool, "b", parent) is None
    assert find(pool, "c") is None
    assert pool.commit_step(2) == []
    pool.check_integrity([blocks])


def test_provisional_blocks_of_names_an_owners_blocks_from_a_step_on() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(4)
    for name, block, step, owner in zip("abcd", blocks, (1, 2, 3, 3), (7, 7, 7, 8), strict=True):
        cache(pool, block, name, step=step, owner=owner)
    assert pool.provisional_blocks_of(7, 2) == [blocks[1], blocks[2]]


def test_provisional_blocks_of_tells_rows_of_several_blocks_apart() -> None:
    pool = BlockPool(8)
    first, second = pool.get_new_blocks(3), pool.get_new_blocks(2)
    contents: list[BlockContent] = []
    cache_table(pool, first[:2], contents, "ab", step=1)
    cache_table(pool, second, [], "xy", step=1)
    cache_table(pool, first, contents, "abc", step=1)
    assert pool.provisional_blocks_of(first[0].block_id, 1) == first
    assert pool.provisional_blocks_of(second[0].block_id, 1) == second
    pool.distrust([second[1]])
    assert pool.provisional_blocks_of(second[0].block_id, 1) == second[:1]


def test_distrust_content_in_two_blocks_is_forgotten_in_both() -> None:
    """What was computed on one of them is found under the other: neither may stay."""
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    content = cache(pool, blocks[0], "a")
    cache(pool, blocks[1], "a")
    cache(pool, blocks[2], "b", content)
    assert pool.distrust([blocks[0]]) == set(blocks[:2])
    again = cache(pool, blocks[0], "a")
    assert find(pool, "b", again) is None
    pool.check_integrity([blocks])


def test_distrust_parent_takes_along_what_outstanding_steps_compute_from_it() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(4)
    parent = cache(pool, blocks[0], "a")
    child = cache(pool, blocks[1], "b", parent, step=1)
    cache(pool, blocks[2], "c", child, step=2)
    cache(pool, blocks[3], "d", step=2)
    assert pool.distrust([blocks[0]]) == set(blocks[:3])
    assert pool.commit_step(1) == []
    assert pool.commit_step(2) == [blocks[3]]
    pool.check_integrity([blocks])


def test_reset_prefix_cache_forgets_every_hash() -> None:
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks[0], "a")
    cache(pool, blocks[1], "b", step=1)
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache() == blocks
    assert pool.num_cached_blocks == 0
    assert pool.commit_step(1) == []
    pool.check_integrity([])


def test_adopt_block_in_use_cached_or_null_is_refused() -> None:
    pool = BlockPool(4)
    used, cached = pool.get_new_blocks(2)
    cache(pool, cached, "a")
    pool.free_blocks([cached])

    def make_tag(block_id: int) -> TaggedBlock:
        return TaggedBlock(block_id, b"h", 0, 0, TOKENS, b"")

    for block_id in (NULL_BLOCK_ID, used.block_id, cached.block_id):
        assert adopt_block(pool, make_tag(block_id), None) is None
    assert adopt_block(pool, make_tag(3), None) is not None
    assert pool.lookup.get_cached_block(b"h", None, TOKENS, b"") is pool.blocks[3]
    pool.check_integrity([[used, pool.blocks[3]]])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool, block: setattr(block, "ref_cnt", 2), "has 1 references"),
        (lambda pool, block: pool.free_block_queue.append(block), "free queue does not match"),
        (lambda pool, block: pool.cached_block_hash_to_block.clear(), "lost"),
        (lambda pool, block: block.content.left_by(block), "not listed"),
        (lambda pool, block: setattr(block, "provisional_step", 9), "for a step that ended"),
        (lambda pool, block: setattr(pool, "num_cached_blocks", 5), "counted 5"),
        (lambda pool, block: pool.free_block_queue.popleft_n(1), "free queue does not match"),
        (lambda pool, block: setattr(pool.free_block_queue, "num_free_blocks", 7), "twice"),
    ],
)
def test_check_integrity_damaged_pool_raises(damage, message: str) -> None:
    pool = BlockPool(4)
    block = pool.get_new_blocks(1)[0]
    cache(pool, block, "a")
    pool.check_integrity([[block]])
    damage(pool, block)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([[block]])


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a naive one: lists and dicts, searched from end to end.

    In the model a content is a tuple (name, parent content); hashes are the name's first letter only, so they collide.
    What an eviction policy goes by is noted of every block, and sorted anew each time it is asked.
    """

    NUM_BLOCKS = 8
    POLICY = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, self.POLICY)
        self.empty: list[int] = list(range(1, self.NUM_BLOCKS))  # free without content, in order
        self.time = 0
        self.freed_at: dict[int, int] = {}  # free or cached block id -> when it last came free
        self.first_freed_at: dict[int, int] = {}  # the same, first with its present content
        self.overdue: set[int] = set()  # its turn came while it was referenced
        self.uses: dict[int, int] = {}
        self.asked: dict[int, set[tuple[int, float]]] = {}  # (priority, duration; 0 without an end) still in force
        self.clock = 0.0
        self.free_since: dict[int, float] = {}  # by the clock
        self.refs: dict[int, int] = {}
        self.held: dict[int, str] = {}  # block id -> the content's name
        self.order: list[int] = []  # cached blocks, oldest first
        self.steps: dict[int, int] = {}  # provisional block id -> step
        self.outstanding: list[int] = []
        self.next_step = 1

    def _hash(self, name: str) -> bytes:
        return name[:1].encode()

    @property
    def free(self) -> list[int]:
        cached = [block_id for block_id in self.held if block_id not in self.refs]
        return self.empty + sorted(cached, key=self._rank)

    def _rank(self, block_id: int) -> tuple[int, ...]:
        freed_at = self.freed_at[block_id]
        if self.POLICY == "lfu":
            return (self.uses.get(block_id, 0), freed_at)
        if self.POLICY == "priority":
            return (max((priority for priority, _ in self.asked.get(block_id, ())), default=0), freed_at)
        if self.POLICY == "fifo":
            return (0, freed_at) if block_id in self.overdue else (1, self.first_freed_at[block_id])
        return (freed_at,)

    def _uncache(self, block_id: int) -> None:
        if block_id in self.held and block_id not in self.refs:
            self.empty.insert(0, block_id)
        for notes in (self.held, self.steps, self.uses, self.asked, self.first_freed_at):
            notes.pop(block_id, None)
        self.overdue.discard(block_id)
        if block_id in self.order:
            self.order.remove(block_id)

    @rule(count=st.integers(0, 9))
    def get_new_blocks(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(IndexError):
                self.pool.get_new_blocks(count)
            return
        taken = self.free[:count]
        in_turn = [block_id for block_id in taken if block_id in self.held and block_id not in self.overdue]
        if in_turn:
            last = max(self.first_freed_at[block_id] for block_id in in_turn)
            self.overdue |= {
                block_id for block_id in self.refs if self.first_freed_at.get(block_id, self.time + 1) < last
            }
        for block_id in taken:
            self.refs[block_id] = 1
            self._uncache(block_id)
            if block_id in self.empty:
                self.empty.remove(block_id)
        assert block_ids(self.pool.get_new_blocks(count)) == taken

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True, max_size=4))
        for block_id in chosen:
            self.refs[block_id] -= 1
            if not self.refs[block_id]:
                del self.refs[block_id]
                self.time += 1
                self.freed_at[block_id] = self.time
                self.free_since[block_id] = self.clock
                if block_id in self.held:
                    self.first_freed_at.setdefault(block_id, self.time)
                else:
                    self.empty.insert(0, block_id)
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in chosen])

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def note_use(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True, max_size=4))
        for block_id in set(chosen) & set(self.held):
            self.uses[block_id] = self.uses.get(block_id, 0) + 1
        self.pool.note_use([self.pool.blocks[block_id] for block_id in chosen])

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), priority=st.integers(-2, 2), duration=st.sampled_from([0.0, 0.0, 1.0, 2.0, 5.0]))
    def retain(self, data: st.DataObject, priority: int, duration: float) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True, max_size=4))
        for block_id in set(chosen) & set(self.held):
            self.asked.setdefault(block_id, set()).add((priority, duration))
        self.pool.retain([self.pool.blocks[block_id] for block_id in chosen], priority, duration)

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0, 7.0]))
    def advance(self, seconds: float) -> None:
        self.clock += seconds
        for block_id in set(self.asked) - set(self.refs):
            age = self.clock - self.free_since[block_id]
            self.asked[block_id] = {one for one in self.asked[block_id] if not one[1] or age < one[1]}
        self.pool.advance(self.clock)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        block = self.pool.blocks[data.draw(st.sampled_from(self.free))]
        with pytest.raises(ValueError, match="freed twice"):
            self.pool.free_blocks([block])

    @precondition(lambda self: set(self.refs) - set(self.held))
    @rule(data=st.data(), name=st.sampled_from(["a", "a2", "b", "b2", "c"]), provisional=st.booleans())
    def cache_full_block(self, data: st.DataObject, name: str, provisional: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(set(self.refs) - set(self.held))))
        step = 0
        if provisional:
            if not self.outstanding:
                self.outstanding.append(self.next_step)
                self.next_step += 1
            step = self.outstanding[-1]
        collides = any(held[0] == name[0] and held != name for held in self.held.values())
        content = self.pool.cache_full_block(
            self.pool.blocks[block_id], self._hash(name), None, name.encode(), b"", provisional_step=step
        )
        assert (content is None) == collides
        if not collides:
            self.held[block_id] = name
            self.order.append(block_id)
            if step:
                self.steps[block_id] = step

    @rule()
    def begin_step(self) -> None:
        self.outstanding.append(self.next_step)
        self.next_step += 1

    @precondition(lambda self: self.outstanding)
    @rule()
    def commit_step(self) -> None:
        step = self.outstanding.pop(0)
        expected = {block_id for block_id, provisional in self.steps.items() if provisional == step}
        assert set(block_ids(self.pool.commit_step(step))) == expected
        for block_id in expected:
            del self.steps[block_id]

    @rule()
    def forget_provisional(self) -> None:
        assert self.pool.forget_provisional() == len(self.steps)
        for block_id in list(self.steps):
            self._uncache(block_id)
        self.outstanding.clear()

    @rule(name=st.sampled_from(["a", "a2", "b", "b2", "c"]))
    def look_up_and_touch(self, name: str) -> None:
        holders = [block_id for block_id in self.order if self.held[block_id] == name]
        block = self.pool.lookup.get_cached_block(self._hash(name), None, name.encode(), b"")
        assert (block.block_id if block else None) == (holders[0] if holders else None)
        if block is not None:
            self.pool.touch([block])
            self.refs[block.block_id] = self.refs.get(block.block_id, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.held)))
        expected = {other for other, name in self.held.items() if name == self.held[block_id]}
        assert set(block_ids(self.pool.distrust([self.pool.blocks[block_id]]))) == expected
        for other in sorted(expected):
            self._uncache(other)

    @rule()
    def reset_prefix_cache(self) -> None:
        assert block_ids(self.pool.reset_prefix_cache()) == sorted(self.held)
        for block_id in sorted(self.held):
            self._uncache(block_id)
        self.outstanding.clear()

    @invariant()
    def is_the_model(self) -> None:
        assert block_ids(self.pool.free_block_queue) == self.free
        assert {block.block_id: block.ref_cnt for block in self.pool.blocks if block.ref_cnt} == self.refs
        assert {
            block.block_id: block.content.token_bytes.decode() for block in self.pool.blocks if block.content
        } == self.held
        assert {
            block.block_id: block.provisional_step for block in self.pool.blocks if block.provisional_step
        } == self.steps
        assert self.pool.num_cached_blocks == len(self.held)
        tables = [[self.pool.blocks[block_id]] * count for block_id, count in self.refs.items()]
        self.pool.check_integrity(tables)


class LFUPoolMachine(PoolMachine):
    POLICY = "lfu"


class FIFOPoolMachine(PoolMachine):
    POLICY = "fifo"


class PriorityPoolMachine(PoolMachine):
    POLICY = "priority"


TestPoolMachine = PoolMachine.TestCase
TestLFUPoolMachine = LFUPoolMachine.TestCase
TestFIFOPoolMachine = FIFOPoolMachine.TestCase
TestPriorityPoolMachine = PriorityPoolMachine.TestCase
for test_case in (TestPoolMachine, TestLFUPoolMachine, TestFIFOPoolMachine, TestPriorityPoolMachine):
    test_case.settings = settings(max_examples=150, stateful_step_count=40)
