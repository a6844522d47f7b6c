"""A core that is broken on purpose, and whether a life notices: what tests of the tests are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.simulation.chaos import Chaos
from tests.simulation.life import Life

Mutation = Callable[[pytest.MonkeyPatch], None]
"""Breaks the core until the test is over."""

MAX_SEEDS = 150


def require_notice(lives: Iterable[Life]) -> None:
    """Live until one life notices that the core is broken.

    Raises:
        Failed: none does.
        TypeError: of the mutation itself: what it replaces is not what it was, and anybody would notice that.
    """
    num_lives = 0
    for num_lives, life in enumerate(lives, start=1):  # noqa: B007 - told when none of them notices
        try:
            Chaos(life).run()
        except AssertionError as error:
            if isinstance(error.__cause__, TypeError):
                raise error.__cause__ from error
            return
    pytest.fail(f"went unnoticed for {num_lives} lives")
