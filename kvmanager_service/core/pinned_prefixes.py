"""Prefixes that stay in the cache for as long as somebody wants them to, such as a system prompt.

Station: owned by `Residency`, which says when there may be something to hold; calls `KVCacheManager`, or
`KVCacheCoordinator`, and its pool.

A pin is an intent, and outlives every cache: it names a prefix, and holds those of its blocks that are filled, from
the first on. It computes nothing. What it lacks it takes once a request has computed it: after each step a pin looks
for the next block that it lacks. A block that a pin holds is referenced, so no policy can hand it out.

Where there are several KV groups, it names the blocks of each that a request goes on from at the prefix's end: of full
attention all, of a window those that it reads there. They are in order of depth: a block that ends later comes later,
of whichever group it is. So what a pin holds is always the beginning of what it names.

    pin ─▶ lacking ─hold: a request computed it▶ held ─▶ unpin
              ▲                                   │
              └── another cache, a reset, a failed row, or make_room

Pins stand back before a request ends for want of blocks: a request that is alone and does not find enough takes what
only pins hold, the newest pin's deepest blocks first, and nothing that would not help it (`make_room`). So what fits
the pool without pins fits it with them, and `pool_limit` need not know of pins.

Nobody writes to a block that a pin holds: to who is about to, the pin is like another table (see `KVCacheManager`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import BlockHash
from kvmanager_service.core.errors import DuplicatePinError, InvalidRequestError, PinLimitError, UnknownPinError
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_groups import TableEntry
from kvmanager_service.core.request import TOKEN_BYTES, NewRequest, Request, StopRules

MAX_PINS: Final = 256
"""Each that lacks a block looks for it after every step."""


class PinnedPrefix:
    """One pin.

    Attributes:
        name: the pin's.
        token_bytes: the prefix, little-endian int32.
        extra_keys: what of a request as a whole decides its K/V, as in `Request`.
        request: one that never runs: the cache is asked what it would hit.
        entries: of that request's tables in the present cache, those that are pinned, in order of depth. They are of
            full blocks, up to the longest hit there can be of the prefix; what is left over is not pinned.
        block_hashes: their chain hashes.
        blocks: those it holds, from the first on.
        contents: what they hold.
    """

    __slots__ = ("block_hashes", "blocks", "contents", "entries", "extra_keys", "name", "request", "token_bytes")

    def __init__(self, name: str, token_bytes: bytes, extra_keys: bytes = b"") -> None:
        self.name = name
        self.token_bytes = token_bytes
        self.extra_keys = extra_keys
        self.request = Request(NewRequest(name, token_bytes, StopRules(max_tokens=1)), arrival_seq=0)
        self.request.extra_keys = extra_keys
        self.entries: list[TableEntry] = []
        self.block_hashes: list[BlockHash] = []
        self.blocks: list[KVCacheBlock] = []
        self.contents: list[BlockContent] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def lacks_blocks(self) -> bool:
        """Whether it holds fewer blocks than it names."""
        return len(self.blocks) < len(self.block_hashes)

    def is_same(self, other: PinnedPrefix) -> bool:
        """Whether the other pins the same prefix."""
        return self.token_bytes == other.token_bytes and self.extra_keys == other.extra_keys


class PinnedPrefixes:
    """All pins over one cache.

    Args:
        max_fraction: share of the pool's blocks that pins may name, those that several name counted once.

    Invariants (`tables` is for `check_integrity` to count):
        Each block in a pin's list is referenced once for it, holds the content listed and is filled; all pins together
        hold no more blocks than `limit`.
    """

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._pins: dict[str, PinnedPrefix] = {}
        self._holders: dict[int, int] = {}  # block id -> how many pins hold it
        self._kv: KVCache | None = None
        self._next_seq = -1

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[PinnedPrefix]:
        """In the order they were pinned."""
        return iter(list(self._pins.values()))

    @property
    def limit(self) -> int:
        """Most blocks of the present cache that pins may name."""
        return 0 if self._kv is None else int(self._max_fraction * self._kv.pool.num_usable_blocks)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that pins hold."""
        return len(self._holders)

    def tables(self) -> list[list[KVCacheBlock]]:
        """What each pin holds: one reference for each entry."""
        return [pin.blocks for pin in self._pins.values()]

    def references(self) -> dict[KVCacheBlock, int]:
        """How many pins hold a block, by block."""
        return {block: self._holders[block.block_id] for pin in self._pins.values() for block in pin.blocks}

    # --- pins come and go -----------------------------------------------------------------------------------------

    def pin(self, pin: PinnedPrefix) -> PinnedPrefix:
        """Pin a prefix, and hold what is filled of it. Pinning the same under the same name again changes nothing.

        Returns:
            The pin that stands.

        Raises:
            DuplicatePinError: the name pins another prefix.
            InvalidRequestError: the prefix is shorter than any hit.
            PinLimitError: there are too many pins, or they would name too many blocks.
        """
        standing = self._pins.get(pin.name)
        if standing is not None:
            if standing.is_same(pin):
                return standing
            raise DuplicatePinError(
                "PIN_NAME_IN_USE",
                f"expected a name that pins nothing or the same prefix, got {pin.name!r}, which pins another; unpin it "
                "or choose another name",
                name=pin.name,
            )
        if len(self._pins) >= MAX_PINS:
            raise PinLimitError(
                "PIN_LIMIT", f"expected fewer than {MAX_PINS} pins, got {len(self._pins)}; unpin one", max_pins=MAX_PINS
            )
        pin.request.arrival_seq = self._next_seq  # that of no other, and of no request that runs
        if self._kv is not None:
            self._set_names(pin, self._kv)
            if not pin.entries:
                raise InvalidRequestError(
                    "PIN_TOO_SHORT",
                    f"expected a prefix of at least {self._kv.block_size} tokens, the shortest that can be hit, got "
                    f"{pin.num_tokens}; pin more of it",
                    block_size=self._kv.block_size,
                    num_tokens=pin.num_tokens,
                )
            self._require_limit(pin)
        self._next_seq -= 1
        self._pins[pin.name] = pin
        self.hold()
        return pin

    def unpin(self, name: str) -> None:
        """Let go of a prefix; its blocks stay cached until they are evicted. Raises UnknownPinError."""
        pin = self._pins.pop(name, None)
        if pin is None:
            raise UnknownPinError(
                "PIN_NOT_FOUND",
                f"expected the name of a pin, got {name!r}; `kvplane pins` lists them",
                name=name,
            )
        self._let_go(pin, 0)
        if self._kv is not None:
            self._kv.forget_request(pin.request)

    def _require_limit(self, pin: PinnedPrefix) -> None:
        named = {block_hash for other in self._pins.values() for block_hash in other.block_hashes}
        num_named = len(named.union(pin.block_hashes))
        if num_named > self.limit:
            raise PinLimitError(
                "PIN_LIMIT",
                f"expected pins to name at most {self.limit} blocks in all, got {num_named} with this one's "
                f"{len(pin.block_hashes)}; unpin another, pin less of the prefix, or raise --max-pinned-fraction",
                limit=self.limit,
                num_blocks=num_named,
            )

    # --- blocks are held ------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Take what has been filled of what pins lack, as far as the limit goes. O(1) for each pin that lacks any."""
        kv = self._kv
        if kv is None:
            return
        for pin in self._pins.values():
            while pin.lacks_blocks and (block := _next_block(pin, kv)) is not None:
                if block.block_id not in self._holders and len(self._holders) >= self.limit:
                    break
                assert block.content is not None
                kv.pool.touch((block,))
                self._holders[block.block_id] = self._holders.get(block.block_id, 0) + 1
                pin.blocks.append(block)
                pin.contents.append(block.content)

    def make_room(self, request: Request, num_tokens: int) -> bool:
        """Stand back for a request that is alone: let go of what it lacks for its first num_tokens tokens.

        Returns:
            Whether it finds enough now. If all that pins can give is too little, they keep what they hold; and those
            that cannot help keep it in any case.
        """
        kv = self._kv
        if kv is None or not self._holders:
            return False
        num_lacking = kv.num_lacking(request, num_tokens)
        helpful = self._helpful_blocks(request, kv) if num_lacking else set()
        if num_lacking > len(helpful):
            return False
        # For each pin, newest first, where its helpful blocks are, the deepest last.
        places = [
            (pin, [index for index, block in enumerate(pin.blocks) if block in helpful])
            for pin in reversed(list(self._pins.values()))
        ]
        for _ in range(num_lacking):
            self._let_go_of_one(places)
        return not kv.num_lacking(request, num_tokens)

    def num_helpful(self, request: Request) -> int:
        """Blocks that pins could let go of so that each makes up for one that a request lacks."""
        return 0 if self._kv is None else len(self._helpful_blocks(request, self._kv))

    def _helpful_blocks(self, request: Request, kv: KVCache) -> set[KVCacheBlock]:
        """Blocks of which each makes up for one that the request lacks, once no pin holds it any more.

        Those that pins alone hold, but for what the request hits: that would be a free block, and one more for it. And
        those of its own that it could do without, if only pins hold them, too: see `reusable_blocks`.
        """
        is_running = bool(request.blocks or request.tables)
        hits = set() if is_running else kv.hit_blocks(request)
        helpful = {
            block
            for pin in self._pins.values()
            for block in pin.blocks
            if block.ref_cnt == self._holders[block.block_id] and block not in hits
        }
        for block in kv.reusable_blocks(request) if is_running else ():
            num_holders = self._holders.get(block.block_id, 0)
            if num_holders and block.ref_cnt == num_holders + 1:
                helpful.add(block)
        return helpful

    def _let_go_of_one(self, places: list[tuple[PinnedPrefix, list[int]]]) -> None:
        """Let go of one helpful block: of the newest pin that has one with no other behind it, in whichever pin.

        There is one: all pins hold their blocks in the same order, so the deepest of all is such a block.
        """
        ends: dict[KVCacheBlock, list[tuple[PinnedPrefix, list[int]]]] = {}
        for pin, indices in places:
            if indices:
                ends.setdefault(pin.blocks[indices[-1]], []).append((pin, indices))
        holders = next(pins for block, pins in ends.items() if len(pins) == self._holders[block.block_id])
        for pin, indices in holders:
            self._let_go(pin, indices.pop())

    def _let_go(self, pin: PinnedPrefix, first: int) -> None:
        """Drop a pin's references from its block `first` on, the deepest first."""
        assert self._kv is not None or not pin.blocks
        for block in reversed(pin.blocks[first:]):
            if self._holders[block.block_id] == 1:
                del self._holders[block.block_id]
            else:
                self._holders[block.block_id] -= 1
        if self._kv is not None:
            self._kv.pool.free_blocks(reversed(pin.blocks[first:]))
        del pin.blocks[first:]
        del pin.contents[first:]

    # --- the cache changes ----------------------------------------------------------------------------------------

    def attach(self, kv: KVCache) -> None:
        """Another cache takes the place of the last: whatever was held is gone with that."""
        self._kv = kv
        self._holders = {}
        for pin in self._pins.values():
            pin.blocks, pin.contents = [], []
            self._set_names(pin, kv)
        self.hold()

    def forget(self) -> None:
        """The cache is about to forget all content: hold nothing."""
        for pin in self._pins.values():
            self._let_go(pin, 0)

    def distrusted(self) -> None:
        """Blocks have lost their content: let go of those, and of what was computed from them."""
        for pin in self._pins.values():
            for index, (block, content) in enumerate(zip(pin.blocks, pin.contents, strict=True)):
                if block.content is not content or content.is_orphan:
                    self._let_go(pin, index)
                    break

    @staticmethod
    def _set_names(pin: PinnedPrefix, kv: KVCache) -> None:
        request = pin.request
        request.drop_hashes()
        request.contents = []
        num_tokens = pin.num_tokens // kv.block_size * kv.block_size
        pin.entries = kv.entries(num_tokens) if kv.enable_caching else []
        pin.block_hashes = [kv.name_of(request, entry) for entry in pin.entries]


def _next_block(pin: PinnedPrefix, kv: KVCache) -> KVCacheBlock | None:
    """The filled block that comes after those a pin holds, if there is one."""
    before = pin.contents[-1] if pin.contents else None
    return kv.filled_block(pin.request, pin.entries[len(pin.blocks)], before)
