"""How many tokens of K and V rows read where not every layer reads all of them.

Station: made once for a model's KV groups; `cost_model` asks it for every step, in a replay and in a calibration alike,
so that a term that was measured on groups means the same when a replay reckons with it.

A row that computes the tokens [start, stop) reads, in a layer of

    full attention     [0, stop)
    a window, a chunk  from the first token that the one at start reads
    a state            no K and V: one state, however long the sequence is; its time is the row's, or its tokens'

What a row reads is the mean over layers. So a token of context costs the same in any layer, and a model half of whose
layers have a window costs half as much for what only the others read.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow

__all__ = ["GroupReads"]


class GroupReads:
    """What rows read of a model's groups.

    Args:
        groups: at least one.
        num_layers: of each group; empty: as many in each.

    Attributes:
        has_kv: whether any layer keeps K and V.
        is_full: whether all layers read everything.
        tokens_per_block: tokens that a block has room for, were it all layers': blocks are one group's, and as large
            for each.
    """

    def __init__(self, groups: Sequence[KVGroup], num_layers: Sequence[int] = ()) -> None:
        layers = list(num_layers) or [1] * len(groups)
        total = sum(layers)
        shares: dict[tuple[type[KVGroup], int | None], float] = {}
        by_kind: dict[tuple[type[KVGroup], int | None], KVGroup] = {}
        for group, count in zip(groups, layers, strict=True):
            kind = (type(group), group.reach)
            shares[kind] = shares.get(kind, 0.0) + count / total
            by_kind[kind] = group
        # Layers that read alike are one.
        self._readers = [(by_kind[kind], share) for kind, share in shares.items() if kind[0] is not RecurrentState]
        self.has_kv = bool(self._readers)
        self.is_full = all(isinstance(group, FullAttention) for group in groups)
        self.tokens_per_block = 1 / sum(1 / group.block_size for group in groups)

    @classmethod
    def of(cls, kv: KVCache, num_layers: Sequence[int] = ()) -> GroupReads:
        """Those of the groups that a scheduler works on."""
        return cls(kv.groups if isinstance(kv, KVCacheCoordinator) else [FullAttention(kv.block_size)], num_layers)

    def context(self, start: int, stop: int) -> float:
        """Tokens of K and V that a row of the tokens [start, stop) reads, its own included."""
        return sum(share * (stop - group.first_needed_token(start)) for group, share in self._readers)

    def pairs(self, start: int, stop: int) -> float:
        """Pairs of one of these tokens and one that it attends to, itself included."""
        return sum(share * (_pairs(group, stop) - _pairs(group, start)) for group, share in self._readers)


def _pairs(group: KVGroup, num_tokens: int) -> int:
    """Pairs of all tokens before a position."""
    if isinstance(group, SlidingWindow):
        growing = min(num_tokens, group.window)
        return growing * (growing + 1) // 2 + (num_tokens - growing) * group.window
    if isinstance(group, ChunkedLocal):
        chunks, rest = divmod(num_tokens, group.chunk)
        return chunks * (group.chunk * (group.chunk + 1) // 2) + rest * (rest + 1) // 2
    return num_tokens * (num_tokens + 1) // 2
