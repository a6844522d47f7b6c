"""The question of whether a server is ready, asked again and again while it starts.

Station: the supervisor's probe, over the client library.
"""

from __future__ import annotations

import asyncio

from kvplane_client.async_client import AsyncClient
from kvplane_client.errors import UnavailableError
from kvplane_client.manager_types import ExecutorState, Model

__all__ = ["ServerProbe"]

_PAUSE = 0.3
_MISSING = {
    "connection": "the manager does not answer yet",
    "health": "no executor is ready yet",
    "model": "no model is known yet",
}


class ServerProbe:
    """Asks the server whether an executor serves that did not serve before.

    Args:
        client: A client that does not retry.
        seconds: How long one question may take.
    """

    def __init__(self, client: AsyncClient, seconds: float = 1.0) -> None:
        self._client = client
        self._seconds = seconds
        self._served_before: set[str] = set()

    async def __call__(self) -> Model | str:
        """Returns the model, or what is missing."""
        try:
            model = await self._client.wait_ready(self._seconds)
            executors = await self._client.list_executors()
        except UnavailableError as error:
            return _MISSING.get(error.metadata.get("missing", ""), error.message)
        active = {info.executor_id for info in executors if info.state is ExecutorState.ACTIVE}
        if active <= self._served_before:
            await asyncio.sleep(_PAUSE)
            errors = [info.last_error for info in executors if info.last_error]
            return errors[-1] if errors else "the executor is not in use yet"
        self._served_before |= active
        return model
