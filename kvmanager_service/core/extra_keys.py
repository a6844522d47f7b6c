"""What decides a block's K/V beside its tokens: who may share it, which adapter computed it, what stands behind tokens.

Station: `NewRequest` carries these values, `RequestBook` and `SequencePool` have them checked, `Request` keeps them
encoded, and `KVCacheManager` puts them into hashes and contents.

What holds for a whole request (salt, tenant, LoRA adapter) is a key of its first block only: a block's identity holds
that of all before it, so no later one can be shared either, and neither tags nor hashes grow with the prompt. What
stands behind some tokens (an image, an embedding) is a key of every block that it covers, with its place relative to
the block's first token.

Source: vLLM's extra keys of block hashes, for which keys there are; the domains and places are ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvmanager_service.core.block_hash import KeyDomain, encode_extra_key, encode_extra_keys
from kvmanager_service.core.errors import invalid_parameter

MIN_DIGEST_BYTES = 16
MAX_DIGEST_BYTES = 64
MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """The adapter that a request runs with.

    Attributes:
        lora_id: names it, 1 to 256 characters.
        revision: names its weights, at most 256 characters: the same id with other weights computes other K/V.
    """

    lora_id: str
    revision: str = ""


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Tokens that stand for something else, such as an image, or an embedding that is handed in.

    Attributes:
        domain: KeyDomain.MULTIMODAL_ITEM or KeyDomain.PROMPT_EMBEDDING.
        digest: a hash of what they stand for, 16 to 64 bytes; equal only for equal content.
        offset: position of the first of them in the sequence, at least 0.
        length: how many they are, at least 1; they end within the prompt, or within the tokens that they come with.
    """

    domain: KeyDomain
    digest: bytes
    offset: int
    length: int

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.offset + self.length


def check_extra_keys(lora: LoraAdapter | None, spans: Sequence[PromptSpan], num_prompt_tokens: int) -> None:
    """Check what a request brings.

    Raises:
        InvalidRequestError: a name or digest is too short or too long, or spans are not in order, overlap or end
            beyond the prompt.
    """
    if lora is not None:
        if not 1 <= len(lora.lora_id) <= MAX_NAME_CHARS:
            raise invalid_parameter("lora.lora_id", f"1 to {MAX_NAME_CHARS} characters", len(lora.lora_id))
        if len(lora.revision) > MAX_NAME_CHARS:
            raise invalid_parameter("lora.revision", f"at most {MAX_NAME_CHARS} characters", len(lora.revision))
    check_spans(spans, 0, num_prompt_tokens)


def check_spans(spans: Sequence[PromptSpan], start: int, stop: int) -> None:
    """Check what is said to stand behind tokens [start, stop) of a sequence, or some of them.

    Raises:
        InvalidRequestError: a digest is too short or too long, or spans are not in order, overlap, or have other
            tokens.
    """
    position, which = start, "the first of the tokens that they come with"
    for index, span in enumerate(spans):
        field = f"spans[{index}]"
        if span.domain not in (KeyDomain.MULTIMODAL_ITEM, KeyDomain.PROMPT_EMBEDDING):
            raise invalid_parameter(f"{field}.domain", "MULTIMODAL_ITEM or PROMPT_EMBEDDING", span.domain.name)
        if not MIN_DIGEST_BYTES <= len(span.digest) <= MAX_DIGEST_BYTES:
            raise invalid_parameter(
                f"{field}.digest",
                f"{MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} bytes",
                len(span.digest),
                "SHA-256 has 32",
            )
        if span.length < 1:
            raise invalid_parameter(f"{field}.length", "at least 1 token", span.length)
        if span.offset < position:
            raise invalid_parameter(
                f"{field}.offset", f"at least {position} ({which})", span.offset, "they come in order, without overlap"
            )
        position, which = span.stop, "where the span before it ends"
        if position > stop:
            raise invalid_parameter(
                f"{field}.length",
                f"an end at {stop}, where the known tokens end, or before",
                f"one at {position}",
                "bring its tokens along with it",
            )


def request_keys(salt: str, tenant: str | None, lora: LoraAdapter | None) -> bytes:
    """The keys of a request's first block.

    Args:
        salt: empty is none.
        tenant: whom alone its blocks are for; None shares them.
        lora: None is the model itself.
    """
    keys: list[tuple[KeyDomain, bytes]] = []
    if salt:
        keys.append((KeyDomain.CACHE_SALT, salt.encode()))
    if tenant is not None:
        keys.append((KeyDomain.TENANT, tenant.encode()))
    if lora is not None:
        keys.append((KeyDomain.LORA_ID, lora.lora_id.encode()))
        keys.append((KeyDomain.LORA_REVISION, lora.revision.encode()))
    return encode_extra_keys(keys) if keys else b""


class SpanKeys:
    """The spans of one sequence, found by the block they lie in. Never changed: its branches have the same object.

    What it costs to ask for a block's keys follows the spans in it: one that none reaches costs a bisection, and in a
    run of blocks nothing.

    Args:
        spans: in order, without overlap, at least one.
    """

    __slots__ = ("_spans", "_stops")

    def __init__(self, spans: Sequence[PromptSpan]) -> None:
        self._spans = list(spans)
        self._stops = [span.stop for span in spans]

    def __len__(self) -> int:
        return len(self._spans)

    def and_then(self, spans: Sequence[PromptSpan]) -> SpanKeys:
        """These, and those of tokens that became known since."""
        return SpanKeys([*self._spans, *spans])

    def across(self, position: int) -> PromptSpan | None:
        """The span that begins before a position and ends behind it."""
        index = bisect_right(self._stops, position)
        if index < len(self._spans) and self._spans[index].offset < position:
            return self._spans[index]
        return None

    def before(self, position: int) -> SpanKeys | None:
        """Those of the first tokens, up to a position that none lies across."""
        count = bisect_right(self._stops, position)
        if count == len(self._spans):
            return self
        return SpanKeys(self._spans[:count]) if count else None

    def beginning_before(self, position: int) -> list[PromptSpan]:
        """Those that begin before a position, in order; the last of them may end behind it."""
        count = bisect_right(self._stops, position)
        if count < len(self._spans) and self._spans[count].offset < position:
            count += 1
        return self._spans[:count]

    def keys_of(self, start: int, stop: int) -> bytes:
        """The keys of the block that holds tokens [start, stop). Empty when no span reaches into it.

        Each is the span's place relative to `start` (4 bytes, little-endian, negative when it began before), its length
        (4 bytes) and its digest.
        """
        index = bisect_right(self._stops, start)
        if index == len(self._spans) or self._spans[index].offset >= stop:
            return b""
        return self.keys_of_blocks(start, stop, stop - start)[0]

    def keys_of_blocks(self, start: int, stop: int, block_size: int) -> list[bytes]:
        """The keys, as `keys_of`, of each block of block_size tokens that tokens [start, stop) fill."""
        keys = [b""] * ((stop - start) // block_size)
        for index in range(bisect_right(self._stops, start), len(self._spans)):
            span = self._spans[index]
            if span.offset >= stop:
                break
            length_and_digest = span.length.to_bytes(4, "little") + span.digest
            first = max(0, (span.offset - start) // block_size)
            last = min(len(keys) - 1, (span.stop - 1 - start) // block_size)
            for block in range(first, last + 1):
                place = span.offset - start - block * block_size
                keys[block] += encode_extra_key(
                    span.domain, place.to_bytes(4, "little", signed=True) + length_and_digest
                )
        return keys


def first_difference(mine: SpanKeys | None, yours: SpanKeys | None, num_tokens: int) -> int:
    """The first of num_tokens tokens that something else stands behind in two sequences; -1 where there is none."""
    if mine is yours:
        return -1
    mine_before = [] if mine is None else mine.beginning_before(num_tokens)
    yours_before = [] if yours is None else yours.beginning_before(num_tokens)
    for my_span, your_span in zip(mine_before, yours_before, strict=False):
        if my_span is not your_span and my_span != your_span:
            return min(my_span.offset, your_span.offset)
    more = mine_before[len(yours_before) :] or yours_before[len(mine_before) :]
    return more[0].offset if more else -1
