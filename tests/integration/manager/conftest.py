"""Fixtures of the manager's integration tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.manager.fake_engine import Manager, running_manager


@pytest.fixture
async def manager() -> AsyncIterator[Manager]:
    """A server with a fake engine."""
    async with running_manager() as running:
        yield running
