"""The fault simulation for as long as there is time: one seed after another, each another life.

    python -m tests.simulation.simulate [--seconds 60] [--seed N]      (make simulate SECONDS=60 SEED=N)

A failure ends it with 1, and prints the seed, what was wrong, and a shortest schedule that fails, which
`Chaos(seed).replay` takes as it is printed.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time

import structlog

from tests.simulation.chaos import Chaos, Operation
from tests.simulation.shrink import shrink


def failure_of(seed: int, operations: list[Operation], *, one_byte: bool | None = None) -> Exception | None:
    """What goes wrong when these operations are replayed, None when all is well."""
    try:
        Chaos(seed, one_byte=one_byte).replay(operations)
    except Exception as error:  # noqa: BLE001 - a core that breaks may raise anything, and that is the finding
        return error
    return None


def shortest_schedule(seed: int, operations: list[Operation], *, one_byte: bool | None = None) -> list[Operation]:
    """The part of a failing life's operations that its failure, or another one, needs.

    Returns:
        All of them, when they do not fail again in a replay.
    """

    def fails(part: list[Operation]) -> bool:
        return failure_of(seed, part, one_byte=one_byte) is not None

    return shrink(operations, fails) if fails(operations) else operations


def report(chaos: Chaos, error: AssertionError) -> str:
    """Everything one needs to see the failure again."""
    schedule = shortest_schedule(chaos.seed, chaos.operations)
    again = failure_of(chaos.seed, schedule)
    lines = [
        f"{error}",
        f"seed {chaos.seed}: block_size {chaos.block_size}, num_blocks {chaos.num_blocks}, {chaos.world.config}",
        f"{len(schedule)} of {len(chaos.operations)} operations still fail: {again!r}",
        *(f"    {operation}," for operation in schedule),
        f"again: make simulate SEED={chaos.seed} SECONDS=0",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run seeds until the time is up. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long; the seed under way is finished")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; without it a random one")
    arguments = parser.parse_args()
    seed = first = random.SystemRandom().getrandbits(31) if arguments.seed is None else arguments.seed
    end = time.monotonic() + arguments.seconds
    while True:
        chaos = Chaos(seed)
        try:
            chaos.run()
        except AssertionError as error:
            print(report(chaos, error))
            return 1
        seed += 1
        if time.monotonic() >= end:
            break
    print(f"seeds {first} to {seed - 1}: nothing is wrong")
    return 0


if __name__ == "__main__":
    # Each life loads its executors, which log that; what matters here is what is printed at the end.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    sys.exit(main())
