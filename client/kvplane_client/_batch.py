"""Many prompts on one stream, so many at once.

Station: what ``AsyncClient.generate_batch`` runs on a stream of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvplane_client.errors import KvPlaneError
from kvplane_client.many import ManyStream
from kvplane_client.retry import Deadline
from kvplane_client.types import Completion, GenerateOptions, Prompt

__all__ = ["complete_all"]


async def complete_all(
    many: ManyStream,
    prompts: Iterable[Prompt],
    *,
    max_in_flight: int,
    deadline: Deadline,
    id_prefix: str | None,
    options: GenerateOptions,
) -> list[Completion | KvPlaneError]:
    """Returns for each prompt, in order, its completion or what ended it.

    Args:
        many: The stream.
        prompts: The prompts.
        max_in_flight: How many requests to have on the server at once.
        deadline: Of all of them.
        id_prefix: Of their ids; None lets the client choose.
        options: Of each, but for id and deadline.
    """
    gate = asyncio.Semaphore(max_in_flight)

    async def run_one(index: int, prompt: Prompt) -> Completion | KvPlaneError:
        own_id = f"{id_prefix}-{index}" if id_prefix else None
        async with gate:
            own = GenerateOptions(**options, request_id=own_id, deadline=deadline.remaining())
            try:
                return await many.submit(prompt, **own).completion()
            except KvPlaneError as error:
                return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_one(index, prompt)) for index, prompt in enumerate(prompts)]
    return [task.result() for task in tasks]
