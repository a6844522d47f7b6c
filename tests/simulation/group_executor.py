"""An executor for any mix of KV groups, and the tokens a request must get, computed without any block.

In each slot it keeps a digest of the token, its position and the digests of all positions the token reads *through the
block table*; in each state block one of the token and the state before. The next token is a function of the digests of
all groups. So one null, wrong, stale or half-written block among those read changes an output.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

from kvmanager_service.core.adoption import TaggedBlock
from kvmanager_service.core.block_tag import decode_tag, encode_tag
from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.kv_groups import ChunkedLocal, KVGroup, RecurrentState, SlidingWindow
from kvmanager_service.core.step import BlockCopy, Step, StepResult

VOCAB_SIZE = 50
EMPTY = b"\0" * 8


def digest(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=8).digest()


def first_read(group: KVGroup, position: int) -> int:
    """The first position that an attention layer's token reads, from the type's definition."""
    if isinstance(group, SlidingWindow):
        return max(0, position - group.window + 1)
    if isinstance(group, ChunkedLocal):
        return position // group.chunk * group.chunk
    return 0


def place(position: int) -> bytes:
    """A position or a token, -1 for one that failed to be sampled."""
    return position.to_bytes(4, "little", signed=True)


def next_token(digests: list[bytes]) -> int:
    return int.from_bytes(digest(*digests), "little") % VOCAB_SIZE


class Oracle:
    """What any request must get, computed on plain lists."""

    def __init__(self, groups: list[KVGroup]) -> None:
        self.groups = groups

    def outputs(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        kept: list[list[bytes]] = [[] for _ in self.groups]
        while True:
            for group, digests in zip(self.groups, kept, strict=True):
                for position in range(len(digests), len(tokens)):
                    token = place(tokens[position])
                    if isinstance(group, RecurrentState):
                        digests.append(digest(token, digests[-1] if digests else EMPTY))
                    else:
                        read = digests[first_read(group, position) : position]
                        digests.append(digest(token, place(position), *read))
            if len(tokens) == len(prompt) + count:
                return tokens[len(prompt) :]
            tokens.append(next_token([digests[-1] for digests in kept]))


@dataclass
class SentRow:
    """A row as it would be on the wire: tables and tokens as they are when it is scheduled."""

    start: int
    stop: int
    tokens: list[int]
    tables: list[list[int]]
    feeds_from: int
    num_samples: int


@dataclass
class SentStep:
    step_id: int
    rows: list[SentRow]
    tags: list[tuple[int, bytes]]
    copies: list[BlockCopy]


def send(step: Step) -> SentStep:
    """What the manager knows of the step at this moment."""
    rows = []
    for row in step.rows:
        request = row.request
        tokens = array("i", request.tokens(row.start, min(row.stop, request.num_tokens))).tolist()
        tables = [array("i", bytes(table.block_id_bytes)).tolist() for table in request.tables]
        num_samples = 0 if row.sample_index < 0 else 1 + len(row.branches or ())
        rows.append(SentRow(row.start, row.stop, tokens, tables, row.feeds_from, num_samples))
    tags = [(block_id, b"" if content is None else encode_tag(content)) for block_id, content in step.tags]
    return SentStep(step.step_id, rows, tags, step.copies)


class GroupExecutor:
    """Blocks of all groups in one memory, by id."""

    def __init__(self, groups: list[KVGroup]) -> None:
        self.groups = groups
        self.slots: dict[tuple[int, int], bytes] = {}
        self.states: dict[int, bytes] = {}
        self.tags: dict[int, bytes] = {}
        self.last_sampled: list[int] = []

    def run(self, step: SentStep, failing: frozenset[int] = frozenset()) -> StepResult:
        """Compute a step; failing rows write garbage and say so."""
        for copy in step.copies:
            self._copy(copy)
        before = dict(self.states)
        sampled: list[int] = []
        for index, row in enumerate(step.rows):
            tokens = list(row.tokens)
            if row.feeds_from >= 0:
                tokens.append(self.last_sampled[row.feeds_from])
            assert len(tokens) == row.stop - row.start
            if index in failing:
                tokens = [token + 1_000 for token in tokens]
            last = [
                self._state(group.block_size, table, row, tokens, before)
                if isinstance(group, RecurrentState)
                else self._attend(group, table, row, tokens)
                for group, table in zip(self.groups, row.tables, strict=True)
            ]
            sampled += [-1 if index in failing else next_token(last)] * row.num_samples
        for block_id, tag in step.tags:
            if tag:
                self.tags[block_id] = tag
            else:
                self.tags.pop(block_id, None)
        self.last_sampled = sampled
        errors = {index: RowFailedError("NON_FINITE_LOGITS", "the simulation wants it so") for index in failing}
        upto = [row.start if index in failing else row.stop for index, row in enumerate(step.rows)]
        return StepResult(step.step_id, sampled, upto, errors=errors)

    def _copy(self, copy: BlockCopy) -> None:
        """Whatever the block is of: K/V or a state."""
        source, target = copy.source_id, copy.target_id
        self.slots = {place: kept for place, kept in self.slots.items() if place[0] != target}
        self.slots |= {(target, at): kept for (block_id, at), kept in self.slots.items() if block_id == source}
        self.states.pop(target, None)
        if source in self.states:
            self.states[target] = self.states[source]
        self.tags.pop(target, None)

    def _attend(self, group: KVGroup, table: list[int], row: SentRow, tokens: list[int]) -> bytes:
        size, written = group.block_size, b""
        for position, token in enumerate(tokens, row.start):
            read = []
            for other in range(first_read(group, position), position):
                block_id = table[other // size]
                assert block_id, f"position {position} reads {other} from the null block"
                slot = block_id, other % size
                assert slot in self.slots, f"position {position} reads {other}, which nobody has written"
                read.append(self.slots[slot])
            block_id = table[position // size]
            assert block_id, f"position {position} is written to the null block"
            written = digest(place(token), place(position), *read)
            self.slots[block_id, position % size] = written
            self.tags.pop(block_id, None)
        return written

    def _state(self, size: int, table: list[int], row: SentRow, tokens: list[int], before: dict[int, bytes]) -> bytes:
        """All rows start from the states before the step; each block passed keeps the state at its end."""
        state = EMPTY
        if row.start:
            block_id = table[(row.start - 1) // size]
            assert block_id, f"position {row.start} starts from the null block"
            assert block_id in before, f"position {row.start} starts from a state that nobody has left"
            state = before[block_id]
        for position, token in enumerate(tokens, row.start):
            state = digest(place(token), state)
            block_id = table[position // size]
            assert block_id, f"the state at {position} is written to the null block"
            self.states[block_id] = state
            self.tags.pop(block_id, None)
        return state

    def tagged(self) -> list[TaggedBlock]:
        """What a manager that restarts finds."""
        return [tag for block_id, data in self.tags.items() if (tag := decode_tag(block_id, data)) is not None]
