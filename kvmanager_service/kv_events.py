"""The cache's events for those who follow it: waiting for the next ones, and the state they build on.

Station: owned by `StepLoop`, which says when something may have changed; read by the servicer of WatchKvEvents. A
follower that is too slow is told that its events are forgotten, and costs nobody else anything.
"""

from __future__ import annotations

import asyncio
import secrets

from kvmanager_service.core.block_events import BlockEvent, BlockEventLog
from kvmanager_service.core.errors import CoreError

__all__ = ["KvEvents"]


class KvEvents:
    """A log and who waits for it.

    Args:
        capacity: how many events are kept.

    Attributes:
        log: where pools write.
        log_id: names this log; the numbers of another one mean nothing here.
    """

    def __init__(self, capacity: int) -> None:
        self.log = BlockEventLog(capacity)
        self.log_id = secrets.token_hex(8)
        self._told = self.log.next_sequence
        self._changed = asyncio.Event()
        self._end: CoreError | None = None

    def notify(self) -> None:
        """Wake who waits, if anything has changed since the last call."""
        if self._told != self.log.next_sequence:
            self._told = self.log.next_sequence
            self._wake()

    def close(self, reason: CoreError) -> None:
        """Nothing will change any more: who waits, or will, is told the reason."""
        self._end = self._end or reason
        self._wake()

    async def next(self, sequence: int, most: int) -> list[BlockEvent]:
        """Wait for events from a number on.

        Returns:
            At least one, at most `most`.

        Raises:
            EventsForgottenError: see `BlockEventLog.since`.
            CoreError: the log was closed.
        """
        while not (events := self.log.since(sequence, most)):
            if self._end is not None:
                raise self._end
            await self._changed.wait()
        return events

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
