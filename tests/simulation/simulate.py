"""The fault simulation for as long as there is time: one seed after another, each another life.

    python -m tests.simulation.simulate [--seconds 60] [--seed N] [OPTIONS]
    make simulate SECONDS=60 SEED=N LIFE="OPTIONS"

Each seed draws what its life is of: the model's KV groups, and whether the pool is crowded, beside all that is drawn in
it. With OPTIONS (`--help` lists them) it is of what they say. Whatever fails in a life, here or in a test, names
the command that lives it again.

A failure ends it with 1, and prints that command, what was wrong, and a shortest schedule that fails, which
`chaos_of(life).replay` takes as it is printed. A test that fails prints the same (`conftest`).
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from math import inf

import structlog

from tests.simulation.chaos import Chaos, LifeFailedError, Operation
from tests.simulation.followed import FollowedChaos
from tests.simulation.life import Life, add_options, given_life
from tests.simulation.shrink import shrink


def chaos_of(life: Life) -> Chaos:
    """The life from its beginning."""
    return Chaos(life) if life.follower_ring is None else FollowedChaos(life)


def failure_of(life: Life, operations: list[Operation]) -> Exception | None:
    """What goes wrong when these operations are replayed, None when all is well."""
    try:
        chaos_of(life).replay(operations)
    except Exception as error:  # noqa: BLE001 - a core that breaks may raise anything, and that is the finding
        return error
    return None


def shortest_schedule(life: Life, operations: list[Operation], seconds: float = inf) -> list[Operation]:
    """The part of a failing life's operations that its failure, or another one, needs.

    Args:
        life: that failed.
        operations: what it noted.
        seconds: after which nothing more is taken away, though it could be.

    Returns:
        All of them, when they do not fail again in a replay.
    """
    end = time.monotonic() + seconds

    def fails(part: list[Operation]) -> bool:
        return time.monotonic() < end and failure_of(life, part) is not None

    return shrink(operations, fails) if fails(operations) else operations


def report(chaos: Chaos, error: AssertionError, seconds: float = inf) -> str:
    """Everything one needs to see the failure again, in a schedule as short as so many seconds allow."""
    schedule = shortest_schedule(chaos.life, chaos.operations, seconds)
    again, first = failure_of(chaos.life, schedule), chaos.conditions
    lines = [
        f"{error}",
        f"{chaos.life}: block_size {first.block_size}, num_blocks {first.num_blocks}, {chaos.world.config}",
        f"{len(schedule)} of {len(chaos.operations)} operations still fail: {again!r}",
        *(f"    {operation}," for operation in schedule),
    ]
    return "\n".join(lines)


def main() -> int:
    """Run seeds until the time is up. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long; the seed under way is finished")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; without it a random one")
    add_options(parser)
    arguments = parser.parse_args()
    seed = first = random.SystemRandom().getrandbits(31) if arguments.seed is None else arguments.seed
    end = time.monotonic() + arguments.seconds
    while True:
        chaos = chaos_of(given_life(seed, arguments))
        try:
            chaos.run()
        except LifeFailedError as error:
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
