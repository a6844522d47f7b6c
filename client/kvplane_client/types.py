"""What goes into a generation and what comes out of it, as plain values.

Station: the vocabulary of the package. Nothing here knows the wire.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

__all__ = [
    "ChatMessage",
    "Chunk",
    "Completion",
    "CompletionBuilder",
    "FinishReason",
    "GenerateOptions",
    "Prompt",
    "Retention",
    "RetentionLevel",
    "RetentionRange",
    "StopMatch",
    "TokenLogprob",
    "TokenLogprobs",
    "Usage",
    "branch_seed",
    "completions_of",
]


class FinishReason(enum.StrEnum):
    """Why a request produced its last token."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop string was produced."""
    LENGTH = "length"
    """max_tokens or the model's length was reached."""
    ABORT = "abort"
    """It was aborted."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: Who speaks, as the model's chat template names it: usually system, user or assistant.
        content: What was said.
    """

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, str]]
"""Text, token ids, or a conversation (a mapping with "role" and "content" serves as a ChatMessage)."""

StopMatch: TypeAlias = int | str | None
"""The stop token id, or the stop string, that ended a request; None when neither did."""


@dataclass(frozen=True, slots=True)
class RetentionLevel:
    """How long blocks are worth keeping.

    Attributes:
        priority: -100 to 100; higher is longer, 0 is usual.
        duration: Seconds for which it holds after each use of a block, at most 24 days; None for as long as it is
            cached.
    """

    priority: int
    duration: float | None = None


@dataclass(frozen=True, slots=True)
class RetentionRange:
    """Tokens of a prompt whose blocks are kept alike.

    Attributes:
        level: How long.
        start: Position of the first token.
        stop: Position after the last; None is the prompt's end.
    """

    level: RetentionLevel
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """How long which of a request's blocks are worth keeping. Where parts meet in a block, the highest counts.

    Attributes:
        ranges: Parts of the prompt, at most 64; the rest has the request's ``retention_priority``.
        decode: For the tokens it generates; None is ``retention_priority``.
    """

    ranges: tuple[RetentionRange, ...] = ()
    decode: RetentionLevel | None = None


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of every generating method. An absent one, or None, means the server's default.

    Sampling:
        temperature: At least 0; 0 is greedy. Default 1.
        top_k: Keeps the k likeliest tokens; 0 keeps all.
        top_p: Keeps the smallest set of likeliest tokens with this probability, in (0, 1].
        min_p: Drops tokens less likely than this share of the likeliest, in [0, 1].
        repetition_penalty: Above 0; 1 is none.
        presence_penalty: In [-2, 2].
        frequency_penalty: In [-2, 2].
        logit_bias: Added to the logits of token ids, each in [-100, 100].
        seed: Makes random sampling repeatable, in [0, 2**64). Without one the client draws it, so that an interrupted
            stream goes on as it would have.
        logprobs: How many likeliest tokens to report beside each produced one.

    Stopping:
        max_tokens: The most tokens to produce. Default: as many as the model's length allows.
        min_tokens: Tokens before anything but max_tokens may end the request.
        stop: A string, or up to 16, that end the output; cut from it unless include_stop.
        stop_token_ids: Up to 64 token ids that end the output as an end-of-sequence token does.
        ignore_eos: Goes on after the model's end-of-sequence tokens.
        include_stop: Keeps a matched stop string at the end of the text.

    Request:
        n: How many outputs to produce for the prompt, 1 to 128; the prompt is computed once. Chunks say by ``index``
            which output they are of. Output i is what a request of its own gets with :func:`branch_seed` of the seed
            and i.
        priority: Under the priority policy a lower value is served first.
        retention_priority: How long its blocks are worth keeping, -100 to 100; higher is longer. Only the manager's
            eviction policy "priority" asks for it.
        retention: The same for parts of the prompt and for the output, and for how long; see :class:`Retention`.
        cache_salt: Only requests with the same salt share cached blocks.
        tenant: Whose request it is, at most 256 characters: under the fair policy each tenant gets its share,
            and a manager may keep tenants' cached blocks apart.
        adapter: The LoRA adapter it runs with, by the name it was loaded under (:meth:`AsyncClient.load_adapter`);
            empty or None is the model itself.
        request_id: Names the request, at most 256 characters. Default: a random one.
        deadline: Seconds from now within which the request, retries included, must have ended; above a thousand million
            there is no limit. Default: the client's timeout.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    logprobs: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    n: int | None
    priority: int | None
    retention_priority: int | None
    retention: Retention | None
    cache_salt: str | None
    tenant: str | None
    adapter: str | None
    request_id: str | None
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one request.

    Attributes:
        prompt_tokens: Tokens in the prompt.
        completion_tokens: Tokens produced.
        cached_tokens: Prompt tokens found in the prefix cache when the request was first admitted.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its natural log probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probabilities at one output position.

    Attributes:
        logprob: Natural log probability of the produced token.
        top: The likeliest tokens, likeliest first.
    """

    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one request's output.

    Attributes:
        request_id: The request, by the id it was submitted under.
        text: The next piece of text; may be empty while the server holds some back.
        token_ids: The next tokens. Their text may come in a later chunk.
        logprobs: One entry for each of token_ids when they were asked for, else empty.
        finish_reason: Set in the last chunk of an output only.
        stop_match: What ended the output when finish_reason is STOP.
        usage: Set in the first and in the last chunk of an output. The prompt's tokens are counted in each.
        index: Which of the request's ``n`` outputs it is a piece of, from 0.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_match: StopMatch = None
    usage: Usage | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output of a request; the attributes are those of :class:`Chunk`, put together."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_match: StopMatch
    usage: Usage
    index: int = 0


SEED_STRIDE = 0x9E3779B97F4A7C15


def branch_seed(seed: int, index: int) -> int:
    """Returns the seed of output ``index`` of a request with several: a request of its own with it gets the same."""
    return (seed + index * SEED_STRIDE) % 2**64


class CompletionBuilder:
    """Puts the chunks of one request together."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        """Adds the next chunk."""
        self._chunks.append(chunk)

    def build(self) -> Completion:
        """Returns the completion.

        Invariants:
            The last chunk that was added has a finish reason and usage.
        """
        last = self._chunks[-1]
        assert last.finish_reason is not None, "build() needs the last chunk"
        assert last.usage is not None, "the last chunk carries usage"
        return Completion(
            request_id=last.request_id,
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=tuple(token_id for chunk in self._chunks for token_id in chunk.token_ids),
            logprobs=tuple(entry for chunk in self._chunks for entry in chunk.logprobs),
            finish_reason=last.finish_reason,
            stop_match=last.stop_match,
            usage=last.usage,
            index=last.index,
        )


async def completions_of(chunks: AsyncIterable[Chunk], num_outputs: int) -> list[Completion]:
    """Waits for the end of a request's chunks and returns its outputs, as far as they are among these."""
    builders = [CompletionBuilder() for _ in range(num_outputs)]
    async for chunk in chunks:
        builders[chunk.index].add(chunk)
    return [builder.build() for builder in builders]
