"""A tokenizer: text to token ids, and detokenizers for the way back.

Station: part of `text_model.TextModel`, built from the tokenizer.json that the executor ships. Long texts are encoded
in a thread (`tokenizers` lets go of the interpreter lock for a batch), so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping
from typing import Any

import tokenizers

from kvmanager_service.core.errors import InvalidRequestError
from kvmanager_service.text.detokenizer import (
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from kvmanager_service.text.token_pieces import (
    BYTE_LEVEL_ALPHABET,
    ByteFallbackPieces,
    ByteLevelPieces,
    analyse_decoder,
)

__all__ = ["INLINE_CHARS", "Tokenizer"]

INLINE_CHARS = 2_000
"""Texts up to this length are encoded on the loop: under a millisecond, and a thread would cost a tenth of one."""

UNKNOWN_RATIO = 4
"""Bytes of text per byte of token text, at most, for tokenizers that may shrink a text before they cut it up."""

_KEEPING_NORMALIZERS = frozenset({"Prepend", "Replace", "Sequence"})


class Tokenizer:
    """One model's tokenizer. Stateless after construction, but for a cache of token pieces.

    Attributes:
        longest_token_bytes: most bytes of text that one token can stand for.
    """

    def __init__(self, content: bytes) -> None:
        """Load a tokenizer.json; takes a second for a large vocabulary.

        Raises:
            ValueError: the content is not a tokenizer.json that `tokenizers` can read.
        """
        config = json.loads(content)
        self._tokenizer = _load(content)
        self._special_ids = frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._pieces = analyse_decoder(self._tokenizer, config["decoder"], self._special_ids)
        self.longest_token_bytes = self._measure_longest(config)

    async def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int) -> array[int]:
        """Cut text into tokens.

        Args:
            text: any text.
            add_special_tokens: whether the model's special tokens (such as BOS) are added.
            max_tokens: the model's length; a text that cannot be that short is refused before it is cut.

        Returns:
            The token ids. They may still be more than `max_tokens`.

        Raises:
            InvalidRequestError: the text is too long for the model whatever its tokens are.
        """
        self.check_length(text, max_tokens)
        if len(text) <= INLINE_CHARS:
            return array("i", self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        return await asyncio.to_thread(self._encode_batch, text, add_special_tokens)

    def check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text that needs more than `max_tokens` tokens even if each were the longest there is.

        Raises:
            InvalidRequestError: it does.
        """
        limit = max_tokens * self.longest_token_bytes
        if len(text) * 4 <= limit:
            return
        size = len(text) if len(text) > limit else len(text.encode())
        if size > limit:
            raise InvalidRequestError(
                "PROMPT_TOO_LONG",
                f"prompt: expected a text of at most {limit} bytes, which is {max_tokens} tokens of the longest kind,"
                f" got at least {size}; shorten it",
                field="prompt",
                max_model_len=max_tokens,
                max_bytes=limit,
            )

    def detokenizer(self) -> Detokenizer:
        """Make a detokenizer for one request's output."""
        if isinstance(self._pieces, ByteLevelPieces):
            return ByteLevelDetokenizer(self._pieces)
        if isinstance(self._pieces, ByteFallbackPieces):
            return ByteFallbackDetokenizer(self._pieces)
        return WindowDetokenizer(self._tokenizer, self._special_ids)

    def _encode_batch(self, text: str, add_special_tokens: bool) -> array[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("i", encoding.ids)

    def _measure_longest(self, config: Mapping[str, Any]) -> int:
        """Return the most bytes of text one token can stand for, generously where a normalizer may drop some."""
        longest = max((_text_bytes(token) for token in self._tokenizer.get_vocab()), default=1)
        return longest if _keeps_every_byte(config) else longest * UNKNOWN_RATIO


def _load(content: bytes) -> tokenizers.Tokenizer:
    try:
        loaded = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError("tokenizer.json: expected one that the tokenizers library can read") from error
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _text_bytes(token: str) -> int:
    """Return how many bytes a token has; each character of the byte-level alphabet is one."""
    return len(token) if all(char in BYTE_LEVEL_ALPHABET for char in token) else len(token.encode())


def _keeps_every_byte(config: Mapping[str, Any]) -> bool:
    """Whether each byte of a text is in some token: no unknown token, and no normalizer that drops or merges."""
    model, normalizer = config["model"], config["normalizer"]
    if model.get("type") != "BPE" or (model.get("unk_token") is not None and not model.get("byte_fallback")):
        return False
    kinds = set[str]() if normalizer is None else {normalizer["type"], *_child_types(normalizer)}
    return kinds <= _KEEPING_NORMALIZERS


def _child_types(normalizer: Mapping[str, Any]) -> list[str]:
    return [child["type"] for child in normalizer.get("normalizers", ())]
