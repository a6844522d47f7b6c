"""Finds stop strings in text that arrives in pieces, and never lets out text that may turn out to be one.

Station: one per request with stop strings, owned by its `OutputText`.

Which match counts does not depend on how the text is cut into pieces: the one that is complete first, and of those that
end at the same character the longest.

Invariant: `held` is the longest end of the text so far that is a proper beginning of some stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Watches one output.

    Attributes:
        held: text that is held back.
        match: the stop string that was found, or None.
    """

    __slots__ = ("_first_chars", "_include", "_longest", "_stop", "held", "match")

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        """Watch for `stop`, none of which may be empty; `include` keeps the match at the end of the text."""
        self._stop = tuple(stop)
        self._include = include
        self._longest = max(map(len, stop))
        self._first_chars = frozenset(text[0] for text in stop)
        self.held = ""
        self.match: str | None = None

    def push(self, text: str, *, may_stop: bool) -> str:
        """Add text and return what may be let out.

        Args:
            text: the next piece of the output.
            may_stop: whether a match that is completed by this piece counts. Matches that do not count are let out
                like any other text.

        Returns:
            The text that is certain to be output; up to (or with) the match if one was found.
        """
        if not text:
            return ""
        whole = self.held + text
        if may_stop and (found := self._find(whole, len(self.held))):
            start, self.match = found
            self.held = ""
            return whole[: start + len(self.match)] if self._include else whole[:start]
        cut = self._possible_start(whole)
        self.held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """Return what is held back; no stop string can be completed any more."""
        held, self.held = self.held, ""
        return held

    def _find(self, whole: str, num_old: int) -> tuple[int, str] | None:
        """Return start and text of the match that is complete first, looking at those that end beyond `num_old`."""
        best_end = len(whole) + 1
        best: tuple[int, str] | None = None
        for stop in self._stop:
            start = whole.find(stop, max(0, num_old + 1 - len(stop)))
            end = start + len(stop)
            if start >= 0 and (end < best_end or (end == best_end and best is not None and start < best[0])):
                best_end, best = end, (start, stop)
        return best

    def _possible_start(self, whole: str) -> int:
        """Return where the longest end of `whole` begins that is a proper beginning of a stop string."""
        for at in range(max(0, len(whole) + 1 - self._longest), len(whole)):
            if whole[at] in self._first_chars:
                tail = whole[at:]
                if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stop):
                    return at
        return len(whole)
