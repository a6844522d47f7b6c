"""Executors that keep states wrong: the sim backend with a KV group of states, each with one fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from executor_service.backends.base import BlockCopies, CopyDirection, StepBatch, StepResult
from executor_service.backends.sim_backend import Uint64
from tests.conformance.broken_backends import FaultyBackend
from tests.conformance.trial import BLOCK_SIZE, STATES


class FaultyStates(FaultyBackend):
    """The same with a KV group of full attention and one that keeps a state."""

    WINDOWS = STATES

    def _write_states(self, batch: StepBatch, group: int) -> None:
        before = self._slots.copy()
        super()._write_states(batch, group)
        table, starts = batch.tables[group], batch.positions[batch.query_indptr[:-1]]
        for row, (start, seq_len) in enumerate(zip(starts.tolist(), batch.seq_lens.tolist(), strict=True)):
            entries = table.block_ids[slice(*table.block_indptr[row : row + 2])].tolist()
            self.left(entries, start, seq_len, before)

    def left(self, entries: list[int], start: int, seq_len: int, before: Uint64) -> None:
        """A row has left its states.

        Args:
            entries: its table.
            start: its first position.
            seq_len: its sequence's length now.
            before: what all slots held before the step.
        """

    def put(self, block: int, state: int) -> None:
        """Put a state into a block."""
        slots = np.array([block * BLOCK_SIZE])
        self._store(slots, np.array([state], dtype=np.uint64))

    def state(self, block: int) -> int:
        """The state in a block."""
        return int(self._slots[block * BLOCK_SIZE])


class LeavesNoCheckpoints(FaultyStates):
    """Leaves a state in a row's last block, and none in those that it fills on the way."""

    def left(self, entries: list[int], start: int, seq_len: int, before: Uint64) -> None:
        for block in entries[start // BLOCK_SIZE : -1]:
            self.put(block, int(before[block * BLOCK_SIZE]))


class LeavesCheckpointsOfWholeBlocksOnly(FaultyStates):
    """Leaves none in a block that another row has begun."""

    def left(self, entries: list[int], start: int, seq_len: int, before: Uint64) -> None:
        block = entries[start // BLOCK_SIZE]
        if start % BLOCK_SIZE and seq_len > (start // BLOCK_SIZE + 1) * BLOCK_SIZE:
            self.put(block, int(before[block * BLOCK_SIZE]))


class LeavesStatesWhereRowsStart(FaultyStates):
    """Leaves the newest state in the block that a row started from, too."""

    def left(self, entries: list[int], start: int, seq_len: int, before: Uint64) -> None:
        if start:
            self.put(entries[(start - 1) // BLOCK_SIZE], self.state(entries[-1]))


class StartsRowsInTurn(FaultyStates):
    """Has a row that starts from a checkpoint which another row of the step has started from go on from that row."""

    def execute(self, batch: StepBatch) -> StepResult:
        self._taken: dict[int, int] = {}
        return super().execute(batch)

    def left(self, entries: list[int], start: int, seq_len: int, before: Uint64) -> None:
        if start and start % BLOCK_SIZE == 0:
            source = entries[start // BLOCK_SIZE - 1]
            if source in self._taken:
                self.put(entries[-1], (self.state(entries[-1]) + self._taken[source]) % 2**64)
            self._taken[source] = self.state(entries[-1])


class StartsFromWhatIsThere(FaultyStates):
    """Has a sequence begin from whatever state its first block holds."""

    def left(self, entries: list[int], start: int, seq_len: int, before: Uint64) -> None:
        found = int(before[entries[0] * BLOCK_SIZE])
        if not start and found:
            for block in entries:
                self.put(block, (self.state(block) + found) % 2**64)


class TakesTheFirstStateNamed(FaultyStates):
    """Starts from the first entry that is not null."""

    def _write_states(self, batch: StepBatch, group: int) -> None:
        tables = list(batch.tables)
        blocks = tables[group].block_ids.copy()
        starts, indptr = batch.positions[batch.query_indptr[:-1]], tables[group].block_indptr
        for start, first, end in zip(starts.tolist(), indptr[:-1].tolist(), indptr[1:].tolist(), strict=True):
            if start and start % BLOCK_SIZE == 0:  # else it would write there as well
                named = blocks[first:end][blocks[first:end] > 0]
                blocks[first + start // BLOCK_SIZE - 1] = named[0]
        tables[group] = dataclasses.replace(tables[group], block_ids=blocks)
        super()._write_states(dataclasses.replace(batch, tables=tables), group)


class TakesNullForNoTokens(FaultyStates):
    """Starts from the state of no tokens where a table begins with the null block."""

    def left(self, entries: list[int], start: int, seq_len: int, before: Uint64) -> None:
        if entries[0] == 0:
            lost = int(before[entries[(start - 1) // BLOCK_SIZE] * BLOCK_SIZE]) - int(self._roots[1])
            for block in entries[start // BLOCK_SIZE :]:
                self.put(block, (self.state(block) - lost) % 2**64)


class StartsChunksAnew(FaultyStates):
    """Starts a row of several tokens that begins within a block from the checkpoint before that block."""

    def left(self, entries: list[int], start: int, seq_len: int, before: Uint64) -> None:
        if seq_len - start > 1 and start % BLOCK_SIZE and start > BLOCK_SIZE:
            lost = int(before[entries[start // BLOCK_SIZE] * BLOCK_SIZE])
            lost -= int(before[entries[start // BLOCK_SIZE - 1] * BLOCK_SIZE])
            for block in entries[start // BLOCK_SIZE :]:
                self.put(block, (self.state(block) - lost) % 2**64)


class KeepsStatesBesideBlocks(FaultyStates):
    """Keeps the newest state of a sequence by the block it lies in and not in it: no copy takes it along.

    Those of whole blocks it does keep in them.
    """

    ONLY: CopyDirection | None = None

    def __init__(self) -> None:
        super().__init__()
        self._in_use: set[int] = set()

    def left(self, entries: list[int], start: int, seq_len: int, before: Uint64) -> None:
        self._in_use -= set(entries)
        if seq_len % BLOCK_SIZE:
            self._in_use.add(entries[-1])

    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        kept = []
        for run in copies:
            stays = run.direction is CopyDirection.HOST_TO_DEVICE or self.ONLY not in (None, run.direction)
            mine = np.array([stays or block not in self._in_use for block in run.source_ids.tolist()], dtype=bool)
            kept.append(BlockCopies(run.direction, run.source_ids[mine], run.target_ids[mine]))
        super().copy_blocks(kept)


class SwapsNoStatesInUse(KeepsStatesBesideBlocks):
    """The same where blocks go to host memory alone."""

    ONLY = CopyDirection.DEVICE_TO_HOST
