"""Builds the steps that cases send.

Station: called by `bench`; knows the wire, no executor. A `Track` is a sequence as the kit follows it, a `Row` the part
of it that one step computes. Blocks are logical numbers here, from 0, of as many tokens as all KV groups' block sizes
have for a common multiple: with G groups of one size, group g keeps logical block b in block 1 + b * G + g, and where
sizes differ each group has as many blocks of it in a row as it takes. So no block is in tables of two groups. In the
tables of a sliding window, of chunks, or of states, every entry that may be the null block is, as a manager has it that
frees blocks as the window moves.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvplane.common.v1 import common_pb2
from kvplane.executor.v1 import executor_service_pb2 as pb

__all__ = [
    "D2D",
    "D2H",
    "H2D",
    "Adapter",
    "Copy",
    "Geometry",
    "Row",
    "Sample",
    "Track",
    "build_step",
    "column",
    "floats_of",
    "greedy",
    "values_of",
]

D2D = pb.COPY_DIRECTION_DEVICE_TO_DEVICE
D2H = pb.COPY_DIRECTION_DEVICE_TO_HOST
H2D = pb.COPY_DIRECTION_HOST_TO_DEVICE


@dataclass(frozen=True)
class Geometry:
    """What the layout of a step depends on.

    Attributes:
        block_sizes: Of each KV group, tokens per block.
        windows: Of each KV group, in tokens, 0 for full attention and for states, the size of chunks negated. Each has
            a table of its own.
        num_blocks: Logical blocks.
        num_host_blocks: Logical host blocks.
        states: The groups that keep a state.
    """

    block_sizes: tuple[int, ...]
    windows: tuple[int, ...]
    num_blocks: int
    num_host_blocks: int
    states: frozenset[int] = frozenset()

    @property
    def num_groups(self) -> int:
        """KV groups."""
        return len(self.windows)

    @property
    def block_size(self) -> int:
        """Tokens per logical block."""
        return math.lcm(*self.block_sizes)

    @property
    def blocks_each(self) -> int:
        """Blocks that all groups together keep a logical block in."""
        return sum(self.block_size // size for size in self.block_sizes)

    def pieces(self, block: int, group: int) -> range:
        """The blocks in which a group keeps a logical block."""
        *before, own = (self.block_size // size for size in self.block_sizes[: group + 1])
        first = 1 + block * self.blocks_each + sum(before)
        return range(first, first + own)

    def physical(self, block: int, group: int) -> int:
        """The first of them."""
        return self.pieces(block, group)[0]

    def host_pieces(self, block: int, group: int) -> range:
        """The same in host memory, which has no null block."""
        pieces = self.pieces(block, group)
        return range(pieces.start - 1, pieces.stop - 1)

    def first_read(self, group: int, position: int) -> int:
        """The place of the first logical block that a row from a position on reads, or starts from, in a group."""
        return self.first_needed(group, position) // self.block_size

    def first_needed(self, group: int, position: int) -> int:
        """The first position whose block a row from a position on reads in a group, or starts from."""
        return max(0, position - 1) if group in self.states else self.first_position(group, position)

    def first_position(self, group: int, position: int) -> int:
        """The first position that a token at a position reads."""
        window = self.windows[group]
        if window < 0:
            return position - position % -window
        return max(0, position - window + 1) if window else 0


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that is loaded; fields as in `LoraAdapter`."""

    name: str
    source: str
    revision: str
    adapter_id: int


@dataclass
class Track:
    """A sequence and where its K/V lies.

    Attributes:
        tokens: What is known of it.
        blocks: Its logical blocks, enough for all that will be computed.
        computed: How many tokens have K/V once all steps built so far have run.
        of_group: Other logical blocks than those, of a group that has such.
        adapter: What its tokens are computed with; None is the model itself.
    """

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    of_group: dict[int, list[int]] = field(default_factory=dict)
    adapter: Adapter | None = None

    def next(self, count: int | None = None, **values: object) -> Row:
        """A row that computes the next tokens, all that are known without a count."""
        start = self.computed
        self.computed = len(self.tokens) if count is None else start + count
        return Row(self, start, self.computed, **values)  # type: ignore[arg-type]

    def fed(self, sample: int, **values: object) -> Row:
        """A row whose one token is a sample of the step before."""
        start = self.computed
        self.computed = start + 1
        return Row(self, start, start + 1, feed=sample, **values)  # type: ignore[arg-type]

    def grow(self, blocks: list[int]) -> None:
        """Adds blocks, for all groups."""
        self.blocks.extend(blocks)
        for own in self.of_group.values():
            own.extend(blocks)

    def blocks_of(self, group: int) -> list[int]:
        """A group's logical blocks."""
        return self.of_group.get(group, self.blocks)

    def fork(self, blocks: list[int]) -> Track:
        """Another sequence that begins with the same tokens."""
        return Track(list(self.tokens), blocks, self.computed, adapter=self.adapter)


@dataclass(frozen=True)
class Sample:
    """How one token is drawn. history: tokens and how many of them are prompt, where params penalise."""

    params: pb.TokenSampling
    seed: int = 0
    history: tuple[Sequence[int], int] | None = None


@dataclass(frozen=True)
class Row:
    """The tokens [start, end) of a sequence.

    Attributes:
        track: The sequence.
        start: The first position computed.
        end: The sequence's length after the step.
        feed: The sample of the step before that is the last token, -1 for none.
        samples: How tokens are drawn after it; None is one greedy token with log probabilities, () is none.
        keeps: Whether its tables name blocks that lie before a window, or before a state, too.
    """

    track: Track
    start: int
    end: int
    feed: int = -1
    samples: Sequence[Sample] | None = None
    keeps: bool = False


Copy = tuple[int, int, int]
"""Direction, source, target; logical blocks."""


@dataclass
class StepExtras:
    """What a step has beside its rows. tags: by logical block; each group's block gets it."""

    feeds_from_step_id: int = 0
    tags: dict[int, bytes] = field(default_factory=dict)
    copies: Sequence[Copy] = ()


def column(values: Iterable[int]) -> common_pb2.Int32Array:
    """Packs integers as the wire has them."""
    numbers = list(values)
    return common_pb2.Int32Array(data=struct.pack(f"<{len(numbers)}i", *numbers))


def values_of(array: common_pb2.Int32Array) -> list[int]:
    """Unpacks integers."""
    return list(struct.unpack(f"<{len(array.data) // 4}i", array.data))


def floats_of(array: common_pb2.Float32Array) -> list[float]:
    """Unpacks numbers."""
    return list(struct.unpack(f"<{len(array.data) // 4}f", array.data))


def greedy(num_logprobs: int = -1) -> pb.TokenSampling:
    """Parameters of which each changes nothing: the likeliest token. The caller may change the message."""
    return pb.TokenSampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0, num_logprobs=num_logprobs)


def indptr_of(lengths: Iterable[int]) -> common_pb2.Int32Array:
    """Packs the borders of pieces of these lengths."""
    return column(itertools.accumulate(lengths, initial=0))


def build_step(
    geometry: Geometry,
    step_id: int,
    kv_epoch: int,
    rows: Sequence[Row],
    *,
    default: Sample,
    extras: StepExtras,
) -> pb.ExecuteRequest:
    """Lays out a step as the contract wants it.

    Args:
        geometry: Of the cache.
        step_id: The step's.
        kv_epoch: The content's.
        rows: At least one token each; a token that is not known yet, as of a row that is fed, is sent as -1.
        default: How rows sample that do not say.
        extras: Feeds, tags and copies.
    """
    lengths = [row.end - row.start for row in rows]
    request = pb.ExecuteRequest(
        step_id=step_id,
        kv_epoch=kv_epoch,
        query_indptr=indptr_of(lengths),
        token_ids=column(token for row in rows for token in _tokens(row)),
        positions=column(position for row in rows for position in range(row.start, row.end)),
        block_tables=[
            pb.BlockTables(
                block_indptr=indptr_of(-(-row.end // size) for row in rows),
                block_ids=column(block for row in rows for block in _table(geometry, row, group)),
                last_block_len=column((row.end - 1) % size + 1 for row in rows),
            )
            for group, size in enumerate(geometry.block_sizes)
        ],
        feeds_from_step_id=extras.feeds_from_step_id,
    )
    if any(row.feed >= 0 for row in rows):
        request.feeds_from.CopyFrom(column(row.feed for row in rows))
    if any(row.track.adapter is not None for row in rows):
        request.adapter_ids.CopyFrom(column(row.track.adapter.adapter_id if row.track.adapter else 0 for row in rows))
    samples = [
        (index, one) for index, row in enumerate(rows) for one in ([default] if row.samples is None else row.samples)
    ]
    if samples:
        request.sampling.CopyFrom(_sampling(samples))
    if extras.tags:
        request.block_tags.CopyFrom(_tags(geometry, extras.tags))
    if extras.copies:
        request.copies.CopyFrom(_copies(geometry, extras.copies))
    return request


def _table(geometry: Geometry, row: Row, group: int) -> list[int]:
    """The row's blocks in a group, as the executor numbers them."""
    size = geometry.block_sizes[group]
    length = -(-row.end // size)
    blocks = [piece for block in row.track.blocks_of(group) for piece in geometry.pieces(block, group)][:length]
    assert len(blocks) == length
    null = 0 if row.keeps else geometry.first_needed(group, row.start) // size
    return [0] * null + blocks[null:]


def _tokens(row: Row) -> list[int]:
    """The row's tokens, -1 for what is fed."""
    known = row.track.tokens[row.start : row.end]
    if row.feed >= 0:
        known = known[: row.end - row.start - 1]
    return known + [-1] * (row.end - row.start - len(known))


def _sampling(samples: Sequence[tuple[int, Sample]]) -> pb.SamplingBatch:
    distinct: list[pb.TokenSampling] = []
    for _, one in samples:
        if one.params not in distinct:
            distinct.append(one.params)
    batch = pb.SamplingBatch(
        rows=column(row for row, _ in samples),
        params=distinct,
        params_index=column(distinct.index(one.params) for _, one in samples),
        seeds=[one.seed for _, one in samples],
    )
    histories = [(place, one.history) for place, (_, one) in enumerate(samples) if one.history is not None]
    if histories:
        batch.penalties.CopyFrom(
            pb.PenaltyHistories(
                sample_index=column(place for place, _ in histories),
                indptr=indptr_of(len(tokens) for _, (tokens, _) in histories),
                token_ids=column(token for _, (tokens, _) in histories for token in tokens),
                prompt_lens=column(prompt_len for _, (_, prompt_len) in histories),
            )
        )
    return batch


def _tags(geometry: Geometry, tags: dict[int, bytes]) -> pb.BlockTags:
    groups = range(geometry.num_groups)
    each = [(piece, tag) for block, tag in tags.items() for group in groups for piece in geometry.pieces(block, group)]
    return pb.BlockTags(block_ids=column(block for block, _ in each), tags=[tag for _, tag in each])


def _copies(geometry: Geometry, copies: Sequence[Copy]) -> pb.BlockCopies:
    each = [
        (direction, *pair)
        for direction, source, target in copies
        for group in range(geometry.num_groups)
        for pair in zip(
            (geometry.host_pieces if direction == H2D else geometry.pieces)(source, group),
            (geometry.host_pieces if direction == D2H else geometry.pieces)(target, group),
            strict=True,
        )
    ]
    directions, sources, targets = zip(*each, strict=True)
    return pb.BlockCopies(directions=column(directions), source_ids=column(sources), target_ids=column(targets))
