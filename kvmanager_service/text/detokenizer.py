"""From token ids to text, one token at a time.

Station: one per request, owned by its `OutputText`; made by `Tokenizer.detokenizer`.

Invariants, for the two families that `token_pieces` knows:

1. `"".join(push(id) for id in ids) + flush()` equals `tokenizer.decode(ids, skip_special_tokens=True)`.
2. No piece ends inside a character: bytes are held back until their character is complete, or known to be broken.
3. `push` takes constant time on average, however long the output is.

A tokenizer of another family gets `WindowDetokenizer`, which keeps 2 and 3, and 1 for text that its tokenizer produces.
"""

from __future__ import annotations

import codecs
from typing import Protocol

import tokenizers

from kvmanager_service.text.token_pieces import ByteFallbackPieces, ByteLevelPieces

__all__ = ["ByteFallbackDetokenizer", "ByteLevelDetokenizer", "Detokenizer", "WindowDetokenizer"]

_REPLACEMENT = "\ufffd"
_make_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Incremental decoding of one request's output."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now, possibly none."""

    def flush(self) -> str:
        """Return what is still held back; nothing may be pushed after it."""


class ByteLevelDetokenizer:
    """Decodes byte-level tokens: their bytes are one UTF-8 stream."""

    __slots__ = ("_pending", "_pieces", "_utf8")

    def __init__(self, pieces: ByteLevelPieces) -> None:
        self._pieces = pieces
        self._utf8 = _make_utf8_decoder("replace")
        self._pending = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now."""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._pending or not piece:
                return piece
            piece = piece.encode()
        text = self._utf8.decode(piece)
        self._pending = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """Return U+FFFD for an unfinished character, if there is one."""
        return self._utf8.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """Decodes byte-fallback tokens. A run of byte tokens is held back until it ends: only then its text is certain."""

    __slots__ = ("_pieces", "_run", "_strip", "_strip_left")

    def __init__(self, pieces: ByteFallbackPieces) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip = pieces.rules.strip
        self._strip_left = pieces.rules.strip_count

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now."""
        piece = self._pieces[token_id]
        if isinstance(piece, int):
            if piece >= 0:
                self._run.append(piece)
            return ""
        if self._run:
            piece = self._end_run() + piece
        return self._cut_start(piece) if self._strip_left else piece

    def flush(self) -> str:
        """Return the run of bytes that the output ended in."""
        return self._cut_start(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _cut_start(self, text: str) -> str:
        """Cut what is left to cut from the start of the whole text."""
        while self._strip_left and text.startswith(self._strip):
            text = text[len(self._strip) :]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text


class WindowDetokenizer:
    """Decodes with any tokenizer, by decoding the last few tokens with and without the new ones.

    The tokens of the piece before are decoded again as context, so that what a decoder does at the start of a text
    happens once. A piece that ends in U+FFFD may be an unfinished character; it waits for at most `MAX_HELD` tokens.

    Source: the idea of a sliding decode window is that of `tokenizers.decoders.DecodeStream` and of vLLM.
    """

    MAX_HELD = 8
    """Tokens a character may take before it is taken to be broken: the longest UTF-8 sequence has four bytes."""

    __slots__ = ("_context_text", "_num_context", "_special_ids", "_tokenizer", "_window")

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._num_context < self.MAX_HELD:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Return what is still held back."""
        return self._advance(self._tokenizer.decode(self._window))

    def _advance(self, text: str) -> str:
        """Return what `text` adds to the context; the tokens that added it become the context."""
        new = text[len(self._context_text) :]
        if new:
            del self._window[: self._num_context]
            self._context_text = self._tokenizer.decode(self._window)
        elif len(self._window) > 2 * self.MAX_HELD:
            # Tokens without text need not be decoded again and again.
            del self._window[self._num_context :]
        self._num_context = len(self._window)
        return new
