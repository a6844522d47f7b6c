"""The requests of a life, and what must come of each: drawn from its seed, with the oracle's tokens.

Station: made by `Chaos`; `Deeds` sends the requests, `Checks` compares what came of them. It knows no scheduler.
"""

from __future__ import annotations

import dataclasses
from array import array
from dataclasses import dataclass
from typing import Any

from executor_service.backends.sim_digest import expected_tokens
from kvmanager_service.core.block_hash import KeyDomain
from kvmanager_service.core.extra_keys import LoraAdapter, PromptSpan
from kvmanager_service.core.request import (
    TOKEN_BYTES,
    FinishReason,
    NewBranch,
    NewRequest,
    SamplingParams,
    StopRules,
)
from kvmanager_service.core.retention import END_OF_SEQUENCE, RetentionRange
from tests.simulation.conditions import Conditions
from tests.simulation.harness import VOCAB_SIZE
from tests.unit.core.builders import token_bytes

LONGEST = 200
"""Tokens of a request, however large the pool is."""


@dataclass
class Story:
    """A request, and what must come of it.

    Attributes:
        new: the request, or the one that it is an output of.
        prompt: what stands before the tokens that are to come, resumed ones included.
        expected: those, by the oracle.
        reason: how it ends, if nothing ends it before.
        ended: whether its end has been checked.
        row_failures: how many of its rows have failed.
        chance_losses: how often a step was lost that had a row of it, and none that breaks steps.
        poisoned_at: how many tokens had come when it began to break every step that has a row of it.
        num_broken: how many steps it has broken.
    """

    new: NewRequest
    prompt: list[int]
    expected: list[int]
    reason: FinishReason
    ended: bool = False
    row_failures: int = 0
    chance_losses: int = 0
    poisoned_at: int | None = None
    num_broken: int = 0


class Stories:
    """Draws requests.

    Args:
        conditions: of the life.
        pool_tokens: tokens of the longest sequence that the first pool holds.

    Attributes:
        drawn: by id, all that were to come from the beginning.
        branches: by a request's id, what must come of its other outputs.
        num_words: how many different tokens prompts have.
    """

    def __init__(self, conditions: Conditions, pool_tokens: int) -> None:
        self._conditions = conditions
        self.windows = conditions.life.windows
        self.branches: dict[str, list[Story]] = {}
        rng, count = conditions.rng, conditions.life.num_requests
        count = rng.randint(5, 40) if count is None else count
        room = min(pool_tokens, LONGEST)
        # Prompts of three words only have equal blocks after different ones.
        self.num_words = rng.choice((VOCAB_SIZE, VOCAB_SIZE, 3))
        roots = [[rng.randrange(self.num_words) for _ in range(room + 8)] for _ in range(rng.randint(1, 3))]
        stories = [self._draw_request(f"r{index}", roots, room) for index in range(count)]
        self.drawn = {story.new.request_id: story for story in stories}

    def _draw_request(self, request_id: str, roots: list[list[int]], room: int) -> Story:
        conditions, rng = self._conditions, self._conditions.rng
        length = rng.choice((rng.randint(1, room + 4), rng.randint(1, max(1, room // 3))))
        prompt = rng.choice(roots)[: rng.randint(0, length)]
        prompt += [rng.randrange(self.num_words) for _ in range(length - len(prompt))]
        max_tokens = rng.randint(1, rng.choice((4, 30, room + 4)))
        if conditions.life.crowded:
            prompt = prompt[: max(1, room // 3)]
            max_tokens = max(max_tokens, room - len(prompt) - conditions.swap.randrange(8), 1)
        sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)))
        request_seed = rng.getrandbits(64)

        def produce(stop: tuple[int, ...], min_tokens: int, seed: int = request_seed) -> list[int]:
            return self._tokens(prompt, sampling, seed, StopRules(max_tokens, min_tokens, frozenset(stop)))

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
        if branches and conditions.resuming.random() < 0.4:
            new = self._resume(new, told)

        def story(sequence: NewRequest | NewBranch) -> Story:
            """What is left to come of a sequence, behind what it has already."""
            expected, reason = told[sequence.request_id]
            at = len(sequence.resumed) // TOKEN_BYTES
            return Story(new, prompt + expected[:at], expected[at:], reason)

        self.branches[new.request_id] = [story(branch) for branch in new.branches]
        return story(new)

    def _tokens(self, prompt: list[int], sampling: SamplingParams, seed: int, stop: StopRules) -> list[int]:
        """The oracle's, up to max_tokens."""
        return expected_tokens(
            prompt,
            stop.max_tokens,
            vocab_size=VOCAB_SIZE,
            seed=seed,
            temperature=sampling.temperature,
            suppressed_token_ids=stop.stop_token_ids,
            min_tokens=stop.min_tokens,
            penalised=sampling.has_penalty,
            windows=self.windows or (0,),
        )

    def _resume(self, new: NewRequest, told: dict[str, tuple[list[int], FinishReason]]) -> NewRequest:
        """The same request after a break: some outputs have begun, some have not, the first may have ended."""
        resuming = self._conditions.resuming
        sequences = [NewBranch(new.request_id, new.seed), *new.branches][resuming.randint(0, 1) :]
        begun = []
        for one in sequences:
            expected, _ = told[one.request_id]
            at = resuming.choice((0, resuming.randint(0, len(expected) - 1)))
            begun.append(dataclasses.replace(one, resumed=token_bytes(expected[:at])))
        first, *others = begun
        return dataclasses.replace(
            new, request_id=first.request_id, seed=first.seed, resumed=first.resumed, branches=tuple(others)
        )

    def _draw_branches(self, request_id: str) -> tuple[NewBranch, ...]:
        """The sequences beside the first."""
        conditions, branching = self._conditions, self._conditions.branching
        most = min(4, conditions.config.max_num_seqs, conditions.config.max_waiting)
        if most < 2 or branching.random() >= conditions.branch_rate:
            return ()
        count = branching.randint(1, most - 1)
        return tuple(NewBranch(f"{request_id}#{index}", branching.getrandbits(64)) for index in range(1, count + 1))

    def _draw_keys(self, num_prompt_tokens: int) -> dict[str, Any]:
        """Whose the request is, and in some lives what else decides its K/V."""
        more = self._conditions.more
        keys: dict[str, Any] = {"tenant": more.choice(("", "some", "others"))}
        if self._conditions.has_keys:
            keys["is_isolated"] = more.random() < 0.3
            keys["lora"] = more.choice((None, None, LoraAdapter("mine"), LoraAdapter("mine", "2")))
            keys["spans"] = self._draw_spans(num_prompt_tokens)
        return keys

    def _draw_spans(self, num_prompt_tokens: int) -> tuple[PromptSpan, ...]:
        """Few different images at few different places, so that some requests agree in all of them and some do not."""
        more = self._conditions.more
        spans: list[PromptSpan] = []
        position = 0
        while True:
            offset, length = position + more.choice((0, 1, 8)), more.choice((1, 5, 16))
            if offset + length > num_prompt_tokens or more.random() < 0.4:
                return tuple(spans)
            domain = more.choice((KeyDomain.MULTIMODAL_ITEM, KeyDomain.PROMPT_EMBEDDING))
            spans.append(PromptSpan(domain, bytes(15) + bytes((more.randrange(2),)), offset, length))
            position = offset + length

    def _draw_retention(self, num_prompt_tokens: int) -> dict[str, Any]:
        """In some lives, how long which of its blocks are worth keeping."""
        if not self._conditions.has_ranges:
            return {}
        kept = self._conditions.kept
        ranges = []
        for _ in range(kept.choice((0, 1, 1, 3))):
            start = kept.randrange(num_prompt_tokens)
            stop = kept.choice((END_OF_SEQUENCE, kept.randint(start + 1, num_prompt_tokens)))
            ranges.append(RetentionRange(start, stop, kept.randint(-3, 3), kept.choice((0.0, 1.0, 5.0))))
        return {"retention": tuple(ranges), "retention_priority": kept.randint(-2, 2)}

    def fork_of(self, parent_id: str, parent: Story, request_id: str, *, length: int, word: int, seed: int) -> Story:
        """A request that goes on from `length` of its parent's tokens, with a word of its own unless that is -1."""
        prompt = parent.prompt + parent.expected[:length] + ([word] if word >= 0 else [])
        stop = StopRules(max_tokens=1 + length % 5)
        new = dataclasses.replace(
            parent.new,
            request_id=request_id,
            prompt=token_bytes(prompt),
            resumed=b"",
            stop=stop,
            seed=seed,
            branches=(),
            family_id="",
            fork_of=parent_id,
        )
        return Story(new, prompt, self._tokens(prompt, new.sampling, seed, stop), FinishReason.LENGTH)
