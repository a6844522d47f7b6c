"""Executors that compute wrong: the sim backend, each with one fault that a kernel or a runner can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from executor_service.backends.base import (
    BlockCopies,
    CopyDirection,
    GroupTables,
    Int32,
    StepBatch,
    StepResult,
)
from executor_service.backends.sim_backend import Int64, SimBackend, SimBackendConfig, Uint64
from tests.conformance.trial import (
    BLOCK_SIZE,
    CHUNKS,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    UNEQUAL,
    VOCAB_SIZE,
    WINDOWS,
    unequal,
)


class FaultyBackend(SimBackend):
    """A sim backend of the kit's size, and how it is spoiled."""

    WINDOWS: tuple[int, ...] = ()
    SIZES: tuple[int, ...] = ()
    MAX_LORAS = 0

    def __init__(self) -> None:
        groups = max(1, len(self.WINDOWS))
        config = SimBackendConfig(
            block_size=BLOCK_SIZE,
            sim_num_blocks=NUM_BLOCKS * groups,
            sim_vocab_size=VOCAB_SIZE,
            swap_space=NUM_HOST_BLOCKS * BLOCK_SIZE * 8 * groups,
            sim_windows=self.WINDOWS,
            max_loras=self.MAX_LORAS,
        )
        if self.SIZES:
            config = dataclasses.replace(config, **unequal(self.WINDOWS, self.SIZES))  # type: ignore[arg-type]
        super().__init__(config)

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


class DrawsByRowLength(FaultyBackend):
    """Random tokens depend on how many tokens their row computes."""

    def execute(self, batch: StepBatch) -> StepResult:
        if batch.sampling is not None:
            lengths = np.diff(batch.query_indptr)[batch.sampling.rows].astype(np.uint64)
            sampling = dataclasses.replace(batch.sampling, seeds=batch.sampling.seeds + lengths)
            batch = dataclasses.replace(batch, sampling=sampling)
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

    def _window(self, rows: Int32, table: GroupTables, seq_lens: Int32, window: int, block_size: int) -> Uint64:
        return super()._window(rows, table, seq_lens, -window, block_size)


class TakesChunksForLonger(FaultyChunks):
    """Has them begin at the multiples of one token more."""

    def _window(self, rows: Int32, table: GroupTables, seq_lens: Int32, window: int, block_size: int) -> Uint64:
        return super()._window(rows, table, seq_lens, window - 1, block_size)


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

    def _found(self, batch: StepBatch, group: int, **values: Any) -> Uint64:
        tables = [batch.tables[0]] * len(WINDOWS)
        return super()._found(dataclasses.replace(batch, tables=tables), group, **values)


class ReadsShortBlocksAsLong(FaultyBackend):
    """Takes no group's blocks for shorter than the first one's when it looks up what a window reads."""

    WINDOWS = WINDOWS
    SIZES = UNEQUAL

    def _window(self, rows: Int32, table: GroupTables, seq_lens: Int32, window: int, block_size: int) -> Uint64:
        return super()._window(rows, table, seq_lens, window, max(block_size, self.SIZES[0]))


class FaultyFullGroups(FaultyBackend):
    """Two groups of full attention, the second of longer blocks."""

    WINDOWS = (0, 0)
    SIZES = (4, 8)


class TakesLastBlockLenOfTheFirstGroup(FaultyFullGroups):
    """Reads as many slots of every group's last block as are in use in the first one's."""

    def execute(self, batch: StepBatch) -> StepResult:
        return super().execute(_with_tables(batch, last_block_len=batch.tables[0].last_block_len))


class ReadsWhatAnotherGroupLeft(FaultyFullGroups):
    """Takes slots of a block for its own that were another group's, in blocks of more tokens."""

    def _require_size(self, slots: Int64, group: int) -> None:
        return


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
