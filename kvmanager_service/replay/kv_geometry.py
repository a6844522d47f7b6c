"""What KV cache a replay has: blocks, their size, and the KV groups of its model.

Station: called by `options` and `command`. It comes from flags, or from a file: `kvplane plan --json` reckons one from
a model's configuration, `kvplane calibrate -o` writes down that of an executor.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "MAX_BLOCKS",
    "MAX_GROUPS",
    "GroupShape",
    "KvCacheFileError",
    "KvGeometry",
    "describe_groups",
    "make_groups",
    "read_groups",
    "read_kv_cache",
]

DEFAULT_BLOCK_SIZE = 16
MAX_GROUPS = 64
"""As many as the manager takes of an executor."""
MAX_BLOCKS = 1 << 26
"""Of a replay, which makes each of them: so many take 8 GB of memory."""

_MAX_INT32 = (1 << 31) - 1
_GROUP = re.compile(
    r"(?:(?P<count>[1-9]\d?)x)?(?:(?P<state>state)(?::(?P<interval>[1-9]\d{0,8}))?"
    r"|(?P<kind>full|window:(?P<window>[1-9]\d{0,8})|chunk:(?P<chunk>[1-9]\d{0,8}))(?:@(?P<block>[1-9]\d{0,3}))?)"
)
_FILE_TYPES = {
    "full_attention": "full", "sliding_window": "window", "chunked_local": "chunk", "recurrent_state": "state",
}  # fmt: skip


class KvCacheFileError(Exception):
    """A file says nothing of a KV cache.

    Attributes:
        path: the file's.
        expected, got: what.
    """

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(
            f"{path}: expected {expected}, got {got}; `kvplane plan MODEL --memory SIZE --json` prints one, and"
            " `kvplane calibrate HOST:PORT -o FILE` writes one"
        )
        self.path = path
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Layers with one block table.

    Attributes:
        kind: "full", "window", "chunk" or "state".
        size: tokens of the window or the chunk; of a state, tokens between checkpoints, 0 for those of a block.
        num_layers: how many layers, for what they read; counts of one cache are compared only with each other.
        block_size: tokens per block of its own, but of a state; 0 for those of the cache.
    """

    kind: str
    size: int = 0
    num_layers: int = 1
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """A KV cache as a file has it; num_blocks includes the null block."""

    num_blocks: int
    block_size: int
    groups: tuple[GroupShape, ...]


def read_groups(text: str) -> tuple[GroupShape, ...]:
    """Read groups such as "full,5xwindow:1024@32,state:512", those of full attention first. Raises ValueError."""
    groups: list[GroupShape] = []
    for part in text.split(","):
        found = _GROUP.fullmatch(part.strip())
        if found is None:
            raise ValueError(text)
        if found["state"]:
            shape = GroupShape("state", int(found["interval"] or 0))
        else:
            size = int(found["window"] or found["chunk"] or 0)
            shape = GroupShape(found["kind"].partition(":")[0], size, block_size=int(found["block"] or 0))
        groups += [shape] * int(found["count"] or 1)
    if len(groups) > MAX_GROUPS:
        raise ValueError(text)
    return _full_first(groups)


def _full_first(groups: Sequence[GroupShape]) -> tuple[GroupShape, ...]:
    """They find out soonest how short a hit must be."""
    return tuple(sorted(groups, key=lambda group: group.kind != "full"))


def describe_groups(groups: Sequence[GroupShape]) -> str:
    """What `read_groups` would read them from; how many layers they have is not said."""
    parts: list[tuple[str, int]] = []
    for group in groups:
        name = f"{group.kind}:{group.size}" if group.size else group.kind
        name += f"@{group.block_size}" if group.block_size else ""
        if parts and parts[-1][0] == name:
            parts[-1] = (name, parts[-1][1] + 1)
        else:
            parts.append((name, 1))
    return ",".join(name if count == 1 else f"{count}x{name}" for name, count in parts)


def make_groups(groups: Sequence[GroupShape], block_size: int) -> list[KVGroup]:
    """The core's groups; block_size is that of those which have none of their own."""
    return [_make_group(group, block_size) for group in groups]


def _make_group(group: GroupShape, default_block_size: int) -> KVGroup:
    block_size = group.block_size or default_block_size
    match group.kind:
        case "window":
            return SlidingWindow(block_size, group.size)
        case "chunk":
            return ChunkedLocal(block_size, group.size)
        case "state":
            return RecurrentState(group.size or block_size)
        case _:
            return FullAttention(block_size)


def read_kv_cache(path: Path) -> KvGeometry:
    """Read a JSON object whose "kv_cache" has num_blocks, block_size and groups, whatever else is in it.

    Args:
        path: the file's; "-" is standard input.

    Raises:
        KvCacheFileError: it is not that.
        OSError: the file can not be read.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # of the JSON, or of the UTF-8
        raise KvCacheFileError(str(path), "a JSON object", str(error)) from None
    values = document.get("kv_cache") if isinstance(document, dict) else None
    if not isinstance(values, dict):
        raise KvCacheFileError(str(path), 'a JSON object with an object "kv_cache"', "none")
    groups = values.get("groups")
    if not isinstance(groups, list) or not 1 <= len(groups) <= MAX_GROUPS:
        got = f"{len(groups)}" if isinstance(groups, list) else "none"
        raise KvCacheFileError(str(path), f"kv_cache with a list of 1 to {MAX_GROUPS} groups", got)
    return KvGeometry(
        _integer(path, "num_blocks", values.get("num_blocks"), 2, MAX_BLOCKS),
        _integer(path, "block_size", values.get("block_size"), 1),
        _full_first([_read_shape(path, group) for group in groups]),
    )


def _read_shape(path: Path, values: object) -> GroupShape:
    kind = _FILE_TYPES.get(str(values.get("type"))) if isinstance(values, dict) else None
    if not isinstance(values, dict) or kind is None:
        raise KvCacheFileError(str(path), f"groups with a type of {', '.join(_FILE_TYPES)}", repr(values))
    block_size = _integer(path, "block_size of a group", values.get("block_size", 0), 0)
    num_layers = _integer(path, "num_layers of a group", values.get("num_layers"), 1)
    if kind == "state":
        return GroupShape(kind, block_size, num_layers)
    size = _integer(path, f"{kind} of a group", values.get(kind), 1) if kind in ("window", "chunk") else 0
    return GroupShape(kind, size, num_layers, block_size)


def _integer(path: Path, name: str, value: Any, least: int, most: int = _MAX_INT32) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise KvCacheFileError(str(path), f"{name}: an integer in {least} to {most}", repr(value))
    return value
