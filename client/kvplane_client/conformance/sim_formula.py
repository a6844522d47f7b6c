"""What a `sim` executor produces, by its public formula: from the sequence alone, without blocks and steps.

Station: called by `judges`. It shares no code with the backend, whose module docstring states the formula
(`executor_service/backends/sim_backend.py`).

Source: splitmix64's finaliser (Steele, Lea, Flood 2014); polynomial hashing (Karp and Rabin 1987).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["next_token"]

_MASK = 2**64 - 1
_G = 0x9E6C63D0876A9A47
_ROOT = 0x6A09E667F3BCC908


def next_token(sequence: Sequence[int], vocab_size: int) -> int:
    """Returns the greedy token after a sequence of at least one token."""
    digest, content, power = _ROOT, 0, 1
    for position, token in enumerate(sequence):
        digest = (digest + _mix(token << 32 | position)) & _MASK
        content = (content + digest * power) & _MASK
        power = power * _G & _MASK
    return _mix(_mix(content)) % vocab_size


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
