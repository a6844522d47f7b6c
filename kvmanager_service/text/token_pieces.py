"""What each token id contributes to decoded text, read off a tokenizer's decoder.

Station: made once per tokenizer by `tokenizer.Tokenizer`, shared by the detokenizers of all requests.

`tokenizers` decodes whole sequences. Two families of decoders, which together cover nearly every language model, are a
concatenation of per-token pieces, so that decoding can be incremental, exact and linear:

* byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): each token is a string of bytes, the text is their UTF-8 reading;
* byte fallback (SentencePiece: Llama 2, Mistral, Gemma): each token is a string, or one byte written `<0xE2>`; a run of
  byte tokens is their UTF-8 reading if the whole run is valid, else one U+FFFD for each byte.

Source: the decoders of the `tokenizers` library (`ByteLevel`, `ByteFallback`, `Replace`, `Fuse`, `Strip`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

__all__ = ["ByteFallbackPieces", "ByteLevelPieces", "analyse_decoder"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for.

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET: Mapping[str, int] = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token outside the alphabet (an added one) is its UTF-8."""
    try:
        return bytes([BYTE_LEVEL_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


class ByteLevelPieces(dict[int, str | bytes]):
    """Token id to its text, or to its bytes when they are not text by themselves. Filled as ids are met.

    Ids that decode to nothing (special, or unknown to the tokenizer) are the empty string.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(special_ids, ""))
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | bytes:
        """Work a piece out and keep it."""
        data = byte_level_bytes(self._tokenizer.id_to_token(token_id) or "")
        piece: str | bytes
        try:
            piece = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece


@dataclass(frozen=True, slots=True)
class FallbackRules:
    """The parts of a byte-fallback decoder that differ between models.

    Attributes:
        replacements: (old, new) pairs applied to each token, in order.
        strip: the character cut from the start of the text.
        strip_count: how many of it are cut at most.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = " "
    strip_count: int = 0


class ByteFallbackPieces(dict[int, str | int]):
    """Token id to its text, or to the byte it stands for. Filled as ids are met; special and unknown ids are empty."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int], rules: FallbackRules) -> None:
        super().__init__(dict.fromkeys(special_ids, -1))
        self.rules = rules
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | int:
        """Work a piece out and keep it; -1 is a token that is left out of decoding."""
        token = self._tokenizer.id_to_token(token_id)
        piece: str | int = -1
        if token is not None:
            for old, new in self.rules.replacements:
                token = token.replace(old, new)
            match = _BYTE_TOKEN.fullmatch(token)
            piece = int(match[1], 16) if match else token
        self[token_id] = piece
        return piece


def analyse_decoder(
    tokenizer: tokenizers.Tokenizer, decoder: Mapping[str, Any] | None, special_ids: frozenset[int]
) -> ByteLevelPieces | ByteFallbackPieces | None:
    """Recognise the family of a decoder.

    Args:
        tokenizer: the loaded tokenizer.
        decoder: the `decoder` entry of its tokenizer.json.
        special_ids: ids that decoding leaves out.

    Returns:
        The pieces of its tokens, or None for a decoder that is not a concatenation of pieces.
    """
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelPieces(tokenizer, special_ids)
    rules = _fallback_rules(steps)
    return None if rules is None else ByteFallbackPieces(tokenizer, special_ids, rules)


def _fallback_rules(steps: list[Mapping[str, Any]]) -> FallbackRules | None:
    """Read `[Replace…, ByteFallback, Fuse, Strip?]`; None when the steps are anything else."""
    kinds = [step["type"] for step in steps]
    if "ByteFallback" not in kinds:
        return None
    at = kinds.index("ByteFallback")
    tail = kinds[at + 1 :]
    if set(kinds[:at]) - {"Replace"} or tail not in (["Fuse"], ["Fuse", "Strip"]):
        return None
    replacements: list[tuple[str, str]] = []
    for step in steps[:at]:
        if "String" not in step["pattern"]:
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    if tail == ["Fuse"]:
        return FallbackRules(tuple(replacements))
    strip = steps[-1]
    return None if strip["stop"] else FallbackRules(tuple(replacements), strip["content"], strip["start"])
