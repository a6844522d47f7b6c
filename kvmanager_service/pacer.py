"""How often a stream may send while many do.

Station: one per server, shared by the streams of all Generate calls; the inference servicer counts calls in and out.

A message costs the manager some 60 µs however little is in it. With a few streams each token goes out when it is there;
with many, each stream rests a while after a message, and what arrives meanwhile goes out merged. GenerateMany does not
need it: there a message carries a whole step.
"""

from __future__ import annotations

__all__ = ["Pacer"]

FREE_STREAMS = 32
"""Streams that need no pace: at 60 µs they take 2 ms of a step, and a step of 32 rows takes longer than that."""

REST_PER_STREAM_S = 100e-6
"""Rest for each stream: at 60 µs a message, streams take at most 60 % of the loop."""


class Pacer:
    """Counts streams.

    Attributes:
        rest_s: seconds a stream rests after a message; 0 means that it does not.
    """

    __slots__ = ("_num_streams", "rest_s")

    def __init__(self) -> None:
        self._num_streams = 0
        self.rest_s = 0.0

    def enter(self) -> None:
        """Count a stream in."""
        self._count(1)

    def leave(self) -> None:
        """Count a stream out."""
        self._count(-1)

    def _count(self, change: int) -> None:
        self._num_streams += change
        self.rest_s = REST_PER_STREAM_S * self._num_streams if self._num_streams > FREE_STREAMS else 0.0
