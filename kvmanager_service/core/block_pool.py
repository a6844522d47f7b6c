"""The pool of physical blocks: who is free, who is referenced, what is cached.

Station: owned by `KVCacheManager`; nobody else changes a block. It knows no request. `ContentLookup` finds what its
blocks hold, `StepFills` keeps what steps that are out will have filled, an `EvictionPolicy` orders the free ones.

Life of a block: free ─get_new_blocks▶ referenced ─cache_full_block▶ referenced and hashed (provisional until
`commit_step`) ─free_blocks▶ free and hashed ─touch▶ referenced again, or ─get_new_blocks▶ evicted and referenced anew.

Invariants (`check_integrity`, by `pool_checks`):
    1. ref_cnt == 0 ⇔ the block is in the free queue; the null block (id 0) is neither free nor counted.
    2. free + referenced == N - 1.
    3. Only a full block has content; a content lists exactly the blocks that have it and is found under its hash.
    4. A block is provisional only while the step that fills it is outstanding.
    5. A content's successor has it as its parent, and blocks hold both.
    6. No block with content is handed out while a block without is free; beyond that the eviction policy decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import BlockHash
from kvmanager_service.core.block_history import BlockHistory, BlockMoment
from kvmanager_service.core.content_lookup import ContentLookup
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES
from kvmanager_service.core.pool_checks import check_contents, check_references
from kvmanager_service.core.step_fills import StepFills

NULL_BLOCK_ID = 0


class BlockPool:
    """N blocks, block 0 being the null block.

    Args:
        num_blocks: N, the null block included; at least 2.
        eviction_policy: a name in `EVICTION_POLICIES`: which of the free blocks with content goes first.
        events: told of every change to what committed blocks hold; None tells nobody.
        history: told of what becomes of each block; None tells nobody.

    Attributes:
        lookup: finds what blocks hold.
        num_shared_changes: grows whenever a block that is referenced before and after gets or loses a reference. While
            it stands still, who holds a block can change only by the block's being handed out, hit when free, or freed.
    """

    def __init__(
        self,
        num_blocks: int,
        eviction_policy: str = DEFAULT_EVICTION_POLICY,
        *,
        events: BlockEventLog | None = None,
        history: BlockHistory | None = None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"expected num_blocks of at least 2 (block 0 is the null block), got {num_blocks}")
        if eviction_policy not in EVICTION_POLICIES:
            raise ValueError(
                f"expected eviction_policy to be one of {', '.join(EVICTION_POLICIES)}, got {eviction_policy!r}"
            )
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.free_block_queue = EVICTION_POLICIES[eviction_policy](self.blocks[1:])
        self.cached_block_hash_to_block: dict[BlockHash, BlockContent] = {}
        self.lookup = ContentLookup(self.cached_block_hash_to_block)
        self.num_cached_blocks = 0
        self.num_evictions = 0
        self.num_shared_changes = 0
        self.next_serial = 1
        self._provisional = StepFills()
        self.history = history
        self._events = events
        if events is not None:
            events.cleared()

    @property
    def num_usable_blocks(self) -> int:
        """N - 1: all blocks but the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table references, cached or not."""
        return self.free_block_queue.num_free_blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out the blocks that the eviction policy names next, evicting what they held.

        Raises:
            IndexError: fewer are free; nothing has changed.
        """
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            block.ref_cnt = 1
            if block.content is not None:
                self._uncache(block, BlockMoment.EVICTED)
                self.num_evictions += 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Reference cached blocks once more; those that were free leave the queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            else:
                self.num_shared_changes += 1
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference of each block.

        A block nobody references any more is kept in the eviction policy's order when it is cached, and is handed out
        next when it is not (it holds nothing worth keeping). Pass a table deepest block first, so that the deepest part
        of a prefix is evicted first.

        Raises:
            ValueError: a block has no reference to drop.
        """
        queue = self.free_block_queue
        for block in blocks:
            if block.ref_cnt <= 0:
                raise ValueError(f"expected a referenced block, got {block!r}: freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.content is None:
                    queue.prepend(block)
                else:
                    queue.append(block)
            else:
                self.num_shared_changes += 1

    def note_use(self, blocks: Iterable[KVCacheBlock]) -> None:
        """A request is about to free its table: tell the eviction policy, which may go by how often that happens."""
        self.free_block_queue.note_use(blocks)

    def retain(self, blocks: Iterable[KVCacheBlock], priority: int, duration: float) -> None:
        """It asks for these of its blocks to be kept: tell the eviction policy. See `EvictionPolicy.retain`."""
        self.free_block_queue.retain(blocks, priority, duration)

    def advance(self, now: float) -> None:
        """The time, in seconds that never fall, for durations asked of `retain`. Told before blocks are handed out."""
        self.free_block_queue.advance(now)

    def overwrite(self, block: KVCacheBlock) -> None:
        """The only holder of a block is about to write into it: what it held can not be found there any more."""
        assert block.ref_cnt == 1, f"{block!r} would be written under another table"
        if block.content is not None:
            self._empty(block)

    def cache_full_block(
        self,
        block: KVCacheBlock,
        block_hash: BlockHash,
        parent: BlockContent | None,
        token_bytes: bytes,
        extra_keys: bytes,
        *,
        provisional_step: int = 0,
        owner: int = -1,
        serial: int = 0,
    ) -> BlockContent | None:
        """Make a full block findable; `cache_full_blocks` does it for those of a table.

        Args:
            block: a referenced block without content.
            block_hash: chain hash of the content.
            parent: content of the block before it.
            token_bytes: its tokens.
            extra_keys: its extra keys.
            provisional_step: the step that fills it, or 0 when it is filled already.
            owner: whose step row fills it, for `provisional_blocks_of`.
            serial: the content's, when it had one before; 0 for the next.

        Returns:
            The content, or None when another content has this hash: then the block stays uncached.
        """
        assert block.content is None
        assert block.ref_cnt > 0
        content = BlockContent(serial or self.next_serial, block_hash, parent, token_bytes, extra_keys, block=block)
        known = self.cached_block_hash_to_block.setdefault(block_hash, content)
        if known is content:
            self.next_serial += not serial
        else:
            shared = self._share(known, content, block)
            if shared is None:
                return None
            self.next_serial += shared is content and not serial
            content = shared
        block.content = content
        block.provisional_step = provisional_step
        self._cached([block], [content], provisional_step, owner)
        return content

    def cache_full_blocks(
        self,
        blocks: list[KVCacheBlock],
        contents: list[BlockContent],
        block_hashes: list[BlockHash],
        block_tokens: list[bytes],
        extra_keys: list[bytes],
        *,
        provisional_step: int,
        owner: int,
    ) -> bool:
        """Make a table's next full blocks findable. All arguments but extra_keys begin with its first block.

        Args:
            blocks: the table; those in question are referenced and without content.
            contents: of the blocks before; those of the blocks that are cached now are added.
            block_hashes: their chain hashes.
            block_tokens: their tokens.
            extra_keys: of each block in question its extra keys.
            provisional_step: the step that fills them, or 0 when they are filled already.
            owner: whose step row fills them, for `provisional_blocks_of`.

        Returns:
            False when another content has the hash of one of them: then it and those after it stay uncached.
        """
        first = len(contents)
        parent = contents[-1] if first else None
        known_contents = self.cached_block_hash_to_block
        serial = self.next_serial
        index = first
        for keys in extra_keys:
            block, block_hash = blocks[index], block_hashes[index]
            assert block.content is None
            assert block.ref_cnt > 0
            content = BlockContent(serial, block_hash, parent, block_tokens[index], keys, block=block)
            known = known_contents.setdefault(block_hash, content)
            if known is content:
                serial += 1
            else:
                shared = self._share(known, content, block)
                if shared is None:
                    break
                if shared is content:
                    serial += 1
                content = shared
            block.content = content
            block.provisional_step = provisional_step
            contents.append(content)
            if parent is not None:
                parent.precede(content)
            parent = content
            index += 1
        self.next_serial = serial
        if index > first:
            self._cached(blocks[first:index], contents[first:] if first else contents, provisional_step, owner)
        return index == first + len(extra_keys)

    def _share(self, known: BlockContent, content: BlockContent, block: KVCacheBlock) -> BlockContent | None:
        """Which content a block gets that was made one for, when its hash is known.

        Returns:
            The known one if it is the same; the block's own in place of an orphan; None when it must do without.
        """
        if known.is_orphan:
            self._forget((known,))
            known = self.cached_block_hash_to_block.setdefault(content.block_hash, content)
            if known is content:
                return content
        if not known.is_same(content.parent, content.token_bytes, content.extra_keys):
            return None
        known.held_by(block)
        return known

    def _cached(
        self, blocks: list[KVCacheBlock], contents: list[BlockContent], provisional_step: int, owner: int
    ) -> None:
        """These blocks of one owner have got these contents: count and note it, and tell who wants to know."""
        self.num_cached_blocks += len(blocks)
        if self.history is not None:
            moment = BlockMoment.HASHED if provisional_step else BlockMoment.ADOPTED
            for block, content in zip(blocks, contents, strict=True):
                self.history.note_content(block, content, moment, provisional_step)
        if provisional_step:
            self._provisional.add_row(provisional_step, blocks, contents, owner)
        elif self._events is not None:
            for block, content in zip(blocks, contents, strict=True):
                self._events.stored(block.block_id, content)

    def commit_step(self, step_id: int) -> list[KVCacheBlock]:
        """The step was acknowledged: its blocks are no longer provisional.

        Returns:
            The blocks committed; those evicted since are not among them.
        """
        committed: list[KVCacheBlock] = []
        fill = self._provisional.pop(step_id)
        if fill is None:
            return committed
        events = self._events
        for block, content in zip(fill.blocks, fill.contents, strict=True):
            if block.content is content and block.provisional_step == step_id:
                block.provisional_step = 0
                committed.append(block)
                if events is not None:
                    events.stored(block.block_id, content)
                if self.history is not None:
                    self.history.note_content(block, content, BlockMoment.FILLED, step_id)
        return committed

    def provisional_blocks_of(self, owner: int, first_step: int) -> list[KVCacheBlock]:
        """Blocks that an owner's rows fill in first_step or later, as far as those are outstanding."""
        fills = self._provisional.blocks_of(owner, first_step)
        return [block for block, content in fills if block.content is content]

    def distrust(self, blocks: Iterable[KVCacheBlock]) -> set[KVCacheBlock]:
        """Forget what blocks hold, wherever else it is held, and what outstanding steps compute from it.

        What was computed from it earlier can not be hit any more either: it has no parent.

        Returns:
            All blocks that lost their content.
        """
        distrusted = self._forget({block.content for block in blocks if block.content is not None})
        for block, content in self._provisional.blocks():
            if block.content is content and content.is_orphan:
                distrusted |= self._forget((content,))
        return distrusted

    def _forget(self, contents: Iterable[BlockContent]) -> set[KVCacheBlock]:
        """Un-hash every block that holds one of these. Returns them."""
        blocks = {block for content in contents for block in content.blocks}
        for block in sorted(blocks, key=_block_id):  # in an order that does not depend on where objects lie
            self._empty(block)
        return blocks

    def forget_provisional(self) -> int:
        """Steps were lost: un-hash every provisional block. Returns how many."""
        forgotten = 0
        for block, content in self._provisional.blocks():
            if block.content is content and block.provisional_step:
                self._empty(block)
                forgotten += 1
        self._provisional.clear()
        return forgotten

    def reset_prefix_cache(self) -> list[KVCacheBlock]:
        """Forget every hash. The caller sees to it that no table relies on one. Returns the blocks that lost theirs."""
        forgotten = [block for block in self.blocks if block.content is not None]
        events, self._events = self._events, None
        for block in forgotten:
            self._empty(block)
        self._provisional.clear()
        self._events = events
        if events is not None:
            events.cleared()
        return forgotten

    def dismantle(self) -> None:
        """The pool is not used any more: undo what refers to each other in a circle, so that it is freed at once.

        Else only the garbage collector would free it, which is kept from walking over pools.
        """
        for content in self.cached_block_hash_to_block.values():
            content.parent = content.successor = None  # a chain as long as a prompt would be freed one inside the other
        for block in self.blocks:
            block.prev_free_block = block.next_free_block = block.content = None

    def committed_contents(self) -> list[tuple[int, BlockContent]]:
        """Every block that is filled and can be hit, by block id, with what it holds."""
        return [
            (block.block_id, content)
            for block in self.blocks
            if (content := block.content) is not None and not block.provisional_step
        ]

    def _empty(self, block: KVCacheBlock) -> None:
        """Forget what a block holds; when it is free, it is handed out next."""
        self._uncache(block)
        self.free_block_queue.emptied(block)

    def _uncache(self, block: KVCacheBlock, moment: BlockMoment = BlockMoment.FORGOTTEN) -> None:
        content = block.content
        assert content is not None
        if self.history is not None:
            self.history.note_content(block, content, moment)
        content.left_by(block)
        if content.block is None:
            del self.cached_block_hash_to_block[content.block_hash]
        if self._events is not None and not block.provisional_step:
            self._events.removed(block.block_id, content)
        block.content = None
        block.provisional_step = 0
        self.num_cached_blocks -= 1

    def check_integrity(self, tables: Iterable[Sequence[KVCacheBlock]]) -> None:
        """Check every invariant against the block tables that exist.

        Raises:
            AssertionError: an invariant does not hold; the message names the block.
        """
        check_references(self.blocks, self.free_block_queue, tables)
        check_contents(self.blocks, self.cached_block_hash_to_block, self._provisional, self.num_cached_blocks)


def _block_id(block: KVCacheBlock) -> int:
    return block.block_id
