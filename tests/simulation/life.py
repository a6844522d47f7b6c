"""Which life of the simulation, of all that there could be: what a failure names, and a command lives again."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, fields

from executor_service.backends.base import STATE
from kvmanager_service.core.policies import POLICIES
from kvmanager_service.core.scheduler_config import PREEMPTION_MODES

MODELS = {
    "full and sliding": (0, 10),
    "sliding only": (12,),
    "short and long windows": (2, 33),
    "two full": (0, 0),
    "full and many sliding": (0, 7, 7, 16),
    "state only": (STATE,),
    "full and states": (0, STATE, STATE, STATE),
    "sliding and state": (9, STATE),
    "full and chunks": (0, -10, -10),
    "chunks only": (-7,),
    "chunks, sliding and state": (-12, 9, STATE),
}
"""Windows of models with KV groups, for lives that are to meet them."""

FACTORS = (1, 1, 1, 2, 3, 4)
"""What a group's blocks may be longer by: more than half of all drawn models with several groups have unequal ones."""

ONE_GROUP = "none"


@dataclass(frozen=True)
class Life:
    """A seed, and what is not left to it.

    Attributes:
        seed: of everything else.
        windows: of the model's KV groups, 0 for full attention, -1 for a state, -n for chunks of n; none is one
            group of full attention.
        factors: of each of these groups, how many times the pool's block size its blocks have; none is once.
        crowded: as many at once as come, and outputs as long as the pool allows: most are preempted, and often.
        one_byte: use a hash that collides all the time; None lets the seed choose.
        faults: whether anything goes wrong at all.
        num_requests: how many come; None lets the seed choose.
        policy: the scheduler's; None lets the seed choose.
        preemption_mode: the scheduler's; None lets the seed choose.
        follower_ring: how many events are kept for one who follows the cache; None: nobody does.
    """

    seed: int
    windows: tuple[int, ...] = ()
    factors: tuple[int, ...] = ()
    crowded: bool = False
    one_byte: bool | None = None
    faults: bool = True
    num_requests: int | None = None
    policy: str | None = None
    preemption_mode: str | None = None
    follower_ring: int | None = None

    @classmethod
    def drawn(cls, seed: int) -> Life:
        """One of any kind; with one group of full attention, half the time."""
        rng = random.Random(f"life of {seed}")
        windows = rng.choice(((), rng.choice(tuple(MODELS.values()))))
        crowded = rng.random() < 0.3
        sizes = random.Random(f"block sizes of {seed}")
        factors = tuple(sizes.choice(FACTORS) for _ in windows)
        return cls(
            seed,
            windows=windows,
            factors=factors if len(set(factors)) > 1 else (),
            crowded=crowded,
            num_requests=12 if crowded and windows else None,  # which takes as long as others with more do
            follower_ring=rng.choice((None, None, 4, 1_000)),
        )

    @property
    def command(self) -> str:
        """What lives it again, and shrinks what fails in it."""
        return f'make simulate SECONDS=0 SEED={self.seed} LIFE="{" ".join(self.options)}"'

    @property
    def options(self) -> list[str]:
        """All but the seed, as command-line options; never none at all."""
        options = [f"--windows={','.join(map(str, self.windows)) or ONE_GROUP}"]
        if self.factors:
            options.append(f"--factors={','.join(map(str, self.factors))}")
        if self.crowded:
            options.append("--crowded")
        if self.one_byte is not None:
            options.append("--one-byte" if self.one_byte else "--no-one-byte")
        if not self.faults:
            options.append("--no-faults")
        for name in ("num_requests", "policy", "preemption_mode", "follower_ring"):
            value = getattr(self, name)
            if value is not None:
                options.append(f"--{name.replace('_', '-')}={value}")
        return options


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what a life is of; what is not given is absent from what the parser returns."""
    group = parser.add_argument_group(
        "what lives are of", "without any of these each seed draws its model, and whether its pool is crowded"
    )
    for names, options in (
        (["--windows"], {"type": _windows, "help": f"of the KV groups: 0 is full attention, {STATE} a state, -n"
                         f" chunks of n, {ONE_GROUP} one group of full attention"}),
        (["--factors"], {"type": _integers, "help": "of the KV groups: how many times the block size its blocks have"}),
        (["--crowded"], {"action": "store_true", "help": "most requests are preempted"}),
        (["--one-byte"], {"action": argparse.BooleanOptionalAction, "help": "a hash that collides all the time"}),
        (["--no-faults"], {"action": "store_false", "dest": "faults", "help": "nothing goes wrong"}),
        (["--num-requests"], {"type": int, "help": "how many come"}),
        (["--policy"], {"choices": tuple(POLICIES), "help": "the scheduler's"}),
        (["--preemption-mode"], {"choices": PREEMPTION_MODES, "help": "the scheduler's"}),
        (["--follower-ring"], {"type": int, "help": "follow the cache, with so many events kept"}),
    ):  # fmt: skip
        group.add_argument(*names, default=argparse.SUPPRESS, **options)


def given_life(seed: int, arguments: argparse.Namespace) -> Life:
    """The seed's life as the options say, or one that is drawn where none was given."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Life) if hasattr(arguments, field.name)}
    given.pop("seed", None)  # the first one's
    return Life(seed, **given) if given else Life.drawn(seed)


def _windows(text: str) -> tuple[int, ...]:
    return () if text == ONE_GROUP else _integers(text)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))
