"""`BlockPool` against a naive model of it: whatever is called in whatever order, both are in the same state after it.

The model is dicts and lists and looks everything up by walking over it. It follows the pool's docstrings, not its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvmanager_service.core import adoption
from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.content_lookup import ContentLookup
from tests.unit.core.builders import block_ids

NUM_BLOCKS = 6
TOKENS = (b"a", b"b")
# Three hashes for everything: contents collide all the time.
HASHES = (b"0" * 16, b"1" * 16, b"2" * 16)

SETTINGS = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class ModelContent:
    """A content as the model knows it: where it hangs, and which blocks hold it."""

    def __init__(self, block_hash: bytes, parent: ModelContent | None, tokens: bytes) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.tokens = tokens
        self.holders: list[int] = []


class Model:
    """What the docstrings of `BlockPool` promise, done the slow way."""

    def __init__(self) -> None:
        self.free = list(range(1, NUM_BLOCKS))
        self.references = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.contents: dict[int, ModelContent] = {}
        self.outstanding: dict[int, list[tuple[int, ModelContent]]] = {}
        self.provisional: dict[int, int] = {}
        self.evictions = 0

    def find(self, block_hash: bytes) -> ModelContent | None:
        """The content of this hash that some block holds."""
        return next((content for content in self.contents.values() if content.block_hash == block_hash), None)

    def uncache(self, block_id: int) -> None:
        content = self.contents.pop(block_id)
        content.holders.remove(block_id)
        self.provisional.pop(block_id, None)

    def empty(self, block_id: int) -> None:
        """It holds nothing any more; when it is free, it is next."""
        self.uncache(block_id)
        if self.references[block_id] == 0:
            self.free.remove(block_id)
            self.free.insert(0, block_id)

    def forget(self, *contents: ModelContent) -> set[int]:
        holders = {block_id for content in contents for block_id in content.holders}
        for block_id in sorted(holders):
            self.empty(block_id)
        return holders

    def get(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            self.references[block_id] = 1
            if block_id in self.contents:
                self.uncache(block_id)
                self.evictions += 1
        return taken

    def touch(self, block_id: int) -> None:
        if self.references[block_id] == 0:
            self.free.remove(block_id)
        self.references[block_id] += 1

    def release(self, block_id: int) -> None:
        self.references[block_id] -= 1
        if self.references[block_id] == 0:
            self.free.insert(len(self.free) if block_id in self.contents else 0, block_id)

    def cache(self, block_id: int, block_hash: bytes, parent: ModelContent | None, tokens: bytes, step: int) -> bool:
        content = self.find(block_hash)
        if content is not None and content.parent is not None and not content.parent.holders:
            self.forget(content)
            content = None
        if content is None:
            content = ModelContent(block_hash, parent, tokens)
        elif content.parent is not parent or content.tokens != tokens:
            return False
        content.holders.append(block_id)
        self.contents[block_id] = content
        if step:
            self.provisional[block_id] = step
            self.outstanding.setdefault(step, []).append((block_id, content))
        return True

    def commit(self, step: int) -> list[int]:
        committed = []
        for block_id, content in self.outstanding.pop(step, []):
            if self.contents.get(block_id) is content and self.provisional.get(block_id) == step:
                del self.provisional[block_id]
                committed.append(block_id)
        return committed

    def distrust(self, block_ids_: Iterable[int]) -> set[int]:
        lost = self.forget(*(self.contents[block_id] for block_id in block_ids_ if block_id in self.contents))
        entries = [entry for step in self.outstanding.values() for entry in step]
        for block_id, content in entries:
            is_held = self.contents.get(block_id) is content
            if is_held and content.parent is not None and not content.parent.holders:
                lost |= self.forget(content)
        return lost


class PoolMachine(RuleBasedStateMachine):
    """Calls the pool and the model alike. Tables are lists of blocks that were got or touched and not freed since."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.model = Model()
        self.tables: list[list[int]] = []
        self.next_step = 1
        self.twins: dict[int, BlockContent] = {}

    def blocks(self, ids: Iterable[int]) -> list[KVCacheBlock]:
        return [self.pool.blocks[block_id] for block_id in ids]

    def check_contents(self) -> None:
        """The same blocks hold the same contents, and contents hang in the same places."""
        twins: dict[int, BlockContent] = {}
        for block_id, content in self.model.contents.items():
            real = self.pool.blocks[block_id].content
            assert real is not None
            assert twins.setdefault(id(content), real) is real
            assert real.block_hash == content.block_hash
            assert real.token_bytes == content.tokens
            assert block_ids(real.blocks) == content.holders
        assert len({id(real) for real in twins.values()}) == len(twins)
        for content in self.model.contents.values():
            if content.parent is not None and content.parent.holders:
                assert twins[id(content)].parent is twins[id(content.parent)]

    def cache(self, block_id: int, block_hash: bytes, parent_id: int, tokens: bytes, ahead: int) -> bool:
        """Cache a block that has no content after one that may have; ahead 0 is committed, else the n-th step out."""
        step = self.next_step + ahead - 1 if ahead else 0
        model_parent = self.model.contents.get(parent_id)
        content = self.pool.cache_full_block(
            self.pool.blocks[block_id],
            block_hash,
            self.pool.blocks[parent_id].content,
            tokens,
            b"",
            provisional_step=step,
            owner=block_id,
        )
        assert (content is not None) == self.model.cache(block_id, block_hash, model_parent, tokens, step)
        return content is not None

    # --- rules ----------------------------------------------------------------------------------------------------

    @rule(count=st.integers(0, NUM_BLOCKS))
    def get_new_blocks(self, count: int) -> None:
        if count > len(self.model.free):
            with pytest.raises(IndexError):
                self.pool.get_new_blocks(count)
            return
        got = block_ids(self.pool.get_new_blocks(count))
        assert got == self.model.get(count)
        if got:
            self.tables.append(got)

    @precondition(lambda self: self.model.contents)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model.contents)), min_size=1, max_size=3, unique=True))
        self.pool.touch(self.blocks(ids))
        for block_id in ids:
            self.model.touch(block_id)
        self.tables.append(ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), deepest_first=st.booleans())
    def free_blocks(self, data: st.DataObject, deepest_first: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        if deepest_first:
            table.reverse()
        self.pool.free_blocks(self.blocks(table))
        for block_id in table:
            self.model.release(block_id)

    @precondition(lambda self: self.model.free)
    @rule(data=st.data())
    def free_blocks_twice(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.model.free))
        with pytest.raises(ValueError, match="freed twice"):
            self.pool.free_blocks(self.blocks([block_id]))

    @rule(data=st.data(), block_hash=st.sampled_from(HASHES), tokens=st.sampled_from(TOKENS), ahead=st.integers(0, 2))
    def cache_full_block(self, data: st.DataObject, block_hash: bytes, tokens: bytes, ahead: int) -> None:
        held = sorted({block_id for table in self.tables for block_id in table} - self.model.contents.keys())
        if held:
            parent_id = data.draw(st.sampled_from([0, *sorted(self.model.contents)]))
            self.cache(data.draw(st.sampled_from(held)), block_hash, parent_id, tokens, ahead)

    @precondition(lambda self: len(self.model.free) >= 2)
    @rule(hashes=st.permutations(HASHES), tokens=st.sampled_from(TOKENS), ahead=st.integers(0, 2))
    def fill_a_chain(self, hashes: list[bytes], tokens: bytes, ahead: int) -> None:
        """What a prompt of two blocks does."""
        first, second = self.model.get(2)
        assert block_ids(self.pool.get_new_blocks(2)) == [first, second]
        self.tables.append([first, second])
        step = self.next_step + ahead - 1 if ahead else 0
        contents: list[BlockContent] = []
        parent: ModelContent | None = None
        for table in ([first], [first, second]):
            is_cached = self.pool.cache_full_blocks(
                self.blocks(table), contents, hashes, [tokens] * 2, [b""], provisional_step=step, owner=table[-1]
            )
            assert is_cached == self.model.cache(table[-1], hashes[len(table) - 1], parent, tokens, step)
            if not is_cached:
                break
            parent = self.model.contents[table[-1]]

    @rule(block_hash=st.sampled_from(HASHES), tokens=st.sampled_from(TOKENS), data=st.data())
    def get_cached_block(self, block_hash: bytes, tokens: bytes, data: st.DataObject) -> None:
        parent_id = data.draw(st.sampled_from([0, *sorted(self.model.contents)]))
        found = self.pool.lookup.get_cached_block(block_hash, self.pool.blocks[parent_id].content, tokens, b"")
        content = self.model.find(block_hash)
        is_hit = (
            content is not None and content.parent is self.model.contents.get(parent_id) and content.tokens == tokens
        )
        assert (None if found is None else found.block_id) == (content.holders[0] if content and is_hit else None)
        is_held = content is not None and any(self.model.references[block_id] for block_id in content.holders)
        assert self.pool.lookup.may_be_held(block_hash) == is_held

    @rule(block_hash=st.sampled_from(HASHES), tokens=st.sampled_from(TOKENS), data=st.data())
    def follow(self, block_hash: bytes, tokens: bytes, data: st.DataObject) -> None:
        """Asked twice: by way of the index perhaps, then of the successor. No hash tells equal contents apart, so of
        those that this machine made with two hashes, either will do.
        """
        parent_id = data.draw(st.sampled_from([0, *sorted(self.model.contents)]))
        parent = self.model.contents.get(parent_id)
        siblings = [one for one in self.model.contents.values() if one.parent is parent and one.tokens == tokens]
        if siblings:
            block_hash = siblings[0].block_hash
        expected: set[int | None] = {one.holders[0] for one in siblings}
        for _ in range(2):
            found = self.pool.lookup.follow(self.pool.blocks[parent_id].content, block_hash, tokens, b"")
            assert (None if found is None or found.block is None else found.block.block_id) in (expected or {None})

    @rule()
    def commit_step(self) -> None:
        assert block_ids(self.pool.commit_step(self.next_step)) == self.model.commit(self.next_step)
        self.next_step += 1

    @rule(owner=st.integers(1, NUM_BLOCKS - 1), ahead=st.integers(0, 1))
    def provisional_blocks_of(self, owner: int, ahead: int) -> None:
        expected = [
            block_id
            for step, entries in self.model.outstanding.items()
            if step >= self.next_step + ahead
            for block_id, content in entries
            if block_id == owner and self.model.contents.get(block_id) is content
        ]
        assert block_ids(self.pool.provisional_blocks_of(owner, self.next_step + ahead)) == expected

    @rule()
    def forget_provisional(self) -> None:
        expected = len(self.model.provisional)
        for entries in self.model.outstanding.values():
            for block_id, content in entries:
                if self.model.contents.get(block_id) is content and block_id in self.model.provisional:
                    self.model.empty(block_id)
        self.model.outstanding.clear()
        assert self.pool.forget_provisional() == expected

    @precondition(lambda self: self.model.contents)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model.contents)), min_size=1, max_size=2, unique=True))
        assert set(block_ids(self.pool.distrust(self.blocks(ids)))) == self.model.distrust(ids)

    @rule()
    def reset_prefix_cache(self) -> None:
        expected = sorted(self.model.contents)
        for block_id in expected:
            self.model.empty(block_id)
        self.model.outstanding.clear()
        assert block_ids(self.pool.reset_prefix_cache()) == expected

    @rule(data=st.data(), block_hash=st.sampled_from(HASHES), tokens=st.sampled_from(TOKENS))
    def adopt(self, data: st.DataObject, block_hash: bytes, tokens: bytes) -> None:
        block_id = data.draw(st.integers(0, NUM_BLOCKS - 1))
        parent_id = data.draw(st.sampled_from([0, *sorted(self.model.contents)]))
        model_parent = self.model.contents.get(parent_id)
        content = adoption.adopt_block(
            self.pool, TaggedBlock(block_id, block_hash, 0, 0, tokens, b""), self.pool.blocks[parent_id].content
        )
        if block_id == 0 or self.model.references[block_id] or block_id in self.model.contents:
            assert content is None
            return
        self.model.touch(block_id)
        assert (content is not None) == self.model.cache(block_id, block_hash, model_parent, tokens, 0)
        if content is None:
            self.model.release(block_id)
        else:
            self.tables.append([block_id])

    # --- after each rule ------------------------------------------------------------------------------------------

    @invariant()
    def is_as_the_model(self) -> None:
        pool, model = self.pool, self.model
        assert block_ids(pool.free_block_queue) == model.free
        assert pool.num_free_blocks == len(model.free)
        assert {block.block_id: block.ref_cnt for block in pool.blocks} == model.references
        assert {block.block_id for block in pool.blocks if block.content is not None} == model.contents.keys()
        assert {b.block_id: b.provisional_step for b in pool.blocks if b.provisional_step} == model.provisional
        assert pool.num_cached_blocks == len(model.contents)
        assert pool.num_evictions == model.evictions
        self.check_contents()

    @invariant()
    def is_sound(self) -> None:
        self.pool.check_integrity([self.blocks(table) for table in self.tables])


def test_pool_any_calls_in_any_order_agree_with_a_naive_model() -> None:
    run_state_machine_as_test(PoolMachine, settings=SETTINGS)


# --- a test of the test: the pool is broken on purpose ------------------------------------------------------------


def touch_forgets_the_queue(patch: pytest.MonkeyPatch) -> None:
    def touch(self: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    patch.setattr(BlockPool, "touch", touch)


def cached_blocks_are_freed_to_the_head(patch: pytest.MonkeyPatch) -> None:
    def free_blocks(self: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            if block.ref_cnt <= 0:
                raise ValueError("freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.prepend(block)

    patch.setattr(BlockPool, "free_blocks", free_blocks)


def second_free_is_ignored(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.free_blocks
    patch.setattr(
        BlockPool, "free_blocks", lambda self, blocks: original(self, [block for block in blocks if block.ref_cnt])
    )


def commit_believes_a_block_filled_anew(patch: pytest.MonkeyPatch) -> None:
    def commit_step(self: BlockPool, step_id: int) -> list[KVCacheBlock]:
        fill = self._provisional.pop(step_id)
        committed = [] if fill is None else [block for block in fill.blocks if block.content is not None]
        for block in committed:
            block.provisional_step = 0
        return committed

    patch.setattr(BlockPool, "commit_step", commit_step)


def orphans_keep_their_hash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockContent, "is_orphan", property(lambda self: False))


def parent_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockContent, "is_same", lambda self, parent, tokens, keys: self.token_bytes == tokens)


def successors_outlive_their_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockContent, "_leave_chain", lambda self: None)


def successor_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    original = ContentLookup.follow

    def follow(
        self: ContentLookup, parent: BlockContent | None, block_hash: bytes, tokens: bytes, keys: bytes
    ) -> BlockContent | None:
        if parent is not None and parent.successor is not None:
            return parent.successor
        return original(self, parent, block_hash, tokens, keys)

    patch.setattr(ContentLookup, "follow", follow)


def distrust_stops_at_the_block_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        BlockPool,
        "distrust",
        lambda self, blocks: self._forget({block.content for block in blocks if block.content is not None}),
    )


def lost_steps_are_trusted(patch: pytest.MonkeyPatch) -> None:
    def forget_provisional(self: BlockPool) -> int:
        return sum(len(self.commit_step(step_id)) for step_id in list(self._provisional))

    patch.setattr(BlockPool, "forget_provisional", forget_provisional)


def adopted_block_in_use_loses_its_table(patch: pytest.MonkeyPatch) -> None:
    original = adoption.adopt_block

    def adopt_block(pool: BlockPool, tag: TaggedBlock, parent: BlockContent | None) -> BlockContent | None:
        block = pool.blocks[tag.block_id]
        if block.ref_cnt and block.content is None:
            return pool.cache_full_block(block, tag.block_hash, parent, tag.token_bytes, tag.extra_keys)
        return original(pool, tag, parent)

    patch.setattr(adoption, "adopt_block", adopt_block)


@pytest.mark.patches_core
@pytest.mark.parametrize(
    "mutation",
    [
        touch_forgets_the_queue,
        cached_blocks_are_freed_to_the_head,
        second_free_is_ignored,
        commit_believes_a_block_filled_anew,
        orphans_keep_their_hash,
        parent_is_not_compared,
        successors_outlive_their_blocks,
        successor_is_not_compared,
        distrust_stops_at_the_block_itself,
        lost_steps_are_trusted,
        adopted_block_in_use_loses_its_table,
    ],
    ids=lambda mutation: mutation.__name__,
)
def test_pool_broken_on_purpose_differs_from_the_model(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    # Found is enough: no time is spent on a smaller example.
    quick = settings(SETTINGS, max_examples=2000, phases=[Phase.generate], print_blob=False, report_multiple_bugs=False)
    with pytest.raises((AssertionError, ValueError, AttributeError, pytest.fail.Exception)):
        run_state_machine_as_test(PoolMachine, settings=quick)
