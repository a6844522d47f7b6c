"""Requests whose right output is known, and readers of their streams that check it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplane_client import AsyncClient, FinishReason

from executor_service.backends.sim_digest import expected_tokens

VOCAB_SIZE = 32_000
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass
class Job:
    """One request and what came of it.

    Attributes:
        options: further options of the client's `stream`.
        token_ids: what has arrived so far.
        windows: the executor's `sim_windows`.
        known: the right output of an executor that is no sim.
    """

    prompt: list[int]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    windows: tuple[int, ...] = (0,)
    known: list[int] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = -1

    @property
    def expected(self) -> list[int]:
        """What an undisturbed run gives."""
        if self.known is not None:
            return self.known
        return expected_tokens(
            self.prompt,
            self.max_tokens,
            vocab_size=VOCAB_SIZE,
            seed=self.options.get("seed", 0),
            temperature=self.options.get("temperature", 0.0),
            penalised=any(name in self.options for name in PENALTIES),
            windows=self.windows,
        )

    async def run(self, client: AsyncClient) -> None:
        """Read the stream to its end, each token as it comes."""
        options = {"temperature": 0.0, "max_tokens": self.max_tokens} | self.options
        async with client.stream(self.prompt, **options) as stream:
            async for chunk in stream:
                self.token_ids += chunk.token_ids
                self.finish_reason = chunk.finish_reason
                if chunk.usage is not None:
                    self.cached_tokens = chunk.usage.cached_tokens

    def check(self) -> None:
        """It has ended by its length, with no token missing, repeated or wrong."""
        assert self.finish_reason is FinishReason.LENGTH
        assert self.token_ids == self.expected


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids."""
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def random_jobs(
    rng: random.Random, count: int, *, prompt: tuple[int, int] = (1, 200), output: tuple[int, int] = (40, 120)
) -> list[Job]:
    """Requests greedy and random, with and without penalties, some with a common beginning."""
    root = random_prompt(rng, prompt[1])
    jobs = []
    for _ in range(count):
        length = rng.randint(*prompt)
        shared = rng.choice([0, rng.randint(0, length - 1)])
        options: dict[str, Any] = {"priority": rng.randint(0, 2)}
        if rng.random() < 0.5:
            options |= {"temperature": rng.uniform(0.1, 2.0), "seed": rng.getrandbits(63)}
        if rng.random() < 0.4:
            options[rng.choice(PENALTIES)] = rng.choice([0.5, 1.5])
        jobs.append(Job(root[:shared] + random_prompt(rng, length - shared), rng.randint(*output), options))
    return jobs


class Running:
    """Jobs that run together; a context manager that cancels what is left when a test fails."""

    def __init__(self, client: AsyncClient, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Running:
        self._tasks = [asyncio.create_task(job.run(self._client)) for job in self.jobs]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def unfinished(self) -> list[Job]:
        return [job for job, task in zip(self.jobs, self._tasks, strict=True) if not task.done()]

    async def progressed(self, tokens: int) -> None:
        """Wait until every unfinished job has got `tokens` more."""
        marks = [(job, len(job.token_ids) + tokens) for job in self.unfinished]
        while any(len(job.token_ids) < mark for job, mark in marks if job in self.unfinished):
            await asyncio.sleep(0.005)
            self._raise_failures()

    async def finished(self) -> None:
        """Wait for all and check each against the oracle."""
        await asyncio.gather(*self._tasks)
        for job in self.jobs:
            job.check()

    async def outcomes(self) -> list[BaseException | None]:
        """Wait for all; what each ended with."""
        return await asyncio.gather(*self._tasks, return_exceptions=True)

    def _raise_failures(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()
