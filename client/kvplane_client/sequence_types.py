"""What an engine says to its pool of block tables, and what it is told: the values of the block-table API.

Station: values only; :mod:`kvplane_client.sequences` sends and returns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvplane_client.errors import KvPlaneError

__all__ = [
    "BlockShortage",
    "CloseSequence",
    "CommitSequence",
    "ExtendSequence",
    "ForkSequence",
    "MultimodalItem",
    "OpenSequence",
    "PromptEmbedding",
    "SequenceDone",
    "SequenceOperation",
    "SequencePoolInfo",
    "SequenceResult",
    "SequenceTable",
    "TokenSpan",
]


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """Tokens that are the placeholders of an image or the like. They are shared with the same item alone.

    Attributes:
        digest: A hash of the item and of what decides how it is encoded, such as SHA-256: an equal one is taken for
            equal content. 16 to 64 bytes.
        offset: The position of the first of its tokens in the whole sequence.
        length: How many they are.
    """

    digest: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PromptEmbedding:
    """Tokens in whose place embeddings are handed in. The attributes are those of :class:`MultimodalItem`."""

    digest: bytes
    offset: int
    length: int


TokenSpan: TypeAlias = MultimodalItem | PromptEmbedding


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Begin a sequence. Answered with its table.

    Attributes:
        sequence_id: Names it.
        token_ids: What it begins with; at least one.
        num_slots: How many tokens the table must hold; 0 for those given.
        priority: The highest value gives way first; among equals, whoever was opened last.
        cache_salt: Separates prefix caches.
        lora_id: The adapter it runs with.
        lora_revision: The adapter's weights.
        spans: What its tokens stand for beside their ids: in order, and apart from each other.
        tenant: Whose it is; counts where ``info.isolate_tenants`` is set.
        is_resumed: It was open before and had to give way; the pool's ``prefix_queries`` and ``prefix_hits`` leave it
            out.
    """

    sequence_id: str
    token_ids: Sequence[int]
    num_slots: int = 0
    priority: int = 0
    cache_salt: str = ""
    lora_id: str = ""
    lora_revision: str = ""
    is_resumed: bool = False
    spans: Sequence[TokenSpan] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ExtendSequence:
    """Make room for more tokens, and the slots that are not computed yet the sequence's own. Answered with its table.

    What is committed stands, whatever becomes of the rest: when blocks run short, and when it is refused.

    Attributes:
        sequence_id: Whose.
        token_ids: Tokens that became known since.
        num_slots: How many tokens the table must hold; 0 for all known ones.
        num_computed_tokens: Commits first, as :class:`CommitSequence` does: an engine's step in one operation. 0
            commits nothing.
        spans: What these tokens stand for beside their ids; offsets are of the whole sequence.
    """

    sequence_id: str
    token_ids: Sequence[int] = ()
    num_slots: int = 0
    num_computed_tokens: int = 0
    spans: Sequence[TokenSpan] = ()


@dataclass(frozen=True, slots=True)
class CommitSequence:
    """Say up to where the engine's memory holds a sequence: its full blocks can be hit from now on."""

    sequence_id: str
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class ForkSequence:
    """Begin a sequence that shares another one's blocks; whoever extends first copies. Answered with its table.

    It has the other's adapter, salt, tenant, and the spans of the tokens in common.

    Attributes:
        sequence_id: The one that is branched.
        new_sequence_id: Names the branch.
        num_tokens: How many tokens they have in common, not ending within a span; 0 for all that was committed.
        priority: The branch's.
    """

    sequence_id: str
    new_sequence_id: str
    num_tokens: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class CloseSequence:
    """End a sequence. What it holds stays cached until the blocks are needed."""

    sequence_id: str


SequenceOperation: TypeAlias = OpenSequence | ExtendSequence | CommitSequence | ForkSequence | CloseSequence


@dataclass(frozen=True, slots=True)
class SequenceTable:
    """A sequence's block table after an operation.

    Attributes:
        block_ids: The whole table: token ``i`` belongs into block ``block_ids[i // block_size]``. Read only: it is the
            pool's own list, which later operations on the sequence (of the same batch, too) bring up to date; copy it
            to keep it as it is.
        num_computed_tokens: How many of its tokens have K/V in these blocks.
        copies: Pairs of source and target block, to copy whole and in order before anything is written.
        first_block: Where in the table the operation changed it; entries before that are as they were.
    """

    block_ids: Sequence[int]
    num_computed_tokens: int
    copies: tuple[tuple[int, int], ...] = ()
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class BlockShortage:
    """Too few blocks are free; nothing has changed but for what an :class:`ExtendSequence` committed first.

    Attributes:
        needed_blocks: How many the operation takes.
        free_blocks: How many are free.
        victim_ids: Sequences that should give way, first to last: close them, and ask again. Empty when none should:
            the asking sequence comes last itself, or those behind it do not free enough. Then wait until another one
            closes, or close it.
    """

    needed_blocks: int
    free_blocks: int
    victim_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SequenceDone:
    """An operation succeeded that has no table to show."""


SequenceResult: TypeAlias = SequenceTable | BlockShortage | SequenceDone | KvPlaneError


@dataclass(frozen=True, slots=True)
class SequencePoolInfo:
    """A pool at one moment; see ``SequencePoolInfo`` in the contract. Times are in seconds."""

    pool_id: str
    num_blocks: int
    block_size: int
    free_blocks: int
    cached_blocks: int
    num_sequences: int
    prefix_queries: int
    prefix_hits: int
    lease_seconds: float
    lease_remaining_seconds: float
    last_batch_id: int
    max_spans: int = 0
    isolate_tenants: bool = False
