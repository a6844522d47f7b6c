"""From a schedule that fails to a shortest one: nothing can be taken away from it and it still fails.

Source: delta debugging (Zeller and Hildebrandt, 2002), in the plain form that only takes away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Take away what a failure does not need: first large parts, at last single items.

    Args:
        items: a sequence for which `fails` is true.
        fails: whether a part of it, in order, still fails; asked O(n log n) times as a rule.

    Returns:
        A part that fails, and does not without any one of its items.
    """
    kept = list(items)
    size = max(1, len(kept) // 2)
    while kept:
        before = len(kept)
        start = 0
        while start < len(kept):
            rest = kept[:start] + kept[start + size :]
            if fails(rest):
                kept = rest
            else:
                start += size
        if size == 1 and len(kept) == before:
            break
        size = max(1, size // 2)
    return kept
