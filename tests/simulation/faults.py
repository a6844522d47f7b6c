"""Which faults a life has, and when: each chooses a deed, if there is anything to do it to.

Station: owned by `Chaos`, which performs what is chosen. It changes nothing of the world itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from kvmanager_service.core.scheduler_config import RECOMPUTE
from tests.simulation.conditions import Conditions
from tests.simulation.deeds import Deeds
from tests.simulation.met import SELDOM, Counts, states_of

MAX_FORKS = 32
"""In one life: each is a request that others may fork from, so that without a limit there may be more and more."""

MAX_POISONED = 2
HOUR = 3_600.0


class Perform(Protocol):
    """Does a deed, and notes it."""

    def __call__(self, name: str, /, *arguments: Any) -> None: ...


class Faults:
    """A life's own mixture: most have some kinds only.

    Args:
        conditions: of the life.
        deeds: what has been done, to choose from.
        perform: does what was chosen.

    Attributes:
        rates: for each kind how likely it is at a moment where something may go wrong, and whose chance that is.
    """

    def __init__(self, conditions: Conditions, deeds: Deeds, perform: Perform) -> None:
        self._conditions, self._deeds, self._perform = conditions, deeds, perform
        self._world = deeds.world
        self._num_forks = self._num_poisoned = 0
        self._seeking = random.Random(f"choices of {conditions.life.seed}")
        self.rates: list[tuple[Callable[[], None], float, random.Random]] = []
        self._draw_rates()

    def _draw_rates(self) -> None:
        conditions, rng = self._conditions, self._conditions.rng
        branching, swap = conditions.branching, conditions.swap
        if branching.random() < 0.3:
            self._add(self.fork, branching.choice((0.05, 0.2)))
        if not conditions.life.faults:
            return
        for fault in (
            self.abort,
            self.finish_by_stop_string,
            self.lose_stream,
            self.replace_executor,
            self.adopt_cache,
            self.reset_prefix_cache,
            self.fail_row,
            self.send_bad_result,
            self.add_duplicate,
            self.fail,
        ):
            if rng.random() < 0.5:
                self._add(fault, rng.choice((0.01, 0.05, 0.2)))
        if conditions.config.preemption_mode != RECOMPUTE:
            for fault in (self.abort_swapped, self.lose_stream_that_copies):
                if swap.random() < 0.5:
                    self._add(fault, swap.choice((0.05, 0.2)))
        if random.Random(f"former executors of {conditions.life.seed}").random() < 0.3:
            self._add(self.answer_of_the_former, 0.1)
        if conditions.has_pins:
            self._add(self.pin, 0.1)
            self._add(self.unpin, 0.05)
        if conditions.has_ranges:
            self._add(self.wait, 0.2)
        self._draw_rates_of_their_own()

    def _draw_rates_of_their_own(self) -> None:
        """Kinds that have a source of chance each."""
        conditions = self._conditions
        for fault, chance, often in (
            (self.jump_in_time, 0.4, 0.1),
            (self.hear_late, 0.7, 0.1),
            (self.abort_in_a_seldom_state, 0.6, 1.0),
            (self.poison, 0.4, 0.2),
        ):
            source = random.Random(f"{fault.__name__} of {conditions.life.seed}")
            if source.random() < chance:
                self._add(fault, source.choice((0.02, often)), source)
        source = random.Random(f"nothing but poison of {conditions.life.seed}")
        if source.random() < 0.1:
            self.end()  # steps are lost by nothing else: nobody else may end with an error
            self._add(self.poison, 0.5, source)

    def _add(self, fault: Callable[[], None], rate: float, source: random.Random | None = None) -> None:
        self.rates.append((fault, rate, source or self._conditions.rng))

    def maybe(self, share: float) -> None:
        """Let each kind happen, or not, at a share of its rate."""
        for fault, rate, source in self.rates:
            if source.random() < rate * share:
                fault()

    def end(self) -> None:
        """From now on nothing goes wrong."""
        self.rates = []

    def _done(self, kind: str, deed: str, *arguments: Any) -> None:
        """A fault has found something to do."""
        Counts.add(self._deeds.counts.faults, kind)
        self._perform(deed, *arguments)

    def _any_request(self) -> str | None:
        requests = self._world.scheduler.requests
        return self._conditions.rng.choice(sorted(requests)) if requests else None

    # --- clients --------------------------------------------------------------------------------------------------

    def fork(self) -> None:
        """Somebody branches off from a request, with a word of its own behind the common ones or without."""
        if self._num_forks < MAX_FORKS and (parent_id := self._any_request()):
            self._num_forks += 1
            branching = self._conditions.branching
            length = branching.randint(0, len(self._deeds.accepted[parent_id].expected))
            word = branching.choice((-1, branching.randrange(self._deeds.stories.num_words)))
            self._done("fork", "fork", parent_id, f"{parent_id}+{self._num_forks}", length, word)
            if self._conditions.life.faults and self._seeking.random() < 0.3:
                self._fail_row_of(parent_id)

    def abort(self) -> None:
        """Whoever it may be."""
        if request_id := self._any_request():
            self._done("abort", "abort", request_id)

    def abort_swapped(self) -> None:
        """End one whose blocks are in the host's memory, or on their way there or back."""
        swap_space = self._world.scheduler.swap_space
        if swap_space is not None and (swapped := sorted(request.request_id for request in swap_space.requests())):
            self._done("abort_swapped", "abort", self._conditions.swap.choice(swapped))

    def abort_in_a_seldom_state(self) -> None:
        """End one in a state that few are met in, and that this life has seen no abort in."""
        scheduler, deeds = self._world.scheduler, self._deeds
        found: dict[str, list[str]] = {}
        for request_id, request in sorted(scheduler.requests.items()):
            for state in states_of(scheduler, request, deeds.accepted[request_id]):
                if state in SELDOM and state not in deeds.counts.aborted_in:
                    found.setdefault(state, []).append(request_id)
        if found:
            request_ids = found[self._seeking.choice(sorted(found))]
            self._done("abort_in_a_seldom_state", "abort", self._seeking.choice(request_ids))

    def fail(self) -> None:
        """End one with an error."""
        if request_id := self._any_request():
            self._done("fail", "fail", request_id)

    def finish_by_stop_string(self) -> None:
        """End one by what it has produced."""
        if request_id := self._any_request():
            self._done("finish_by_stop_string", "finish_by_stop_string", request_id)

    def add_duplicate(self) -> None:
        """Send one again that has not ended."""
        if request_id := self._any_request():
            self._done("add_duplicate", "add_duplicate", request_id)

    # --- time and operators ---------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Some of what is kept for seconds is kept no longer."""
        self._done("wait", "wait", self._conditions.kept.choice((0.5, 1.0, 4.0)))

    def jump_in_time(self) -> None:
        """Hours or a month pass at once, so that whatever has an end is over; or the clock is set back as far."""
        kind, seconds = self._seeking.choice(
            (("jump_ahead", HOUR), ("jump_ahead", 720 * HOUR), ("jump_back", -HOUR), ("jump_back", -720 * HOUR))
        )
        self._done(kind, "wait", seconds)

    def pin(self) -> None:
        """Pin a prefix of whichever request, or try to."""
        kept, drawn = self._conditions.kept, self._deeds.stories.drawn
        story = drawn[kept.choice(sorted(drawn))]
        self._done("pin", "pin", story.new.request_id, kept.randint(1, len(story.prompt)))

    def unpin(self) -> None:
        """Unpin one that stands."""
        if names := sorted(pin.name for pin in self._world.scheduler.pins):
            self._done("unpin", "unpin", self._conditions.kept.choice(names))

    def reset_prefix_cache(self) -> None:
        """Which is refused while requests run."""
        self._done("reset_prefix_cache", "reset_prefix_cache")

    # --- the executor and its stream ------------------------------------------------------------------------------

    def lose_stream(self) -> None:
        """When nothing, or one step, of what is out was computed."""
        num_computed = bool(self._world.executor.queue) and self._conditions.rng.random() < 0.5
        self._done("lose_stream", "lose_stream", num_computed)

    def lose_stream_that_copies(self) -> None:
        """Lose steps that order copies, at any point of their execution."""
        if any(step.copies for step in self._world.scheduler.outstanding):
            num_computed = self._conditions.swap.randint(0, len(self._world.executor.queue))
            self._done("lose_stream_that_copies", "lose_stream", num_computed)

    def replace_executor(self) -> None:
        """By one with as many blocks or fewer, of the same size or another."""
        conditions, rng = self._conditions, self._conditions.rng
        fewest = 3 + 4 * len(conditions.life.windows)
        most, size = conditions.num_blocks, conditions.block_size
        num_blocks = rng.choice((most, most, rng.randint(fewest, most)))
        block_size = rng.choice((size, size, rng.randint(1, 16)))
        self._done("replace_executor", "replace_executor", num_blocks, block_size, conditions.draw_host_blocks())

    def adopt_cache(self) -> None:
        """The manager restarts."""
        self._done("adopt_cache", "adopt_cache")

    def fail_row(self) -> None:
        """One or two rows of the oldest step."""
        if outstanding := self._world.scheduler.outstanding:
            rng, num_rows = self._conditions.rng, len(outstanding[0].rows)
            self._done("fail_row", "fail_row", *rng.sample(range(num_rows), min(num_rows, rng.choice((1, 1, 2)))))

    def _fail_row_of(self, request_id: str) -> None:
        """If the oldest step has one: who branched off from that request may have what the row writes, and must not."""
        outstanding = self._world.scheduler.outstanding
        for index, row in enumerate(outstanding[0].rows if outstanding else ()):
            if row.request.request_id == request_id:
                self._done("fail_row_of_a_parent", "fail_row", index)

    def poison(self) -> None:
        """Few of them: until each has ended, steps of others are lost as well."""
        requests = sorted(self._world.scheduler.requests.values(), key=lambda request: request.request_id)
        requests = [request for request in requests if request.leader is None]  # a follower has no rows yet
        if requests and self._num_poisoned < MAX_POISONED:
            self._num_poisoned += 1
            self._done("poison", "poison", self._seeking.choice(requests).request_id)

    def send_bad_result(self) -> None:
        """In place of the oldest step's."""
        if self._world.scheduler.outstanding:
            rng = self._conditions.rng
            self._done("send_bad_result", "send_bad_result", rng.getrandbits(32), rng.random() < 0.5)

    def answer_of_the_former(self) -> None:
        """By an executor that was replaced."""
        if self._world.scheduler.outstanding and self._world.former_epoch:
            self._done("answer_of_the_former", "answer_of_the_former")

    def hear_late(self) -> None:
        """Of any stream that has broken, oftener the last."""
        late = len(self._deeds.late_answers)
        if late:
            index = self._seeking.choice((late - 1, self._seeking.randrange(late)))
            self._done("hear_late", "hear_late", index, self._seeking.random() < 0.3)
