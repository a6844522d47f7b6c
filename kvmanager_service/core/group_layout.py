"""From a model's layers to KV groups whose blocks all take the same bytes.

Station: pure arithmetic, called once, when a model's layers are known; its groups go to `kv_cache_coordinator`. It
knows no block and no request.

One pool serves all groups, so every block must be the same bytes, whichever group it goes to:

    block bytes = layers per group × page bytes;    page = what one layer keeps in one block

Pages are made equal: a layer with fewer bytes per token gets more tokens per block; a recurrent state, which has one
size only, is padded, and attention gets more tokens per block when a state is larger than its page. Groups are made
equal: all have the same number of layers, and those that are short of one leave its page unused.

Worked examples (block_size 16, two bytes per number):

    Gemma 3 1B: 4 full layers, 22 sliding ones, 1 KV head of 256
        page 16 × 1,024 bytes; groups of 4: one full, six sliding, of which the last leaves 2 pages unused
    4 layers of 8 KV heads of 128, 4 of 4 of them, window 1,024
        4,096 and 2,048 bytes per token: blocks of 16 and 32 tokens, page 65,536 bytes, nothing unused
    Jamba-like: 4 full layers of 8 heads of 128, 28 states of 300,000 bytes
        page 74 × 4,096 = 303,104 bytes: blocks of 74 tokens, a checkpoint each 518; each state is padded by 3,104 bytes

Source for equal pages by tokens, padding and equal layer counts: the design notes of vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final

from kvmanager_service.core.errors import GroupLayoutError
from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow

__all__ = ["AttentionKind", "GroupLayout", "GroupLayoutError", "GroupSpec", "LayerSpec", "plan_groups"]


UNUSED_FULL_PAGE: Final = 4
"""An unused page of full attention counts as this many others: its tables are by far the longest."""


class AttentionKind(enum.Enum):
    """What a layer keeps of the tokens before."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT_STATE = "recurrent_state"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer, as its model's configuration has it.

    Attributes:
        name: unique in the model.
        kind: its attention type.
        num_kv_heads, head_dim, dtype_bytes: of its K and of its V; not of a state.
        span: tokens of a sliding window or of a local chunk; 0 for the other kinds.
        state_bytes: bytes of a recurrent state; 0 for attention.
        shares_with: an earlier layer of the same kind and sizes whose cache this one reads; it keeps none of its own.
    """

    name: str
    kind: AttentionKind = AttentionKind.FULL
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype_bytes: int = 2
    span: int = 0
    state_bytes: int = 0
    shares_with: str = ""

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token; 0 for a recurrent state."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers with one block table.

    Attributes:
        kind, span: those of its layers.
        block_size: tokens per block; of a state, tokens between checkpoints.
        layers: names of the layers that have a page in its blocks, in model order: layer i has page i of each block.
        readers: pairs of a layer that has none and the layer of this group whose pages it reads.
        page_padding_bytes: bytes of each page that no layer uses.
    """

    kind: AttentionKind
    span: int
    block_size: int
    layers: tuple[str, ...]
    readers: tuple[tuple[str, str], ...]
    page_padding_bytes: int

    def make_group(self) -> KVGroup:
        """What `KVCacheCoordinator` needs of it."""
        match self.kind:
            case AttentionKind.FULL:
                return FullAttention(self.block_size)
            case AttentionKind.SLIDING_WINDOW:
                return SlidingWindow(self.block_size, self.span)
            case AttentionKind.CHUNKED_LOCAL:
                return ChunkedLocal(self.block_size, self.span)
            case AttentionKind.RECURRENT_STATE:
                return RecurrentState(self.block_size)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """All groups of a model, those of full attention first.

    Attributes:
        page_bytes: what one layer has in one block, padding included.
        layers_per_group: pages of each block.
    """

    groups: tuple[GroupSpec, ...]
    page_bytes: int
    layers_per_group: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, in whichever group."""
        return self.page_bytes * self.layers_per_group

    @property
    def padding_bytes(self) -> int:
        """Bytes that no layer uses, summed over one block of each group: padded pages, and pages of no layer."""
        return sum(
            len(group.layers) * group.page_padding_bytes + (self.layers_per_group - len(group.layers)) * self.page_bytes
            for group in self.groups
        )


def plan_groups(
    layers: Sequence[LayerSpec], *, block_size: int = 16, checkpoint_interval: int = 512, max_block_size: int = 1024
) -> GroupLayout:
    """Sort layers into groups and make their blocks equal.

    Args:
        layers: in model order.
        block_size: tokens per block that the layers with most bytes per token get at least.
        checkpoint_interval: least tokens between checkpoints of a state; rounded up to a multiple of all attention
            block sizes, for a hit is a multiple of both.
        max_block_size: most tokens per block of attention.

    Raises:
        GroupLayoutError: a layer contradicts itself or the one it shares with, or pages cannot be made equal.
    """
    if block_size < 1 or checkpoint_interval < 1:
        raise GroupLayoutError(
            f"expected block_size and checkpoint_interval of at least 1 token, got {block_size} and "
            f"{checkpoint_interval}"
        )
    owners = _owners(layers)
    alike: dict[tuple[AttentionKind, int, int, int], list[LayerSpec]] = {}
    for layer in layers:
        if owners[layer.name] == layer.name:
            key = (layer.kind, layer.span, layer.bytes_per_token, layer.state_bytes)
            alike.setdefault(key, []).append(layer)
    token_bytes = {layer.bytes_per_token for layer in layers if layer.bytes_per_token}
    state_bytes = max(layer.state_bytes for layer in layers)
    page_bytes = _page_bytes(token_bytes, state_bytes, block_size, max_block_size)
    alignment = lcm(*(page_bytes // size for size in token_bytes))
    interval = -(-checkpoint_interval // alignment) * alignment
    layers_per_group = _layers_per_group(
        [(len(group), key[0] is AttentionKind.FULL) for key, group in alike.items()],
    )
    groups = []
    for (kind, span, per_token, state), group in sorted(alike.items(), key=_full_first):
        for start in range(0, len(group), layers_per_group):
            names = tuple(layer.name for layer in group[start : start + layers_per_group])
            groups.append(
                GroupSpec(
                    kind=kind,
                    span=span,
                    block_size=page_bytes // per_token if per_token else interval,
                    layers=names,
                    readers=tuple(
                        (reader, owner) for reader, owner in owners.items() if owner in names and reader != owner
                    ),
                    page_padding_bytes=0 if per_token else page_bytes - state,
                )
            )
    return GroupLayout(tuple(groups), page_bytes, layers_per_group)


def _owners(layers: Iterable[LayerSpec]) -> dict[str, str]:
    """By layer, the one whose cache it reads, itself in most cases. Checks every layer."""
    owners: dict[str, str] = {}
    known: dict[str, LayerSpec] = {}
    for layer in layers:
        if layer.name in known:
            raise GroupLayoutError(f"expected every layer to have a name of its own, got {layer.name!r} twice")
        _check(layer)
        known[layer.name] = layer
        if not layer.shares_with:
            owners[layer.name] = layer.name
            continue
        source = known.get(layer.shares_with)
        if source is None or source is layer:
            raise GroupLayoutError(
                f"expected layer {layer.name!r} to share with an earlier layer, got {layer.shares_with!r}; a layer can "
                "only read what was written before it in the same step"
            )
        if (source.kind, source.span, source.num_kv_heads, source.head_dim, source.dtype_bytes) != (
            layer.kind,
            layer.span,
            layer.num_kv_heads,
            layer.head_dim,
            layer.dtype_bytes,
        ):
            raise GroupLayoutError(
                f"expected layer {layer.name!r} to be like {source.name!r}, whose cache it reads, got {layer} and "
                f"{source}; give it a cache of its own"
            )
        owners[layer.name] = owners[source.name]
    if not owners:
        raise GroupLayoutError("expected at least one layer, got none")
    return owners


def _check(layer: LayerSpec) -> None:
    is_state = layer.kind is AttentionKind.RECURRENT_STATE
    if is_state and layer.shares_with:
        raise GroupLayoutError(f"expected {layer.name!r} to have a state of its own, got one of {layer.shares_with!r}")
    if is_state != (layer.state_bytes > 0) or is_state == (layer.bytes_per_token > 0):
        raise GroupLayoutError(
            f"expected {layer.name!r} to have " + ("state_bytes" if is_state else "KV heads") + f" only, got {layer}"
        )
    if (layer.span > 0) != (layer.kind in (AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)):
        raise GroupLayoutError(f"expected a span of a sliding window or a local chunk, and of no other, got {layer}")


def _page_bytes(token_bytes: set[int], state_bytes: int, block_size: int, max_block_size: int) -> int:
    """Bytes of a page that is whole tokens of every attention layer and holds every state."""
    if not token_bytes:
        return state_bytes
    unit = lcm(*token_bytes)
    least = max(block_size * max(token_bytes), state_bytes)
    page_bytes = -(-least // unit) * unit
    longest = page_bytes // min(token_bytes)
    if longest > max_block_size:
        reason = (
            f"a state of {state_bytes} bytes"
            if state_bytes == least
            else f"layers with {', '.join(str(size) for size in sorted(token_bytes))} bytes per token"
        )
        raise GroupLayoutError(
            f"expected equal pages with at most {max_block_size} tokens per block, got {longest} tokens in pages of "
            f"{page_bytes} bytes, for {reason}; raise max_block_size to {longest}, or choose another dtype for the "
            "state or for K and V"
        )
    return page_bytes


def _layers_per_group(counts: list[tuple[int, bool]]) -> int:
    """The number that leaves least unused: a page of no layer is memory, and every group is a table per request.

    Args:
        counts: how many layers are alike, and whether they are of full attention.
    """
    costs = {}
    for size in range(1, max(count for count, _ in counts) + 1):
        num_groups = cost = 0
        for count, is_full in counts:
            needed = -(-count // size)
            num_groups += needed
            cost += (needed * size - count) * (UNUSED_FULL_PAGE if is_full else 1) + needed
        costs[size] = (cost, num_groups)
    return min(costs, key=costs.__getitem__)


def _full_first(item: tuple[tuple[AttentionKind, int, int, int], list[LayerSpec]]) -> bool:
    return item[0][0] is not AttentionKind.FULL
