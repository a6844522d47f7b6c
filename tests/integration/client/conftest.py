from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from kvplane_client import AsyncClient, RetryPolicy

from tests.integration.client.scripted_manager import ScriptedManager, ThreadedManager

QUICK = RetryPolicy(max_attempts=4, initial_backoff=0.01, max_backoff=0.02)


@pytest.fixture
async def manager() -> AsyncIterator[ScriptedManager]:
    """A manager in the test's loop."""
    scripted = ScriptedManager()
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
async def client(manager: ScriptedManager) -> AsyncIterator[AsyncClient]:
    """A client of it that retries quickly."""
    async with AsyncClient(manager.address, retry=QUICK) as connected:
        yield connected


@pytest.fixture
def threaded_manager() -> Iterator[ThreadedManager]:
    """A manager for tests that block."""
    with ThreadedManager() as scripted:
        yield scripted
