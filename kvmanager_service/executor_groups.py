"""An executor's KV groups as the core has them: which there can be books for, and how long a sequence they can hold.

Station: called by `executor_checks` before an executor is used and by `step_loop` when it is. Pure; it knows what a
group looks like on the wire, and no connection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import lcm

from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow

__all__ = ["MAX_GROUPS", "UnsupportedGroupsError", "longest_fit", "read_groups", "shortest_hit"]

MAX_GROUPS = 64
"""A step carries a table per group and row; no model comes near."""

_MAX_INT32 = 2**31 - 1


class UnsupportedGroupsError(ValueError):
    """There can be no books for these groups; the message says expected and got."""


def read_groups(kv_groups: Sequence[pb.KvGroup], block_size: int) -> list[KVGroup]:
    """The core's groups, in the executor's order.

    Args:
        kv_groups: `GetModelInfoResponse.kv_groups`.
        block_size: tokens per block, at least 1, of groups that have no block size of their own.

    Raises:
        UnsupportedGroupsError: none, too many, one of a type, window, chunk or block size that the core does not
            know, or block sizes whose least common multiple, which is told as `PoolStats.block_size`, is no int32.
    """
    if not 1 <= len(kv_groups) <= MAX_GROUPS:
        raise UnsupportedGroupsError(f"1 to {MAX_GROUPS} groups, got {len(kv_groups)}")
    groups = [_read_group(index, group, block_size) for index, group in enumerate(kv_groups)]
    if (multiple := shortest_hit(groups)) > _MAX_INT32:
        sizes = ", ".join(str(size) for size in sorted({group.block_size for group in groups}))
        raise UnsupportedGroupsError(
            f"block sizes with a common multiple of at most {_MAX_INT32}, got {sizes}, whose least is {multiple}"
        )
    return groups


def shortest_hit(groups: Sequence[KVGroup]) -> int:
    """Tokens that every hit is a multiple of: the least common multiple of the groups' block sizes."""
    return lcm(*(group.block_size for group in groups))


def _read_group(index: int, group: pb.KvGroup, default_block_size: int) -> KVGroup:
    window, chunk = group.window, group.chunk
    if group.block_size < 0:
        raise UnsupportedGroupsError(
            f"a block_size of at least 1 token, or 0 for the executor's, got group {index} with {group.block_size}"
        )
    block_size = group.block_size or default_block_size
    if group.type == pb.KV_GROUP_TYPE_FULL_ATTENTION and window == chunk == 0:
        return FullAttention(block_size)
    if group.type == pb.KV_GROUP_TYPE_SLIDING_WINDOW and window >= 1 and chunk == 0:
        return SlidingWindow(block_size, window)
    if group.type == pb.KV_GROUP_TYPE_CHUNKED_LOCAL and window == 0 and chunk >= 1:
        return ChunkedLocal(block_size, chunk)
    if group.type == pb.KV_GROUP_TYPE_RECURRENT_STATE and window == chunk == 0:
        return RecurrentState(block_size)
    raise UnsupportedGroupsError(
        "full attention or a state without a window or a chunk, a sliding window of at least 1 token, or chunks of at"
        f" least 1 token, got group {index} of type {group.type} with window {window} and chunk {chunk}"
    )


def longest_fit(groups: Sequence[KVGroup], num_blocks: int, max_len: int, longest_chunk: int) -> int:
    """Tokens of the longest sequence, up to max_len, whose blocks of all groups fit into num_blocks blocks.

    Args:
        groups: what `read_groups` returned.
        num_blocks: usable ones, the null block not counted.
        max_len: tokens that nothing is longer than.
        longest_chunk: most tokens of one request in a step.
    """

    def blocks_for(num_tokens: int) -> int:
        return sum(group.most_blocks(num_tokens, longest_chunk) for group in groups)

    return bisect_right(range(max_len + 1), num_blocks, key=blocks_for) - 1
