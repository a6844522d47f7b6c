"""The prefixes of requests, where there are several KV groups: found in the ledger, kept as long as they are needed.

Station: owned by `KVCacheCoordinator`; whoever asks `group_hits` about a request has its prefixes updated here first.
A request's prefixes are its `contents`, one for each `size` tokens, and are the same for all groups.
"""

from __future__ import annotations

from kvmanager_service.core.block_hash import HashFunction, hash_block_tokens
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.prefix_ledger import PrefixLedger
from kvmanager_service.core.request import Request


class GroupPrefixes:
    """Lets requests know their prefixes.

    Args:
        pool: whose contents have prefixes as their parents.
        size: tokens per prefix.
        hash_function: what finds candidates; see `block_hash`.

    Attributes:
        ledger: all prefixes that are known.
    """

    __slots__ = ("_hash_function", "_pool", "_requests", "_size", "ledger")

    def __init__(self, pool: BlockPool, size: int, hash_function: HashFunction) -> None:
        self.ledger = PrefixLedger(pool)
        self._pool = pool
        self._size = size
        self._hash_function = hash_function
        self._requests: dict[int, Request] = {}

    def update(self, request: Request) -> None:
        """Let `contents` be the request's prefixes, as long as its tokens are known."""
        prefixes, hashes, size = request.contents, request.block_hashes, self._size
        if prefixes and prefixes[-1].block is None:
            prefixes.clear()  # they were forgotten
        count = request.num_tokens // size
        if len(prefixes) == count or not request.is_cacheable:
            return
        if self.ledger.needs_sweep:
            self._sweep()
        self.keep(request)
        for index in range(len(prefixes), count):
            parent = prefixes[-1] if prefixes else None
            tokens = request.tokens(index * size, (index + 1) * size)
            extra_keys = request.keys_of_block(index, size)
            if index == len(hashes):
                self._add_hash(request, tokens, extra_keys)
            prefix = self.ledger.extend(parent, hashes[index], tokens, extra_keys)
            if prefix is None:
                request.is_cacheable = False
                return
            prefixes.append(prefix)

    def update_hashes(self, request: Request) -> None:
        """Let only the hashes be known: what names a prefix, whether or not anything has it."""
        size = self._size
        for index in range(len(request.block_hashes), request.num_tokens // size):
            tokens = request.tokens(index * size, (index + 1) * size)
            self._add_hash(request, tokens, request.keys_of_block(index, size))

    def _add_hash(self, request: Request, tokens: bytes, extra_keys: bytes) -> None:
        hashes = request.block_hashes
        hashes.append(hash_block_tokens(self._hash_function, hashes[-1] if hashes else None, tokens, extra_keys))

    def _sweep(self) -> None:
        needed = {block.content.serial for block in self._pool.blocks if block.content is not None}
        for request in self._requests.values():
            if request.contents:
                needed.add(request.contents[-1].serial)
        self.ledger.sweep(needed)

    def keep(self, request: Request) -> None:
        """Its prefixes are needed until `drop`, whether or not a block ends at one."""
        self._requests[request.arrival_seq] = request

    def drop(self, request: Request) -> None:
        """Nobody asks for what this request would hit any more."""
        self._requests.pop(request.arrival_seq, None)

    def forget(self, serials: set[int]) -> None:
        """What has these serials is in doubt: see `PrefixLedger.forget`."""
        self.ledger.forget(serials)
