"""One seed, one life: random requests over a random small pool, with faults at random, and everything checked.

Used by `test_faults` (every seed must live), by `test_mutations` (with a core broken on purpose, none should) and by
`simulate` (as many seeds as there is time for). What happens in a life is noted as a schedule of operations, which can
be replayed, whole or in part: `shrink` takes away what a failure does not need.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.sim_digest import expected_tokens
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import KeyDomain, default_hash
from kvmanager_service.core.errors import (
    BadResultError,
    CoreError,
    DuplicatePinError,
    DuplicateRequestError,
    InvalidRequestError,
    PinLimitError,
    PoolExhaustedError,
    PoolInUseError,
    QueueFullError,
    RowFailedError,
)
from kvmanager_service.core.eviction_policies import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES
from kvmanager_service.core.extra_keys import LoraAdapter, PromptSpan, request_keys
from kvmanager_service.core.group_key import group_key
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.request import (
    TOKEN_BYTES,
    FinishReason,
    NewBranch,
    NewRequest,
    Request,
    SamplingParams,
    StopRules,
)
from kvmanager_service.core.retention import END_OF_SEQUENCE, RetentionRange
from kvmanager_service.core.scheduler_config import RECOMPUTE, SchedulerConfig
from kvmanager_service.core.suspects import MAX_FAILED_STEPS
from tests.simulation.harness import VOCAB_SIZE, Produced, World, first_read, kv_groups, pool_tokens
from tests.simulation.life import Life
from tests.unit.core.builders import chain_of, state_of, token_bytes

Operation = tuple[str, tuple[Any, ...]]
"""What happened, by the name of the `_do_` method, and its arguments: names and numbers only."""

MAX_TURNS_WITHOUT_PROGRESS = 500
MAX_FORKS = 32
"""In one life: each is a request that others may fork from, so that without a limit there may be more and more."""


def one_byte_hash(data: bytes) -> bytes:
    """256 values: a collision wherever one looks."""
    return default_hash(data)[:1] * 16


@dataclass
class Story:
    """A request, and what must come of it."""

    new: NewRequest
    prompt: list[int]
    expected: list[int]
    reason: FinishReason
    ended: bool = False
    row_failures: int = 0


@dataclass
class Counts:
    """What happened in a life, so that tests can tell that faults were met at all."""

    faults: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def add(counter: dict[str, int], name: str) -> None:
        """One more of something."""
        counter[name] = counter.get(name, 0) + 1


class Chaos:
    """A world, its requests and its faults, all drawn from one seed.

    Args:
        life: the seed, and what is not left to it.
        events: told of every change of the cache.
    """

    def __init__(self, life: Life, *, events: BlockEventLog | None = None) -> None:
        self.life = life
        self.windows = windows = life.windows
        self.crowded = life.crowded
        seed, faults = life.seed, life.faults
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice((1, 2, 3, 4, 8, 16))
        self.num_blocks = rng.choice((rng.randint(3, 12), rng.randint(8, 40))) + 4 * len(windows)
        chosen = rng.random() < 0.2
        self.one_byte = chosen if life.one_byte is None else life.one_byte
        self.caching = caching = rng.random() < 0.95
        budget = rng.choice((rng.randint(1, 8), rng.randint(8, 64), 4096))
        chosen_policy = rng.choice(("fcfs", "priority"))
        # Of its own, so that what is drawn from it changes nothing of what is drawn from the other.
        self.more = more = random.Random(f"more of {seed}")
        self.has_keys = more.random() < 0.3
        self.branching = branching = random.Random(f"branches of {seed}")
        self.resuming = random.Random(f"resumed branches of {seed}")
        self.branch_rate = branching.choice((0.0, 0.2, 0.7))
        self.num_forks = 0
        # And one more, for what is drawn of swapping.
        self.swap = swap = random.Random(f"swap of {seed}")
        chosen_mode = swap.choice((RECOMPUTE, "swap", "auto"))
        # Again of its own: what blocks are kept for, and how long.
        self.kept = kept = random.Random(f"kept of {seed}")
        self.clock = 0.0
        self.has_ranges, self.has_pins = kept.random() < 0.3, kept.random() < 0.4
        eviction_policy = kept.choice((DEFAULT_EVICTION_POLICY, "priority", "priority", *EVICTION_POLICIES))
        config = SchedulerConfig(
            policy=life.policy or (chosen_policy if more.random() < 0.7 else "fair"),
            max_num_batched_tokens=budget,
            max_num_seqs=rng.choice((1, 3, 8, 64)),
            max_waiting=rng.choice((2, 100)),
            long_prefill_token_threshold=rng.choice((0, 0, rng.randint(1, 16))),
            watermark=rng.choice((0.0, 0.01, 0.3)),
            max_outstanding=rng.choice((1, 2)),
            preemption_mode=life.preemption_mode or chosen_mode,
            max_pinned_fraction=kept.choice((0.25, 0.6, 1.0)),
        )

        if windows:
            config = dataclasses.replace(config, long_prefill_token_threshold=0)
        if life.crowded:
            config = dataclasses.replace(
                config, max_num_batched_tokens=swap.choice((64, 4096)), max_num_seqs=64, watermark=0.0
            )

        def make_kv(num_blocks: int, block_size: int) -> KVCache:
            hash_function = one_byte_hash if self.one_byte else default_hash
            kv: KVCache
            if windows:
                kv = KVCacheCoordinator(
                    num_blocks,
                    kv_groups(block_size, windows),
                    longest_chunk=config.max_num_batched_tokens,
                    enable_caching=caching,
                    hash_function=hash_function,
                    eviction_policy=eviction_policy,
                    events=events,
                )
            else:
                kv = KVCacheManager(
                    num_blocks,
                    block_size,
                    enable_caching=caching,
                    hash_function=hash_function,
                    eviction_policy=eviction_policy,
                    events=events,
                )
            kv.pool.advance(self.clock)
            return kv

        self.world = World(
            self.num_blocks,
            self.block_size,
            config,
            make_kv,
            num_host_blocks=self._draw_host_blocks(),
            token_us=swap.choice((0, 10)),
            copy_us=swap.choice((0, 10 * self.block_size, 1_000)),
            windows=windows,
        )
        self.smallest_pool = self.pool_tokens
        self.was_replaced = False
        self.losses = 0
        self.counts = Counts()
        self.stories: dict[str, Story] = {}
        self.operations: list[Operation] = []
        self.branches: dict[str, list[Story]] = {}
        self.pending = self._draw_requests(rng.randint(5, 40) if life.num_requests is None else life.num_requests)
        self.drawn = {story.new.request_id: story for story in self.pending}
        # Each life has its own mixture of faults; most have some kinds only.
        self.fault_rates: list[tuple[Callable[[], None], float]] = []
        if branching.random() < 0.3:
            self.fault_rates.append((self._fork, branching.choice((0.05, 0.2))))
        if faults:
            for fault in (
                self._abort,
                self._finish_by_stop_string,
                self._lose_stream,
                self._replace_executor,
                self._adopt_cache,
                self._reset_prefix_cache,
                self._fail_row,
                self._send_bad_result,
                self._add_duplicate,
                self._fail,
            ):
                if rng.random() < 0.5:
                    self.fault_rates.append((fault, rng.choice((0.01, 0.05, 0.2))))
            if config.preemption_mode != RECOMPUTE:
                self.fault_rates += [
                    (fault, swap.choice((0.05, 0.2)))
                    for fault in (self._abort_swapped, self._lose_stream_that_copies)
                    if swap.random() < 0.5
                ]
        if faults and random.Random(f"former executors of {seed}").random() < 0.3:
            self.fault_rates.append((self._answer_of_the_former, 0.1))
        if faults and self.has_pins:
            self.fault_rates += [(self._pin, 0.1), (self._unpin, 0.05)]
        if faults and self.has_ranges:
            self.fault_rates.append((self._wait, 0.2))

    @property
    def pool_tokens(self) -> int:
        """What the pool holds now."""
        world = self.world
        return pool_tokens(world.num_blocks, world.block_size, world.config, self.windows)

    # --- requests -------------------------------------------------------------------------------------------------

    def _draw_requests(self, count: int) -> list[Story]:
        rng = self.rng
        room = min(self.pool_tokens, 200)
        # Prompts of three words only have equal blocks after different ones.
        self.num_words = rng.choice((VOCAB_SIZE, VOCAB_SIZE, 3))
        roots = [[rng.randrange(self.num_words) for _ in range(room + 8)] for _ in range(rng.randint(1, 3))]
        return [self._draw_request(f"r{index}", roots, room) for index in range(count)]

    def _draw_request(self, request_id: str, roots: list[list[int]], room: int) -> Story:
        rng = self.rng
        length = rng.choice((rng.randint(1, room + 4), rng.randint(1, max(1, room // 3))))
        prompt = rng.choice(roots)[: rng.randint(0, length)]
        prompt += [rng.randrange(self.num_words) for _ in range(length - len(prompt))]
        max_tokens = rng.randint(1, rng.choice((4, 30, room + 4)))
        if self.crowded:
            prompt = prompt[: max(1, room // 3)]
            max_tokens = max(max_tokens, room - len(prompt) - self.swap.randrange(8), 1)
        sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)))
        request_seed = rng.getrandbits(64)

        def produce(stop: tuple[int, ...], min_tokens: int, seed: int = request_seed) -> list[int]:
            return expected_tokens(
                prompt,
                max_tokens,
                vocab_size=VOCAB_SIZE,
                seed=seed,
                temperature=sampling.temperature,
                suppressed_token_ids=stop,
                min_tokens=min_tokens,
                penalised=sampling.has_penalty,
                windows=self.windows or (0,),
            )

        stop: tuple[int, ...] = ()
        min_tokens = 0
        if rng.random() < 0.5:
            stop = tuple(rng.choices(produce((), 0), k=rng.randint(1, 2)))
            min_tokens = rng.choice((0, rng.randint(0, max_tokens)))

        def tell(seed: int) -> tuple[list[int], FinishReason]:
            """What a sequence of this prompt gets, and why it ends."""
            tokens = produce(stop, min_tokens, seed)
            ends = [index for index, token_id in enumerate(tokens) if token_id in stop and index >= min_tokens]
            return (tokens[: ends[0] + 1], FinishReason.STOP) if ends else (tokens, FinishReason.LENGTH)

        expected, reason = tell(request_seed)
        num_resumed = rng.randint(0, len(expected) - 1) if rng.random() < 0.2 else 0
        branches = () if num_resumed else self._draw_branches(request_id)
        new = NewRequest(
            request_id=request_id,
            prompt=array("i", prompt).tobytes(),
            stop=StopRules(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=frozenset(stop)),
            sampling=sampling,
            seed=request_seed,
            priority=rng.randint(0, 2),
            cache_salt=rng.choice(("", "", "mine", "yours")),
            resumed=token_bytes(expected[:num_resumed]),
            branches=branches,
            family_id=request_id if branches else "",
            **self._draw_keys(len(prompt)),
            **self._draw_retention(len(prompt)),
        )
        told = {branch.request_id: tell(branch.seed) for branch in branches}
        told[request_id] = (expected, reason)
        if branches and self.resuming.random() < 0.4:
            new = self._resume(new, told)

        def story(sequence: NewRequest | NewBranch) -> Story:
            """What is left to come of a sequence, behind what it has already."""
            expected, reason = told[sequence.request_id]
            at = len(sequence.resumed) // TOKEN_BYTES
            return Story(new, prompt + expected[:at], expected[at:], reason)

        self.branches[new.request_id] = [story(branch) for branch in new.branches]
        return story(new)

    def _resume(self, new: NewRequest, told: dict[str, tuple[list[int], FinishReason]]) -> NewRequest:
        """The same request after a break: some outputs have begun, some have not, the first may have ended."""
        sequences = [NewBranch(new.request_id, new.seed), *new.branches][self.resuming.randint(0, 1) :]
        begun = []
        for one in sequences:
            expected, _ = told[one.request_id]
            at = self.resuming.choice((0, self.resuming.randint(0, len(expected) - 1)))
            begun.append(dataclasses.replace(one, resumed=token_bytes(expected[:at])))
        first, *others = begun
        return dataclasses.replace(
            new, request_id=first.request_id, seed=first.seed, resumed=first.resumed, branches=tuple(others)
        )

    def _draw_branches(self, request_id: str) -> tuple[NewBranch, ...]:
        """The sequences beside the first."""
        most = min(4, self.world.config.max_num_seqs, self.world.config.max_waiting)
        if most < 2 or self.branching.random() >= self.branch_rate:
            return ()
        count = self.branching.randint(1, most - 1)
        return tuple(
            NewBranch(f"{request_id}#{index}", self.branching.getrandbits(64)) for index in range(1, count + 1)
        )

    def _draw_keys(self, num_prompt_tokens: int) -> dict[str, Any]:
        """Whose the request is, and in some lives what else decides its K/V."""
        more = self.more
        keys: dict[str, Any] = {"tenant": more.choice(("", "some", "others"))}
        if self.has_keys:
            keys["is_isolated"] = more.random() < 0.3
            keys["lora"] = more.choice((None, None, LoraAdapter("mine"), LoraAdapter("mine", "2")))
            keys["spans"] = self._draw_spans(num_prompt_tokens)
        return keys

    def _draw_spans(self, num_prompt_tokens: int) -> tuple[PromptSpan, ...]:
        """Few different images at few different places, so that some requests agree in all of them and some do not."""
        spans, position = [], 0
        while True:
            offset, length = position + self.more.choice((0, 1, 8)), self.more.choice((1, 5, 16))
            if offset + length > num_prompt_tokens or self.more.random() < 0.4:
                return tuple(spans)
            domain = self.more.choice((KeyDomain.MULTIMODAL_ITEM, KeyDomain.PROMPT_EMBEDDING))
            spans.append(PromptSpan(domain, bytes(15) + bytes((self.more.randrange(2),)), offset, length))
            position = offset + length

    def _draw_retention(self, num_prompt_tokens: int) -> dict[str, Any]:
        """In some lives, how long which of its blocks are worth keeping."""
        if not self.has_ranges:
            return {}
        kept = self.kept
        ranges = []
        for _ in range(kept.choice((0, 1, 1, 3))):
            start = kept.randrange(num_prompt_tokens)
            stop = kept.choice((END_OF_SEQUENCE, kept.randint(start + 1, num_prompt_tokens)))
            ranges.append(RetentionRange(start, stop, kept.randint(-3, 3), kept.choice((0.0, 1.0, 5.0))))
        return {"retention": tuple(ranges), "retention_priority": kept.randint(-2, 2)}

    def _do_add(self, request_id: str) -> None:
        scheduler = self.world.scheduler
        if request_id in self.stories:
            return
        story = self.drawn[request_id]
        branches = self.branches[request_id]
        too_long = max(len(one.prompt) for one in (story, *branches)) + 1 > self.pool_tokens
        try:
            scheduler.add_request(story.new)
        except InvalidRequestError:
            assert too_long, f"{request_id} was refused and would fit"
            Counts.add(self.counts.refused, "too long")
        except QueueFullError:
            self.pending.append(story)
            Counts.add(self.counts.refused, "queue full")
        else:
            assert not too_long, f"{request_id} can never fit and was accepted"
            self._accepted(request_id, story)
            for branch, its_story in zip(story.new.branches, branches, strict=True):
                self._accepted(branch.request_id, its_story)

    def _accepted(self, request_id: str, story: Story) -> None:
        self.stories[request_id] = story
        self.world.produced[request_id] = Produced()

    def _fork(self) -> None:
        """Somebody branches off from a request, with a word of its own behind the common ones or without."""
        if self.num_forks < MAX_FORKS and (parent_id := self._any_request()):
            self.num_forks += 1
            length = self.branching.randint(0, len(self.stories[parent_id].expected))
            word = self.branching.choice((-1, self.branching.randrange(self.num_words)))
            self._perform("fork", parent_id, f"{parent_id}+{len(self.operations)}", length, word)

    def _do_fork(self, parent_id: str, request_id: str, length: int, word: int) -> None:
        scheduler, parent = self.world.scheduler, self.stories.get(parent_id)
        if parent_id not in scheduler.requests or parent is None or request_id in self.stories:
            return
        prompt = parent.prompt + parent.expected[:length] + ([word] if word >= 0 else [])
        seed, max_tokens = len(self.stories), 1 + length % 5
        sampling = parent.new.sampling
        new = dataclasses.replace(
            parent.new,
            request_id=request_id,
            prompt=token_bytes(prompt),
            resumed=b"",
            stop=StopRules(max_tokens),
            seed=seed,
            branches=(),
            family_id="",
            fork_of=parent_id,
        )
        expected = expected_tokens(
            prompt,
            max_tokens,
            vocab_size=VOCAB_SIZE,
            seed=seed,
            temperature=sampling.temperature,
            penalised=sampling.has_penalty,
            windows=self.windows or (0,),
        )
        before = state_of(scheduler)
        try:
            scheduler.add_request(new)
        except InvalidRequestError:
            assert len(prompt) >= self.pool_tokens, f"{request_id} was refused and would fit"
            assert state_of(scheduler) == before
        except QueueFullError:
            assert state_of(scheduler) == before
        else:
            self._accepted(request_id, Story(new, prompt, expected, FinishReason.LENGTH))

    def _draw_host_blocks(self) -> int:
        """Few, too few for one request, or enough for all."""
        few, some, plenty = self.swap.choice((0, 1)), self.swap.randint(1, self.num_blocks), 10 * self.num_blocks
        return self.swap.choice((few, some, plenty, plenty))

    # --- faults ---------------------------------------------------------------------------------------------------

    def _any_request(self) -> str | None:
        return self.rng.choice(sorted(self.world.scheduler.requests)) if self.world.scheduler.requests else None

    def _abort(self) -> None:
        if request_id := self._any_request():
            self._perform("abort", request_id)

    def _do_abort(self, request_id: str) -> None:
        if request_id in self.world.scheduler.requests:
            self.world.scheduler.abort(request_id)
            self.world.publish()
            assert self.world.produced[request_id].finish_reason is FinishReason.ABORT

    def _fail(self) -> None:
        if request_id := self._any_request():
            self._perform("fail", request_id)

    def _do_fail(self, request_id: str) -> None:
        if request_id in self.world.scheduler.requests:
            self.world.scheduler.fail(request_id, CoreError("UNAVAILABLE", "as the simulation wants"))
            self.world.publish()

    def _finish_by_stop_string(self) -> None:
        if request_id := self._any_request():
            self._perform("finish_by_stop_string", request_id)

    def _do_finish_by_stop_string(self, request_id: str) -> None:
        request = self.world.scheduler.requests.get(request_id)
        if request is not None and not request.followers and request.leader is None:  # before there is text: no stop
            self.world.scheduler.finish(request_id)
            self.world.publish()
            produced = self.world.produced[request_id]
            assert produced.finish_reason is None, "a request ended from outside was told so"
            produced.finish_reason = FinishReason.STOP
            self.stories[request_id].expected = list(produced.token_ids)
            self.stories[request_id].reason = FinishReason.STOP

    def _wait(self) -> None:
        self._perform("wait", self.kept.choice((0.5, 1.0, 4.0)))

    def _do_wait(self, seconds: float) -> None:
        self.clock += seconds
        self.world.scheduler.kv.pool.advance(self.clock)

    def _pin(self) -> None:
        story = self.drawn[self.kept.choice(sorted(self.drawn))]
        self._perform("pin", story.new.request_id, self.kept.randint(1, len(story.prompt)))

    def _do_pin(self, request_id: str, num_tokens: int) -> None:
        """Pin the beginning of a request's prompt, whether it has come, runs, or is over."""
        scheduler, new = self.world.scheduler, self.drawn[request_id].new
        if new.spans:
            return  # what stands behind its tokens is no part of a pin
        keys = request_keys(new.cache_salt, new.tenant if new.is_isolated else None, new.lora)
        before = state_of(scheduler)
        try:
            scheduler.pins.pin(PinnedPrefix(request_id, new.prompt[: num_tokens * TOKEN_BYTES], keys))
        except (InvalidRequestError, PinLimitError, DuplicatePinError):
            assert state_of(scheduler) == before

    def _unpin(self) -> None:
        if names := sorted(pin.name for pin in self.world.scheduler.pins):
            self._perform("unpin", self.kept.choice(names))

    def _do_unpin(self, name: str) -> None:
        if any(pin.name == name for pin in self.world.scheduler.pins):
            self.world.scheduler.pins.unpin(name)

    def _lose_stream(self) -> None:
        self._perform("lose_stream", bool(self.world.executor.queue) and self.rng.random() < 0.5)

    def _abort_swapped(self) -> None:
        """End one whose blocks are in the host's memory, or on their way there or back."""
        swap_space = self.world.scheduler.swap_space
        if swap_space is not None and (swapped := sorted(request.request_id for request in swap_space.requests())):
            self._perform("abort", self.swap.choice(swapped))

    def _lose_stream_that_copies(self) -> None:
        """Lose steps that order copies, at any point of their execution."""
        if any(step.copies for step in self.world.scheduler.outstanding):
            self._perform("lose_stream", self.swap.randint(0, len(self.world.executor.queue)))

    def _do_lose_stream(self, num_computed: int) -> None:
        for _ in range(min(num_computed, len(self.world.executor.queue))):
            self.world.executor.compute()  # and nobody heard of it
        self.losses += 1
        self.world.lose_stream()

    def _replace_executor(self) -> None:
        fewest = 3 + 4 * len(self.windows)
        num_blocks = self.rng.choice((self.num_blocks, self.num_blocks, self.rng.randint(fewest, self.num_blocks)))
        block_size = self.rng.choice((self.block_size, self.block_size, self.rng.randint(1, 16)))
        self._perform("replace_executor", num_blocks, block_size, self._draw_host_blocks())

    def _do_replace_executor(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.losses += 1
        self.world.replace_executor(num_blocks, block_size, num_host_blocks)
        self.was_replaced = True
        self.smallest_pool = min(self.smallest_pool, self.pool_tokens)

    def _adopt_cache(self) -> None:
        self._perform("adopt_cache")

    def _do_adopt_cache(self) -> None:
        self.losses += 1
        self.world.adopt_cache()

    def _reset_prefix_cache(self) -> None:
        self._perform("reset_prefix_cache")

    def _do_reset_prefix_cache(self) -> None:
        scheduler = self.world.scheduler
        before = state_of(scheduler)
        try:
            scheduler.reset_prefix_cache()
        except PoolInUseError:
            assert scheduler.running
            assert state_of(scheduler) == before
        else:
            assert not scheduler.running
            assert scheduler.kv.pool.num_cached_blocks == scheduler.pins.num_held_blocks == 0

    def _fail_row(self) -> None:
        if self.world.scheduler.outstanding:
            num_rows = len(self.world.scheduler.outstanding[0].rows)
            self._perform("fail_row", *self.rng.sample(range(num_rows), min(num_rows, self.rng.choice((1, 1, 2)))))

    def _do_fail_row(self, *failed: int) -> None:
        if self.world.scheduler.outstanding:
            rows = self.world.scheduler.outstanding[0].rows
            self.world.executor.backend.rows_to_fail = [index for index in failed if index < len(rows)]
            for index in self.world.executor.backend.rows_to_fail:
                request = rows[index].request
                branches = [branch.request for branch in rows[index].branches or ()]
                for one in (request, *request.followers, *branches):
                    self.stories[one.request_id].row_failures += 1

    def _send_bad_result(self) -> None:
        if self.world.scheduler.outstanding:
            self._perform("send_bad_result", self.rng.getrandbits(32), self.rng.random() < 0.5)

    def _do_send_bad_result(self, damage_seed: int, was_computed: bool) -> None:
        scheduler = self.world.scheduler
        if not scheduler.outstanding:
            return
        response = self.world.executor.compute()
        damage(response, random.Random(damage_seed))
        self._refuse(response)
        self._do_lose_stream(was_computed)

    def _answer_of_the_former(self) -> None:
        if self.world.scheduler.outstanding and self.world.former_epoch:
            self._perform("answer_of_the_former")

    def _do_answer_of_the_former(self) -> None:
        """The executor that was replaced answers in place of the other: from its own cache, so with other tokens."""
        if not self.world.scheduler.outstanding or not self.world.former_epoch:
            return
        response = self.world.executor.compute()
        response.kv_epoch = self.world.former_epoch
        tokens = array("i", response.sampled_token_ids.data)
        response.sampled_token_ids.data = token_bytes([(token_id + 1) % VOCAB_SIZE for token_id in tokens])
        self._refuse(response)
        self._do_lose_stream(0)

    def _refuse(self, response: pb.ExecuteResponse) -> None:
        """A result that is none must change nothing."""
        before = state_of(self.world.scheduler)
        try:
            self.world.take(response)
        except BadResultError:
            assert state_of(self.world.scheduler) == before
        else:
            raise AssertionError(f"a bad result was taken: {response}")

    def _add_duplicate(self) -> None:
        if request_id := self._any_request():
            self._perform("add_duplicate", request_id)

    def _do_add_duplicate(self, request_id: str) -> None:
        scheduler = self.world.scheduler
        if request_id in scheduler.requests:
            before = state_of(scheduler)
            try:
                scheduler.add_request(self.stories[request_id].new)
            except DuplicateRequestError:
                assert state_of(scheduler) == before
            else:
                raise AssertionError(f"{request_id} was accepted twice")

    def _do_schedule(self) -> None:
        scheduler = self.world.scheduler
        self.world.schedule()
        self.check()
        assert scheduler.outstanding or not scheduler.has_work, "work waits and nothing will ever wake it"

    def _do_complete(self) -> None:
        if self.world.scheduler.outstanding:
            self.world.complete()
            self.check()

    def _perform(self, name: str, *arguments: Any) -> None:
        """Do something, and note it."""
        self.operations.append((name, arguments))
        getattr(self, f"_do_{name}")(*arguments)

    def _maybe_fault(self, share: float) -> None:
        for fault, rate in self.fault_rates:
            if self.rng.random() < rate * share:
                Counts.add(self.counts.faults, fault.__name__.strip("_"))
                fault()
                self.check()

    # --- life -----------------------------------------------------------------------------------------------------

    def run(self) -> Counts:
        """Live until every request has ended. Raises AssertionError, which says how to live again, or nothing."""
        try:
            self._run()
        except Exception as error:
            message = f"seed {self.life.seed}: {type(error).__name__}: {error}\nagain: {self.life.command}"
            raise AssertionError(message) from error
        return self.counts

    def replay(self, operations: Iterable[Operation]) -> None:
        """Do what the same life noted before, or a part of that, then only work until all has ended.

        What can not be done (its request has ended, no step is out) is left out. Raises whatever is wrong.
        """
        for name, arguments in operations:
            getattr(self, f"_do_{name}")(*arguments)
            self.check()
        turns = 0
        while self.world.scheduler.has_work:
            progress = self._progress()
            self._do_schedule()
            self._do_complete()
            turns = 0 if self._progress() != progress else turns + 1
            assert turns < MAX_TURNS_WITHOUT_PROGRESS, f"nothing has come of {turns} turns of work alone"
        self._check_end()

    def _run(self) -> None:
        scheduler, rng = self.world.scheduler, self.rng
        self.pending.reverse()
        arrivals = rng.choice((0.3, 1.0, 5.0)) if not self.crowded else 5.0
        more_results = rng.choice((0.0, 0.3, 0.9))
        patience = 2 * 250 * len(self.pending)
        turns_since_progress = turns = 0
        while self.pending or scheduler.has_work:
            turns += 1
            for _ in range(int(rng.expovariate(1 / arrivals) + rng.random())):
                if self.pending:
                    self._perform("add", self.pending.pop().new.request_id)
            progress = self._progress()
            if turns > patience:
                self.fault_rates = []  # nothing but work is left, and it must come to an end
            self._maybe_fault(0.25)
            self._perform("schedule")
            self._maybe_fault(0.5)
            share = 0.95
            while scheduler.outstanding and rng.random() < share:
                self._perform("complete")
                share = more_results
            self._maybe_fault(0.25)
            turns_since_progress = 0 if self._progress() != progress or self.fault_rates else turns_since_progress + 1
            assert turns_since_progress < 2_000, "nothing has come of 2000 turns"
            assert turns < 4 * patience, f"not done after {turns} turns"
        self._check_end()

    def _progress(self) -> tuple[int, int]:
        produced = self.world.produced.values()
        return sum(len(one.token_ids) for one in produced), sum(one.finish_reason is not None for one in produced)

    def check(self) -> None:
        """Every invariant of the core, and that each request relies on its own tokens under its own salt."""
        scheduler = self.world.scheduler
        scheduler.check_integrity()
        for request in scheduler.running.values():
            self._check_contents(request)
        self._check_pins()
        for request_id, produced in self.world.produced.items():
            story = self.stories[request_id]
            if produced.finish_reason is not None and not story.ended:
                story.ended = True
                Counts.add(self.counts.finished, produced.finish_reason.value)
                self._check_finished(request_id, story, produced)

    def _check_pins(self) -> None:
        """Each pin holds its own prefix from the first block on, filled, and all together no more than they may."""
        pins, size = self.world.scheduler.pins, self.world.block_size * TOKEN_BYTES
        held = set()
        for pin in pins:
            assert pin.entries == self._entries_to_pin(pin)
            for (group, index), block, content in zip(pin.entries, pin.blocks, pin.contents, strict=False):
                held.add(block.block_id)
                assert block.content is content, f"{pin.name} holds {block!r}, which has another content"
                assert not block.provisional_step, f"{pin.name} holds {block!r}, which is yet to be filled"
                assert content.token_bytes == pin.token_bytes[index * size : (index + 1) * size]
                keys = (group_key(group) if self.windows else b"") + (b"" if index else pin.extra_keys)
                assert content.extra_keys == keys, f"{pin.name} holds a block across keys"
                assert len(chain_of(content)) == index + 1, f"{pin.name} holds a content in another place"
        assert len(held) == pins.num_held_blocks <= pins.limit

    def _entries_to_pin(self, pin: PinnedPrefix) -> list[tuple[int, int]]:
        """By the definition: of full attention all blocks, of the others those that the next token reads."""
        size = self.world.block_size
        stop = pin.num_tokens // size
        return [
            (group, index)
            for index in range(stop if self.caching else 0)
            for group, window in enumerate(self.windows or (0,))
            if (index + 1) * size > first_read(stop * size, window)
        ]

    def _check_contents(self, request: Request) -> None:
        size = self.world.block_size
        for index, content in enumerate(request.contents):
            chain = chain_of(content)
            assert len(chain) == index + 1, f"{request!r} has a content in another place than it was made for"
            assert content.token_bytes == bytes(
                request.token_bytes[index * size * TOKEN_BYTES : (index + 1) * size * TOKEN_BYTES]
            ), f"{request!r} relies on other tokens than its own"
            assert content.extra_keys == request.keys_of_block(index, size), f"{request!r} shares a block across keys"

    def _check_finished(self, request_id: str, story: Story, produced: Produced) -> None:
        got, reason, error = produced.token_ids, produced.finish_reason, produced.error
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
            assert total >= self.smallest_pool + (not self.was_replaced), f"{request_id} was ended before the pool was"
        elif isinstance(error, RowFailedError) and error.reason == "STEP_FAILED":
            assert self.losses >= MAX_FAILED_STEPS
        elif isinstance(error, RowFailedError):
            assert story.row_failures, f"{request_id} ended by {error.reason}, and no row of it had failed"
        else:
            assert isinstance(error, CoreError)
            assert error.reason == "UNAVAILABLE", repr(error)

    def _check_end(self) -> None:
        pool = self.world.scheduler.kv.pool
        held = self.world.scheduler.pins.num_held_blocks
        assert pool.num_free_blocks == pool.num_usable_blocks - held
        self._check_pins()
        for pin in self.world.scheduler.pins:
            self.world.scheduler.pins.unpin(pin.name)
        assert pool.num_free_blocks == pool.num_usable_blocks
        assert not self.world.scheduler.running
        for request_id in self.stories:
            assert self.world.produced[request_id].finish_reason is not None, f"{request_id} was forgotten"
        while self.world.scheduler.outstanding:  # results of steps whose requests have all ended
            self.world.complete()
        self.check()
        swap_space = self.world.scheduler.swap_space
        assert swap_space is None or not swap_space.num_used_host_blocks


def damage(response: pb.ExecuteResponse, rng: random.Random) -> None:
    """Make a good response one that no honest executor sends."""
    samples = len(response.sampled_token_ids.data) // TOKEN_BYTES
    rows = len(response.computed_upto.data) // TOKEN_BYTES
    kinds = ["step", "extra sample", "missing row", "short", "ragged", "row beyond", "row before", "logprobs"]
    if not rows:  # a step that takes tags along and nothing else has no row to leave out
        kinds.remove("missing row")
    kind = rng.choice([*kinds, "negative"] if samples else kinds)
    if kind == "step":
        response.step_id += rng.choice((-1, 1))
    elif kind == "extra sample":
        response.sampled_token_ids.data += token_bytes([5])
    elif kind == "missing row":
        response.computed_upto.data = response.computed_upto.data[TOKEN_BYTES:]
    elif kind == "short":
        response.computed_upto.data = token_bytes([0]) + response.computed_upto.data[TOKEN_BYTES:]
        del response.row_errors[:]
    elif kind == "ragged":
        response.computed_upto.data += b"\0"
    elif kind == "row beyond":
        response.row_errors.add(row=rows, reason="NON_FINITE_LOGITS")
    elif kind == "row before":
        response.row_errors.add(row=-1, reason="NON_FINITE_LOGITS")
    elif kind == "negative":
        response.sampled_token_ids.data = token_bytes([-1] * samples)
        del response.row_errors[:]
    else:
        response.logprobs.indptr.data = token_bytes([0, 2, 1])
