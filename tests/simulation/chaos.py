"""One seed, one life: random requests over a random small pool, with faults at random, and everything checked.

Used by `test_faults` (every seed must live), by `test_mutations` (with a core broken on purpose, none should) and by
`simulate` (as many seeds as there is time for). What happens in a life is noted as a schedule of operations, which can
be replayed, whole or in part: `shrink` takes away what a failure does not need.

    Conditions ─▶ Stories ─▶ Deeds ◀─ Faults        what the world is like, who comes, what is done, what goes wrong
                               └────▶ Checks        and what must hold after each
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvmanager_service.core.block_events import BlockEventLog
from tests.simulation.checks import Checks
from tests.simulation.conditions import Clock, Conditions
from tests.simulation.deeds import Deeds
from tests.simulation.faults import Faults
from tests.simulation.harness import pool_tokens
from tests.simulation.life import Life
from tests.simulation.met import Counts
from tests.simulation.stories import Stories

Operation = tuple[str, tuple[Any, ...]]
"""What happened, by the name of the deed, and its arguments: names and numbers only."""

MAX_TURNS_WITHOUT_PROGRESS = 500


class LifeFailedError(AssertionError):
    """Something is wrong in a life. What that is stands in its message, and is its cause.

    Attributes:
        chaos: the life, as far as it was lived.
    """

    def __init__(self, chaos: Chaos, error: Exception) -> None:
        super().__init__(f"seed {chaos.life.seed}: {type(error).__name__}: {error}\nagain: {chaos.life.command}")
        self.chaos = chaos


class Chaos:
    """A world, its requests and its faults, all drawn from one seed.

    Args:
        life: the seed, and what is not left to it.
        events: told of every change of the cache.
    """

    def __init__(self, life: Life, *, events: BlockEventLog | None = None) -> None:
        self.life = life
        self.conditions = conditions = Conditions(life)
        clock = Clock()
        self.world = world = conditions.make_world(clock, events)
        room = pool_tokens(world.num_blocks, world.block_size, world.config, life.windows, life.factors)
        self.deeds = Deeds(world, Stories(conditions, room), clock)
        self.checks = Checks(conditions, self.deeds)
        self.faults = Faults(conditions, self.deeds, self._perform)
        self.operations: list[Operation] = []

    @property
    def counts(self) -> Counts:
        """What was met so far."""
        return self.deeds.counts

    def _perform(self, name: str, /, *arguments: Any) -> None:
        """Do something, note it, and see that all is well."""
        self.operations.append((name, arguments))
        self._do(name, arguments)

    def _do(self, name: str, arguments: tuple[Any, ...]) -> None:
        getattr(self.deeds, name)(*arguments)
        self.check()

    def check(self) -> None:
        """See that all is well. Raises AssertionError."""
        self.checks.check()

    # --- life -----------------------------------------------------------------------------------------------------

    def run(self) -> Counts:
        """Live until every request has ended. Raises LifeFailedError, which says how to live again, or nothing."""
        try:
            self._run()
        except Exception as error:
            raise LifeFailedError(self, error) from error
        return self.counts

    def replay(self, operations: Iterable[Operation]) -> None:
        """Do what the same life noted before, or a part of that, then only work until all has ended.

        What can not be done (its request has ended, no step is out) is left out. Raises whatever is wrong.
        """
        for name, arguments in operations:
            self._do(name, arguments)
        turns = 0
        while self.world.scheduler.has_work:
            progress = self._progress()
            self._do("schedule", ())
            self._do("complete", ())
            turns = 0 if self._progress() != progress else turns + 1
            assert turns < MAX_TURNS_WITHOUT_PROGRESS, f"nothing has come of {turns} turns of work alone"
        self.checks.check_end()

    def _run(self) -> None:
        scheduler, rng, pending = self.world.scheduler, self.conditions.rng, self.deeds.pending
        arrivals = rng.choice((0.3, 1.0, 5.0)) if not self.life.crowded else 5.0
        more_results = rng.choice((0.0, 0.3, 0.9))
        patience = 2 * 250 * len(pending)
        turns_since_progress = turns = 0
        while pending or scheduler.has_work:
            turns += 1
            for _ in range(int(rng.expovariate(1 / arrivals) + rng.random())):
                if pending:
                    self._perform("add", pending.pop().new.request_id)
            progress = self._progress()
            if turns > patience:
                self.faults.end()  # nothing but work is left, and it must come to an end
            self.faults.maybe(0.25)
            self._perform("schedule")
            self.faults.maybe(0.5)
            share = 0.95
            while scheduler.outstanding and rng.random() < share:
                self._perform("complete")
                share = more_results
            self.faults.maybe(0.25)
            is_stuck = self._progress() == progress and not self.faults.rates
            turns_since_progress = turns_since_progress + 1 if is_stuck else 0
            assert turns_since_progress < 2_000, "nothing has come of 2000 turns"
            assert turns < 4 * patience, f"not done after {turns} turns"
        self.checks.check_end()

    def _progress(self) -> tuple[int, int]:
        produced = self.world.produced.values()
        return sum(len(one.token_ids) for one in produced), sum(one.finish_reason is not None for one in produced)
