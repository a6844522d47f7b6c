"""The copies that a step orders: from `BlockCopies` messages to runs that a backend may do at once, checked.

Station: `parse_copies` is called by `input_batch`; `kv_session` hands the runs to the backend before it executes the
step. Knows block ids; what a block holds, and why it is copied (copy on write, swapping), only the manager knows.

Copies are ordered one after the other, but nearly always none of them touches what another one writes, and then their
order does not matter: they are cut where it does, and what lies between two cuts is sorted by direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.array_checks import frozen, int32_column, require_length
from executor_service.backends.base import BlockCopies, CopyDirection, Int32
from executor_service.errors import InvalidFieldError

__all__ = ["NO_COPIES", "StepCopies", "parse_copies"]

_FIRST, _LAST = min(CopyDirection), max(CopyDirection)


@dataclass(frozen=True)
class StepCopies:
    """What a step copies before its rows write.

    Shape:
        written_blocks: (D,), the device blocks that are copied to, repeats allowed.
    """

    runs: Sequence[BlockCopies]
    written_blocks: Int32


NO_COPIES = StepCopies((), frozen(np.empty(0, dtype=np.int32)))


def parse_copies(message: pb.BlockCopies, num_blocks: int, num_host_blocks: int) -> StepCopies:
    """Check the message and cut it into runs of independent copies.

    Args:
        message: the step's copies.
        num_blocks: blocks of the cache, the null block included; it is neither read nor written.
        num_host_blocks: blocks of host memory.

    Raises:
        InvalidFieldError: a value breaks the contract.
    """
    directions = int32_column(message.directions, "copies.directions")
    sources = int32_column(message.source_ids, "copies.source_ids")
    targets = int32_column(message.target_ids, "copies.target_ids")
    require_length(sources, len(directions), "copies.source_ids")
    require_length(targets, len(directions), "copies.target_ids")
    if not len(directions):
        return NO_COPIES
    _require_directions(directions)
    from_host = directions == CopyDirection.HOST_TO_DEVICE
    to_host = directions == CopyDirection.DEVICE_TO_HOST
    _require_blocks(sources, from_host, num_blocks, num_host_blocks, "copies.source_ids")
    _require_blocks(targets, to_host, num_blocks, num_host_blocks, "copies.target_ids")
    itself = (directions == CopyDirection.DEVICE_TO_DEVICE) & (sources == targets)
    if itself.any():
        place = int(np.argmax(itself))
        expected = f"another block than copies.source_ids[{place}]"
        raise InvalidFieldError(f"copies.target_ids[{place}]", expected, int(targets[place]))
    # One name for each block of either memory.
    cuts = _cuts(
        np.where(from_host, sources + np.int64(num_blocks), sources).tolist(),
        np.where(to_host, targets + np.int64(num_blocks), targets).tolist(),
    )
    runs = [
        run
        for start, end in zip(cuts, [*cuts[1:], len(directions)], strict=True)
        for run in _by_direction(directions[start:end], sources[start:end], targets[start:end])
    ]
    return StepCopies(runs, frozen(targets[~to_host]))


def _require_directions(directions: Int32) -> None:
    """Check that every direction is known."""
    unknown = (directions < _FIRST) | (directions > _LAST)
    if unknown.any():
        place = int(np.argmax(unknown))
        expected = f"a CopyDirection, {int(_FIRST)} to {int(_LAST)}"
        raise InvalidFieldError(f"copies.directions[{place}]", expected, int(directions[place]))


def _require_blocks(
    values: Int32, on_host: npt.NDArray[np.bool_], num_blocks: int, num_host_blocks: int, field: str
) -> None:
    """Check ids, each against the memory it speaks of."""
    low, high = np.where(on_host, 0, 1), np.where(on_host, num_host_blocks, num_blocks)
    beyond = (values < low) | (values >= high)
    if not beyond.any():
        return
    place = int(np.argmax(beyond))
    if not on_host[place]:
        expected = f"a device block in [1, {num_blocks})"
    elif num_host_blocks:
        expected = f"a host block in [0, {num_host_blocks})"
    else:
        expected = "no host block, since the cache was initialised with none (num_host_blocks)"
    raise InvalidFieldError(f"{field}[{place}]", expected, int(values[place]))


def _cuts(sources: list[int], targets: list[int]) -> list[int]:
    """Where runs of independent copies start. Each is as long as it can be, which makes them as few as they can be."""
    cuts = [0]
    read: set[int] = set()
    written: set[int] = set()
    for place, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source in written or target in written or target in read:
            cuts.append(place)
            read.clear()
            written.clear()
        read.add(source)
        written.add(target)
    return cuts


def _by_direction(directions: Int32, sources: Int32, targets: Int32) -> list[BlockCopies]:
    """Sort independent copies by direction."""
    chosen = ((direction, directions == direction) for direction in CopyDirection)
    return [
        BlockCopies(direction, frozen(sources[these]), frozen(targets[these]))
        for direction, these in chosen
        if these.any()
    ]
