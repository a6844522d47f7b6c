"""All that can happen in a life, one method each: what clients, executors, operators and the clock do to a manager.

Station: `Chaos` performs deeds by their names, live or in a replay; `Faults` chooses most of them. A deed that can not
be done any more (its request has ended, no step is out) does nothing. What must come of it at once is checked here.
"""

from __future__ import annotations

import random
from array import array
from collections import deque

from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service.core.errors import (
    BadResultError,
    CoreError,
    DuplicatePinError,
    DuplicateRequestError,
    InvalidRequestError,
    PinLimitError,
    PoolInUseError,
    QueueFullError,
)
from kvmanager_service.core.extra_keys import request_keys
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.request import TOKEN_BYTES, FinishReason
from kvmanager_service.core.suspects import MAX_FAILED_STEPS
from kvmanager_service.engine_views import request_views
from tests.simulation.conditions import Clock
from tests.simulation.damage import damage
from tests.simulation.harness import VOCAB_SIZE, Produced, World, pool_tokens
from tests.simulation.met import Counts, states_of
from tests.simulation.stories import Stories, Story
from tests.unit.core.builders import state_of, token_bytes

MAX_LATE_ANSWERS = 8


class Deeds:
    """What is done in a life, and what must be remembered of it.

    Args:
        world: the manager's core and its executor.
        stories: of the requests.
        clock: the manager's.

    Attributes:
        accepted: by id, the stories of requests that were accepted.
        pending: stories of requests that are to come, the next one last.
        counts: what was met.
        losses: how often steps were lost.
        smallest_pool: tokens of the longest sequence that each executor so far could hold.
        was_replaced: whether there was another executor.
        late_answers: of steps that were computed, and whose stream broke before anybody heard of it.
    """

    def __init__(self, world: World, stories: Stories, clock: Clock) -> None:
        self.world = world
        self.stories = stories
        self.clock = clock
        self.counts = Counts()
        self.accepted: dict[str, Story] = {}
        self.pending = list(reversed(stories.drawn.values()))
        self.losses = 0
        self.smallest_pool = self.pool_tokens
        self.was_replaced = False
        self.late_answers: deque[pb.ExecuteResponse] = deque(maxlen=MAX_LATE_ANSWERS)

    @property
    def pool_tokens(self) -> int:
        """What the pool holds now."""
        world = self.world
        return pool_tokens(world.num_blocks, world.block_size, world.config, world.windows, world.factors)

    # --- clients --------------------------------------------------------------------------------------------------

    def add(self, request_id: str) -> None:
        """A request comes."""
        scheduler = self.world.scheduler
        if request_id in self.accepted:
            return
        story = self.stories.drawn[request_id]
        branches = self.stories.branches[request_id]
        too_long = max(len(one.prompt) for one in (story, *branches)) + 1 > self.pool_tokens
        try:
            scheduler.add_request(self.clock.stamp(story.new))
        except InvalidRequestError:
            assert too_long, f"{request_id} was refused and would fit"
            Counts.add(self.counts.refused, "too long")
        except QueueFullError:
            self.pending.append(story)
            Counts.add(self.counts.refused, "queue full")
        else:
            assert not too_long, f"{request_id} can never fit and was accepted"
            self._accept(request_id, story)
            for branch, its_story in zip(story.new.branches, branches, strict=True):
                self._accept(branch.request_id, its_story)

    def _accept(self, request_id: str, story: Story) -> None:
        self.accepted[request_id] = story
        self.world.produced[request_id] = Produced()

    def fork(self, parent_id: str, request_id: str, length: int, word: int) -> None:
        """Somebody branches off from a request that has not ended; see `Stories.fork_of`."""
        scheduler, parent = self.world.scheduler, self.accepted.get(parent_id)
        if parent_id not in scheduler.requests or parent is None or request_id in self.accepted:
            return
        seed = len(self.accepted)
        story = self.stories.fork_of(parent_id, parent, request_id, length=length, word=word, seed=seed)
        before = state_of(scheduler)
        try:
            request = scheduler.add_request(self.clock.stamp(story.new))
        except InvalidRequestError:
            assert len(story.prompt) >= self.pool_tokens, f"{request_id} was refused and would fit"
            assert state_of(scheduler) == before
        except QueueFullError:
            assert state_of(scheduler) == before
        else:
            self._accept(request_id, story)
            holds = "and holds" if request.blocks or request.tables else "with nothing"
            Counts.add(self.counts.outcomes, f"fork waits {holds}")

    def add_duplicate(self, request_id: str) -> None:
        """A client uses an id that is in use."""
        scheduler = self.world.scheduler
        if request_id in scheduler.requests:
            before = state_of(scheduler)
            try:
                scheduler.add_request(self.accepted[request_id].new)
            except DuplicateRequestError:
                assert state_of(scheduler) == before
            else:
                raise AssertionError(f"{request_id} was accepted twice")

    def abort(self, request_id: str) -> None:
        """A client goes away, or gives a request up."""
        scheduler = self.world.scheduler
        if request_id in scheduler.requests:
            for request in scheduler.book.members(request_id):
                for state in states_of(scheduler, request, self.accepted[request.request_id]):
                    Counts.add(self.counts.aborted_in, state)
            scheduler.abort(request_id)
            self.world.publish()
            assert self.world.produced[request_id].finish_reason is FinishReason.ABORT

    def fail(self, request_id: str) -> None:
        """A request is ended from outside the core, with an error."""
        if request_id in self.world.scheduler.requests:
            self.world.scheduler.fail(request_id, CoreError("UNAVAILABLE", "as the simulation wants"))
            self.world.publish()

    def finish_by_stop_string(self, request_id: str) -> None:
        """What a request has produced holds a stop string."""
        request = self.world.scheduler.requests.get(request_id)
        if request is not None and not request.followers and request.leader is None:  # before there is text: no stop
            self.world.scheduler.finish(request_id)
            self.world.publish()
            produced = self.world.produced[request_id]
            assert produced.finish_reason is None, "a request ended from outside was told so"
            produced.finish_reason = FinishReason.STOP
            self.accepted[request_id].expected = list(produced.token_ids)
            self.accepted[request_id].reason = FinishReason.STOP

    # --- time and operators ---------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Time passes, or the clock jumps: by hours, or back."""
        self.clock.pass_by(seconds)
        scheduler = self.world.scheduler
        scheduler.kv.pool.advance(self.clock.now)
        for view in request_views(scheduler, self.clock.now, include_finished=True):
            assert view.age_seconds >= 0.0, f"{view.request_id} is {view.age_seconds} seconds old"

    def pin(self, request_id: str, num_tokens: int) -> None:
        """Pin the beginning of a request's prompt, whether it has come, runs, or is over."""
        scheduler, new = self.world.scheduler, self.stories.drawn[request_id].new
        if new.spans:
            return  # what stands behind its tokens is no part of a pin
        keys = request_keys(new.cache_salt, new.tenant if new.is_isolated else None, new.lora)
        before = state_of(scheduler)
        try:
            scheduler.pins.pin(PinnedPrefix(request_id, new.prompt[: num_tokens * TOKEN_BYTES], keys))
        except (InvalidRequestError, PinLimitError, DuplicatePinError) as error:
            assert state_of(scheduler) == before
            Counts.add(self.counts.outcomes, f"pin refused: {error.reason}")
        else:
            Counts.add(self.counts.outcomes, "pinned")

    def unpin(self, name: str) -> None:
        """A prefix need not stay any more."""
        if any(pin.name == name for pin in self.world.scheduler.pins):
            self.world.scheduler.pins.unpin(name)

    def reset_prefix_cache(self) -> None:
        """The cache is to be forgotten, which is refused while requests run."""
        scheduler = self.world.scheduler
        before = state_of(scheduler)
        try:
            scheduler.reset_prefix_cache()
        except PoolInUseError:
            assert scheduler.running
            assert state_of(scheduler) == before
            Counts.add(self.counts.outcomes, "reset refused")
        else:
            assert not scheduler.running
            assert scheduler.kv.pool.num_cached_blocks == scheduler.pins.num_held_blocks == 0
            Counts.add(self.counts.outcomes, "reset")

    # --- the executor and its stream ------------------------------------------------------------------------------

    def lose_stream(self, num_computed: int) -> None:
        """The stream breaks when so many of the steps that are out were computed, and nobody heard of it."""
        for _ in range(min(num_computed, len(self.world.executor.queue))):
            self.late_answers.append(self.world.executor.compute())
        self._note_chance()
        self.world.lose_stream()

    def _note_chance(self) -> None:
        """What is out is about to be lost, and nobody's row is why."""
        self.losses += 1
        for row in self.world.scheduler.outstanding[0].rows if self.world.scheduler.outstanding else ():
            self.accepted[row.request.request_id].chance_losses += 1

    def replace_executor(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        """The executor dies and another takes its place; what the first has computed may still be on its way."""
        while self.world.executor.queue:
            self.late_answers.append(self.world.executor.compute())
        self._note_chance()
        self.world.replace_executor(num_blocks, block_size, num_host_blocks)
        self.was_replaced = True
        self.smallest_pool = min(self.smallest_pool, self.pool_tokens)

    def adopt_cache(self) -> None:
        """The manager makes new books of what the executor has."""
        self._note_chance()
        self.world.adopt_cache()
        contents = self.world.scheduler.kv.pool.cached_block_hash_to_block.values()
        ends = {content.serial for content in contents}
        if any(content.parent is not None and content.parent.serial not in ends for content in contents):
            Counts.add(self.counts.outcomes, "adopted within a longer block")

    def fail_row(self, *failed: int) -> None:
        """Rows of the oldest step will fail alone."""
        if self.world.scheduler.outstanding:
            rows = self.world.scheduler.outstanding[0].rows
            self.world.executor.backend.rows_to_fail = [index for index in failed if index < len(rows)]
            for index in self.world.executor.backend.rows_to_fail:
                request = rows[index].request
                branches = [branch.request for branch in rows[index].branches or ()]
                for one in (request, *request.followers, *branches):
                    self.accepted[one.request_id].row_failures += 1

    def poison(self, request_id: str) -> None:
        """From now on a request breaks the executor whenever a row of it is computed."""
        request = self.world.scheduler.requests.get(request_id)
        if request is not None and request.leader is None:
            self.accepted[request_id].poisoned_at = len(self.world.produced[request_id].token_ids)

    def send_bad_result(self, damage_seed: int, was_computed: bool) -> None:
        """An executor answers with what no honest one sends."""
        scheduler = self.world.scheduler
        if not scheduler.outstanding:
            return
        response = self.world.executor.compute()
        damage(response, random.Random(damage_seed))
        self._refuse(response)
        self.lose_stream(was_computed)

    def answer_of_the_former(self) -> None:
        """The executor that was replaced answers in place of the other: from its own cache, so with other tokens."""
        if not self.world.scheduler.outstanding or not self.world.former_epoch:
            return
        response = self.world.executor.compute()
        response.kv_epoch = self.world.former_epoch
        tokens = array("i", response.sampled_token_ids.data)
        response.sampled_token_ids.data = token_bytes([(token_id + 1) % VOCAB_SIZE for token_id in tokens])
        self._refuse(response)
        self.lose_stream(0)

    def hear_late(self, index: int, breaks: bool) -> None:
        """An answer of a stream that broke comes when later steps are out, of the same cache or of another.

        Args:
            index: of `late_answers`.
            breaks: whether the manager takes that for the end of its present stream; else it goes on with it.
        """
        if index >= len(self.late_answers):
            return
        response = self.late_answers[index]
        del self.late_answers[index]
        self._refuse(response)
        which = "the same cache" if response.kv_epoch == self.world.kv_epoch else "another cache"
        Counts.add(self.counts.outcomes, f"late answer of {which}")
        if breaks:
            self.lose_stream(0)

    def _refuse(self, response: pb.ExecuteResponse) -> None:
        """A result that is none must change nothing."""
        before = state_of(self.world.scheduler)
        try:
            self.world.take(response)
        except BadResultError:
            assert state_of(self.world.scheduler) == before
        else:
            raise AssertionError(f"a bad result was taken: {response}")

    # --- work -----------------------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """The manager sends as many steps as may be out."""
        scheduler = self.world.scheduler
        self.world.schedule()
        assert scheduler.outstanding or not scheduler.has_work, "work waits and nothing will ever wake it"

    def complete(self) -> None:
        """The oldest step is computed and its result taken, unless a row of it breaks the executor."""
        if not self.world.scheduler.outstanding:
            return
        step = self.world.scheduler.outstanding[0]
        stories = [self.accepted[row.request.request_id] for row in step.rows]
        branches = [self.accepted[branch.request.request_id] for branch in step.branches]
        if all(story.poisoned_at is None for story in stories + branches):
            self.world.complete()
            return
        for story in stories:
            if story.poisoned_at is not None:
                story.num_broken += 1
                assert story.num_broken <= MAX_FAILED_STEPS, "a request breaks steps for ever"
        self.losses += 1
        self.world.lose_stream()
