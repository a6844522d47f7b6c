"""What must hold in a life after every deed, and at its end.

Station: owned by `Chaos`. It changes nothing but what it has checked already.
"""

from __future__ import annotations

from math import gcd, lcm

from kvmanager_service.core.errors import BadResultError, CoreError, PoolExhaustedError, RowFailedError
from kvmanager_service.core.fair_queue import FairQueue
from kvmanager_service.core.group_key import group_key
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.priority_policy import PriorityPolicy
from kvmanager_service.core.request import TOKEN_BYTES, FinishReason, Request
from kvmanager_service.core.retention import MAX_DURATION
from kvmanager_service.core.suspects import MAX_FAILED_STEPS
from tests.simulation.admission_order import AdmissionOrder
from tests.simulation.conditions import Conditions
from tests.simulation.deeds import Deeds
from tests.simulation.fairness import Fairness
from tests.simulation.harness import Produced, first_read
from tests.simulation.held_forks import HeldForks
from tests.simulation.met import Counts
from tests.simulation.stories import Story
from tests.unit.core.builders import chain_of


class Checks:
    """Every invariant of the core, what requests rely on, what pins hold, and how requests end.

    Args:
        conditions: of the life.
        deeds: what was done in it.
    """

    def __init__(self, conditions: Conditions, deeds: Deeds) -> None:
        self._conditions, self._deeds = conditions, deeds
        self._world = deeds.world
        self._windows = conditions.life.windows
        queue = deeds.world.scheduler.waiting
        self._fairness = Fairness(queue, deeds) if isinstance(queue, FairQueue) else None
        self._order = AdmissionOrder(deeds.world.scheduler)
        self._held_forks = HeldForks(deeds.world.scheduler, deeds.counts)
        deeds.world.watch = self._check_step

    def _check_step(self) -> None:
        """After a call of the scheduler that made a step. Raises AssertionError."""
        self._held_forks.check_next()
        self._check_call()

    def _check_call(self) -> None:
        """After a call of the scheduler. Raises AssertionError."""
        self._order.check()
        self._held_forks.check()

    def check(self) -> None:
        """After a deed. Raises AssertionError."""
        scheduler = self._world.scheduler
        scheduler.check_integrity()
        self._check_call()
        for request in scheduler.running.values():
            self._check_contents(request)
        self._check_pins()
        if self._fairness is not None:
            self._fairness.check()
        for request_id, produced in self._world.produced.items():
            story = self._deeds.accepted[request_id]
            if produced.finish_reason is not None and not story.ended:
                story.ended = True
                Counts.add(self._deeds.counts.finished, produced.finish_reason.value)
                self._check_finished(request_id, story, produced)

    def _check_pins(self) -> None:
        """Each pin holds its own prefix from the first block on, filled, and all together no more than they may."""
        pins, sizes, prefix_size = self._world.scheduler.pins, self._group_sizes(), self._prefix_size()
        held = set()
        for pin in pins:
            assert pin.entries == self._entries_to_pin(pin)
            for (group, index), block, content in zip(pin.entries, pin.blocks, pin.contents, strict=False):
                held.add(block.block_id)
                assert block.content is content, f"{pin.name} holds {block!r}, which has another content"
                assert not block.provisional_step, f"{pin.name} holds {block!r}, which is yet to be filled"
                start, stop = index * sizes[group], (index + 1) * sizes[group]
                assert content.token_bytes == pin.token_bytes[start * TOKEN_BYTES : stop * TOKEN_BYTES]
                keys = (group_key(group) if self._windows else b"") + (b"" if index else pin.extra_keys)
                assert content.extra_keys == keys, f"{pin.name} holds a block across keys"
                assert len(chain_of(content)) == start // prefix_size + 1, (
                    f"{pin.name} holds a content in another place"
                )
        assert len(held) == pins.num_held_blocks <= pins.limit

    def _entries_to_pin(self, pin: PinnedPrefix) -> list[tuple[int, int]]:
        """By the definition: of full attention all blocks, of the others those that the next token reads.

        In order of depth: by where they end. The next token is the first behind what fills blocks of all groups.
        """
        sizes = self._group_sizes()
        next_token = pin.num_tokens // lcm(*sizes) * lcm(*sizes) if self._conditions.caching else 0
        entries = [
            (stop, group)
            for group, (size, window) in enumerate(zip(sizes, self._windows or (0,), strict=True))
            for stop in range(size, next_token + 1, size)
            if stop > first_read(next_token, window)
        ]
        return [(group, stop // sizes[group] - 1) for stop, group in sorted(entries)]

    def _group_sizes(self) -> list[int]:
        """By group, tokens per block."""
        return [self._world.block_size * factor for factor in self._world.factors or (1,) * len(self._windows or (0,))]

    def _prefix_size(self) -> int:
        """Tokens per prefix: one ends wherever a block of some group does, and maybe between."""
        return gcd(*self._group_sizes())

    def _check_contents(self, request: Request) -> None:
        size = self._prefix_size()
        for index, content in enumerate(request.contents):
            chain = chain_of(content)
            assert len(chain) == index + 1, f"{request!r} has a content in another place than it was made for"
            assert content.token_bytes == bytes(
                request.token_bytes[index * size * TOKEN_BYTES : (index + 1) * size * TOKEN_BYTES]
            ), f"{request!r} relies on other tokens than its own"
            assert content.extra_keys == request.keys_of_block(index, size), f"{request!r} shares a block across keys"

    def _check_finished(self, request_id: str, story: Story, produced: Produced) -> None:
        got, reason, error = produced.token_ids, produced.finish_reason, produced.error
        assert story.poisoned_at in (None, len(got)), f"{request_id} got tokens of steps that can not be computed"
        assert got == story.expected[: len(got)], f"{request_id} got other tokens than the oracle's"
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert reason is story.reason, f"{request_id} ended by {reason}, expected {story.reason}"
            assert len(got) == len(story.expected), f"{request_id} got {len(got)} tokens of {len(story.expected)}"
        elif reason is FinishReason.ERROR:
            self._check_error(request_id, story, len(got), error)

    def _check_error(self, request_id: str, story: Story, num_got: int, error: Exception | None) -> None:
        total = len(story.prompt) + num_got
        if isinstance(error, PoolExhaustedError):
            assert num_got < len(story.expected), f"{request_id} had everything and was told that the pool is too small"
            is_full = total >= self._deeds.smallest_pool + (not self._deeds.was_replaced)
            assert is_full, f"{request_id} was ended before the pool was"
        elif isinstance(error, RowFailedError) and error.reason == "STEP_FAILED":
            assert self._deeds.losses >= MAX_FAILED_STEPS
            assert self._may_be_blamed(story), f"{request_id} was ended for what another breaks"
        elif isinstance(error, RowFailedError):
            assert story.row_failures, f"{request_id} ended by {error.reason}, and no row of it had failed"
        else:
            assert isinstance(error, CoreError)
            assert error.reason == "UNAVAILABLE", repr(error)

    def _may_be_blamed(self, story: Story) -> bool:
        """Whether it breaks executors, or by chance was in what they lost; or another output of its request."""
        family = [one for one in self._deeds.accepted.values() if one.new is story.new]
        return any(one.poisoned_at is not None or one.chance_losses for one in family)

    def check_end(self) -> None:
        """When every request has ended: nothing is held, promised or believed any more."""
        scheduler = self._world.scheduler
        pool = scheduler.kv.pool
        assert pool.num_free_blocks == pool.num_usable_blocks - scheduler.pins.num_held_blocks
        self._check_pins()
        for pin in scheduler.pins:
            scheduler.pins.unpin(pin.name)
        assert pool.num_free_blocks == pool.num_usable_blocks
        assert not scheduler.running
        for request_id in self._deeds.accepted:
            assert self._world.produced[request_id].finish_reason is not None, f"{request_id} was forgotten"
        while scheduler.outstanding:  # results of steps whose requests have all ended
            self._world.complete()
        self.check()
        for response in self._deeds.late_answers:
            try:
                self._world.take(response)
            except BadResultError:
                continue
            raise AssertionError(f"a late answer was taken when all was over: {response}")
        assert scheduler.swap_space is None or not scheduler.swap_space.num_used_host_blocks
        self._check_durations_end()

    def _check_durations_end(self) -> None:
        """No block is kept for a time that is over, however the clock has jumped."""
        pool = self._world.scheduler.kv.pool
        pool.advance(self._deeds.clock.latest + MAX_DURATION)
        policy = pool.free_block_queue
        if isinstance(policy, PriorityPolicy):
            assert not policy._passing, f"kept for ever, though only for a time: {sorted(policy._passing)}"
