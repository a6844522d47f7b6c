"""Asks an executor what comes after sequences in the plainest way: each alone, whole, in empty blocks.

Station: what `runner` has `SelfJudge` ask with.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from kvplane_client.conformance.judges import Output, Question
from kvplane_client.conformance.notebook import Notebook
from kvplane_client.conformance.steps import Adapter, Track
from kvplane_client.conformance.stream import Stream
from kvplane_client.conformance.target import Target

__all__ = ["ask_alone"]


def ask_alone(target: Target) -> Callable[[Sequence[Question]], Awaitable[list[Output]]]:
    """Returns what `SelfJudge` asks with."""

    async def ask(questions: Sequence[Question]) -> list[Output]:
        """Answers them adapter by adapter, since an executor need not have room for two."""
        outputs: dict[Question, Output] = {}
        for revision in dict.fromkeys(question.key[1] for question in questions):
            queue = deque(question for question in questions if question.key[1] == revision)
            while queue:
                async with _empty(target) as stream:
                    await _answer(target, stream, queue, outputs)
        return [outputs[question] for question in questions]

    return ask


async def _answer(target: Target, stream: Stream, queue: deque[Question], outputs: dict[Question, Output]) -> None:
    """Answers questions of one adapter, as many as there are blocks for."""
    geometry, first_free = target.geometry, 0
    adapter = await _loaded(target, queue[0].adapter)
    while queue:
        count = -(-len(queue[0].tokens) // geometry.block_size)
        if first_free + count > geometry.num_blocks:
            break
        question = queue.popleft()
        track = Track(list(question.tokens), list(range(first_free, first_free + count)), adapter=adapter)
        first_free += count
        outputs[question] = (await stream.step(track.next())).outputs[0]


async def _loaded(target: Target, adapter: Adapter | None) -> Adapter | None:
    """The adapter as it is loaded now: at the revision that it had."""
    if adapter is None:
        return None
    loaded = await target.load_adapter(adapter.name, adapter.source, adapter.revision)
    return dataclasses.replace(adapter, adapter_id=loaded.adapter_id)


@asynccontextmanager
async def _empty(target: Target) -> AsyncIterator[Stream]:
    """A stream on an empty cache; nobody judges what comes of it."""
    stream = Stream(Notebook(target, await target.fresh()), target.stub.Execute())
    try:
        yield stream
    finally:
        stream.cancel()
