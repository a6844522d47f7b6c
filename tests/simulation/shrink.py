"""From a schedule that fails to a shortest one: nothing can be taken away from it and it still fails.

Source: delta debugging (Zeller and Hildebrandt, 2002), in the plain form that only takes away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeVar

T = TypeVar("T")

MAX_FOR_PAIRS = 24
"""Of so few items pairs are taken away, too: one may be there only because of the other, such as a step and its end."""


def shrink(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Take away what a failure does not need: first large parts, at last single items.

    Args:
        items: a sequence for which `fails` is true.
        fails: whether a part of it, in order, still fails; asked O(n log n) times as a rule.

    Returns:
        A part that fails, and does not without any one of its items, nor, when it is short, without any two.
    """
    kept = _without_parts(list(items), fails)
    while len(kept) <= MAX_FOR_PAIRS:
        shorter = (
            kept[:first] + kept[first + 1 : second] + kept[second + 1 :]
            for first, second in combinations(range(len(kept)), 2)
        )
        found = next(filter(fails, shorter), None)
        if found is None:
            break
        kept = _without_parts(found, fails)
    return kept


def _without_parts(kept: list[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Take away large parts first, at last single items, until there is none to take away."""
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
