"""Executors that compute wrong: the sim backend, each with one fault that a kernel or a runner can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from executor_service.backends.base import (
    BlockCopies,
    CopyDirection,
    GroupTables,
    Int32,
    StepBatch,
    StepResult,
)
from executor_service.backends.sim_backend import SimBackend, SimBackendConfig, Uint64
from tests.conformance.trial import BLOCK_SIZE, CHUNKS, NUM_BLOCKS, NUM_HOST_BLOCKS, STATES, VOCAB_SIZE, WINDOWS


class FaultyBackend(SimBackend):
    """A sim backend of the kit's size, and how it is spoiled."""

    WINDOWS: tuple[int, ...] = ()

    def __init__(self) -> None:
        groups = max(1, len(self.WINDOWS))
        super().__init__(
            SimBackendConfig(
                block_size=BLOCK_SIZE,
                sim_num_blocks=NUM_BLOCKS * groups,
                sim_vocab_size=VOCAB_SIZE,
                swap_space=NUM_HOST_BLOCKS * BLOCK_SIZE * 8 * groups,
                sim_windows=self.WINDOWS,
            )
        )

    def spoil(self, block: int) -> None:
        """Overwrite what a block holds."""
        self._slots.reshape(-1, BLOCK_SIZE)[block] ^= np.uint64(0x5555)
        powers = self._powers[:BLOCK_SIZE]
        self._polynomials[block] = (self._slots.reshape(-1, BLOCK_SIZE)[block] * powers).sum()

    def spoil_all(self) -> None:
        """Overwrite what every block holds."""
        for block in range(1, len(self._polynomials)):
            self.spoil(block)


def _with_tables(batch: StepBatch, **values: np.ndarray) -> StepBatch:  # type: ignore[type-arg]
    tables: list[GroupTables] = [dataclasses.replace(table, **values) for table in batch.tables]  # type: ignore[arg-type]
    return dataclasses.replace(batch, tables=tables)


class OffByOneInLastBlock(FaultyBackend):
    """Leaves out the last slot that is in use."""

    def execute(self, batch: StepBatch) -> StepResult:
        return super().execute(_with_tables(batch, last_block_len=batch.tables[0].last_block_len - 1))


class ReadsWholeLastBlock(FaultyBackend):
    """Takes every last block for a full one: slots beyond last_block_len, too."""

    def execute(self, batch: StepBatch) -> StepResult:
        whole = np.full_like(batch.tables[0].last_block_len, BLOCK_SIZE)
        return super().execute(_with_tables(batch, last_block_len=whole))


class WritesIntoSharedBlocks(FaultyBackend):
    """Where two rows have a block in common, it is not what it was afterwards."""

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        blocks, counts = np.unique(batch.tables[0].block_ids, return_counts=True)
        for block in blocks[counts > 1].tolist():
            self.spoil(block)
        return result


class MixesRows(FaultyBackend):
    """Gives each row's token to the next one."""

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        return dataclasses.replace(result, sampled_token_ids=np.roll(result.sampled_token_ids, 1))


class IgnoresCopies(FaultyBackend):
    """Copies nothing."""

    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        return


class CopiesNothingBack(FaultyBackend):
    """What was swapped out stays out."""

    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        super().copy_blocks([run for run in copies if run.direction is not CopyDirection.HOST_TO_DEVICE])


class CopiesAfterRows(FaultyBackend):
    """Copies once the step's rows have written."""

    def __init__(self) -> None:
        super().__init__()
        self._late: Sequence[BlockCopies] = ()

    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        self._late = copies

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        super().copy_blocks(self._late)
        self._late = ()
        return result


class ForgetsWhatIsCold(FaultyBackend):
    """Drops blocks that no step has named for three steps."""

    def __init__(self) -> None:
        super().__init__()
        self._last_named = np.zeros(NUM_BLOCKS, dtype=np.int64)
        self._steps = 0

    def execute(self, batch: StepBatch) -> StepResult:
        self._steps += 1
        self._last_named[batch.tables[0].block_ids] = self._steps
        for block in np.flatnonzero(self._last_named[: len(self._polynomials)] == self._steps - 4).tolist():
            self.spoil(block)
        return super().execute(batch)


class DrawsImpurely(FaultyBackend):
    """Random tokens depend on how many steps there were before."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def execute(self, batch: StepBatch) -> StepResult:
        self._steps += 1
        if batch.sampling is not None:
            seeds = batch.sampling.seeds + np.uint64(self._steps)
            batch = dataclasses.replace(batch, sampling=dataclasses.replace(batch.sampling, seeds=seeds))
        return super().execute(batch)


class ReadsBeforeItWrites(FaultyBackend):
    """Runs the rows of a step one after the other: a row does not see what a later one fills."""

    def execute(self, batch: StepBatch) -> StepResult:
        if batch.num_rows < 2:
            return super().execute(batch)
        tokens: list[np.ndarray] = []  # type: ignore[type-arg]
        for row in range(batch.num_rows):
            result = super().execute(_row_of(batch, row))
            tokens.append(result.sampled_token_ids)
        return StepResult(np.concatenate(tokens))


class FaultyGroups(FaultyBackend):
    """The same with a KV group of full attention and two of windows, one of which does not end with a block."""

    WINDOWS = WINDOWS


class IgnoresWindows(FaultyGroups):
    """Reads whatever a table names, before the window, too."""

    def _window(self, rows: Int32, table: GroupTables, seq_lens: Int32, window: int) -> Uint64:
        return self._whole(rows, table)


class ReadsOneTokenMore(FaultyGroups):
    """Takes a window for the tokens before the one that reads."""

    def _window(self, rows: Int32, table: GroupTables, seq_lens: Int32, window: int) -> Uint64:
        return super()._window(rows, table, seq_lens, window + 1)


class FaultyChunks(FaultyBackend):
    """The same with a KV group of full attention and one of chunks, which do not end with a block."""

    WINDOWS = CHUNKS


class TakesChunksForWindows(FaultyChunks):
    """Reads as many tokens as a chunk has, wherever it begins."""

    def _window(self, rows: Int32, table: GroupTables, seq_lens: Int32, window: int) -> Uint64:
        return super()._window(rows, table, seq_lens, -window)


class TakesChunksForLonger(FaultyChunks):
    """Has them begin at the multiples of one token more."""

    def _window(self, rows: Int32, table: GroupTables, seq_lens: Int32, window: int) -> Uint64:
        return super()._window(rows, table, seq_lens, window - 1)


class LeavesOutNullBlocks(FaultyGroups):
    """Takes a table without its null blocks, so that what is left stands for earlier positions."""

    def execute(self, batch: StepBatch) -> StepResult:
        tables = []
        for table in batch.tables:
            blocks = table.block_ids.copy()
            for start, end in zip(table.block_indptr[:-1].tolist(), table.block_indptr[1:].tolist(), strict=True):
                named = blocks[start:end][blocks[start:end] > 0]
                blocks[start:end] = np.resize(named, end - start)
            tables.append(dataclasses.replace(table, block_ids=blocks))
        return super().execute(dataclasses.replace(batch, tables=tables))


class TakesOneTableForAllGroups(FaultyGroups):
    """Writes and reads by the first group's table in every layer."""

    def execute(self, batch: StepBatch) -> StepResult:
        slots, tables = [batch.slot_mappings[0]] * len(WINDOWS), [batch.tables[0]] * len(WINDOWS)
        return super().execute(dataclasses.replace(batch, tables=tables, slot_mappings=slots))


class ReadsPrefixByTheFirstTable(FaultyGroups):
    """Writes by each group's table, and looks for what is there already where the first group has it."""

    def _found(self, batch: StepBatch, group: int, sums: Uint64, before: Uint64) -> Uint64:
        tables = [batch.tables[0]] * len(WINDOWS)
        return super()._found(dataclasses.replace(batch, tables=tables), group, sums, before)


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


def _row_of(batch: StepBatch, row: int) -> StepBatch:
    """One row of a step, as a step."""
    start, end = batch.query_indptr[row : row + 2].tolist()
    (table,) = batch.tables
    first, last = table.block_indptr[row : row + 2].tolist()
    sampling = batch.sampling
    if sampling is not None:
        mine = sampling.rows == row
        sampling = dataclasses.replace(
            sampling,
            rows=np.zeros(int(mine.sum()), dtype=np.int32),
            params_index=sampling.params_index[mine],
            seeds=sampling.seeds[mine],
            positions=sampling.positions[mine],
            histories={place: sampling.histories[at] for place, at in enumerate(np.flatnonzero(mine).tolist())}
            if sampling.histories
            else {},
        )
        if not mine.any():
            sampling = None
    return dataclasses.replace(
        batch,
        query_indptr=np.array([0, end - start], dtype=np.int32),
        token_ids=batch.token_ids[start:end],
        positions=batch.positions[start:end],
        seq_lens=batch.seq_lens[row : row + 1],
        tables=[
            GroupTables(
                np.array([0, last - first], dtype=np.int32),
                table.block_ids[first:last],
                table.last_block_len[row : row + 1],
            )
        ],
        slot_mappings=[batch.slot_mappings[0][start:end]],
        sampling=sampling,
    )
