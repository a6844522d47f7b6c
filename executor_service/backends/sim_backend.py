"""A backend without weights that proves block tables: a wrong, stale, evicted or half-written block changes its output.

Station: built by `registry`, called in the compute thread; calls `sim_sampler`. Needs numpy only.

All arithmetic is modulo 2**64; `mix` is a bijection with good avalanche, G an odd constant.

    digest(p)   = digest(p - 1) + mix(token(p), p), digest(-1) = ROOT. digest(p) is stored in the slot of position p;
                  digest(p - 1) is READ from the slot of position p - 1, through the block table.
    content     = sum over all positions p of digest(p) * G**p, every digest READ through the block table.
    next token  = mix(content, and seed and position if temperature > 0, and the history if penalised) % vocab_size.

With several KV groups each has digests and a content of its own, from a root of its own, and content is the sum over
groups g of content_g * GROUP**g; a group with a window sums over the window's positions only, one with chunks over
those of the newest token's chunk, at whose start its digests begin anew, from the root. A group with a state keeps one
digest in each block, in its first slot: that of the newest position in it. A row reads the one that it starts from
before any row writes, and content is digest(p) * G**p of the newest position p.

Groups may have block sizes of their own. A block has room for as many digests as the longest of them takes; one of a
shorter group leaves the others at 0. Whose tokens are written to a block that was last written in another size finds it
unwritten: bytes that were laid out otherwise mean nothing.

A row with an adapter adds salt(revision) with each token, so that the adapter's rows need digests of their own,
computed with it throughout. Any source is an adapter, and its revision is a digest of that text.

So the output depends on the content and the order of every block in the table, as attention does, and is computable
from the prompt alone: `expected_tokens`. An unwritten slot holds 0. The content of whole blocks is kept as one
polynomial per block and corrected with every write, so that a step costs per block, not per token of context.

Source: splitmix64's finaliser (Steele, Lea, Flood 2014); polynomial hashing (Karp and Rabin 1987).
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from executor_service.backends.base import (
    STATE,
    AdapterContent,
    Backend,
    BackendError,
    BlockCopies,
    CopyDirection,
    GroupTables,
    Int32,
    KvGroupSpec,
    MemoryProfile,
    ModelInfo,
    NotEnoughMemoryError,
    SettingError,
    StepBatch,
    StepResult,
    chunk_size,
    first_read,
)
from executor_service.backends.sim_digest import (
    adapter_revision,
    adapter_salt,
    group_constants,
    mix_array,
    powers_of_g,
)
from executor_service.backends.sim_sampler import choose_tokens

__all__ = ["SimBackend", "SimBackendConfig"]

_BYTES_PER_SLOT = 8
_DEFAULT_MAX_MODEL_LEN = 8192
_OVERSLEEP_S = 0.0003
_MAX_BLOCK_ID = 2**31 - 1

Uint64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SimBackendConfig:
    """What the sim backend is told; names as in `ExecutorConfig`.

    Units:
        sim_step_ms: milliseconds a step takes at least; sim_us_per_token: microseconds added for each token;
        swap_space: bytes of host blocks.

    Attributes:
        sim_windows: of each KV group, 0 for full attention, -1 for a state, -n for chunks of n tokens; a window is of 2
            tokens at least, since each reads the one before, and so are chunks.
        sim_block_sizes: tokens per block of each KV group.

    Defaults:
        max_model_len None: 8192, or what the blocks hold if that is less. No sim_windows: one group of full attention.
        No sim_block_sizes: block_size in every group.
    """

    model_name: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks_override: int | None = None
    swap_space: int = 0
    sim_step_ms: float = 0.0
    sim_us_per_token: float = 0.0
    sim_vocab_size: int = 32_000
    sim_num_blocks: int = 4096
    sim_eos_token_ids: tuple[int, ...] = ()
    sim_windows: tuple[int, ...] = ()
    sim_block_sizes: tuple[int, ...] = ()
    max_loras: int = 0


class _Anew(NamedTuple):
    """Which tokens' digests begin anew in their rows, at a chunk's start. Shape: both (T,).

    Attributes:
        tokens: whether they do.
        offsets: what is added to the running sum for such a token's digest.
    """

    tokens: npt.NDArray[np.bool_]
    offsets: Uint64


class SimBackend(Backend):
    """Digests in place of K/V.

    Args:
        config: sizes and times.

    Invariants:
        `_polynomials[b]` is the sum over the slots s of block b of `slots[b, s] * G**s`; `_writer` is -1 between steps.
        `_written_sizes[b]` is the block size that block b was last written in, 0 for none. A host block is what a block
        is: its slots, its polynomial and its size.
    """

    def __init__(self, config: SimBackendConfig) -> None:
        self._config = config
        self._num_blocks = config.num_blocks_override or config.sim_num_blocks
        windows = config.sim_windows or (0,)
        self._sizes = config.sim_block_sizes or (config.block_size,) * len(windows)
        self._slots_per_block = max(self._sizes)
        bytes_per_block = self._slots_per_block * _BYTES_PER_SLOT
        heads = {window: 0 if window == STATE else 1 for window in windows}
        self._groups = [
            KvGroupSpec(1, heads[window], heads[window], bytes_per_block, window, size)
            for window, size in zip(windows, config.sim_block_sizes or (0,) * len(windows), strict=False)
        ]
        self._roots, self._factors = group_constants(len(self._groups))
        self._salts = {0: 0}
        fits = (self._num_blocks - 1) // len(windows) * min(self._sizes)
        self._max_model_len = config.max_model_len or min(_DEFAULT_MAX_MODEL_LEN, fits)
        self._powers = powers_of_g(0)
        self._slots: Uint64 = np.zeros(0, dtype=np.uint64)
        self._polynomials: Uint64 = np.zeros(0, dtype=np.uint64)
        self._written_sizes: Int32 = np.zeros(0, dtype=np.int32)
        self._writer: Int32 = np.zeros(0, dtype=np.int32)
        self._host_slots: Uint64 = np.zeros(0, dtype=np.uint64)
        self._host_polynomials: Uint64 = np.zeros(0, dtype=np.uint64)
        self._host_written_sizes: Int32 = np.zeros(0, dtype=np.int32)

    @property
    def slots(self) -> Uint64:
        """The digests. Shape: (num_blocks * the largest block size,), read-only."""
        view = self._slots.view()
        view.flags.writeable = False
        return view

    def load(self) -> ModelInfo:
        """Describe the model; there is nothing to load.

        Raises:
            SettingError: an end-of-sequence id is not in the vocabulary, a window too short, or block sizes are not one
                for each window.
        """
        config = self._config
        for token_id in config.sim_eos_token_ids:
            if not 0 <= token_id < config.sim_vocab_size:
                message = f"--sim-eos-token-ids: expected ids in [0, {config.sim_vocab_size}), got {token_id}"
                raise SettingError("BAD_EOS_TOKEN_ID", message, got=token_id)
        for window in config.sim_windows:
            if window == 1:
                message = (
                    "--sim-windows: expected 0 for full attention, -1 for a state, windows of at least 2 tokens, or -n"
                    f" for chunks of n, got {window}"
                )
                raise SettingError("BAD_WINDOW", message, got=window)
        sizes, num_groups = config.sim_block_sizes, len(config.sim_windows or (0,))
        if sizes and (len(sizes) != num_groups or min(sizes) < 1):
            message = (
                "--sim-block-sizes: expected a block size of at least 1 for each KV group of --sim-windows, of which"
                f" there are {num_groups}, got {', '.join(map(str, sizes))}"
            )
            raise SettingError("BAD_BLOCK_SIZES", message, got=sizes)
        windows = "".join(f"-{window}" for window in config.sim_windows)
        return ModelInfo(
            model_name=config.model_name or "sim",
            max_adapters=config.max_loras,
            model_fingerprint=f"sim-1-vocab-{config.sim_vocab_size}{'-windows' if windows else ''}{windows}",
            device="cpu",
            dtype="uint64",
            kv_cache_dtype="uint64",
            vocab_size=config.sim_vocab_size,
            max_model_len=self._max_model_len,
            eos_token_ids=config.sim_eos_token_ids,
            block_size=config.block_size,
            kv_groups=tuple(self._groups),
            max_logprobs=0,
        )

    def profile_memory(self, max_num_batched_tokens: int, max_num_seqs: int) -> MemoryProfile:
        """Report the configured number of blocks, and the host blocks that the swap space holds.

        Raises:
            NotEnoughMemoryError: they do not hold one sequence of max_model_len.
        """
        num_blocks = self._num_blocks
        needed = 1 + sum(
            group.most_blocks(self._max_model_len, size, max_num_batched_tokens)
            for group, size in zip(self._groups, self._sizes, strict=True)
        )
        if num_blocks < needed:
            raise NotEnoughMemoryError(
                "NOT_ENOUGH_KV_MEMORY",
                f"a sequence of max_model_len {self._max_model_len} needs {needed} blocks of "
                f"{' or '.join(str(size) for size in sorted(set(self._sizes)))} tokens, the null block included, got "
                f"{num_blocks}; raise sim_num_blocks, or lower max_model_len",
                needed_blocks=needed,
                num_blocks=num_blocks,
            )
        bytes_per_block = self._slots_per_block * _BYTES_PER_SLOT
        num_host_blocks = min(self._config.swap_space // bytes_per_block, _MAX_BLOCK_ID)
        size = num_blocks * bytes_per_block
        return MemoryProfile(
            total_bytes=size + num_host_blocks * bytes_per_block,
            utilization=1.0,
            weights_bytes=0,
            peak_bytes=0,
            available_bytes=size,
            bytes_per_block=bytes_per_block,
            num_blocks=num_blocks,
            overridden=self._config.num_blocks_override is not None,
            num_host_blocks=num_host_blocks,
        )

    def initialize_kv_cache(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Start with unwritten slots."""
        self._slots = np.zeros(num_blocks * self._slots_per_block, dtype=np.uint64)
        self._polynomials = np.zeros(num_blocks, dtype=np.uint64)
        self._written_sizes = np.zeros(num_blocks, dtype=np.int32)
        self._writer = np.full(len(self._slots), -1, dtype=np.int32)
        self._host_slots = np.zeros(num_host_blocks * self._slots_per_block, dtype=np.uint64)
        self._host_polynomials = np.zeros(num_host_blocks, dtype=np.uint64)
        self._host_written_sizes = np.zeros(num_host_blocks, dtype=np.int32)
        self._powers = powers_of_g(max(self._max_model_len, self._slots_per_block))

    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        """Copy slots and polynomials, whatever the slots hold."""
        room = self._slots_per_block
        device = self._slots.reshape(-1, room), self._polynomials, self._written_sizes
        host = self._host_slots.reshape(-1, room), self._host_polynomials, self._host_written_sizes
        for run in copies:
            sources = host if run.direction is CopyDirection.HOST_TO_DEVICE else device
            targets = host if run.direction is CopyDirection.DEVICE_TO_HOST else device
            for source, target in zip(sources, targets, strict=True):  # type: ignore[assignment]
                target[run.target_ids] = source[run.source_ids]

    def read_adapter(self, source: str) -> AdapterContent:
        """Take any text for an adapter."""
        return AdapterContent(adapter_revision(source), rank=1, size_bytes=_BYTES_PER_SLOT, weights=None)

    def load_adapter(self, adapter_id: int, content: AdapterContent) -> None:
        """Note its salt."""
        self._salts[adapter_id] = adapter_salt(content.revision)

    def unload_adapter(self, adapter_id: int) -> None:
        """Forget its salt."""
        del self._salts[adapter_id]

    def execute(self, batch: StepBatch) -> StepResult:
        """Write the digests of all rows, then produce tokens, then wait for the step's time to pass.

        Raises:
            BackendError: rows wait for each other's blocks in a circle; nothing was written.
        """
        started = time.monotonic()
        for index, group in enumerate(self._groups):
            if group.window == STATE:
                self._write_states(batch, index)
            else:
                self._write(batch, index)
        result = StepResult(np.empty(0, dtype=np.int32))
        if batch.sampling is not None:
            contents = self._contents(batch, batch.sampling.rows)
            result = choose_tokens(batch.sampling, contents, self._config.sim_vocab_size)
        duration = self._config.sim_step_ms / 1e3 + self._config.sim_us_per_token * len(batch.token_ids) / 1e6
        _sleep_until(started + duration)
        return result

    def _write(self, batch: StepBatch, group: int) -> None:
        """Store each token's digest of one KV group in its slot and correct the blocks' polynomials."""
        starts, slots = batch.query_indptr[:-1], self._own_slots(batch.slot_mappings[group], group)
        self._require_size(slots, group)
        added = self._added(batch)
        sums = np.cumsum(added)
        anew = self._anew(batch, group, sums - added)
        # The digest of a row's token is the sum up to it, plus what the row's first token found, less what other rows
        # have put into the sum.
        before = sums[starts] - added[starts]
        offsets = self._found(batch, group, sums=sums, before=before, slots=slots, anew=anew)
        digests = sums + np.repeat(offsets, np.diff(batch.query_indptr))
        if anew is not None:
            digests = np.where(anew.tokens, sums + anew.offsets, digests)
        self._store(slots, digests)

    def _anew(self, batch: StepBatch, group: int, before: Uint64) -> _Anew | None:
        """Find the tokens whose digests go back to a chunk's start in the same row, from the sums before each token."""
        size = chunk_size(self._groups[group].window)
        if not size:
            return None
        firsts = np.arange(len(batch.positions)) - batch.positions % size
        tokens = firsts >= np.repeat(batch.query_indptr[:-1], np.diff(batch.query_indptr))
        return _Anew(tokens, self._roots[group] - before[np.where(tokens, firsts, 0)])

    def _write_states(self, batch: StepBatch, group: int) -> None:
        """Store the newest digest that each row has in each block that it writes, from the one that it starts from."""
        block_size, room, table = self._sizes[group], self._slots_per_block, batch.tables[group]
        starts, lasts = batch.query_indptr[:-1], batch.query_indptr[1:] - 1
        added = self._added(batch)
        sums = np.cumsum(added)
        first = batch.positions[starts]
        sources = table.block_ids[table.block_indptr[:-1] + np.maximum(first - 1, 0) // block_size].astype(np.int64)
        found = np.where(first > 0, self._slots[sources * room], self._roots[group])
        digests = sums + np.repeat(found - (sums[starts] - added[starts]), np.diff(batch.query_indptr))
        is_newest = batch.positions % block_size == block_size - 1
        is_newest[lasts] = True
        written = batch.slot_mappings[group][is_newest] // block_size * room
        self._require_size(written, group)
        self._store(written, digests[is_newest])

    def _added(self, batch: StepBatch) -> Uint64:
        """What each token adds to a digest. Shape: (T,)."""
        added = mix_array(batch.token_ids.astype(np.uint64) << np.uint64(32) | batch.positions.astype(np.uint64))
        if batch.adapter_ids is not None:
            salts = np.array([self._salts[adapter_id] for adapter_id in batch.adapter_ids.tolist()], dtype=np.uint64)
            added += np.repeat(salts, np.diff(batch.query_indptr))
        return added

    def _own_slots(self, slots: Int64, group: int) -> Int64:
        """Where a group's slots lie here. Shape: both (n,)."""
        size = self._sizes[group]
        return slots if size == self._slots_per_block else slots // size * self._slots_per_block + slots % size

    def _require_size(self, slots: Int64, group: int) -> None:
        """Make blocks unwritten that are about to be written in another size than they were."""
        if min(self._sizes) == self._slots_per_block:
            return
        blocks = np.unique(slots // self._slots_per_block)
        others = blocks[self._written_sizes[blocks] != self._sizes[group]]
        self._slots.reshape(-1, self._slots_per_block)[others] = 0
        self._polynomials[others] = 0
        self._written_sizes[others] = self._sizes[group]

    def _store(self, slots: Int64, digests: Uint64) -> None:
        """Write slots, none of them twice, and correct their blocks' polynomials."""
        blocks, places = np.divmod(slots, self._slots_per_block)
        np.add.at(self._polynomials, blocks, (digests - self._slots[slots]) * self._powers[places])
        self._slots[slots] = digests

    def _found(
        self, batch: StepBatch, group: int, *, sums: Uint64, before: Uint64, slots: Int64, anew: _Anew | None
    ) -> Uint64:
        """Read the digest of each row's previous position through its table; a chunk's first token has none.

        It may be written by another row of this step, which may wait for a third one.

        Args:
            batch: the step.
            group: the KV group.
            sums: (T,) running sum of what the tokens add.
            before: (R,) the sum before the row's first token.
            slots: (T,) where its tokens' digests lie here.
            anew: the tokens whose digests do not go back to what their rows find.

        Returns:
            (R,) the digest found less `before`.
        """
        block_size, table = self._sizes[group], batch.tables[group]
        first = batch.positions[batch.query_indptr[:-1]]
        goes_on = first > first_read(first, self._groups[group].window) if anew is not None else first > 0
        previous = np.maximum(first - 1, 0)
        previous_blocks = table.block_ids[table.block_indptr[:-1] + previous // block_size].astype(np.int64)
        previous_slots = previous_blocks * self._slots_per_block + previous % block_size
        offsets = np.where(goes_on, self._slots[previous_slots], self._roots[group]) - before
        self._writer[slots] = np.arange(len(slots), dtype=np.int32)
        sources = np.where(goes_on, self._writer[previous_slots], -1)
        self._writer[slots] = -1
        waiting = np.flatnonzero(sources >= 0)
        if len(waiting):
            source_rows = np.searchsorted(batch.query_indptr, sources, side="right") - 1
            known = sources < 0
            if anew is not None:
                at_once = anew.tokens[sources[waiting]]
                rows, waiting = waiting[at_once], waiting[~at_once]
                offsets[rows] = sums[sources[rows]] + anew.offsets[sources[rows]] - before[rows]
                known[rows] = True
            while len(waiting):
                ready = known[source_rows[waiting]]
                rows, waiting = waiting[ready], waiting[~ready]
                if not len(rows):
                    raise _circle(waiting)
                offsets[rows] = offsets[source_rows[rows]] + sums[sources[rows]] - before[rows]
                known[rows] = True
        return offsets

    def _contents(self, batch: StepBatch, rows: Int32) -> Uint64:
        """Read what the next tokens of these rows depend on, in all groups."""
        contents = np.zeros(len(rows), dtype=np.uint64)
        for group, size, table, factor in zip(self._groups, self._sizes, batch.tables, self._factors, strict=True):
            if group.window == STATE:
                newest = table.block_ids[table.block_indptr[rows + 1] - 1].astype(np.int64) * self._slots_per_block
                contents += self._slots[newest] * self._powers[batch.seq_lens[rows] - 1] * factor
            elif group.window:
                contents += self._window(rows, table, batch.seq_lens[rows], group.window, size) * factor
            else:
                contents += self._whole(rows, table, size) * factor
        return contents

    def _window(self, rows: Int32, table: GroupTables, seq_lens: Int32, window: int, block_size: int) -> Uint64:
        """Read the last `window` positions of the rows, or those of the newest token's chunk, slot by slot."""
        starts = first_read(seq_lens - np.int32(1), window)
        lengths = seq_lens - starts
        row_starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        positions = np.arange(lengths.sum()) - np.repeat(row_starts - starts, lengths)
        blocks = table.block_ids[np.repeat(table.block_indptr[rows], lengths) + positions // block_size]
        values = self._slots[blocks.astype(np.int64) * self._slots_per_block + positions % block_size]
        return np.add.reduceat(values * self._powers[positions], row_starts)

    def _whole(self, rows: Int32, table: GroupTables, block_size: int) -> Uint64:
        """Read everything the rows' tables hold: whole blocks by their polynomials, the last one slot by slot."""
        starts, ends = table.block_indptr[rows], table.block_indptr[rows + 1]
        lengths = ends - starts
        row_starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        in_row = np.arange(lengths.sum()) - np.repeat(row_starts, lengths)
        values = self._polynomials[table.block_ids[in_row + np.repeat(starts, lengths)]]
        places = np.arange(self._slots_per_block)
        last = self._slots.reshape(-1, self._slots_per_block)[table.block_ids[ends - 1]] * self._powers[places]
        last[places >= table.last_block_len[rows][:, None]] = 0
        values[row_starts + lengths - 1] = last.sum(axis=1)
        return np.add.reduceat(values * self._powers[in_row * block_size], row_starts)


def _sleep_until(moment: float) -> None:
    """Sleep until a moment of the monotonic clock; a plain sleep oversleeps by some 0.1 ms, which a step would show."""
    if (left := moment - time.monotonic() - _OVERSLEEP_S) > 0:
        time.sleep(left)
    while time.monotonic() < moment:
        select.select((), (), (), 0)  # lets the event loop's thread run; even a sleep of 0 takes a timer's slack, 50 us


def _circle(rows: Int64) -> BackendError:
    """Describe rows of which none can be computed first."""
    shown = [int(row) for row in rows[:8]]
    message = (
        f"block_tables: expected rows of which each reads blocks that can be filled before it, got rows {shown} that "
        "wait for each other's blocks; check that no two sequences share a block that both still write"
    )
    return BackendError("CIRCULAR_BLOCK_TABLES", message, rows=shown)
