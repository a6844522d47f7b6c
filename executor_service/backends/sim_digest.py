"""The arithmetic of the sim backend, once for arrays and once in plain Python as the oracle of tests.

Station: used by `sim_backend`; `expected_tokens` by every test that wants to know the right output. The oracle shares
constants with the backend, and no code: it knows no block and no step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "PENALTY",
    "ROOT",
    "G",
    "adapter_revision",
    "adapter_salt",
    "expected_tokens",
    "group_constants",
    "history_digest",
    "mix_array",
    "powers_of_g",
]

G = np.uint64(0x9E6C63D0876A9A47)
ROOT = np.uint64(0x6A09E667F3BCC908)
PENALTY = np.uint64(0xBB67AE8584CAA73B)
GROUP = np.uint64(0x3C6EF372FE94F82B)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return splitmix64's output function of each value."""
    mixed = values + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


def powers_of_g(count: int) -> npt.NDArray[np.uint64]:
    """Return G**0 to G**count. Shape: (count + 1,)."""
    factors = np.full(count + 1, G)
    factors[0] = 1
    return np.cumprod(factors)


def group_constants(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return each KV group's digest(-1), ROOT + g * GROUP, and the factor of its content, GROUP**g. Shape: (count,)."""
    factors = np.full(count, GROUP)
    factors[0] = 1
    return ROOT + np.arange(count, dtype=np.uint64) * GROUP, np.cumprod(factors)


def adapter_revision(source: str) -> str:
    """Name the weights of an adapter that comes from there."""
    return hashlib.sha256(source.encode()).hexdigest()[:32]


def adapter_salt(revision: str) -> int:
    """Return what each token of an adapter's rows adds to its digest, below 2**64."""
    return int.from_bytes(hashlib.sha256(revision.encode()).digest()[:8], "little")


def history_digest(token_ids: npt.NDArray[np.int32], prompt_len: int) -> npt.NDArray[np.uint64]:
    """Digest a penalised row's history and where its prompt ends. Shape: returns (1,)."""
    terms: npt.NDArray[np.uint64] = (token_ids.astype(np.uint64) + np.uint64(1)) * powers_of_g(len(token_ids))[1:]
    return mix_array(np.array([prompt_len], dtype=np.uint64)) + np.sum(terms, keepdims=True)


def expected_tokens(
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    seed: int = 0,
    temperature: float = 0.0,
    suppressed_token_ids: Collection[int] = (),
    min_tokens: int | None = None,
    penalised: bool = False,
    windows: Sequence[int] = (0,),
    salt: int = 0,
) -> list[int]:
    """Compute what a `sim` executor produces for a prompt if every table it is sent is right.

    Args:
        prompt_token_ids: at least one id.
        num_tokens: how many tokens to produce; stopping is the manager's, so an end-of-sequence id does not end it.
        vocab_size: the executor's `sim_vocab_size`.
        seed: the request's; matters if temperature is above 0.
        temperature: zero or not is all that matters.
        suppressed_token_ids: ids that cannot be produced.
        min_tokens: how many of the first tokens the suppression holds for; None is all.
        penalised: whether the row has a repetition, presence or frequency penalty other than none.
        windows: the executor's `sim_windows`, one value for each KV group; -1 is a state, -n chunks of n.
        salt: the `adapter_salt` of the adapter it runs with; 0 for none.

    Returns:
        `num_tokens` ids.
    """
    tokens = list(prompt_token_ids)
    sums, contents = [int(ROOT) + group * int(GROUP) for group in range(len(windows))], [0] * len(windows)
    terms: list[list[int]] = [[] for _ in windows]
    power = 1
    for produced in range(num_tokens):
        for position in range(len(terms[0]), len(tokens)):
            for group, window in enumerate(windows):
                if window < -1 and position % -window == 0:  # nothing before its chunk is read
                    sums[group], contents[group] = int(ROOT) + group * int(GROUP), 0
                sums[group] += _mix(tokens[position] << 32 | position) + salt
                terms[group].append(sums[group] * power & _MASK)
                contents[group] += terms[group][position]
                # The state after the newest token is all that a state keeps.
                reads = 1 if window == -1 else max(window, 0)
                if reads and position >= reads:
                    contents[group] -= terms[group][position - reads]
            power = power * int(G) & _MASK
        state = _mix(sum(content * int(GROUP) ** group for group, content in enumerate(contents)) & _MASK)
        if penalised:
            state ^= _mix(_history(tokens, len(prompt_token_ids)) + int(PENALTY))
        word = _mix(state + _mix(seed ^ _mix(len(tokens)))) if temperature > 0 else _mix(state)
        token = word % vocab_size
        banned = suppressed_token_ids if min_tokens is None or produced < min_tokens else ()
        while token in banned:
            token = (token + 1) % vocab_size
        tokens.append(token)
    return tokens[len(prompt_token_ids) :]


def _mix(value: int) -> int:
    """Return splitmix64's output function."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _history(tokens: Sequence[int], prompt_len: int) -> int:
    """Digest a history."""
    total, power = _mix(prompt_len), int(G)
    for token in tokens:
        total = (total + (token + 1) * power) & _MASK
        power = power * int(G) & _MASK
    return total
