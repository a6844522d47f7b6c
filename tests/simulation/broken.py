"""A core that is broken on purpose, and whether a life notices: what tests of the tests are written with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import pytest

from executor_service.errors import ExecutorError
from kvmanager_service.core.errors import BadResultError
from tests.simulation.chaos import LifeFailedError
from tests.simulation.life import Life
from tests.simulation.simulate import chaos_of

Mutation = Callable[[pytest.MonkeyPatch], None]
"""Breaks the core until the test is over."""

MAX_SEEDS = 150


NOTICED: Final = (AssertionError, ExecutorError, BadResultError)
"""How a core is found to be wrong: checks of the simulation and of the core itself raise the first, an executor refuses
what breaks its contract with the second, and the core an honest answer with the third. Anything else is a crash."""

STALE: Final = (TypeError, AttributeError)
"""Raised by a mutation itself: what it replaces is not what it was."""


def require_notice(lives: Iterable[Life]) -> None:
    """Live until a check of one life finds that the core is broken; that it merely crashes proves nothing of them.

    Raises:
        Failed: none does.
        TypeError, AttributeError: as `STALE`.
    """
    crashes = Counter[str]()
    num_lives = 0
    for num_lives, life in enumerate(lives, start=1):  # noqa: B007 - told when none of them notices
        try:
            chaos_of(life).run()
        except LifeFailedError as error:
            found = error.__cause__
            if isinstance(found, STALE):
                raise found from error
            if isinstance(found, NOTICED):
                return
            crashes[type(found).__name__] += 1
    pytest.fail(f"went unnoticed for {num_lives} lives; crashed: {dict(crashes)}")
