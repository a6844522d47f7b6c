"""What a `sim` executor produces, by its public formula: from the sequence alone, without blocks and steps.

Station: called by `judges`. It shares no code with the backend, whose module docstring states the formula
(`executor_service/backends/sim_backend.py`).

Source: splitmix64's finaliser (Steele, Lea, Flood 2014); polynomial hashing (Karp and Rabin 1987).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

__all__ = ["adapter_salt", "next_token"]

_MASK = 2**64 - 1
_G = 0x9E6C63D0876A9A47
_ROOT = 0x6A09E667F3BCC908
_GROUP = 0x3C6EF372FE94F82B


def adapter_salt(revision: str) -> int:
    """Returns what each token adds to the digests of a row with an adapter."""
    return int.from_bytes(hashlib.sha256(revision.encode()).digest()[:8], "little")


def next_token(sequence: Sequence[int], vocab_size: int, windows: Sequence[int] = (0,), salt: int = 0) -> int:
    """Returns the greedy token after a sequence of at least one token.

    Args:
        sequence: The tokens.
        vocab_size: The executor's.
        windows: Of each KV group, in tokens, 0 for full attention, the size of chunks negated. The state after the
            newest token is all that a state keeps: it counts as a window of 1.
        salt: Of the adapter that it is computed with.
    """
    # A group's digests are those of the first, each with the difference of the roots added.
    digest, power = 0, 1
    contents, before = [0] * len(windows), [0] * len(windows)
    for position, token in enumerate(sequence):
        for group, window in enumerate(windows):
            if window < 0 and position % -window == 0:  # digests begin anew
                contents[group], before[group] = 0, digest
        digest = (digest + _mix(token << 32 | position) + salt) & _MASK
        for group, window in enumerate(windows):
            if window <= 0 or position >= len(sequence) - window:
                contents[group] += (_ROOT + group * _GROUP + digest - before[group]) * power
        power = power * _G & _MASK
    content = sum(part * pow(_GROUP, group, _MASK + 1) for group, part in enumerate(contents)) & _MASK
    return _mix(_mix(content)) % vocab_size


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
