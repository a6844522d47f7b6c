"""What each attention type needs of a block table: one small object per KV group.

Station: a model's groups are what its executor says (`executor_groups`), used by `KVCacheCoordinator`. A group is a set
of layers with one block table per request; entry i speaks of the tokens [i * block_size, (i + 1) * block_size). It
knows no pool.

All types differ in one thing, how far back the next token reads:

    type             the token at c reads              worked example, block_size 4, c = 18
    FullAttention    [0, c]                            entries 0-4
    SlidingWindow    [c - window + 1, c]               window 8: tokens 11-18, entries 2-4; 0 and 1 are null
    ChunkedLocal     [its chunk's first token, c]      chunk 16: tokens 16-18, entry 4; 0-3 are null
    RecurrentState   the state after token c - 1       entry 4 in place; at c = 20 it reads 4 and writes 5

Everything else follows. Entries before the first one needed are the null block; a block that falls behind it goes back
to the pool, cached. A prefix of L tokens is a hit when the entries that token L reads are cached, whatever was before.

A recurrent state (Mamba, linear attention) is a block whose content is the state at the block's end, or at the newest
token of the running block. A row that computes [c, n) starts from entry (c - 1) // block_size and leaves the state in
every entry of [c // block_size, (n - 1) // block_size]. So a full block is a checkpoint, the group's block_size is the
interval between checkpoints, and resuming from one copies nothing: its successor is written to another block, and
nobody ever writes to a checkpoint that others share.

Source for what each type needs of a prefix: the design notes of vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Final

from kvmanager_service.core.block import KVCacheBlock

NEVER: Final = 1 << 62
"""More tokens than there are."""

TableEntry = tuple[int, int]
"""A KV group, and an index into its tables; where there is one group only, group 0."""

HitLookup = Callable[[int], KVCacheBlock | None]
"""From a table index to a block that is cached for it, None when there is none."""


class KVGroup:
    """One attention type with its sizes; abstract.

    Not an `ABC`: instances of one that mypyc compiled can be weakly referenced, and die without telling so.

    Attributes:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"expected block_size of at least 1, got {block_size}")
        self.block_size = block_size

    @property
    def can_share_within_step(self) -> bool:
        """Whether a row may read a block that another row of the same step fills: K/V is written before it is read."""
        return True

    @property
    @abstractmethod
    def reach(self) -> int | None:
        """Most tokens before the next one that it reads; None when there is no such limit."""

    @abstractmethod
    def first_needed_token(self, num_computed: int) -> int:
        """The first position that the token at num_computed, or any after it, reads; at most num_computed."""

    def first_needed_block(self, num_computed: int) -> int:
        """The first table index needed from now on; those before it may be null."""
        return self.first_needed_token(num_computed) // self.block_size

    @abstractmethod
    def needed_until(self, position: int) -> int:
        """The smallest num_computed whose token, like all after it, reads nothing before `position`, which is not 0."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Table length for num_tokens tokens, null blocks included."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, longest_chunk: int) -> int:
        """Most blocks a request holds at any time on its way to num_tokens, in rows of at most longest_chunk tokens.

        Of m tokens in a row, ceil((m - 1) / block_size) + 1 blocks hold at least one.
        """
        length = self.num_blocks_for(num_tokens)
        if self.reach is None:
            return length
        return min(length, -(-(self.reach + longest_chunk - 1) // self.block_size) + 1)

    def can_fork(self, num_tokens: int, num_computed: int) -> bool:
        """Whether a table that was filled up to num_computed also serves a sequence of its first num_tokens tokens."""
        return True

    def table_end(self, num_computed: int, num_tokens: int, longest_chunk: int) -> int:
        """Table length that lets num_tokens be reached without more blocks than `most_blocks`.

        A table with a window is as long as a row of longest_chunk tokens can need from here, not longer.
        """
        most = self.most_blocks(num_tokens, longest_chunk)
        return min(self.num_blocks_for(num_tokens), self.first_needed_block(num_computed) + most)

    def longest_hit(self, cached: HitLookup, limit: int, alignment: int) -> int:
        """The longest prefix, in tokens, from which a request can go on.

        Args:
            cached: the cached blocks of the request's prefix.
            limit: most tokens, a multiple of alignment.
            alignment: a multiple of block_size; so is the result.
        """
        size = self.block_size
        length = limit
        while length > 0:
            first = self.first_needed_block(length)
            for index in range(length // size - 1, first - 1, -1):
                if cached(index) is None:  # every shorter prefix that reaches beyond it reads it, too
                    length = index * size // alignment * alignment
                    break
            else:
                return length
        return 0


class FullAttention(KVGroup):
    """Every token reads all before it."""

    @property
    def reach(self) -> int | None:
        """No limit."""
        return None

    def first_needed_token(self, num_computed: int) -> int:
        """The first of all."""
        return 0

    def needed_until(self, position: int) -> int:
        """There is none."""
        return NEVER

    def longest_hit(self, cached: HitLookup, limit: int, alignment: int) -> int:
        """Up to the first miss."""
        for index in range(limit // self.block_size):
            if cached(index) is None:
                return index * self.block_size // alignment * alignment
        return limit


class SlidingWindow(KVGroup):
    """A token reads itself and the window - 1 tokens before it."""

    def __init__(self, block_size: int, window: int) -> None:
        super().__init__(block_size)
        if window < 1:
            raise ValueError(f"expected window of at least 1 token, got {window}")
        self.window = window

    @property
    def reach(self) -> int | None:
        """The window without the token itself."""
        return self.window - 1

    def first_needed_token(self, num_computed: int) -> int:
        """The window's first."""
        return max(0, num_computed - self.window + 1)

    def needed_until(self, position: int) -> int:
        """Where the window begins at position."""
        return position + self.window - 1


class ChunkedLocal(KVGroup):
    """A token reads its own chunk up to itself; chunks start at the multiples of their size."""

    def __init__(self, block_size: int, chunk: int) -> None:
        super().__init__(block_size)
        if chunk < 1:
            raise ValueError(f"expected chunk of at least 1 token, got {chunk}")
        self.chunk = chunk

    @property
    def reach(self) -> int | None:
        """All of a chunk but its last token."""
        return self.chunk - 1

    def first_needed_token(self, num_computed: int) -> int:
        """The chunk's first: at a chunk's start nothing before is needed."""
        return num_computed - num_computed % self.chunk

    def needed_until(self, position: int) -> int:
        """The first chunk that begins there or later."""
        return -(-position // self.chunk) * self.chunk


class RecurrentState(KVGroup):
    """A token reads the state after the one before it; block_size is the interval between checkpoints."""

    @property
    def can_share_within_step(self) -> bool:
        """No: all rows of a layer start from their states at once."""
        return False

    def can_fork(self, num_tokens: int, num_computed: int) -> bool:
        """Only at a checkpoint, or where it stands: the states between are overwritten."""
        return num_tokens == num_computed or num_tokens % self.block_size == 0

    @property
    def reach(self) -> int | None:
        """The state's own token."""
        return 1

    def first_needed_token(self, num_computed: int) -> int:
        """The newest: the state is after it."""
        return max(0, num_computed - 1)

    def needed_until(self, position: int) -> int:
        """When the state is after the token at position."""
        return position + 1


class GroupTable:
    """One request's block table in one group.

    Args:
        group: the group.
        null_block: stands where no block is needed.
        first: how many entries are null at first.

    Attributes:
        blocks: one per block_size tokens; the null block where none is needed any more.
        block_id_bytes: their ids as on the wire, little-endian int32.
        first: index of the first entry that is not null.
        num_cached: entries that have become findable, were hits, or are null.
        room: tokens that the table is long enough for.
        needed_until: num_computed from which the first entry is not needed any more.
        full_at: tokens that fill the first block that is not findable yet.
    """

    __slots__ = (
        "_block_size",
        "_group",
        "_null_block",
        "block_id_bytes",
        "blocks",
        "first",
        "full_at",
        "needed_until",
        "num_cached",
        "room",
    )

    def __init__(self, group: KVGroup, null_block: KVCacheBlock, first: int = 0) -> None:
        self._group = group
        self._block_size = group.block_size
        self._null_block = null_block
        self.blocks: list[KVCacheBlock] = []
        self.block_id_bytes = bytearray()
        self.extend([null_block] * first)
        self.first = 0
        self.leave(first)
        self.cached_to(first)

    def extend(self, blocks: list[KVCacheBlock]) -> None:
        """Add entries at the end."""
        self.blocks += blocks
        for block in blocks:
            self.block_id_bytes += block.block_id.to_bytes(4, "little")
        self.room = len(self.blocks) * self._block_size

    def replace(self, index: int, block: KVCacheBlock) -> None:
        """Put another block in an entry's place."""
        self.blocks[index] = block
        self.block_id_bytes[index * 4 : index * 4 + 4] = block.block_id.to_bytes(4, "little")

    def leave(self, first: int) -> None:
        """Make null all entries before `first`, which is within the table; the caller frees their blocks."""
        for index in range(self.first, first):
            self.replace(index, self._null_block)
        self.first = first
        self.needed_until = self._group.needed_until((first + 1) * self._block_size)

    def cached_to(self, num_cached: int) -> None:
        """The first num_cached entries need not be made findable any more."""
        self.num_cached = num_cached
        self.full_at = (num_cached + 1) * self._block_size
